"""Environment parameters: a number, or a sampler that is drawn afresh at every reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNIFORM, GAUSSIAN, MULTI_RANGE = 0, 1, 2
"""Sampler kinds as the environment-parameters side channel numbers them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A distribution that a parameter is drawn from."""

    kind: int
    """0 uniform, 1 Gaussian, 2 uniform over several ranges."""
    values: tuple[float, ...]
    """minimum and maximum; mean and standard deviation; or minimum and maximum of each range."""
    seed: int
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if self.kind not in (UNIFORM, GAUSSIAN, MULTI_RANGE):
            raise ValueError(f"sampler kind {self.kind} is unknown; it must be 0, 1 or 2")
        if len(self.values) < 2 or len(self.values) % 2:
            raise ValueError(f"sampler values must come in pairs, got {self.values}")

    def source(self) -> Callable[[], float]:
        """A function that gives the next draw at each call, the same for equal samplers."""
        rng = np.random.default_rng(self.seed & 0xFFFFFFFF)
        if self.kind == UNIFORM:
            return lambda: float(rng.uniform(self.values[0], self.values[1]))
        if self.kind == GAUSSIAN:
            return lambda: float(rng.normal(self.values[0], abs(self.values[1])))
        return _multi_range(rng, self.values)


class Parameters:
    """Named environment parameters, as an environment reads them."""

    __slots__ = ("_sources",)

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], float]] = {}

    def set_value(self, name: str, value: float) -> None:
        """Give a parameter a fixed value, in place of an earlier value or sampler."""
        number = float(value)
        self._sources[name] = lambda: number

    def set_sampler(self, name: str, sampler: Sampler) -> None:
        """Draw a parameter from `sampler` at each reading from now on."""
        self._sources[name] = sampler.source()

    def read(self, name: str, default: float) -> float:
        """The parameter's value, a fresh draw if it has a sampler; `default` if it is not set."""
        source = self._sources.get(name)
        return default if source is None else source()

    def values(self) -> dict[str, float]:
        """All parameters that are set, by name: each a number, or a fresh draw of its sampler."""
        return {name: source() for name, source in self._sources.items()}


def _multi_range(rng: np.random.Generator, values: Sequence[float]) -> Callable[[], float]:
    ranges = np.asarray(values, dtype=np.float64).reshape(-1, 2)
    widths = np.abs(ranges[:, 1] - ranges[:, 0])
    weights = widths / widths.sum() if widths.sum() > 0 else np.full(len(ranges), 1 / len(ranges))

    def draw() -> float:
        low, high = ranges[rng.choice(len(ranges), p=weights)]
        return float(rng.uniform(low, high))

    return draw
