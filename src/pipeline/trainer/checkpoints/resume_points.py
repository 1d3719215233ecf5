"""Resume points: the whole state of a run between two of its steps.

Environments in other processes send their states with their next message, after the next step. So
the trainer copies its own state at once, and writes the copy when the environments' states arrive.

Several processes exchange nothing between two synchronisations (`distributed.sync`), so copies of
all processes between the same two synchronisations are one consistent state. The first process
requests a resume point at a synchronisation, each process copies its state after that step, and the
first synchronisation at which all processes have their environments' states gathers the copies.
The first process writes the files.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from pipeline.envs.workers import WorkerSet
from pipeline.errors import PipelineError, one_line
from pipeline.trainer.checkpoints.file import mapped, to_saved
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

# Seconds between two writes of the files that a killed run resumes from.
RESUME_INTERVAL_S = 10.0
# State of a process's part of a resume point: not begun, waiting for the environments' states,
# complete, or lost because an environment was started again.
_NOTHING, _WAITS, _READY, _LOST = "nothing", "waits", "ready", "lost"


class ResumePoints:
    """Takes the resume points of a run, and writes them to its resume files.

    Attributes:
        is_exact: whether a run that resumes from a resume point equals an uninterrupted run.
        is_kept: whether the files of the run contain an exact resume point.
        gives_states: whether the environments can report their states; known after their first
            reset.
        is_due: whether to take a resume point between the next two steps.
        is_pending: whether environments have yet to send states for `complete`.
        interrupted: steps at which the run was interrupted and not resumed exactly.
    """

    def __init__(
        self, checkpoints: CheckpointManager, workers: WorkerSet, interval_s: float
    ) -> None:
        self.is_exact = False
        self.gives_states = False
        self.is_kept = False
        self.is_due = False
        self.is_pending = False
        self.interrupted: list[int] = []
        self._resumed_at: int | None = None
        self._checkpoints, self._workers = checkpoints, workers
        self._interval_s = interval_s
        self._states: dict[str, dict[str, Any]] = {}

    def resumed(self, run: Mapping[str, Any], *, is_exact: bool) -> None:
        """Record the shared state `run` that is resumed, and whether the environments continue."""
        self.is_kept = is_exact
        self.interrupted = [int(step) for step in run.get("interrupted", ())]
        # `note_start` records an interruption at this step if the run takes further steps.
        self._resumed_at = None if is_exact else max(run.get("steps", {}).values(), default=None)

    def moved(self, run: Mapping[str, Any]) -> None:
        """Record that the run continues on another type of device, and so not exactly."""
        self._resumed_at = max(run.get("steps", {}).values(), default=None)

    def interrupt(self, learners: Iterable[Learner]) -> None:
        """Record that the run was interrupted at the present step and does not continue exactly."""
        self.interrupted.append(max((learner.step for learner in learners), default=0))

    def state_dict(self) -> dict[str, Any]:
        """Return the resume files' entry with the steps of interruptions; {} if there were none."""
        return {"interrupted": list(self.interrupted)} if self.interrupted else {}

    def note_start(self, learners: Collection[Learner]) -> None:
        """After the first reset, log whether this run could be resumed exactly.

        If the run itself was resumed, but not exactly, record the interruption.
        """
        if all(learner.finished for learner in learners):  # a finished run takes no more steps
            return
        refusal = self._workers.state_refusal
        self.is_exact = self.gives_states = refusal is None
        lost = [
            learner.name
            for learner in learners
            if learner.algorithm.replay is not None and learner.replay_to_keep is None
        ]
        # The run now learns with an empty replay, which counts as an interruption.
        if self._resumed_at is None and self.is_kept and lost:
            self.interrupt(learners)
        elif self._resumed_at is not None:
            self.interrupted.append(self._resumed_at)
        if lost and refusal is None:
            _log.info(
                "If this run is interrupted, it can be resumed but not exactly: save_replay_buffer "
                "of %s is false, so the replay is lost.",
                ", ".join(lost),
            )
        if refusal is not None:
            _log.info(
                "If this run is interrupted, it can be resumed but not exactly: the environments "
                "then start new episodes, because they do not give their state (%s).",
                refusal,
            )

    def is_interval_over(self) -> bool:
        """Return whether the interval since the last save is over; slow saves make it longer."""
        # Saving takes a small share of the time: with the default interval the next save comes
        # after 10 s, and 20 s more for each second that the last save took.
        interval_s = self._interval_s * (1.0 + 2.0 * self._checkpoints.save_s)
        return time.monotonic() - self._checkpoints.saved_at >= interval_s

    def want(self) -> None:
        """Ask for a resume point between the next two steps."""
        self.is_due = True

    def begin(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Take a resume point; `complete` writes it after environments have sent their states."""
        self.is_due = False
        # `added` has the behaviors without a numbered checkpoint of this step. If such a checkpoint
        # is written after this moment, `CheckpointManager.restore` deletes it when the run resumes.
        added = [
            learner.name for learner in learners if not self._checkpoints.has_numbered(learner)
        ]
        run = {**run, "added": added}
        # If the environments do not send states, the files are written at once.
        if not self.is_exact:
            self._checkpoints.refresh(learners, run)
            return
        states = self._checkpoints.snapshot(learners, run, with_open=True)
        # Environments send their present state before they take the next step.
        self._workers.request_states()
        self.is_pending = True
        if self._workers.is_split:
            # The state is copied, because the next step changes tensors before `complete` runs.
            self._states = mapped(states, torch.Tensor, lambda tensor: tensor.detach().clone())
        else:
            self._states = states
            self.complete()

    def complete(self) -> None:
        """Write the pending resume point; called when the environments' states have arrived."""
        states, self._states = self._states, {}
        self.is_pending = False
        self._completed(states, self._workers.state_dict())

    def _completed(
        self, states: dict[str, dict[str, Any]], workers: list[dict[str, Any]] | None
    ) -> None:
        """Write a resume point, unless `workers` is None because a worker has lost its state."""
        if workers is not None:
            self._checkpoints.write(states, workers=workers)
            self.is_kept = True

    def stop(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Take the resume point of a run that stops, before numbered checkpoints are written."""
        # The whole replay is saved in one file, so that the files of a stopped run do not depend on
        # how many resume points it had.
        self._checkpoints.is_last = True
        self.begin(learners, run)
        if not self.is_pending:
            return
        try:
            # The actions do not matter: environments send their states from before this step.
            self._workers.step()
        except PipelineError as error:
            _log.warning(
                "The environments did not send their states, so an exact resume point of this step "
                "may be missing: %s",
                one_line(error),
            )
        self.complete()
        if not self.is_kept:
            self._checkpoints.refresh(learners, run)


class JointResumePoints(ResumePoints):
    """Resume points of a run with several learners."""

    def __init__(
        self, checkpoints: CheckpointManager, workers: WorkerSet, interval_s: float
    ) -> None:
        super().__init__(checkpoints, workers, interval_s)
        self._is_wanted = False
        self._progress = _NOTHING
        self._local_part: tuple[dict[str, dict[str, Any]], list[dict[str, Any]]] | None = None

    def want(self) -> None:
        """Request a resume point at the next synchronisation; only rank 0's request counts."""
        self._is_wanted = True

    def local_state(self) -> dict[str, Any]:
        """Return this process's data for `merge`, which gets the data of all processes."""
        return {
            "wanted": self._is_wanted,
            "gives states": self.gives_states,
            "progress": self._progress,
            "interrupted": self.interrupted,
        }

    def merge(self, notes: Sequence[Mapping[str, Any]], gather: Callable[[Any], list[Any]]) -> None:
        """Write the resume point when all parts are ready; begin one if rank 0 requests it.

        `notes` are the values of `local_state` in all processes, by rank; `gather` returns each
        process's argument in the first process, and [] in all others.
        """
        self.is_exact = all(note["gives states"] for note in notes)
        self.interrupted = sorted({step for note in notes for step in note["interrupted"]})
        progress = {note["progress"] for note in notes}
        # If a process still waits for its environments, the next synchronisation checks again.
        if _WAITS not in progress:
            # If one part is lost, the parts of the other processes cannot be used.
            if progress == {_READY}:
                self._hand_over(gather)
            # All processes begin their next parts here, so that all parts describe the same step.
            self._local_part, self._progress = None, _NOTHING
            self.is_due = bool(notes[0]["wanted"])
            self._is_wanted = False

    def begin(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Take this process's part of a resume point; the environments' states come later."""
        if self.is_exact:
            self._progress = _WAITS
        super().begin(learners, run)

    def stop(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Keep the newest resume point, and take no other: processes may stop at different steps.

        If there is no exact resume point, the networks are saved without the environments.
        """
        if not self.is_kept:
            self._checkpoints.refresh(learners, run)

    def _completed(
        self, states: dict[str, dict[str, Any]], workers: list[dict[str, Any]] | None
    ) -> None:
        if workers is None:
            self._progress = _LOST
        else:
            self._local_part, self._progress = (states, workers), _READY

    def _hand_over(self, gather: Callable[[Any], list[Any]]) -> None:
        """Gather the parts of all processes in the first process, which writes the resume point."""
        parts = [part for part in gather(self._local_part) if part is not None]
        if parts:  # only the first process gets the parts
            (states, workers), *other_parts = parts
            for name, state in states.items():
                state["ranks"] = [
                    {**rank_states[name], "environments": to_saved(rank_workers)}
                    for rank_states, rank_workers in other_parts
                ]
            self._checkpoints.write(states, workers=workers)
        self.is_kept = True
