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
_REWARD, _DONE, _MAX_STEP, _ID = 0x3D, 0x40, 0x48, 0x50
_MASK, _OBS, _GROUP, _GROUP_REWARD = 0x5A, 0x6A, 0x70, 0x7D
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
    first, specs = message.value[0].observations, spec.observation_specs
    if [one.name for one in first] != [obs.name for obs in specs]:
        return None
    last = [
        len(obs.shape) == 3 and channels_last(one) for one, obs in zip(first, specs, strict=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """N agents; their images are as on the wire."""

    infos: AgentInfos
    mask: BoolArray
    """[N, M] masks of all branches, False for agents without one."""


class _UnfitError(Exception):
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
        starts, ends = _bounds(data)
        cursor = _Cursor(data, starts)
        reward = cursor.floats(_REWARD)
        done, max_step = cursor.flag(_DONE), cursor.flag(_MAX_STEP)
        agent_id = cursor.varint(_ID)
        mask = cursor.mask(mask_size)
        obs = _observations(data, cursor, message.value[0], shapes)
        group_id, group_reward = cursor.varint(_GROUP), cursor.floats(_GROUP_REWARD)
        if (cursor.at != ends).any():
            return None
    except _UnfitError:
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


def _bounds(data: bytes) -> tuple[AnyArray, AnyArray]:
    """Where the body of each entry of the list begins and ends, [N] each."""
    starts, ends = [], []
    position, stop = 0, len(data)
    while position < stop:
        position += 1  # the tag of an entry: the list has no other field
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
    return np.array(starts), np.array(ends)


class _Cursor:
    """A position in every row; each read moves it past a field in the rows that have the field."""

    def __init__(self, data: bytes, starts: AnyArray) -> None:
        self._bytes = np.frombuffer(data + _PADDING, dtype=np.uint8)
        self.at = starts.copy()

    def _having(self, tag: int) -> AnyArray:
        """Rows that have the field next; their position is then behind its tag."""
        rows = np.flatnonzero(self._bytes[self.at] == tag)
        self.at[rows] += 1
        return rows

    def floats(self, tag: int) -> FloatArray:
        """float32 [N], 0 where absent."""
        out = np.zeros(len(self.at), dtype=np.float32)
        rows = self._having(tag)
        out[rows] = self._bytes[self.at[rows, None] + np.arange(4)].view("<f4")[:, 0]
        self.at[rows] += 4
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
            raise _UnfitError
        out[rows] = table[:, len(length) :] != 0
        self.at[rows] += len(length) + size
        return out


def _observations(
    data: bytes, cursor: _Cursor, first: AgentInfoProto, shapes: Sequence[tuple[int, ...]]
) -> list[FloatArray]:
    """float32 [N, *shape] of each observation, if all rows are the first but for the numbers."""
    bodies = [one.SerializeToString() for one in first.observations]
    entries = [wire.delimited(13, body) for body in bodies]
    pattern = np.frombuffer(b"".join(entries), dtype=np.uint8)
    width = len(pattern)
    joined = b"".join([data[start : start + width] for start in cursor.at.tolist()])
    if len(joined) != width * len(cursor.at):
        raise _UnfitError
    table = np.frombuffer(joined, dtype=np.uint8).reshape(len(cursor.at), width)
    out, done, before = [], 0, 0
    for shape, body, entry in zip(shapes, bodies, entries, strict=True):
        header = wire.observation_header(shape)
        begin = before + len(entry) - len(body) + len(header)
        before += len(entry)
        if not body.startswith(header) or (table[:, done:begin] != pattern[done:begin]).any():
            raise _UnfitError
        out.append(wire.float_rows(table, begin, shape))
        done = begin + 4 * math.prod(shape)
    if (table[:, done:] != pattern[done:]).any():
        raise _UnfitError
    cursor.at += width
    return out
