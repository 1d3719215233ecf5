"""Environments without a process: a simulator, or any object with the low-level API."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.envs.base import BaseEnv, ControlledEnv, StoredStepsEnv, closed_error
from pipeline.envs.side_channels import aggregation_of
from pipeline.errors import SettingsError, UnityObservationException
from pipeline.protocol.decoding import check_finite
from pipeline.protocol.parameters import Controls, Sampler
from pipeline.protocol.simulator import Restorable
from pipeline.protocol.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    check_spec,
)
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.arrays import AnyArray, BoolArray
    from pipeline.envs.base import LowLevelApi, Stats
    from pipeline.protocol.simulator import Simulator
    from pipeline.protocol.steps import Steps

_FLOAT32 = np.dtype(np.float32)
_MEMBERS = ("behavior_specs", "get_steps", "set_actions", "step", "reset", "close")


class InProcessEnvironment(StoredStepsEnv):
    """A simulator behind the same interface as `UnityEnvironment`, with the same semantics."""

    def __init__(self, simulator: Simulator) -> None:
        """Take ownership of `simulator`; `close` closes it."""
        super().__init__()
        self._simulator = simulator
        self._controls = Controls(simulator)
        self._is_reset = False
        self._loaded = True
        self._restored: dict[str, ActionTuple] | None = None

    def reset(self) -> None:
        """Begin a new episode for every agent, and forget the set actions."""
        self._check_loaded()
        self._actions.clear()
        self._restored = None
        self._is_reset = True
        self._controls.draw()
        self._update(self._simulator.reset())

    def step(self) -> None:
        """Apply the set actions, zeros where none."""
        self._check_loaded()
        if not self._is_reset:
            self.reset()
            return
        self._controls.draw()
        restored, self._restored = self._restored, None
        actions = self._take_actions() if restored is None else restored
        self._update(self._simulator.step(actions))

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter, from the next reading on; True.

        Numbers are rounded to float32, as they are on their way to an executable.
        """
        if isinstance(value, Sampler):
            rounded = tuple(float(np.float32(number)) for number in value.values)
            self._controls.set_sampler(name, replace(value, values=rounded))
        else:
            self._controls.set_value(name, float(np.float32(value)))
        return True

    def take_stats(self) -> Stats:
        """What the simulator has reported since the last call, by name."""
        stats: Stats = {}
        for name, value, method in self._controls.take_stats():
            stats.setdefault(name, []).append((value, aggregation_of(name, method)))
        return stats

    def state_dict(self) -> dict[str, Any] | None:
        """Everything that the next step depends on, the set actions included.

        None when the simulator cannot be restored, or has not been reset.
        """
        if not isinstance(self._simulator, Restorable) or not self._is_reset:
            return None
        actions = self._take_actions()
        self._actions = dict(actions)
        return {
            "simulator": self._simulator.state_dict(),
            "controls": self._controls.state_dict(),
            "behaviors": list(self._specs),
            "actions": {
                name: {"continuous": action.continuous, "discrete": action.discrete}
                for name, action in actions.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; the next call is `step`.

        Raises:
            ValueError: The state is of another simulator.
        """
        self._check_loaded()
        if not isinstance(self._simulator, Restorable):
            super().load_state_dict(state)
            return
        self._simulator.load_state_dict(state["simulator"])
        self._controls.load_state_dict(state["controls"])
        specs = self._simulator.behavior_specs
        self._specs.update({name: specs[name] for name in state["behaviors"]})
        self._restored = {
            name: ActionTuple(action["continuous"], action["discrete"])
            for name, action in state["actions"].items()
        }
        self._is_reset = True

    def close(self) -> None:
        """Close the simulator.

        Raises:
            UnityEnvironmentException: It is closed already.
        """
        self._check_loaded()
        self._loaded = False
        self._simulator.close()

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise closed_error()

    def _update(self, result: Mapping[str, Steps]) -> None:
        specs = self._simulator.behavior_specs
        for name, (decision, terminal) in result.items():
            if name not in self._specs and (len(decision) or len(terminal)):
                check_spec(name, specs[name])
                self._specs[name] = specs[name]
        for name, spec in self._specs.items():
            steps = result.get(name)
            if steps is None:
                steps = self._no_agents(name)
            elif not (_has_our_types(steps[0]) and _has_our_types(steps[1])):
                steps = our_steps(name, spec, steps)
            self._steps[name] = steps


class LowLevelEnvironment(BaseEnv):
    """An object of whatever class that has ML-Agents' low-level API, with our arrays for its steps.

    Args:
        env: with the members of ML-Agents' `BaseEnv`; its specifications and steps may be of other
            classes, and the steps' fields lists. `close` closes it.

    Raises:
        SettingsError: It lacks a member.
    """

    def __init__(self, env: LowLevelApi) -> None:
        lacking = [name for name in _MEMBERS if not hasattr(type(env), name)]
        lacking = [name for name in lacking if not hasattr(env, name)]
        if lacking:
            raise SettingsError(
                f"an object of type {type(env).__name__} is no environment, because it lacks "
                f"{', '.join(lacking)}; give an executable, an environment of Gymnasium or "
                "PettingZoo, or an object with ML-Agents' low-level API"
            )
        self._env = env
        self._specs: dict[str, BehaviorSpec] = {}

    def step(self) -> None:
        """Go on until an agent asks or has ended."""
        self._env.step()

    def reset(self) -> None:
        """Begin a new episode for every agent."""
        self._env.reset()

    def close(self) -> None:
        """Close the object."""
        self._env.close()

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Each behavior's specification.

        Raises:
            UnityObservationException: A specification cannot be read.
        """
        theirs = self._env.behavior_specs
        if theirs.keys() != self._specs.keys():
            specs = {name: _our_spec(name, spec) for name, spec in theirs.items()}
            for name, spec in specs.items():
                check_spec(name, spec)
            self._specs = specs
        return self._specs

    def get_steps(self, behavior_name: str) -> Steps:
        """What the behavior's agents sent last.

        Raises:
            UnityObservationException: A field is not as the specification says.
            NonFiniteError: A reward or an observation is NaN or infinite.
        """
        spec = self.behavior_specs[behavior_name]
        return our_steps(behavior_name, spec, self._env.get_steps(behavior_name))

    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        """Set the actions of all agents of the last decision steps, in the same order."""
        self._env.set_actions(behavior_name, action)

    def set_action_for_agent(self, behavior_name: str, agent_id: int, action: ActionTuple) -> None:
        """Set the action of one agent, where the object can."""
        env: Any = self._env
        env.set_action_for_agent(behavior_name, agent_id, action)

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter; False where the object takes none."""
        return isinstance(self._env, ControlledEnv) and self._env.set_parameter(name, value)

    def take_stats(self) -> Stats:
        """What the object has reported since the last call, if it does."""
        return self._env.take_stats() if isinstance(self._env, ControlledEnv) else {}

    def state_dict(self) -> dict[str, Any] | None:
        """The object's state, if it is of this project's `BaseEnv`."""
        return self._env.state_dict() if isinstance(self._env, BaseEnv) else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        if not isinstance(self._env, BaseEnv):
            super().load_state_dict(state)
            return
        self._env.load_state_dict(state)


def _our_spec(name: str, spec: Any) -> BehaviorSpec:
    """The same specification in our classes."""
    try:
        observations = [
            ObservationSpec(
                shape=tuple(int(size) for size in one.shape),
                dimension_property=tuple(map(DimensionProperty, map(int, one.dimension_property))),
                observation_type=ObservationType(int(getattr(one.observation_type, "value", 0))),
                name=str(one.name),
            )
            for one in spec.observation_specs
        ]
        branches = tuple(int(size) for size in spec.action_spec.discrete_branches)
        actions = ActionSpec(int(spec.action_spec.continuous_size), branches)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnityObservationException(
            f"behavior {name}: its specification cannot be read ({error}); give one of ML-Agents' "
            "BehaviorSpec"
        ) from error
    return BehaviorSpec(observations, actions)


def _has_our_types(steps: DecisionSteps | TerminalSteps) -> bool:
    """Whether obs and rewards are float32 arrays: asked in each step, so no more is looked at."""
    fields = (*steps.obs, steps.reward, steps.group_reward)
    return all(type(values) is np.ndarray and values.dtype is _FLOAT32 for values in fields)


def our_steps(name: str, spec: BehaviorSpec, steps: tuple[Any, Any]) -> Steps:
    """Steps of whatever class, with fields of our types; a field that has its type is not copied.

    Raises:
        UnityObservationException: A field is not as the specification says.
        NonFiniteError: A reward or an observation is NaN or infinite.
    """
    decision, terminal = steps
    decisions = DecisionSteps(
        **_fields(name, spec, decision),
        action_mask=_masks(name, spec, decision.action_mask, len(decision.agent_id)),
    )
    n = len(terminal.agent_id)
    interrupted = _array(f"behavior {name}: interrupted", terminal.interrupted, np.bool_, (n,))
    return decisions, TerminalSteps(**_fields(name, spec, terminal), interrupted=interrupted)


def _fields(name: str, spec: BehaviorSpec, steps: Any) -> dict[str, Any]:
    """What decisions and terminals have alike."""
    n = len(steps.agent_id)
    if len(steps.obs) != len(spec.observation_specs):
        raise UnityObservationException(
            f"behavior {name}: {len(steps.obs)} observations came, {len(spec.observation_specs)} "
            "are specified; send all of them, in that order"
        )
    fields: dict[str, Any] = {"obs": []}
    for index, (values, one) in enumerate(zip(steps.obs, spec.observation_specs, strict=True)):
        what = f"{name}, observation {index} {one.name!r}"
        fields["obs"].append(_array(f"behavior {what}", values, np.float32, (n, *one.shape)))
        check_finite(fields["obs"][-1], "observations", what)
    for field in ("reward", "group_reward", "agent_id", "group_id"):
        dtype: type[np.generic] = np.int32 if field.endswith("_id") else np.float32
        fields[field] = _array(f"behavior {name}: {field}", getattr(steps, field), dtype, (n,))
    check_finite(fields["reward"], "rewards", name)
    check_finite(fields["group_reward"], "group_rewards", name)
    return fields


def _masks(
    name: str, spec: BehaviorSpec, masks: Sequence[AnyArray] | None, n: int
) -> list[BoolArray] | None:
    branches = spec.action_spec.discrete_branches
    if masks is None or not branches:
        return None
    if len(masks) != len(branches):
        raise UnityObservationException(
            f"behavior {name}: {len(masks)} action masks came for {len(branches)} branches"
        )
    return [
        _array(f"behavior {name}: the action mask of branch {branch}", mask, np.bool_, (n, size))
        for branch, (mask, size) in enumerate(zip(masks, branches, strict=True))
    ]


def _array(what: str, values: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> AnyArray:
    """`values` as an array of `dtype` and `shape`; refused if they do not fit."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UnityObservationException(f"{what} cannot be read as an array ({error})") from error
    if array.shape != shape and not (array.size == 0 and shape[0] == 0):
        raise UnityObservationException(
            f"{what} has shape {array.shape}, not {shape}; send it as its specification says"
        )
    if array.dtype == dtype:
        return array.reshape(shape)
    with np.errstate(over="ignore"):  # becomes infinite, which is refused
        cast = array.astype(dtype).reshape(shape) if array.dtype.kind in "fiub" else None
    if cast is None or (dtype == np.int32 and (cast != array.reshape(shape)).any()):
        raise UnityObservationException(
            f"{what} holds {array.dtype} values that do not fit {np.dtype(dtype)}; send these"
        )
    return cast
