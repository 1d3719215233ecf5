"""Resume points: everything that a run goes on with, as it is at one moment between two steps.

Environments in processes of their own send their states with their next message, after the step
that follows. So what the trainer has at the moment is copied, and written when they have come.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.errors import PipelineError, one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pipeline.envs.workers import WorkerSet
    from pipeline.trainer.checkpoints.manager import CheckpointManager
    from pipeline.trainer.distributed.sync import Synchronizer
    from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)


class ResumePoints:
    """Keeps a run's resume point up to date.

    Args:
        keeper: writes it.
        workers: whose states belong to it.
        interval_s: how often it is written at most.
        synchronizer: with others that learn the same the states are not kept.

    Attributes:
        is_exact: whether a run that is resumed is the one that was not interrupted.
        is_kept: whether the files of the run hold such a moment.
        is_due: whether the next moment between two steps shall be kept.
        is_pending: whether states are on their way for `complete`.
        interrupted: steps at which the run was interrupted and went on other than it would have.
    """

    def __init__(
        self,
        keeper: CheckpointManager,
        workers: WorkerSet,
        interval_s: float,
        synchronizer: Synchronizer,
    ) -> None:
        self.is_exact = False
        self.is_kept = False
        self.is_due = False
        self.is_pending = False
        self.interrupted: list[int] = []
        self._resumed_at: int | None = None
        self._keeper, self._workers = keeper, workers
        self._interval_s, self._synchronizer = interval_s, synchronizer
        self._states: dict[str, dict[str, Any]] = {}

    def resumed(self, run: Mapping[str, Any], *, is_exact: bool) -> None:
        """Take note of what the run continues from.

        Args:
            run: what its resume files say of the run; empty where there is none.
            is_exact: whether the environments go on where they were.
        """
        self.is_kept = is_exact
        self.interrupted = [int(step) for step in run.get("interrupted", ())]
        self._resumed_at = None if is_exact else max(run.get("steps", {}).values(), default=None)

    def interrupt(self, learners: Iterable[Learner]) -> None:
        """Take note that the run goes on other than it would have without an interruption."""
        self.interrupted.append(max((one.step for one in learners), default=0))

    def state_dict(self) -> dict[str, Any]:
        """What all resume files say; nothing for a run whose interruptions do not show."""
        return {"interrupted": list(self.interrupted)} if self.interrupted else {}

    def note_start(self, learners: Collection[Learner]) -> None:
        """Look whether the environments, which have been reset, give their states; say if not.

        Args:
            learners: of the behaviors that have shown up.
        """
        if all(one.finished for one in learners):  # resumed behind its end: nothing goes on
            return
        refusal = self._workers.state_refusal
        if self._synchronizer.group is not None:
            refusal = "several learners keep none"
        self.is_exact = refusal is None
        lost = [
            one.name
            for one in learners
            if one.algorithm.replay is not None and one.replay_to_keep is None
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
        """Whether the interval is over, which is longer where saving takes long."""
        # Saving then takes a bounded share of the run, however large a replay is.
        interval_s = self._interval_s * (1.0 + 2.0 * self._keeper.save_s)
        return time.monotonic() - self._keeper.saved_at >= interval_s

    def begin(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Keep this moment; where environments have yet to send their states, `complete` does.

        Args:
            learners: of all behaviors.
            run: the state of what they share.
        """
        self.is_due = False
        if not self.is_exact:
            self._keeper.refresh(learners, run, workers=None)
            return
        states = self._keeper.snapshot(learners, run, with_open=True)
        # After the snapshot, which is of the same moment: the states come with the next
        # messages.
        self._workers.request_states()
        self.is_pending = True
        if self._workers.is_split:
            # Copied, because the step that follows changes tensors in place before the states
            # are here.
            self._states = {name: _copied(state) for name, state in states.items()}
        else:
            self._states = states
            self.complete()

    def complete(self) -> None:
        """After a step, write the moment before it if all states have come."""
        states, self._states = self._states, {}
        self.is_pending = False
        workers = self._workers.state_dict()
        if workers is not None:  # else one was started again
            self._keeper.write(states, workers=workers)
            self.is_kept = True

    def stop(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Keep this moment, after which the run ends with numbered checkpoints of its last step.

        Args:
            learners: of all behaviors.
            run: the state of what they share.
        """
        added = [one.name for one in learners if not self._keeper.has_numbered(one)]
        self.begin(learners, {**run, "added": added})
        if not self.is_pending:
            return
        try:
            self._workers.step()  # without the agents' actions: only the states count
        except PipelineError as error:
            _log.warning("The last resume point stays: %s", one_line(error))
            return
        self.complete()


def _copied(value: Any) -> Any:
    """`value` with tensors and arrays of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
