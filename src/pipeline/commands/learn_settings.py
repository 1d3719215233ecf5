"""From the command line of `pipeline learn` to the settings of its runs."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.algos.process_group import launched
from pipeline.commands.learn_options import BY_DEST, OPTIONS
from pipeline.errors import SettingsError
from pipeline.protocol.token import read_token
from pipeline.settings import TrainerSettings, load_run_settings
from pipeline.settings.experiments import SinkNames
from pipeline.settings.named_files import refuse_missing_demonstrations
from pipeline.settings.nodes import from_plain
from pipeline.settings.reader import ContradictionError, Count, CountOrZero, read, setting_hints
from pipeline.settings.schema.run import EnvironmentSettings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.settings import RunSettings

_log = logging.getLogger(__name__)

SOURCE = "command line"
_LAST_PORT = 65535
_DEFAULT_PORT = EnvironmentSettings().base_port

# An old switch, the present option that says the same, and the value that does not contradict it.
_SAME = (("cpu", "torch_device", "cpu"), ("slow", "time_scale", 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the command line and the configuration file ask for."""

    settings: RunSettings
    flags: Mapping[str, str]
    """The options that were given, by the key of the setting that they change."""
    base_port: int | None = None
    """Port of the first environment when someone chose it; None for free ones."""
    starting_lesson: int | None = None
    """Lesson that every curriculum starts at, when it was given."""
    n_runs: int = 1
    """Runs to make, one after another."""
    learners: int = 1
    """Processes that learn together."""
    track: Sequence[str] | None = None
    """Sinks by name; None for those of every run."""
    config: str = "built-in"
    """The configuration file."""
    listen: tuple[str, bytes] | None = field(default=None, repr=False)
    """Where players of other machines call, and the token that they say."""

    def run(self, number: int) -> RunSettings:
        """Return the settings of one of the runs, counted from 0."""
        settings = self.settings
        if self.n_runs == 1:
            return settings
        checkpoint, env = settings.checkpoint_settings, settings.env_settings
        run_id = f"{checkpoint.run_id}-{number}"
        there = (Path(checkpoint.results_dir) / run_id).exists()
        # A negative seed is drawn anew for each run.
        seed = env.seed if env.seed < 0 else env.seed + number
        return replace(
            settings,
            checkpoint_settings=replace(
                checkpoint, run_id=run_id, resume=checkpoint.resume and there
            ),
            env_settings=replace(env, seed=seed),
        )


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Combine command line and file, and refuse what contradicts itself."""
    given = {dest: value for dest, value in vars(arguments).items() if dest in BY_DEST}
    _refuse_contradictions(given)
    for dest in given:
        if (note := BY_DEST[dest].note) is not None:
            _log.warning("%s is retired: %s", BY_DEST[dest].flag, note)
    overrides, flags = _overrides(given)
    if arguments.debug:
        overrides["debug"] = True
    if "attach" in given:
        overrides["env_settings.env_path"] = None  # of the file, where there is one
    if "portable" in given and overrides.setdefault("torch_settings.device", "cpu") != "cpu":
        device = overrides["torch_settings.device"]
        raise SettingsError(f"--portable: {device!r} chooses kernels of its own; use the CPU")
    with flags_named(flags):
        numbers = _checked_numbers(given)
        track = _tracked(given)
        settings = load_run_settings(
            _inside(given, arguments.config),
            overrides=overrides,
            overrides_from=SOURCE,
            curriculum=_inside(given, given.get("curriculum")),
            sampler=_inside(given, given.get("sampler")),
        )
        settings = _moved(_for_every_behavior(settings, given), given)
    refuse_missing_demonstrations(settings)
    # After reading: what contradicts itself may stand partly in the file, partly on the command
    # line.
    settings = _decided(settings, given)
    n_runs = numbers.get("num_runs", 1)
    if n_runs > 1 and settings.env_settings.env_path is None:
        raise SettingsError(f"--num-runs: {n_runs} runs need an executable; give --env, or 1")
    if n_runs > 1 and max(numbers.get("learners", 1), launched()[1]) > 1:
        raise SettingsError(f"--num-runs: {n_runs} runs cannot share learners; start them singly")
    return Plan(
        settings=settings,
        flags=flags,
        base_port=_fixed_port(settings, given, numbers.get("worker_id", 0)),
        starting_lesson=numbers.get("lesson"),
        n_runs=n_runs,
        learners=numbers.get("learners", 1),
        track=track,
        config=arguments.config or "built-in",
        listen=_listen(given),
    )


@contextlib.contextmanager
def flags_named(flags: Mapping[str, str]) -> Iterator[None]:
    """Name the options, which are given by key of their setting, in errors about these settings."""
    try:
        yield
    except SettingsError as error:
        key, _, message = str(error).removeprefix(f"{SOURCE}: ").partition(": ")
        if key not in flags:
            raise
        raise SettingsError(f"{flags[key]}: {message}") from error


def _overrides(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that options change, and the option that changes each."""
    overrides: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for option in OPTIONS:  # present ones first
        if option.dest not in given:
            continue
        flags.setdefault(option.key or option.dest, option.flag)
        if option.key is not None:
            value = option.value if option.metavar is None else given[option.dest]
            overrides.setdefault(option.key, value)
    return overrides, flags


def _checked_numbers(given: Mapping[str, Any]) -> dict[str, int]:
    """Read the options that are numbers but no settings."""
    kinds = {"worker_id": CountOrZero, "lesson": CountOrZero, "num_runs": Count, "learners": Count}
    return {
        dest: int(read(kind, from_plain(given[dest], SOURCE), dest))
        for dest, kind in kinds.items()
        if dest in given
    }


def _tracked(given: Mapping[str, Any]) -> SinkNames | None:
    """Read the names of sinks, which may be given with commas and several times."""
    if "track" not in given:
        return None
    names = [name.strip() for text in given["track"] for name in text.split(",") if name.strip()]
    return SinkNames.from_node(from_plain(names, SOURCE), "track")


def _refuse_contradictions(given: Mapping[str, Any]) -> None:
    """Refuse options that cannot both be meant."""
    again = next((BY_DEST[dest].flag for dest in ("resume", "load") if dest in given), None)
    if again is not None and "force" in given:
        raise SettingsError(f"{again} and --force contradict each other: continue it, or begin it?")
    if "inference" in given and "force" in given:
        raise SettingsError(
            "--inference and --force contradict each other: a new run has learned nothing to show; "
            "use --resume or --initialize-from"
        )
    if "attach" in given and "env" in given:
        raise SettingsError(
            "--attach and --env contradict each other: what waits for players starts none; leave "
            "one of them out"
        )
    if "attach" in given and given.get("num_envs", given["attach"]) != given["attach"]:
        raise SettingsError(
            f"--attach {given['attach']} and --num-envs {given['num_envs']} contradict each other: "
            "every environment is a player; leave --num-envs out"
        )
    for old, new, value in _SAME:
        if old in given and given.get(new, value) != value:
            raise SettingsError(
                f"{BY_DEST[old].flag} and {BY_DEST[new].flag} {given[new]} contradict each other; "
                f"keep {BY_DEST[new].flag}"
            )


def _decided(settings: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """Decide between resume, force and initialize_from: an option wins over the file."""
    checkpoints = settings.checkpoint_settings
    resume, force, source = (
        checkpoints.resume or checkpoints.load_model,
        checkpoints.force,
        checkpoints.initialize_from,
    )
    by_option = "resume" in given or "load" in given
    if resume and force:
        if not by_option and "force" not in given:
            raise SettingsError(
                "checkpoint_settings: resume and force contradict each other; keep one of them"
            )
        # Exactly one of them came from the command line here, and it wins over the file.
        resume, force = by_option, not by_option
    if resume and source is not None:
        if "initialize_from" in given and not by_option:
            resume, winner, loser = False, "--initialize-from", "resume in the file"
        else:
            source, winner, loser = None, "resume", "initialize_from"
        _log.warning("Both cannot be done: %s counts, %s is ignored.", winner, loser)
    behaviors = [*settings.behaviors.values(), settings.default_settings]
    has_weights = any(one is not None and one.init_path is not None for one in behaviors)
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


def _fixed_port(settings: RunSettings, given: Mapping[str, Any], worker: int) -> int | None:
    """Return the first environment's port if someone chose it; a single Editor has its own."""
    env = settings.env_settings
    chosen = [BY_DEST[dest].flag for dest in ("base_port", "worker_id") if dest in given]
    if env.env_path is None and env.num_envs == 1 and "attach" not in given:
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


def _listen(given: Mapping[str, Any]) -> tuple[str, bytes] | None:
    """Return where players of other machines call, and their token."""
    address, file = given.get("listen"), given.get("token_file")
    if address is None:
        if file is not None:
            raise SettingsError(
                "--token-file: belongs to --listen ADDRESS; players of this machine say no token"
            )
        return None
    if "attach" not in given:
        raise SettingsError("--listen: belongs to --attach N, which waits for players")
    try:
        ipaddress.ip_address(address)
    except ValueError as error:
        raise SettingsError(
            f"--listen: '{address}' is not an IP address, such as 10.0.0.5, or 0.0.0.0 for all of "
            "this machine"
        ) from error
    return address, read_token(None if file is None else Path(file))


def _inside(given: Mapping[str, Any], path: str | None) -> Path | None:
    """Return a path below the volume of --docker-target-name, when that was given."""
    if path is None:
        return None
    name = given.get("docker_target_name")
    return Path(path) if name is None else Path("/") / name / path


def _moved(settings: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """Move executable and results below the volume of --docker-target-name, if given."""
    if "docker_target_name" not in given:
        return settings
    env, checkpoint = settings.env_settings, settings.checkpoint_settings
    path = env.env_path
    if path is not None and ":" not in path:  # else it is no path
        path = str(_inside(given, path))
    return replace(
        settings,
        env_settings=replace(env, env_path=path),
        checkpoint_settings=replace(
            checkpoint, results_dir=str(_inside(given, checkpoint.results_dir))
        ),
    )


def _for_every_behavior(settings: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """Apply options to all behaviors, also to those that the file does not list."""
    for option in OPTIONS:
        if option.behavior_key is None or option.dest not in given:
            continue
        value = from_plain(given[option.dest], SOURCE)
        default = settings.default_settings
        # Without a file every behavior has the built-in settings, and these are not yet spelled
        # out.
        if default is None and not settings.from_file:
            default = TrainerSettings()
        try:
            settings = replace(
                settings,
                default_settings=default and _with(default, option.behavior_key, value),
                behaviors={
                    name: _with(one, option.behavior_key, value)
                    for name, one in settings.behaviors.items()
                },
            )
        except ContradictionError as error:
            raise SettingsError(f"{option.flag}: {error.message}") from error
        except SettingsError as error:
            message = str(error).removeprefix(f"{SOURCE}: {option.behavior_key}: ")
            raise SettingsError(f"{option.flag}: {message}") from error
    return settings


def _with(settings: Any, key: str, value: Any) -> Any:
    """Return the settings with `value` read for the dotted `key`."""
    # `replace` on each level, since settings are frozen and check themselves anew when made.
    head, _, rest = key.partition(".")
    if rest:
        return replace(settings, **{head: _with(getattr(settings, head), rest, value)})
    return replace(settings, **{head: read(setting_hints(type(settings))[head], value, head)})
