"""`pipeline demo`: look at demonstrations, record them, change them, and bring them in and out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.commands.parser import Parser, option
from pipeline.errors import DemonstrationError, SettingsError

if TYPE_CHECKING:
    from pipeline.envs.base import BaseEnv

_TABLES = "FILE.csv, FILE.jsonl, FILE.parquet or minari:DATASET"
_MINARI = "minari:"
_IMPORT = """\
one row for each action, in the order in which they were taken:
  obs0.0,obs0.1,continuous.0,reward,terminated,truncated,episode
  0.31,-0.2,0.75,1,0,0,1

Columns with other names are named by --column, or under `columns` in the specification file:
  pipeline demo import play.csv --spec gymnasium:CartPole-v1 -o play.demo \\
      --column obs0=x,speed,angle,turn --column discrete=key --column episode=game

A specification file says what the environment would:
  behavior: CartPole-v1
  observations: [{name: state, shape: [4]}]
  actions: {continuous: 0, discrete: [2]}
  columns: {obs0: [x, speed, angle, turn], discrete: key, episode: game}

docs/how-to/demonstrations.md has the whole way from a table to a trained policy.
"""


def add_options(parser: Parser) -> None:
    """Add the subcommands."""
    command = parser.add_command("info", "say what a .demo file holds", info)
    command.add_argument("file", type=Path, help="the .demo file")
    option(command, "--plot PNG", "draw a histogram of the episodes' returns", type=Path)
    command = parser.add_command(
        "record",
        "record a built-in simulator's expert",
        lambda arguments: record(
            arguments.name, arguments.output, episodes=arguments.episodes, seed=arguments.seed
        ),
    )
    command.add_argument("name", help="one that `pipeline env list` shows")
    _add_output(command, "the .demo file to write")
    option(command, "--episodes N", "", default=20)
    option(command, "--seed N", "default: %(default)s", default=0)
    _add_import(parser)
    text = "write a .demo file as CSV, JSON lines, Parquet or Minari dataset, or its specification"
    command = parser.add_command("export", text, export)
    command.add_argument("file", type=Path, help="the .demo file")
    _add_output(command, f"{_TABLES}; FILE.yaml for its specification")
    text = "of a Minari dataset: the environment whose spaces and name it has"
    option(command, "--env gymnasium:ID", text)
    text = "write several .demo files as one, which trains as they do"
    command = parser.add_command("merge", text, merge)
    command.add_argument("files", nargs="+", type=Path, help="in this order; of a folder, all")
    _add_output(command, "the .demo file to write")
    option(command, "--behavior NAME", "whose it is, where the files name different ones")
    command = parser.add_command("trim", "keep some episodes of a .demo file", trim)
    command.add_argument("file", type=Path, help="the .demo file")
    _add_output(command, "the .demo file to write")
    option(command, "--episodes 1-10,15", "these, from 1 on", type=numbers)
    option(command, "--min-return R", "least return of an episode", type=float)
    option(command, "--max-return R", "greatest return of an episode", type=float)
    option(command, "--best N", "the N greatest returns", type=positive)


def _add_import(parser: Parser) -> None:
    text = "make a .demo file of a CSV, JSON lines or Parquet file or a Minari dataset"
    command = parser.add_command("import", text, import_)
    command.epilog, command.formatter_class = _IMPORT, argparse.RawDescriptionHelpFormatter
    command.add_argument("source", help=_TABLES)
    _add_output(command, "the .demo file to write")
    text = (
        "what is observed and done: a .yaml or .json file, a .demo file, or an environment such as "
        "build/balance_ball or gymnasium:CartPole-v1; a Minari dataset has its own"
    )
    option(command, "--spec FILE|ENV", text)
    option(command, "--behavior NAME", "name of the behavior; default: that of --spec")
    text = (
        "columns of a field (obs0, continuous, discrete, reward, terminated, truncated, episode, "
        "mask0) where they are not called so; may be repeated"
    )
    option(command, "--column FIELD=COLUMN,...", text, action="append", default=[])
    text = "what a recorded continuous action of 1 means here: divide by X, one for all or each"
    option(command, "--action-scale X[,X...]", text, type=scales)


def _add_output(command: argparse.ArgumentParser, text: str) -> None:
    option(command, "-o --output FILE", text, required=True)


def numbers(text: str) -> list[int]:
    """Return the numbers of `1-3,7`."""
    values: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        values += range(int(first), int(last or first) + 1)
    return values


def scales(text: str) -> tuple[float, ...]:
    """Return the numbers of `30,1`."""
    return tuple(float(part) for part in text.split(","))


def positive(text: str) -> int:
    """Return a whole number from 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def info(arguments: argparse.Namespace) -> str:
    """Describe a .demo file, and draw the returns of its episodes."""
    from pipeline.protocol.demo import describe, read_demo

    demo = read_demo(arguments.file)
    text = describe(demo)
    if arguments.plot is None:
        return text
    from pipeline.evaluation.plots import plot_returns

    # Only whole episodes: the return of a truncated one says little.
    returns = demo.returns()
    if not returns:
        raise DemonstrationError(
            f"{arguments.file}: no episode has ended in it, so there is no return to plot"
        )
    plot_returns(arguments.plot, returns, title=f"{demo.behavior_name}, {arguments.file.name}")
    return f"{text}\nWrote {arguments.plot}"


def record(name: str, target: Path, *, episodes: int, seed: int) -> str:
    """Write `episodes` episodes of the expert to `target`, played in this process."""
    from pipeline.envs.in_process import InProcessEnvironment
    from pipeline.simulators import registry
    from pipeline.stages.demos import write_episodes

    act = registry.expert(name)
    # In this process, without a packed executable: recording needs neither a port nor a build.
    with InProcessEnvironment(registry.make(name, seed=seed)) as env:
        env.reset()
        metrics = write_episodes(env, act, target, episodes=episodes)
    return (
        f"Wrote {target}: {metrics['episodes']} episodes, {metrics['steps']} steps, "
        f"mean return {metrics['mean_return']:.3f}"
    )


def import_(arguments: argparse.Namespace) -> str:
    """Make a .demo file of a table or a Minari dataset, and return a line for each step."""
    from pipeline.data.demo_import import import_table
    from pipeline.data.demo_spec import spec_of
    from pipeline.data.demo_tables import read_table

    source, columns = arguments.source, _columns(arguments.column)
    chosen = None
    if arguments.spec is not None:
        chosen = spec_of(arguments.spec, _make_env, arguments.behavior)
    if source.startswith(_MINARI):
        from pipeline.data.demo_minari import read_dataset

        dataset = source.removeprefix(_MINARI)
        table, name, spec = read_dataset(dataset, None if chosen is None else chosen[1])
        # A Minari dataset has its spaces; other tables need a specification of their columns.
        chosen = chosen or (arguments.behavior or name, spec, {})
    elif chosen is not None:
        table = read_table(Path(source))
    else:
        raise SettingsError(
            f"{source}: does not say what its columns mean; name a specification file, a .demo "
            "file or an environment: --spec gymnasium:CartPole-v1"
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
            action_scale=arguments.action_scale or (1.0,),
        )
    )


def _make_env(source: str) -> BaseEnv:
    from pipeline.api import make_env

    return make_env(source)


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
    from pipeline.data.demo_spec import spec_file
    from pipeline.data.demo_tables import table_of, write_table
    from pipeline.protocol.demo import read_demo
    from pipeline.settings.yaml_file import dump_yaml

    demo = read_demo(arguments.file)
    target = arguments.output
    if target.suffix in (".yaml", ".yml"):
        files.write_whole(target, dump_yaml(spec_file(demo.behavior_name, demo.spec)))
        return f"wrote         {target}: the specification of {demo.behavior_name}"
    read = f"read          {arguments.file}: {len(demo)} pairs"
    if str(target).startswith(_MINARI):
        from pipeline.data.demo_minari import write_dataset

        dataset = str(target).removeprefix(_MINARI)
        return "\n".join([read, *write_dataset(demo, dataset, arguments.env)])
    if arguments.env is not None:
        raise SettingsError(f"--env {arguments.env}: belongs to minari:DATASET; leave it out")
    fields, steps = table_of(demo)
    write_table(fields, target)
    return "\n".join([read, *steps, f"wrote         {target}"])


def merge(arguments: argparse.Namespace) -> str:
    """Write several .demo files as one, and return what was read."""
    from pipeline.data.demonstrations import merge_demos

    return "\n".join(merge_demos(arguments.files, arguments.output, behavior=arguments.behavior))


def trim(arguments: argparse.Namespace) -> str:
    """Keep the episodes that meet every condition, and return what they are."""
    from pipeline.data.demonstrations import trim_demo

    conditions = {
        name: getattr(arguments, name)
        for name in ("episodes", "min_return", "max_return", "best")
        if getattr(arguments, name) is not None
    }
    if not conditions:
        raise SettingsError(
            "nothing says which episodes to keep; name --episodes, --min-return, --max-return or "
            "--best"
        )
    return "\n".join(trim_demo(arguments.file, arguments.output, **conditions))
