"""The `pipeline` command: arguments, messages and exit codes; `cli/<name>.py` does the work."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence

from pipeline import __version__
from pipeline.cli.parser import Parser
from pipeline.errors import Interrupted, PipelineError, SettingsError, one_line, shown

GROUPS = {
    "the usual path: a project, run by Snakemake or DVC": {
        "init": "write a project that trains agents in your environment",
        "run": "train, export, evaluate and report, where results are out of date",
        "compare": "compare experiments over seeds: returns, intervals, steps, time",
        "ui": "show runs and curves in the browser (MLflow), on this machine only",
    },
    "one thing at a time, without a project": {
        "learn": "train agents in an environment: Unity, Gymnasium, your own",
        "evaluate": "play episodes with a trained ONNX policy: returns, and a video",
        "timers": "show where a run's time went, and what would make it faster",
        "env": "list the built-in environments, build and fetch executables",
        "demo": "record, import, export, merge, trim and describe demonstrations",
        "config": "check trainer configurations, and upgrade old ones",
        "onnx": "check exported policies",
    },
    "share a policy or a result": {
        "claims": "write claims about results, and check claims with new results",
        "checklist": "answer a conference's checklist from the records of the runs",
        "card": "write a folder to share: a run's policies, and a page about them",
        "push": "upload a run and its model card to the Hugging Face Hub",
        "pull": "download a policy from the Hugging Face Hub",
        "provenance": "show what made an ONNX policy, and if this code would make it",
        "archive": "write a project's results, code and inputs into one file",
        "reproduce": "run the project in an archive again, and compare the results",
    },
    "look after a project": {
        "doctor": "check the installation and this folder, and say what to do",
        "plan": "write the list of all runs, from params.yaml, for the engines",
        "runs": "list runs with their rows in MLflow, and find the code of a row",
        "sync": "make DVC accept results of Snakemake, or the other way around",
        "completion": "print a script that completes these commands in your shell",
    },
}
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}
"""Every command and its line of help. `cli/<name>.py` adds options or subcommands in
`add_options`, and does the work in `run`."""

USES = {
    "init": (
        "Begin with it: `pipeline run` in the new folder trains, evaluates and compares.",
        "The project needs the installed package, not a clone of the repository.",
    ),
    "run": (
        "Use it in a project, at first and after each change of params.yaml or of code.",
        "Results that are up to date are not made again.",
    ),
    "compare": ("Use it to see which experiment or setting is better, and how sure that is.",),
    "ui": ("Use it to look at curves, parameters and files of runs during or after training.",),
    "evaluate": ("Use it after training, to see how well the exported policy does.",),
    "timers": ("Use it when training is slower than you expect.",),
    "env": ("Use `list` to see names for --env, `build` for an executable with other options.",),
    "demo": ("Demonstrations are recorded episodes (.demo files), which policies can imitate.",),
    "config": ("Use it before you train with a file that was written for ML-Agents.",),
    "onnx": ("Use it before a policy goes into Unity, or into another environment.",),
    "claims": (
        "Use `write` when you publish the results, and commit the two files that it writes.",
        "Readers then run `pipeline run` and `pipeline claims check`.",
    ),
    "checklist": (
        "Use it before you submit a paper: it prints the items of NeurIPS and ACM, with",
        "answers from params.yaml and the records of the runs. Items without an answer are",
        "marked, for the authors to answer.",
    ),
    "card": (
        "Use it before you give a policy to others: the page, a model card, has its scores,",
        "its inputs and outputs, and how it was trained. `pipeline push` uploads the folder.",
    ),
    "push": ("Use it to publish a policy. If you name a run, its model card is written first.",),
    "pull": ("Use it to try a policy that was published; `pipeline evaluate` plays it.",),
    "provenance": ("Use it to see which code and settings made a file, or why two files differ.",),
    "archive": (
        "Use it when you publish results. Sources must be committed, and results up to date:",
        "the file has the commit, inputs that git does not have, the SHA-256 of each package,",
        "demonstrations, curves, models, evaluations, claims.yaml and CITATION.cff.",
    ),
    "reproduce": (
        "Use it on a published archive: it makes a folder with a new virtual environment, in",
        "which only packages with a SHA-256 of the archive are installed, runs every stage,",
        "and compares the results. It runs the code of the archive, so trust its author. If",
        "it was interrupted, the same command continues. TORCH_INDEX_URL names an index of",
        "torch. The exit code is 0 if all results are the same (or claims.yaml holds), else 1.",
    ),
    "doctor": (
        "Use it after installing, or when a command fails and you do not see why. It checks",
        "Python, torch, both engines, the MLflow store, ports, Unity and the disk. The exit",
        "code is 0 if every check succeeds, else 1.",
    ),
    "plan": ("`pipeline run` does this itself; use it before `dvc repro` or `snakemake`.",),
    "runs": ("Use it to find the code and the files that gave a number in MLflow.",),
    "sync": (
        "Use it when one engine has made the results, and you want to go on with the other",
        "engine. No stage runs again.",
    ),
    "completion": ('For bash, put this line into ~/.bashrc: eval "$(pipeline completion bash)"',),
}
"""For each command: the lines of its help below the first line; they say when to use it."""

EXAMPLES = {
    "init": ("init DIR --gymnasium CartPole-v1", "init DIR --unity path/to/build"),
    "run": (
        "run --cores 8",
        "run smoke --cores 2    one subset, experiment, sweep or run",
        "run --engine dvc    by DVC, one stage at a time",
    ),
    "compare": (
        "compare    every experiment of params.yaml",
        "compare results/train/collector_ppo results/train/collector_bc_ppo",
        "compare results/fast-1 results/slow-1    runs of pipeline learn",
        "compare --with published.csv -o compared    together with other people's results",
    ),
    "runs": ("runs collector_ppo-1",),
    "evaluate": (
        "evaluate results/first --env balance_ball --episodes 20 --video ball.gif",
        "evaluate results/export/collector_ppo/seed1/FoodCollector.onnx --env collector",
    ),
    "env": (
        "env build balance_ball -o build/balance_ball",
        "env build gymnasium:CartPole-v1 -o build/cartpole --copies 8",
        "env fetch URL --sha256 DIGEST",
    ),
    "demo": (
        "demo record balance_ball -o data/demos/mine.demo --episodes 20",
        "demo info data/demos/mine.demo",
        "demo import play.csv --spec gymnasium:CartPole-v1 -o play.demo",
    ),
    "config": (
        "config check config/ppo/3DBall.yaml",
        "config check old/trainer_config.yaml",
        "config upgrade old/trainer_config.yaml old/curricula -o config/new.yaml",
    ),
    "onnx": ("onnx check results/export/collector_ppo/seed1/FoodCollector.onnx",),
    "timers": ("timers results/first",),
    "claims": ("claims write", "claims check"),
    "checklist": ("checklist --format latex",),
    "card": ("card collector_ppo-1 -o food --license apache-2.0",),
    "push": ("push food --repo-id me/food",),
    "pull": ("pull me/food -o theirs",),
    "archive": ("archive paper.zip", "archive paper.zip --with-packages"),
    "reproduce": (
        "reproduce paper.zip --cores 8",
        "reproduce paper.zip --folder again --wheels wheels    packages from a folder",
        "reproduce paper.zip smoke    one experiment, subset or run of it",
    ),
    "provenance": ("provenance results/export/collector_ppo/seed1/FoodCollector.onnx",),
}
"""For each command: the example command lines in its help."""

_MOST_MISTAKES = 20
"""Maximum number of mistakes that are reported together."""

_FIRST = (
    "pipeline init DIR --gymnasium CartPole-v1 && cd DIR && pipeline run --cores 2",
    "pipeline learn --env balance_ball --run-id first",
    "pipeline evaluate results/first/3DBall.onnx --env balance_ball",
)


# argparse lists all subcommands in one block; in groups, newcomers find the usual workflow first.
class _Overview(Parser):
    """The main parser, with a help that lists the commands in groups."""

    def format_help(self) -> str:
        """Return usage, examples, and commands in groups, on one screen."""
        lines = [self.format_usage().rstrip(), self.description or "", ""]
        lines += [f"  {line}" for line in _FIRST]
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            lines += ["", title, *(f"  {name:{width}}  {text}" for name, text in commands.items())]
        lines += [
            "",
            "Options and examples: `pipeline COMMAND --help`; version: `pipeline --version`.",
        ]
        return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """Run the command of `argv`, or of this process's command line, and return its exit code.

    `name` is the program's name if it is not `pipeline COMMAND`.
    """
    # The command line is read here, because the command's name decides which module is imported.
    words = sys.argv[1:] if argv is None else list(argv)
    # `debug` is needed before parsing, because parsing imports a module, and this import may fail.
    debug = "--debug" in words
    try:
        # argparse itself exits with code 2 for a mistake in the command line.
        arguments = parser_for(words, name=name).parse_args(words)
        debug = arguments.debug
        with _log_on_the_console(debug=debug):
            text: str | None = arguments.work(arguments)
    # Any other exception is a mistake in this program, and is shown with its traceback.
    except (PipelineError, OSError, MemoryError, KeyboardInterrupt, ModuleNotFoundError) as error:
        if debug:
            traceback.print_exception(error)
        return _report(error)
    if text:
        _print(text)
    return 0


def _print(text: str) -> None:
    """Print `text`, unless the reader of standard output, such as `head`, has closed the pipe."""
    try:
        print(shown(text), flush=True)
    except BrokenPipeError:
        # Python flushes standard output again at exit, which would print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Shown(logging.Formatter):
    """Formats log lines; control characters, which a terminal would act upon, are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


@contextlib.contextmanager
def _log_on_the_console(*, debug: bool) -> Iterator[None]:
    """Log INFO to the console, or with `debug` all messages of this package with time and place."""
    detailed = "%(asctime)s %(levelname)s [%(filename)s:%(lineno)d] %(message)s"
    # The log goes to standard error, so that a command's result on standard output can be piped.
    handler = logging.StreamHandler()
    handler.setFormatter(_Shown(detailed if debug else "[%(levelname)s] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logger = logging.getLogger("pipeline")
    old_level = logger.level
    # Only this package's level changes: DEBUG lines of all libraries would bury its lines.
    logger.setLevel(logging.DEBUG if debug else old_level)
    try:
        yield
    finally:
        # The level is restored, because `main` may be called again without --debug, as in tests.
        logger.setLevel(old_level)


def _report(error: BaseException) -> int:
    """Print one line for each mistake in an error, and return the exit code."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        print(f"interrupted: {one_line(error) or 'stopped by Ctrl+C'}", file=sys.stderr)
        # KeyboardInterrupt has no exit code; shells report 128 + SIGINT.
        return int(getattr(error, "exit_code", 130))
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    parts = error.parts if isinstance(error, SettingsError) else [error]
    # Each mistake gets a line of its own, which editors and CI can turn into a link.
    for part in parts[:_MOST_MISTAKES]:
        print(f"error: {one_line(part)}", file=sys.stderr)
    if len(parts) > _MOST_MISTAKES:
        print(f"error: {len(parts) - _MOST_MISTAKES} more mistakes", file=sys.stderr)
    return int(getattr(error, "exit_code", PipelineError.exit_code))


def _missing(error: ModuleNotFoundError) -> int:
    """Print which extra installs a missing package; raise for a missing module of this package."""
    package = (error.name or "").partition(".")[0]
    # A missing module of this package is a fault of this package, and needs the traceback.
    if package in ("", "pipeline"):
        raise error
    extras = {"gymnasium": "envs", "pettingzoo": "envs", "minari": "minari", "h5py": "minari"}
    # Other packages are in the extra `train`, or are checked by the code that uses them.
    extra = (extras | {"huggingface_hub": "hub"}).get(package, "train")
    text = f"error: this needs the package {package}, which is not installed; install the extra:"
    print(f"{text} pip install 'rl-pipeline[{extra}]'", file=sys.stderr)
    return PipelineError.exit_code


def parser_for(words: Sequence[str], *, name: str | None = None) -> Parser:
    """Return the main parser, with the options of the command in `words`."""
    # No option before the command takes a value: the first word that is no option is the
    # command.
    return _parser([word for word in words if not word.startswith("-")][:1], program=name)


# All commands get a parser, so that the help and errors about misspelt commands can list them.
def _parser(names: Collection[str], *, program: str | None = None) -> Parser:
    """Return the main parser with all commands, and the options of the commands in `names`."""
    parser = _Overview(
        prog="pipeline",
        description="From an environment to a trained, exported, evaluated and compared agent.",
    )
    parser.add_argument("--version", action="version", version=f"pipeline {__version__}")
    for name, text in COMMANDS.items():
        subparser = parser.add_command(name, text)
        # Modules of other commands are not imported, so that every command starts quickly.
        if name in names:
            subparser.description = "\n".join([subparser.description or "", *USES.get(name, ())])
            if lines := [f"  pipeline {line}" for line in EXAMPLES.get(name, ())]:
                subparser.epilog = "\n".join(["for example", *lines])
                subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            command = importlib.import_module(f"pipeline.cli.{name}")
            subparser.prog = program or subparser.prog
            subparser.set_defaults(work=getattr(command, "run", None))
            # This is a function, because a parser with the options of all commands imports all
            # their modules, and only `completion` needs such a parser.
            subparser.set_defaults(whole_parser=lambda: _parser(COMMANDS))
            command.add_options(subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
