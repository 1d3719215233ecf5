"""The simulators by name: how to make each, what it needs, and who can play it."""

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
    expert: str | Mapping[str, str] | None = None
    """`module:function` of its scripted expert, or `module:class` of one that remembers; or those
    of each behavior, by name without team; None without one."""
    n_agents: int
    """Agents per process unless told otherwise."""
    counted: str = "agents"
    """What `n_agents` counts."""
    distributions: tuple[str, ...]
    """Installed distributions that it needs besides those of every executable."""
    bridge: bool = False
    """Whether it runs an environment of others, which needs more than the above."""


_EXPERTS = "pipeline.simulators.experts"

_ENTRIES = {
    "balance_ball": Entry(
        summary="keep a ball on a tilting platform (continuous control, as Unity's 3DBall)",
        factory="pipeline.simulators.balance_ball:BalanceBall",
        expert=f"{_EXPERTS}.balance_ball:expert",
        n_agents=12,
        distributions=("mujoco",),
    ),
    "grid_world": Entry(
        summary="reach the wanted one of two goals (image, goal signal, masks, as GridWorld)",
        factory="pipeline.simulators.grid_world:GridWorld",
        expert=f"{_EXPERTS}.grid_world:expert",
        n_agents=16,
        distributions=(),
    ),
    "hallway": Entry(
        summary="remember a cue to choose the right goal (memory, as Unity's Hallway)",
        factory="pipeline.simulators.hallway:Hallway",
        expert=f"{_EXPERTS}.hallway:HallwayExpert",
        n_agents=16,
        distributions=(),
    ),
    "pyramids": Entry(
        summary="press a switch far away, then find the goal (sparse reward, as Unity's Pyramids)",
        factory="pipeline.simulators.pyramids:Pyramids",
        expert=f"{_EXPERTS}.pyramids:expert",
        n_agents=16,
        distributions=(),
    ),
    "sorter": Entry(
        summary="visit numbered tiles in rising order (list of entities, as Unity's Sorter)",
        factory="pipeline.simulators.sorter:Sorter",
        expert=f"{_EXPERTS}.sorter:expert",
        n_agents=16,
        distributions=(),
    ),
    "collector": Entry(
        summary="gather good food, avoid bad food (hybrid actions, as Unity's Food Collector)",
        factory="pipeline.simulators.collector:Collector",
        expert=f"{_EXPERTS}.collector:expert",
        n_agents=16,
        distributions=(),
    ),
    "couriers": Entry(
        summary="carry parcels through a town (decisions that last, agents that come and go)",
        factory="pipeline.simulators.couriers:Couriers",
        expert=f"{_EXPERTS}.couriers:expert",
        n_agents=64,
        distributions=(),
    ),
    "pong": Entry(
        summary="return the ball: one against one (symmetric self-play, as Tennis)",
        factory="pipeline.simulators.pong:Pong",
        expert=f"{_EXPERTS}.pong:expert",
        n_agents=32,
        distributions=(),
    ),
    "push_together": Entry(
        summary="push a block that one alone cannot (group rewards, as Cooperative Push Block)",
        factory="pipeline.simulators.push_together:PushTogether",
        expert=f"{_EXPERTS}.push_together:expert",
        n_agents=48,
        distributions=(),
    ),
    "tag": Entry(
        summary="two hunters chase a faster runner (asymmetric self-play, two behaviors)",
        factory="pipeline.simulators.tag:Tag",
        expert={"Hunter": f"{_EXPERTS}.tag:hunter", "Runner": f"{_EXPERTS}.tag:runner"},
        n_agents=24,
        distributions=(),
    ),
}

_BRIDGES = {
    "gymnasium": Entry(
        summary="an environment that is registered with Gymnasium, in several copies",
        factory="pipeline.simulators.bridges.gymnasium_bridge:GymnasiumSimulator",
        n_agents=16,
        counted="copies of the environment, with one agent each,",
        distributions=("gymnasium",),
        bridge=True,
    ),
    "pettingzoo": Entry(
        summary="an environment of PettingZoo, in several copies",
        factory="pipeline.simulators.bridges.pettingzoo_bridge:PettingZooSimulator",
        n_agents=4,
        counted="copies of the environment, each with all its agents,",
        distributions=("gymnasium", "pettingzoo"),
        bridge=True,
    ),
}

NAMES = tuple(_ENTRIES)
"""Names of the built-in simulators."""
BRIDGES = tuple(_BRIDGES)
"""Names of the simulators that run environments of others, told by the option `id`."""


def entry(name: str) -> Entry:
    """The entry called `name`.

    Raises:
        SettingsError: There is no simulator of that name.
    """
    found = _ENTRIES.get(name) or _BRIDGES.get(name)
    if found is None:
        raise SettingsError(f"unknown simulator '{name}'; choose one of {', '.join(NAMES)}.")
    return found


def make(name: str, *, seed: int = 0, n_agents: int | None = None, **options: Any) -> Simulator:
    """A simulator, ready for `reset`.

    Args:
        name: one of `NAMES` or `BRIDGES`.
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
        SettingsError: An option is unknown, or one that must be given is missing.
    """
    known = inspect.signature(_load(entry(name).factory)).parameters
    for option in options:
        if option not in known:
            raise SettingsError(
                f"{name}: unknown option '{option}'; it takes {', '.join(sorted(known))}."
            )
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise SettingsError(f"{name}: the option '{option}' is missing.")


def expert(name: str, behavior: str | None = None) -> Expert:
    """The scripted policy that plays the simulator called `name` well, without memories yet.

    Args:
        name: one of `NAMES`.
        behavior: who is played, with or without team; needed where behaviors differ.

    Raises:
        SettingsError: There is no such simulator, or it has no expert for this behavior.
    """
    found = entry(name).expert
    if found is None:
        raise SettingsError(f"{name}: there is no expert for environments that others wrote.")
    if not isinstance(found, str):
        wanted = (behavior or "").partition("?")[0]
        if wanted not in found:
            raise SettingsError(
                f"{name}: there is no expert for the behavior '{wanted}'; there is one each for "
                f"{', '.join(found)}."
            )
        found = found[wanted]
    loaded = _load(found)
    return cast("Expert", loaded() if inspect.isclass(loaded) else loaded)


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
