"""Updates of an algorithm: start one, do its next part, take its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.algos.algorithm import Algorithm
from pipeline.arrays import FloatArray
from pipeline.data.rollout import Rollout


class Updates:
    """Updates of one algorithm, each made whole when it starts.

    Args:
        algorithm: it learns.
    """

    is_spread = False
    """Whether updates go on in later steps of the loop, so that `advance` is due in each step."""
    in_thread = False
    """Whether gradient steps are made in a thread."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.is_under_way = False
        """Whether an update has started whose result has not been taken yet."""
        self._stats: dict[str, float] = {}
        """Of an update that has been computed, until they are taken."""

    @property
    def acting(self) -> Algorithm:
        """The algorithm that decides for the agents now."""
        return self.algorithm

    def start(self, rollout: Rollout, *, step: int) -> bool:
        """Start to learn from a rollout; return whether an update is now under way.

        No update may be under way before.

        Args:
            rollout: closed trajectories.
            step: agent steps done, for the schedules.

        Raises:
            TrainingError: See `Algorithm.update`.
        """
        self._stats = self.algorithm.update(rollout, step=step)
        self.is_under_way = bool(self._stats)
        return self.is_under_way

    def advance(self) -> None:
        """Do a step's share of the update under way.

        Raises:
            TrainingError: See `Algorithm.update`.
        """

    def take(self, *, at_once: bool = False) -> dict[str, float]:  # noqa: ARG002  # it is over
        """Return the statistics of an update that is over, and let its policy act; else nothing.

        Args:
            at_once: whether to do first what is left of the update under way.

        Raises:
            TrainingError: See `Algorithm.update`.
        """
        stats, self._stats, self.is_under_way = self._stats, {}, False
        return stats

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Take observations into the normalisers."""
        self.algorithm.observe(obs)

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state."""
        return self.algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.algorithm.load_state_dict(state)

    def weights(self) -> dict[str, Any]:
        """Return copies of the weights of the policy that acts."""
        return self.algorithm.weights()
