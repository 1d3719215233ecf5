"""`environments.<name>`: where an environment comes from, with one class for each `source`."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pipeline.settings.external_sources import FetchSource, PathSource, UnitySource
from pipeline.settings.reader import ContradictionError
from pipeline.settings.schema.kinds import Count, Positive
from pipeline.settings.source import EnvironmentParams


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltinSource(EnvironmentParams):
    """One of our simulators."""

    source: Literal["builtin"]
    """`builtin`."""
    name: str | None = None
    """The simulator; null for the one called as the environment is here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeSource(EnvironmentParams):
    """What environments of Gymnasium and of PettingZoo have in common."""

    id: str
    """The environment, as its library calls it."""
    copies: Count = 16
    """Environments in one process, stepped together."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    visual: Literal["auto", "always", "never"] = "auto"
    """Which observations that could be images become visual ones; auto: from 20 pixels a side."""
    action_scale: Positive | None = None
    """What an action of 1 means where the action space has no bounds; null refuses such spaces."""

    def __post_init__(self) -> None:
        """Refuse keyword arguments that mean something else here, or cannot be written down."""
        if "render_mode" in self.kwargs:
            raise ContradictionError("kwargs.render_mode", "cannot be set: nothing is drawn")
        _check_finite(self.kwargs, "kwargs")

    def options(self) -> dict[str, Any]:
        """Keywords of the bridge; those at their defaults are left out."""
        given: dict[str, Any] = {"id": self.id, "n_agents": self.copies}
        for item in fields(self):
            value = getattr(self, item.name)
            default = {} if item.name == "kwargs" else item.default
            if item.name not in ("source", "args", "id", "copies") and value != default:
                given[item.name] = value
        return given


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumSource(BridgeSource):
    """An environment that is registered with Gymnasium."""

    source: Literal["gymnasium"]
    """`gymnasium`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PettingzooSource(BridgeSource):
    """An environment of PettingZoo."""

    source: Literal["pettingzoo"]
    """`pettingzoo`."""
    copies: Count = 4
    """Environments in one process, each with all its agents."""
    api: Literal["auto", "parallel", "aec"] = "auto"
    """Which interface to use; auto: parallel where there is one."""
    teams: Any = "none"
    """`none`, `index` (a team for each agent), or a map from agents to numbers from 0."""
    groups: Literal["none", "all", "behavior"] = "none"
    """Which agents of a copy share a group and its reward."""

    def __post_init__(self) -> None:
        """Refuse teams that are no numbers, and what all bridges refuse."""
        BridgeSource.__post_init__(self)
        numbers = self.teams.values() if isinstance(self.teams, dict) else ()
        is_map = isinstance(self.teams, dict) and all(
            isinstance(team, int) and not isinstance(team, bool) and team >= 0 for team in numbers
        )
        if self.teams not in ("none", "index") and not is_map:
            raise ContradictionError(
                "teams",
                f"must be none, index, or a map from agents to whole numbers, got {self.teams!r}",
            )


def _check_finite(value: Any, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ContradictionError(key, f"must be finite, got {value!r}")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(item, f"{key}.{name}")
    elif isinstance(value, list):
        for item in value:
            _check_finite(item, key)


SOURCES: dict[str, type[EnvironmentParams]] = {
    "builtin": BuiltinSource,
    "path": PathSource,
    "fetch": FetchSource,
    "unity": UnitySource,
    "gymnasium": GymnasiumSource,
    "pettingzoo": PettingzooSource,
}
"""The class of each source."""
