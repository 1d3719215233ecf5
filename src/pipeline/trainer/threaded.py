"""`threaded: true`: the networks learn in a thread of their own while the environments step on.

Torch works outside Python's lock, so both make progress. During an update agents act with a copy of
the policy as it was when the update began; what they do is experience for the next update, with the
probabilities that this older policy gave it. How far they may run ahead is limited. Which step
still saw the older policy depends on the machine: such runs cannot be repeated exactly.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.algos.algorithm import Algorithm
    from pipeline.algos.policy import Decision
    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.data.rollout import Rollout

TRAJECTORIES_AHEAD = 20
"""Trajectories that may wait for an algorithm which would take them in at any time."""


class Threaded:
    """An algorithm whose `update` returns at once and works on in a thread.

    It has the algorithm's interface; what is not here is the algorithm's own. `update` gives the
    statistics of the update before, and raises what stopped that one. An algorithm that learns from
    whole rollouts gets the next one when it is done, and the environments wait until then; one with
    a replay takes in all that has come meanwhile, up to `TRAJECTORIES_AHEAD`.

    Args:
        name: of the behavior.
        algorithm: to be used through this object only.
        horizon: rows of a trajectory.
    """

    def __init__(self, name: str, algorithm: Algorithm, *, horizon: int) -> None:
        self.name = name
        self.algorithm = algorithm
        self._most_waiting = 0 if algorithm.replay is None else TRAJECTORIES_AHEAD * horizon
        self._snapshot: Algorithm | None = None
        self._thread: threading.Thread | None = None
        self._observed: list[Sequence[FloatArray]] = []
        self._stats: dict[str, float] = {}
        self._error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def act(
        self,
        obs: Sequence[FloatArray],
        mask: Sequence[BoolArray] | None,
        memory: FloatArray | None = None,
    ) -> Decision:
        """Decide for N agents with the newest complete policy."""
        return self._acting().act(obs, mask, memory)

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Take observations into the normalisers, after the update if one is under way."""
        if self._is_busy():
            self._observed.append(obs)
        else:
            self.algorithm.observe(obs)

    def ready(self, n_rows: int) -> bool:
        """Whether to call `update`: it has enough rows, or something to raise."""
        if self._is_busy() and n_rows < self._most_waiting:
            return False
        return self._error is not None or self.algorithm.ready(n_rows)

    def update(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        """Begin to learn from a rollout, once the update before is done.

        Args:
            rollout: closed trajectories; copied.
            step: agent steps done.

        Returns:
            Statistics of the update before; empty where there was none.

        Raises:
            TrainingError: The update before failed.
        """
        self._wait()
        self._raise()
        stats, self._stats = self._stats, {}
        self._copy_networks()
        own = copy.deepcopy(rollout)  # its arrays are views of memory that is written again
        arguments = (own, step, torch.get_num_threads())
        name = f"update of {self.name}"
        self._thread = threading.Thread(target=self._work, args=arguments, name=name)
        self._thread.start()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What continues training, after the update under way.

        Raises:
            TrainingError: That update failed.
        """
        self._settle()
        return self.algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._settle()
        self.algorithm.load_state_dict(state)

    def weights(self) -> dict[str, Any]:
        """Copies of the networks that act now."""
        return self._acting().weights()

    def close(self) -> None:
        """Leave no thread behind; what stopped the last update is not raised any more."""
        self._wait()

    def _work(self, rollout: Rollout, step: int, n_threads: int) -> None:
        torch.set_num_threads(n_threads)  # which a new thread does not inherit everywhere
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # as in `Learner.learn`
                self._stats = self.algorithm.update(rollout, step=step)
        except BaseException as error:  # noqa: BLE001  # raised by whoever looks next
            self._error = error

    def _copy_networks(self) -> None:
        """Copy what acts, for the time in which it is changed."""
        if self._snapshot is None:
            self._snapshot = self.algorithm.copy_for_acting()
        else:
            self.algorithm.refresh(self._snapshot)

    def _acting(self) -> Algorithm:
        """What acts now."""
        busy = self._is_busy()
        return self._snapshot if busy and self._snapshot is not None else self.algorithm

    def _is_busy(self) -> bool:
        """Whether an update is under way; puts away one that has ended."""
        if self._thread is None:
            return False
        if self._thread.is_alive():
            return True
        self._wait()
        return False

    def _wait(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        observed, self._observed = self._observed, []
        for obs in observed:
            self.algorithm.observe(obs)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _settle(self) -> None:
        """No update under way from here on; named, because no one else names it here."""
        self._wait()
        try:
            self._raise()
        except TrainingError as error:
            raise TrainingError(f"behavior {self.name}, {error}") from error
