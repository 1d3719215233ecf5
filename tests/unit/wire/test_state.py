import struct

import numpy as np
import pytest

from pipeline.core.simulator import no_state, restore, state_of
from pipeline.errors import UnitySideChannelException
from pipeline.wire.channels import state
from pipeline.wire.channels.state import StateMessageType


def test_state_of_arrays_and_plain_values_round_trips_through_bytes():
    rng = np.random.default_rng(7)
    document = {
        "stream": rng.bit_generator.state,
        "values": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
        "none": np.zeros((0, 4), dtype=np.bool_),
        "scalar": np.float32(0.1),
        "nested": [{"array": 1, "x": [1.5, None, True, "é"]}, (2, -3)],
    }
    decoded = state.decode(state.encode(document))
    assert decoded["stream"] == document["stream"]
    assert decoded["values"].dtype == np.float32
    assert decoded["values"].tolist() == [[0.0, 2.0], [3.0, 5.0]]
    decoded["values"][0] = 9.0
    assert decoded["none"].shape == (0, 4)
    assert isinstance(decoded["scalar"], np.float32)
    assert decoded["scalar"] == np.float32(0.1)
    assert decoded["nested"] == [{"array": 1, "x": [1.5, None, True, "é"]}, [2, -3]]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"a": {"b": [object()]}}, r"state\.a\.b\[0\]: a object"),
        ({"a": np.array([object()])}, "state.a: an array of type object"),
        ({1: 2}, "the key 1 is not a text"),
        ({"a": b"bytes"}, "state.a: a bytes"),
    ],
)
def test_error_for_a_value_that_is_neither_array_nor_json_says_where_the_value_is(given, what):
    with pytest.raises(ValueError, match=what):
        state.encode(given)


def test_damaged_state_raises_value_error_and_no_other_error():
    encoded = state.encode({"a": np.arange(5), "b": [1, {"c": 2.5}]})
    rng = np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(encoded)
        damaged[rng.integers(len(encoded))] = rng.integers(256)
        for data in (bytes(damaged), encoded[: rng.integers(len(encoded))], encoded + b"\0"):
            try:
                state.decode(data)
            except ValueError as error:
                assert "not an environment's state" in str(error)  # noqa: PT017  # not all damage is noticed


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("<f8", [2**40, 2**40]), ("<f8", [-1]), ("<f8", [2] * 40), ("|O", [1])],
)
def test_arrays_of_objects_or_wrong_sizes_are_refused_before_allocation(kind, shape):
    text = f'{{"map": {{"a": {{"array": ["{kind}", {shape}]}}}}}}'.encode()
    with pytest.raises(ValueError, match="not an environment's state"):
        state.decode(struct.pack("<q", len(text)) + text + bytes(8))


def test_state_messages_of_an_unknown_version_or_a_wrong_size_are_refused(monkeypatch):
    for content in (b"abc", b""):
        assert state.read(state.message(StateMessageType.STATE, content)) == (
            StateMessageType.STATE,
            content,
        )
    for payload in (b"", b"1234567", struct.pack("<ii", 2, 1), struct.pack("<ii", 1, 4)):
        with pytest.raises(UnitySideChannelException, match="state channel"):
            state.read(payload)
    monkeypatch.setattr(state, "MAX_STATE_BYTES", 2)
    with pytest.raises(UnitySideChannelException, match="at most 2"):
        state.read(struct.pack("<ii", 1, 1) + b"abc")
    with pytest.raises(ValueError, match="at most 2"):
        state.message(StateMessageType.STATE, b"abc")


class Counter:
    """A simulator with a count, without methods that save and load it."""

    count = 3


class Ours(Counter):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Usual(Counter):
    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


class Both(Ours, Usual):
    def get_state(self):
        raise AssertionError

    set_state = get_state


@pytest.mark.parametrize(
    ("kind", "given"), [(Ours, {"count": 3}), (Usual, {"state": 3}), (Both, {"count": 3})]
)
def test_simulator_state_is_saved_and_restored_by_state_dict_or_by_get_state_methods(kind, given):
    source, target = kind(), kind()
    target.count = 0
    assert state_of(source) == given
    restore(target, state_of(source))
    assert target.count == 3
    assert state_of(Counter()) is None
    with pytest.raises(ValueError, match="Counter does not give its state") as refused:
        restore(Counter(), {"state": 3})
    assert str(refused.value) == no_state(Counter())
