"""Converts spaces of Gymnasium to the observations and actions of a behavior.

A space is a tree; each leaf becomes one observation, in the order of the tree, named by its path:

    Box of rank 0, 1, 2, 4, ...      a vector of all its numbers
    Box of an image                  an image, channels first, from its bounds to 0..1
    Box of a small image of bytes    a vector of all its numbers, from 0..255 to 0..1
    Discrete, MultiDiscrete          one-hot vectors, one after another
    MultiBinary                      a vector of zeros and ones

For actions, a Box becomes continuous actions, scaled from -1..1 to its bounds; Discrete,
MultiDiscrete and MultiBinary become branches; Dict and Tuple of these become both, in the order of
the tree.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, ObservationSpec
from pipeline.errors import SettingsError, UnityEnvironmentException, UnityObservationException

Put = Callable[[FloatArray, Any], None]
Build = Callable[[AnyArray, AnyArray], Any]
Path = tuple[str | int, ...]

_log = logging.getLogger(__name__)

VISUAL = ("auto", "always", "never")
"""Values of the option `visual`; auto: images with sides of 20 pixels or more stay images."""
LEAST_SIDE = 20  # smallest number of pixels along each side of an image for the default encoder
_TOO_SMALL = (
    "%s: the observation '%s', a picture of %dx%d pixels, is a vector of %d numbers from 0 to 1, "
    "because the encoder 'simple' needs %d pixels a side; `visual: always` (`--option "
    "visual=always` of `pipeline env build`) keeps it a picture, for "
    "network_settings.vis_encode_type: fully_connected or match3."
)
SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these"


class Leaf(NamedTuple):
    """One observation of a behavior, from one leaf of a Gymnasium space."""

    path: Path  # keys and indices of the leaf in the environment's observation
    spec: ObservationSpec
    put: Put  # writes a value of the leaf's space into an agent's row of zeros
    scale: str = ""
    """Meaning of the numbers, such as `0 to 1 stand for 0 to 255`; empty for unscaled numbers."""


class Observations:
    """Converts observations of one space to rows of arrays.

    `root` has the keys that lead from the environment's observation to the value of the space.

    Raises:
        SettingsError: The space, or a part of it, is not supported.
    """

    def __init__(self, space: Any, *, where: str, visual: str = "auto", root: Path = ()) -> None:
        if visual not in VISUAL:
            raise SettingsError(
                f"{where}: visual is '{visual}'; choose one of {', '.join(VISUAL)}."
            )
        self._where = where
        self.leaves = tuple(
            leaf._replace(path=root + leaf.path) for leaf in _leaves(space, (), where, visual)
        )
        if not self.leaves:
            raise SettingsError(
                f"{where}: the observation space {space} has no observation; wrap the environment "
                "so that it has one."
            )

    @property
    def specs(self) -> list[ObservationSpec]:
        """Specification of each leaf."""
        return [leaf.spec for leaf in self.leaves]

    @property
    def scales(self) -> list[str]:
        """Text on what the numbers of each image and each one-hot vector mean."""
        return [f"obs_{i}: {leaf.scale}" for i, leaf in enumerate(self.leaves) if leaf.scale]

    def empty(self, n_agents: int) -> list[FloatArray]:
        """Return float32 [n_agents, *shape] of zeros for each leaf."""
        return [np.zeros((n_agents, *leaf.spec.shape), dtype=np.float32) for leaf in self.leaves]

    def put(self, arrays: list[FloatArray], row: int, observation: Any) -> None:
        """Write one agent's observation into `row` of arrays from `empty`."""
        for leaf, array in zip(self.leaves, arrays, strict=True):
            value = observation
            try:
                for key in leaf.path:
                    value = value[key]
                leaf.put(array[row], value)
            except (ValueError, IndexError, KeyError, TypeError) as error:
                raise UnityObservationException(
                    f"{self._where}: the observation '{leaf.spec.name}' does not fit its space, "
                    f"which has the shape {leaf.spec.shape} after conversion ({error}); repair the "
                    "environment's observation_space."
                ) from error


def _leaves(space: Any, path: Path, where: str, visual: str) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, inner in parts_of(space):
            yield from _leaves(inner, (*path, key), where, visual)
        return
    name = _name(path, default="observation")
    spec, put = _leaf(space, name, where, visual)
    if not math.prod(spec.shape):
        raise SettingsError(
            f"{where}: the observation '{name}' is {space}, which has no numbers; wrap the "
            "environment so that it leaves this observation out."
        )
    yield Leaf(path, spec, put, _scale(space, is_scaled=put is not _put_numbers))


def _leaf(space: Any, name: str, where: str, visual: str) -> tuple[ObservationSpec, Put]:
    if isinstance(space, spaces.Box):
        if visual != "never" and (layout := image_layout(space, visual)) is not None:
            # An image of rank 2 has one channel.
            channels, height, width = (space.shape + (1,) * (3 - len(space.shape)))[:3]
            if layout == "channels last":
                height, width, channels = channels, height, width
            if visual == "always" or min(height, width) >= LEAST_SIDE:
                return ObservationSpec.visual(channels, height, width, name), _image(space, layout)
            # A small image becomes a vector, with bytes scaled to 0..1 as in large images.
            if is_of_bytes(space):
                size = math.prod(space.shape)
                _log.info(_TOO_SMALL, where, name, width, height, size, LEAST_SIDE)
                return ObservationSpec.vector(size, name), _image(space, "flat")
        elif visual == "always" and len(space.shape) > 1:
            is_bounded = np.isfinite(space.low).all() and np.isfinite(space.high).all()
            no_image = (
                "an image has three axes, or two of bytes"
                if is_bounded
                else "its space has no finite bounds to scale it by"
            )
            text = "%s: the observation '%s' is a vector and not an image, because %s: %s"
            _log.info(text, where, name, no_image, space)
        return ObservationSpec.vector(math.prod(space.shape), name), _put_numbers
    if isinstance(space, spaces.Discrete):
        return ObservationSpec.vector(int(space.n), name), _one_hot(int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return ObservationSpec.vector(int(space.nvec.sum()), name), _one_hots(space)
    if isinstance(space, spaces.MultiBinary):
        return ObservationSpec.vector(math.prod(space.shape), name), _put_bits
    raise SettingsError(
        f"{where}: the observation '{name}' is a {type(space).__name__} space, which the protocol "
        f"does not support; wrap the environment so that this space becomes one of {SUPPORTED}."
    )


def image_layout(space: spaces.Box, visual: str = "auto") -> str | None:
    """Return `channels last`, `channels first`, or None if the Box is not an image.

    An image has bytes from 0 to 255, or rank 3 and values from 0 to 1. If `visual` is always, an
    image may also have bytes with other bounds, or rank 3 and any finite bounds. The channels are
    the shorter axis of the first and the last axis; the last axis if both are equally long.
    """
    is_byte = space.dtype == np.uint8
    is_image = is_byte and bool((space.low == 0).all() and (space.high == 255).all())
    rank = len(space.shape)
    if rank == 3:
        is_image |= bool((space.low == 0).all() and (space.high == 1).all())
    if visual == "always" and (is_byte or rank == 3):
        is_image = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
    if not is_image or rank not in (2, 3):
        return None
    return "channels first" if rank == 3 and space.shape[0] < space.shape[2] else "channels last"


def is_of_bytes(space: spaces.Box) -> bool:
    """Return whether an image's numbers are in 0..255, and not in 0..1."""
    return bool(space.high.max(initial=0) > 1)


def image_range(space: spaces.Box) -> tuple[Any, Any]:
    """Return the pixel value that becomes 0, and the width of the range that becomes 0..1.

    Both are numbers if all pixels have the same bounds, else arrays of the space's shape.
    """
    # With float32 bounds, bytes become exactly the float32 nearest to value / 255.
    low, high = (np.asarray(bound, dtype=np.float32) for bound in (space.low, space.high))
    width = np.where(high > low, high - low, np.float32(1))
    if np.ptp(low) == np.ptp(width) == 0:
        return low.flat[0], width.flat[0]
    return low, width


def _scale(space: Any, *, is_scaled: bool) -> str:
    """Return a text on what an observation's numbers mean; empty if they are not scaled."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        first = np.broadcast_to(np.ravel(space.start), sizes.shape)
        ranges = zip(first.tolist(), (first + sizes - 1).tolist(), strict=True)
        return "one-hot of " + ", ".join(f"{low} to {high}" for low, high in ranges)
    if not (is_scaled and isinstance(space, spaces.Box)):
        return ""
    low, width = image_range(space)
    if np.ndim(low):
        return "0 to 1 stand for the bounds that each pixel has in the space"
    return f"0 to 1 stand for {low:g} to {low + width:g}"


def _image(space: spaces.Box, layout: str) -> Put:
    shape = (*space.shape, 1) if len(space.shape) == 2 else space.shape
    axes: tuple[int, ...] = (0, 1, 2) if layout == "channels first" else (2, 0, 1)
    if layout == "flat":
        shape, axes = (math.prod(shape),), (0,)
    low, width = (
        bound.reshape(shape).transpose(axes) if np.ndim(bound) else bound
        for bound in image_range(space)
    )
    begins_at_0 = not np.any(low)
    # Only integers are checked, except bytes from 0 to 255, which cannot leave these bounds. Floats
    # may leave their bounds by rounding.
    is_full = space.dtype == np.uint8 and begins_at_0 and bool(np.all(width == 255))
    is_checked = np.issubdtype(space.dtype, np.integer) and not is_full

    def put(row: FloatArray, value: Any) -> None:
        image = np.asarray(value).reshape(shape).transpose(axes)
        if begins_at_0:
            # The quotient is written into the batch, so that the image is copied only once.
            np.divide(image, width, out=row, casting="unsafe")
        else:
            np.subtract(image, low, out=row, casting="unsafe")
            row /= width
        # Wrong integers would become numbers outside 0..1 without an error.
        if is_checked:
            values = np.reshape(value, space.shape)
            outside = (values < space.low) | (values > space.high)
            _refuse(outside, values, space.low, space.high, "pixel")

    return put


def _put_numbers(row: FloatArray, value: Any) -> None:
    row[:] = np.asarray(value).reshape(row.shape)


def _put_bits(row: FloatArray, value: Any) -> None:
    values = np.asarray(value)
    _refuse((values != 0) & (values != 1), values, 0, 1, "part")
    _put_numbers(row, values)


def _one_hot(start: int) -> Put:
    def put(row: FloatArray, value: Any) -> None:
        index = int(value) - start
        # The second condition refuses fractions, which `int` cuts off.
        if not 0 <= index < len(row) or index + start != value:
            raise IndexError(f"the value is {value}, allowed are {start} to {start + len(row) - 1}")
        row[index] = 1.0

    return put


def _one_hots(space: spaces.MultiDiscrete) -> Put:
    sizes, start = np.ravel(space.nvec), np.ravel(space.start)
    # Index at which each one-hot vector begins, minus the first value of its part.
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]]) - start
    last = start + sizes - 1

    def put(row: FloatArray, value: Any) -> None:
        # `same_kind` refuses floats, which a plain conversion would truncate.
        parts = np.asarray(value).reshape(start.shape).astype(np.int64, casting="same_kind")
        _refuse((parts < start) | (parts > last), parts, start, last, "part", space.shape)
        row[parts + first] = 1.0

    return put


def _refuse(
    outside: AnyArray,
    values: AnyArray,
    low: Any,
    high: Any,
    what: str,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Raise ValueError with index, value and bounds of the first value where `outside` is True."""
    if not outside.any():
        return
    shape = values.shape if shape is None else shape
    first = int(np.argmax(outside))
    place = ", ".join(str(index) for index in np.unravel_index(first, shape))
    low, high = (np.broadcast_to(bound, values.shape).flat[first] for bound in (low, high))
    raise ValueError(f"{what} {place} is {values.flat[first]}, allowed are {low} to {high}")


class Actions:
    """Converts actions of a behavior to actions of one space.

    In a dimension of a Box without finite bounds, an action of 1 becomes `scale`; if `scale` is
    None, such a dimension is refused.

    Raises:
        SettingsError: The space, or a part of it, is not supported.
    """

    def __init__(self, space: Any, *, where: str, scale: float | None = None) -> None:
        self._where, self._space = where, space
        self._scale = scale
        # For each continuous action: the value for -1, the width of the range from -1 to 1, and the
        # minimum and maximum of the space.
        self._boxes = np.zeros((4, 0))
        self._branches: list[int] = []
        self._starts: list[int] = []  # value of choice 0 of each branch
        self._build = self._builder(space, ())
        self.spec = ActionSpec(self._boxes.shape[1], tuple(self._branches))
        if not self.spec.continuous_size and not self._branches:
            raise SettingsError(
                f"{where}: the action space {space} has no action; wrap the environment so that it "
                "has one."
            )
        text = "discrete_actions: branch {}: choice 0 stands for {}"
        choices = [text.format(i, start) for i, start in enumerate(self._starts) if start]
        self.scales = [*self._scales_of_numbers(), *choices]
        is_discrete = isinstance(space, spaces.Discrete)
        self._discrete = (space.start, space.dtype) if is_discrete else None

    def native(self, actions: ActionTuple) -> list[Any]:
        """Return an action of the space for each row of `actions`.

        Continuous actions are clipped to -1..1, and then scaled to the space's bounds.
        """
        if self._discrete is not None:
            # The actions are NumPy's integers, as `Discrete.sample` returns, because environments
            # may call methods of NumPy's integers.
            start, dtype = self._discrete
            return list((actions.discrete[:, 0] + np.int64(start)).astype(dtype))
        # The numbers are float64, because bounds may be float64 and rounding must not exceed them.
        continuous: AnyArray = np.clip(actions.continuous.astype(np.float64), -1.0, 1.0)
        offset, width, least, most = self._boxes
        continuous = offset + (continuous + 1.0) / 2.0 * width
        # The second clip is needed, because scaling rounds, and a Box may be bounded on one side
        # only.
        continuous = np.clip(continuous, least, most)
        return [
            self._build(numbers, choices)
            for numbers, choices in zip(continuous, actions.discrete, strict=True)
        ]

    def forbidden(self, mask: Any) -> BoolArray:
        """Convert a mask, 1 = allowed, to bool [sum of branch sizes], True = forbidden."""
        n_choices = sum(self._branches)
        try:
            flat = np.concatenate(list(_mask_parts(mask, self._space))) == 0
            if len(flat) != n_choices:
                raise ValueError(f"{len(flat)} entries")  # noqa: TRY301  # handled like wrong forms
        except ValueError as error:
            raise UnityEnvironmentException(
                f"{self._where}: the action mask has {error}; give {n_choices} entries, 1 for each "
                "allowed choice and 0 for the others, in one array or in the form that "
                "action_space.sample(mask=...) takes."
            ) from error
        first = 0
        for branch, size in enumerate(self._branches):
            if flat[first : first + size].all():
                raise UnityEnvironmentException(
                    f"{self._where}: the action mask forbids every choice of the discrete action "
                    f"{branch} to an agent that must act; repair the environment's action_mask."
                )
            first += size
        return np.asarray(flat)

    def masks(self, forbidden: BoolArray) -> list[BoolArray]:
        """Return `forbidden` [N, sum of branch sizes] split by branch."""
        return np.split(forbidden, np.cumsum(self._branches)[:-1], axis=1)

    def _scales_of_numbers(self) -> list[str]:
        """Return texts that say what -1 and 1 mean, for consecutive actions with equal bounds."""
        offset, width = self._boxes[:2]
        bounds = list(zip(offset.tolist(), (offset + width).tolist(), strict=True))
        texts, first = [], 0
        for (low, high), equal in itertools.groupby(bounds):
            last = first + len(list(equal)) - 1
            which = f"number {first}" if first == last else f"numbers {first} to {last}"
            texts.append(f"continuous_actions: {which}: -1 to 1 stand for {low:g} to {high:g}")
            first = last + 1
        return texts

    def _builder(self, space: Any, path: Path) -> Build:
        if isinstance(space, spaces.Dict | spaces.Tuple):
            named = {key: self._builder(part, (*path, key)) for key, part in parts_of(space)}
            if isinstance(space, spaces.Dict):
                return lambda c, d: {key: build(c, d) for key, build in named.items()}
            return lambda c, d: tuple(build(c, d) for build in named.values())
        if isinstance(space, spaces.Box):
            return self._box(space, path)
        first = len(self._branches)
        if isinstance(space, spaces.Discrete):
            self._branches.append(int(space.n))
            # The action has the same integer type as a result of `Discrete.sample`.
            start, number = int(space.start), np.dtype(space.dtype).type
            self._starts.append(start)
            return lambda _, d: number(int(d[first]) + start)
        if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            return self._choices(space)
        raise SettingsError(
            f"{self._where}: the action '{_name(path)}' is a {type(space).__name__} space, which "
            "the protocol does not support; wrap the environment so that this space becomes one of "
            f"{SUPPORTED}."
        )

    def _choices(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> Build:
        shape, dtype, start = space.shape, space.dtype, np.zeros(space.shape, dtype=np.int64)
        first, size = len(self._branches), math.prod(shape)
        if isinstance(space, spaces.MultiDiscrete):
            self._branches += np.ravel(space.nvec).tolist()
            start = start + space.start
        else:
            # Each bit is a branch with the choices 0 and 1.
            self._branches += [2] * size
        self._starts += np.ravel(start).tolist()
        return lambda _, d: (d[first : first + size].reshape(shape) + start).astype(dtype)

    def _box(self, space: spaces.Box, path: Path) -> Build:
        low = np.ravel(space.low).astype(np.float64)
        high = np.ravel(space.high).astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        if not bounded.all() and self._scale is None:
            raise SettingsError(
                f"{self._where}: the action '{_name(path)}' has no finite bounds in dimension "
                f"{int(np.argmin(bounded))} ({space}); give the value that an action of 1 shall "
                "have there, as action_scale in params.yaml, or for an executable: "
                "`pipeline env build NAME --option action_scale=1 -o FILE`."
            )
        # If no scale is given, all dimensions are bounded here, so the 0 has no effect.
        scale = self._scale or 0.0
        # An action from -1 to 1 becomes low to high, or -scale to scale without finite bounds.
        offset = np.where(bounded, low, -scale)
        width = np.where(bounded, high, scale) - offset
        first, last = self._boxes.shape[1], self._boxes.shape[1] + len(low)
        self._boxes = np.concatenate([self._boxes, [offset, width, low, high]], axis=1)
        shape, dtype, is_integer = space.shape, space.dtype, np.issubdtype(space.dtype, np.integer)

        def build(c: AnyArray, _: AnyArray) -> AnyArray:
            # Numbers are rounded, because a conversion to integers would truncate towards 0.
            numbers = np.rint(c[first:last]) if is_integer else c[first:last]
            return numbers.reshape(shape).astype(dtype)

        return build


def _mask_parts(mask: Any, space: Any) -> Iterator[AnyArray]:
    """Yield the arrays of a mask in the order of the space; `space.sample` takes the same masks."""
    if mask is None:  # all choices are allowed; a Box has no mask
        yield np.ones(_n_choices(space), dtype=np.int8)
    elif isinstance(mask, Mapping):
        parts = space.spaces if isinstance(space, spaces.Dict) else dict.fromkeys(mask)
        if unknown := [key for key in mask if key not in parts]:
            raise ValueError(f"the part {unknown[0]!r}, but the action has {list(parts)}")
        for key, part in parts.items():
            if key not in mask and _n_choices(part):
                raise ValueError(f"no part {key!r}, which the action has")
            yield from _mask_parts(mask.get(key), part)
    elif isinstance(mask, tuple | list) and not all(map(np.isscalar, mask)):
        inner = space.spaces if isinstance(space, spaces.Tuple) else [None] * len(mask)
        if len(mask) != len(inner):
            raise ValueError(f"{len(mask)} parts, but the action has {len(inner)}")
        for item, part in zip(mask, inner, strict=True):
            yield from _mask_parts(item, part)
    else:
        flat = np.ravel(mask)
        if isinstance(space, spaces.MultiBinary) and len(flat) == math.prod(space.shape):
            # In masks for `MultiBinary.sample`, 0 or 1 is the only allowed bit, and 2 allows both.
            flat = np.stack((flat != 1, flat != 0), axis=1).ravel()
        yield flat


def parts_of(space: Any) -> list[tuple[str | int, Any]]:
    """Return key or index, and space, of each part of a Dict or Tuple."""
    items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return list(items)


def _n_choices(space: Any) -> int:
    """Return the number of entries in an action space's mask: two for each bit of a MultiBinary."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(_n_choices(part) for _, part in parts_of(space))
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return 2 * math.prod(space.shape) if isinstance(space, spaces.MultiBinary) else 0


def _name(path: Path, default: str = "action") -> str:
    return "/".join(map(str, path)) or default
