"""Environment parameters: each is a number, or a sampler that draws a number at each reading.

Executables and environments in this process share this module, so that equal samplers give equal
draws in both.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.simulator import Simulator

Stat = tuple[str, float, int]

UNIFORM, GAUSSIAN, MULTI_RANGE = 0, 1, 2
"""Sampler kinds as the environment-parameters side channel numbers them."""
READING = "Environment/Parameter/"
"""Prefix of statistics that report which values of a parameter a simulator has read.

The rest of the statistic's name is the name of the parameter.
"""

# The number of StatsAggregationMethod.HISTOGRAM.
_HISTOGRAM = 3
# Largest number of stored readings; without a limit they could fill the memory.
_READINGS_KEPT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A distribution from which values of an environment parameter are drawn."""

    kind: int
    """Kind of the distribution: 0 uniform, 1 Gaussian, 2 uniform over several ranges."""
    values: tuple[float, ...]
    """Minimum and maximum; mean and standard deviation; or minimum and maximum of each range."""
    seed: int
    """Seed of the draws, int32."""

    def __post_init__(self) -> None:
        if self.kind not in (UNIFORM, GAUSSIAN, MULTI_RANGE):
            raise ValueError(f"sampler kind {self.kind} is unknown; it must be 0, 1 or 2")
        if len(self.values) < 2 or len(self.values) % 2:
            raise ValueError(f"sampler values must come in pairs, got {self.values}")


class Source:
    """A random stream of draws from a sampler; equal samplers give equal draws."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        # Seeds are int32 in messages; NumPy refuses negative seeds.
        self.rng = np.random.default_rng(sampler.seed & 0xFFFFFFFF)

    def __call__(self) -> float:
        """Return the next value of the stream."""
        kind, (low, high, *_) = self.sampler.kind, self.sampler.values
        if kind == GAUSSIAN:
            # NumPy refuses negative standard deviations; the sign does not change the distribution.
            return float(self.rng.normal(low, abs(high)))
        if kind == MULTI_RANGE:
            # Values are uniform over the union of all ranges, so a range is chosen in proportion to
            # its width.
            ranges = np.asarray(self.sampler.values, dtype=np.float64).reshape(-1, 2)
            widths = np.abs(ranges[:, 1] - ranges[:, 0])
            total = widths.sum()
            weights = widths / total if total > 0 else np.full(len(ranges), 1 / len(ranges))
            low, high = ranges[self.rng.choice(len(ranges), p=weights)]
        return float(self.rng.uniform(low, high))


class Parameters:
    """Environment parameters by name, each a value or a sampler, for an environment to read."""

    __slots__ = ("_readings", "_sources")

    def __init__(self) -> None:
        self._sources: dict[str, float | Source] = {}
        self._readings: deque[tuple[str, float]] = deque(maxlen=_READINGS_KEPT)

    def set_value(self, name: str, value: float) -> None:
        """Give a parameter a fixed value, in place of an earlier value or sampler."""
        self._sources[name] = float(value)

    def set_sampler(self, name: str, sampler: Sampler) -> None:
        """Make each later reading of a parameter return a new draw from `sampler`."""
        self._sources[name] = Source(sampler)

    def read(self, name: str, default: float) -> float:
        """Return a parameter's value, or its sampler's next draw; `default` if it is not set."""
        source = self._sources.get(name)
        if source is None:
            return default
        value = source() if isinstance(source, Source) else source
        self._readings.append((name, value))
        return value

    def values(self) -> dict[str, float]:
        """Return the value of each parameter that is set, by name; a sampler gives a new draw."""
        return {name: self.read(name, 0.0) for name in list(self._sources)}

    def take_readings(self) -> list[tuple[str, float]]:
        """Return (name, value) of each reading since the last call, except of unset parameters."""
        readings = list(self._readings)
        self._readings.clear()
        return readings

    def state_dict(self) -> dict[str, Any]:
        """Return fixed values, samplers and the states of the random streams, as plain values."""
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
        """Restore values, samplers and random streams that `state_dict` has returned."""
        self._sources = {}
        for name, saved in state.items():
            if isinstance(saved, dict):
                values = tuple(saved["values"])
                source = Source(Sampler(kind=saved["kind"], values=values, seed=saved["seed"]))
                source.rng.bit_generator.state = saved["stream"]
                self._sources[name] = source
            else:
                self._sources[name] = float(saved)


class Controls:
    """Sets a simulator's parameters and collects its statistics for the trainer.

    A simulator with an attribute `parameters` of the type `Parameters` draws from samplers itself,
    at each reading. A simulator that reports statistics has a method `stats`, which returns name,
    value and aggregation (0 average, 1 most recent, 2 sum, 3 histogram) of each statistic since the
    last call.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        # Samplers are stored in the simulator's own `parameters`, if it has them, so that it can
        # draw another value for each of its areas.
        theirs = getattr(simulator, "parameters", None)
        self._parameters = theirs if isinstance(theirs, Parameters) else Parameters()
        self._stats: Callable[[], Iterable[Stat]] | None = getattr(simulator, "stats", None)
        self._draws_for_simulator = theirs is not self._parameters
        self._samplers: set[str] = set()

    def set_value(self, name: str, value: float) -> None:
        """Give a parameter a fixed value, in place of an earlier value or sampler."""
        self._samplers.discard(name)
        self._simulator.set_parameter(name, value)

    def set_sampler(self, name: str, sampler: Sampler) -> None:
        """From now on, draw a parameter's values from `sampler`."""
        # An equal sampler also gets a new source, so that its random stream begins again.
        self._parameters.set_sampler(name, sampler)
        self._samplers.add(name)

    def draw(self) -> None:
        """Before a step or reset, set a new draw of each sampler, unless the simulator draws."""
        if self._draws_for_simulator:
            # The names are sorted, because the order of a set of texts differs between processes.
            for name in sorted(self._samplers):
                self._simulator.set_parameter(name, self._parameters.read(name, 0.0))

    def take_stats(self) -> list[Stat]:
        """Return the simulator's statistics, and the parameter values that it has read."""
        stats = list(self._stats()) if self._stats else []
        readings = self._parameters.take_readings()
        return stats + [(READING + name, value, _HISTOGRAM) for name, value in readings]

    def state_dict(self) -> dict[str, Any]:
        """Return the names of sampled parameters, and the random streams that are drawn here."""
        drawn = self._parameters.state_dict() if self._draws_for_simulator else {}
        return {"drawn": drawn, "samplers": sorted(self._samplers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; the simulator restores its own state."""
        if self._draws_for_simulator:
            self._parameters.load_state_dict(state["drawn"])
        self._samplers = set(state["samplers"])
