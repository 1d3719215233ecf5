"""`pipeline learn`: all options that `mlagents-learn` has, and all that it ever had.

One table gives the parser, the help, and the settings that an option changes. The work is in
`learn_run`, whose imports take seconds, so that a mistake in a command line is told before them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline import __version__

if TYPE_CHECKING:
    from pipeline.commands.parser import Parser

GROUPS = {
    "run": "Which run this is, where it is kept, and what it starts from.",
    "environment": "What to train in. Without --env: the Unity Editor, on port 5004, or --attach.",
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
  pipeline learn config/ppo/3DBall.yaml --env balance_ball --run-id first
  pipeline learn config/ppo/CartPole.yaml --env gymnasium:CartPole-v1 --run-id cart
  pipeline learn my.yaml --env my_env:make --run-id own          make() of my_env.py, beside you
  pipeline learn config/ppo/3DBall.yaml --run-id editor          then press Play in the Unity Editor
  pipeline learn my.yaml --env Game --run-id big --num-envs 4 --no-graphics --time-scale 50
  pipeline learn my.yaml --run-id by-hand --attach 2      then start players, on ports 5004 and 5005
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

Ctrl+C saves first; give the same command with --resume to continue. See docs/reference/learn.md.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, and what becomes of it."""

    flag: str
    group: str
    help: str
    metavar: str | None = None
    """What the help calls its value; None for a switch."""
    key: str | None = None
    """The setting that it changes, dotted."""
    behavior_key: str | None = None
    """The setting that it changes in every behavior and in default_settings, dotted."""
    value: Any = True
    """What a switch sets the setting to."""
    note: str | None = None
    """Of a retired option: the line that names the present way."""

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def kind(self) -> Literal["switch", "number", "rest", "list", "text"]:
        """What it takes, as its metavar says."""
        if self.flag == "--track":
            return "list"
        if self.metavar in (None, "..."):
            return "switch" if self.metavar is None else "rest"
        return "number" if self.metavar in ("N", "X", "S", "PORT") else "text"


_SECTIONS = {
    "run": "checkpoint_settings",
    "environment": "env_settings",
    "engine": "engine_settings",
}
"""The settings of a group."""

_TABLE = {
    "run": {
        "--run-id ID": "name of the run, and of its folder (default: ppo)",
        "--results-dir DIR": "folder of all runs (default: results)",
        "--resume": "continue the run of this id from its last checkpoint",
        "--force": "train anew under an id that has been used; the earlier run's folder is kept as "
        "<run-id>.1, .2, ...",
        "--initialize-from ID": "begin with the weights of another run in the same results folder, "
        "at step 0",
        "--track NAME": "where summaries go beside console and progress.csv: tensorboard, mlflow, "
        "wandb, jsonl, or a sink of an installed package; several with commas, or the option again "
        "(default: tensorboard, and what all installed packages bring)",
        "--inference": "act without learning, until stopped; with --resume or --initialize-from",
        "--seed N": "from which everything random derives (default: -1, one is drawn and printed)",
    },
    "environment": {
        "--env NAME": "the environment: a path, balance_ball, gymnasium:ID, pettingzoo:ID or "
        "module:function (default: none, the Unity Editor)",
        "--num-envs N": "executables that run side by side, in lockstep (default: 1); without "
        "--env the same as --attach",
        "--attach N": "wait for N players that are started elsewhere, the first on port 5004 or "
        "--base-port, the others on the ports after it",
        "--num-areas N": "training areas that each environment makes, if it replicates them "
        "(default: 1)",
        "--listen ADDRESS": "with --attach: an address of this machine, 0.0.0.0 for all, where "
        "players of other machines may call too, which `pipeline attach` brings there",
        "--token-file FILE": "the token that they say, in a file, or in the environment variable "
        "PIPELINE_TOKEN; there is no encryption, so see docs/reference/learn.md",
        "--base-port PORT": "port of the first environment, the others follow (default: free ports "
        "that the system chooses); ignored for a single Editor without --attach",
        "--timeout-wait S": "seconds to wait for an answer of an environment, and for all players "
        "to connect (default: 60)",
        "--max-lifetime-restarts N": "restarts of a failed environment in all, -1 for any number "
        "(default: 10)",
        "--restarts-rate-limit-n N": "restarts of a failed environment within the period, -1 for "
        "any number (default: 1)",
        "--restarts-rate-limit-period-s S": "length of that period in seconds (default: 60)",
        "--env-args ...": "everything after this goes to the executable, so give it last",
    },
    "engine": {
        "--width N": "pixels of the window (default: 84)",
        "--height N": "pixels of the window (default: 84)",
        "--quality-level N": "rendering quality (default: 5)",
        "--time-scale X": "how many times faster than real time it may run (default: 20)",
        "--target-frame-rate N": "frames per second, -1 for as many as possible (default: -1)",
        "--capture-frame-rate N": "frames per second of simulated time (default: 60)",
        "--no-graphics": "run without rendering",
        "--no-graphics-monitor": "render the first environment only, the others run without",
    },
    "networks": {
        "--learners N": "processes that learn one run together, each with --num-envs environments "
        "of its own (default: 1, or as many as torchrun has started)",
        "--torch-device DEVICE": "cpu, cuda, cuda:0, ... "
        "(default: cuda where there is one, else cpu)",
        "--deterministic": "take the mean or the likeliest action, also while training",
    },
    "retired": {
        "--curriculum FILE": "lessons belong under environment_parameters in CONFIG",
        "--sampler FILE": "samplers belong under environment_parameters in CONFIG",
        "--lesson N": "every curriculum starts at this lesson; better begin environment_parameters "
        "in CONFIG with the lesson that you want",
        "--keep-checkpoints N": "set keep_checkpoints of each behavior in CONFIG",
        "--save-freq N": "set checkpoint_interval of each behavior in CONFIG",
        "--load": "use --resume, which it implies",
        "--train": "no effect: a run trains unless --inference is given",
        "--slow": "use --time-scale 1, which it means",
        "--worker-id N": "use --base-port, to which it is added",
        "--num-runs N": "this many runs, one after another, named <run-id>-<k> with seed + k; "
        "better use experiments and seeds in params.yaml, which run in parallel",
        "--docker-target-name NAME": "relative paths lie under /<name>/; better mount the volume "
        "and give whole paths",
        "--cpu": "use --torch-device cpu, which it means",
        "--multi-gpu": "no effect: one device learns, which --torch-device chooses",
        "--torch": "no effect: networks are always PyTorch's",
        "--tensorflow": "no effect: networks are always PyTorch's",
    },
}
"""Every option but `--debug`, `--version` and `--help`, by group, as the help shows it: the flag,
what it takes (nothing makes it a switch), and what it does, or if retired the present way."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "--seed": {"key": "env_settings.seed"},
    "--track": {"key": None},
    "--env": {"key": "env_settings.env_path"},
    "--attach": {"key": "env_settings.num_envs"},
    "--listen": {"key": None},
    "--token-file": {"key": None},
    "--torch-device": {"key": "torch_settings.device"},
    "--deterministic": {"behavior_key": "network_settings.deterministic"},
    "--keep-checkpoints": {"behavior_key": "keep_checkpoints"},
    "--save-freq": {"behavior_key": "checkpoint_interval"},
    "--load": {"key": "checkpoint_settings.resume"},
    "--train": {"key": "checkpoint_settings.train_model"},
    "--slow": {"key": "engine_settings.time_scale", "value": 1},
    "--cpu": {"key": "torch_settings.device", "value": "cpu"},
}
"""Which settings an option changes, where they are not those of its group with its own name."""


def _option(group: str, spec: str, text: str) -> Option:
    """Return the option of a line of the table."""
    flag, _, metavar = spec.partition(" ")
    more = dict(_SETTINGS.get(flag, {}))
    if group in _SECTIONS:
        name = flag.removeprefix("--").replace("-", "_")
        # Most options have the name of their setting, as in ML-Agents.
        more.setdefault("key", f"{_SECTIONS[group]}.{name}")
    note = text if group == "retired" else None
    return Option(flag=flag, group=group, help=text, metavar=metavar or None, note=note, **more)


OPTIONS = tuple(
    _option(group, spec, text) for group, lines in _TABLE.items() for spec, text in lines.items()
)
BY_DEST = {option.dest: option for option in OPTIONS}


def add_options(parser: Parser) -> None:
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
    parser.retired = {option.dest for option in OPTIONS if option.note is not None}


def run(arguments: argparse.Namespace) -> str:
    """Train, and say where the results are; beyond the first of several learners, only train.

    Raises:
        PipelineError: The configuration or the environment cannot be used, or a signal stopped
            the run after its state was saved.
    """
    from pipeline.algos.process_group import launched

    if launched()[0] > 0:
        # torchrun has started this process to help the first one, which has the settings
        from pipeline.trainer.distributed.worker import work

        sys.exit(work())
    from pipeline.commands.learn_settings import plan_of

    plan = plan_of(arguments)  # a mistake is told before seconds of imports
    from pipeline.commands.learn_run import learn

    return learn(plan)


def _arguments(option: Option) -> dict[str, Any]:
    """Return what argparse is told; it leaves checking values to the settings."""
    # without defaults, only what was given wins over the configuration file
    common = {"dest": option.dest, "default": argparse.SUPPRESS, "help": option.help}
    if option.kind == "switch":
        return {**common, "action": "store_true"}
    if option.kind == "rest":
        return {**common, "nargs": argparse.REMAINDER}
    if option.kind == "list":
        return {**common, "metavar": option.metavar, "action": "append"}
    kind = _number if option.kind == "number" else str
    return {**common, "metavar": option.metavar, "type": kind}


def _number(text: str) -> int | float | str:
    """Read a number; other texts stay, for the settings to name what is wrong with them."""
    # int first: `--num-envs 4` has to be 4 and not 4.0.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
