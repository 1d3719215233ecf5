"""How fast a learning curve rises: its end, the steps to a target, and the area under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FRACTION = 0.9
"""Of the way from the lowest start to the best end, where the target lies."""
_END = 0.1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curve:
    """The learning curve of one run."""

    steps: NDArray[np.float64]
    """[points] environment steps, ascending."""
    returns: NDArray[np.float64]
    """[points] mean return of the episodes that ended since the point before."""

    def __post_init__(self) -> None:
        """Refuse what is not a curve."""
        if not len(self.steps) or len(self.steps) != len(self.returns):
            raise ValueError("a curve needs at least one point, and a return for each step")
        if (np.diff(self.steps) <= 0).any():
            raise ValueError("a curve's steps must ascend")

    @property
    def final(self) -> float:
        """Mean return over the last tenth of the steps; at least the last point."""
        first = self.steps[-1] - _END * (self.steps[-1] - self.steps[0])
        return float(self.returns[self.steps >= first].mean())

    def steps_to(self, target: float) -> float | None:
        """Environment steps at the first point whose return is `target` or more; None: never."""
        reached = self.returns >= target
        return float(self.steps[int(np.argmax(reached))]) if reached.any() else None

    def area(self, first: float, last: float) -> float:
        """Mean height between two steps: the area under the curve divided by its width.

        Points are joined by straight lines; outside its points a curve is level.
        """
        if last <= first:
            return float(np.interp(first, self.steps, self.returns))
        inside = (self.steps > first) & (self.steps < last)
        steps = np.concatenate([[first], self.steps[inside], [last]])
        returns = np.interp(steps, self.steps, self.returns)
        return float(np.trapezoid(returns, steps) / (last - first))


def target_of(*, starts: Sequence[float], ends: Sequence[float], fraction: float) -> float:
    """The return that counts as learned: `fraction` of the way from start to best end.

    Measured from the lowest start rather than from zero, because returns may be negative or have
    any offset.

    Args:
        starts: first returns of all experiments that are compared.
        ends: their final returns.
        fraction: in (0, 1].
    """
    low, high = min(starts), max(ends)
    return low + fraction * (high - low)


def median_steps(steps: Sequence[float | None]) -> float | None:
    """The middle of the steps that runs needed; a run that never got there took longer than any.

    Returns:
        None when half of the runs or more, and thus the median run, never got there.
    """
    median = float(np.median([np.inf if one is None else one for one in steps]))
    return median if np.isfinite(median) else None
