"""Numbers gathered between two summaries."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.tracking import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pipeline.envs.base import Stats
    from pipeline.tracking.base import Sample

# Episodes that the final figures are taken over.
RECENT_EPISODES = 100

EXTRINSIC = "Policy/Extrinsic Reward"


class Statistics:
    """Means over the summary period, and the returns of recent episodes."""

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
        """One more value of `tag` for this period's mean."""
        self._sums[tag] += value
        self._counts[tag] += 1
        # ML-Agents' statistics writers are told each value, not only the mean.
        self._values[tag].append(value)

    def add_all(self, values: Mapping[str, float]) -> None:
        """One more value of each tag."""
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
        """Finished episodes; a length counts decisions less one, as ML-Agents' charts do.

        Args:
            returns: of each episode, group rewards included.
            lengths: decisions in each.
            own: returns without group rewards where these are charted apart.
            learned: sums of the rewards learned from where these are others.
        """
        returns = list(returns)
        own = returns if own is None else own
        learned = returns if learned is None else learned
        for total, length, alone, signal in zip(returns, lengths, own, learned, strict=True):
            self.returns.append(alone)
            self._ended.append(total)
            self.recent.append(total)
            self.n_episodes += 1
            self.add(names.REWARD, alone)
            self.add(EXTRINSIC, signal)
            self.add(names.EPISODE_LENGTH, length - 1)

    def take_ended(self) -> list[float]:
        """Returns of the episodes that ended since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def add_environment(self, stats: Stats, *, with_most_recent: bool = True) -> None:
        """What an environment has reported, each statistic aggregated as it asks.

        Args:
            stats: values by name.
            with_most_recent: whether this worker's "most recent" values count; of several workers
                only the first's do.
        """
        for name, values in stats.items():
            for value, method in values:
                if method is StatsAggregationMethod.SUM:
                    self._totals[name] += value
                    self._values[name].append(value)
                elif method is StatsAggregationMethod.MOST_RECENT:
                    if with_most_recent:
                        self._latest[name] = value
                else:
                    self.add(name, value)
                if method is StatsAggregationMethod.HISTOGRAM:
                    self._distributions[name].append(value)

    def mean(self, tag: str) -> float | None:
        """This period's mean of `tag`, or None."""
        # `get`, because asking must not add a tag: the counts are a part of checkpoints.
        count = self._counts.get(tag, 0)
        return self._sums[tag] / count if count else None

    def reward_spread(self) -> float:
        """Population standard deviation of this period's episode returns, 0 for fewer than two."""
        n = len(self.returns)
        if n < 2:
            return 0.0
        mean = sum(self.returns) / n
        return math.sqrt(sum((value - mean) ** 2 for value in self.returns) / n)

    def distributions(self) -> dict[str, list[float]]:
        """This period's values of the statistics that environments report as histograms."""
        return {tag: list(values) for tag, values in self._distributions.items()}

    def samples(self) -> dict[str, Sample]:
        """This period's values of every tag; after a resume those since then."""
        methods = StatsAggregationMethod
        found: dict[str, Sample] = {}
        for tag, values in self._values.items():
            # ML-Agents charts returns as histograms, whatever an environment asks for.
            charted = tag in (names.REWARD, names.GROUP_REWARD) or tag in self._distributions
            summed = methods.SUM if tag in self._totals else methods.AVERAGE
            found[tag] = (methods.HISTOGRAM if charted else summed, list(values))
        for tag, value in self._latest.items():
            found[tag] = (methods.MOST_RECENT, [value])
        return found

    def period(self) -> dict[str, float]:
        """What this period came to: means, sums, latest values; a new period begins."""
        values = {tag: self._sums[tag] / self._counts[tag] for tag in self._sums}
        values |= self._totals | self._latest
        # `_ended` stays: curricula take it after each step, and not with a summary.
        for gathered in (self._sums, self._counts, self._totals, self._latest):
            gathered.clear()
        self._distributions.clear()
        self._values.clear()
        self.returns.clear()
        return values

    def new(self) -> dict[str, Any]:
        """Everything gathered here, as plain values for `of`."""
        # More than a checkpoint holds: another process is told everything that is pending here.
        return {**self.state_dict(), "ended": list(self._ended), "values": dict(self._values)}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Statistics:
        """What `new` gave."""
        result = Statistics()
        result.load_state_dict(values)
        result._ended = list(values["ended"])
        result._values = defaultdict(list, values["values"])
        return result

    def add_from(self, others: Sequence[Statistics]) -> None:
        """What several processes have gathered; of latest values the first one's count."""
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
        # The first process comes last, so that its values stay.
        for other in reversed(others):
            self._latest |= other._latest

    def state_dict(self) -> dict[str, Any]:
        """What continues these statistics."""
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
        """Restore what `state_dict` gave; older files lack what environments reported."""
        self._sums = defaultdict(float, state["sums"])
        self._counts = defaultdict(int, state["counts"])
        self._totals = defaultdict(float, state.get("totals", {}))
        self._latest = dict(state.get("latest", {}))
        self._distributions = defaultdict(list, state.get("distributions", {}))
        self.returns = list(state["returns"])
        self.recent = deque(state["recent"], maxlen=RECENT_EPISODES)
        self.n_episodes = int(state["n_episodes"])
