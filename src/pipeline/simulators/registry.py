"""The simulators by name: how to make each, its requirements, and its expert."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from pipeline import plugins
from pipeline.core.simulator import Simulator
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import DecisionSteps
from pipeline.errors import SettingsError, where
from pipeline.plugins import Group

Expert = Callable[[DecisionSteps], ActionTuple]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The description of one simulator."""

    summary: str  # the task in one line
    factory: str
    """`module:attribute` of the simulator's class, which takes `seed`, `n_agents` and the options
    by keyword. A built-in simulator's module also has an `expert`: a function, a class if it has a
    memory, or a dict of these by behavior name without team."""
    distributions: tuple[str, ...] = ()
    """Installed distributions that the simulator needs, in addition to those of all executables."""
    copies: int | None = None
    """Default number of copies of the environment per process; None if this is no bridge."""
    counted: str = "agents"  # word for what `n_agents` counts, in the usage text of an executable
    package: str | None = None
    """Top package of a simulator of another distribution; None for built-in simulators."""

    @property
    def bridge(self) -> bool:
        """Whether the simulator runs third-party environments, which have further requirements."""
        return self.copies is not None

    @property
    def n_agents(self) -> int:
        """Default number of agents, or of copies of the environment, per process."""
        return int(self.copies or self.parameters["n_agents"].default)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Keywords of the simulator's class, by name."""
        return inspect.signature(self.load()).parameters

    def load(self, attribute: str = "") -> Any:
        """Return the simulator's class, or another attribute of its module."""
        # The module is imported only here, so that listing all simulators imports none of them.
        module, _, factory = self.factory.partition(":")
        return plugins.load(f"{module}:{attribute or factory}")


# Summaries of the built-in simulators, by the name of the simulator's module in `games`.
_SUMMARIES = {
    "balance_ball": "keep a ball on a tilting platform (continuous control, as Unity's 3DBall)",
    "grid_world": "reach the wanted one of two goals (image, goal signal, masks, as GridWorld)",
    "hallway": "remember a cue to choose the right goal (memory, as Unity's Hallway)",
    "pyramids": "press a switch far away, then find the goal (sparse reward, as Unity's Pyramids)",
    "sorter": "visit numbered tiles in rising order (list of entities, as Unity's Sorter)",
    "collector": "gather good food, avoid bad food (hybrid actions, as Unity's Food Collector)",
    "couriers": "carry parcels through a town (decisions that last, agents that come and go)",
    "pong": "return the ball: one against one (symmetric self-play, as Tennis)",
    "push_together": (
        "push a block that one alone cannot (group rewards, as Cooperative Push Block)"
    ),
    "tag": "two hunters chase a faster runner (asymmetric self-play, two behaviors)",
}

SIMULATORS: Group[Any] = Group(
    "pipeline.simulators",
    {
        # The module `grid_world` has the class `GridWorld`.
        name: f"pipeline.simulators.games.{name}:{name.title().replace('_', '')}"
        for name in _SUMMARIES
    },
)
"""The classes of all simulators except bridges, including simulators of installed packages."""
_BRIDGES = {
    "gymnasium": Entry(
        summary="an environment that is registered with Gymnasium, in several copies",
        factory="pipeline.simulators.bridges.gymnasium_bridge:GymnasiumSimulator",
        distributions=("gymnasium",),
        copies=16,
        counted="copies of the environment, with one agent each,",
    ),
    "pettingzoo": Entry(
        summary="an environment of PettingZoo, in several copies",
        factory="pipeline.simulators.bridges.pettingzoo_bridge:PettingZooSimulator",
        distributions=("gymnasium", "pettingzoo"),
        copies=4,
        counted="copies of the environment, each with all its agents,",
    ),
    "module": Entry(
        summary="an environment or simulator that a function or class of your Python file returns",
        factory="pipeline.simulators.bridges.module_bridge:simulator",
        copies=16,
        counted="agents, or copies of the environment,",
    ),
}

NAMES = tuple(SIMULATORS.ours)  # names of the built-in simulators
BRIDGES = tuple(_BRIDGES)
"""Names of the simulators that run third-party environments; `id` chooses the environment."""


def n_agents_of(name: str, options: Mapping[str, Any]) -> int:
    """Return the default number of agents, or of copies of the environment, per process."""
    registered = entry(name)
    if name == "module":
        from pipeline.simulators.bridges import module_bridge

        return module_bridge.n_agents_of(options["id"], copies=registered.n_agents)
    return registered.n_agents


def entry(name: str) -> Entry:
    """Return the description of the simulator or bridge `name`."""
    if name in _BRIDGES:
        return _BRIDGES[name]
    if name in SIMULATORS.ours:
        # MuJoCo is the only requirement besides NumPy and protobuf, which every executable has.
        needed = ("mujoco-core",) if name == "balance_ball" else ()
        factory = SIMULATORS.ours[name]
        return Entry(summary=_SUMMARIES[name], factory=factory, distributions=needed)
    if name not in SIMULATORS:
        listed = ", ".join(SIMULATORS)
        raise SettingsError(
            f"unknown simulator '{name}'; choose one of {listed}{near(name)}{SIMULATORS.more}."
        )
    point = SIMULATORS.entry_point(name)
    # The summary of another package's simulator is the first line of its class's docstring.
    lines = (SIMULATORS[name].__doc__ or "").strip().splitlines()
    return Entry(
        summary=lines[0] if lines else name,
        factory=point.value,
        distributions=(plugins.brought_by(point)[0],),
        package=point.module.partition(".")[0],
    )


def near(name: str) -> str:
    """Return ` (did you mean 'x'?)` with the simulator of the most similar name, or nothing."""
    similar = get_close_matches(name.lower(), SIMULATORS, n=1)
    return f" (did you mean '{similar[0]}'?)" if similar else ""


def make(name: str, *, seed: int = 0, n_agents: int | None = None, **options: Any) -> Simulator:
    """Return the simulator or bridge `name`, ready for `reset`.

    `seed` is the seed of all its random numbers, `n_agents` the number of its agents, or of its
    copies (None for the default), `options` are further keywords.

    Raises:
        SettingsError: The name or an option is unknown, or `n_agents` is not positive.
    """
    registered = entry(name)
    if n_agents is not None and n_agents < 1:
        raise SettingsError(f"{name}: n_agents must be at least 1, got {n_agents}.")
    check_options(name, options)
    try:
        n_agents = n_agents or n_agents_of(name, options)
        simulator = registered.load()(seed=seed, n_agents=n_agents, **options)
    # A user's environment may call `sys.exit`, which would end this process without a message.
    except SystemExit as error:
        raise SettingsError(f"{options.get('id', name)}: fails: {where(error)}") from error
    return cast("Simulator", simulator)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise SettingsError if an option of a simulator is unknown, or a required one is missing."""
    known = entry(name).parameters
    for option in options:
        if option not in known:
            raise SettingsError(
                f"{name}: unknown option '{option}'; the options are {', '.join(sorted(known))}."
            )
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise SettingsError(f"{name}: the option '{option}' is missing.")


def expert(name: str, behavior: str | None = None) -> Expert:
    """Return the scripted policy of a simulator, with an empty memory.

    The policy gets the same observations as an agent. Experts record demonstrations, show a return
    that can be reached, and serve as opponents.

    `behavior` is the agents' behavior, with or without team; it is needed if behaviors differ.

    Raises:
        SettingsError: The simulator is unknown, or has no expert for this behavior.
    """
    if entry(name).bridge:
        raise SettingsError(f"{name}: there is no expert for third-party environments.")
    try:
        expert = entry(name).load("expert")
    except AttributeError:
        raise SettingsError(f"{name}: its module has no `expert`, a scripted policy.") from None
    if isinstance(expert, dict):
        name_only = (behavior or "").partition("?")[0]
        if name_only not in expert:
            raise SettingsError(
                f"{name}: there is no expert for the behavior '{name_only}'; the behaviors with an "
                f"expert are {', '.join(expert)}."
            )
        expert = expert[name_only]
    # An expert with a memory is a class, so that each call returns an expert with an empty memory.
    return cast("Expert", expert() if inspect.isclass(expert) else expert)
