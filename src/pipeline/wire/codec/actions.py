"""Actions in messages: the trainer writes them, and a simulator reads them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import AnyArray
from pipeline.core.specs import ActionSpec, ActionTuple
from pipeline.errors import UnityActionException
from pipeline.wire.codec import records
from pipeline.wire.codec.generated.messages import AgentActionProto, UnityRLInputProto


def actions_bytes(actions: ActionTuple, spec: ActionSpec) -> bytes:
    """Return a serialized ListAgentActionProto, with the actions in the deprecated field, too."""
    continuous, n_branches = actions.continuous, len(spec.discrete_branches)
    n = len(continuous)
    if n == 0:
        return b""
    # All choices are written with as many bytes as the largest one needs, so that all entries have
    # the same length. A varint may be padded
    # (https://protobuf.dev/programming-guides/encoding/#varints).
    width = 1 if not n_branches else records.width_of(actions.discrete)
    layout = action_layout(spec.continuous_size, n_branches, width)
    table = np.empty((n, len(layout.template)), dtype=np.uint8)
    table[:] = layout.template
    c, d = 4 * spec.continuous_size, 4 * n_branches
    if c:
        floats = records.float_bytes(continuous)
        table[:, layout.old : layout.old + c] = floats
        table[:, layout.continuous : layout.continuous + c] = floats
    if d:
        # The deprecated field has the continuous actions and then the choices, all as floats.
        table[:, layout.old + c : layout.old + c + d] = records.float_bytes(actions.discrete)
        varints = records.wide_varints(actions.discrete, width).reshape(n, -1)
        table[:, layout.discrete : layout.discrete + varints.shape[1]] = varints
    return table.tobytes()


class ActionLayout(NamedTuple):
    """An entry of ListAgentActionProto: its constant bytes, and the offsets of its numbers."""

    # uint8 [width] bytes of the entry with zero actions.
    template: AnyArray
    # uint8 [width] with ones at the bits that are the same in every entry.
    fixed: AnyArray
    # Offsets in bytes of the deprecated field, the continuous and the discrete actions.
    old: int
    continuous: int
    discrete: int


@lru_cache(maxsize=256)
def action_layout(n_continuous: int, n_discrete: int, width: int) -> ActionLayout:
    """Return the layout of entries with these numbers of actions, `width` bytes per choice."""
    zeros = records.wide_varints(np.zeros(n_discrete, np.int64), width).tobytes()
    numbers, floats = bytes(4 * (n_continuous + n_discrete)), bytes(4 * n_continuous)
    template, (old, first, second) = records.entry(
        [records.part(1, numbers), records.part(6, floats), records.part(7, zeros)]
    )
    fixed = np.full(len(template), 0xFF, dtype=np.uint8)
    fixed[old : old + len(numbers)] = 0
    fixed[first : first + len(floats)] = 0
    # The highest bit of each byte of a choice is the same in every entry: it says whether another
    # byte of the choice follows.
    fixed[second:] = 0x80
    return ActionLayout(template, fixed, old, first, second)


def decode_actions(data: bytes, spec: ActionSpec) -> ActionTuple:
    """Return the actions of all agents in a serialized ListAgentActionProto, in order.

    Raises:
        UnityActionException: An agent has another number of actions than `spec`.
        UnityCommunicationException: The bytes are not a ListAgentActionProto.
    """
    # Our trainer writes choices below 128 in this layout. All other messages are parsed.
    layout = action_layout(spec.continuous_size, spec.discrete_size, 1)
    n, rest = divmod(len(data), len(layout.template))
    if n and not rest:
        table = np.frombuffer(data, dtype=np.uint8).reshape(n, len(layout.template))
        if not (table & layout.fixed != layout.template).any():
            return ActionTuple(
                records.float_rows(table, layout.continuous, (spec.continuous_size,)),
                table[:, layout.discrete : layout.discrete + spec.discrete_size].astype(np.int32),
            )
    entries = records.parse(UnityRLInputProto.ListAgentActionProto, data, "trainer").value
    return decode_entries(entries, spec)


def decode_entries(
    entries: Sequence[AgentActionProto], spec: ActionSpec, *, absent_is_zero: bool = False
) -> ActionTuple:
    """Return the actions of all `entries`; `absent_is_zero` allows entries without actions.

    Raises:
        UnityActionException: An entry has another number of actions than `spec`, or a choice is no
            int32.
    """
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
        # The deprecated field holds choices as floats, which may be NaN or 1e30.
        if not (np.abs(choices) < 2**31).all():
            raise UnityActionException(
                f"agent number {row} got the discrete actions {list(choices)}; each must be a "
                "choice of its branch"
            )
        out.discrete[row] = choices
    return out
