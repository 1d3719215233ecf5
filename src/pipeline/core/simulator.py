"""The interface of a simulator: the methods that a class needs to become an environment.

`simulators.client` turns a simulator into an executable; `envs.in_process` steps it in the
trainer's process. The interface is in this module because neither of them imports the other.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from pipeline.core.arrays import AnyArray
from pipeline.core.specs import ActionTuple, BehaviorSpec
from pipeline.core.steps import Steps


class Simulator(Protocol):
    """Agents of one or more behaviors in one simulation, which all step at the same time.

    Behavior names are fully qualified, such as `BalanceBall?team=0`. Agent ids are unique over all
    behaviors of the simulator. If an agent's episode ends, the result of this step has the agent
    twice, as in Unity: in the terminal steps, and in the decision steps of its next episode.
    """

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Return the specification of each behavior, by the behavior's name."""

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode for every agent, and return the first steps of all agents.

        Unfinished episodes give no terminal steps.
        """

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Apply one action for each agent in the last decision steps, and return the next steps.

        Actions have the order of the agents in the decision steps.

        A behavior without agents in the last decision steps may be absent from `actions`.
        """

    def set_parameter(self, name: str, value: float) -> None:
        """Set the environment parameter `name` from now on; an unknown name is ignored."""

    def close(self) -> None:
        """Free windows, processes and other resources of the simulator."""


@runtime_checkable
class Renderable(Protocol):
    """A simulator that can draw itself, for `pipeline evaluate --video`."""

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's area: uint8 [height, width, 3], RGB.

        The method must not change anything that later steps depend on, such as random streams.
        """


@runtime_checkable
class Restorable(Protocol):
    """A simulator that can be stopped between two steps and continued exactly.

    If a run with such a simulator is killed and resumed, its results equal the results of an
    uninterrupted run.
    """

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state: everything that later steps depend on, as arrays and plain values.

        None if a part of the simulator, such as a third-party environment, cannot give its state.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` of a simulator with the same arguments returned."""


@runtime_checkable
class HasState(Protocol):
    """A simulator with the methods `get_state` and `set_state`, which some other libraries use."""

    def get_state(self) -> Any:
        """Return the state: everything that later steps depend on, as arrays and plain values."""

    def set_state(self, state: Any) -> None:
        """Restore a state that `get_state` returned."""


def state_of(simulator: object) -> dict[str, Any] | None:
    """Return a simulator's state; None if the simulator cannot return a state."""
    # A class may have both interfaces; `restore` tests them in the same order, because a state must
    # be restored by the interface that returned it.
    if isinstance(simulator, Restorable):
        return simulator.state_dict()
    if isinstance(simulator, HasState):
        # This function returns a dict, but `get_state` of another library may return any value.
        return {"state": simulator.get_state()}
    return None


def restore(simulator: object, state: Mapping[str, Any]) -> None:
    """Restore a state of `state_of`; ValueError if the simulator cannot restore a state."""
    if isinstance(simulator, Restorable):
        simulator.load_state_dict(state)
        return
    if isinstance(simulator, HasState):
        simulator.set_state(state["state"])
        return
    raise ValueError(no_state(simulator))


def no_state(simulator: object) -> str:
    """Return the error message about a simulator that cannot return its state."""
    # The message names the methods of `HasState` and not those of `Restorable`, because most users
    # have an environment of another library, and some libraries have methods of these names.
    name = type(simulator).__name__
    return f"{name} does not give its state; give the environment get_state() and set_state(state)"
