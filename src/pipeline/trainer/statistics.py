"""Statistics of a behavior between two summaries."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.envs.side_channels import Stats, StatsAggregationMethod
from pipeline.tracking import names
from pipeline.tracking.base import Sample

# Number of most recent episodes for which `Statistics.recent` has the returns.
RECENT_EPISODES = 100

EXTRINSIC = "Policy/Extrinsic Reward"


class Statistics:
    """Means of values over a summary period, and the returns of recent episodes."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._totals: dict[str, float] = defaultdict(float)
        self._latest: dict[str, float] = {}
        self._distributions: dict[str, list[float]] = defaultdict(list)
        self._values: dict[str, list[float]] = defaultdict(list)
        self._ended: list[float] = []
        self.returns: list[float] = []
        self.recent: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.n_episodes = 0

    def add(self, tag: str, value: float) -> None:
        """Add a value to the mean of `tag` over this period."""
        self._sums[tag] += value
        self._counts[tag] += 1
        # Statistics writers for ML-Agents get every value, not only the mean.
        self._values[tag].append(value)

    def add_all(self, values: Mapping[str, float]) -> None:
        """Add a value to the mean of each tag."""
        for tag, value in values.items():
            self.add(tag, value)

    def add_episodes(
        self,
        returns: Iterable[float],
        lengths: Iterable[int],
        *,
        own: Iterable[float] | None = None,
        learned: Iterable[float] | None = None,
    ) -> None:
        """Add ended episodes; as in ML-Agents, `Episode Length` is the number of decisions minus 1.

        `returns` have group rewards, `own` have none, and `learned` are the sums to learn from. A
        length of 0 means that the agent ended before its first decision.
        """
        returns = list(returns)
        own = returns if own is None else own
        learned = returns if learned is None else learned
        for total, length, own_return, learned_return in zip(
            returns, lengths, own, learned, strict=True
        ):
            self.returns.append(own_return)
            self._ended.append(total)
            self.recent.append(total)
            self.n_episodes += 1
            self.add(names.REWARD, own_return)
            self.add(EXTRINSIC, learned_return)
            self.add(names.EPISODE_LENGTH, max(length - 1, 0))

    def take_ended(self) -> list[float]:
        """Return the returns of the episodes that ended since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def add_environment(self, stats: Stats, *, with_most_recent: bool = True) -> None:
        """Add reported values with their aggregation methods, by the name of the statistic.

        Only the first worker's MOST_RECENT values are used: `with_most_recent` is False for others.
        """
        for name, values in stats.items():
            for value, method in values:
                if method is StatsAggregationMethod.SUM:
                    self._totals[name] += value
                    # `add` is not called for sums, so statistics writers get their values here.
                    self._values[name].append(value)
                # Several workers have no common most recent value; the first worker's is used.
                elif method is StatsAggregationMethod.MOST_RECENT:
                    if with_most_recent:
                        self._latest[name] = value
                else:
                    self.add(name, value)
                # A histogram also keeps its values; `add` has counted them for the mean.
                if method is StatsAggregationMethod.HISTOGRAM:
                    self._distributions[name].append(value)

    def reward_spread(self) -> float:
        """Return the population standard deviation of the returns; 0 for fewer than two returns."""
        # `statistics.pstdev` is not used, because its exact fractions take longer for many values.
        n = len(self.returns)
        if n < 2:
            return 0.0
        mean = sum(self.returns) / n
        return math.sqrt(sum((value - mean) ** 2 for value in self.returns) / n)

    def distributions(self) -> dict[str, list[float]]:
        """Return this period's values of the statistics that environments report as histograms."""
        return {tag: list(values) for tag, values in self._distributions.items()}

    def samples(self) -> dict[str, Sample]:
        """Return the values of each tag in this period, since a resume, and the tag's method."""
        methods = StatsAggregationMethod
        by_tag: dict[str, Sample] = {}
        for tag, values in self._values.items():
            # As in ML-Agents, returns are histograms, whatever method an environment gives.
            charted = tag in (names.REWARD, names.GROUP_REWARD) or tag in self._distributions
            summed = methods.SUM if tag in self._totals else methods.AVERAGE
            by_tag[tag] = (methods.HISTOGRAM if charted else summed, list(values))
        for tag, value in self._latest.items():
            by_tag[tag] = (methods.MOST_RECENT, [value])
        return by_tag

    def period(self) -> dict[str, float]:
        """Return this period's means, sums and latest values, and begin a new period."""
        values = {tag: self._sums[tag] / self._counts[tag] for tag in self._sums}
        values |= self._totals | self._latest
        # `_ended` is not cleared: curricula take it after each step, independent of summaries.
        for gathered in (self._sums, self._counts, self._totals, self._latest):
            gathered.clear()
        self._distributions.clear()
        self._values.clear()
        self.returns.clear()
        return values

    def add_from(self, others: Sequence[Statistics]) -> None:
        """Add the statistics of several processes; the first process gives the latest values."""
        for other in others:
            for tag, value in other._sums.items():
                self._sums[tag] += value
                self._counts[tag] += other._counts[tag]
            for tag, value in other._totals.items():
                self._totals[tag] += value
            for tag, values in other._distributions.items():
                self._distributions[tag].extend(values)
            for tag, values in other._values.items():
                self._values[tag].extend(values)
            self._ended += other._ended
            self.returns += other.returns
            self.recent.extend(other.recent)
            self.n_episodes += other.n_episodes
        # The order is reversed, so that the values of the first process overwrite the others.
        for other in reversed(others):
            self._latest |= other._latest

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics for a checkpoint, as plain values."""
        return {
            "sums": dict(self._sums),
            "counts": dict(self._counts),
            "totals": dict(self._totals),
            "latest": dict(self._latest),
            "distributions": self.distributions(),
            "returns": list(self.returns),
            "recent": list(self.recent),
            "n_episodes": self.n_episodes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        # Files of older versions lack the statistics that environments report.
        self._sums = defaultdict(float, state["sums"])
        self._counts = defaultdict(int, state["counts"])
        self._totals = defaultdict(float, state.get("totals", {}))
        self._latest = dict(state.get("latest", {}))
        self._distributions = defaultdict(list, state.get("distributions", {}))
        self.returns = list(state["returns"])
        self.recent = deque(state["recent"], maxlen=RECENT_EPISODES)
        self.n_episodes = int(state["n_episodes"])
