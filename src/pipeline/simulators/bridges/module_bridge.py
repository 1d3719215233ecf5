"""Simulators from a function or class of the user's Python module.

A function with the parameters `seed` and `n_agents` returns a simulator. Any other function is
called once for each copy, and returns an environment of Gymnasium or PettingZoo.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pipeline import plugins
from pipeline.core.simulator import Simulator
from pipeline.errors import SettingsError
from pipeline.simulators.bridges import naming

# Module and base classes of the environments of a library.
_GYMNASIUM, _PETTINGZOO = ("gymnasium", "Env"), ("pettingzoo", "AECEnv", "ParallelEnv")


def simulator(
    *,
    id: str | Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    n_agents: int = 1,
    visual: str = "auto",
    action_scale: float | None = None,
    teams: str | Mapping[str, int] = "none",
    groups: str = "none",
    render_mode: str | None = None,
) -> Simulator:
    """Return a user's simulator, or a simulator that runs copies of a user's environment.

    `id` is the user's function, or the function's name as `module:function`. `kwargs` are
    further keywords of the function, which also gets `render_mode` if it has a parameter of this
    name. `n_agents` is the number of agents of a simulator, or of copies of an environment. All
    other arguments are as in `PettingZooSimulator`.

    Raises:
        SettingsError: There is no such function, it fails, or its result is neither a simulator nor
            an environment.
    """
    make, arguments = naming.function_of(id), dict(kwargs or {})
    id = id if isinstance(id, str) else str(getattr(id, "__qualname__", id))
    if _makes_simulator(make):
        with plugins.user_code(id):
            simulator = make(seed=seed, n_agents=n_agents, **arguments)
        if not all(hasattr(simulator, name) for name in ("behavior_specs", "reset", "step")):
            raise OtherObjectError(id, simulator)
        return cast("Simulator", simulator)
    if render_mode is not None and "render_mode" in inspect.signature(make).parameters:
        arguments["render_mode"] = render_mode
    with plugins.user_code(id):
        first = make(**arguments)
    if not any(_is_of(first, *library) for library in (_GYMNASIUM, _PETTINGZOO)):
        raise OtherObjectError(id, first)
    with plugins.user_code(id):
        more_envs = [make(**arguments) for _ in range(n_agents - 1)]
    if more_envs and more_envs[0] is first:
        raise SettingsError(
            f"{id}: returns the same object twice, but every copy needs its own object; return a "
            "new object in each call"
        )
    spaces = {"visual": visual, "action_scale": action_scale}
    return around([first, *more_envs], seed=seed, teams=teams, groups=groups, **spaces)


class OtherObjectError(SettingsError):
    """A function returned neither a simulator nor an environment of Gymnasium or PettingZoo."""

    def __init__(self, id: str, env: Any) -> None:
        super().__init__(
            f"{id}: returns an object of type {type(env).__name__}; it must return an environment "
            "of Gymnasium or PettingZoo, or take `seed` and `n_agents` and return a simulator"
        )
        self.env = env


def around(
    envs: Sequence[Any],
    *,
    seed: int,
    teams: str | Mapping[str, int] = "none",
    groups: str = "none",
    **spaces: Any,
) -> Simulator:
    """Return a simulator that runs `envs`, all of Gymnasium or all of PettingZoo.

    `envs` may also be a list with one vector environment of Gymnasium.

    Raises:
        OtherObjectError: The objects are environments of neither library.
    """
    if _is_of(envs[0], "gymnasium.vector", "VectorEnv"):
        from pipeline.simulators.bridges.gymnasium_bridge import envs_of

        envs = envs_of(envs[0])
    if _is_of(envs[0], *_GYMNASIUM):
        from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator

        return GymnasiumSimulator(id=envs, seed=seed, **spaces)
    if _is_of(envs[0], *_PETTINGZOO):
        from pipeline.simulators.bridges.pettingzoo_bridge import PettingZooSimulator

        return PettingZooSimulator(id=envs, seed=seed, teams=teams, groups=groups, **spaces)
    raise OtherObjectError("the environment", envs[0])


def makes_environments(value: Any) -> bool:
    """Return whether a value is a class or function that makes environments."""
    return inspect.isclass(value) or (callable(value) and not hasattr(value, "step"))


def n_agents_of(id: str | Callable[..., Any], *, copies: int) -> int:
    """Return a user's simulator's default number of agents; `copies` for other environments."""
    make = naming.function_of(id)
    if not _makes_simulator(make):
        return copies
    default = inspect.signature(make).parameters["n_agents"].default
    return default if isinstance(default, int) and default > 0 else copies


def _makes_simulator(make: Callable[..., Any]) -> bool:
    try:
        return {"seed", "n_agents"} <= set(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # compiled functions may have no signature
        return False


def _is_of(env: Any, module: str, *classes: str) -> bool:
    # If the module is not imported, `env` is of another library.
    library = sys.modules.get(module)
    return library is not None and isinstance(env, tuple(getattr(library, c) for c in classes))
