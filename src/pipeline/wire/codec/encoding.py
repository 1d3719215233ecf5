"""Encodes arrays as messages: agents' steps, and announcements of behaviors."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray
from pipeline.core.specs import BehaviorSpec, ObservationSpec, scales_of
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.wire.codec import records
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.png import encode_png

_NO_ID = records.wide_varints(np.zeros(1, np.int64), records.ID_WIDTH).tobytes()


def encode_steps(
    decision: DecisionSteps, terminal: TerminalSteps, spec: BehaviorSpec
) -> m.UnityRLOutputProto.ListAgentInfoProto:
    """Return one AgentInfoProto per agent, terminal steps first, as Unity sends them."""
    return m.UnityRLOutputProto.ListAgentInfoProto.FromString(steps_bytes(decision, terminal, spec))


def steps_bytes(decision: DecisionSteps, terminal: TerminalSteps, spec: BehaviorSpec) -> bytes:
    """Return the message that `encode_steps` returns, serialized."""
    ended = infos_bytes(terminal, spec, done=np.True_, interrupted=terminal.interrupted)
    return ended + infos_bytes(decision, spec, action_mask=decision.action_mask)


def compressed_steps_bytes(
    decision: DecisionSteps, terminal: TerminalSteps, spec: BehaviorSpec, max_channels: int
) -> bytes:
    """Return the bytes of `steps_bytes`, with images of up to `max_channels` channels as PNGs."""
    message = encode_steps(decision, terminal, spec)
    for index, obs_spec in enumerate(spec.observation_specs):
        if len(obs_spec.shape) != 3 or obs_spec.shape[0] > max_channels:
            continue
        images = chain(terminal.obs[index], decision.obs[index])
        for info, image in zip(message.value, images, strict=True):
            info.observations[index].compression_type = m.PNG
            # Numbers and PNG share a protobuf `oneof`, so setting the PNG removes the numbers.
            info.observations[index].compressed_data = encode_png(image)
    return message.SerializeToString()


@lru_cache(maxsize=256)
def _info_layout(specs: tuple[ObservationSpec, ...], mask_size: int) -> tuple[AnyArray, list[int]]:
    """Return the bytes of an entry of ListAgentInfoProto, and the offsets of its values.

    The values are reward, done, max_step_reached, id, mask, each observation, group_id and
    group_reward, in the order of their field numbers.
    """
    observations = [records.observation_template(spec) for spec in specs]
    # A tag is the field's number and its wire type: 0x3d is 7 << 3 | 5
    # (https://protobuf.dev/programming-guides/encoding/#structure). Ids are varints of a fixed
    # width, so that all entries have the same length.
    first = [(b"\x3d", bytes(4)), (b"\x40", bytes(1)), (b"\x48", bytes(1)), (b"\x50", _NO_ID)]
    parts = [
        (records.head(13, len(template)) + template[:start], template[start:])
        for template, start in observations
    ]
    last = [(b"\x70", _NO_ID), (b"\x7d", bytes(4))]
    return records.entry([*first, records.part(11, bytes(mask_size)), *parts, *last])


def infos_bytes(
    steps: DecisionSteps | TerminalSteps,
    spec: BehaviorSpec,
    *,
    done: BoolArray | np.bool_ = np.False_,
    interrupted: BoolArray | np.bool_ = np.False_,
    action_mask: Sequence[BoolArray] | None = None,
) -> bytes:
    """Return a serialized ListAgentInfoProto of N agents; raise ValueError for a wrong shape.

    `done` and `interrupted` are bool [N] or one value for all agents.
    """
    n = len(steps)
    if not n:
        return b""
    mask = np.concatenate(action_mask, axis=1, dtype=np.bool_) if action_mask else None
    specs = tuple(spec.observation_specs)
    template, starts = _info_layout(specs, 0 if mask is None else mask.shape[1])
    reward_at, done_at, interrupted_at, id_at, mask_at, *obs_at, group_at, group_reward_at = starts
    # The agents' entries differ only in their values, so the template is copied into every row,
    # and the values are written over it.
    table = np.empty((n, len(template)), dtype=np.uint8)
    table[:] = template
    _set_columns(table, reward_at, records.float_bytes(steps.reward))
    table[:, done_at] = done
    table[:, interrupted_at] = interrupted
    # The ids are passed as bytes, because an array cannot be a key of the cache of `_ids`.
    _set_columns(table, id_at, _ids(steps.agent_id.tobytes(), steps.agent_id.dtype))
    if mask is not None:
        _set_columns(table, mask_at, mask.view(np.uint8))
    for start, values, obs_spec in zip(obs_at, steps.obs, specs, strict=True):
        if values.shape != (n, *obs_spec.shape):
            raise ValueError(
                f"observation {obs_spec.name!r} of {n} agents has the shape {values.shape}; "
                f"it must be {(n, *obs_spec.shape)}"
            )
        _set_columns(table, start, records.float_bytes(values))
    _set_columns(table, group_at, _ids(steps.group_id.tobytes(), steps.group_id.dtype))
    _set_columns(table, group_reward_at, records.float_bytes(steps.group_reward))
    return table.tobytes()


@lru_cache(maxsize=256)
def _ids(data: bytes, dtype: np.dtype[np.int32]) -> AnyArray:
    """Return ids as varints, uint8 [N, ID_WIDTH]; cached, because agents occur in each step."""
    return records.wide_varints(np.frombuffer(data, dtype), records.ID_WIDTH)


def _set_columns(table: AnyArray, start: int, columns: AnyArray) -> None:
    table[:, start : start + columns.shape[1]] = columns


def brain_parameters(
    name: str, spec: BehaviorSpec, *, old_fields: bool = False
) -> m.BrainParametersProto:
    """Return the announcement of a behavior; `old_fields` adds the fields of API 1.2."""
    action = spec.action_spec
    # `is_training` is True in announcements; `writing_demo` sets it to False, as recorders do.
    out = m.BrainParametersProto(brain_name=name, is_training=True)
    out.action_spec.num_continuous_actions = action.continuous_size
    out.action_spec.num_discrete_actions = action.discrete_size
    out.action_spec.discrete_branch_sizes.extend(action.discrete_branches)
    # Demonstrations have the old fields. They get no descriptions of their actions, so that equal
    # steps give the bytes that earlier versions of this package wrote.
    out.action_spec.action_descriptions.extend(() if old_fields else scales_of(spec))
    if old_fields:
        # The old fields can describe one kind of actions only.
        kind = m.discrete if action.is_discrete() else m.continuous
        sizes = action.discrete_branches if action.is_discrete() else [action.continuous_size]
        out.vector_action_size_deprecated.extend(sizes)
        out.vector_action_space_type_deprecated = kind
    return out
