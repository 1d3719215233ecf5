"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorResult:
    """What training one behavior came to."""

    steps: int
    n_updates: int
    n_episodes: int
    mean_reward: float | None
    """Mean return of the last episodes (100 at most), None when no episode ended."""
    checkpoint: Path
    """Everything needed to continue, evaluate or export."""
    elo: float | None = None
    """Rating of the policy after self-play, None without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run came to."""

    behaviors: Mapping[str, BehaviorResult]
    seconds: Mapping[str, float]
    """Wall time by part: environment, wire, inference, storage, update, total."""


def outcome(result: TrainResult) -> dict[str, Any]:
    """A run's outcome without timings, for files that are compared byte by byte."""
    return {
        name: {
            "steps": one.steps,
            "n_updates": one.n_updates,
            "n_episodes": one.n_episodes,
            "mean_reward": one.mean_reward,
            **({} if one.elo is None else {"elo": one.elo}),
        }
        for name, one in result.behaviors.items()
    }
