"""Reads demonstrations as rows for imitation learning, merges demonstrations, and trims them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.core.specs import BehaviorSpec, other_names, other_order
from pipeline.demos.demo_file import Demonstration, parse_demo, read_demo, writing_demo
from pipeline.errors import DemonstrationError
from pipeline.settings.trainer.schema import DemoSource
from pipeline.wire.codec.generated.messages import AgentActionProto

_log = logging.getLogger(__name__)

# Relative error of a return that is a sum of float32 rewards.
_SLACK = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """R observations, and the expert's action at each observation."""

    obs: list[FloatArray]
    """Arrays [R, *shape], one per observation."""
    continuous: FloatArray
    """[R, A] continuous actions in -1..1."""
    discrete: IntArray
    """int32 [R, branches] discrete actions."""
    lengths: AnyArray | None = None
    """int64 [E] number of rows of each episode; None if the rows are not in order of episodes."""
    weights: FloatArray | None = None
    """[R] relative frequency with which each row is drawn; None if all rows are equally likely."""
    done: BoolArray | None = None
    """bool [R] whether the task ended with the row (and was not cut short); None if unknown."""

    def __len__(self) -> int:
        return len(self.continuous)


def demonstration_files(path: Path | str) -> list[Path]:
    """Return the file `path`, or all `.demo` files in the folder `path`, sorted by name.

    Raises:
        DemonstrationError: There is no such file.
    """
    path = Path(path)
    if path.is_dir():
        # The files are sorted, because the order of minibatches must not depend on the file system.
        files = sorted(path.glob("*.demo"))
        if not files:
            raise DemonstrationError(f"{path}: there are no '.demo' files in this directory")
        return files
    if not path.exists():
        raise DemonstrationError(f"{path}: this demonstration file or directory does not exist")
    return [path]


def load_expert_rows(sources: Sequence[DemoSource | Path | str], spec: BehaviorSpec) -> ExpertRows:
    """Return the observations and actions of all demonstrations.

    The last pair of an episode is left out, because it has an observation but no action.

    Args:
        sources: files and folders, with or without a weight.
        spec: specification of the behavior that imitates the demonstrations.

    Raises:
        DemonstrationError: A file cannot be read, is empty, or has other shapes than `spec`.
    """
    weighted = [
        entry if isinstance(entry, DemoSource) else DemoSource(path=str(entry)) for entry in sources
    ]
    parts, weights = [], []
    for source in weighted:
        for file in demonstration_files(source.path):
            demonstration = read_demo(file)
            _check_fits(file, demonstration, spec)
            keep = ~demonstration.done
            parts.append((demonstration, keep))
            # The weight is repeated for each row, so a longer file counts more.
            weights.append(np.full(int(keep.sum()), source.weight, dtype=np.float32))
    every_weight = np.concatenate(weights)
    rows = ExpertRows(
        obs=[
            np.concatenate([d.obs[i][keep] for d, keep in parts])
            for i in range(len(spec.observation_specs))
        ],
        continuous=np.concatenate([d.continuous[keep] for d, keep in parts]),
        discrete=np.concatenate([d.discrete[keep] for d, keep in parts]),
        lengths=np.concatenate([_episode_lengths(d.done) for d, _ in parts]),
        # A row has the last action of an episode if the next pair closes the episode.
        done=np.concatenate(
            [np.append((d.done & ~d.interrupted)[1:], False)[keep] for d, keep in parts]
        ),
        weights=every_weight if np.unique(every_weight).size > 1 else None,
    )
    if len(rows) == 0:
        named = ", ".join(source.path for source in weighted)
        raise DemonstrationError(f"{named}: no step has an action to learn from; name other files")
    return rows


def _episode_lengths(done: BoolArray) -> AnyArray:
    """Return the number of steps of each episode that has a step.

    The pairs that close an episode, `done` [P], are no steps. Pairs after the last closing pair
    count as one episode.
    """
    # The number of closing pairs before a pair is the index of the pair's episode.
    counts = np.bincount(np.cumsum(done)[~done])
    return counts[counts > 0]


def merge_demos(
    sources: Sequence[Path | str], target: Path, *, behavior: str | None = None
) -> list[str]:
    """Write demonstrations, one after another, into one file; return lines of text about them.

    Imitation of the written file learns the same rows as imitation of all sources. An open episode
    at the end of a source is closed as cut short, so that it does not continue in the next source.
    Without `behavior`, all files must have the same behavior name.

    Raises:
        DemonstrationError: A file cannot be read, or has another behavior than the first file.
    """
    files = [file for source in sources for file in demonstration_files(source)]
    if target.resolve() in [file.resolve() for file in files]:
        raise DemonstrationError(f"{target}: is one of the files to merge; write another file")
    first = read_demo(files[0])
    # Demonstrations have behavior names without a team; `--behavior` may name a team.
    written = (behavior or first.behavior_name).partition("?")[0]
    steps = []
    with writing_demo(target, written, first.spec) as writer:
        for file in files:
            demo = read_demo(file)
            _check_fits(file, demo, first.spec)
            if behavior is None and demo.behavior_name != first.behavior_name:
                raise DemonstrationError(
                    f"{file}: has the behavior {demo.behavior_name!r}, but {files[0]} has "
                    f"{first.behavior_name!r}; if they are the same, give the name with --behavior"
                )
            # Messages are copied unchanged, so that unknown fields are kept.
            content = parse_demo(file)
            writer.append_messages(content.infos, content.actions)
            n_ended = int(demo.done.sum())
            step = f"read      {file}: {len(demo)} pairs, {n_ended} episodes ended"
            if not demo.done[-1] and file != files[-1]:
                # The closing pair repeats the last observation, as in files of recorders. Its
                # reward is 0, because the last pair has the reward already.
                end = content.infos[-1]
                end.done, end.max_step_reached, end.reward, end.group_reward = True, True, 0.0, 0.0
                writer.append_messages([end], [AgentActionProto()])
                step += ", and an open episode closed as cut short"
            steps.append(step)
    return [*steps, f"wrote     {target}: behavior {written}"]


def trim_demo(
    path: Path,
    target: Path,
    *,
    episodes: Sequence[int] | None = None,
    min_return: float | None = None,
    max_return: float | None = None,
    best: int | None = None,
) -> list[str]:
    """Write the ended episodes that meet every condition; return lines of text about them.

    Episodes are numbered from 1. A return is the sum of an episode's rewards; of equal returns,
    `best` keeps the earlier episode.

    Raises:
        DemonstrationError: The file cannot be read, or lacks an episode, or no episode is left.
    """
    demo = read_demo(path)
    returns = np.array(demo.returns())
    keep = _episodes_to_keep(path, returns, episodes, min_return, max_return, best)
    # The index of a pair's episode is the number of ends before the pair.
    episode: AnyArray = np.cumsum(demo.done) - demo.done
    # The appended False is for pairs of an open episode after the last end.
    rows = np.flatnonzero(np.append(keep, False)[episode])
    content = parse_demo(path)
    name = demo.metadata.demonstration_name
    with writing_demo(target, demo.behavior_name, demo.spec, name=name) as writer:
        infos = [content.infos[row] for row in rows]
        writer.append_messages(infos, [content.actions[row] for row in rows])
    # Pairs of an open episode have the index after the last ended episode.
    n_open = int((episode == len(returns)).sum())
    left_out = f"; {n_open} pairs after the last end left out" if n_open else ""
    return [
        f"read      {path}: {len(demo)} pairs, {len(returns)} episodes ended{left_out}",
        f"kept      {int(keep.sum())} episodes, {len(rows)} pairs, returns "
        f"{returns[keep].min():.6g} to {returns[keep].max():.6g}, "
        f"mean {returns[keep].mean():.6g} (of all: {returns.mean():.6g})",
        f"wrote     {target}: behavior {demo.behavior_name}",
    ]


def _episodes_to_keep(
    path: Path,
    returns: AnyArray,
    episodes: Sequence[int] | None,
    min_return: float | None,
    max_return: float | None,
    best: int | None,
) -> BoolArray:
    """Return bool [E], True for episodes that meet the conditions of `trim_demo`; at least one."""
    numbers = np.arange(1, len(returns) + 1)
    beyond = [number for number in episodes or () if number not in numbers]
    if beyond:
        raise DemonstrationError(
            f"{path}: there is no episode {beyond[0]}; its ended episodes are 1 to {len(returns)}"
        )
    keep = np.isin(numbers, numbers if episodes is None else episodes)
    # A sum of float32 rewards may differ slightly from the limit, a return that a user has read.
    if min_return is not None:
        keep &= returns >= min_return - _SLACK * max(1.0, abs(min_return))
    if max_return is not None:
        keep &= returns <= max_return + _SLACK * max(1.0, abs(max_return))
    if best is not None:
        # The sort is stable, so that the earlier of two episodes with equal returns is kept.
        ranked = np.argsort(np.where(keep, -returns, np.inf), kind="stable")
        keep &= np.isin(numbers, ranked[:best] + 1)
    if not keep.any():
        span = f" (returns {min(returns):.6g} to {max(returns):.6g})" if len(returns) else ""
        none_meets = f"none of its {len(returns)} ended episodes{span} meets the conditions"
        raise DemonstrationError(f"{path}: {none_meets}; relax them")
    return keep


def _check_fits(file: Path, demonstration: Demonstration, ours: BehaviorSpec) -> None:
    theirs = demonstration.spec
    # Sizes come first: with wrong sizes, a message about names would mislead.
    if theirs.action_spec != ours.action_spec:
        raise DemonstrationError(
            f"{file}: its actions are {theirs.action_spec}, the behavior's are "
            f"{ours.action_spec}; record demonstrations of this behavior, or name another file"
        )
    if len(theirs.observation_specs) != len(ours.observation_specs):
        raise DemonstrationError(
            f"{file}: it has {len(theirs.observation_specs)} observations, the behavior has "
            f"{len(ours.observation_specs)}; record demonstrations of this behavior"
        )
    pairs = zip(theirs.observation_specs, ours.observation_specs, strict=True)
    for index, (has, needs) in enumerate(pairs):
        if tuple(has.shape) != tuple(needs.shape):
            raise DemonstrationError(
                f"{file}: observation {index} has shape {tuple(has.shape)}, the behavior's has "
                f"{tuple(needs.shape)}; record demonstrations of this behavior (Unity orders "
                "sensors by their names, so a renamed sensor may have changed its place)"
            )
    names = other_names(theirs, ours)
    if names is not None and other_order(*names):
        raise DemonstrationError(
            f"{file}: its observations come in the order {names[0]}, the behavior's in the order "
            f"{names[1]}; record demonstrations of this behavior"
        )
    if names is not None:
        _log.warning(
            "%s: its observations are called %s, the behavior's %s. They are taken to mean the "
            "same, because their shapes agree; check that they mean the same.",
            file,
            *names,
        )
