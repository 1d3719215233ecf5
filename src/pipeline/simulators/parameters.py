"""Environment parameters: a number, or a sampler that is drawn afresh at every reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    def draw(self, rng: np.random.Generator) -> float:
        """One value of the distribution."""
        if self.kind == UNIFORM:
            return float(rng.uniform(self.values[0], self.values[1]))
        if self.kind == GAUSSIAN:
            return float(rng.normal(self.values[0], abs(self.values[1])))
        ranges = np.asarray(self.values, dtype=np.float64).reshape(-1, 2)
        widths = np.abs(ranges[:, 1] - ranges[:, 0])
        weights = (
            widths / widths.sum() if widths.sum() > 0 else np.full(len(ranges), 1 / len(ranges))
        )
        low, high = ranges[rng.choice(len(ranges), p=weights)]
        return float(rng.uniform(low, high))


class Source:
    """Gives a sampler's next draw at each call, the same sequence for equal samplers."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.rng = np.random.default_rng(sampler.seed & 0xFFFFFFFF)

    def __call__(self) -> float:
        """The next draw."""
        return self.sampler.draw(self.rng)


class Parameters:
    """Named environment parameters, as an environment reads them."""

    __slots__ = ("_sources",)

    def __init__(self) -> None:
        self._sources: dict[str, float | Source] = {}

    def set_value(self, name: str, value: float) -> None:
        """Give a parameter a fixed value, in place of an earlier value or sampler."""
        self._sources[name] = float(value)

    def set_sampler(self, name: str, sampler: Sampler) -> None:
        """Draw a parameter from `sampler` at each reading from now on."""
        self._sources[name] = Source(sampler)

    def read(self, name: str, default: float) -> float:
        """The parameter's value, a fresh draw if it has a sampler; `default` if it is not set."""
        source = self._sources.get(name, default)
        return source() if isinstance(source, Source) else source

    def state_dict(self) -> dict[str, Any]:
        """Values, samplers and where their streams are, as plain values."""
        return {
            name: {
                "kind": source.sampler.kind,
                "values": list(source.sampler.values),
                "seed": source.sampler.seed,
                "stream": source.rng.bit_generator.state,
            }
            if isinstance(source, Source)
            else source
            for name, source in self._sources.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._sources = {}
        for name, saved in state.items():
            if isinstance(saved, dict):
                values = tuple(saved["values"])
                source = Source(Sampler(kind=saved["kind"], values=values, seed=saved["seed"]))
                source.rng.bit_generator.state = saved["stream"]
                self._sources[name] = source
            else:
                self._sources[name] = float(saved)
