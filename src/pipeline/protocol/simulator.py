"""The interface of a simulator: what a class needs to become an environment.

`simulators.client` turns a simulator into an environment executable; `envs.in_process` steps it
without a process in between. The interface stands here because neither of these modules imports the
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from pipeline.arrays import AnyArray
from pipeline.protocol.specs import ActionTuple, BehaviorSpec
from pipeline.protocol.steps import Steps


class Simulator(Protocol):
    """Many agents of one or more behaviors, advanced together.

    Behavior names are fully qualified, such as `BalanceBall?team=0`. Agent ids are unique over all
    behaviors of the simulator. An agent whose episode ends appears in the terminal steps and, in
    the same result, in the decision steps of its next episode, as Unity's agents do.
    """

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of each behavior."""

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode for every agent, without terminal steps for those in progress."""

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Apply one action per agent of the last decision steps, in the same order.

        A behavior of which no agent had asked may be absent from `actions`.
        """

    def set_parameter(self, name: str, value: float) -> None:
        """Set an environment parameter, from the next reading on; unknown names are ignored."""

    def close(self) -> None:
        """Free what the simulator holds."""


@runtime_checkable
class Renderable(Protocol):
    """A simulator that can draw itself, for `pipeline evaluate --video`."""

    def render(self, agent: int) -> AnyArray:
        """Return a picture of the area that an agent is in: uint8 [height, width, 3], RGB.

        Nothing that later steps depend on changes, random streams included.
        """


@runtime_checkable
class Restorable(Protocol):
    """A simulator that can be stopped between two steps and continued exactly.

    With it, a run that is killed and resumed has the same numbers as an uninterrupted run.
    """

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything that later steps depend on, as arrays and plain values.

        None where a part of it, such as a third-party environment, does not give its state.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of a simulator made with the same arguments returned."""


@runtime_checkable
class HasState(Protocol):
    """An object that can be restored, under the names that are usual elsewhere."""

    def get_state(self) -> Any:
        """Return everything that later steps depend on, as arrays and plain values."""

    def set_state(self, state: Any) -> None:
        """Restore what `get_state` gave."""


def state_of(simulator: object) -> dict[str, Any] | None:
    """Return a simulator's state; None where it gives none."""
    if isinstance(simulator, Restorable):
        return simulator.state_dict()
    if isinstance(simulator, HasState):
        return {"state": simulator.get_state()}
    return None


def restore(simulator: object, state: Mapping[str, Any]) -> None:
    """Give a simulator back what `state_of` returned.

    Raises:
        ValueError: It does not take one.
    """
    if isinstance(simulator, Restorable):
        simulator.load_state_dict(state)
        return
    if isinstance(simulator, HasState):
        simulator.set_state(state["state"])
        return
    raise ValueError(no_state(simulator))


def no_state(simulator: object) -> str:
    """Return why a simulator gives no state, for messages."""
    name = type(simulator).__name__
    return f"{name} does not give its state; give the environment get_state() and set_state(state)"
