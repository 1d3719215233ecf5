"""The options of `pipeline learn`, and how a command line becomes the settings of its runs."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.algos.process_group import launched
from pipeline.errors import Mistakes, SettingsError, shell_command
from pipeline.settings import RunSettings, TrainerSettings, load_run_settings
from pipeline.settings.experiments import SINKS, SinkNames
from pipeline.settings.nodes import from_plain
from pipeline.settings.reader import ContradictionError, Count, CountOrZero, read, setting_hints
from pipeline.settings.run_file import refuse_missing_demonstrations
from pipeline.settings.schema import EnvironmentSettings

_log = logging.getLogger(__name__)

SOURCE = "command line"
_LAST_PORT = 65535
_DEFAULT_PORT = EnvironmentSettings().base_port

# An old switch, the present option that replaces it, and that option's equivalent value.
_SAME = (("cpu", "torch_device", "cpu"), ("slow", "time_scale", 1))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The request of command line and configuration file."""

    settings: RunSettings
    flags: Mapping[str, str]
    """The options that were given, by the key of the setting that they change."""
    base_port: int | None = None
    """Port of the first environment if the user chose it; None for free ports."""
    starting_lesson: int | None = None
    """Lesson at which every curriculum starts; None if not given."""
    n_runs: int = 1
    """Runs to make, one after another."""
    learners: int = 1
    """Processes that learn together."""
    track: Sequence[str] | None = None
    """Names of sinks; None for the default ones."""
    config: str = "built-in"
    """The configuration file."""

    def run(self, number: int) -> RunSettings:
        """Return the settings of one of the runs, counted from 0."""
        settings = self.settings
        if self.n_runs == 1:
            return settings
        checkpoint, env = settings.checkpoint_settings, settings.env_settings
        run_id = f"{checkpoint.run_id}-{number}"
        exists = (Path(checkpoint.results_dir) / run_id).exists()
        # A negative seed is drawn anew for each run.
        seed = env.seed if env.seed < 0 else env.seed + number
        return replace(
            settings,
            checkpoint_settings=replace(
                checkpoint, run_id=run_id, resume=checkpoint.resume and exists
            ),
            env_settings=replace(env, seed=seed),
        )


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Combine command line and file, and refuse contradictions."""
    options = {dest: value for dest, value in vars(arguments).items() if dest in BY_DEST}
    _refuse_contradictions(options)
    for dest in options:
        if (note := BY_DEST[dest].note) is not None:
            _log.warning("%s is retired: %s", BY_DEST[dest].flag, note)
    overrides, flags = _overrides(options)
    if arguments.debug:
        overrides["debug"] = True
    if "attach" in options:
        overrides["env_settings.env_path"] = None  # of the file, where there is one
    if "portable" in options and overrides.setdefault("torch_settings.device", "cpu") != "cpu":
        device = overrides["torch_settings.device"]
        raise SettingsError(f"--portable: {device!r} chooses kernels of its own; use the CPU")
    _refuse_environment(arguments.config)
    with flags_named(flags):
        numbers = _checked_numbers(options)
        track = _tracked(options)
        settings = load_run_settings(
            _inside(options, arguments.config),
            overrides=overrides,
            overrides_from=SOURCE,
            curriculum=_inside(options, options.get("curriculum")),
            sampler=_inside(options, options.get("sampler")),
            demonstrations_in=Path(),
        )
        settings = _moved(_for_every_behavior(settings, options), options)
    refuse_missing_demonstrations(settings)
    # After reading: one half of a contradiction may stand in the file, the other on the command
    # line.
    settings = _decided(settings, options)
    n_runs = numbers.get("num_runs", 1)
    if n_runs > 1 and settings.env_settings.env_path is None:
        raise SettingsError(f"--num-runs: {n_runs} runs need an executable; give --env, or 1")
    if n_runs > 1 and max(numbers.get("learners", 1), launched()[1]) > 1:
        raise SettingsError(f"--num-runs: {n_runs} runs cannot share learners; start them singly")
    return Plan(
        settings=settings,
        flags=flags,
        base_port=_fixed_port(settings, options, numbers.get("worker_id", 0)),
        starting_lesson=numbers.get("lesson"),
        n_runs=n_runs,
        learners=numbers.get("learners", 1),
        track=track,
        config=arguments.config or "built-in",
    )


def _refuse_environment(config: str | None) -> None:
    """Refuse the name of an environment in place of the configuration."""
    from pipeline.settings.environments import BridgeSource, named
    from pipeline.simulators import registry

    meant = None
    if config is not None and not Path(config).exists():
        with contextlib.suppress(SettingsError):  # of no form of an environment's name
            meant = named(config)
    if config in registry.SIMULATORS or isinstance(meant, BridgeSource):
        command = shell_command("pipeline", "learn", "--env", config)
        raise SettingsError(
            f"{config}: is an environment, and CONFIG is a trainer configuration; `{command}` "
            "trains with the built-in settings, CONFIG before --env with others"
        )


@contextlib.contextmanager
def flags_named(flags: Mapping[str, str]) -> Iterator[None]:
    """Name the option instead of the setting in errors; `flags` has options by setting."""
    try:
        yield
    except SettingsError as error:
        mistakes = Mistakes()
        mistakes.found = [_of_flag(part, flags) for part in error.parts]
        if mistakes.found == error.parts:
            raise
        mistakes.refuse()


def _of_flag(error: SettingsError, flags: Mapping[str, str]) -> SettingsError:
    key, _, message = str(error).removeprefix(f"{SOURCE}: ").partition(": ")
    return SettingsError(f"{flags[key]}: {message}") if key in flags else error


def _overrides(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that options change, and the option that changes each."""
    overrides: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for option in OPTIONS:  # present ones first
        if option.dest not in options:
            continue
        flags.setdefault(option.key or option.dest, option.flag)
        if option.key is not None:
            value = option.value if option.metavar is None else options[option.dest]
            overrides.setdefault(option.key, value)
    return overrides, flags


def _checked_numbers(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the checked values of number options that are no settings."""
    kinds = {"worker_id": CountOrZero, "lesson": CountOrZero, "num_runs": Count, "learners": Count}
    return {
        dest: int(read(kind, from_plain(options[dest], SOURCE), dest))
        for dest, kind in kinds.items()
        if dest in options
    }


def _tracked(options: Mapping[str, Any]) -> SinkNames | None:
    """Return the names of sinks; --track may be repeated and may list several with commas."""
    if "track" not in options:
        return None
    names = [name.strip() for text in options["track"] for name in text.split(",") if name.strip()]
    return SinkNames.from_node(from_plain(names, SOURCE), "track")


def _refuse_contradictions(options: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other."""
    resume_flag = next((BY_DEST[dest].flag for dest in ("resume", "load") if dest in options), None)
    if resume_flag is not None and "force" in options:
        raise SettingsError(
            f"{resume_flag} and --force contradict each other: continue it, or begin it?"
        )
    if "inference" in options and "force" in options:
        raise SettingsError(
            "--inference and --force contradict each other: a new run has learned nothing to show; "
            "use --resume or --initialize-from"
        )
    if "attach" in options and "env" in options:
        raise SettingsError(
            "--attach and --env contradict each other: what waits for players starts none; leave "
            "one of them out"
        )
    if "attach" in options and options.get("num_envs", options["attach"]) != options["attach"]:
        raise SettingsError(
            f"--attach {options['attach']} and --num-envs {options['num_envs']} contradict each "
            "other: every environment is a player; leave --num-envs out"
        )
    for old, new, value in _SAME:
        if old in options and options.get(new, value) != value:
            raise SettingsError(
                f"{BY_DEST[old].flag} and {BY_DEST[new].flag} {options[new]} contradict each "
                f"other; keep {BY_DEST[new].flag}"
            )


def _decided(settings: RunSettings, options: Mapping[str, Any]) -> RunSettings:
    """Decide between resume, force and initialize_from; an option wins over the file."""
    checkpoints = settings.checkpoint_settings
    resume, force, source = (
        checkpoints.resume or checkpoints.load_model,
        checkpoints.force,
        checkpoints.initialize_from,
    )
    by_option = "resume" in options or "load" in options
    if resume and force:
        if not by_option and "force" not in options:
            raise SettingsError(
                "checkpoint_settings: resume and force contradict each other; keep one of them"
            )
        # Exactly one of them came from the command line here, and it wins over the file.
        resume, force = by_option, not by_option
    if resume and source is not None:
        if "initialize_from" in options and not by_option:
            resume, winner, loser = False, "--initialize-from", "resume in the file"
        else:
            source, winner, loser = None, "resume", "initialize_from"
        _log.warning("Both cannot be done: %s counts, %s is ignored.", winner, loser)
    behaviors = [*settings.behaviors.values(), settings.default_settings]
    has_weights = any(
        behavior is not None and behavior.init_path is not None for behavior in behaviors
    )
    if checkpoints.inference and not (resume or source or has_weights):
        if force:
            raise SettingsError(
                "checkpoint_settings: inference and force contradict each other: a new run has "
                "learned nothing to show; use resume or initialize_from"
            )
        _log.warning(
            "The networks are untrained: --inference shows a run with --resume or "
            "--initialize-from."
        )
    changed = replace(checkpoints, resume=resume, force=force, initialize_from=source)
    return replace(settings, checkpoint_settings=changed)


def _fixed_port(settings: RunSettings, options: Mapping[str, Any], worker: int) -> int | None:
    """Return the first environment's port if the user chose it; a single Editor has its own."""
    env = settings.env_settings
    chosen = [BY_DEST[dest].flag for dest in ("base_port", "worker_id") if dest in options]
    if env.env_path is None and env.num_envs == 1 and "attach" not in options:
        for flag in chosen:
            _log.warning(
                "%s is ignored: the Unity Editor has a port of its own; with --attach 1 it counts.",
                flag,
            )
        return None
    # The default means that no port was chosen: free ports let several runs share a machine.
    if not chosen and env.base_port == _DEFAULT_PORT:
        return None
    # ML-Agents added the worker's number to the base port.
    port = env.base_port + worker
    if port + env.num_envs - 1 > _LAST_PORT:
        raise SettingsError(
            f"{chosen[-1] if chosen else 'env_settings.base_port'}: {env.num_envs} environments "
            f"from port {port} on go beyond {_LAST_PORT}, the last port there is"
        )
    return port


def _inside(options: Mapping[str, Any], path: str | None) -> Path | None:
    """Return a path below the volume of --docker-target-name, if that was given."""
    if path is None:
        return None
    name = options.get("docker_target_name")
    return Path(path) if name is None else Path("/") / name / path


def _moved(settings: RunSettings, options: Mapping[str, Any]) -> RunSettings:
    """Move executable and results below the volume of --docker-target-name, if given."""
    if "docker_target_name" not in options:
        return settings
    env, checkpoint = settings.env_settings, settings.checkpoint_settings
    path = env.env_path
    if path is not None and ":" not in path:  # else it is no path
        path = str(_inside(options, path))
    return replace(
        settings,
        env_settings=replace(env, env_path=path),
        checkpoint_settings=replace(
            checkpoint, results_dir=str(_inside(options, checkpoint.results_dir))
        ),
    )


def _for_every_behavior(settings: RunSettings, options: Mapping[str, Any]) -> RunSettings:
    """Apply options to all behaviors, including those that the file does not list."""
    for option in OPTIONS:
        if option.behavior_key is None or option.dest not in options:
            continue
        value = from_plain(options[option.dest], SOURCE)
        default = settings.default_settings
        # Without a file every behavior has the built-in settings, which `settings` does not list
        # yet.
        if default is None and not settings.from_file:
            default = TrainerSettings()
        try:
            settings = replace(
                settings,
                default_settings=default and _with(default, option.behavior_key, value),
                behaviors={
                    name: _with(behavior, option.behavior_key, value)
                    for name, behavior in settings.behaviors.items()
                },
            )
        except ContradictionError as error:
            raise SettingsError(f"{option.flag}: {error.message}") from error
        except SettingsError as error:
            message = str(error).removeprefix(f"{SOURCE}: {option.behavior_key}: ")
            raise SettingsError(f"{option.flag}: {message}") from error
    return settings


def _with(settings: Any, key: str, value: Any) -> Any:
    """Return the settings with the dotted `key` set to `value`."""
    # `replace` on each level, since settings are frozen and check themselves when created.
    head, _, rest = key.partition(".")
    if rest:
        return replace(settings, **{head: _with(getattr(settings, head), rest, value)})
    return replace(settings, **{head: read(setting_hints(type(settings))[head], value, head)})
