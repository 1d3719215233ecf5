"""The messages of many agents at once: every field of all rows, then the next field of all rows.

Reading a message object costs Python time for each agent. With hundreds of them it is cheaper to go
through the bytes of the whole list with NumPy: fields stand in the order of their numbers, so a row
is read by asking, for all rows at once, whether its next byte is a field's tag. What does not fit
the pattern (PNGs, unknown fields, observations that differ in anything but their numbers) is left
to `decoding`, which also words the errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol import wire
from pipeline.protocol.decoding import (
    AgentInfos,
    branches,
    channels_last,
    check_finite,
    check_observation,
    decode_steps,
    parted,
    wire_shape,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.arrays import AnyArray, BoolArray, FloatArray, IntArray
    from pipeline.protocol.generated.messages import AgentInfoProto, UnityRLOutputProto
    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.protocol.steps import Steps

MANY = 256
"""Agents from which on they are decoded together; for fewer, one by one is as fast."""
REWARD, DONE, MAX_STEP, ID, GROUP, GROUP_REWARD = 0x3D, 0x40, 0x48, 0x50, 0x70, 0x7D
_MASK = 0x5A
_PADDING = bytes(16)


def decode_list(
    message: UnityRLOutputProto.ListAgentInfoProto, spec: BehaviorSpec, name: str = ""
) -> Steps:
    """`decode_steps` of a whole list, faster where there are many agents."""
    steps = _decode_many(message, spec, name) if len(message.value) >= MANY else None
    return decode_steps(message.value, spec, name) if steps is None else steps


def _decode_many(
    message: UnityRLOutputProto.ListAgentInfoProto, spec: BehaviorSpec, name: str
) -> Steps | None:
    """What many agents sent; None where `decode_steps` must look at each."""
    first, specs = message.value[0], spec.observation_specs
    if not has_names(first, spec):
        return None
    last = [
        len(obs.shape) == 3 and channels_last(one)
        for one, obs in zip(first.observations, specs, strict=True)
    ]
    rows = _read_rows(
        message,
        shapes=[
            wire_shape(obs.shape) if turned else obs.shape
            for turned, obs in zip(last, specs, strict=True)
        ],
        mask_size=sum(spec.action_spec.discrete_branches),
    )
    if rows is None:
        return None
    infos = rows.infos
    check_finite(infos.reward, "rewards", name)
    check_finite(infos.group_reward, "group_rewards", name)
    for index, (values, turned) in enumerate(zip(infos.obs, last, strict=True)):
        if values.ndim != 4:
            check_observation(values, specs[index], index, name)
        if turned:
            infos.obs[index] = np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    masks = None
    if spec.action_spec.discrete_branches and not infos.done.all():
        masks = branches(rows.mask[~infos.done], spec.action_spec)
    return parted(infos, spec, masks)


def has_names(info: AgentInfoProto, spec: BehaviorSpec) -> bool:
    """Whether an agent's observations are those of `spec`, going by their names."""
    return [one.name for one in info.observations] == [one.name for one in spec.observation_specs]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """N agents; their images are as on the wire."""

    infos: AgentInfos
    mask: BoolArray
    """[N, M] masks of all branches, False for agents without one."""


class UnfitError(Exception):
    """The bytes do not follow the pattern."""


def _read_rows(
    message: UnityRLOutputProto.ListAgentInfoProto,
    *,
    shapes: Sequence[tuple[int, ...]],
    mask_size: int,
) -> _Rows | None:
    """All agents of `message`; None where that takes a closer look.

    Args:
        message: at least one agent, whose first has as many observations as `shapes`.
        shapes: of each observation, in the order of its values on the wire.
        mask_size: M, numbers of choices of all branches together.
    """
    data = message.SerializeToString()
    try:
        starts, ends = bounds(data, len(message.value))
        cursor = Cursor(data, starts)
        reward = cursor.floats(REWARD)
        done, max_step = cursor.flag(DONE), cursor.flag(MAX_STEP)
        agent_id = cursor.varint(ID)
        mask = cursor.mask(mask_size)
        obs = observations(data, cursor, Pattern.of(message.value[0], shapes))
        group_id, group_reward = cursor.varint(GROUP), cursor.floats(GROUP_REWARD)
        if (cursor.at != ends).any():
            return None
    except UnfitError:
        return None
    infos = AgentInfos(
        obs=obs,
        reward=reward,
        done=done,
        max_step_reached=max_step,
        agent_id=agent_id,
        group_id=group_id,
        group_reward=group_reward,
    )
    return _Rows(infos=infos, mask=mask)


def bounds(data: bytes, n: int) -> tuple[AnyArray, AnyArray]:
    """Where the bodies of a list's entries begin and end, [n] each.

    Raises:
        UnfitError: There are other fields behind the `n` entries.
    """
    starts, ends = [], []
    position = 0
    for _ in range(n):
        position += 1  # the tag of an entry
        size = data[position]
        position += 1
        shift = 7
        if size > 0x7F:
            size &= 0x7F
            more = 0x80
            while more > 0x7F:
                more = data[position]
                size |= (more & 0x7F) << shift
                shift += 7
                position += 1
        starts.append(position)
        position += size
        ends.append(position)
    if position != len(data):
        raise UnfitError
    return np.array(starts), np.array(ends)


class Cursor:
    """A position in every row; each read moves it past a field in the rows that have the field."""

    def __init__(self, data: bytes, starts: AnyArray) -> None:
        self._bytes = np.frombuffer(data + _PADDING, dtype=np.uint8)
        self.at = starts.copy()

    def _having(self, tag: int) -> AnyArray:
        """Rows that have the field next; their position is then behind its tag."""
        rows = np.flatnonzero(self._bytes[self.at] == tag)
        self.at[rows] += 1
        return rows

    def numbers(self, tag: int) -> tuple[AnyArray, AnyArray]:
        """Rows [K] that have a float next, and where its bytes are [K, 4]."""
        rows = self._having(tag)
        where = self.at[rows, None] + np.arange(4)
        self.at[rows] += 4
        return rows, where

    def floats(self, tag: int) -> FloatArray:
        """float32 [N], 0 where absent."""
        out = np.zeros(len(self.at), dtype=np.float32)
        rows, where = self.numbers(tag)
        out[rows] = self._bytes[where].view("<f4")[:, 0]
        return out

    def flag(self, tag: int) -> BoolArray:
        """Bool [N], False where absent."""
        out = np.zeros(len(self.at), dtype=np.bool_)
        rows = self._having(tag)
        out[rows] = self._bytes[self.at[rows]]
        self.at[rows] += 1
        return out

    def varint(self, tag: int) -> IntArray:
        """int32 [N], 0 where absent."""
        out = np.zeros(len(self.at), dtype=np.uint64)
        rows = self._having(tag)
        for shift in range(0, 7 * wire.ID_WIDTH, 7):
            if not len(rows):
                break
            part = self._bytes[self.at[rows]]
            out[rows] |= (part & np.uint8(0x7F)).astype(np.uint64) << np.uint64(shift)
            self.at[rows] += 1
            rows = rows[part > 0x7F]
        return out.view(np.int64).astype(np.int32)

    def mask(self, size: int) -> BoolArray:
        """Bool [N, size], False where absent."""
        out = np.zeros((len(self.at), size), dtype=np.bool_)
        rows = self._having(_MASK)
        if not len(rows):
            return out
        length = wire.varint(size)
        last = len(self._bytes) - 1
        where = np.minimum(self.at[rows, None] + np.arange(len(length) + size), last)
        table = self._bytes[where]
        if (table[:, : len(length)] != np.frombuffer(length, np.uint8)).any():
            raise UnfitError
        out[rows] = table[:, len(length) :] != 0
        self.at[rows] += len(length) + size
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """An agent's observations as bytes, of which only the numbers differ between agents."""

    data: AnyArray
    """uint8 [W]."""
    shapes: Sequence[tuple[int, ...]]
    """Of each observation, in the order of its values on the wire."""
    begins: Sequence[int]
    """First byte of each observation's numbers."""

    @staticmethod
    def of(info: AgentInfoProto, shapes: Sequence[tuple[int, ...]]) -> Pattern:
        """The observations of one agent, which has one for each of `shapes`.

        Raises:
            UnfitError: They are compressed, or have other shapes.
        """
        entries, begins, before = [], [], 0
        for shape, one in zip(shapes, info.observations, strict=True):
            body, header = one.SerializeToString(), wire.observation_header(shape)
            if not body.startswith(header):
                raise UnfitError
            entries.append(wire.delimited(13, body))
            before += len(entries[-1])
            begins.append(before - len(body) + len(header))
        data = np.frombuffer(b"".join(entries), dtype=np.uint8)
        return Pattern(data=data, shapes=shapes, begins=begins)


def observations(data: bytes, cursor: Cursor, pattern: Pattern) -> list[FloatArray]:
    """float32 [N, *shape] of each observation, if all rows are the pattern but for the numbers.

    Raises:
        UnfitError: They are not.
    """
    width = len(pattern.data)
    joined = b"".join([data[start : start + width] for start in cursor.at.tolist()])
    if len(joined) != width * len(cursor.at):
        raise UnfitError
    table = np.frombuffer(joined, dtype=np.uint8).reshape(len(cursor.at), width)
    out, done = [], 0
    for shape, begin in zip(pattern.shapes, pattern.begins, strict=True):
        if (table[:, done:begin] != pattern.data[done:begin]).any():
            raise UnfitError
        out.append(wire.float_rows(table, begin, shape))
        done = begin + 4 * math.prod(shape)
    if (table[:, done:] != pattern.data[done:]).any():
        raise UnfitError
    cursor.at += width
    return out
