"""Environments in the trainer's process: simulators, and objects with ML-Agents' low-level API."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray
from pipeline.core.simulator import Simulator, no_state, restore, state_of
from pipeline.core.specs import (
    ActionSpec,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    check_spec,
)
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps, no_agents
from pipeline.envs.base import StoredStepsEnv
from pipeline.envs.side_channels import Stats, StatsSideChannel
from pipeline.errors import (
    PipelineError,
    SettingsError,
    UnityEnvironmentException,
    UnityObservationException,
    where,
)
from pipeline.simulators import registry
from pipeline.wire.channels import state as codec
from pipeline.wire.channels.parameters import Controls, Sampler
from pipeline.wire.codec.decoding import check_finite

_FLOAT32 = np.dtype(np.float32)
_MEMBERS = ("behavior_specs", "get_steps", "set_actions", "step", "reset", "close")


@dataclass(frozen=True, slots=True)
class SimulatorSource:
    """The name and options of a simulator that is stepped in the trainer's process."""

    name: str
    options: Mapping[str, Any]
    is_spread: bool = False
    """Whether copies of a Gymnasium environment may be stepped by several processes."""

    def start(self, seed: int) -> "InProcessEnvironment":
        """Return a new environment; each error of its simulator is a UnityEnvironmentException."""
        if self.is_spread and self.name == "gymnasium":
            from pipeline.simulators.bridges.gymnasium_processes import GymnasiumInProcesses, shares

            options = dict(self.options)
            parts = shares(options["id"], options.get("kwargs") or {}, options.pop("n_agents"))
            if len(parts) > 1:
                simulator: Simulator = GymnasiumInProcesses(parts, seed=seed, **options)
                return InProcessEnvironment(simulator, is_restartable=True)
        simulator = registry.make(self.name, seed=seed, **self.options)
        return InProcessEnvironment(simulator, is_restartable=True)


class InProcessEnvironment(StoredStepsEnv):
    """A simulator with the interface and the semantics of `UnityEnvironment`."""

    def __init__(self, simulator: Simulator, *, is_restartable: bool = False) -> None:
        """Take ownership of `simulator`; `is_restartable`: see `SimulatorSource.start`."""
        super().__init__()
        self._simulator = simulator
        self._restartable = (SystemExit, *([Exception] if is_restartable else []))
        self.n_copies: int | None = getattr(simulator, "n_copies", None)
        """Number of copies of the environment, or of areas; None if the simulator does not tell."""
        self.n_other_processes: int = getattr(simulator, "n_other_processes", 0)
        """Number of processes that work for the simulator, besides this process."""
        self.silence.name = type(simulator).__name__
        self._controls = Controls(simulator)
        self._requested: dict[str, Any] | None = None
        self._stats = StatsSideChannel()

    def reset(self) -> None:
        """Begin a new episode for every agent, and drop actions that were set but not applied."""
        self._check_loaded()
        self._actions.clear()
        self._is_reset = True
        self.silence.end()
        self._controls.draw()
        self._update(self._simulator.reset)

    def step(self) -> None:
        """Apply the set actions, or zeros for agents without an action."""
        self._check_loaded()
        if not self._is_reset:
            self.reset()
            return
        # Samplers draw before each step, as in an executable, so that runs with and without an
        # executable get equal numbers.
        self._controls.draw()
        self._update(self._simulator.step, self._take_actions())

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter for all later readings; always returns True.

        Numbers are rounded to float32, the type in messages to an executable.
        """
        if isinstance(value, Sampler):
            # The values are rounded, so that a run in this process repeats a run with an
            # executable.
            rounded = tuple(float(np.float32(number)) for number in value.values)
            self._controls.set_sampler(name, replace(value, values=rounded))
        else:
            self._controls.set_value(name, float(np.float32(value)))
        return True

    def take_stats(self) -> Stats:
        """Return the values of each of the simulator's statistics since the last call, by name."""
        for name, value, method in self._controls.take_stats():
            self._stats.add(name, value, method)
        return self._stats.get_and_reset_stats()

    @property
    def state_refusal(self) -> str | None:
        """Reason why `state_dict` returns no state; None if it returns one. Valid after a reset."""
        try:
            state = state_of(self._simulator)
            if state is None:
                return no_state(self._simulator)
            # The state is encoded now, so that a state that is too large, or has values of
            # unsupported types, is noticed before the first checkpoint.
            codec.message(codec.StateMessageType.STATE, codec.encode(state))
        except ValueError as error:
            return str(error)
        return None

    def request_state(self) -> None:
        """Store the present state, which `state_dict` returns; to be called between two steps."""
        self._requested = None
        simulator = state_of(self._simulator) if self._is_reset else None
        if simulator is None:
            return
        # The statistics are taken now, because the controls do not save them.
        self._stats.stats = self.take_stats()
        contents = {"simulator": simulator, "controls": self._controls.state_dict()}
        # An executable needs `asking` if it resumes the run.
        contents["asking"] = {name: len(steps[0]) for name, steps in self._steps.items()}
        # The bytes become an array, because checkpoints can have plain values and arrays only.
        data = np.frombuffer(codec.encode(contents), dtype=np.uint8).copy()
        self._requested = {"environment": data, **self._client_state(self._stats.stats)}

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that the last `request_state` stored; None if there is none."""
        requested, self._requested = self._requested, None
        return requested

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, instead of a reset.

        Raises:
            ValueError: The simulator cannot be restored, or the state is damaged.
            UnityObservationException: The simulator has another specification than the state.
        """
        self._check_loaded()
        contents = codec.decode(state["environment"].tobytes())
        restore(self._simulator, contents["simulator"])
        self._controls.load_state_dict(contents["controls"])
        self._stats.stats = self._restore(state)

    def close(self) -> None:
        """Close the simulator; raise UnityEnvironmentException if it is closed already."""
        self._check_loaded()
        # The flag is set first, so that a second call is refused even if this call raises.
        self._loaded = False
        self._simulator.close()

    def _update(self, play: Callable[..., Mapping[str, Steps]], *actions: Any) -> None:
        try:
            result = play(*actions)
        except PipelineError:
            raise
        except self._restartable as error:  # SystemExit would end this process silently
            raise UnityEnvironmentException(f"{self.silence.name}: {where(error)}") from error
        if self.silence.is_on:
            self.silence.end_wait()
        specs = self._simulator.behavior_specs
        for name, (decision, terminal) in result.items():
            # As with an executable, a behavior is known only when its first agent has appeared.
            if name not in self._specs and (len(decision) or len(terminal)):
                check_spec(name, specs[name])
                self._specs[name] = specs[name]
        # Behaviors without agents in this step must not keep the agents of the previous step.
        for name, spec in self._specs.items():
            self._steps[name] = result[name] if name in result else no_agents(spec)


def refuse_other_object(env: object) -> None:
    """Raise SettingsError unless an object has the members of ML-Agents' `BaseEnv`."""
    # Members are looked up in the class, because properties may raise before the first reset.
    lacking = [name for name in _MEMBERS if not (hasattr(type(env), name) or hasattr(env, name))]
    if lacking:
        raise SettingsError(
            f"an object of type {type(env).__name__} is not an environment, because it lacks "
            f"{', '.join(lacking)}; give an executable, an environment of Gymnasium or PettingZoo, "
            "or an object with ML-Agents' low-level API"
        )


def our_spec(name: str, spec: Any) -> BehaviorSpec:
    """Return this package's `BehaviorSpec` for any object with the fields of ML-Agents' class."""
    if isinstance(spec, BehaviorSpec):
        return spec
    try:
        observations = [
            ObservationSpec(
                shape=tuple(map(int, obs.shape)),
                dimension_property=tuple(DimensionProperty(p) for p in obs.dimension_property),
                # ML-Agents' enum is another class, so its value is taken.
                observation_type=ObservationType(
                    getattr(obs.observation_type, "value", obs.observation_type)
                ),
                name=str(obs.name),
            )
            for obs in spec.observation_specs
        ]
        branches = tuple(map(int, spec.action_spec.discrete_branches))
        actions = ActionSpec(int(spec.action_spec.continuous_size), branches)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnityObservationException(
            f"behavior {name}: its specification cannot be read ({error}); give ML-Agents' "
            "BehaviorSpec"
        ) from error
    result = BehaviorSpec(observations, actions)
    check_spec(name, result)
    return result


def our_steps(name: str, spec: BehaviorSpec, steps: tuple[Any, Any]) -> Steps:
    """Return this package's steps for any objects with ML-Agents' fields, which may be lists.

    Raises:
        UnityObservationException: A field does not fit the specification, or a converted reward or
            observation is NaN or infinite.
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
    ended = (len(terminal.agent_id),)
    interrupted = _array(name, "interrupted", terminal.interrupted, np.bool_, ended)
    return (
        DecisionSteps(**_fields(name, spec, decision), action_mask=masks),
        TerminalSteps(**_fields(name, spec, terminal), interrupted=interrupted),
    )


def _is_ours(steps: Any, kind: type[Any]) -> bool:
    """Return whether steps need no conversion: they are of class `kind`, with float32 arrays."""
    if type(steps) is not kind:
        return False
    fields = (*steps.obs, steps.reward, steps.group_reward)
    # `is` is the fastest comparison. If the dtype is equal but another object, the arrays are
    # converted, which takes longer but gives the same values.
    return all(type(values) is np.ndarray and values.dtype is _FLOAT32 for values in fields)


def _fields(name: str, spec: BehaviorSpec, steps: Any) -> dict[str, Any]:
    n = len(steps.agent_id)
    _check_number(name, "observations", steps.obs, spec.observation_specs)
    fields: dict[str, Any] = {"obs": []}
    for index, (values, obs) in enumerate(zip(steps.obs, spec.observation_specs, strict=True)):
        label = f"observation {index} {obs.name!r}"
        fields["obs"].append(_array(name, label, values, np.float32, (n, *obs.shape)))
    for field in ("reward", "agent_id", "group_id", "group_reward"):
        dtype = np.int32 if field.endswith("_id") else np.float32
        fields[field] = _array(name, field, getattr(steps, field), dtype, (n,))
    return fields


def _check_number(name: str, label: str, got: Any, specified: Any) -> None:
    if len(got) != len(specified):
        raise UnityObservationException(
            f"behavior {name}: {len(got)} {label} were sent, but {len(specified)} are specified; "
            "send all of them, in the specified order"
        )


def _array(
    name: str, label: str, values: Any, dtype: type[np.generic], shape: tuple[int, ...]
) -> AnyArray:
    try:
        with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused below
            array = np.asarray(values, dtype=dtype)
        # NumPy's conversion to int32 drops fractions and wraps large numbers silently.
        fits = dtype is not np.int32 or np.array_equal(array, values)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnityObservationException(
            f"behavior {name}: {label} cannot be read as {dtype.__name__} ({error})"
        ) from error
    mistake = "" if fits else "has values that are not int32; send int32"
    # Without agents, an empty list becomes an empty array of another shape, which is allowed.
    if fits and array.shape != shape and (array.size or shape[0]):
        mistake = f"has shape {array.shape}, not {shape}; send the shape of the specification"
    if mistake:
        raise UnityObservationException(f"behavior {name}: {label} {mistake}")
    if dtype is np.float32:
        check_finite(array, label, name)
    return array.reshape(shape)
