"""What environments of Gymnasium give, as the inputs of an exported policy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.arrays import AnyArray, BoolArray, FloatArray
from pipeline.errors import ExportError, brief
from pipeline.export.contract import OLDEST_VERSION
from pipeline.export.layout import ModelDescription

_MASKS = ("action_mask", "mask")
_ROUNDING = 1e-5
_BYTES = (0.0, 255.0)
_NUMBER = r"(-?\d+\.?\d*(?:e[-+]\d+)?)"


def take_mask(observation: Any, layout: ModelDescription) -> tuple[Any, Any]:
    """Return an observation without the action mask that is a part of it, and that or None."""
    for key in _MASKS if isinstance(observation, Mapping) and layout.discrete_branches else ():
        if key in observation and _text_of(key, layout.meanings) is None:
            return {k: part for k, part in observation.items() if k != key}, observation[key]
    return observation, None


def forbidden(mask: Any, n_agents: int, branches: Sequence[int], where: str) -> list[BoolArray]:
    """Return bool [N, branch size] by branch, True = forbidden.

    `mask` has that form already, or is Gymnasium's: whole numbers, 1 = allowed, in one array or
    one for each branch.

    Raises:
        ExportError: It has another size.
    """
    parts = [mask] if isinstance(mask, np.ndarray) else [np.asarray(part) for part in mask]
    try:
        flat = np.concatenate([part.reshape(n_agents, -1) for part in parts], axis=1)
    except ValueError:
        flat = np.empty((n_agents, 0), bool)
    is_plain_bool = isinstance(mask, np.ndarray) and mask.dtype == bool
    if flat.shape[1] != sum(branches) or is_plain_bool:
        raise ExportError(
            f"{where}: the action mask does not fit; give bool [N, size] for each branch of the "
            f"sizes {list(branches)}, True where forbidden, or Gymnasium's mask of whole numbers, "
            f"{sum(branches)} for each agent, 1 where allowed"
        )
    if flat.dtype != bool:
        flat = flat == 0
    return np.split(flat, np.cumsum(branches)[:-1], axis=1)


def rows_of(observation: Any, layout: ModelDescription, where: str) -> list[FloatArray]:
    """Return float32 [N, *shape] for each input `obs_0`, `obs_1`, ... of a policy.

    Args:
        observation: what one environment gives, or several as one: numbers, an image, or a Dict or
            Tuple of these, by the names that the file has; or a list of arrays, one for each
            input. Floats [N, *shape] are what the network sees, and stay as they are.
        layout: of the policy's file.
        where: what messages call the policy.

    Raises:
        ExportError: It is of another form, or the file does not say how it was scaled.
    """
    if layout.version == OLDEST_VERSION:
        return _of_old_layout(observation, where)
    names = [f"obs_{index}" for index in range(len(layout.inputs))]
    shapes = {name: layout.inputs[name].shape[1:] for name in names if name in layout.inputs}
    arrays = []
    for (name, shape), part in zip(
        shapes.items(), _parts(observation, list(shapes), layout.meanings, where), strict=True
    ):
        text = layout.meanings.get(name, "")
        array = np.asarray(part)
        rows = _rows(array, shape, text) if array.dtype.kind in "fiub" else None
        if rows is None:
            given = f"{array.dtype} {list(array.shape)}"
            if array.dtype.kind in "fiub" and array.size:
                given += f" from {array.min():g} to {array.max():g}"
            raise ExportError(
                f"{where}: {name} ({_name(text)}) is {given}; give {_expected(shape, text)}"
            )
        arrays.append(rows)
    if len(set(map(len, arrays))) > 1:
        raise ExportError(f"{where}: the observations are of {[*map(len, arrays)]} agents")
    return arrays


def _of_old_layout(observation: Any, where: str) -> list[FloatArray]:
    """Return the arrays that a file of package 1.x gets, which says nothing of its sensors."""
    given = observation if isinstance(observation, list | tuple) else [observation]
    arrays = list(map(np.asarray, given))
    if any(array.ndim < 2 or (array.ndim > 2 and array.dtype.kind != "f") for array in arrays):
        raise ExportError(
            f"{where}: a file of package 1.x does not name its sensors; give a list of arrays "
            "[N, *shape] in the environment's order, images channels first as floats from 0 to 1"
        )
    return arrays


def _parts(
    observation: Any, inputs: list[str], meanings: Mapping[str, str], where: str
) -> Sequence[Any]:
    """Return the part of an observation that each input takes."""
    if isinstance(observation, Mapping | tuple):
        leaves = dict(_leaves(observation))
        if len(leaves) == len(inputs) == 1:
            return list(leaves.values())
        by_input = {_text_of(name, meanings): part for name, part in leaves.items()}
        if set(by_input) == set(inputs):
            return [by_input[name] for name in inputs]
        if isinstance(observation, Mapping):
            known = ", ".join(_name(meanings.get(name, "")) for name in inputs)
            raise ExportError(
                f"{where}: the observation has the parts {brief(', '.join(leaves))}, the file has "
                f"{known}; give these, or a list of arrays [N, *shape] in the order of the file"
            )
    if isinstance(observation, list | tuple) and len(observation) == len(inputs):
        return observation
    if len(inputs) == 1:
        return [observation]
    n_given = len(observation) if isinstance(observation, list | tuple) else 1
    raise ExportError(f"{where}: wants {len(inputs)} observations, not {n_given}")


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping | tuple):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(part, (*path, str(key)))
    else:
        yield "/".join(path), tree


def _text_of(name: str, meanings: Mapping[str, str]) -> str | None:
    """Return the tensor that a sensor's name belongs to."""
    for tensor, text in meanings.items():
        if f"{text}; ".startswith(f"{brief(name)}; "):
            return tensor
    return None


def _name(text: str) -> str:
    return text.partition("; ")[0] or "without a name"


def _bounds(text: str) -> tuple[float, float] | None:
    """Return what 0 and 1 stand for in an image, or in a small one that is a vector."""
    found = re.search(f"; 0 to 1 stand for {_NUMBER} to {_NUMBER}$", text)
    return None if found is None else (float(found[1]), float(found[2]))


def _ranges(text: str) -> AnyArray:
    """Return [parts, 2]: first and last value of each one-hot part; none without."""
    _, _, ranges = text.partition("; one-hot of ")
    pairs = re.findall(r"(-?\d{1,18}) to (-?\d{1,18})", ranges)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _expected(shape: Any, text: str) -> str:
    network = f"float32 {['N', *shape]}".replace("'", "")
    if len(shape) == 3:
        network += ", channels first, from 0 to 1"
        bounds, (channels, height, width) = _bounds(text), shape
        if bounds is not None:
            kind = "whole " if bounds == _BYTES else ""
            return (
                f"an image [{height}, {width}, {channels}] of {kind}numbers from {bounds[0]:g} to "
                f"{bounds[1]:g}, or {network}"
            )
    elif bounds := _bounds(text):
        return f"whole numbers from {bounds[0]:g} to {bounds[1]:g}, or {network}"
    elif len(_ranges(text)):
        return f"whole numbers ({text.partition('; one-hot of ')[2]}), or {network}"
    return network


def _rows(array: AnyArray, shape: Any, text: str) -> FloatArray | None:
    """Return float32 [N, *shape]; None where the array is of another form."""
    if len(shape) == 3:
        return _images(array, shape, text)
    if array.dtype.kind in "iu" and len(ranges := _ranges(text)):
        return _one_hot(array, shape[0], ranges)
    if bounds := _bounds(text):  # a small picture of bytes
        is_float = array.dtype.kind == "f"
        if is_float and shape not in (array.shape, array.shape[1:]):
            return None  # they may have been divided by 255, or not
        scaled = _scaled(array, (0.0, 1.0) if is_float else bounds)
        if scaled is None:
            return None
        array = scaled
    # In a Box of any rank; and of each of several environments.
    n_rows = _n_rows(array, math.prod(shape))
    # Eight numbers are not those of eight agents, where the policy takes one.
    if n_rows is None or (array.ndim == 1 and n_rows > 1):
        return None
    return array.astype(np.float32).reshape(n_rows, *shape)


def _n_rows(array: AnyArray, size: int) -> int | None:
    """Return of how many agents an array of `size` numbers each is; None where of none."""
    if array.size == size:
        return 1
    return len(array) if array.ndim and math.prod(array.shape[1:]) == size else None


def _images(array: AnyArray, shape: Any, text: str) -> FloatArray | None:
    channels, height, width = shape
    is_float, bounds = array.dtype.kind == "f", _bounds(text)
    if bounds is None:
        # The file does not say that they are from 0 to 1: a player's own sensor may send others.
        is_right = is_float and shape in (array.shape, array.shape[1:])
        return array.astype(np.float32).reshape(-1, *shape) if is_right else None
    is_networks = is_float and array.shape[1:] == shape
    if channels == 1 and array.shape[-2:] == (height, width):
        array = array.reshape(-1, *shape)
    if is_networks:
        images, bounds = array, (0.0, 1.0)
    elif is_float and bounds == _BYTES:
        return None  # they may have been divided by 255, or not
    elif array.ndim in (3, 4) and array.shape[-3:] == (height, width, channels):
        images = np.moveaxis(array, -1, -3)
    elif array.ndim in (3, 4) and array.shape[-3:] == shape:
        images = array
    else:
        return None
    scaled = _scaled(images, bounds)
    return None if scaled is None else scaled.reshape(-1, *shape)


def _scaled(numbers: AnyArray, bounds: tuple[float, float]) -> FloatArray | None:
    """Return numbers from 0 to 1 as the bridge scales them, in float32; None where outside."""
    low, high = np.float32(bounds[0]), np.float32(bounds[1])
    scaled: FloatArray = np.subtract(numbers, low).astype(np.float32) / (high - low)
    is_inside = scaled.min(initial=0) >= -_ROUNDING and scaled.max(initial=0) <= 1 + _ROUNDING
    return scaled if is_inside else None


def _one_hot(array: AnyArray, size: int, ranges: AnyArray) -> FloatArray | None:
    first, last = ranges.T
    sizes = last - first + 1
    if sizes.sum() != size or _n_rows(array, len(ranges)) is None:
        return None
    values = array.reshape(-1, len(ranges)).astype(np.int64)
    if ((values < first) | (values > last)).any():
        return None
    result = np.zeros((len(values), size), dtype=np.float32)
    np.put_along_axis(result, values - first + np.cumsum(sizes) - sizes, 1.0, axis=1)
    return result
