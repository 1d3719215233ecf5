"""The built-in simulators by name: how to make each, what it needs, and who can play it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.protocol.simulator import Simulator
    from pipeline.protocol.specs import ActionTuple
    from pipeline.protocol.steps import DecisionSteps

    Expert = Callable[[DecisionSteps], ActionTuple]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One built-in simulator."""

    summary: str
    """What the task is, in one line."""
    factory: str
    """`module:class`; it takes `seed`, `n_agents` and the options by keyword."""
    expert: str
    """`module:function` of its scripted expert, or `module:class` of one that remembers."""
    n_agents: int
    """Agents per process unless told otherwise."""
    distributions: tuple[str, ...]
    """Installed distributions that it needs besides those of every executable."""


_ENTRIES = {
    "balance_ball": Entry(
        summary="keep a ball on a tilting platform (continuous control, as Unity's 3DBall)",
        factory="pipeline.simulators.balance_ball:BalanceBall",
        expert="pipeline.simulators.experts:balance_ball",
        n_agents=12,
        distributions=("mujoco",),
    ),
    "grid_world": Entry(
        summary="reach the wanted one of two goals (image, goal signal, masks, as GridWorld)",
        factory="pipeline.simulators.grid_world:GridWorld",
        expert="pipeline.simulators.experts:grid_world_path",
        n_agents=16,
        distributions=(),
    ),
    "hallway": Entry(
        summary="remember a cue to choose the right goal (memory, as Unity's Hallway)",
        factory="pipeline.simulators.hallway:Hallway",
        expert="pipeline.simulators.solo_experts:HallwayExpert",
        n_agents=16,
        distributions=(),
    ),
    "pyramids": Entry(
        summary="press a switch far away, then find the goal (sparse reward, as Unity's Pyramids)",
        factory="pipeline.simulators.pyramids:Pyramids",
        expert="pipeline.simulators.solo_experts:pyramids_tour",
        n_agents=16,
        distributions=(),
    ),
    "sorter": Entry(
        summary="visit numbered tiles in rising order (list of entities, as Unity's Sorter)",
        factory="pipeline.simulators.sorter:Sorter",
        expert="pipeline.simulators.solo_experts:sorter_rounds",
        n_agents=16,
        distributions=(),
    ),
    "collector": Entry(
        summary="gather good food, avoid bad food (hybrid actions, as Unity's Food Collector)",
        factory="pipeline.simulators.collector:Collector",
        expert="pipeline.simulators.solo_experts:collector_hunt",
        n_agents=16,
        distributions=(),
    ),
}

NAMES = tuple(_ENTRIES)
"""Names of the built-in simulators."""


def entry(name: str) -> Entry:
    """The entry called `name`.

    Raises:
        SettingsError: There is no simulator of that name.
    """
    if name not in _ENTRIES:
        raise SettingsError(f"unknown simulator '{name}'; choose one of {', '.join(NAMES)}.")
    return _ENTRIES[name]


def make(name: str, *, seed: int = 0, n_agents: int | None = None, **options: Any) -> Simulator:
    """A built-in simulator, ready for `reset`.

    Args:
        name: one of `NAMES`.
        seed: seed of everything random in it.
        n_agents: agents in it; the simulator's own number if None.
        options: further keywords of the simulator.

    Raises:
        SettingsError: The name or an option is unknown, or `n_agents` is not positive.
    """
    found = entry(name)
    if n_agents is not None and n_agents < 1:
        raise SettingsError(f"{name}: n_agents must be at least 1, got {n_agents}.")
    check_options(name, options)
    factory = _load(found.factory)
    return cast("Simulator", factory(seed=seed, n_agents=n_agents or found.n_agents, **options))


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the simulator called `name` does not take.

    Raises:
        SettingsError: An option is unknown.
    """
    known = sorted(inspect.signature(_load(entry(name).factory)).parameters)
    for option in options:
        if option not in known:
            raise SettingsError(f"{name}: unknown option '{option}'; it takes {', '.join(known)}.")


def expert(name: str) -> Expert:
    """The scripted policy that solves the simulator called `name`, without memories yet."""
    found = _load(entry(name).expert)
    return cast("Expert", found() if inspect.isclass(found) else found)


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
