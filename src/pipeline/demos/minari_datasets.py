"""Minari datasets as tables of demonstrations, and demonstrations as Minari datasets.

Spaces are converted as in executables from `pipeline env build gymnasium:ID`, so that an imported
demonstration fits the behavior of such an executable.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem, itemgetter
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray
from pipeline.core.specs import BehaviorSpec, scales_of
from pipeline.demos.demo_file import Demonstration
from pipeline.demos.tables import NO_CHOICE, Table
from pipeline.errors import DemonstrationError, UnityObservationException
from pipeline.simulators.bridges.batches import Codec

# Minari's form of an id: namespaces, name and version.
_ID = re.compile(r"[-\w]+(/[-\w]+)*-v\d+")


def read_dataset(
    dataset_id: str, spec: BehaviorSpec | None = None
) -> tuple[Table, str, BehaviorSpec]:
    """Return a dataset of this machine as a table, and the behavior's name and specification.

    Args:
        dataset_id: Minari's id of the dataset, such as `mujoco/hopper/expert-v0`.
        spec: specification of the behavior; None to derive it from the dataset's spaces.

    Raises:
        DemonstrationError: The dataset is not on this machine, or Minari cannot read it.
        SettingsError: A space of the dataset is not supported.
    """
    import minari

    from pipeline.simulators.bridges.naming import behavior_name

    source = _checked_source(dataset_id)
    try:
        dataset = minari.load_dataset(dataset_id)
        episodes = list(dataset.iterate_episodes())
    except FileNotFoundError as error:
        raise DemonstrationError(
            f"{source}: is not on this machine; fetch it with `minari download {dataset_id}`, or "
            "name the folder of datasets in MINARI_DATASETS_PATH"
        ) from error
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise DemonstrationError(f"{source}: Minari cannot read this dataset: {error}") from error
    if not episodes:
        raise DemonstrationError(f"{source}: has no episodes")
    codec = _codec(dataset.observation_space, dataset.action_space, source, spec)
    action_spec = codec.spec.action_spec
    parts = [_fields(source, episode, codec, dataset.action_space) for episode in episodes]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    notes = []
    if action_spec.continuous_size:
        leaves = _leaf_actions(dataset.action_space, episodes[0].actions)
        bounded = np.concatenate([has for kind, _, has in leaves if kind == "continuous"])
        # Gymnasium's environments clip actions to their bounds, so the clipped action was applied.
        beyond = bounded & (np.abs(columns["continuous"]) > 1)
        columns["continuous"][beyond] = np.sign(columns["continuous"][beyond])
        clipped = f"{int(beyond.sum())} numbers beyond them were clipped, as the environment does"
        notes = [f"bounds        -1..1 stands for the bounds of the action space; {clipped}"]
    # If the dataset names no environment, the behavior gets the dataset's name.
    env = dataset.spec.env_spec
    name = behavior_name(env.id if env is not None else dataset.spec.dataset_name)
    table = Table(source=source, columns=columns, notes=notes)
    return table, name, spec or codec.spec


def _codec(obs_space: Any, action_space: Any, where: str, spec: BehaviorSpec | None) -> Codec:
    """Return the codec most similar to `spec`; for None, the codec that executables use."""
    from pipeline.simulators.bridges.batches import Codec
    from pipeline.simulators.bridges.spaces import VISUAL

    # With a scale of 1, actions without bounds are unchanged; `--action-scale` divides them. With a
    # specification there is a codec for each value of `visual`, because the demonstration may come
    # from an executable that was built with any of these values.
    codecs = [
        Codec(obs_space, action_space, where=where, visual=visual, scale=1.0)
        for visual in (VISUAL if spec is not None else VISUAL[:1])
    ]

    def likeness(codec: Codec) -> tuple[bool, bool]:
        ours, theirs = _images_and_scales(codec.spec), _images_and_scales(spec or codec.spec)
        # The specification of a demonstration has no scales, and fits all scales.
        return ours[0] == theirs[0], spec is None or not scales_of(spec) or ours[1] == theirs[1]

    return max(codecs, key=likeness)


def _images_and_scales(spec: BehaviorSpec) -> tuple[list[tuple[int, ...]], list[str]]:
    images = [tuple(obs.shape) for obs in spec.observation_specs if len(obs.shape) == 3]
    return images, [text for text in scales_of(spec) if text.startswith("obs_")]


def _checked_source(dataset_id: str) -> str:
    if not _ID.fullmatch(dataset_id):
        raise DemonstrationError(
            f"minari:{dataset_id}: is not an id of a dataset; write it as in minari:people/maze-v0"
        )
    return f"minari:{dataset_id}"


def _fields(source: str, episode: Any, codec: Codec, space: Any) -> dict[str, AnyArray]:
    """Return an episode as fields of a table; the last row has an observation, but no action."""
    n, observations = len(episode.rewards), codec.observations
    fields: dict[str, AnyArray] = {"episode": np.full(n + 1, episode.id)}
    if codec.mask_key is not None:
        fields |= _masks(codec, episode.observations[codec.mask_key], n)
    leaves = zip(observations.leaves, observations.empty(n + 1), strict=True)
    for index, (leaf, values) in enumerate(leaves):
        recorded = reduce(getitem, leaf.path, episode.observations)
        try:
            for row in range(n + 1):
                leaf.put(values[row], recorded[row])
        except (ValueError, IndexError, TypeError) as error:
            raise UnityObservationException(
                f"{source}: observation {leaf.spec.name!r} of step {row} of episode {episode.id} "
                f"does not fit the dataset's space ({error}); repair the dataset"
            ) from error
        fields[f"obs{index}"] = values
    actions: dict[str, list[AnyArray]] = {"continuous": [], "discrete": []}
    for kind, values, _ in _leaf_actions(space, episode.actions):
        actions[kind].append(values)
    for kind, filler in (("continuous", np.nan), ("discrete", NO_CHOICE)):
        if actions[kind]:
            joined = np.concatenate(actions[kind], axis=1)
            fields[kind] = np.pad(joined, ((0, 1), (0, 0)), constant_values=filler)
    # An episode has one observation more than actions, so the last row has no reward.
    fields["reward"] = np.append(episode.rewards, np.nan)
    fields["terminated"] = np.append(episode.terminations, False)
    fields["truncated"] = np.append(episode.truncations, False)
    return fields


def _masks(codec: Codec, recorded: Any, n: int) -> dict[str, AnyArray]:
    """Return the mask [n + 1, size] of each branch by field name; the last row forbids nothing."""
    rows = (_map_arrays(recorded, itemgetter(row)) for row in range(n))
    forbidden = np.stack([codec.actions.forbidden(mask) for mask in rows])
    masks = codec.actions.masks(np.pad(forbidden, ((0, 1), (0, 0))))
    return {f"mask{branch}": mask for branch, mask in enumerate(masks)}


def _map_arrays(tree: Any, make: Callable[[Any], Any]) -> Any:
    """Return nested dicts and tuples of arrays, with each array replaced by `make(array)`."""
    if isinstance(tree, dict):
        return {key: _map_arrays(part, make) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(_map_arrays(part, make) for part in tree)
    return make(tree)


def _leaf_actions(space: Any, values: Any) -> Iterator[tuple[str, AnyArray, BoolArray]]:
    """Yield kind, actions [T, size] and bool [size] `is bounded` of each leaf of a space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in inner:
            yield from _leaf_actions(part, values[key])
        return
    flat = np.asarray(values).reshape(len(values), -1)
    if isinstance(space, spaces.Box):
        # The bounds of the space are scaled to -1..1, the range of a behavior's actions.
        middle, half, bounded = _range(space)
        yield "continuous", (flat - middle) / half, bounded
    else:
        # Choices of a behavior begin with 0, those of Gymnasium's spaces with `start`.
        first = np.ravel(getattr(space, "start", 0))
        yield "discrete", flat - first, np.ones(flat.shape[1], np.bool_)


def _range(box: Any) -> tuple[AnyArray, AnyArray, BoolArray]:
    """Return the middle of each dimension of a Box, half its width, and whether it has bounds."""
    low, high = np.ravel(box.low).astype(np.float64), np.ravel(box.high).astype(np.float64)
    # Dimensions without bounds get the bounds -1..1, with which scaling does not change a number.
    bounded = np.isfinite(low) & np.isfinite(high)
    low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    # A dimension with equal bounds has the width 0, which cannot be a divisor.
    return (low + high) / 2, np.where(high > low, (high - low) / 2, 1.0), bounded


def _map_leaves(space: Any, make: Callable[[Any], Any]) -> Any:
    """Return dicts and tuples in the form of a space, with `make(leaf)` in place of each leaf."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _map_leaves(part, make) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_map_leaves(part, make) for part in space.spaces)
    return make(space)


def write_dataset(demo: Demonstration, dataset_id: str, env_id: str | None = None) -> list[str]:
    """Write the ended episodes as a Minari dataset of this machine; return lines of text.

    Args:
        demo: the demonstration.
        dataset_id: id of the dataset, such as `people/maze-v0`.
        env_id: id of the Gymnasium environment that gives the spaces and is named in the dataset.
            None for spaces of plain numbers, with actions from -1 to 1.

    Raises:
        DemonstrationError: The dataset exists, no episode has ended, or the environment has
            another behavior.
        SettingsError: There is no such environment.
    """
    import minari

    source = _checked_source(dataset_id)
    if dataset_id in minari.list_local_datasets():
        raise DemonstrationError(
            f"{source}: exists already; raise the version, or `minari delete {dataset_id}`"
        )
    env = mask_key = None
    observation_space, action_space = _spaces(demo.spec)
    if env_id is not None:
        env, mask_key = _environment(env_id, demo.spec)
        observation_space, action_space = env.observation_space, env.action_space
    buffers = _buffers(demo, observation_space, action_space, mask_key)
    if not buffers:
        raise DemonstrationError(f"{source}: no episode with an action has ended; nothing to write")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Minari warns that no author is given
            minari.create_dataset_from_buffers(
                dataset_id,
                buffers,
                env=env,
                observation_space=observation_space,
                action_space=action_space,
                description=f"demonstration of {demo.behavior_name}",
                jpeg_encoding=False,
            )
    # An incomplete dataset is deleted, because it would block the next attempt.
    except BaseException:
        with contextlib.suppress(OSError):
            minari.delete_dataset(dataset_id)
        raise
    return [
        f"spaces        observation {observation_space}, action {action_space}",
        f"wrote         {source}: {len(buffers)} episodes, {sum(map(len, buffers))} steps",
    ]


def _buffers(
    demo: Demonstration, observation_space: Any, action_space: Any, mask_key: str | None
) -> list[Any]:
    """Return the ended episodes with at least one action, each as Minari's `EpisodeBuffer`."""
    from minari.data_collector import EpisodeBuffer

    ends = np.flatnonzero(demo.done).tolist()
    firsts = [0, *(end + 1 for end in ends)]
    # An episode with only a closing pair has no action, and Minari refuses empty episodes.
    spans = [(first, end) for first, end in zip(firsts, ends, strict=False) if first < end]
    return [
        EpisodeBuffer(
            id=number,
            observations=_observations(demo, slice(first, end + 1), observation_space, mask_key),
            **_episode(demo, first, end, action_space),
        )
        for number, (first, end) in enumerate(spans)
    ]


def _observations(demo: Demonstration, rows: slice, space: Any, mask_key: str | None) -> Any:
    """Return the observations in `rows` as values of the observation space, masks included."""
    obs = iter([values[rows] for values in demo.obs])

    def native(leaf: Any) -> AnyArray:
        return _native_obs(leaf, next(obs))

    if mask_key is None:
        return _map_leaves(space, native)
    branches = demo.spec.action_spec.discrete_branches
    masks = demo.action_mask or [np.zeros((len(demo.done), size), np.bool_) for size in branches]
    # In Gymnasium's masks 1 means allowed, in ML-Agents' masks True means forbidden.
    allowed = iter((~np.concatenate(masks, axis=1)[rows]).T)

    def native_mask(leaf: Any) -> AnyArray:
        flat = np.stack([next(allowed) for _ in range(int(np.prod(leaf.shape)))], axis=1)
        return flat.reshape(len(flat), *leaf.shape).astype(leaf.dtype)

    return {
        key: _map_leaves(part, native_mask if key == mask_key else native)
        for key, part in space.spaces.items()
    }


def _episode(
    demo: Demonstration, first: int, end: int, action_space: Any
) -> dict[str, AnyArray | dict[str, Any] | tuple[Any, ...]]:
    """Return an episode's actions, rewards and ends; the pair `end` closes the episode."""
    is_last = np.arange(first, end) == end - 1
    # In a demonstration, the reward of an action is in the pair after the action's pair.
    return {
        "actions": _native_actions(action_space, demo, slice(first, end)),
        "rewards": demo.reward[first + 1 : end + 1].astype(np.float64),
        "terminations": is_last & ~demo.interrupted[end],
        "truncations": is_last & demo.interrupted[end],
    }


def _environment(env_id: str, spec: BehaviorSpec) -> tuple[Any, str | None]:
    """Return an environment that fits `spec`, and the key of its action mask; None without mask."""
    from pipeline.simulators.bridges.gymnasium_bridge import make_environment

    name = env_id.removeprefix("gymnasium:")
    # The environment is not stepped: Minari needs its spaces and its specification only.
    env = make_environment(name, {})
    codec = _codec(env.observation_space, env.action_space, name, spec)
    action_spec = codec.spec.action_spec
    shapes = [tuple(obs.shape) for obs in codec.spec.observation_specs]
    recorded = [tuple(obs.shape) for obs in spec.observation_specs]
    if shapes != recorded or action_spec != spec.action_spec:
        raise DemonstrationError(
            f"{name}: observes {shapes} and takes the actions ({action_spec}), but in the "
            f"demonstration these are {recorded} and ({spec.action_spec}); name the environment in "
            "which it was recorded, or leave out --env"
        )
    return env, codec.mask_key


def _spaces(spec: BehaviorSpec) -> Iterator[Any]:
    """Yield the spaces of a behavior's observations and actions; images have channels last."""
    from gymnasium import spaces

    seen: list[Any] = []
    acted: list[Any] = []
    for obs in spec.observation_specs:
        is_image = len(obs.shape) == 3
        shape = (*obs.shape[1:], obs.shape[0]) if is_image else obs.shape
        low, high = (0.0, 1.0) if is_image else (-np.inf, np.inf)
        seen.append(spaces.Box(low, high, shape, np.float32))
    size, branches = spec.action_spec
    if size:
        acted.append(spaces.Box(-1.0, 1.0, (size,), np.float32))
    if branches:
        one = len(branches) == 1
        acted.append(spaces.Discrete(branches[0]) if one else spaces.MultiDiscrete([*branches]))
    for parts in (seen, acted):
        yield parts[0] if len(parts) == 1 else spaces.Tuple(parts)


def _native_obs(space: Any, values: AnyArray) -> AnyArray:
    """Return observations [T, *shape] of a behavior as values of one leaf of a Gymnasium space."""
    from gymnasium import spaces

    from pipeline.simulators.bridges.spaces import image_layout, image_range, is_of_bytes

    # Bridges observe discrete spaces as one-hot vectors, so the index of the 1 is the choice.
    if isinstance(space, spaces.Discrete):
        return np.asarray(values.argmax(axis=1) + space.start)
    if isinstance(space, spaces.MultiDiscrete):
        parts = np.split(values, np.cumsum(np.ravel(space.nvec))[:-1], axis=1)
        values = np.stack([part.argmax(axis=1) for part in parts], axis=1) + np.ravel(space.start)
    if isinstance(space, spaces.Box) and values.ndim == 4:
        if image_layout(space, "always") == "channels last":
            values = values.transpose(0, 2, 3, 1)
        # This is the inverse of the conversion in `bridges.spaces`.
        low, width = image_range(space)
        values = values.reshape(len(values), *space.shape) * width + low
    elif isinstance(space, spaces.Box) and image_layout(space) and is_of_bytes(space):
        # The image was observed as a vector of bytes (with `visual: never`), or else as a vector of
        # numbers in 0..1.
        values = values * (255 if values.max(initial=0) <= 1 else 1)
    # Numbers are rounded first, because the conversion to integers drops fractions: a rounding
    # error would turn 3 into 2.
    if np.issubdtype(space.dtype, np.integer):
        values = np.rint(values)
    return np.asarray(values.reshape(len(values), *space.shape), dtype=space.dtype)


def _native_actions(space: Any, demo: Demonstration, rows: slice) -> Any:
    from gymnasium import spaces

    numbers, choices = iter(demo.continuous[rows].T), iter(demo.discrete[rows].T)

    def native(leaf: Any) -> AnyArray:
        size = int(np.prod(leaf.shape))
        if isinstance(leaf, spaces.Box):
            middle, half, _ = _range(leaf)
            flat = middle + half * np.stack([next(numbers) for _ in range(size)], axis=1)
            flat = np.rint(flat) if np.issubdtype(leaf.dtype, np.integer) else flat
        else:
            flat = np.stack([next(choices) for _ in range(size)], axis=1)
            flat = flat + np.ravel(getattr(leaf, "start", 0))
        return np.asarray(flat.reshape(len(flat), *leaf.shape), dtype=leaf.dtype)

    return _map_leaves(space, native)
