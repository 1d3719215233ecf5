"""The options of `pipeline learn`: all that `mlagents-learn` has, and all that it ever had.

One table gives the parser, the help, and the settings that an option changes. Nothing here imports
more than argparse, because every `pipeline` command builds every parser.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

from pipeline import __version__
from pipeline.commands.parsing import Parser

Kind = Literal["switch", "text", "whole", "number", "rest"]

GROUPS = {
    "run": "Which run this is, where it is kept, and what it starts from.",
    "environment": "What to train in. Without --env: the Unity Editor, on port 5004.",
    "engine": "What the game engine is told when the environment has connected.",
    "networks": "Where networks are computed, and how they act.",
    "retired": "Options of older releases. They still work, and name the present way when used.",
}

DESCRIPTION = """\
Train every behavior of an environment with a trainer configuration in ML-Agents' format.

CONFIG may be left out: then every behavior gets the built-in PPO settings. An option that is given
wins over the configuration file, and the file wins over the defaults; `--num-envs=1` is enough to
override 4 in the file.
"""

EPILOG = """\
examples
  pipeline learn config/ppo/3DBall.yaml --env build/balance_ball --run-id first
  pipeline learn config/ppo/3DBall.yaml --run-id editor          then press Play in the Unity Editor
  pipeline learn my.yaml --env Game --run-id big --num-envs 4 --no-graphics --time-scale 50
  pipeline learn my.yaml --env Game --run-id big --resume        continue where it was stopped
  pipeline learn my.yaml --env Game --run-id next --initialize-from big
  pipeline learn my.yaml --env Game --run-id big --resume --inference     watch it, without learning
  pipeline learn my.yaml --env Game --run-id a --env-args --level 7       the rest goes to the game

results/<run-id>/ gets
  <Behavior>.onnx                   the policy for Unity
  <Behavior>/checkpoint.pt          what --resume continues from; events.out.tfevents.* beside it
  configuration.yaml                every setting of the run, itself a valid CONFIG
  progress.csv                      the learning curve
  run_logs/                         timers.json, Player-<worker>.log

Ctrl+C saves first; give the same command with --resume to continue. See docs/learn.md.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, and what becomes of it."""

    flag: str
    group: str
    help: str
    kind: Kind = "text"
    metavar: str | None = None
    key: str | None = None
    """The setting that it changes, dotted."""
    behavior_key: str | None = None
    """The setting that it changes in every behavior and in default_settings, dotted."""
    value: Any = True
    """What a switch sets the setting to."""
    note: str | None = None
    """Of a retired option: the line that names the present way. May hold `{value}`."""

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


def _run(flag: str, text: str, **more: Any) -> Option:
    return Option(flag=flag, group="run", help=text, **more)


def _env(flag: str, text: str, key: str | None = None, **more: Any) -> Option:
    key = f"env_settings.{key or flag.removeprefix('--').replace('-', '_')}"
    return Option(flag=flag, group="environment", help=text, key=key, **more)


def _engine(flag: str, text: str, **more: Any) -> Option:
    key = f"engine_settings.{flag.removeprefix('--').replace('-', '_')}"
    return Option(flag=flag, group="engine", help=text, key=key, **more)


def _retired(flag: str, note: str, **more: Any) -> Option:
    return Option(flag=flag, group="retired", help=note, note=note, **more)


OPTIONS = (
    _run(
        "--run-id",
        "name of the run, and of its folder (default: ppo)",
        metavar="ID",
        key="checkpoint_settings.run_id",
    ),
    _run(
        "--results-dir",
        "folder of all runs (default: results)",
        metavar="DIR",
        key="checkpoint_settings.results_dir",
    ),
    _run(
        "--resume",
        "continue the run of this id from its last checkpoint",
        kind="switch",
        key="checkpoint_settings.resume",
    ),
    _run(
        "--force",
        "train anew under an id that has been used; the earlier run's folder is kept as "
        "<run-id>.1, .2, ...",
        kind="switch",
        key="checkpoint_settings.force",
    ),
    _run(
        "--initialize-from",
        "begin with the weights of another run in the same results folder, at step 0",
        metavar="ID",
        key="checkpoint_settings.initialize_from",
    ),
    _run(
        "--inference",
        "act without learning, until stopped; with --resume or --initialize-from",
        kind="switch",
        key="checkpoint_settings.inference",
    ),
    _run(
        "--seed",
        "from which everything random derives (default: -1, one is drawn and printed)",
        kind="whole",
        key="env_settings.seed",
    ),
    _env(
        "--env", "the executable (default: none, the Unity Editor)", key="env_path", metavar="PATH"
    ),
    _env(
        "--num-envs",
        "executables that run side by side, in lockstep (default: 1)",
        kind="whole",
    ),
    Option(
        flag="--learners",
        group="networks",
        help="processes that learn one run together, each with --num-envs environments of its own "
        "(default: 1, or as many as torchrun has started)",
        kind="whole",
    ),
    _env(
        "--num-areas",
        "training areas that each environment makes, if it replicates them (default: 1)",
        kind="whole",
    ),
    _env(
        "--base-port",
        "port of the first environment, the others follow (default: free ports that the system "
        "chooses); ignored in the Editor",
        kind="whole",
        metavar="PORT",
    ),
    _env(
        "--timeout-wait",
        "seconds to wait for an answer of an environment (default: 60)",
        kind="whole",
        metavar="S",
    ),
    _env(
        "--max-lifetime-restarts",
        "restarts of a failed environment in all, -1 for any number (default: 10)",
        kind="whole",
    ),
    _env(
        "--restarts-rate-limit-n",
        "restarts of a failed environment within the period, -1 for any number (default: 1)",
        kind="whole",
    ),
    _env(
        "--restarts-rate-limit-period-s",
        "length of that period in seconds (default: 60)",
        kind="whole",
        metavar="S",
    ),
    _env(
        "--env-args",
        "everything after this goes to the executable, so give it last",
        kind="rest",
        metavar="...",
    ),
    _engine("--width", "pixels of the window (default: 84)", kind="whole"),
    _engine("--height", "pixels of the window (default: 84)", kind="whole"),
    _engine("--quality-level", "rendering quality (default: 5)", kind="whole"),
    _engine(
        "--time-scale",
        "how many times faster than real time it may run (default: 20)",
        kind="number",
    ),
    _engine(
        "--target-frame-rate",
        "frames per second, -1 for as many as possible (default: -1)",
        kind="whole",
    ),
    _engine(
        "--capture-frame-rate", "frames per second of simulated time (default: 60)", kind="whole"
    ),
    _engine("--no-graphics", "run without rendering", kind="switch"),
    _engine(
        "--no-graphics-monitor",
        "render the first environment only, the others run without",
        kind="switch",
    ),
    Option(
        flag="--torch-device",
        group="networks",
        help="cpu, cuda, cuda:0, ... (default: cuda where there is one, else cpu)",
        metavar="DEVICE",
        key="torch_settings.device",
    ),
    Option(
        flag="--deterministic",
        group="networks",
        help="take the mean or the likeliest action, also while training",
        kind="switch",
        behavior_key="network_settings.deterministic",
    ),
    _retired(
        "--curriculum",
        "lessons belong under environment_parameters in CONFIG",
        metavar="FILE",
    ),
    _retired(
        "--sampler",
        "samplers belong under environment_parameters in CONFIG",
        metavar="FILE",
    ),
    _retired(
        "--lesson",
        "every curriculum starts at this lesson; better begin environment_parameters in CONFIG "
        "with the lesson that you want",
        kind="whole",
    ),
    _retired(
        "--keep-checkpoints",
        "set keep_checkpoints of each behavior in CONFIG",
        kind="whole",
        behavior_key="keep_checkpoints",
    ),
    _retired(
        "--save-freq",
        "set checkpoint_interval of each behavior in CONFIG",
        kind="whole",
        behavior_key="checkpoint_interval",
    ),
    _retired(
        "--load", "use --resume, which it implies", kind="switch", key="checkpoint_settings.resume"
    ),
    _retired(
        "--train",
        "no effect: a run trains unless --inference is given",
        kind="switch",
        key="checkpoint_settings.train_model",
    ),
    _retired(
        "--slow",
        "use --time-scale 1, which it means",
        kind="switch",
        key="engine_settings.time_scale",
        value=1,
    ),
    _retired("--worker-id", "use --base-port, to which it is added", kind="whole"),
    _retired(
        "--num-runs",
        "this many runs, one after another, named <run-id>-<k> with seed + k; better use "
        "experiments and seeds in params.yaml, which run in parallel",
        kind="whole",
    ),
    _retired(
        "--docker-target-name",
        "relative paths lie under /<name>/; better mount the volume and give whole paths",
        metavar="NAME",
    ),
    _retired(
        "--cpu",
        "use --torch-device cpu, which it means",
        kind="switch",
        key="torch_settings.device",
        value="cpu",
    ),
    _retired(
        "--multi-gpu",
        "no effect: one device learns, which --torch-device chooses",
        kind="switch",
    ),
    _retired("--torch", "no effect: networks are always PyTorch's", kind="switch"),
    _retired("--tensorflow", "no effect: networks are always PyTorch's", kind="switch"),
)
"""Every option but `--debug`, `--version` and `--help`."""

BY_DEST = {option.dest: option for option in OPTIONS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Make the parser of `pipeline learn`; only what is given becomes an attribute."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [CONFIG] [options]"
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="trainer configuration in ML-Agents' format; built-in settings when not given",
    )
    parser.add_argument(
        "--version", action="version", version=f"pipeline {__version__}", help="print it, and exit"
    )
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for option in OPTIONS:
        groups[option.group].add_argument(option.flag, **_arguments(option))
    if isinstance(parser, Parser):
        parser.retired = {option.dest for option in OPTIONS if option.note is not None}


def _arguments(option: Option) -> dict[str, Any]:
    """What argparse is told; values are checked with the settings, in one place."""
    common = {"dest": option.dest, "default": argparse.SUPPRESS, "help": option.help}
    if option.kind == "switch":
        return {**common, "action": "store_true"}
    metavar = option.metavar or {"whole": "N", "number": "X"}.get(option.kind, "TEXT")
    if option.kind == "rest":
        return {**common, "nargs": argparse.REMAINDER}
    return {**common, "metavar": metavar, "type": _number if option.kind != "text" else str}


def _number(text: str) -> int | float | str:
    """The number that a text says, or the text itself for the settings to complain about."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
