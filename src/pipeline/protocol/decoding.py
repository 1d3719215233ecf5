"""Messages to batch arrays: what both ends of the conversation receive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import UnityActionException, UnityEnvironmentException
from pipeline.errors import UnityObservationException as _ObservationError
from pipeline.protocol import wire
from pipeline.protocol.encoding import action_layout
from pipeline.protocol.generated.messages import GOAL_SIGNAL, PNG, continuous
from pipeline.protocol.png import decode_png, png_size
from pipeline.protocol.specs import (
    MOST_DIMENSIONS,
    MOST_PARTS,
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    brief,
    check_spec,
    note_other_names,
    other_order,
)
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.arrays import BoolArray, FloatArray, IntArray
    from pipeline.protocol.generated.messages import (
        ActionSpecProto,
        AgentActionProto,
        AgentInfoProto,
        BrainParametersProto,
        ObservationProto,
        UnityRLInputProto,
    )
    from pipeline.protocol.steps import Steps

_SPATIAL = DimensionProperty.TRANSLATIONAL_EQUIVARIANCE


class NonFiniteError(_ObservationError, RuntimeError):
    """An environment sent a value that is not a number, or an infinite one."""


def decode_steps(infos: Sequence[AgentInfoProto], spec: BehaviorSpec, name: str = "") -> Steps:
    """The agents of one behavior as arrays, in wire order.

    Args:
        infos: what one message holds for the behavior.
        spec: the behavior's specification; rank-3 observations are channels first in it, whatever
            the order on the wire.
        name: the behavior's name, for errors.

    Raises:
        UnityObservationException: An observation has another shape or encoding than it declares.
        NonFiniteError: A reward or a non-visual observation is NaN or infinite.
    """
    if not len(infos):
        return DecisionSteps.empty(spec), TerminalSteps.empty(spec)
    infos = list(infos)  # a container of messages makes a new object at every access
    agents = decode_infos(infos, spec, name)
    if not agents.done.any():
        return parted(agents, spec, decode_masks(infos, spec.action_spec))
    going = [info for info in infos if not info.done]
    return parted(agents, spec, decode_masks(going, spec.action_spec))


def parted(agents: AgentInfos, spec: BehaviorSpec, masks: list[BoolArray] | None) -> Steps:
    """Those who go on, whose masks are given, and those whose episode has ended."""
    ended = agents.done
    if not ended.any():
        decision = DecisionSteps(
            agents.obs,
            agents.reward,
            agents.agent_id,
            masks,
            agents.group_id,
            agents.group_reward,
        )
        return decision, TerminalSteps.empty(spec)
    going = ~ended
    return (
        DecisionSteps(
            [values[going] for values in agents.obs],
            agents.reward[going],
            agents.agent_id[going],
            masks,
            agents.group_id[going],
            agents.group_reward[going],
        ),
        TerminalSteps(
            [values[ended] for values in agents.obs],
            agents.reward[ended],
            agents.max_step_reached[ended],
            agents.agent_id[ended],
            agents.group_id[ended],
            agents.group_reward[ended],
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentInfos:
    """The fields of N agent infos: `obs` a list of float32 [N, *shape], the others [N]."""

    obs: list[FloatArray]
    reward: FloatArray
    done: BoolArray
    max_step_reached: BoolArray
    agent_id: IntArray
    group_id: IntArray
    group_reward: FloatArray


def decode_infos(infos: Sequence[AgentInfoProto], spec: BehaviorSpec, name: str = "") -> AgentInfos:
    """All fields but the masks, ended agents and others together; see `decode_steps`."""
    rewards = np.array(
        [[info.reward for info in infos], [info.group_reward for info in infos]], dtype=np.float32
    )
    if not np.isfinite(rewards).all():
        check_finite(rewards[0], "rewards", name)
        check_finite(rewards[1], "group_rewards", name)
    ids = np.array([[info.id for info in infos], [info.group_id for info in infos]], dtype=np.int32)
    return AgentInfos(
        obs=_decode_observations(infos, spec, name),
        reward=rewards[0],
        done=np.array([info.done for info in infos], dtype=np.bool_),
        max_step_reached=np.array([info.max_step_reached for info in infos], dtype=np.bool_),
        agent_id=ids[0],
        group_id=ids[1],
        group_reward=rewards[1],
    )


def check_observation(values: FloatArray, spec: ObservationSpec, index: int, name: str) -> None:
    """Raise if any number [N, *shape] of an observation that is no image is not finite."""
    check_finite(values, "observations", f"{name}, observation {index} {spec.name!r}")


def check_finite(values: FloatArray, what: str, name: str) -> None:
    """Raise if any value is not finite."""
    if np.isfinite(values).all():
        return
    kind = "NaN" if np.isnan(values).any() else "Infinite"
    where = f" (behavior {name})" if name else ""
    raise NonFiniteError(f"The {what} provided had {kind} values.{where}")


def _decode_observations(
    infos: Sequence[AgentInfoProto], spec: BehaviorSpec, name: str
) -> list[FloatArray]:
    """float32 [N, *shape] of each observation."""
    rows = [info.observations for info in infos]
    count = len(spec.observation_specs)
    if set(map(len, rows)) != {count}:
        info = next(info for info in infos if len(info.observations) != count)
        raise _ObservationError(
            f"Agent with id={info.id} of behavior {name!r} sent {len(info.observations)} "
            f"observations; the behavior has {count}."
        )
    out, as_announced = [], True
    for index, obs_spec in enumerate(spec.observation_specs):
        column = [row[index] for row in rows]
        decoded = _decode_floats(column, obs_spec)
        if decoded is None:
            values = _decode_slowly(column, index, infos, obs_spec)
            as_announced &= all(message.name == obs_spec.name for message in column)
        else:
            values, named = decoded
            as_announced &= named
        if len(obs_spec.shape) != 3:  # images are not checked, as in ML-Agents
            check_observation(values, obs_spec, index, name)
        out.append(values)
    if not as_announced:
        _check_order(infos, spec, name)
    return out


def _check_order(infos: Sequence[AgentInfoProto], spec: BehaviorSpec, name: str) -> None:
    """Raise if an agent sends the observations of `spec` in another order, going by their names."""
    names = [obs.name for obs in spec.observation_specs]
    for info in infos:
        sent = [message.name for message in info.observations]
        if other_order(names, sent):
            raise _ObservationError(
                f"Agent with id={info.id} of behavior {name!r} sent its observations in the order "
                f"{sent}; the behavior has the order {names}, which must be that of all its agents."
            )
        if sent != names:
            note_other_names(name, str(names), str(sent))


def _decode_floats(
    column: Sequence[ObservationProto], spec: ObservationSpec
) -> tuple[FloatArray, bool] | None:
    """float32 [N, *shape] if all are uncompressed and of the right size, else None.

    With it comes whether all have the name of `spec`; an empty one in `spec` stands for any.
    """
    last = len(spec.shape) == 3 and channels_last(column[0])
    shape = wire_shape(spec.shape) if last else spec.shape
    chunks = [message.SerializeToString() for message in column]
    n, width = len(chunks), len(chunks[0])
    header = wire.observation_header(shape)
    joined = b"".join(chunks)
    start = len(header)
    if len(joined) != n * width or width < start + 4 * math.prod(shape):
        return None
    table = np.frombuffer(joined, dtype=np.uint8).reshape(n, width)
    if not (table[:, :start] == np.frombuffer(header, dtype=np.uint8)).all():
        return None
    values = wire.float_rows(table, start, shape)
    end = np.frombuffer(wire.observation_name(spec.name), dtype=np.uint8)
    named = len(end) <= width and bool((table[:, width - len(end) :] == end).all())
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if last else values, named


def _decode_slowly(
    column: Sequence[ObservationProto],
    index: int,
    infos: Sequence[AgentInfoProto],
    spec: ObservationSpec,
) -> FloatArray:
    """float32 [N, *shape], one agent at a time: images, and what does not fit."""
    out = np.empty((len(column), *spec.shape), dtype=np.float32)
    for row, message in enumerate(column):
        try:
            out[row] = decode_observation(message, spec)
        except _ObservationError as error:
            raise _ObservationError(
                f"Observation at index={index} for agent with id={infos[row].id} didn't match the "
                f"ObservationSpec: {error}"
            ) from error
    return out


def decode_observation(message: ObservationProto, spec: ObservationSpec) -> FloatArray:
    """One agent's observation, float32 of `spec.shape`.

    Raises:
        UnityObservationException: Its shape or its number of values is not what `spec` says.
    """
    shape = tuple(message.shape[: MOST_DIMENSIONS + 1])
    last = len(shape) == 3 and channels_last(message)
    if last:
        shape = (shape[2], shape[0], shape[1])
    if shape != tuple(spec.shape):
        raise _ObservationError(f"expected the shape {tuple(spec.shape)} but got {shape}.")
    if message.compression_type == PNG and len(shape) == 3:
        return decode_png(
            message.compressed_data,
            (shape[0], shape[1], shape[2]),
            list(message.compressed_channel_mapping),
        )
    values = np.array(message.float_data.data, dtype=np.float32)
    if values.size != math.prod(shape):
        raise _ObservationError(f"the shape {shape} does not fit the {values.size} values sent.")
    if last:
        return values.reshape(shape[1], shape[2], shape[0]).transpose(2, 0, 1)
    return values.reshape(shape)


def channels_last(message: ObservationProto) -> bool:
    """Whether a rank-3 observation is [H, W, C], as packages before 3.0 send it.

    Its dimension properties tell. Messages from before API 1.5, and of some Python environments,
    have none: then a PNG's own size tells, and numbers are as their shape says, as in ML-Agents.
    """
    properties = message.dimension_properties
    if not properties:
        size = png_size(message.compressed_data) if message.compression_type == PNG else None
        return size == tuple(message.shape[:2]) != tuple(message.shape[1:3])
    return bool(properties[0] & _SPATIAL) and not (len(properties) > 2 and properties[2] & _SPATIAL)


def wire_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[H, W, C] of [C, H, W]."""
    return (shape[1], shape[2], shape[0])


def decode_masks(infos: Sequence[AgentInfoProto], spec: ActionSpec) -> list[BoolArray] | None:
    """Per branch bool [N, size], True = forbidden; None without branches or agents."""
    if not spec.discrete_branches or not infos:
        return None
    total = sum(spec.discrete_branches)
    raw = [bytes(info.action_mask) for info in infos]
    absent = bytes(total)
    joined = b"".join([row if len(row) == total else absent for row in raw])
    return branches(np.frombuffer(joined, dtype=np.bool_).reshape(len(raw), total), spec)


def branches(flat: BoolArray, spec: ActionSpec) -> list[BoolArray]:
    """Per branch bool [N, size] of the masks [N, M] of all."""
    ends = np.cumsum(spec.discrete_branches)[:-1]
    return [branch.copy() for branch in np.split(flat, ends, axis=1)]


def behavior_spec_from(brain: BrainParametersProto, first: AgentInfoProto) -> BehaviorSpec:
    """What a behavior observes and does, from its announcement and its first agent.

    Rank-3 observations come out channels first.

    Raises:
        UnityException: Its sizes contradict each other, are impossible or too large.
    """
    few = first.observations[: MOST_PARTS + 1]
    spec = BehaviorSpec([observation_spec_from(message) for message in few], _action_spec(brain))
    check_spec(brain.brain_name, spec)
    return spec


def observation_spec_from(message: ObservationProto) -> ObservationSpec:
    """Shape and meaning of one observation, channels first."""
    shape = tuple(message.shape[: MOST_DIMENSIONS + 1])
    declared = tuple(DimensionProperty(p) for p in message.dimension_properties[: len(shape)])
    properties = declared or (DimensionProperty.UNSPECIFIED,) * len(shape)
    if len(shape) == 3 and channels_last(message):
        shape = (shape[2], shape[0], shape[1])
        properties = (DimensionProperty.NONE, _SPATIAL, _SPATIAL)
    goal = message.observation_type == GOAL_SIGNAL
    kind = ObservationType.GOAL_SIGNAL if goal else ObservationType.DEFAULT
    return ObservationSpec(shape, properties, kind, message.name)


def _action_spec(brain: BrainParametersProto) -> ActionSpec:
    declared: ActionSpecProto = brain.action_spec
    if declared.num_continuous_actions or declared.num_discrete_actions:
        n, branches = declared.num_discrete_actions, tuple(declared.discrete_branch_sizes)
        if len(branches) != n:
            raise UnityEnvironmentException(
                f"behavior {brain.brain_name} declares {n} discrete actions but gives the sizes of "
                f"{len(branches)} branches: {brief(branches)}"
            )
        return ActionSpec(declared.num_continuous_actions, branches)
    sizes = tuple(brain.vector_action_size_deprecated)
    if brain.vector_action_space_type_deprecated == continuous:
        return ActionSpec(sizes[0] if sizes else 0, ())
    return ActionSpec(0, sizes)


def decode_actions(
    actions: UnityRLInputProto.ListAgentActionProto,
    spec: ActionSpec,
    *,
    absent_is_zero: bool = False,
) -> ActionTuple:
    """Actions of all agents, in wire order; `absent_is_zero` accepts entries without any.

    Raises:
        UnityActionException: An agent's actions do not have the numbers that `spec` says.
    """
    n = len(actions.value)
    layout = action_layout(spec.continuous_size, spec.discrete_size, 1)
    data = actions.SerializeToString()
    if n == 0 or len(data) != n * len(layout.template):
        return _decode_actions_slowly(actions.value, spec, absent_is_zero)
    table = np.frombuffer(data, dtype=np.uint8).reshape(n, len(layout.template))
    if (table & layout.fixed != layout.template).any():
        return _decode_actions_slowly(actions.value, spec, absent_is_zero)
    return ActionTuple(
        wire.float_rows(table, layout.continuous, (spec.continuous_size,)),
        table[:, layout.discrete : layout.discrete + spec.discrete_size].astype(np.int32),
    )


def _decode_actions_slowly(
    entries: Sequence[AgentActionProto], spec: ActionSpec, absent_is_zero: bool
) -> ActionTuple:
    out = spec.empty_action(len(entries))
    for row, entry in enumerate(entries):
        floats: Sequence[float] = entry.continuous_actions
        choices: Sequence[float] = entry.discrete_actions
        if not len(floats) and not len(choices):
            old = entry.vector_actions_deprecated
            if absent_is_zero and not len(old):
                continue
            floats, choices = (old, []) if spec.continuous_size else ([], old)
        if (len(floats), len(choices)) != (spec.continuous_size, spec.discrete_size):
            raise UnityActionException(
                f"agent number {row} got {len(floats)} continuous and {len(choices)} discrete "
                f"actions; the behavior takes {spec.continuous_size} and {spec.discrete_size}"
            )
        out.continuous[row] = floats
        if not (np.abs(choices) < 2**31).all():  # old messages hold them as floats: NaN, 1e30
            raise UnityActionException(
                f"agent number {row} got the discrete actions {list(choices)}; each must be a "
                "choice of its branch"
            )
        out.discrete[row] = choices
    return out
