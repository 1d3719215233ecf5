"""Random bytes and protobuf messages that are similar to accepted input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from hypothesis.strategies import SearchStrategy

_TELLING_BYTES = [0x00, 0x01, 0x0A, 0x20, 0x2F, 0x5C, 0x7F, 0x80, 0xC0, 0xFE, 0xFF]
_TELLING_RUNS = [
    b"\xff\xff\xff\xff\x0f",  # varints: the largest with 32 and 31 bits, and -1
    b"\xff\xff\xff\xff\x07",
    b"\xff" * 9 + b"\x01",
    b"\x00" * 8,
    b"\xff\xff\xff\x7f",  # 2**31 - 1, little and big endian
    b"\x7f\xff\xff\xff",
    b"\x00\x00\x80\x7f",  # float32: infinity and NaN
    b"\x00\x00\xc0\x7f",
    b"../",
]


@st.composite
def mutated(draw: Any, contents: SearchStrategy[bytes], *, most: int = 4, begin: int = 0) -> bytes:
    """Draw from `contents`; half of the draws get up to `most` changes after byte `begin`."""
    data = bytearray(draw(contents))
    for _ in range(draw(st.integers(-most, most))):
        at = draw(st.integers(begin, max(begin, len(data))))
        count = draw(st.sampled_from((1, 1, 1, 2, 4, 16, 64)))
        kind = draw(st.integers(0, 6))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            data[at : at + 1] = bytes([draw(st.sampled_from(_TELLING_BYTES))])
        elif kind == 2:
            run = draw(st.sampled_from(_TELLING_RUNS))
            data[at : at + (len(run) if draw(st.booleans()) else 0)] = run
        elif kind == 3:
            del data[at : at + count]
        elif kind == 4:
            data[at:at] = data[at : at + count]
        elif kind == 5:
            data[at:at] = draw(st.binary(max_size=8))
        elif kind == 6:
            del data[at:]
    return bytes(data)


def seldom(draw: Any, of: int = 4) -> bool:
    """Return True in one of `of` + 1 draws."""
    return draw(st.integers(0, of)) == of


@st.composite
def usually(draw: Any, common: SearchStrategy[Any], rare: SearchStrategy[Any], of: int = 8) -> Any:
    """Draw `rare` in one of `of` draws, else `common`; `one_of` cannot weight its strategies."""
    return draw(rare if draw(st.integers(1, of)) == of else common)


_INTEGERS = st.one_of(
    st.integers(0, 4), st.integers(-(2**31), 2**31 - 1), st.sampled_from((-1, 2**31 - 1, -(2**31)))
)
_FLOATS = st.one_of(
    st.sampled_from((0.0, 1.0, float("nan"), float("inf"), 3e38)),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
NAMES = st.one_of(
    st.sampled_from(
        ("", "a", "Ball?team=0", "../up", "a/b", "/abs", "a\0b", ".", "..", "CON", "é")
    ),
    st.text(max_size=8),
    st.sampled_from(("x" * 300, "\u202e", "\n", "a\r\nb", " ", "-")),
)
_VALUES = {
    FieldDescriptor.TYPE_INT32: _INTEGERS,
    FieldDescriptor.TYPE_INT64: _INTEGERS,
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: NAMES,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=24),
    FieldDescriptor.TYPE_ENUM: st.sampled_from((0, 1, 2, 77)),
}


@st.composite
def messages(draw: Any, kind: type[Message], *, likely: float = 0.7) -> Message:
    """Return a message with random values in random fields."""
    message = kind()
    _fill(draw, message, int(10 * likely))
    return message


def _fill(draw: Any, message: Any, likely: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if draw(st.integers(0, 9)) >= likely:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(draw(st.integers(0, 2))):
                _fill(draw, value[draw(NAMES)], likely)
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                _fill(draw, value.add(), likely)
        elif field.message_type is not None:
            value.SetInParent()
            _fill(draw, value, likely)
        elif field.is_repeated:
            value.extend(draw(st.lists(_VALUES[field.type], max_size=4)))
        else:
            setattr(message, field.name, draw(_VALUES[field.type]))


def spoil(draw: Any, message: Any, values: dict[str, Any], deep: int = 2) -> None:
    """Change one field of a message, or of a message in it: set, add, remove or clear a value.

    Args:
        draw: Hypothesis' function that draws from a strategy.
        message: message that is changed.
        values: strategies of fields by name; other fields get any value of their type.
        deep: greatest depth of the changed field's message in `message`.
    """
    field = draw(st.sampled_from(tuple(message.DESCRIPTOR.fields)))
    value = getattr(message, field.name)
    is_list = field.is_repeated
    if draw(st.integers(0, 5)) == 0:
        message.ClearField(field.name)
    elif is_list and len(value) and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        if field.message_type is not None and deep and draw(st.booleans()):
            spoil(draw, value[at], values, deep - 1)
        elif field.message_type is not None and draw(st.booleans()):
            value.add().CopyFrom(value[at])
        elif field.message_type is None and draw(st.booleans()):
            value[at] = draw(values.get(field.name) or _VALUES[field.type])
        else:
            del value[at]
    elif field.message_type is not None:
        spoil(draw, value.add() if is_list else value, values, deep - 1)
    else:
        new = draw(values.get(field.name) or _VALUES[field.type])
        value.append(new) if is_list else setattr(message, field.name, new)
