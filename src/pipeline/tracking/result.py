"""The results of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.tracking.run_metadata import INTERRUPTED


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorResult:
    """Results of the training of one behavior."""

    steps: int
    n_updates: int
    n_episodes: int
    mean_reward: float | None
    """Mean return of the last 100 episodes at most; None if no episode ended."""
    n_recent: int = 0
    """Number of episodes in `mean_reward`."""
    checkpoint: Path
    """Checkpoint file to continue, evaluate or export."""
    elo: float | None = None
    """ELO rating of the policy; None without self-play."""
    interrupted_at: int | None = None
    """Step of the last interruption after which the run was not continued exactly, or None."""

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that stage `train` writes: no times, and no missing values."""
        optional = {"elo": self.elo, INTERRUPTED: self.interrupted_at}
        return {
            "steps": self.steps,
            "updates": self.n_updates,
            "episodes": self.n_episodes,
            "mean_reward": self.mean_reward,
            **{name: value for name, value in optional.items() if value is not None},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Results of a run."""

    behaviors: Mapping[str, BehaviorResult]
    seconds: Mapping[str, float]
    """Seconds of each part of the run: environment, wire, inference, storage, update, total."""
    n_exchanges: int = 0
    """Number of exchanges with each environment since the run began or was resumed."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts since the run began or was resumed: agent steps, rollouts, gradient steps."""
    interrupted: Sequence[int] = ()
    """Steps of the interruptions after which the run did not continue exactly."""
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]] = field(default_factory=dict)
    """(step, value) of each summary by behavior and tag."""

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return each behavior's final numbers, as `BehaviorResult.numbers` returns them."""
        return {name: outcome.numbers() for name, outcome in self.behaviors.items()}
