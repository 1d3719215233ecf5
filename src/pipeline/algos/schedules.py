"""Schedules of the learning rate, epsilon and beta, and a loop that runs all parts of an update."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from pipeline.settings.trainer.schema import OnPolicySettings

_T = TypeVar("_T")

# Linear schedules end at these values, which are ML-Agents' constants.
LEARNING_RATE_FLOOR = 1e-10
EPSILON_FLOOR = 0.1
BETA_FLOOR = 1e-5
# These are RSL-RL's limits of an adaptive learning rate, and the factor by which the rate changes.
RATES, RATE_FACTOR = (1e-5, 1e-2), 1.5


def scheduled(kind: str, start: float, floor: float, *, step: int, max_steps: int) -> float:
    """Return the value after `step` agent steps of a quantity that begins at `start`.

    It is `constant`, or falls `linear` to `floor` at `max_steps`, and stays there.
    """
    if kind == "constant":
        return start
    # The step is limited to `max_steps`, because the last update may come a few steps later.
    return (start - floor) * (1.0 - min(step, max_steps) / max_steps) + floor


def adapted_rate(rate: float, kl: float, desired_kl: float) -> float:
    """Return the learning rate after a step that changed the policy by a KL divergence `kl`.

    The rate is lowered if `kl` is above `2 * desired_kl`, and raised if `kl` is below
    `desired_kl / 2` (RSL-RL, Schwarke et al. 2025, arXiv 2509.10771).
    """
    if kl > 2.0 * desired_kl:
        return max(rate / RATE_FACTOR, RATES[0])
    return min(rate * RATE_FACTOR, RATES[1]) if kl < desired_kl / 2.0 else rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Values of the scheduled settings of PPO and POCA at one update."""

    learning_rate: float
    epsilon: float
    beta: float

    @staticmethod
    def at(step: int, h: OnPolicySettings, max_steps: int) -> Schedule:
        """Return learning rate, epsilon and beta after `step` of `max_steps` agent steps."""
        at = {"step": step, "max_steps": max_steps}
        rate = scheduled(h.learning_rate_schedule, h.learning_rate, LEARNING_RATE_FLOOR, **at)
        return Schedule(
            learning_rate=rate,
            epsilon=scheduled(h.epsilon_schedule, h.epsilon, EPSILON_FLOOR, **at),
            beta=scheduled(h.beta_schedule, h.beta, BETA_FLOOR, **at),
        )

    def stats(self) -> dict[str, float]:
        """Return the values by TensorBoard tag."""
        return {
            "Policy/Learning Rate": self.learning_rate,
            "Policy/Epsilon": self.epsilon,
            "Policy/Beta": self.beta,
        }


def completed(parts: Generator[int, None, _T]) -> _T:
    """Run all remaining parts of an update, and return its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            # The return value of a generator is the value of its StopIteration (PEP 380).
            result: _T = end.value
            return result
