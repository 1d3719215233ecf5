"""The options of `pipeline learn`, and the settings of its runs made from a command line."""

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
from pipeline.settings.nodes import from_plain
from pipeline.settings.project.experiments import SINKS, SinkNames
from pipeline.settings.reader import ContradictionError, Count, CountOrZero, read, setting_hints
from pipeline.settings.trainer.run_file import refuse_missing_demonstrations
from pipeline.settings.trainer.schema import EnvironmentSettings

_log = logging.getLogger(__name__)

SOURCE = "command line"
_LAST_PORT = 65535
_DEFAULT_PORT = EnvironmentSettings().base_port

# Each row has an old switch, the present option that replaces it, and this option's value.
_SAME = (("cpu", "torch_device", "cpu"), ("slow", "time_scale", 1))


GROUPS = {
    "run": "Name, folder and initial state of the run.",
    "environment": "The environment to train in. Default: the Unity Editor, on port 5004.",
    "engine": "Settings that the game engine gets when the environment has connected.",
    "networks": "Processes, devices and actions of the networks.",
    "retired": "Options of older releases. They still work, and log what replaces them.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of `pipeline learn`, and the setting that it changes."""

    flag: str
    group: str
    help: str
    metavar: str | None = None
    """Name of the value in the help; None for a switch."""
    key: str | None = None
    """Dotted key of the setting that the option changes."""
    behavior_key: str | None = None
    """Dotted key of the setting that the option changes in every behavior and in
    default_settings."""
    value: Any = True
    """For a switch: the value that it gives to the setting."""
    note: str | None = None
    """For a retired option: what it did, and what replaces it; None for a present option."""

    @property
    def dest(self) -> str:
        """The option's attribute in the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


_SECTIONS = {
    "run": "checkpoint_settings",
    "environment": "env_settings",
    "engine": "engine_settings",
}
"""For a group of options: the section with the settings that these options change."""

_TABLE = {
    "run": {
        "--run-id ID": "name of the run, and of its folder (default: ppo)",
        "--results-dir DIR": "folder of all runs (default: results)",
        "--resume": "continue the run of this id from its last checkpoint",
        "--force": "start a new run with an id that has been used; the earlier run's folder is "
        "renamed to <run-id>.1, .2, ...",
        "--initialize-from ID": "start at step 0 with the weights of another run in the same "
        "results folder",
        "--track NAME": "where to write summaries, in addition to the console and progress.csv: "
        f"{', '.join(SINKS.ours)}, or a sink of an installed package; for several sinks use "
        "commas or repeat the option (default: tensorboard, and the sinks of installed packages)",
        "--inference": "act without learning until you stop the run; also give --resume or "
        "--initialize-from",
        "--num-runs N": "number of runs, one after another: <run-id>-0 with the seed, <run-id>-1 "
        "with the next seed, ...; for parallel runs use experiments in params.yaml (default: 1)",
        "--seed N": "seed of all random numbers (default: -1, a random seed, which is printed)",
    },
    "environment": {
        "--env NAME": "the environment: the path of an executable, balance_ball, gymnasium:ID, "
        "pettingzoo:ID or module:function (default: wait for the Unity Editor)",
        "--num-envs N": "number of executables that run in parallel, in lockstep (default: 1); "
        "without --env the same as --attach",
        "--attach N": "wait for N players that you start, the first on port 5004 or --base-port, "
        "the other players on the following ports",
        "--num-areas N": "number of training areas in each environment, if it can replicate its "
        "area (default: 1)",
        "--base-port PORT": "port of the first environment; the others get the following ports "
        "(default: free ports that the system chooses); ignored for a single Editor without "
        "--attach",
        "--timeout-wait S": "seconds to wait for an environment's answer, and for all players to "
        "connect (default: 60)",
        "--max-lifetime-restarts N": "maximum number of restarts of an environment in a run, -1 "
        "for any number (default: 10)",
        "--restarts-rate-limit-n N": "maximum number of restarts of an environment within the "
        "period of --restarts-rate-limit-period-s, -1 for any number (default: 1)",
        "--restarts-rate-limit-period-s S": "length in seconds of the period of "
        "--restarts-rate-limit-n (default: 60)",
        "--env-args ...": "pass everything after this to the executable; give it last",
    },
    "engine": {
        "--width N": "width of the window in pixels (default: 84)",
        "--height N": "height of the window in pixels (default: 84)",
        "--quality-level N": "rendering quality (default: 5)",
        "--time-scale X": "how many times faster than real time the environment may run (default: "
        "20)",
        "--target-frame-rate N": "frames per second, -1 for as many as possible (default: -1)",
        "--capture-frame-rate N": "frames per second of simulated time (default: 60)",
        "--no-graphics": "run without rendering",
        "--no-graphics-monitor": "render only the first environment",
    },
    "networks": {
        "--learners N": "number of processes that learn together, each with --num-envs "
        "environments (default: 1, or the number of processes that torchrun has started)",
        "--torch-device DEVICE": "device of the networks: cpu, cuda, cuda:0, ... (default: the "
        "device that is measured to be the fastest)",
        "--threads N": "number of torch's threads (default: the number that is measured to be the "
        "fastest)",
        "--torch-compile": "compile gradient steps, if a C++ compiler is installed: smaller "
        "networks learn up to twice as fast, after compiling for some seconds",
        "--portable": "use the same kernels on every x86-64 CPU with AVX, so that all these CPUs "
        "give the same results bit for bit; slower, and only on the CPU",
        "--deterministic": "take the mean or the most probable action, also in training",
    },
    "retired": {
        "--curriculum FILE": "file with lessons; write the lessons under environment_parameters in "
        "CONFIG instead",
        "--sampler FILE": "file with samplers; write the samplers under environment_parameters in "
        "CONFIG instead",
        "--lesson N": "lesson at which every curriculum starts; remove the earlier lessons from "
        "CONFIG instead",
        "--keep-checkpoints N": "number of checkpoints to keep; give keep_checkpoints of each "
        "behavior in CONFIG instead",
        "--save-freq N": "steps between two checkpoints; give checkpoint_interval of each behavior "
        "in CONFIG instead",
        "--load": "resumes a run; give --resume instead",
        "--train": "no effect, because a run trains unless --inference is given",
        "--slow": "runs the environment in real time; give --time-scale 1 instead",
        "--worker-id N": "number that is added to --base-port; give the sum as --base-port instead",
        "--docker-target-name NAME": "all relative paths (CONFIG, environment, results) are below "
        "/NAME/; mount the volume and give absolute paths instead",
        "--cpu": "uses the CPU for the networks; give --torch-device cpu instead",
        "--multi-gpu": "no effect, because a run uses one device, which --torch-device chooses",
        "--torch": "no effect, because networks always use PyTorch",
        "--tensorflow": "no effect, because networks always use PyTorch",
    },
}
"""Every option except `--debug`, `--version` and `--help`, by group: the flag with its value's name
(a switch has none), and the help, which for a retired option gives the present option."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "--seed": {"key": "env_settings.seed"},
    # None means that the option changes no setting; `setdefault` in `_option` does not replace
    # None.
    "--num-runs": {"key": None},
    "--track": {"key": None},
    "--env": {"key": "env_settings.env_path"},
    # Each player counts as an environment, so `--attach` sets the same key as `--num-envs`.
    "--attach": {"key": "env_settings.num_envs"},
    "--torch-device": {"key": "torch_settings.device"},
    "--torch-compile": {"key": "torch_settings.compile"},
    "--threads": {"key": "torch_settings.threads"},
    "--portable": {"key": None},
    "--deterministic": {"behavior_key": "network_settings.deterministic"},
    "--keep-checkpoints": {"behavior_key": "keep_checkpoints"},
    "--save-freq": {"behavior_key": "checkpoint_interval"},
    "--load": {"key": "checkpoint_settings.resume"},
    "--train": {"key": "checkpoint_settings.train_model"},
    "--slow": {"key": "engine_settings.time_scale", "value": 1},
    "--cpu": {"key": "torch_settings.device", "value": "cpu"},
}
"""Fields of `Option`, by flag, for each option that does not change the setting of the same name in
its group's section."""


def _option(group: str, spec: str, text: str) -> Option:
    flag, _, metavar = spec.partition(" ")
    more = dict(_SETTINGS.get(flag, {}))
    # The groups `retired` and `networks` have no section: `_SETTINGS` lists their settings.
    if group in _SECTIONS:
        name = flag.removeprefix("--").replace("-", "_")
        # Most options have the name of their setting, as in ML-Agents.
        more.setdefault("key", f"{_SECTIONS[group]}.{name}")
    note = text if group == "retired" else None
    shown = f"old option: {text}" if note else text
    return Option(flag=flag, group=group, help=shown, metavar=metavar or None, note=note, **more)


OPTIONS = tuple(
    _option(group, spec, text) for group, lines in _TABLE.items() for spec, text in lines.items()
)
BY_DEST = {option.dest: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The runs to train, according to the command line and the configuration file."""

    settings: RunSettings
    flags: Mapping[str, str]
    """The given options, by the key of the setting that each changes."""
    base_port: int | None = None
    """Port of the first environment if the user has chosen it; None for free ports."""
    starting_lesson: int | None = None
    """Number of the lesson at which every curriculum starts; None if not given."""
    n_runs: int = 1
    """Number of runs, one after another."""
    learners: int = 1
    """Number of processes that learn together."""
    track: Sequence[str] | None = None
    """Names of sinks; None for the default sinks."""
    config: str = "built-in"
    """Path of the configuration file, or `built-in`."""

    def run(self, number: int) -> RunSettings:
        """Return the settings of the run `number`, counted from 0."""
        settings = self.settings
        if self.n_runs == 1:
            return settings
        checkpoint, env = settings.checkpoint_settings, settings.env_settings
        run_id = f"{checkpoint.run_id}-{number}"
        exists = (Path(checkpoint.results_dir) / run_id).exists()
        # A negative seed means that each run draws a new seed.
        seed = env.seed if env.seed < 0 else env.seed + number
        return replace(
            settings,
            checkpoint_settings=replace(
                checkpoint, run_id=run_id, resume=checkpoint.resume and exists
            ),
            env_settings=replace(env, seed=seed),
        )


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the runs that the command line and the configuration file ask for.

    Raises:
        SettingsError: A value cannot be used, or options contradict each other or the file.
    """
    options = {dest: value for dest, value in vars(arguments).items() if dest in BY_DEST}
    _refuse_contradictions(options)
    for dest in options:
        if (note := BY_DEST[dest].note) is not None:
            _log.warning("%s is retired: %s", BY_DEST[dest].flag, note)
    # `options` has only options that were given, so the other settings keep the file's values.
    overrides, flags = _overrides(options)
    if arguments.debug:
        overrides["debug"] = True
    if "attach" in options:
        overrides["env_settings.env_path"] = None  # --attach overrides the file's executable
    if "portable" in options and overrides.setdefault("torch_settings.device", "cpu") != "cpu":
        device = overrides["torch_settings.device"]
        raise SettingsError(f"--portable: {device!r} chooses its own kernels; use the CPU")
    _refuse_environment(arguments.config)
    with flags_named(flags):
        numbers = _checked_numbers(options)
        track = _tracked(options)
        settings = load_run_settings(
            _path_below_volume(options, arguments.config),
            overrides=overrides,
            overrides_from=SOURCE,
            curriculum=_path_below_volume(options, options.get("curriculum")),
            sampler=_path_below_volume(options, options.get("sampler")),
            demonstrations_in=Path(),
        )
        settings = _below_volume(_for_every_behavior(settings, options), options)
    refuse_missing_demonstrations(settings)
    # Contradictions are resolved after the configuration file is read, because options may
    # contradict the file.
    settings = _resolved_contradictions(settings, options)
    n_runs = numbers.get("num_runs", 1)
    if n_runs > 1 and settings.env_settings.env_path is None:
        raise SettingsError(f"--num-runs: {n_runs} runs need an executable; give --env, or 1 run")
    if n_runs > 1 and max(numbers.get("learners", 1), launched()[1]) > 1:
        raise SettingsError(
            f"--num-runs: {n_runs} runs cannot be trained by several learners; start the runs one "
            "by one"
        )
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
    """Refuse the name of an environment where the path CONFIG is expected."""
    from pipeline.settings.project.environments import BridgeSource, named
    from pipeline.simulators import registry

    meant = None
    if config is not None and not Path(config).exists():
        # `named` raises an error for a text that names no environment.
        with contextlib.suppress(SettingsError):
            # `pipeline learn balance_ball` is a common first mistake.
            meant = named(config)
    if config in registry.SIMULATORS or isinstance(meant, BridgeSource):
        command = shell_command("pipeline", "learn", "--env", config)
        raise SettingsError(
            f"{config}: is an environment, but CONFIG is a trainer configuration; `{command}` "
            "trains with the built-in settings; for other settings put CONFIG before --env"
        )


@contextlib.contextmanager
def flags_named(flags: Mapping[str, str]) -> Iterator[None]:
    """Make the errors of a `with` block name the option in `flags` in place of a setting's key."""
    try:
        yield
    except SettingsError as error:
        mistakes = Mistakes()
        mistakes.found = [_of_flag(part, flags) for part in error.parts]
        # If no error is about an option, the original error is raised, with its traceback.
        if mistakes.found == error.parts:
            raise
        mistakes.refuse()


def _of_flag(error: SettingsError, flags: Mapping[str, str]) -> SettingsError:
    key, _, message = str(error).removeprefix(f"{SOURCE}: ").partition(": ")
    return SettingsError(f"{flags[key]}: {message}") if key in flags else error


def _overrides(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that options give to settings, and the options, by dotted key."""
    overrides: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for option in OPTIONS:  # `OPTIONS` lists present options before retired ones
        if option.dest not in options:
            continue
        # Present options come first, so an error names the present option of a setting.
        flags.setdefault(option.key or option.dest, option.flag)
        if option.key is not None:
            value = option.value if option.metavar is None else options[option.dest]
            overrides.setdefault(option.key, value)
    return overrides, flags


def _checked_numbers(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the checked values of numeric options that do not change a setting."""
    kinds = {"worker_id": CountOrZero, "lesson": CountOrZero, "num_runs": Count, "learners": Count}
    return {
        dest: int(read(kind, from_plain(options[dest], SOURCE), dest))
        for dest, kind in kinds.items()
        if dest in options
    }


def _tracked(options: Mapping[str, Any]) -> SinkNames | None:
    """Return the names of sinks that --track gives; each use of it may list several names."""
    if "track" not in options:
        return None
    names = [name.strip() for text in options["track"] for name in text.split(",") if name.strip()]
    return SinkNames.from_node(from_plain(names, SOURCE), "track")


_NEW_RUN = "--force starts a new run; leave one of them out"
_CONTRADICTIONS = {
    # `--load` is the old name of `--resume`, and errors name what the user wrote.
    ("resume", "force"): _NEW_RUN,
    ("load", "force"): _NEW_RUN,
    ("inference", "force"): "a new run has no trained networks; use --resume or --initialize-from",
    ("attach", "env"): "--attach waits for players and starts no executable; leave one of them out",
}
"""For each pair of options that cannot be given together: the end of the error."""


def _refuse_contradictions(options: Mapping[str, Any]) -> None:
    for pair, text in _CONTRADICTIONS.items():
        if options.keys() >= set(pair):
            flags = " and ".join(BY_DEST[dest].flag for dest in pair)
            raise SettingsError(f"{flags} contradict each other: {text}")
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


def _resolved_contradictions(settings: RunSettings, options: Mapping[str, Any]) -> RunSettings:
    """Return settings with at most one of resume, force and initialize_from: options win."""
    checkpoints = settings.checkpoint_settings
    resume = checkpoints.resume or checkpoints.load_model
    force, source = checkpoints.force, checkpoints.initialize_from
    by_option = "resume" in options or "load" in options
    if resume and force:
        if not by_option and "force" not in options:
            raise SettingsError(
                "checkpoint_settings: resume and force contradict each other; keep one of them"
            )
        # Either --resume or --force was given as an option, and an option wins over the file.
        resume, force = by_option, not by_option
    if resume and source is not None:
        if "initialize_from" in options and not by_option:
            resume, winner, loser = False, "--initialize-from", "resume in the file"
        else:
            source, winner, loser = None, "resume", "initialize_from"
        _log.warning("%s and %s exclude each other: the second is ignored.", winner, loser)
    has_weights = any(trainer.init_path is not None for trainer in settings.sections.values())
    if checkpoints.inference and not (resume or source or has_weights):
        if force:
            raise SettingsError(
                "checkpoint_settings: inference and force contradict each other: a new run has no "
                "trained networks; use resume or initialize_from"
            )
        _log.warning(
            "The networks are untrained: --inference needs --resume or --initialize-from to show a "
            "trained run."
        )
    changed = replace(checkpoints, resume=resume, force=force, initialize_from=source)
    return replace(settings, checkpoint_settings=changed)


def _fixed_port(settings: RunSettings, options: Mapping[str, Any], worker: int) -> int | None:
    """Return the first environment's port if the user has chosen it; None for a single Editor."""
    env = settings.env_settings
    chosen = [BY_DEST[dest].flag for dest in ("base_port", "worker_id") if dest in options]
    if env.env_path is None and env.num_envs == 1 and "attach" not in options:
        for flag in chosen:
            _log.warning(
                "%s is ignored: the Unity Editor always uses port 5004; --attach 1 uses another "
                "port.",
                flag,
            )
        return None
    # The default port in the settings means that no port was chosen. Free ports are used then, so
    # that several runs can use one machine.
    if not chosen and env.base_port == _DEFAULT_PORT:
        return None
    # As in ML-Agents, the worker's id is added to the base port.
    port = env.base_port + worker
    if port + env.num_envs - 1 > _LAST_PORT:
        raise SettingsError(
            f"{chosen[-1] if chosen else 'env_settings.base_port'}: {env.num_envs} environments "
            f"from port {port} on need ports above {_LAST_PORT}, the largest; use a smaller port"
        )
    return port


def _path_below_volume(options: Mapping[str, Any], path: str | None) -> Path | None:
    """Return `path`, below the volume of --docker-target-name if this option was given."""
    if path is None:
        return None
    name = options.get("docker_target_name")
    return Path(path) if name is None else Path("/") / name / path


def _below_volume(settings: RunSettings, options: Mapping[str, Any]) -> RunSettings:
    """Return settings with executable and results below the volume of --docker-target-name."""
    if "docker_target_name" not in options:
        return settings
    env, checkpoint = settings.env_settings, settings.checkpoint_settings
    path = env.env_path
    if path is not None and ":" not in path:  # gymnasium:ID is no path
        path = str(_path_below_volume(options, path))
    return replace(
        settings,
        env_settings=replace(env, env_path=path),
        checkpoint_settings=replace(
            checkpoint, results_dir=str(_path_below_volume(options, checkpoint.results_dir))
        ),
    )


def _for_every_behavior(settings: RunSettings, options: Mapping[str, Any]) -> RunSettings:
    """Return settings with the options that change every behavior, also behaviors not listed."""
    for option in OPTIONS:
        if option.behavior_key is None or option.dest not in options:
            continue
        value = from_plain(options[option.dest], SOURCE)
        default = settings.default_settings
        # Without a configuration file, every behavior has the built-in settings, which `settings`
        # still lacks.
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
    # `replace` makes a new object at each level, because settings are frozen.
    head, _, rest = key.partition(".")
    if rest:
        return replace(settings, **{head: _with(getattr(settings, head), rest, value)})
    return replace(settings, **{head: read(setting_hints(type(settings))[head], value, head)})
