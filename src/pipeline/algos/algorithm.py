"""What the trainer asks of an algorithm, whichever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.algos.policy import Decision, Policy
    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.data.rollout import Field, Rollout


class Algorithm(Protocol):
    """Acts, says when there is something to do with what happened, and learns from it."""

    policy: Policy

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each row of experience holds."""

    @property
    def memory_size(self) -> int:
        """Numbers that an agent remembers; 0 without memory."""

    def act(
        self,
        obs: Sequence[FloatArray],
        mask: Sequence[BoolArray] | None,
        memory: FloatArray | None = None,
    ) -> Decision:
        """Decide for N agents."""

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Take the observations [B, *shape] of closed trajectories into the normalisers."""

    def ready(self, n_rows: int) -> bool:
        """Whether `update` has a use for `n_rows` of closed trajectories."""

    def update(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        """Take a rollout; statistics by tag, empty when nothing was learned yet."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues training but for experience."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""

    def weights(self) -> dict[str, Any]:
        """Copies of the networks, for `load_weights`."""

    def load_weights(self, state: dict[str, Any]) -> tuple[list[str], int]:
        """Take over what fits of another run's networks."""
