"""`pipeline demo`: show, record, trim, merge, import and export demonstrations."""

import argparse
from pathlib import Path

from pipeline import files
from pipeline.cli.parser import Parser, option
from pipeline.errors import DemonstrationError, SettingsError

_TABLES = "FILE.csv, FILE.jsonl, FILE.parquet or minari:DATASET"
_MINARI = "minari:"
_IMPORT = """\
The table has one row for each action, in the order of time:
  obs0.0,obs0.1,continuous.0,reward,terminated,truncated,episode
  0.31,-0.2,0.75,1,0,0,1

Give columns with other names by --column, or under `columns` in the specification file:
  pipeline demo import play.csv --spec gymnasium:CartPole-v1 -o play.demo \\
      --column obs0=x,speed,angle,turn --column discrete=key --column episode=game

A specification file describes observations and actions:
  behavior: CartPole-v1
  observations: [{name: state, shape: [4]}]
  actions: {continuous: 0, discrete: [2]}
  columns: {obs0: [x, speed, angle, turn], discrete: key, episode: game}

docs/how-to/demonstrations.md shows every step from a table to a trained policy.
"""


def add_options(parser: Parser) -> None:
    """Add the subcommands of `pipeline demo`."""
    command = parser.add_command("info", "describe a .demo file", info)
    command.add_argument("file", type=Path, help="the .demo file")
    option(command, "--plot PNG", "draw a histogram of the episodes' returns", type=Path)
    text = "record episodes of a built-in simulator's expert"
    command = parser.add_command(
        "record", text, lambda given: record(given.name, given.output, given.episodes, given.seed)
    )
    command.add_argument("name", help="a built-in simulator that `pipeline env list` shows")
    _add_output(command, "the .demo file to write")
    option(command, "--episodes N", "number of episodes", default=20)
    option(command, "--seed N", "seed of the simulator; default: %(default)s", default=0)
    text = "make a .demo file from a CSV, JSON lines or Parquet file, or from a Minari dataset"
    command = parser.add_command("import", text, import_)
    command.epilog, command.formatter_class = _IMPORT, argparse.RawDescriptionHelpFormatter
    command.add_argument("source", help=_TABLES)
    _add_output(command, "the .demo file to write")
    text = (
        "observations and actions: a .yaml or .json file, a .demo file, or an environment such as "
        "build/balance_ball or gymnasium:CartPole-v1; not needed for a Minari dataset"
    )
    option(command, "--spec FILE|ENV", text)
    option(command, "--behavior NAME", "name of the behavior; default: the behavior of --spec")
    text = (
        "columns of a field (obs0, continuous, discrete, reward, terminated, truncated, episode, "
        "mask0), if the columns have other names than the field; may be repeated"
    )
    option(command, "--column FIELD=COLUMN,...", text, action="append", default=[])
    text = (
        "divide the recorded continuous actions by X: one number for all actions, or one number "
        "for each action"
    )
    option(command, "--action-scale X[,X...]", text, type=scales)
    text = "write a .demo file as a table, a Minari dataset or a specification file"
    command = parser.add_command("export", text, export)
    command.add_argument("file", type=Path, help="the .demo file")
    _add_output(command, f"{_TABLES}; FILE.yaml gets only the behavior's specification")
    text = "the environment that gives the dataset its spaces and environment id"
    option(command, "--env gymnasium:ID", f"for a Minari dataset: {text}")
    text = "join several .demo files into one"
    command = parser.add_command("merge", text, merge)
    text = ".demo files or folders, which are joined in this order"
    command.add_argument("files", nargs="+", type=Path, help=text)
    _add_output(command, "the .demo file to write")
    text = "behavior name to write, if the files' behaviors have different names"
    option(command, "--behavior NAME", text)
    command = parser.add_command("trim", "keep some episodes of a .demo file", trim)
    command.add_argument("file", type=Path, help="the .demo file")
    _add_output(command, "the .demo file to write")
    option(command, "--episodes 1-10,15", "keep these episodes, counted from 1", type=numbers)
    option(command, "--min-return R", "keep episodes with at least this return", type=float)
    option(command, "--max-return R", "keep episodes with at most this return", type=float)
    option(command, "--best N", "keep the N episodes with the greatest returns", type=positive)


def _add_output(command: argparse.ArgumentParser, text: str) -> None:
    option(command, "-o --output FILE", text, required=True)


def numbers(text: str) -> list[int]:
    """Return the whole numbers in a text such as `1-3,7`."""
    values: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        # argparse turns the ValueError of int() into an error about the option.
        values += range(int(first), int(last or first) + 1)
    return values


def scales(text: str) -> tuple[float, ...]:
    """Return the numbers in a text such as `30,1`."""
    return tuple(float(part) for part in text.split(","))


def positive(text: str) -> int:
    """Return the whole number in a text; raise ValueError if it is less than 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def info(arguments: argparse.Namespace) -> str:
    """Return a description of a .demo file; with `--plot`, also draw a histogram of returns."""
    from pipeline.demos.demo_file import describe, read_demo

    demo = read_demo(arguments.file)
    text = describe(demo)
    if arguments.plot is None:
        return text
    from pipeline.evaluation.plots import plot_returns

    # `returns` gives only the returns of ended episodes, because the return of an unfinished
    # episode cannot be compared with them.
    returns = demo.returns()
    if not returns:
        text = f"{arguments.file}: has no ended episode, so there is no return to plot"
        raise DemonstrationError(text)
    plot_returns(arguments.plot, returns, title=f"{demo.behavior_name}, {arguments.file.name}")
    return f"{text}\nWrote {arguments.plot}"


def record(name: str, target: Path, episodes: int, seed: int) -> str:
    """Play `episodes` episodes of a simulator's expert, and write them to `target`."""
    # The function of the stage `demos` is used, so that the stage and this command write equal
    # files.
    from pipeline.dag.stages.demos import write_episodes
    from pipeline.envs.in_process import InProcessEnvironment
    from pipeline.simulators import registry

    act = registry.expert(name)
    # No executable is packed: recording in this process needs neither a port nor a build.
    with InProcessEnvironment(registry.make(name, seed=seed)) as env:
        env.reset()
        metrics = write_episodes(env, act, target, episodes=episodes)
    return (
        f"Wrote {target}: {metrics['episodes']} episodes, {metrics['steps']} steps, "
        f"mean return {metrics['mean_return']:.3f}"
    )


def import_(arguments: argparse.Namespace) -> str:
    """Make a .demo file from a table or a Minari dataset, and return lines on what was done."""
    from pipeline.demos.behavior_spec import spec_of
    from pipeline.demos.table_import import import_table
    from pipeline.demos.tables import read_table

    source, columns = arguments.source, _columns(arguments.column)
    chosen = None
    if arguments.spec is not None:
        from pipeline.api import make_env

        chosen = spec_of(arguments.spec, make_env, arguments.behavior)
    if source.startswith(_MINARI):
        from pipeline.demos.minari_datasets import read_dataset

        dataset = source.removeprefix(_MINARI)
        table, name, spec = read_dataset(dataset, None if chosen is None else chosen[1])
        # A Minari dataset contains its spaces; other tables need a specification.
        chosen = chosen or (arguments.behavior or name, spec, {})
    elif chosen is not None:
        table = read_table(Path(source))
    else:
        raise SettingsError(
            f"{source}: does not describe its columns; give a specification file, a .demo file or "
            "an environment, such as --spec gymnasium:CartPole-v1"
        )
    behavior, spec, named = chosen
    return "\n".join(
        import_table(
            table,
            behavior,
            spec,
            arguments.output,
            # The command line wins over the specification file.
            columns={**named, **columns},
            # Without the option, the scale of all continuous actions is 1.
            action_scale=arguments.action_scale or (1.0,),
        )
    )


def _columns(texts: list[str]) -> dict[str, list[str]]:
    columns = {}
    for text in texts:
        name, _, value = text.partition("=")
        columns[name] = [column.strip() for column in value.split(",")]
        if not name or not all(columns[name]):
            raise SettingsError(
                f"--column {text}: needs the form FIELD=COLUMN,COLUMN, such as reward=score"
            )
    return columns


def export(arguments: argparse.Namespace) -> str:
    """Write a .demo file as a table, a Minari dataset or a specification."""
    from pipeline.demos.behavior_spec import spec_file
    from pipeline.demos.demo_file import read_demo
    from pipeline.demos.tables import table_of, write_table
    from pipeline.settings.yaml_file import dump_yaml

    demo = read_demo(arguments.file)
    target = arguments.output
    # A target in YAML gets a specification, which `demo import --spec` reads.
    if target.suffix in (".yaml", ".yml"):
        files.write_whole(target, dump_yaml(spec_file(demo.behavior_name, demo.spec)))
        return f"wrote         {target}: the specification of {demo.behavior_name}"
    read = f"read          {arguments.file}: {len(demo)} pairs"
    if str(target).startswith(_MINARI):
        from pipeline.demos.minari_datasets import write_dataset

        dataset = str(target).removeprefix(_MINARI)
        return "\n".join([read, *write_dataset(demo, dataset, arguments.env)])
    if arguments.env is not None:
        raise SettingsError(f"--env {arguments.env}: is only for minari:DATASET; leave it out")
    fields, steps = table_of(demo)
    write_table(fields, target)
    return "\n".join([read, *steps, f"wrote         {target}"])


def merge(arguments: argparse.Namespace) -> str:
    """Join several .demo files into one, and return a line for each file."""
    from pipeline.demos.demonstrations import merge_demos

    return "\n".join(merge_demos(arguments.files, arguments.output, behavior=arguments.behavior))


def trim(arguments: argparse.Namespace) -> str:
    """Write the episodes that meet every condition to a new file; return lines on the episodes."""
    from pipeline.demos.demonstrations import trim_demo

    given = (
        (key, getattr(arguments, key)) for key in ("episodes", "min_return", "max_return", "best")
    )
    conditions = {key: value for key, value in given if value is not None}
    if not conditions:
        raise SettingsError(
            "no condition says which episodes to keep; give --episodes, --min-return, --max-return "
            "or --best"
        )
    return "\n".join(trim_demo(arguments.file, arguments.output, **conditions))
