"""The fast decoder, for messages that differ from an earlier message in their numbers only.

Most messages about a behavior are such messages: the same agents observe again, and no episode has
ended. The numbers are at the same offsets as in the earlier message, so one gather reads all
numbers, and the other bytes are only compared. A message without a known layout is read field by
field if it has many agents: one field of all agents, then the next field of all agents. Fields are
in the order of their numbers, so one comparison tests for all agents whether their next byte is a
field's tag. Messages of few agents, and messages that do not follow this pattern (PNGs, unknown
fields, observations that differ in more than numbers), are read agent by agent by `decoding`, which
also raises the errors.

`python benchmarks/decoding.py` measures the time of each decoder; docs/reference/protocol.md has
the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.core.specs import FREE_BYTES, MAX_AGENTS, BehaviorSpec, refuse_excess, row_bytes
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.errors import UnitySpecificationException, brief
from pipeline.wire.codec import decoding, records
from pipeline.wire.codec.generated import messages as m

MANY = 256
"""Smallest number of agents that are read field by field; few agents are as fast one by one."""
# Largest size of an agent, in bytes, for which the fields of all agents are read together. Reading
# all agents together copies their observations once more than reading agent by agent, and copies of
# large observations take long.
_MAX_AGENT_BYTES = 1 << 14
# Tags of an agent's fields, except the tag of observations, which is part of `Pattern.data`.
_REWARD, _DONE, _MAX_STEP, _ID, _MASK, _GROUP, _GROUP_REWARD = 61, 64, 72, 80, 90, 112, 125
# The tag of an agent in the list.
_ENTRY = 10
# The padding is appended to a message, so that fields can be looked for beyond its last byte.
_PADDING = bytes(16)


class LayoutMismatchError(Exception):
    """The fast decoder does not expect the form of a message, so `decoding` has to read it."""


def seems_many(data: bytes) -> bool:
    """Return whether the message has many small agents, judged by the size of the first agent."""
    try:
        start, size = _entry(data, 0)
    except (LayoutMismatchError, IndexError):
        return False
    return size <= _MAX_AGENT_BYTES and len(data) >= MANY * (start + size)


def read_fields(
    data: bytes, spec: BehaviorSpec, check_memory: Callable[[int, int], None]
) -> Fields | None:
    """Return the agents of a serialized ListAgentInfoProto, or None if `decoding` has to read it.

    `check_memory` gets the numbers of agents and of bytes before arrays are allocated.
    """
    try:
        starts, ends = _bounds(data)
        check_memory(len(starts), len(data))
        # The first agent's observations are the pattern for all agents.
        pattern = Pattern.of(data[starts[0] : ends[0]], spec)
        cursor = _Cursor(data, starts)
        reward = cursor.numbers(_REWARD)
        done, max_step = cursor.flags(_DONE), cursor.flags(_MAX_STEP)
        agent_id = cursor.ints(_ID)
        mask = cursor.masks(sum(spec.action_spec.discrete_branches))
        obs_at = cursor.at.copy()
        obs = pattern.read(data, cursor)
        group_id, group_reward = cursor.ints(_GROUP), cursor.numbers(_GROUP_REWARD)
    # An IndexError means that a length in the message points beyond its end.
    except (LayoutMismatchError, IndexError, DecodeError):
        return None
    # Unread bytes are unknown fields, or fields in another order: `decoding` reads them.
    if (cursor.at != ends).any():
        return None
    return Fields(
        obs=obs,
        reward=cursor.floats(reward),
        done=done,
        max_step_reached=max_step,
        agent_id=agent_id,
        group_id=group_id,
        group_reward=cursor.floats(group_reward),
        masks=decoding.split_masks(mask, spec.action_spec) if mask.shape[1] else None,
        pattern=pattern,
        data=cursor.data,
        reward_at=reward,
        group_reward_at=group_reward,
        obs_at=obs_at,
    )


def _bounds(data: bytes) -> tuple[list[int], list[int]]:
    """Return the offsets at which the contents of a list's entries begin and end."""
    starts, ends = [], []
    position = 0
    # The loop visits agent after agent, because each entry begins where the previous entry ends.
    while position < len(data):
        start, size = _entry(data, position)
        position = start + size
        starts.append(start)
        ends.append(position)
    if position != len(data):
        raise LayoutMismatchError
    return starts, ends


def _entry(data: bytes, position: int) -> tuple[int, int]:
    """Return the content's offset and number of bytes, for the entry at `position`."""
    if data[position] != _ENTRY:
        raise LayoutMismatchError
    # Most agents have fewer than 128 bytes, so their size takes one byte.
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
class Fields(decoding.AgentInfos):
    """Data of N agents, and the offsets of rewards and observations in the message."""

    masks: list[BoolArray] | None
    """A mask [N, size] for each branch, False for agents without a mask; None without branches."""
    pattern: Pattern
    data: AnyArray
    """uint8 array with the bytes of the message, and padding after them."""
    reward_at: tuple[AnyArray, AnyArray]
    """Indices [K] of the agents that sent a reward, and offsets [K, 4] of its bytes."""
    group_reward_at: tuple[AnyArray, AnyArray]
    """The same for group rewards."""
    obs_at: AnyArray
    """Offset [N] in `data` at which each agent's observations begin."""

    def steps(self, spec: BehaviorSpec, name: str) -> Steps:
        """Return the agents as decision and terminal steps; errors as of `decode_steps`."""
        decoding.check_numbers(self, spec, name)
        return decoding.split_ended(self, spec, self.masks)


class _Cursor:
    """A reading position in the entry of each agent, which moves if the entry has the field."""

    def __init__(self, data: bytes, starts: list[int]) -> None:
        self.data = np.frombuffer(data + _PADDING, dtype=np.uint8)
        self.at = np.array(starts)

    def numbers(self, tag: int) -> tuple[AnyArray, AnyArray]:
        """Return the K agents with the float field `tag`, and offsets [K, 4] of its bytes."""
        rows = self._rows_with(tag)
        index = self.at[rows, None] + np.arange(4)
        self.at[rows] += 4
        return rows, index

    def floats(self, numbers: tuple[AnyArray, AnyArray]) -> FloatArray:
        """Return the values of the result of `numbers`: float32 [N], 0 for the other agents."""
        rows, index = numbers
        out = np.zeros(len(self.at), dtype=np.float32)
        out[rows] = self.data[index].view("<f4")[:, 0]
        return out

    def flags(self, tag: int) -> BoolArray:
        """Return the bool field `tag` of all agents: bool [N], False for agents without it."""
        out = np.zeros(len(self.at), dtype=np.bool_)
        rows = self._rows_with(tag)
        values = self.data[self.at[rows]]
        # No encoder writes a flag of several bytes, so such a message is left to `decoding`.
        if (values >= 0x80).any():
            raise LayoutMismatchError
        out[rows] = values
        self.at[rows] += 1
        return out

    def ints(self, tag: int) -> IntArray:
        """Return the int field `tag` of all agents: int32 [N], 0 if an agent did not send it."""
        out = np.zeros(len(self.at), dtype=np.uint64)
        rows = self._rows_with(tag)
        if len(rows):
            digits = np.arange(records.ID_WIDTH)
            table = self.data[self.at[rows, None] + digits]
            ends = table < 0x80
            width = ends.argmax(axis=1) + 1
            if not ends.any(axis=1).all():
                raise LayoutMismatchError
            # A varint has seven bits in each byte, the lowest first, and wraps at 64 bits.
            values = np.where(digits < width[:, None], table & 0x7F, 0).astype(np.uint64)
            out[rows] = (values << (7 * digits).astype(np.uint64)).sum(axis=1, dtype=np.uint64)
            self.at[rows] += width
        return out.view(np.int64).astype(np.int32)

    def masks(self, size: int) -> BoolArray:
        """Return the masks of all branches: bool [N, size], False for agents without a mask."""
        out = np.zeros((len(self.at), size), dtype=np.bool_)
        rows = self._rows_with(_MASK)
        if not len(rows):
            return out
        # Packed flags take a byte each, so the field's length is the number of choices.
        length = np.frombuffer(records.varint(size), dtype=np.uint8)
        table = self.data[self.at[rows, None] + np.arange(len(length) + size)]
        if (table[:, : len(length)] != length).any() or (table[:, len(length) :] >= 0x80).any():
            raise LayoutMismatchError
        out[rows] = table[:, len(length) :]
        self.at[rows] += table.shape[1]
        return out

    def _rows_with(self, tag: int) -> AnyArray:
        """Return the agents whose next field is `tag`, and move their positions past the tag."""
        # Fields are in ascending order, so an agent with a later tag does not have this field.
        rows = np.flatnonzero(self.data[self.at] == tag)
        self.at[rows] += 1
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """The bytes of one agent's observations; only the observed values differ between agents."""

    data: AnyArray
    """uint8 [W] bytes of the observations."""
    shapes: list[tuple[int, ...]]
    """Shape of each observation."""
    begins: list[int]
    """Offset of each observation's numbers in `data`."""

    @staticmethod
    def of(info: bytes, spec: BehaviorSpec) -> Pattern:
        """Return an AgentInfoProto's pattern; LayoutMismatchError if `spec` has another form."""
        bodies = m.ReceivedAgentInfoProto.FromString(info).observations
        if len(bodies) != len(spec.observation_specs):
            raise LayoutMismatchError
        data, shapes, begins = b"", [], []
        for body, obs in zip(bodies, spec.observation_specs, strict=True):
            header = records.observation_header(tuple(obs.shape))
            tail = body[len(header) + 4 * math.prod(obs.shape) :]
            if not body.startswith(header) or decoding.tail_name(tail) != obs.name:
                raise LayoutMismatchError
            # Images with channels last are left to `decoding`, which changes the order of the axes.
            if len(obs.shape) == 3 and decoding.channels_last(m.ObservationProto.FromString(body)):
                raise LayoutMismatchError
            data += records.delimited(13, body)
            shapes.append(tuple(obs.shape))
            begins.append(len(data) - len(body) + len(header))
        return Pattern(data=np.frombuffer(data, dtype=np.uint8), shapes=shapes, begins=begins)

    def read(self, data: bytes, cursor: _Cursor) -> list[FloatArray]:
        """Return each observation, float32 [N, *shape]; LayoutMismatchError for other bytes."""
        n, width = len(cursor.at), len(self.data)
        # The bytes of all agents form one table, in which each column is compared at once.
        joined = b"".join([data[start : start + width] for start in cursor.at.tolist()])
        if len(joined) != n * width:
            raise LayoutMismatchError
        table = np.frombuffer(joined, dtype=np.uint8).reshape(n, width)
        out, done = [], 0
        for shape, begin in zip(self.shapes, self.begins, strict=True):
            if (table[:, done:begin] != self.data[done:begin]).any():
                raise LayoutMismatchError
            out.append(records.float_rows(table, begin, shape))
            done = begin + 4 * math.prod(shape)
        if (table[:, done:] != self.data[done:]).any():
            raise LayoutMismatchError
        cursor.at += width
        return out


# Longest message with a stored layout; a layout takes eight times as many bytes.
_MAX_CACHED_BYTES = 1 << 17
_MAX_LAYOUTS = 8
# Largest number of messages between two stored layouts. The number doubles with each stored layout,
# and is 1 again after a message that has a stored layout.
_MAX_SKIPS = 1024


class Decoder:
    """Decodes the messages about one behavior, one after another."""

    def __init__(self, spec: BehaviorSpec, name: str) -> None:
        self._spec, self._name = spec, name
        self._row_bytes = row_bytes(spec)
        self._layouts: dict[int, _Layout] = {}  # the key is the length of the message
        self._n_to_skip, self._next_skips = 0, 1
        self.n_cached = 0  # number of messages that had the layout of an earlier message

    def decode(self, data: bytes) -> Steps:
        """Return the steps in a serialized ListAgentInfoProto.

        Raises:
            UnityObservationException: As `decode_steps` does.
            UnitySpecificationException: The agents would take far more memory than was sent.
            UnityCommunicationException: The bytes are not a ListAgentInfoProto.
        """
        # All messages of a layout have the same length, so layouts are looked up by length.
        layout = self._layouts.get(len(data))
        if layout is not None:
            decision = layout.read(data)
            if decision is not None:
                self.n_cached += 1
                self._next_skips = 1
                return decision, TerminalSteps.empty(self._spec)
        # With few agents, `_read_fields` is no faster than protobuf's parser, which can read every
        # message.
        fields = self._read_fields(data) if seems_many(data) else None
        if fields is None:
            infos = records.parse(m.ReceivedAgentInfosProto, data).value
            self._check_memory(len(infos), len(data))
            steps = decoding.decode_steps(infos, self._spec, self._name)
        else:
            steps = fields.steps(self._spec, self._name)
        # If an episode has ended, the message also has the ended agents, so its layout seldom
        # occurs again.
        if len(data) <= _MAX_CACHED_BYTES and not len(steps[1]) and self._is_layout_due():
            fields = fields or self._read_fields(data)
            # A layout in which an agent has reached its step limit seldom occurs again.
            if fields is not None and not fields.max_step_reached.any():
                # The newest layout is the last in the dict.
                self._layouts.pop(len(data), None)
                self._layouts[len(data)] = _Layout(fields, len(data))
                if len(self._layouts) > _MAX_LAYOUTS:
                    del self._layouts[next(iter(self._layouts))]  # the oldest layout
        return steps

    def _read_fields(self, data: bytes) -> Fields | None:
        return read_fields(data, self._spec, self._check_memory)

    def _check_memory(self, n_agents: int, n_sent: int) -> None:
        if n_agents > MAX_AGENTS:
            raise UnitySpecificationException(
                f"a message has {n_agents} agents of the behavior {brief(self._name)}, at most "
                f"{MAX_AGENTS} are possible: divide them among several environments"
            )
        n_bytes = n_agents * self._row_bytes
        if n_bytes > FREE_BYTES:  # compared here, so that most messages need no call and no text
            refuse_excess(n_bytes, n_sent, f"a message about the behavior {brief(self._name)}")

    def _is_layout_due(self) -> bool:
        """Return whether to store the message's layout; every time, twice as many are skipped."""
        if self._n_to_skip > 0:
            self._n_to_skip -= 1
            return False
        self._n_to_skip, self._next_skips = self._next_skips, min(2 * self._next_skips, _MAX_SKIPS)
        return True


class _Layout:
    """The layout of a message of N agents, `n_bytes` long, in which no episode has ended."""

    def __init__(self, fields: Fields, n_bytes: int) -> None:
        # Rows of the agents that sent a reward and a group reward; those of other agents are 0.
        self._reward, reward_at = fields.reward_at
        self._group_reward, group_reward_at = fields.group_reward_at
        shapes, begins = fields.pattern.shapes, fields.pattern.begins
        obs_at = [
            fields.obs_at[:, None] + (begin + np.arange(4 * math.prod(shape)))
            for begin, shape in zip(begins, shapes, strict=True)
        ]
        numbers_at = np.concatenate([at.ravel() for at in (reward_at, group_reward_at, *obs_at)])
        is_fixed = np.ones(n_bytes, dtype=np.bool_)
        is_fixed[numbers_at] = False
        fixed_at = np.flatnonzero(is_fixed)
        # Offsets (intp) of the message's bytes: first of its float32 numbers, then of all others.
        self._order = np.concatenate((numbers_at, fixed_at))
        self._end = len(numbers_at)
        self._fixed = fields.data[fixed_at].tobytes()
        # Callers may write to the returned arrays, so the layout has copies.
        self._agent_id, self._group_id = fields.agent_id.copy(), fields.group_id.copy()
        self._masks = fields.masks and [mask.copy() for mask in fields.masks]
        self._shapes = [(len(self._agent_id), *shape) for shape in shapes]

    def read(self, data: bytes) -> DecisionSteps | None:
        """Return the agents of a message; None if its layout differs or a number is not finite."""
        table = np.frombuffer(data, dtype=np.uint8).take(self._order)
        if table[self._end :].tobytes() != self._fixed:
            return None
        # `take` has made a copy, so callers may write to it, and the message can be freed.
        numbers = table[: self._end].view("<f4")
        # Rewards and observations must be finite; flags and ids cannot be infinite.
        # The sum of squares is the fastest test for NaN and infinity. It also overflows for numbers
        # above 1e19: then None is returned, and the complete decoder checks each number.
        if not math.isfinite(np.vdot(numbers, numbers)):
            return None
        k = len(self._reward)
        obs, start = [], k + len(self._group_reward)
        group_reward = numbers[k:start]
        for shape in self._shapes:
            stop = start + math.prod(shape)
            obs.append(numbers[start:stop].reshape(shape))
            start = stop
        return DecisionSteps(
            obs,
            self._spread(numbers[:k], self._reward),
            self._agent_id.copy(),
            self._masks and [mask.copy() for mask in self._masks],
            self._group_id.copy(),
            self._spread(group_reward, self._group_reward),
        )

    def _spread(self, values: FloatArray, rows: AnyArray) -> FloatArray:
        n = len(self._agent_id)
        # Protobuf leaves out fields that are 0, so some agents may have no value.
        if len(values) == n:
            return values
        out = np.zeros(n, dtype=np.float32)
        if len(values):
            out[rows] = values
        return out
