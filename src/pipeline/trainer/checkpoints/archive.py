"""Checks of a checkpoint file: its bytes before torch unpickles them, and then its values.

A checkpoint is a zip archive of uncompressed entries: one pickle of plain values, and the numbers
of tensors. Even with `weights_only=True` torch also unpickles objects of other types, and some of
them may be of any size.
"""

import io
import math
import pickletools
import sys
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import torch

# Pickle opcodes (see `pickletools`) that plain values and tensors need.
_OPCODES = {
    "PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "BINPUT", "LONG_BINPUT",
    "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM",
    "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
# Types of tensors that NumPy can read.
_DTYPES = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
    "float32", "float64",
}  # fmt: skip
_STORAGES = ("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "Untyped")
_NAMES = frozenset(
    [
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",  # tensors of types without a storage class
        "torch._utils _rebuild_parameter",
        "collections OrderedDict",
        "_codecs encode",  # pickle writes bytes with this function
        *(f"torch {name}Storage" for name in _STORAGES),
        *(f"torch.storage {name}Storage" for name in _STORAGES),
        *(f"torch {name}" for name in _DTYPES),
    ]
)
_MAX_PICKLE_STEPS = 500_000
"""Largest number of opcodes in the pickle: a hundred times as many as large checkpoints have."""
_MAX_PICKLE_BYTES = 16 << 20
# Other functions visit values recursively, and Python limits the depth of recursion.
_MAX_DEPTH = 50
# This number is added to the limit on tensor sizes, so that small files are not refused.
_SPARE_BYTES = 1 << 20
# Larger integers in a file are refused, because they are not exact as float64.
_MAX_INT = 1 << 53
_PLAIN = (str, int, float, bool, bytes, type(None))
_ANY = ...
"""Key in a map of expected shapes; its value is the shape of every key that is not in the map."""
_BY_NAME, _NUMBERS = {_ANY: int | float}, [int | float]
# Shape of each entry: a type, a list with the shape of its items, a tuple with the shape of each
# item, or a map with the shapes of its entries.
_SHAPE = {
    "behavior": str,
    "settings": dict,
    "files": {_ANY: str},
    "spec": dict,
    "learner": {
        "step": int,
        "n_updates": int,
        "algorithm": dict,
        "recorded": {"obs": [torch.Tensor], "allowed": torch.Tensor | None},
        "statistics": {
            "sums": _BY_NAME,
            "counts": {_ANY: int},
            "totals": _BY_NAME,
            "latest": _BY_NAME,
            "distributions": {_ANY: _NUMBERS},
            "returns": _NUMBERS,
            "recent": _NUMBERS,
            "n_episodes": int,
        },
    },
    "best": _BY_NAME,
    "run": {
        "steps": {_ANY: int},
        "next_checkpoint": {_ANY: int},
        "lessons": dict,
        "devices": {_ANY: str},
        "threads": int,
        "self_play": dict,
        "interrupted": [int],
        "added": [str],
        "callbacks": {"states": {_ANY: dict}, "values": {_ANY: _BY_NAME}},
    },
    "experience": dict,
    "environments": list,
    "ranks": [{"learner": {"algorithm": dict, "recorded": dict}, "replay_rows": dict}],
    "replay": [(str, str, int)],
    "replay_digest": str | None,
    "replay_rows": dict,
    "held": int,
    "history": str,
    "behaviors": {_ANY: dict},
}
# Entries that may have another shape than in `_SHAPE`. In checkpoints of earlier versions, `replay`
# is the name of a single file.
_ALSO: dict[str, Any] = {"best": type(None), "experience": type(None), "environments": type(None)}
_ALSO |= {"replay": str | None}
_WITHOUT_TENSORS = ("settings", "spec", "run", "best")


def refusal_of_bytes(content: bytes) -> str | None:
    """Return the reason why `content` is not a checkpoint, or None; nothing is unpickled."""
    damaged = "this is not a checkpoint, or it is damaged; use an older one"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            # Torch does not compress entries. A compressed entry could unpack to any size.
            if (
                sum(entry.file_size for entry in entries) > len(content)
                or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
                # If two entries had the same name, torch could read an entry that was not checked.
                or len({entry.filename.lower() for entry in entries}) < len(entries)
                or archive.testzip() is not None
            ):
                return damaged
            pickles = [archive.read(e) for e in entries if e.filename.endswith("data.pkl")]
    # zipfile raises NotImplementedError for a compression method that it does not know.
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, OSError):
        return damaged
    if len(pickles) != 1:
        return damaged
    unknown = _unknown_step(pickles[0])
    return unknown and (
        "this is not a checkpoint of this program: it has more than weights and plain values "
        f"({unknown})"
    )


def _unknown_step(pickle: bytes) -> str | None:
    """Return what a pickle has besides plain values and tensors, as text for an error, or None."""
    if len(pickle) > _MAX_PICKLE_BYTES:
        return f"{len(pickle)} bytes of values besides the tensors"
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if opcode.name not in _OPCODES or number > _MAX_PICKLE_STEPS:
                return opcode.name
            if opcode.name == "GLOBAL" and argument not in _NAMES:
                return str(argument).replace(" ", ".")[:100]
    except Exception as error:  # noqa: BLE001  # genops documents no errors for damaged bytes
        return type(error).__name__
    return None


def refusal_of_values(state: Any, n_bytes: int) -> str | None:
    """Return the reason why `state` cannot be from a checkpoint of `n_bytes` bytes, or None.

    The numbers in tensors are not read. The limits bound the time and memory of functions that
    visit all values later.
    """
    waiting: list[tuple[Any, str, int]] = [(state, "it", 0)]
    n_items, n_tensor_bytes = 0, 0
    while waiting:
        value, place, depth = waiting.pop()
        n_items += 1
        # A value that contains itself has endless levels. Each value takes at least a byte of the
        # file, unless the file refers to the value several times.
        if depth > _MAX_DEPTH or n_items > n_bytes:
            return f"{place} contains itself, or the same values too often"
        if isinstance(value, dict):
            waiting += [(key, f"a key of {place}", depth + 1) for key in value]
            waiting += [(item, f"{place}.{key}"[:80], depth + 1) for key, item in value.items()]
        elif type(value) in (list, tuple):
            waiting += [(item, f"{place}.{i}"[:80], depth + 1) for i, item in enumerate(value)]
        elif isinstance(value, torch.Tensor):
            if not _is_plain(value):
                return f"{place} is not a plain tensor ({type(value).__name__} of {value.dtype})"
            n_tensor_bytes += value.numel() * value.element_size()
            # NumPy refuses a shape with a product above the largest int, even if one axis is 0.
            if value.element_size() * math.prod(max(1, n) for n in value.shape) > sys.maxsize:
                return f"{place} has a shape that is too large"
            # Tensors may share storage, so a small file can have many large tensors. This limit
            # bounds the time of functions that read every tensor.
            if max(value.untyped_storage().nbytes(), n_tensor_bytes / 4) > n_bytes + _SPARE_BYTES:
                return f"{place} has more numbers than the file"
        elif type(value) not in _PLAIN:
            return f"{place} has the type {type(value).__name__}"
    return None


def refusal_of_entries(state: dict[Any, Any]) -> str | None:
    """Return an error message for the first entry of a wrong type; None if all types are right."""
    given = {key: v for key, v in state.items() if not isinstance(v, _ALSO.get(key, ()))}
    with_tensor = (
        f".{name}"
        for name in _WITHOUT_TENSORS
        for _, value in leaves(state.get(name), name)
        if isinstance(value, torch.Tensor)
    )
    place = _misplaced_entry(given, _SHAPE, "") or next(with_tensor, None)
    return place and f"{place[1:]} is not of the type that a checkpoint has there"


def _misplaced_entry(value: Any, shape: Any, place: str) -> str | None:
    """Return the key path of the first entry of `value` without the type in `shape`, or None."""
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(shape, dict) and isinstance(value, dict):
        shapes = {key: shape.get(key, shape.get(_ANY)) for key in value}
        parts = [(value[key], part, f"{place}.{key}"[:80]) for key, part in shapes.items() if part]
    elif isinstance(shape, list) and isinstance(value, list | tuple):
        parts = [(item, shape[0], f"{place}.{i}") for i, item in enumerate(value)]
    elif isinstance(shape, tuple) and isinstance(value, list | tuple) and len(value) == len(shape):
        parts = [(item, shape[i], f"{place}.{i}") for i, item in enumerate(value)]
    elif (
        isinstance(shape, dict | list | tuple)
        or not isinstance(value, shape)
        or (isinstance(value, int) and abs(value) > _MAX_INT)
    ):
        return place
    others = (_misplaced_entry(*part) for part in parts)
    return next((other for other in others if other is not None), None)


def leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the key path, which begins with `place`, and the value of each item at any depth."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{place}.{key}")
    else:
        yield place, value


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether NumPy can read the tensor without a conversion."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        # Tensors of these kinds have no numbers, or store their numbers in another form.
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg())
        and str(tensor.dtype).removeprefix("torch.") in _DTYPES
    )
