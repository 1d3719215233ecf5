"""A learner from a checkpoint: continued exactly, or begun with the weights of another run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError
from pipeline.trainer.checkpoints import from_saved, load_checkpoint, reason_of
from pipeline.trainer.replays import load_replay

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.envs.workers import WorkerSet
    from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)
_MISFITS = (KeyError, TypeError, ValueError, RuntimeError, AttributeError)


def restore(learner: Learner, state: Mapping[str, Any], path: Path, *, exact: bool) -> None:
    """Continue a learner from what its resume file holds.

    Args:
        learner: as the settings and the environment make it.
        state: the content of the file.
        path: of the file, for messages.
        exact: whether the environments go on where they were, and so do open trajectories.

    Raises:
        CheckpointError: The state is of another behavior, or of other networks.
    """
    try:
        learner.load_state_dict(state["learner"])
        if state.get("experience") is not None:
            learner.load_experience(from_saved(state["experience"]), with_open=exact)
    except _MISFITS as error:
        raise _misfit(path, learner.name, error) from error
    load_replay(path.parent, state.get("replay"), learner)


def begin_with(learner: Learner, path: Path, *, device: str, whole: bool = False) -> None:
    """Take over the weights in a checkpoint, and say which tensors did not fit.

    Args:
        learner: as the settings and the environment make it.
        path: of the checkpoint.
        device: where tensors are read to.
        whole: whether a tensor that does not fit is an error.

    Raises:
        CheckpointError: The file cannot be read, or does not hold what fits.
    """
    state = load_checkpoint(path, device=device)
    try:
        algorithm = state["learner"]["algorithm"]
        left, n_loaded = learner.algorithm.load_weights(algorithm)
    except _MISFITS as error:
        raise _misfit(path, learner.name, error) from error
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


def restore_workers(workers: WorkerSet, states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Take the environments up where they were; False when they must begin anew.

    Args:
        workers: not yet reset.
        states: what the resume files hold, by behavior; of one moment, or they are not used.
    """
    found = list(states.values())
    if not found or any(state.get("run") != found[0].get("run") for state in found):
        return False
    moment = from_saved(found[0].get("environments"))
    if moment is None:
        return False
    try:
        workers.load_state_dict(moment)
    except _MISFITS as error:
        _log.warning("The environments begin anew: %s.", reason_of(error))
        return False
    return True


def latest_run(states: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """What all behaviors shared when the last of their resume files was written; or nothing."""
    runs: list[Mapping[str, Any]] = [state.get("run") or {} for state in states.values()]
    return max(runs, key=lambda run: sum(run.get("steps", {}).values()), default={})


def _misfit(path: Path, behavior: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: this checkpoint does not fit the behavior {behavior} as it is now "
        f"({reason_of(error)}); use the settings and the environment that it was made with, or "
        "begin a new run without it"
    )
