"""Loading a checkpoint to continue a learner, to initialize a new learner, or to use its policy."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import files
from pipeline.algos.algorithm import Algorithm
from pipeline.algos.policy import Policy
from pipeline.core.arrays import FloatArray
from pipeline.core.specs import BehaviorSpec, other_names, other_order, spec_from_mapping
from pipeline.envs.workers import WorkerSet
from pipeline.errors import CheckpointError, SettingsError
from pipeline.settings import RunSettings, TrainerSettings, load_run_settings
from pipeline.trainer.checkpoints.file import (
    MISFITS,
    RESUME_FILE,
    description,
    file_of,
    from_saved,
    load_checkpoint,
    n_learners_of,
    reason_of,
    refuse_missing,
    warn_of_other_files,
)
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.checkpoints.replay_files import load_replay
from pipeline.trainer.learner import Learner
from pipeline.trainer.supported import algorithm_for, algorithm_of

_log = logging.getLogger(__name__)

_MAKE_NETWORKS = ("trainer_type", "network_settings", "reward_signals", "behavioral_cloning")


def restore(learner: Learner, state: Mapping[str, Any], path: Path, *, exact: bool) -> bool:
    """Restore a learner from the state in its resume file; with `exact` also open trajectories.

    Returns whether the learner's random streams continue; on another type of device they cannot.
    CheckpointError if the state is of another behavior or has other networks.
    """
    _compare_sensors(path, learner, state, refuse=True)
    warn_of_other_files(path, state, learner.settings)
    try:
        learner.load_state_dict(state["learner"])
        stream = learner.algorithm.action_stream
        saved_stream = state["learner"]["algorithm"]["action_stream"]
        # The states of CPU and CUDA generators have different lengths.
        goes_on = len(saved_stream) == len(stream.get_state())
        if not goes_on:
            _log.warning(
                "%s was trained on another type of device than %s: its random streams start again, "
                "so the run does not continue exactly.",
                learner.name,
                stream.device,
            )
        if state.get("experience") is not None:
            learner.load_experience(from_saved(state["experience"]), with_open=exact)
    except MISFITS as error:
        raise _misfit(path, learner.name, error) from error
    load_replay(path.parent, state, learner)
    return goes_on


def refuse_other_networks(run_dir: Path, settings: RunSettings) -> None:
    """Raise CheckpointError if the settings define other networks than the run's checkpoints."""
    for name, state in CheckpointManager(run_dir, settings).saved().items():
        if name not in settings.behaviors and settings.default_settings is None:
            # The environment may not have this behavior any more, so it needs no settings.
            continue
        trainer = settings.for_behavior(name)
        kind = algorithm_for(name, trainer)
        with usable(run_dir):
            spec, settings_before = spec_from_mapping(state["spec"]), dict(state["settings"])
            weights, _ = state["learner"]["algorithm"], int(state["learner"]["step"])
        try:
            _refuse_other_policy(kind, spec, trainer, weights["policy"])
            # New networks draw initial weights from torch's global stream, which must not change.
            with torch.random.fork_rng(devices=[]):
                algorithm = kind(spec, trainer, seed=0, device=torch.device("cpu"))
            algorithm.load_state_dict(weights)
        except MISFITS as error:
            now = description(name, spec, settings)["settings"]
            others = _other_settings(settings_before, now)
            raise CheckpointError(
                f"{files.named(run_dir, name) / RESUME_FILE}: --resume continues the networks of "
                f"{name}, but these settings define other networks ({others or reason_of(error)}); "
                "restore the settings, or start a new run with the weights that fit "
                "(--initialize-from)"
            ) from error


def _refuse_other_policy(
    kind: type[Algorithm], spec: BehaviorSpec, settings: TrainerSettings, weights: Any
) -> None:
    """Raise one of `MISFITS` if weights do not fit the networks that the settings define."""
    # The device `meta` uses no memory; a damaged file may ask for networks of any size.
    with torch.device("meta"):
        policy = kind.policy_for(spec, settings.network_settings)
        policy.load_state_dict(weights, assign=True)


def _other_settings(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str:
    """Return text that names each network setting that differs, with both of its values."""
    parts = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        if old == new or not (prefix or key in _MAKE_NETWORKS):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            parts.append(_other_settings(old, new, f"{prefix}{key}."))
        else:
            old, new = (_in_words(value) for value in (old, new))
            parts.append(f"{prefix}{key}: {old} before, {new} now")
    return ", ".join(part for part in parts if part)


def _in_words(value: Any) -> str:
    return "none" if value is None else "set" if isinstance(value, dict) else str(value)[:80]


def load_initial_weights(learner: Learner, path: Path, *, whole: bool) -> None:
    """Initialize a learner's weights from a checkpoint, and log the tensors that do not fit.

    CheckpointError if no tensor fits, or `whole` is set and a tensor does not fit.
    """
    # Only shapes are compared, so after a change of sensors the weights that still fit are loaded.
    state = load_checkpoint(path, device=str(learner.algorithm.device))
    _compare_sensors(path, learner, state, refuse=False)
    try:
        algorithm = state["learner"]["algorithm"]
        left, n_loaded = learner.algorithm.load_weights(algorithm)
    except MISFITS as error:
        raise _misfit(path, learner.name, error) from error
    # The caller asked for all weights or none, so weights that do not fit are an error.
    if whole and left:
        raise _misfit(path, learner.name, ValueError("; ".join(left)))
    if not n_loaded:
        raise CheckpointError(
            f"{path}: none of its tensors fits the behavior {learner.name}: {'; '.join(left)}"
        )
    _log.info("%s begins with the weights of %s (%d tensors).", learner.name, path, n_loaded)
    if left:
        text = "%s: %d tensors were not loaded; %s keeps its own values for: %s."
        _log.warning(text, path, len(left), learner.name, "; ".join(left))


def _compare_sensors(
    path: Path, learner: Learner, state: Mapping[str, Any], *, refuse: bool
) -> None:
    """Compare a checkpoint's sensors and actions with the environment's, and log the differences.

    Weights of the right size would load even if the observations have another meaning. With
    `refuse`, differences raise a CheckpointError.
    """
    try:
        spec = spec_from_mapping(state["spec"])
    except MISFITS:  # an old or damaged specification; loading the state raises the error
        return
    saved_shapes, env_shapes = (
        [tuple(obs.shape) for obs in behavior_spec.observation_specs]
        for behavior_spec in (spec, learner.spec)
    )
    actions, env_actions = (
        f"{x.continuous_size} continuous actions and branches of {list(x.discrete_branches)}"
        for x in (spec.action_spec, learner.spec.action_spec)
    )
    if refuse and actions != env_actions:
        raise CheckpointError(
            f"{path}: it was trained with {actions}, but {learner.name} has {env_actions}; start a "
            "new run, or restore the environment that it was trained in"
        )
    names = other_names(spec, learner.spec)
    # Equal names in another order mean other observations, even if all shapes are equal.
    is_other = saved_shapes != env_shapes or (names is not None and other_order(*names))
    if not is_other and names is None:
        return
    saved_names, env_names = names or ("without names", "without names")
    text = (
        f"{path}: it was trained on the observations {saved_names} of shapes {saved_shapes}, but "
        f"{learner.name} has {env_names} of shapes {env_shapes}"
    )
    if is_other and refuse:
        raise CheckpointError(
            f"{text}; start a new run, or restore the sensors that it was trained with"
        )
    _log.warning("%s. Check that the observations mean what those of the training meant.", text)


def restore_workers(workers: WorkerSet, states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Restore the environments if all states are of the same step; return whether it was done."""
    behaviors = list(states.values())
    # States that were saved at different times would form a state that the run never had.
    if not behaviors or any(state.get("run") != behaviors[0].get("run") for state in behaviors):
        return False
    moment = from_saved(behaviors[0].get("environments"))
    if moment is None:
        return False
    try:
        workers.load_state_dict(moment)
    except MISFITS as error:
        _log.warning(
            "The environments are reset: their saved state cannot be restored (%s).",
            reason_of(error),
        )
        return False
    return True


def resumes_exactly(
    run_dir: Path, settings: RunSettings, *, n_learners: int = 1, device: str | None = None
) -> bool:
    """Return whether the run in a folder would continue as if it had not been interrupted.

    `device` is the device to continue on; None for the device of the run so far. Without resume
    files the result is True: the run starts from step 0.
    """
    states = CheckpointManager(run_dir, settings).saved()
    runs = [state.get("run") or {} for state in states.values()]
    # States that were saved at different times do not fit together, and a run that was once not
    # resumed exactly cannot equal the uninterrupted run any more.
    if any(run != runs[0] or run.get("interrupted") for run in runs):
        return False
    ends = {name: settings.for_behavior(name).max_steps for name in states}
    with usable(run_dir):
        is_over = all(state["learner"]["step"] >= ends[name] for name, state in states.items())
    if states and is_over:
        return True  # a complete run needs no environments
    with usable(run_dir):
        streams = [state["learner"]["algorithm"]["action_stream"] for state in states.values()]
        # A CPU generator's state has another length than a CUDA generator's.
        were_on_cpu = {len(stream) == len(torch.Generator().get_state()) for stream in streams}
    if device is not None and were_on_cpu - {torch.device(device).type == "cpu"}:
        return False  # another type of device cannot continue the random streams
    return all(
        state.get("environments") is not None
        and n_learners_of(state) == n_learners
        # Trainers without this key have no replay that could be lost.
        and getattr(settings.for_behavior(name).hyperparameters, "save_replay_buffer", True)
        for name, state in states.items()
    )


def latest_run(states: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state that all behaviors share, from the file with the most steps, or {}."""
    runs: list[Mapping[str, Any]] = [state.get("run") or {} for state in states.values()]
    return max(runs, key=lambda run: sum(run.get("steps", {}).values()), default={})


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPolicy:
    """One behavior's policy from a checkpoint."""

    behavior: str
    spec: BehaviorSpec
    settings: TrainerSettings
    policy: Policy
    step: int
    recorded_obs: list[FloatArray]
    """One array [R, *shape] for each observation: a sample of R rows from training."""
    recorded_masks: FloatArray | None
    """[R, sum of branch sizes] masks of these rows, 1 where a choice is allowed, or None."""
    interrupted: list[int]
    """Steps of the interruptions after which the run did not continue exactly."""


def load_policy(path: Path) -> SavedPolicy:
    """Return the policy of a checkpoint, on the CPU; CheckpointError if it is not complete."""
    state = load_checkpoint(path)
    try:
        name = str(state["behavior"])
        spec = spec_from_mapping(state["spec"])
        run = load_run_settings(None, overrides={"behaviors": {name: state["settings"]}})
        settings = run.for_behavior(name)
        warn_of_other_files(path, state, settings)
        weights, kind = state["learner"]["algorithm"]["policy"], algorithm_of(settings)
        # A damaged file may ask for huge networks, so a check without allocation comes first.
        _refuse_other_policy(kind, spec, settings, weights)
        policy = kind.policy_for(spec, settings.network_settings)
        policy.load_state_dict(weights)
        recorded = state["learner"]["recorded"]
        allowed = recorded["allowed"]
        saved = SavedPolicy(
            behavior=name,
            spec=spec,
            settings=settings,
            policy=policy.eval(),
            step=int(state["learner"]["step"]),
            recorded_obs=[values.numpy() for values in recorded["obs"]],
            recorded_masks=None if allowed is None else allowed.float().numpy(),
            interrupted=[int(step) for step in state.get("run", {}).get("interrupted", ())],
        )
    except (SettingsError, *MISFITS) as error:
        raise CheckpointError(
            f"{path}: this checkpoint has no complete policy: {reason_of(error)}"
        ) from error
    return saved


def first_weights(settings: RunSettings) -> dict[str, Path]:
    """Return, by behavior, the checkpoints with initial weights that the settings name.

    `initialize_from` names a run in the same results folder. A behavior's `init_path` is a path, or
    the name of a file in the behavior's folder in that run. If behaviors that are not listed may
    appear, the result has every behavior of that run; `weights_of` looks for further behaviors when
    they appear. A resumed run continues with its own weights.

    Raises:
        SettingsError: The run or a checkpoint does not exist.
    """
    options = settings.checkpoint_settings
    # A resumed run ignores init_path. ML-Agents would replace the resumed weights by the weights of
    # init_path, which undoes the training.
    if options.resume:
        for name, trainer in settings.behaviors.items():
            if trainer.init_path is not None:
                _log.info("A resumed run keeps its own weights: init_path of %s is ignored.", name)
        return {}
    run = None
    if options.initialize_from is not None:
        run = Path(options.results_dir) / options.initialize_from
        # An empty name would be the results folder itself.
        if not options.initialize_from or not run.is_dir():
            raise SettingsError(
                f"Could not initialize from {run}. Make sure models have already been saved with "
                "that run ID."
            )
    checkpoints = {
        name: file
        for name, trainer in settings.behaviors.items()
        if (file := file_of(run and files.named(run, name), trainer.init_path)) is not None
    }
    for name, file in checkpoints.items():
        refuse_missing(file, f"behaviors.{name}.init_path", settings)
    return {**_of_behaviors_that_may_appear(settings, run), **checkpoints}


def checkpoints_of(source: Path | str, settings: RunSettings, *, beside: Path) -> dict[str, Path]:
    """Return each behavior's checkpoint from `source`: a file, a run's folder, or a run's id.

    An id is the name of a run's folder next to the folder `beside`, or in `results_dir`. A
    checkpoint of a single behavior is for the only behavior in the settings, whatever its name.
    SettingsError if there is no checkpoint.
    """
    folders = (beside.parent, Path(settings.checkpoint_settings.results_dir))
    places = (Path(source), *(folder / source for folder in folders))
    place = next((path for path in places if path.exists()), Path(source))
    inside = {*place.glob(RESUME_FILE), *place.glob(f"*/{RESUME_FILE}")}
    found = [place] if place.is_file() else sorted(inside)
    names = [str(load_checkpoint(file).get("behavior", "")) for file in found]
    if not all(names) or not names:
        raise SettingsError(
            f"init_from: {source} has no checkpoint of a run{files.similar(place) or ';'} give a "
            f"checkpoint (.pt), a run's folder, or a run's name in {' or '.join(map(str, folders))}"
        )
    only = [*settings.behaviors] if len(found) == len(settings.behaviors) == 1 else names
    return dict(zip(only, found, strict=True))


def _of_behaviors_that_may_appear(settings: RunSettings, run: Path | None) -> dict[str, Path]:
    """Return the checkpoints in `run` for behaviors that the settings do not list, by name."""
    default = settings.default_settings
    init_path = None if default is None else default.init_path
    if run is None:
        refuse_missing(file_of(None, init_path), "default_settings.init_path", settings)
        return {}
    # A configuration file without `default_settings` lists every behavior that can be trained.
    if default is None and settings.from_file:
        return {}
    files_of = {
        folder.name: file_of(folder, init_path)
        for folder in sorted(run.iterdir())
        if folder.is_dir()
    }
    return {name: file for name, file in files_of.items() if file is not None and file.is_file()}


@contextmanager
def usable(run_dir: Path) -> Iterator[None]:
    """Raise a `CheckpointError` in place of an error that a damaged state in `run_dir` causes."""
    try:
        yield
    except MISFITS as error:
        raise CheckpointError(
            f"{run_dir}: the saved run cannot continue ({type(error).__name__}: "
            f"{reason_of(error)}); start a new run"
        ) from error


def _misfit(path: Path, behavior: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: this checkpoint does not fit the present behavior {behavior} "
        f"({reason_of(error)}); use the settings and the environment that it was trained with, or "
        "start a new run without it"
    )
