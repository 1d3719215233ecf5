"""Resume points: everything that a run goes on with, as it is at one moment between two steps.

Environments in processes of their own send their states with their next message, after the step
that follows. So the trainer copies its state at the moment, and writes it when these states come.

Several processes exchange nothing between two synchronisations (`distributed.sync`), so copies that
they take there belong together. The first process asks for a resume point at a synchronisation,
each copies its state after that step, and the first synchronisation at which all have the states of
their environments gathers the copies. The first process writes the file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from pipeline.algos.process_group import ProcessGroup
from pipeline.envs.workers import WorkerSet
from pipeline.errors import PipelineError, one_line
from pipeline.trainer.checkpoints.file import mapped, to_saved
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

# Seconds between refreshes of the file that a killed run resumes from.
RESUME_INTERVAL_S = 10.0
# Progress of a process with its part of a resume point.
_NOTHING, _WAITS, _READY, _LOST = "nothing", "waits", "ready", "lost"


class ResumePoints:
    """Keeps a run's resume point up to date.

    Attributes:
        is_exact: whether a run that is resumed is the one that was not interrupted.
        is_kept: whether the files of the run hold an exact resume point.
        gives_states: whether the environments, which have been reset, give their states.
        is_due: whether a resume point shall be taken between the next two steps.
        is_pending: whether states are on their way for `complete`.
        interrupted: steps at which the run was interrupted and not resumed exactly.
    """

    def __init__(self, keeper: CheckpointManager, workers: WorkerSet, interval_s: float) -> None:
        self.is_exact = False
        self.gives_states = False
        self.is_kept = False
        self.is_due = False
        self.is_pending = False
        self.interrupted: list[int] = []
        self._resumed_at: int | None = None
        self._keeper, self._workers = keeper, workers
        self._interval_s = interval_s
        self._states: dict[str, dict[str, Any]] = {}

    def resumed(self, run: Mapping[str, Any], *, is_exact: bool) -> None:
        """Take note of what the run continues from; `is_exact` if environments do, too."""
        self.is_kept = is_exact
        self.interrupted = [int(step) for step in run.get("interrupted", ())]
        self._resumed_at = None if is_exact else max(run.get("steps", {}).values(), default=None)

    def moved(self, run: Mapping[str, Any]) -> None:
        """Take note that the run goes on from here on another kind of device, so not exactly."""
        self._resumed_at = max(run.get("steps", {}).values(), default=None)

    def interrupt(self, learners: Iterable[Learner]) -> None:
        """Take note that the run was not resumed exactly."""
        self.interrupted.append(max((learner.step for learner in learners), default=0))

    def state_dict(self) -> dict[str, Any]:
        """What all resume files say; nothing for a run whose interruptions do not show."""
        return {"interrupted": list(self.interrupted)} if self.interrupted else {}

    def note_start(self, learners: Collection[Learner]) -> None:
        """Check whether the environments, which have been reset, give their states; log if not."""
        if all(learner.finished for learner in learners):  # resumed after its end: nothing goes on
            return
        refusal = self._workers.state_refusal
        self.is_exact = self.gives_states = refusal is None
        lost = [
            learner.name
            for learner in learners
            if learner.algorithm.replay is not None and learner.replay_to_keep is None
        ]
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
                "then begin new episodes, because their state is not known (%s).",
                refusal,
            )

    def is_late(self) -> bool:
        """Return whether the interval is over, which is longer where saving takes long."""
        # Saving then takes a bounded share of the run, however large a replay is.
        interval_s = self._interval_s * (1.0 + 2.0 * self._keeper.save_s)
        return time.monotonic() - self._keeper.saved_at >= interval_s

    def want(self) -> None:
        """Ask for a resume point between the next two steps."""
        self.is_due = True

    def begin(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Take a resume point; while environments have yet to send states, `complete` writes it."""
        self.is_due = False
        # A run that resumes here deletes their checkpoints of this step: see `restore`.
        added = [learner.name for learner in learners if not self._keeper.has_numbered(learner)]
        run = {**run, "added": added}
        if not self.is_exact:
            self._keeper.refresh(learners, run)
            return
        states = self._snapshot(learners, run)
        # After the snapshot, which is of the same moment: states come with the next messages.
        self._workers.request_states()
        self.is_pending = True
        if self._workers.is_split:
            # Copied, because the next step changes tensors in place before the states are here.
            self._states = mapped(states, torch.Tensor, lambda tensor: tensor.detach().clone())
        else:
            self._states = states
            self.complete()

    def complete(self) -> None:
        """After a step, write the moment before it if all states have come."""
        states, self._states = self._states, {}
        self.is_pending = False
        workers = self._workers.state_dict()
        self._completed(states, workers)

    def _snapshot(
        self, learners: Sequence[Learner], run: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return what is saved of each behavior."""
        return self._keeper.snapshot(learners, run, with_open=True)

    def _completed(
        self, states: dict[str, dict[str, Any]], workers: list[dict[str, Any]] | None
    ) -> None:
        """Write a resume point; `workers` is None if one was started again meanwhile."""
        if workers is not None:
            self._keeper.write(states, workers=workers)
            self.is_kept = True

    def stop(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Take the last resume point; the run then ends with numbered checkpoints of this step."""
        # How often a run has saved must not show in its files when it ends.
        self._keeper.is_last = True
        self.begin(learners, run)
        if not self.is_pending:
            return
        try:
            self._workers.step()  # without the agents' actions: only the states count
        except PipelineError as error:
            _log.warning("The environments' states did not come: %s", one_line(error))
        self.complete()
        if not self.is_kept:
            self._keeper.refresh(learners, run)


class JointResumePoints(ResumePoints):
    """Resume points of several learners."""

    def __init__(self, keeper: CheckpointManager, workers: WorkerSet, interval_s: float) -> None:
        super().__init__(keeper, workers, interval_s)
        self._is_wanted = False
        self._progress = _NOTHING
        self._local_part: tuple[dict[str, dict[str, Any]], list[dict[str, Any]]] | None = None

    def want(self) -> None:
        """Ask for a resume point at the next synchronisation; the first process decides."""
        self._is_wanted = True

    def note(self) -> dict[str, Any]:
        """What the other processes need to know, as plain values."""
        return {
            "wanted": self._is_wanted,
            "gives states": self.gives_states,
            "progress": self._progress,
            "interrupted": self.interrupted,
        }

    def meet(self, notes: Sequence[Mapping[str, Any]], group: DistributedGroup) -> None:
        """Gather a resume point that all have ready; begin one if the first process asks for it."""
        self.is_exact = all(note["gives states"] for note in notes)
        self.interrupted = sorted({step for note in notes for step in note["interrupted"]})
        progress = {note["progress"] for note in notes}
        if _WAITS not in progress:
            if progress == {_READY}:
                self._hand_over(group)
            self._local_part, self._progress = None, _NOTHING
            self.is_due = bool(notes[0]["wanted"])
            self._is_wanted = False

    def begin(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Take this process's part of a resume point."""
        if self.is_exact:
            self._progress = _WAITS
        super().begin(learners, run)

    def stop(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Keep the last common point: processes do not stop between the same synchronisations."""
        if not self.is_kept:
            self._keeper.refresh(learners, run)

    def _snapshot(
        self, learners: Sequence[Learner], run: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        states = super()._snapshot(learners, run)
        for learner in learners:
            if learner.sync is not None:
                states[learner.name]["held"] = learner.sync.held
        return states

    def _completed(
        self, states: dict[str, dict[str, Any]], workers: list[dict[str, Any]] | None
    ) -> None:
        if workers is None:
            self._progress = _LOST
        else:
            self._local_part, self._progress = (states, workers), _READY

    def _hand_over(self, group: DistributedGroup) -> None:
        """Gather all parts in the first process, which writes them."""
        parts = [part for part in group.gather_object(self._local_part) if part is not None]
        if parts:  # which other processes do not get
            (states, workers), *other_parts = parts
            for name, state in states.items():
                state["ranks"] = [
                    {**rank_states[name], "environments": to_saved(rank_workers)}
                    for rank_states, rank_workers in other_parts
                ]
            self._keeper.write(states, workers=workers)
        self.is_kept = True


def resume_points(
    keeper: CheckpointManager, workers: WorkerSet, interval_s: float, group: ProcessGroup
) -> ResumePoints:
    """Return the resume points of one learner, or of this process of several learners."""
    kind = JointResumePoints if isinstance(group, DistributedGroup) else ResumePoints
    return kind(keeper, workers, interval_s)
