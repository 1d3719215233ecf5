"""The `pipeline` command: argument parsing, messages and exit codes. The work is in `commands`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import __version__
from pipeline.commands.env_options import build_options, fetch_options, manifest_option
from pipeline.commands.examples import EXAMPLES
from pipeline.commands.learn_options import add_options
from pipeline.commands.parsing import Parser
from pipeline.commands.results_options import compare_options, provenance_options, runs_options
from pipeline.errors import Interrupted, PipelineError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    arguments = _parser().parse_args(argv)
    work: Callable[[argparse.Namespace], str | None] = arguments.work
    with _log_on_the_console(debug=arguments.debug):
        try:
            text = work(arguments)
        except (
            PipelineError,
            OSError,
            MemoryError,
            KeyboardInterrupt,
            ModuleNotFoundError,
        ) as error:
            if arguments.debug:
                traceback.print_exception(error)
            return _report(error)
    if text:
        _print(text)
    return 0


def _print(text: str) -> None:
    """Print to standard output, whose reader may have gone, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _log_on_the_console(*, debug: bool) -> Iterator[None]:
    """Show what a user follows, or with `debug` everything of ours with its time and place."""
    detailed = "%(asctime)s %(levelname)s [%(filename)s:%(lineno)d] %(message)s"
    logging.basicConfig(
        level=logging.INFO, format=detailed if debug else "[%(levelname)s] %(message)s"
    )
    ours = logging.getLogger("pipeline")
    before = ours.level
    ours.setLevel(logging.DEBUG if debug else before)
    try:
        yield
    finally:
        ours.setLevel(before)


def _report(error: BaseException) -> int:
    """Say on one line what ended the command, and give its exit code."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        print(f"interrupted: {one_line(error) or 'stopped by Ctrl+C'}", file=sys.stderr)
        return int(getattr(error, "exit_code", 130))
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    print(f"error: {one_line(error)}", file=sys.stderr)
    return int(getattr(error, "exit_code", PipelineError.exit_code))


def _missing(error: ModuleNotFoundError) -> int:
    """Say which part of the installation lacks a package; a module of ours is a bug of ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "pipeline"):
        raise error
    extra = "envs" if package in ("gymnasium", "pettingzoo") else "train"
    print(
        f"error: this needs the package {package}, which is not installed; install the whole: "
        f"pip install 'rl-pipeline[{extra}]', or in a checkout: pip install -e '.[{extra}]'",
        file=sys.stderr,
    )
    return PipelineError.exit_code


def _parser() -> argparse.ArgumentParser:
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="detailed log, and tracebacks")
    parser: argparse.ArgumentParser = Parser(
        prog="pipeline",
        description="From an environment to a trained, exported, evaluated and compared agent.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pipeline {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _plan,
        _run,
        _sync,
        _env,
        _demo,
        _config,
        _learn,
        _evaluate,
        _compare,
        _provenance,
        _runs,
        _onnx,
        _ui,
    ):
        add(commands, debug)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parent: argparse.ArgumentParser,
    name: str,
    text: str,
    work: Callable[[argparse.Namespace], str | None] | None = None,
) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", parents=[parent]
    )
    if work is not None:
        made.set_defaults(work=work)
    return made


def _plan(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # argparse's own alias is private
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.settings.params import load_params
        from pipeline.settings.plan import RUNS_FILE, check_plan, write_plan
        from pipeline.stages.bridged import check_ids

        params = load_params(Path("params.yaml"))
        check_ids(params)
        if arguments.check:
            check_plan(params)
            return f"{RUNS_FILE} is up to date."
        write_plan(params)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return f"Wrote {RUNS_FILE}. Run `dvc repro` or `snakemake --cores {cores or 1}`."

    made = _command(commands, debug, "plan", "write the table of runs from params.yaml", work)
    made.add_argument("--check", action="store_true", help="only say whether it is up to date")


def _run(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.subset import run

        return run(
            Path.cwd(),
            arguments.names,
            engine=arguments.engine,
            stage=arguments.stage,
            cores=arguments.cores,
            dry=arguments.dry_run,
        )

    text = "bring some experiments, sweeps, runs or subsets up to date"
    made = _command(commands, debug, "run", text, work)
    made.add_argument("names", nargs="+", help="as in params.yaml; a run is <experiment>-<seed>")
    made.add_argument("--engine", choices=("dvc", "snakemake"), default="snakemake")
    made.add_argument("--stage", default=None, help="the last stage; default: all of them")
    made.add_argument("--cores", type=int, default=1, help="jobs at a time; default: %(default)s")
    made.add_argument("-n", "--dry-run", action="store_true", help="print the engine's command")


def _sync(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.sync import sync

        return sync(Path.cwd(), arguments.source)

    text = "make DVC agree with Snakemake's results, or Snakemake with DVC's"
    made = _command(commands, debug, "sync", text, work)
    made.add_argument(
        "--from",
        dest="source",
        choices=("dvc", "snakemake"),
        help="the engine that has run; found out when not given",
    )


def _env(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def build(arguments: argparse.Namespace) -> str:
        from pipeline.commands.env import build

        return build(
            arguments.name,
            arguments.output,
            copies=arguments.copies,
            kwargs=arguments.arg,
            options=arguments.option,
        )

    def names(arguments: argparse.Namespace) -> str:
        from pipeline.commands.env import list_environments

        return list_environments(arguments.manifest)

    inner = _command(commands, debug, "env", "build, list and fetch environments").add_subparsers(
        metavar="COMMAND", required=True
    )
    made = _command(inner, debug, "build", "pack an environment into an executable", build)
    build_options(made)
    made = _command(inner, debug, "list", "list the environments that are known by name", names)
    manifest_option(made)
    _env_fetch(inner, debug)


def _env_fetch(inner: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.env import fetch_environment
        from pipeline.envs.archives import Limits

        return fetch_environment(
            arguments.environment,
            manifests=arguments.manifest,
            sha256=arguments.sha256,
            platform=arguments.platform,
            executable=arguments.executable,
            limits=Limits(
                max_bytes=int(arguments.max_unpacked_gb * 1e9), max_ratio=arguments.max_ratio
            ),
        )

    text = "fetch an environment's archive into the cache, and print its executable's path"
    made = _command(inner, debug, "fetch", text, work)
    fetch_options(made)


def _demo(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def info(arguments: argparse.Namespace) -> str:
        from pipeline.protocol.demo import describe, read_demo

        return describe(read_demo(arguments.file))

    def record(arguments: argparse.Namespace) -> str:
        from pipeline.commands.demo import record

        return record(
            arguments.name, arguments.output, episodes=arguments.episodes, seed=arguments.seed
        )

    inner = _command(commands, debug, "demo", "look at demonstrations, and record them")
    parts = inner.add_subparsers(metavar="COMMAND", required=True)
    made = _command(parts, debug, "info", "say what a .demo file holds", info)
    made.add_argument("file", type=Path)
    made = _command(parts, debug, "record", "record a built-in simulator's expert", record)
    made.add_argument("name", help="one that `pipeline env list` shows")
    made.add_argument("-o", "--output", required=True, type=Path, help="the .demo file to write")
    made.add_argument("--episodes", type=int, default=20, help="default: %(default)s")
    made.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _config(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def check(arguments: argparse.Namespace) -> str:
        from pipeline.commands.config import check

        return check(arguments.file, curriculum=arguments.curriculum, sampler=arguments.sampler)

    def upgrade(arguments: argparse.Namespace) -> str:
        from pipeline.commands.config import upgrade

        return upgrade(arguments.old, arguments.output, force=arguments.force)

    inner = _command(commands, debug, "config", "look at trainer configurations, and upgrade them")
    parts = inner.add_subparsers(metavar="COMMAND", required=True)
    text = "say what a configuration of any ML-Agents generation means, as YAML"
    made = _command(parts, debug, "check", text, check)
    made.add_argument("file", type=Path, help="trainer configuration, or a curriculum or sampler")
    made.add_argument("--curriculum", type=Path, help="YAML, JSON, or a folder of <Behavior>.json")
    made.add_argument("--sampler", type=Path, help="sampler file")
    made = _command(
        parts, debug, "upgrade", "write an old configuration in today's format", upgrade
    )
    made.add_argument(
        "old", nargs="+", type=Path, help="trainer configuration, curriculum, sampler: some of them"
    )
    made.add_argument("-o", "--output", required=True, type=Path, help="the file to write")
    made.add_argument("--force", action="store_true", help="replace that file")


def _learn(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.learn import learn

        return learn(arguments)

    text = "train in an executable or in the Unity Editor"
    add_options(_command(commands, debug, "learn", text, work))


def _evaluate(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.evaluate import evaluate

        return evaluate(
            arguments.model,
            arguments.env,
            episodes=arguments.episodes,
            seed=arguments.seed,
            args=arguments.env_args,
        )

    text = "play episodes with an ONNX policy in an executable"
    made = _command(commands, debug, "evaluate", text, work)
    made.add_argument("model", type=Path, help="the .onnx file, named like its behavior")
    made.add_argument("--env", type=Path, required=True, help="executable")
    made.add_argument("--episodes", type=int, default=100, help="default: %(default)s")
    made.add_argument("--seed", type=int, default=10_000, help="default: %(default)s")
    made.add_argument(
        "--env-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to the executable"
    )


def _compare(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.compare import compare_runs

        return compare_runs(arguments.runs, fraction=arguments.fraction, form=arguments.form)

    text = "compare runs over their seeds: returns, probabilities, steps to learn, time"
    compare_options(_command(commands, debug, "compare", text, work))


def _provenance(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.provenance import tell

        return tell(arguments.file, tree=arguments.tree, as_json=arguments.json)

    text = "say what made an ONNX policy, and whether the present tree would make the same"
    provenance_options(_command(commands, debug, "provenance", text, work))


def _runs(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> str:
        from pipeline.commands.runs import tell

        return tell(Path.cwd(), arguments.run, revision=arguments.at)

    text = "say which MLflow run and which DVC revision belong together"
    runs_options(_command(commands, debug, "runs", text, work))


def _onnx(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def check(arguments: argparse.Namespace) -> str:
        from pipeline.commands.onnx import check

        return check(arguments.file)

    inner = _command(commands, debug, "onnx", "look at exported policies").add_subparsers(
        metavar="COMMAND", required=True
    )
    made = _command(inner, debug, "check", "say whether Unity would load an ONNX policy", check)
    made.add_argument("file", type=Path)


def _ui(commands: argparse._SubParsersAction, debug: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]  # as above
    def work(arguments: argparse.Namespace) -> None:
        from pipeline.commands.ui import serve

        serve(Path.cwd(), arguments.port)

    made = _command(commands, debug, "ui", "show runs in the browser, on this machine only", work)
    made.add_argument("--port", type=int, default=5000, help="default: %(default)s")


if __name__ == "__main__":
    sys.exit(main())
