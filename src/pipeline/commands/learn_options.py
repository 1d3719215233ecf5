"""The table of options of `pipeline learn`: the help's groups and texts, and what each changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.settings.experiments import SINKS

GROUPS = {
    "run": "Which run this is, where it is kept, and what it starts from.",
    "environment": "What to train in. Without --env: the Unity Editor, on port 5004, or --attach.",
    "engine": "What the game engine is told when the environment has connected.",
    "networks": "Where networks are computed, and how they act.",
    "retired": "Options of older releases. They still work, and name the present way when used.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, and the settings that it changes."""

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
    """For a retired option: the line that names the present way."""

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


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
        "--track NAME": "where summaries go beside console and progress.csv: "
        f"{', '.join(SINKS.ours)}, or a sink of an installed package; several with commas, or the "
        "option again (default: tensorboard, and what all installed packages bring)",
        "--inference": "act without learning, until stopped; with --resume or --initialize-from",
        "--num-runs N": "this many runs, one after another: <run-id>-0 with the seed, <run-id>-1 "
        "with the seed after it, ...; experiments in params.yaml run side by side (default: 1)",
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
        "--torch-device DEVICE": "cpu, cuda, cuda:0, ... (default: the fastest one, measured)",
        "--torch-compile": "compile gradient steps, where a C++ compiler is installed: smaller "
        "networks learn up to twice as fast, after some seconds",
        "--portable": "choose the same kernels on every x86-64 with AVX, so that another one gives "
        "the same bytes; slower, and on the CPU only",
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
    # None means that the option changes no setting; `setdefault` below keeps it.
    "--num-runs": {"key": None},
    "--track": {"key": None},
    "--env": {"key": "env_settings.env_path"},
    # Players are counted as environments are: without --env both options mean the same.
    "--attach": {"key": "env_settings.num_envs"},
    "--torch-device": {"key": "torch_settings.device"},
    "--torch-compile": {"key": "torch_settings.compile"},
    "--portable": {"key": None},
    "--deterministic": {"behavior_key": "network_settings.deterministic"},
    "--keep-checkpoints": {"behavior_key": "keep_checkpoints"},
    "--save-freq": {"behavior_key": "checkpoint_interval"},
    "--load": {"key": "checkpoint_settings.resume"},
    "--train": {"key": "checkpoint_settings.train_model"},
    "--slow": {"key": "engine_settings.time_scale", "value": 1},
    "--cpu": {"key": "torch_settings.device", "value": "cpu"},
}
"""Settings that an option changes, where not the one of its own name in its group's section."""


def _option(group: str, spec: str, text: str) -> Option:
    """Return the option of a line of the table."""
    flag, _, metavar = spec.partition(" ")
    more = dict(_SETTINGS.get(flag, {}))
    # Retired options and those of networks have no section: `_SETTINGS` lists their settings.
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
