"""The three ways to read a message about a behavior, against each other.

`decode_steps` reads any message, agent by agent; `decode_list` reads many agents at once, and the
`Decoder` messages that are like an earlier one. All must give the same arrays, or refuse alike.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.protocol import bulk, decoding
from pipeline.protocol.codec import (
    Decoder,
    actions_bytes,
    decode_actions,
    decode_steps,
    encode_steps,
)
from pipeline.protocol.generated import messages as m
from pipeline.protocol.png import encode_png
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

from .frame import TALLY, fuzz, note_refusal
from .mutations import messages, mutated

_OBSERVATIONS = st.sampled_from(
    (
        ObservationSpec.vector(1),
        ObservationSpec.vector(5, "eye"),
        ObservationSpec.visual(3, 2, 2, "camera"),
        ObservationSpec.visual(1, 3, 2),
        ObservationSpec.entities(3, 2, "others"),
        ObservationSpec.vector(0, "none"),
    )
)
_ACTIONS = st.sampled_from(
    (ActionSpec(2, ()), ActionSpec(0, (2, 130)), ActionSpec(1, (3,)), ActionSpec(0, (1,)))
)
_SPECS = st.builds(BehaviorSpec, st.lists(_OBSERVATIONS, max_size=3), _ACTIONS)
_NUMBERS = st.sampled_from((0.0, -0.0, 1.5, 3e38, 1e-45, np.nan, np.inf))


def _steps(spec: BehaviorSpec, n: int, n_ended: int, seed: int) -> tuple[Any, Any]:
    """Agents with ids and masks that `seed // 4` chooses, and numbers that all of it chooses."""
    fixed, numbers = np.random.default_rng(seed // 4), np.random.default_rng(seed)

    def floats(*shape: int) -> Any:
        return numbers.normal(size=shape).astype(np.float32)

    def ids(count: int) -> Any:
        return fixed.choice([0, 1, 127, 128, -1, 2**31 - 1, -(2**31)], count).astype(np.int32)

    def parts(count: int) -> tuple[Any, ...]:
        obs = [floats(count, *one.shape) for one in spec.observation_specs]
        return obs, floats(count) * (fixed.random(count) < 0.7), ids(count)

    branches = spec.action_spec.discrete_branches
    mask = [fixed.random((n, size)) < 0.5 for size in branches] if branches and n else None
    obs, reward, agent_id = parts(n)
    decision = DecisionSteps(obs, reward, agent_id, mask, ids(n), floats(n))
    obs, reward, agent_id = parts(n_ended)
    interrupted = fixed.random(n_ended) < 0.5
    return decision, TerminalSteps(
        obs, reward, interrupted, agent_id, ids(n_ended), floats(n_ended)
    )


def _spoil_agent(draw: Any, info: Any) -> None:
    """Change something about one agent."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        info.reward = draw(_NUMBERS)
    elif kind == 1:
        info.group_reward = draw(_NUMBERS)
    elif kind == 2:
        info.done = not info.done
    elif kind == 3:
        info.max_step_reached = not info.max_step_reached
    elif kind == 4:
        info.id = draw(st.integers(-(2**31), 2**31 - 1))
    elif kind == 5:
        del info.action_mask[:]
        info.action_mask.extend(draw(st.lists(st.booleans(), max_size=140)))
    elif kind == 6:
        info.MergeFromString(draw(st.sampled_from((b"\xc0\x3e\x01", b"\x0a\x00", b"\x5a\x01\x02"))))
    else:
        info.MergeFrom(draw(messages(m.AgentInfoProto, likely=0.3)))


def _spoil_description(draw: Any, info: Any) -> None:
    """Change how one observation is described, or the number of observations."""
    obs = _any_observation(draw, info)
    kind = draw(st.integers(0, 5))
    if kind == 0:
        obs.name = draw(st.sampled_from(("", "eye", "another", "é" * 40)))
    elif kind == 1:
        del obs.shape[draw(st.integers(0, len(obs.shape))) :]
        obs.shape.extend(draw(st.lists(st.sampled_from((0, 1, 2, 5, -1, 2**31 - 1)), max_size=3)))
    elif kind == 2:
        del obs.dimension_properties[:]
        obs.dimension_properties.extend(draw(st.lists(st.integers(-1, 9), max_size=4)))
    elif kind == 3:
        obs.observation_type = draw(st.integers(0, 3))
    elif kind == 4:
        del info.observations[-1]
    else:
        info.observations.add().CopyFrom(obs)


def _spoil_content(draw: Any, info: Any) -> None:
    """Change the numbers or the image of one observation."""
    obs = _any_observation(draw, info)
    kind = draw(st.integers(0, 3))
    if kind == 0 and obs.float_data.data:
        at = draw(st.integers(0, len(obs.float_data.data) - 1))
        obs.float_data.data[at] = draw(_NUMBERS)
    elif kind == 1:
        obs.float_data.data.append(1.0)
    elif kind == 2:
        obs.compression_type = m.PNG
        shape = tuple(draw(st.sampled_from(((3, 2, 2), (1, 3, 2), (4, 2, 2)))))
        obs.compressed_data = draw(mutated(st.just(encode_png(np.ones(shape, np.float32)))))
    else:
        obs.compressed_channel_mapping.extend(draw(st.lists(st.integers(-2, 4), max_size=4)))


def _any_observation(draw: Any, info: Any) -> Any:
    if not info.observations:
        info.observations.add(shape=[1])
    return info.observations[draw(st.integers(0, len(info.observations) - 1))]


_SPOILS = (_spoil_agent, _spoil_agent, _spoil_description, _spoil_content)


@st.composite
def _conversations(draw: Any) -> tuple[BehaviorSpec, list[bytes]]:
    """A behavior, and lists of agent infos about it: most like the one before, some spoiled."""
    spec = draw(_SPECS)
    n, n_ended = draw(st.integers(0, 4)), draw(st.sampled_from((0, 0, 0, 1, 2)))
    seed = 4 * draw(st.integers(0, 999))
    out = []
    for _ in range(draw(st.integers(1, 4))):
        steps = _steps(spec, n, n_ended, seed + draw(st.integers(0, 3)))
        message = encode_steps(*steps, spec)
        for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2, 4)))):
            if message.value:
                info = message.value[draw(st.integers(0, len(message.value) - 1))]
                draw(st.sampled_from(_SPOILS))(draw, info)
        data = message.SerializeToString()
        out.append(draw(mutated(st.just(data), most=2)) if draw(st.booleans()) else data)
    return spec, out


def _arrays(steps: Any) -> list[Any]:
    decision, terminal = steps
    arrays = [*decision.obs, *(decision.action_mask or ()), *terminal.obs, terminal.interrupted]
    for one in steps:
        arrays += [one.reward, one.agent_id, one.group_id, one.group_reward]
    return arrays


def _outcome(read: Any, arrays: Any = _arrays) -> Any:
    """What a reader gives: arrays, or the kind and the words of its refusal."""
    try:
        return arrays(read())
    except PipelineError as error:
        note_refusal(error)
        return type(error).__name__, re.sub("0x[0-9a-f]+", "", str(error))  # Pillow's addresses


def _assert_same(left: Any, right: Any) -> None:
    if isinstance(left, tuple) or isinstance(right, tuple):
        assert left == right
        return
    assert [(one.dtype, one.shape) for one in left] == [(one.dtype, one.shape) for one in right]
    for one, two in zip(left, right, strict=True):
        assert one.tobytes() == two.tobytes()
        assert one.flags.writeable


def _read_together(message: Any, spec: BehaviorSpec) -> Any:
    """`decode_list` of so few agents as if they were many."""
    steps = bulk._decode_many(message, spec, "b")
    TALLY.outcomes["read together"] += steps is not None
    return decode_steps(message.value, spec, "b") if steps is None else steps


@fuzz(_conversations(), examples=300, size=lambda example: sum(map(len, example[1])))
def test_decoders_agree(example: tuple[BehaviorSpec, list[bytes]], folder: Path) -> object:
    spec, lists = example
    decoder = Decoder(spec, "b")
    accepted = 0
    for data in lists:
        message = m.UnityRLOutputProto.ListAgentInfoProto()
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        infos = message.value
        general = _outcome(lambda infos=infos: decode_steps(infos, spec, "b"))
        if len(infos):
            _assert_same(_outcome(lambda message=message: _read_together(message, spec)), general)
        for _ in range(2):  # the second time, it may be like the first
            _assert_same(_outcome(lambda message=message: decoder.decode(message)), general)
        accepted += isinstance(general, list)
    TALLY.outcomes["read as recurring"] += decoder.n_recurring
    return accepted > 0


@st.composite
def _actions(draw: Any) -> tuple[ActionSpec, bytes]:
    spec = draw(_ACTIONS)
    n = draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tuples = ActionTuple(
        rng.normal(size=(n, spec.continuous_size)), rng.integers(0, 200, (n, spec.discrete_size))
    )
    data = actions_bytes(tuples, spec)
    for _ in range(draw(st.integers(0, 1))):
        data += m.UnityRLInputProto.ListAgentActionProto(
            value=[draw(messages(m.AgentActionProto))]
        ).SerializeToString()
    return spec, draw(mutated(st.just(data)))


@fuzz(_actions(), examples=200, size=lambda example: len(example[1]))
def test_actions_are_read_or_refused(example: tuple[ActionSpec, bytes], folder: Path) -> object:
    spec, data = example
    message = m.UnityRLInputProto.ListAgentActionProto()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return False

    def arrays(actions: ActionTuple) -> list[Any]:
        return [actions.continuous, actions.discrete]

    fast = _outcome(lambda: decode_actions(message, spec), arrays)
    slow = _outcome(lambda: decoding._decode_actions_slowly(message.value, spec, False), arrays)
    _assert_same(fast, slow)
    return isinstance(fast, list)
