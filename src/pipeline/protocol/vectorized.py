"""Many agents at once: every field of all agents, then the next field of all agents.

Reading an agent's message costs Python time for each agent. Fields stand in the order of their
numbers, so it is cheaper to test, for all agents at once, whether their next byte is a field's tag.
Messages that do not follow this pattern (PNGs, unknown fields, observations that differ in more
than numbers) are left to `decoding`, which also raises the errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from pipeline.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.protocol import wire
from pipeline.protocol.decoding import (
    AgentInfos,
    channels_last,
    check_numbers,
    split_ended,
    split_masks,
    tail_name,
)
from pipeline.protocol.generated.messages import ObservationProto, ReceivedAgentInfoProto
from pipeline.protocol.specs import BehaviorSpec
from pipeline.protocol.steps import Steps

MANY = 256
"""Least number of agents for reading field by field; for fewer, one by one is as fast."""
_MAX_AGENT_BYTES = 1 << 14
"""Most bytes of an agent for reading field by field; larger images are copied less one by one."""
_REWARD, _DONE, _MAX_STEP, _ID, _MASK, _GROUP, _GROUP_REWARD = 61, 64, 72, 80, 90, 112, 125
"""Tags of an agent's fields; its observations' tags are part of the pattern."""
_ENTRY = 10
"""The tag of an agent in the list."""
_PADDING = bytes(16)
"""Appended to the message, so that a field may be looked for behind its last byte."""


class LayoutMismatchError(Exception):
    """The bytes do not follow the pattern."""


def seems_many(data: bytes) -> bool:
    """Return whether the message has many small agents, if all are as small as the first."""
    try:
        start, size = _entry(data, 0)
    except (LayoutMismatchError, IndexError):
        return False
    return size <= _MAX_AGENT_BYTES and len(data) >= MANY * (start + size)


def read_fields(
    data: bytes, spec: BehaviorSpec, check_memory: Callable[[int, int], None]
) -> Fields | None:
    """Return the agents of a serialized ListAgentInfoProto; None if it breaks the pattern.

    `check_memory` is called with the numbers of agents and of bytes before arrays are made of them.
    """
    try:
        starts, ends = _bounds(data)
        check_memory(len(starts), len(data))
        pattern = Pattern.of(data[starts[0] : ends[0]], spec)
        cursor = _Cursor(data, starts)
        reward = cursor.numbers(_REWARD)
        done, max_step = cursor.flags(_DONE), cursor.flags(_MAX_STEP)
        agent_id = cursor.ints(_ID)
        mask = cursor.masks(sum(spec.action_spec.discrete_branches))
        obs_at = cursor.at.copy()
        obs = pattern.read(data, cursor)
        group_id, group_reward = cursor.ints(_GROUP), cursor.numbers(_GROUP_REWARD)
    # An index beyond the message: a length in it is wrong.
    except (LayoutMismatchError, IndexError, DecodeError):
        return None
    if (cursor.at != ends).any():
        return None
    infos = AgentInfos(
        obs=obs,
        reward=cursor.floats(reward),
        done=done,
        max_step_reached=max_step,
        agent_id=agent_id,
        group_id=group_id,
        group_reward=cursor.floats(group_reward),
    )
    return Fields(
        infos=infos,
        masks=split_masks(mask, spec.action_spec) if mask.shape[1] else None,
        pattern=pattern,
        data=cursor.data,
        reward=reward,
        group_reward=group_reward,
        obs_at=obs_at,
    )


def _bounds(data: bytes) -> tuple[list[int], list[int]]:
    """Return where the bodies of a list's entries begin and end."""
    starts, ends = [], []
    position = 0
    # The only loop over agents: where an entry begins is known when the one before has been read.
    while position < len(data):
        start, size = _entry(data, position)
        position = start + size
        starts.append(start)
        ends.append(position)
    if position != len(data):
        raise LayoutMismatchError
    return starts, ends


def _entry(data: bytes, position: int) -> tuple[int, int]:
    """Return where the body of the entry at `position` begins, and its size."""
    if data[position] != _ENTRY:
        raise LayoutMismatchError
    size = data[position + 1]
    position += 2
    if size < 0x80:
        return position, size
    size, shift, more = size & 0x7F, 7, 0x80
    while more >= 0x80:
        more = data[position]
        size |= (more & 0x7F) << shift
        shift += 7
        position += 1
    return position, size


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """N agents, and where their numbers stand in the message."""

    infos: AgentInfos
    masks: list[BoolArray] | None
    """Per branch [N, size], False for agents without a mask; None without branches."""
    pattern: Pattern
    data: AnyArray
    """uint8: the message, and some bytes behind it."""
    reward: tuple[AnyArray, AnyArray]
    """[K] agents that sent one, and [K, 4] where its bytes are; it is 0 for the others."""
    group_reward: tuple[AnyArray, AnyArray]
    obs_at: AnyArray
    """[N] where the observations begin."""

    def steps(self, spec: BehaviorSpec, name: str) -> Steps:
        """Return the agents as steps."""
        check_numbers(self.infos, spec, name)
        return split_ended(self.infos, spec, self.masks)


class _Cursor:
    """A position in every row; each read moves it past a field in the rows that have the field."""

    def __init__(self, data: bytes, starts: list[int]) -> None:
        self.data = np.frombuffer(data + _PADDING, dtype=np.uint8)
        self.at = np.array(starts)

    def numbers(self, tag: int) -> tuple[AnyArray, AnyArray]:
        """Return the rows [K] that have a float next, and where its bytes are [K, 4]."""
        rows = self._having(tag)
        index = self.at[rows, None] + np.arange(4)
        self.at[rows] += 4
        return rows, index

    def floats(self, numbers: tuple[AnyArray, AnyArray]) -> FloatArray:
        """Return what `numbers` found as float32 [N], 0 where absent."""
        rows, index = numbers
        out = np.zeros(len(self.at), dtype=np.float32)
        out[rows] = self.data[index].view("<f4")[:, 0]
        return out

    def flags(self, tag: int) -> BoolArray:
        """Return bool [N], False where absent."""
        out = np.zeros(len(self.at), dtype=np.bool_)
        rows = self._having(tag)
        values = self.data[self.at[rows]]
        # A varint of several bytes, which is unusual for a truth value: protobuf decides.
        if (values >= 0x80).any():
            raise LayoutMismatchError
        out[rows] = values
        self.at[rows] += 1
        return out

    def ints(self, tag: int) -> IntArray:
        """Return int32 [N], 0 where absent."""
        out = np.zeros(len(self.at), dtype=np.uint64)
        rows = self._having(tag)
        if len(rows):
            digits = np.arange(wire.ID_WIDTH)
            table = self.data[self.at[rows, None] + digits]
            ends = table < 0x80
            width = ends.argmax(axis=1) + 1
            if not ends.any(axis=1).all():
                raise LayoutMismatchError
            # seven bits in each byte, the lowest first; 64 bits wrap as protobuf's do
            values = np.where(digits < width[:, None], table & 0x7F, 0).astype(np.uint64)
            out[rows] = (values << (7 * digits).astype(np.uint64)).sum(axis=1, dtype=np.uint64)
            self.at[rows] += width
        return out.view(np.int64).astype(np.int32)

    def masks(self, size: int) -> BoolArray:
        """Return bool [N, size], False where absent."""
        out = np.zeros((len(self.at), size), dtype=np.bool_)
        rows = self._having(_MASK)
        if not len(rows):
            return out
        # Packed truth values take a byte each, so the field's length is the number of choices.
        length = np.frombuffer(wire.varint(size), dtype=np.uint8)
        table = self.data[self.at[rows, None] + np.arange(len(length) + size)]
        if (table[:, : len(length)] != length).any() or (table[:, len(length) :] >= 0x80).any():
            raise LayoutMismatchError
        out[rows] = table[:, len(length) :]
        self.at[rows] += table.shape[1]
        return out

    def _having(self, tag: int) -> AnyArray:
        """Return the rows that have the field next; their position is then behind its tag."""
        rows = np.flatnonzero(self.data[self.at] == tag)
        self.at[rows] += 1
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """An agent's observations as bytes, of which only the numbers differ between agents."""

    data: AnyArray
    """uint8 [W]."""
    shapes: list[tuple[int, ...]]
    """Of each observation."""
    begins: list[int]
    """First byte of each observation's numbers."""

    @staticmethod
    def of(info: bytes, spec: BehaviorSpec) -> Pattern:
        """Return the observations of one agent."""
        bodies = ReceivedAgentInfoProto.FromString(info).observations
        if len(bodies) != len(spec.observation_specs):
            raise LayoutMismatchError
        data, shapes, begins = b"", [], []
        for body, obs in zip(bodies, spec.observation_specs, strict=True):
            header = wire.observation_header(tuple(obs.shape))
            tail = body[len(header) + 4 * math.prod(obs.shape) :]
            if not body.startswith(header) or tail_name(tail) != obs.name:
                raise LayoutMismatchError
            # Turning images round is left to the other decoder, which copies them anyway.
            if len(obs.shape) == 3 and channels_last(ObservationProto.FromString(body)):
                raise LayoutMismatchError
            data += wire.delimited(13, body)
            shapes.append(tuple(obs.shape))
            begins.append(len(data) - len(body) + len(header))
        return Pattern(data=np.frombuffer(data, dtype=np.uint8), shapes=shapes, begins=begins)

    def read(self, data: bytes, cursor: _Cursor) -> list[FloatArray]:
        """Return float32 [N, *shape] of each observation."""
        n, width = len(cursor.at), len(self.data)
        # Side by side once, so that every byte of the pattern is compared for all rows together.
        joined = b"".join([data[start : start + width] for start in cursor.at.tolist()])
        if len(joined) != n * width:
            raise LayoutMismatchError
        table = np.frombuffer(joined, dtype=np.uint8).reshape(n, width)
        out, done = [], 0
        for shape, begin in zip(self.shapes, self.begins, strict=True):
            if (table[:, done:begin] != self.data[done:begin]).any():
                raise LayoutMismatchError
            out.append(wire.float_rows(table, begin, shape))
            done = begin + 4 * math.prod(shape)
        if (table[:, done:] != self.data[done:]).any():
            raise LayoutMismatchError
        cursor.at += width
        return out
