"""Environments without a process: a simulator, or any object with ML-Agents' low-level API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.arrays import AnyArray
from pipeline.envs.base import Stats, StoredStepsEnv
from pipeline.envs.side_channels import StatsSideChannel
from pipeline.errors import (
    SettingsError,
    UnityEnvironmentException,
    UnityObservationException,
    where,
)
from pipeline.protocol import state as codec
from pipeline.protocol.decoding import check_finite
from pipeline.protocol.parameters import Controls, Sampler
from pipeline.protocol.simulator import Simulator, no_state, restore, state_of
from pipeline.protocol.specs import (
    ActionSpec,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    check_spec,
)
from pipeline.protocol.steps import DecisionSteps, Steps, TerminalSteps, no_agents

_FLOAT32 = np.dtype(np.float32)
_MEMBERS = ("behavior_specs", "get_steps", "set_actions", "step", "reset", "close")


class InProcessEnvironment(StoredStepsEnv):
    """A simulator behind the same interface as `UnityEnvironment`, with the same semantics."""

    def __init__(self, simulator: Simulator) -> None:
        """Take ownership of `simulator`; `close` closes it."""
        super().__init__()
        self._simulator = simulator
        self.silence.name = type(simulator).__name__
        self._controls = Controls(simulator)
        self._requested: dict[str, Any] | None = None
        self._stats = StatsSideChannel()

    def reset(self) -> None:
        """Begin a new episode for every agent, and forget the set actions."""
        self._check_loaded()
        self._actions.clear()
        self._is_reset = True
        self.silence.end()
        self._controls.draw()
        self._update(self._simulator.reset)

    def step(self) -> None:
        """Apply the set actions, zeros where none."""
        self._check_loaded()
        if not self._is_reset:
            self.reset()
            return
        self._controls.draw()
        self._update(self._simulator.step, self._take_actions())

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter, from the next reading on; True.

        Numbers are rounded to float32, as they are on their way to an executable.
        """
        if isinstance(value, Sampler):
            # So that in-process runs repeat those with an executable.
            rounded = tuple(float(np.float32(number)) for number in value.values)
            self._controls.set_sampler(name, replace(value, values=rounded))
        else:
            self._controls.set_value(name, float(np.float32(value)))
        return True

    def take_stats(self) -> Stats:
        """Return what the simulator has reported since the last call, by name."""
        for name, value, method in self._controls.take_stats():
            self._stats.add(name, value, method)
        return self._stats.get_and_reset_stats()

    @property
    def state_refusal(self) -> str | None:
        """Why the simulator does not give its state; None if it does. To ask after a reset."""
        try:
            state = state_of(self._simulator)
            if state is None:
                return no_state(self._simulator)
            # Tried now: a state that is too large, or not of plain values, has to be noticed before
            # the first checkpoint.
            codec.message(codec.StateMessageType.STATE, codec.encode(state))
        except ValueError as error:
            return str(error)
        return None

    def request_state(self) -> None:
        """Store everything that the next decisions depend on, as it is now, between two steps."""
        simulator = state_of(self._simulator) if self._is_reset else None
        if simulator is None:
            self._requested = None
            return
        # Fetched now, because the controls do not save statistics that have not been read yet.
        self._stats.stats = self.take_stats()
        contents = {"simulator": simulator, "controls": self._controls.state_dict()}
        # As an array, because checkpoints hold plain values and arrays only.
        data = np.frombuffer(codec.encode(contents), dtype=np.uint8).copy()
        self._requested = {"environment": data, **self._client_state(self._stats.stats)}

    def state_dict(self) -> dict[str, Any] | None:
        """Return what the last `request_state` stored, once.

        None when the simulator cannot be restored, or has not been reset.
        """
        requested, self._requested = self._requested, None
        return requested

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, in place of a reset.

        Raises:
            ValueError: The state is of another simulator.
        """
        self._check_loaded()
        contents = codec.decode(state["environment"].tobytes())
        restore(self._simulator, contents["simulator"])
        self._controls.load_state_dict(contents["controls"])
        self._stats.stats = self._restore(state)

    def close(self) -> None:
        """Close the simulator; UnityEnvironmentException if it is closed already."""
        self._check_loaded()
        self._loaded = False
        self._simulator.close()

    def _update(self, play: Callable[..., Mapping[str, Steps]], *actions: Any) -> None:
        try:
            result = play(*actions)
        except SystemExit as error:  # would end this process without a word
            raise UnityEnvironmentException(f"{self.silence.name}: {where(error)}") from error
        if self.silence.is_on:
            self.silence.end_wait()
        specs = self._simulator.behavior_specs
        for name, (decision, terminal) in result.items():
            # A behavior is known from its first agent on, as over the wire.
            if name not in self._specs and (len(decision) or len(terminal)):
                check_spec(name, specs[name])
                self._specs[name] = specs[name]
        # Also those without agents now, or the agents of the step before would be seen again.
        for name, spec in self._specs.items():
            self._steps[name] = result[name] if name in result else no_agents(spec)


def refuse_other_object(env: object) -> None:
    """Raise SettingsError unless an object has the members of ML-Agents' `BaseEnv`."""
    # the class first: its properties need not work before the first reset
    lacking = [name for name in _MEMBERS if not (hasattr(type(env), name) or hasattr(env, name))]
    if lacking:
        raise SettingsError(
            f"an object of type {type(env).__name__} cannot be trained in, because it lacks "
            f"{', '.join(lacking)}; give an executable, an environment of Gymnasium or PettingZoo, "
            "or an object with ML-Agents' low-level API"
        )


def our_spec(name: str, spec: Any) -> BehaviorSpec:
    """Return a specification in our classes, from any class with ML-Agents' fields.

    Raises:
        UnityObservationException: It cannot be read.
        UnitySpecificationException: A size is impossible, or too large.
    """
    if isinstance(spec, BehaviorSpec):
        return spec
    try:
        observations = [
            ObservationSpec(
                shape=tuple(int(size) for size in obs.shape),
                dimension_property=tuple(DimensionProperty(p) for p in obs.dimension_property),
                observation_type=ObservationType(
                    getattr(obs.observation_type, "value", obs.observation_type)
                ),
                name=str(obs.name),
            )
            for obs in spec.observation_specs
        ]
        branches = tuple(int(size) for size in spec.action_spec.discrete_branches)
        actions = ActionSpec(int(spec.action_spec.continuous_size), branches)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnityObservationException(
            f"behavior {name}: its specification cannot be read ({error}); give one of ML-Agents' "
            "BehaviorSpec"
        ) from error
    result = BehaviorSpec(observations, actions)
    check_spec(name, result)
    return result


def our_steps(name: str, spec: BehaviorSpec, steps: tuple[Any, Any]) -> Steps:
    """Return steps in our classes, from any class with ML-Agents' fields, which may be lists.

    Raises:
        UnityObservationException: A field is not as the specification says.
        NonFiniteError: A converted reward or observation is NaN or infinite.
    """
    decision, terminal = steps
    if _is_ours(decision, DecisionSteps) and _is_ours(terminal, TerminalSteps):
        return steps
    branches = spec.action_spec.discrete_branches
    masks = decision.action_mask if branches else None
    if masks is not None:
        _check_number(name, "action masks", masks, branches)
        n = len(decision.agent_id)
        masks = [
            _array(name, f"action mask {branch}", mask, np.bool_, (n, size))
            for branch, (mask, size) in enumerate(zip(masks, branches, strict=True))
        ]
    interrupted = _array(
        name, "interrupted", terminal.interrupted, np.bool_, (len(terminal.agent_id),)
    )
    return (
        DecisionSteps(**_fields(name, spec, decision), action_mask=masks),
        TerminalSteps(**_fields(name, spec, terminal), interrupted=interrupted),
    )


def _is_ours(steps: Any, kind: type[Any]) -> bool:
    """Return whether steps are of our class, with float32; asked in each step."""
    if type(steps) is not kind:
        return False
    fields = (*steps.obs, steps.reward, steps.group_reward)
    # `is` costs least. An equal dtype that is another object only takes the slow way.
    return all(type(values) is np.ndarray and values.dtype is _FLOAT32 for values in fields)


def _fields(name: str, spec: BehaviorSpec, steps: Any) -> dict[str, Any]:
    """Return what decision and terminal steps have in common."""
    n = len(steps.agent_id)
    _check_number(name, "observations", steps.obs, spec.observation_specs)
    obs = [
        _array(
            name, f"observation {index} {obs_spec.name!r}", values, np.float32, (n, *obs_spec.shape)
        )
        for index, (values, obs_spec) in enumerate(
            zip(steps.obs, spec.observation_specs, strict=True)
        )
    ]
    return {
        "obs": obs,
        "reward": _array(name, "reward", steps.reward, np.float32, (n,)),
        "agent_id": _array(name, "agent_id", steps.agent_id, np.int32, (n,)),
        "group_id": _array(name, "group_id", steps.group_id, np.int32, (n,)),
        "group_reward": _array(name, "group_reward", steps.group_reward, np.float32, (n,)),
    }


def _check_number(name: str, label: str, got: Any, specified: Any) -> None:
    if len(got) != len(specified):
        raise UnityObservationException(
            f"behavior {name}: {len(got)} {label} came, {len(specified)} are specified; send all "
            "of them, in that order"
        )


def _array(
    name: str, label: str, values: Any, dtype: type[np.generic], shape: tuple[int, ...]
) -> AnyArray:
    """Return `values` as an array of `dtype` and `shape`; raise if they do not fit."""
    try:
        with np.errstate(over="ignore"):  # becomes infinite, which is refused below
            array = np.asarray(values, dtype=dtype)
        # The conversion cuts fractions and wraps large numbers silently.
        fits = dtype is not np.int32 or np.array_equal(array, values)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnityObservationException(
            f"behavior {name}: {label} cannot be read as {dtype.__name__} ({error})"
        ) from error
    if not fits:
        raise UnityObservationException(f"behavior {name}: {label} has values that are not int32")
    # Without agents, lists give any empty shape.
    if array.shape != shape and (array.size or shape[0]):
        raise UnityObservationException(
            f"behavior {name}: {label} has shape {array.shape}, not {shape}; send it as its "
            "specification says"
        )
    if dtype is np.float32:
        check_finite(array, label, name)
    return array.reshape(shape)
