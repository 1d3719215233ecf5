"""Quantities that change as training goes on."""

from __future__ import annotations

# Where linear schedules end (ML-Agents' constants).
LEARNING_RATE_FLOOR = 1e-10
EPSILON_FLOOR = 0.1
BETA_FLOOR = 1e-5


def scheduled(kind: str, start: float, floor: float, *, step: int, max_steps: int) -> float:
    """The value at `step` of a quantity that begins at `start`.

    Args:
        kind: `constant`, or `linear` down to `floor` at `max_steps`.
        start: value at step 0.
        floor: value at `max_steps` and after.
        step: agent steps done.
        max_steps: agent steps in all, at least 1.
    """
    if kind == "constant":
        return start
    # Clamped at `max_steps`: the last update may come a little after it.
    return (start - floor) * (1.0 - min(step, max_steps) / max_steps) + floor
