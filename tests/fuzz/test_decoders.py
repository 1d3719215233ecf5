"""The decoders of messages about a behavior, compared with each other.

`decode_steps` reads any message agent by agent, `read_fields` all agents field by field, and
`Decoder` messages with the layout of an earlier message. All must give the same arrays or errors.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing.frame import TALLY, fuzz, note_refusal
from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from wire_messages import decode_steps

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.errors import PipelineError
from pipeline.wire.codec.actions import actions_bytes, decode_actions, decode_entries
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.layout_cache import Decoder, read_fields

from .agents import ACTIONS, SPECS, message_of, spoil_agent
from .mutations import messages, mutated


@st.composite
def _conversations(draw: Any) -> tuple[BehaviorSpec, list[bytes]]:
    """Return a behavior, and its messages: most similar to the previous message, some faulty."""
    spec = draw(SPECS)
    n, n_ended = draw(st.integers(0, 4)), draw(st.sampled_from((0, 0, 0, 1, 2)))
    seed = 4 * draw(st.integers(0, 999))
    out = []
    for _ in range(draw(st.integers(1, 4))):
        message = message_of(draw, spec, n, n_ended, seed + draw(st.integers(0, 3)))
        for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2, 4)))):
            if message.value:
                info = message.value[draw(st.integers(0, len(message.value) - 1))]
                spoil_agent(draw, info)
        data = message.SerializeToString()
        out.append(draw(mutated(st.just(data), most=2)) if draw(st.booleans()) else data)
    return spec, out


def _arrays(steps: Any) -> list[Any]:
    decision, terminal = steps
    arrays = [*decision.obs, *(decision.action_mask or ()), *terminal.obs, terminal.interrupted]
    for part in steps:
        arrays += [part.reward, part.agent_id, part.group_id, part.group_reward]
    return arrays


def _outcome(read: Any, arrays: Any = _arrays) -> Any:
    """Return a reader's arrays, or the type and the message of its refusal."""
    try:
        return arrays(read())
    except PipelineError as error:
        note_refusal(error)
        return type(error).__name__, re.sub(
            "0x[0-9a-f]+", "", str(error)
        )  # without the addresses in Pillow's errors


def _assert_same(left: Any, right: Any) -> None:
    if isinstance(left, tuple) or isinstance(right, tuple):
        assert left == right
        return
    assert [(array.dtype, array.shape) for array in left] == [
        (array.dtype, array.shape) for array in right
    ]
    for first, second in zip(left, right, strict=True):
        assert first.tobytes() == second.tobytes()
        assert first.flags.writeable


def _read_together(data: bytes, spec: BehaviorSpec) -> Any:
    """Read few agents with `read_fields`, which is for many agents; None if it cannot."""
    fields = read_fields(data, spec, lambda *_: None)
    TALLY.outcomes["read together"] += fields is not None
    return None if fields is None else _outcome(lambda: fields.steps(spec, "b"))


@fuzz(_conversations(), examples=300)
def test_all_decoders_give_the_same_arrays_or_errors(
    example: tuple[BehaviorSpec, list[bytes]], folder: Path
) -> object:
    spec, lists = example
    decoder = Decoder(spec, "b")
    accepted = 0
    for data in lists:
        message = m.UnityRLOutputProto.ListAgentInfoProto()
        try:
            message.ParseFromString(data)
        except DecodeError:
            assert isinstance(_outcome(lambda data=data: decoder.decode(data)), tuple)
            continue
        general = _outcome(lambda message=message: decode_steps(message.value, spec, "b"))
        together = _read_together(data, spec)
        if together is not None:
            _assert_same(together, general)
        for _ in range(2):  # the second time, the first message's layout may be stored
            _assert_same(_outcome(lambda data=data: decoder.decode(data)), general)
        accepted += isinstance(general, list)
    TALLY.outcomes["read as recurring"] += decoder.n_cached
    return accepted > 0


@st.composite
def _actions(draw: Any) -> tuple[ActionSpec, bytes]:
    spec = draw(ACTIONS)
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


@fuzz(_actions(), examples=200)
def test_both_decoders_give_equal_actions_or_errors_for_random_messages(
    example: tuple[ActionSpec, bytes], folder: Path
) -> object:
    spec, data = example
    message = m.UnityRLInputProto.ListAgentActionProto()
    try:
        message.ParseFromString(data)
    except DecodeError:
        assert isinstance(_outcome(lambda: decode_actions(data, spec)), tuple)
        return False

    def arrays(actions: ActionTuple) -> list[Any]:
        return [actions.continuous, actions.discrete]

    fast = _outcome(lambda: decode_actions(data, spec), arrays)
    slow = _outcome(lambda: decode_entries(message.value, spec), arrays)
    _assert_same(fast, slow)
    return isinstance(fast, list)
