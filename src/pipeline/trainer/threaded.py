"""`threaded: true`: the networks learn in a thread of their own while the environments step on.

Torch works outside Python's lock, so both make progress. Counts alone, never clocks, say which
policy acts: from the moment at which an update begins, agents act with the policy as it then is,
and with what the update makes of it as soon as the next one begins. So a threaded run repeats bit
by bit, and its experience is at most one policy old; its rows keep the probabilities of the policy
that acted. If the next update is due before the thread is done, the environments wait for it.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algos.algorithm import load_matching
from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.algos.algorithm import Algorithm
    from pipeline.algos.policy import Decision
    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.data.rollout import Rollout


class Threaded:
    """An algorithm whose `update` returns at once and works on in a thread.

    It has the algorithm's interface; what is not here is the algorithm's own. `update` gives the
    statistics of the update before, and raises what stopped that one.

    Args:
        name: of the behavior.
        algorithm: to be used through this object only.
    """

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self.name = name
        self.algorithm = algorithm
        self._acting: Algorithm | None = None
        """What acts from the first update on; before it, the algorithm does."""
        self._weights: dict[str, Any] = {}
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
        """Decide for N agents, with the policy as it was when the last update began."""
        return (self._acting or self.algorithm).act(obs, mask, memory)

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Take observations into the normalisers, after the update if one is under way."""
        if self._thread is None:
            self.algorithm.observe(obs)
        else:
            # The thread reads the normalisers, so they wait until it is done.
            self._observed.append(obs)

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
        self._finish()
        stats, self._stats = self._stats, {}
        self._weights = self.algorithm.weights()  # which the thread is about to change
        self._act_with(self._weights)
        own = copy.deepcopy(rollout)  # its arrays are views of memory that is written again
        arguments = (own, step, torch.get_num_threads())
        name = f"update of {self.name}"
        self._thread = threading.Thread(target=self._work, args=arguments, name=name)
        self._thread.start()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What continues training: the algorithm after the update under way, and what acts now.

        Raises:
            TrainingError: That update failed.
        """
        try:
            self._finish()
        except TrainingError as error:  # no one else names the behavior here
            raise TrainingError(f"behavior {self.name}, {error}") from error
        waiting = {"weights": self._weights, "stats": self._stats}
        return {**self.algorithm.state_dict(), "threaded": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, or an algorithm's own state."""
        self.close()
        self.algorithm.load_state_dict(state)
        waiting = state.get("threaded") or {"weights": {}, "stats": {}}
        self._weights, self._stats = waiting["weights"], waiting["stats"]
        self._acting = None
        if self._weights:
            self._act_with(self._weights)

    def weights(self) -> dict[str, Any]:
        """Copies of the networks as they were when the last update began."""
        return self._weights or self.algorithm.weights()

    def close(self) -> None:
        """Leave no thread behind; what stopped the last update is not raised any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        observed, self._observed = self._observed, []
        for obs in observed:
            self.algorithm.observe(obs)

    def _work(self, rollout: Rollout, step: int, n_threads: int) -> None:
        torch.set_num_threads(n_threads)  # which a new thread does not inherit everywhere
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # as in `Learner.learn`
                self._stats = self.algorithm.update(rollout, step=step)
        except BaseException as error:  # noqa: BLE001  # raised by whoever looks next
            self._error = error

    def _act_with(self, weights: dict[str, Any]) -> None:
        if self._acting is None:
            # A copy, because the thread changes the algorithm's weights in place.
            self._acting = self.algorithm.copy_for_acting()
        load_matching(self._acting.own_networks, weights)

    def _finish(self) -> None:
        """Wait for the update under way, and raise what stopped it."""
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error
