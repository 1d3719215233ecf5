"""The fast decoder: messages that differ from an earlier one in nothing but their numbers.

Most messages about a behavior are like that: the same agents, none of whose episodes has ended,
observe again. Their numbers stand at the same places as in the earlier message, so one gather reads
them all, and the other bytes only have to be the same. A message that has no known layout is read
field by field if it has many agents (`vectorized`), else agent by agent (`decoding`).

`python benchmarks/decoding.py` measures what each way costs; docs/reference/protocol.md has the
figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.errors import UnitySpecificationException, brief
from pipeline.protocol import vectorized, wire
from pipeline.protocol.decoding import decode_steps
from pipeline.protocol.generated.messages import ReceivedAgentInfosProto
from pipeline.protocol.specs import FREE_BYTES, MAX_AGENTS, BehaviorSpec, refuse_excess, row_bytes
from pipeline.protocol.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.protocol.vectorized import Fields

_MAX_CACHED_BYTES = 1 << 17
"""Longest message whose layout is kept; a layout takes eight times as many bytes."""
_MAX_LAYOUTS = 8
_MAX_PAUSE = 1024
"""Messages for which no layout is kept after one that never matched; doubled up to this number."""


class Decoder:
    """Decodes the messages about one behavior, one after another.

    Attributes:
        n_cached: messages that had the layout of an earlier one.
    """

    def __init__(self, spec: BehaviorSpec, name: str) -> None:
        self._spec, self._name = spec, name
        self._row_bytes = row_bytes(spec)
        self._layouts: dict[int, _Layout] = {}  # by the length of the message
        self._left_out, self._pause = 0, 1
        self.n_cached = 0

    def decode(self, data: bytes) -> Steps:
        """Return the steps in a serialized ListAgentInfoProto.

        Raises:
            UnityObservationException: As `decode_steps` does.
            UnitySpecificationException: Its agents take far more memory than was sent.
            UnityCommunicationException: The bytes are no such message.
        """
        # Messages of one layout have one length: looking it up costs less than trying each layout.
        layout = self._layouts.get(len(data))
        if layout is not None:
            decision = layout.read(data)
            if decision is not None:
                self.n_cached += 1
                self._pause = 1
                return decision, TerminalSteps.empty(self._spec)
        fields = self._read_fields(data) if vectorized.seems_many(data) else None
        if fields is None:
            infos = wire.parse(ReceivedAgentInfosProto, data).value
            self._check_memory(len(infos), len(data))
            steps = decode_steps(infos, self._spec, self._name)
        else:
            steps = fields.steps(self._spec, self._name)
        # An ended episode changes the agents, so that a message with one is seldom met again.
        if len(data) <= _MAX_CACHED_BYTES and not len(steps[1]) and self._is_layout_due():
            self._keep_layout(fields or self._read_fields(data), len(data))
        return steps

    def _read_fields(self, data: bytes) -> Fields | None:
        return vectorized.read_fields(data, self._spec, self._check_memory)

    def _check_memory(self, n_agents: int, n_sent: int) -> None:
        if n_agents > MAX_AGENTS:
            raise UnitySpecificationException(
                f"a message has {n_agents} agents of the behavior {brief(self._name)}, at most "
                f"{MAX_AGENTS} are possible: divide them among several environments"
            )
        n_bytes = n_agents * self._row_bytes
        if n_bytes > FREE_BYTES:  # it is not, nearly always
            refuse_excess(n_bytes, n_sent, f"a message about the behavior {brief(self._name)}")

    def _is_layout_due(self) -> bool:
        """Return whether to keep a layout: less and less often where none is met again."""
        if self._left_out > 0:
            self._left_out -= 1
            return False
        self._left_out, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        return True

    def _keep_layout(self, fields: Fields | None, n_bytes: int) -> None:
        layout = None if fields is None else _layout_of(fields, n_bytes)
        if layout is None:
            return
        # Removed first, so that the new layout stands last and is not the next one to be dropped.
        self._layouts.pop(n_bytes, None)
        self._layouts[n_bytes] = layout
        if len(self._layouts) > _MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]  # the oldest


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
        """Return the agents of a message; None if it is another, or has numbers not finite."""
        table = np.frombuffer(data, dtype=np.uint8).take(self.order)
        end = 4 * self.n_numbers
        if table[end:].tobytes() != self.fixed:
            return None
        # `take` has made a copy: callers may change what they get, and the message is freed.
        numbers = table[:end].view("<f4")
        # The sum of squares is the cheapest test. It may overflow: then the full way decides.
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


def _layout_of(fields: Fields, n_bytes: int) -> _Layout | None:
    """Return the layout of a message of `n_bytes`; None if it is seldom met again."""
    infos, pattern = fields.infos, fields.pattern
    if infos.done.any() or infos.max_step_reached.any():
        return None
    obs_at = [
        fields.obs_at[:, None] + (begin + np.arange(4 * math.prod(shape)))
        for begin, shape in zip(pattern.begins, pattern.shapes, strict=True)
    ]
    numbers_at = np.concatenate(
        [at.ravel() for at in (fields.reward[1], fields.group_reward[1], *obs_at)]
    )
    is_fixed = np.ones(n_bytes, dtype=np.bool_)
    is_fixed[numbers_at] = False
    fixed_at = np.flatnonzero(is_fixed)
    return _Layout(
        order=np.concatenate((numbers_at, fixed_at)),
        n_numbers=len(numbers_at) // 4,
        fixed=fields.data[fixed_at].tobytes(),
        reward=fields.reward[0],
        group_reward=fields.group_reward[0],
        shapes=[(len(infos.reward), *shape) for shape in pattern.shapes],
        agent_id=infos.agent_id.copy(),
        group_id=infos.group_id.copy(),
        masks=None if fields.masks is None else [mask.copy() for mask in fields.masks],
    )
