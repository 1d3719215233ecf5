"""The complete decoder: reads any message into arrays, agent by agent, and refuses bad messages.

`layout_cache` is faster for messages of many agents and for messages with a known layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from pipeline.core import specs
from pipeline.core.arrays import BoolArray, FloatArray, IntArray
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps, no_agents
from pipeline.errors import UnityEnvironmentException, brief
from pipeline.errors import UnityObservationException as _ObservationError
from pipeline.wire.codec import records
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.png import decode_png, png_size

# The sensor's name is cached if at most this many bytes follow the numbers of an observation.
_MAX_TAIL_BYTES = 4096
_SPATIAL = specs.DimensionProperty.TRANSLATIONAL_EQUIVARIANCE


# The error is also a RuntimeError, because ML-Agents raises one, which users' scripts may catch.
class NonFiniteError(_ObservationError, RuntimeError):
    """An environment sent a NaN or an infinite value."""


def decode_steps(
    infos: Sequence[m.ReceivedAgentInfoProto], spec: BehaviorSpec, name: str = ""
) -> Steps:
    """Return the agents of one behavior as arrays, in the order of the message.

    Rank-3 observations are channels first in `spec`, whatever their order in the message. `name` is
    the name of the behavior, for errors.

    Raises:
        UnityObservationException: An observation's shape is not the shape in `spec`, or its
            encoding is damaged.
        NonFiniteError: A reward or a non-visual observation is NaN or infinite.
    """
    if not len(infos):
        return no_agents(spec)
    infos = list(infos)  # protobuf's containers create a new object at every access
    agents = decode_infos(infos, spec, name)
    return split_ended(agents, spec, decode_masks(infos, spec.action_spec))


def split_ended(agents: AgentInfos, spec: BehaviorSpec, masks: list[BoolArray] | None) -> Steps:
    """Return decision steps, with `masks`, and terminal steps of the agents that have ended."""
    ended = agents.done
    # In nearly all messages no episode has ended, and the arrays are passed on without a copy.
    if not ended.any():
        decision = DecisionSteps(**agents.fields(slice(None)), action_mask=masks)
        return decision, TerminalSteps.empty(spec)
    masks = None if masks is None or ended.all() else [mask[~ended] for mask in masks]
    return (
        DecisionSteps(**agents.fields(~ended), action_mask=masks),
        TerminalSteps(**agents.fields(ended), interrupted=agents.max_step_reached[ended]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentInfos:
    """Data of N agents: each array in `obs` is float32 [N, *shape], all other fields are [N].

    Images are channels first, in 0..1 if they were PNGs. Agents without a group have `group_id` 0.
    """

    obs: list[FloatArray]
    reward: FloatArray
    done: BoolArray
    max_step_reached: BoolArray
    agent_id: IntArray
    group_id: IntArray
    group_reward: FloatArray

    def fields(self, rows: BoolArray | slice) -> dict[str, Any]:
        """Return the fields that both kinds of steps have, by name, for the agents in `rows`."""
        return {
            "obs": [values[rows] for values in self.obs],
            "reward": self.reward[rows],
            "agent_id": self.agent_id[rows],
            "group_id": self.group_id[rows],
            "group_reward": self.group_reward[rows],
        }


def decode_infos(
    infos: Sequence[m.ReceivedAgentInfoProto], spec: BehaviorSpec, name: str = ""
) -> AgentInfos:
    """Return the data of all agents except masks; errors are those of `decode_steps`."""
    rewards = np.array(
        [[info.reward for info in infos], [info.group_reward for info in infos]], dtype=np.float32
    )
    # Ids are int32, as in the messages; ids of groups and agents may be negative.
    ids = np.array([[info.id for info in infos], [info.group_id for info in infos]], dtype=np.int32)
    agents = AgentInfos(
        obs=_decode_observations(infos, spec, name),
        reward=rewards[0],
        done=np.array([info.done for info in infos], dtype=np.bool_),
        max_step_reached=np.array([info.max_step_reached for info in infos], dtype=np.bool_),
        agent_id=ids[0],
        group_id=ids[1],
        group_reward=rewards[1],
    )
    check_numbers(agents, spec, name)
    return agents


def check_numbers(agents: AgentInfos, spec: BehaviorSpec, name: str) -> None:
    """Raise NonFiniteError for NaN or infinity, except in images, as in ML-Agents."""
    check_finite(agents.reward, "rewards", name)
    check_finite(agents.group_reward, "group_rewards", name)
    for index, (values, obs) in enumerate(zip(agents.obs, spec.observation_specs, strict=True)):
        if len(obs.shape) != 3:
            check_finite(values, "observations", f"{name}, observation {index} {obs.name!r}")


def check_finite(values: FloatArray, what: str, name: str) -> None:
    """Raise NonFiniteError if any value is NaN or infinite; the error names `what` and `name`."""
    if np.isfinite(values).all():
        return
    kind = "NaN" if np.isnan(values).any() else "Infinite"
    source = f" (behavior {name})" if name else ""
    raise NonFiniteError(f"The {what} provided had {kind} values.{source}")


def _decode_observations(
    infos: Sequence[m.ReceivedAgentInfoProto], spec: BehaviorSpec, name: str
) -> list[FloatArray]:
    rows = [info.observations for info in infos]
    count = len(spec.observation_specs)
    # The counts are compared first, because `row[index]` below raises an IndexError if an
    # observation is missing.
    if set(map(len, rows)) != {count}:
        info = next(info for info in infos if len(info.observations) != count)
        raise _ObservationError(
            f"Agent with id={info.id} of behavior {name!r} sent {len(info.observations)} "
            f"observations; the behavior has {count}."
        )
    out, as_announced = [], True
    for index, obs_spec in enumerate(spec.observation_specs):
        column = [row[index] for row in rows]
        values, named = _decode_floats(column, obs_spec) or _decode_slowly(
            column, index, infos, obs_spec
        )
        as_announced &= named
        out.append(values)
    if not as_announced:
        _check_order(infos, spec, name)
    return out


def _check_order(infos: Sequence[m.ReceivedAgentInfoProto], spec: BehaviorSpec, name: str) -> None:
    """Raise an error if an agent's observations are named as in `spec`, but in another order."""
    names = [obs.name for obs in spec.observation_specs]
    for info in infos:
        sent = [records.parse(m.ObservationProto, data).name for data in info.observations]
        # Without this check, a network would learn from swapped sensors if their shapes are equal.
        if specs.other_order(names, sent):
            raise _ObservationError(
                f"Agent with id={info.id} of behavior {name!r} sent its observations in the order "
                f"{sent}; the behavior has the order {names}, and all its agents must send it."
            )
        if sent != names:
            specs.note_other_names(name, str(names), str(sent))


def _decode_floats(
    column: Sequence[bytes], spec: ObservationSpec
) -> tuple[FloatArray, bool] | None:
    """Return an observation, float32 [N, *shape], and whether its name is that of `spec`, if any.

    Return None unless the messages differ in their numbers only.
    """
    first = column[0]
    last = len(spec.shape) == 3 and channels_last(records.parse(m.ObservationProto, first))
    shape = (*spec.shape[1:], spec.shape[0]) if last else spec.shape
    # Only the first message is parsed; the others must equal it except in their numbers.
    header = records.observation_header(shape)
    start, stop = len(header), len(header) + 4 * math.prod(shape)
    tail = first[stop:]
    name = tail_name(tail)
    if name is None or len(first) < stop:
        return None
    for data in column:
        if len(data) != len(first) or not (data.startswith(header) and data.endswith(tail)):
            return None
    # An array made from a bytearray is writable; one made from bytes is not.
    # Numbers are copied from memoryviews, so that no message is copied as a whole.
    numbers = bytearray().join([memoryview(data)[start:stop] for data in column])
    values = np.frombuffer(numbers, dtype="<f4").reshape(len(column), *shape)
    named = name == spec.name or not spec.name
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if last else values, named


def tail_name(tail: bytes) -> str | None:
    """Return the name in the bytes after an observation's numbers.

    None if the bytes are damaged, too long to be cached, or also contain a shape or values.
    """
    return _tail_name(tail) if len(tail) <= _MAX_TAIL_BYTES else None


@lru_cache(maxsize=256)
def _tail_name(tail: bytes) -> str | None:
    # A parser merges later fields into a message, so the tail can be parsed without the rest
    # (https://protobuf.dev/programming-guides/encoding/#last-one-wins).
    try:
        message = m.ObservationProto.FromString(tail)
    except DecodeError:
        return None
    plain = message.compression_type == m.NONE and not message.WhichOneof("observation_data")
    return message.name if plain and not message.shape else None


def _decode_slowly(
    column: Sequence[bytes],
    index: int,
    infos: Sequence[m.ReceivedAgentInfoProto],
    spec: ObservationSpec,
) -> tuple[FloatArray, bool]:
    """Return what `_decode_floats` returns, decoded agent by agent."""
    messages = [records.parse(m.ObservationProto, data) for data in column]
    out = np.empty((len(messages), *spec.shape), dtype=np.float32)
    for row, message in enumerate(messages):
        try:
            out[row] = decode_observation(message, spec)
        except _ObservationError as error:
            raise _ObservationError(
                f"Observation at index={index} for agent with id={infos[row].id} didn't match the "
                f"ObservationSpec: {error}"
            ) from error
    return out, not spec.name or all(message.name == spec.name for message in messages)


def decode_observation(message: m.ObservationProto, spec: ObservationSpec) -> FloatArray:
    """Return one agent's observation, float32 of `spec.shape`; errors as of `decode_steps`."""
    # A shape with too many dimensions keeps one dimension above the limit, and so does not match.
    shape = tuple(message.shape[: specs.MAX_DIMENSIONS + 1])
    last = len(shape) == 3 and channels_last(message)
    if last:
        shape = (shape[2], shape[0], shape[1])
    if shape != tuple(spec.shape):
        raise _ObservationError(f"expected the shape {tuple(spec.shape)} but got {shape}.")
    if message.compression_type == m.PNG and len(shape) == 3:
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


def channels_last(message: m.ObservationProto) -> bool:
    """Return whether a rank-3 observation is [H, W, C], as Unity packages before 3.0 send it.

    The dimension properties decide. Messages of API versions before 1.5, and of some Python
    environments, have none: then a PNG's own size decides, and uncompressed numbers have the order
    of the declared shape, as in ML-Agents.
    """
    properties = message.dimension_properties
    if not properties:
        # Without properties, the header of a PNG tells the height and the width, and so whether the
        # channels are last in the shape.
        size = png_size(message.compressed_data) if message.compression_type == m.PNG else None
        return size == tuple(message.shape[:2]) != tuple(message.shape[1:3])
    return bool(properties[0] & _SPATIAL) and not (len(properties) > 2 and properties[2] & _SPATIAL)


def decode_masks(
    infos: Sequence[m.ReceivedAgentInfoProto], spec: ActionSpec
) -> list[BoolArray] | None:
    """Return a mask [N, size] per branch, True = forbidden; None without branches or agents."""
    if not spec.discrete_branches or not infos:
        return None
    # A mask of the wrong length is ignored, as in ML-Agents: every choice is allowed.
    total = sum(spec.discrete_branches)
    raw = [bytes(info.action_mask) for info in infos]
    absent = bytes(total)
    joined = b"".join([row if len(row) == total else absent for row in raw])
    return split_masks(np.frombuffer(joined, dtype=np.bool_).reshape(len(raw), total), spec)


def split_masks(flat: BoolArray, spec: ActionSpec) -> list[BoolArray]:
    """Return one mask bool [N, size] per branch, from the masks [N, M] of all branches."""
    ends = np.cumsum(spec.discrete_branches)[:-1]
    # The masks are copied, because callers may write to them, and `flat` belongs to a cache or to
    # received bytes.
    return [branch.copy() for branch in np.split(flat, ends, axis=1)]


def behavior_spec_from(brain: m.BrainParametersProto, first: m.AgentInfoProto) -> BehaviorSpec:
    """Return a behavior's specification, from its announcement and its first agent.

    Rank-3 observations are channels first in the specification.

    Raises:
        UnityException: Sizes contradict each other, are impossible or too large.
    """
    observations = [observation_spec_from(x) for x in first.observations[: specs.MAX_PARTS + 1]]
    spec = BehaviorSpec(observations, _action_spec(brain))
    specs.check_spec(brain.brain_name, spec)
    return specs.ScaledSpec.of(spec, brain.action_spec.action_descriptions)


def observation_spec_from(message: m.ObservationProto) -> ObservationSpec:
    """Return the specification of one observation; an image's shape is channels first."""
    shape = tuple(message.shape[: specs.MAX_DIMENSIONS + 1])
    declared = tuple(specs.DimensionProperty(p) for p in message.dimension_properties[: len(shape)])
    # Messages of API versions before 1.5 have no properties.
    properties = declared or (specs.DimensionProperty.UNSPECIFIED,) * len(shape)
    if len(shape) == 3 and channels_last(message):
        shape = (shape[2], shape[0], shape[1])
        properties = (specs.DimensionProperty.NONE, _SPATIAL, _SPATIAL)
    is_goal = message.observation_type == m.GOAL_SIGNAL  # other numbers count as the default
    return ObservationSpec(shape, properties, ObservationType(is_goal), message.name)


def _action_spec(brain: m.BrainParametersProto) -> ActionSpec:
    # Protobuf returns an empty ActionSpecProto if the field is missing.
    declared: m.ActionSpecProto = brain.action_spec
    if declared.num_continuous_actions or declared.num_discrete_actions:
        n, branches = declared.num_discrete_actions, tuple(declared.discrete_branch_sizes)
        if len(branches) != n:
            raise UnityEnvironmentException(
                f"behavior {brain.brain_name} declares {n} discrete actions but gives the sizes of "
                f"{len(branches)} branches: {brief(branches)}"
            )
        return ActionSpec(declared.num_continuous_actions, branches)
    # Announcements of API versions before 1.3 have one kind of action, in these fields.
    sizes = tuple(brain.vector_action_size_deprecated)
    if brain.vector_action_space_type_deprecated == m.continuous:
        return ActionSpec(sizes[0] if sizes else 0, ())
    return ActionSpec(0, sizes)
