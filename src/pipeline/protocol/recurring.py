"""Messages that differ from an earlier one in nothing but their numbers.

Most messages about a behavior are such: the same agents, none of whose episodes has ended, observe
again. Where the numbers of an earlier message stood, theirs stand too, so one gather reads them
all, and the other bytes only have to be the same. What is not like any message remembered is
decoded in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.bulk import (
    DONE,
    GROUP,
    GROUP_REWARD,
    ID,
    MAX_STEP,
    REWARD,
    Cursor,
    Pattern,
    UnfitError,
    bounds,
    decode_list,
    has_names,
    observations,
)
from pipeline.protocol.decoding import branches, channels_last
from pipeline.protocol.specs import ROOM, brief, refuse_excess, row_bytes
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray, BoolArray, FloatArray, IntArray
    from pipeline.protocol.generated.messages import UnityRLOutputProto
    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.protocol.steps import Steps

_LARGEST = 1 << 17
"""Bytes of the longest message that is remembered: it takes eight times as many."""
_MOST = 8
"""Messages that are remembered; the oldest one goes."""
_LONGEST_PAUSE = 1024
"""Messages that are left out after remembering some in vain: doubled each time, up to this many."""


class Decoder:
    """Decodes the messages about one behavior, one after another.

    Args:
        spec: the behavior's specification.
        name: the behavior's name, for errors.

    Attributes:
        n_recurring: messages that were like an earlier one.
    """

    def __init__(self, spec: BehaviorSpec, name: str) -> None:
        self._spec, self._name = spec, name
        self._row_bytes = row_bytes(spec)
        self._layouts: dict[int, _Layout] = {}
        self._left_out, self._pause = 0, 1
        self.n_recurring = 0

    def decode(self, message: UnityRLOutputProto.ListAgentInfoProto) -> Steps:
        """`decode_list` of a message, faster where an earlier one was like it.

        Raises:
            UnityObservationException: As `decode_list` does.
            UnitySpecificationException: Its agents take far more memory than was sent.
        """
        size = message.ByteSize()
        layout = self._layouts.get(size)
        if layout is not None:
            decision = layout.read(message.SerializeToString())
            if decision is not None:
                self.n_recurring += 1
                self._pause = 1
                return decision, TerminalSteps.empty(self._spec)
        n_bytes = len(message.value) * self._row_bytes
        if n_bytes > ROOM:  # it is not, nearly always
            refuse_excess(n_bytes, size, f"a message about the behavior {brief(self._name)}")
        steps = decode_list(message, self._spec, self._name)
        if size <= _LARGEST and not len(steps[1]):
            self._remember(message, size)
        return steps

    def _remember(self, message: UnityRLOutputProto.ListAgentInfoProto, size: int) -> None:
        """Less and less often where nothing recurs."""
        if self._left_out > 0:
            self._left_out -= 1
            return
        self._left_out, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        layout = _layout_of(message, self._spec)
        if layout is None:
            return
        self._layouts.pop(size, None)
        self._layouts[size] = layout
        if len(self._layouts) > _MOST:
            del self._layouts[next(iter(self._layouts))]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where N agents' numbers stand in a message, and what stands around them."""

    order: AnyArray
    """intp: every byte of the message once, those of the M numbers first."""
    n_numbers: int
    """M: rewards, group rewards, then every observation, each of all agents."""
    fixed: bytes
    """The bytes that are no numbers, in the order of `order`."""
    reward: AnyArray
    """[K] rows that have a reward; it is 0 in the others."""
    group_reward: AnyArray
    """[L] rows that have a group reward."""
    shapes: list[tuple[int, ...]]
    """[N, *shape] of each observation."""
    agent_id: IntArray
    group_id: IntArray
    masks: list[BoolArray] | None

    def read(self, data: bytes) -> DecisionSteps | None:
        """The agents of a message; None where it is another, or has numbers that are not finite."""
        table = np.frombuffer(data, dtype=np.uint8).take(self.order)
        end = 4 * self.n_numbers
        if table[end:].tobytes() != self.fixed:
            return None
        numbers = table[:end].view("<f4")
        # A sum of squares is the cheapest test; in full it is looked at what is not finite.
        if not math.isfinite(np.vdot(numbers, numbers)):
            return None
        obs, start = [], len(self.reward) + len(self.group_reward)
        for shape in self.shapes:
            stop = start + math.prod(shape)
            obs.append(numbers[start:stop].reshape(shape))
            start = stop
        k = len(self.reward)
        return DecisionSteps(
            obs,
            self._spread(numbers[:k], self.reward),
            self.agent_id.copy(),
            None if self.masks is None else [mask.copy() for mask in self.masks],
            self.group_id.copy(),
            self._spread(numbers[k : k + len(self.group_reward)], self.group_reward),
        )

    def _spread(self, values: FloatArray, rows: AnyArray) -> FloatArray:
        n = len(self.agent_id)
        if len(values) == n:
            return values
        out = np.zeros(n, dtype=np.float32)
        if len(values):
            out[rows] = values
        return out


def _layout_of(
    message: UnityRLOutputProto.ListAgentInfoProto, spec: BehaviorSpec
) -> _Layout | None:
    """What a message has in common with those that are like it; None if it is unusual itself."""
    if not message.value or not has_names(message.value[0], spec):
        return None
    if any(len(one.shape) == 3 and channels_last(one) for one in message.value[0].observations):
        return None
    data = message.SerializeToString()
    try:
        starts, ends = bounds(data, len(message.value))
        cursor = Cursor(data, starts)
        pattern = Pattern.of(message.value[0], [tuple(one.shape) for one in spec.observation_specs])
        reward, reward_at = cursor.numbers(REWARD)
        if cursor.flag(DONE).any() or cursor.flag(MAX_STEP).any():
            return None
        agent_id = cursor.varint(ID)
        flat_mask = cursor.mask(sum(spec.action_spec.discrete_branches))
        begin = cursor.at.copy()
        observations(data, cursor, pattern)
        group_id = cursor.varint(GROUP)
        group_reward, group_reward_at = cursor.numbers(GROUP_REWARD)
    except UnfitError:
        return None
    if (cursor.at != ends).any():
        return None
    obs_at = [
        begin[:, None] + (first + np.arange(4 * math.prod(shape)))
        for first, shape in zip(pattern.begins, pattern.shapes, strict=True)
    ]
    numbers_at = np.concatenate([at.ravel() for at in (reward_at, group_reward_at, *obs_at)])
    is_fixed = np.ones(len(data), dtype=np.bool_)
    is_fixed[numbers_at] = False
    fixed_at = np.flatnonzero(is_fixed)
    return _Layout(
        order=np.concatenate((numbers_at, fixed_at)),
        n_numbers=len(numbers_at) // 4,
        fixed=np.frombuffer(data, dtype=np.uint8)[fixed_at].tobytes(),
        reward=reward,
        group_reward=group_reward,
        shapes=[(len(starts), *shape) for shape in pattern.shapes],
        agent_id=agent_id,
        group_id=group_id,
        masks=branches(flat_mask, spec.action_spec) if spec.action_spec.discrete_branches else None,
    )
