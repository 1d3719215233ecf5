"""Recorded experience as rows to imitate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import DemonstrationError
from pipeline.protocol.demo import Demonstration, read_demo
from pipeline.settings.schema import DemoSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.arrays import AnyArray, BoolArray, FloatArray, IntArray
    from pipeline.protocol.specs import BehaviorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """R observations and what the expert did there."""

    obs: list[FloatArray]
    """[R, *shape] per observation."""
    continuous: FloatArray
    """[R, A] in the environment's range -1..1."""
    discrete: IntArray
    """int32 [R, branches]."""
    lengths: AnyArray | None = None
    """int64 [E] rows of each episode, one after another; None where rows are in no such order."""
    weights: FloatArray | None = None
    """[R] how often each row is drawn, against others; None where all are drawn alike."""
    done: BoolArray | None = None
    """bool [R] whether the task ended with the row, not where it was cut short; None if unknown."""

    def __len__(self) -> int:
        return len(self.continuous)


def demonstration_files(path: Path | str) -> list[Path]:
    """The `.demo` files that `path` names: itself, or all in the folder, sorted.

    Raises:
        DemonstrationError: There are none.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.demo"))
        if not files:
            raise DemonstrationError(f"{path}: there are no '.demo' files in this directory")
        return files
    if not path.exists():
        raise DemonstrationError(f"{path}: this demonstration file or directory does not exist")
    return [path]


def load_expert_rows(sources: Sequence[DemoSource | Path | str], spec: BehaviorSpec) -> ExpertRows:
    """Rows of all demonstrations, without those that only close an episode.

    Args:
        sources: files and folders, with a weight or without one.
        spec: of the behavior that is to imitate.

    Raises:
        DemonstrationError: A file cannot be read, is empty, or has other shapes than `spec`.
    """
    parts, weights = [], []
    for source in sources:
        path, weight = _path_and_weight(source)
        for file in demonstration_files(path):
            demonstration = read_demo(file)
            _check_fits(file, demonstration, spec)
            keep = ~demonstration.done
            parts.append((demonstration, keep))
            weights.append(np.full(int(keep.sum()), weight, dtype=np.float32))
    rows = ExpertRows(
        obs=[
            np.concatenate([d.obs[i][keep] for d, keep in parts])
            for i in range(len(spec.observation_specs))
        ],
        continuous=np.concatenate([d.continuous[keep] for d, keep in parts]),
        discrete=np.concatenate([d.discrete[keep] for d, keep in parts]),
        lengths=np.concatenate([_episode_lengths(d.done) for d, _ in parts]),
        done=np.concatenate([_ending_rows(d)[keep] for d, keep in parts]),
        weights=_unless_equal(np.concatenate(weights)),
    )
    if len(rows) == 0:
        named = ", ".join(str(_path_and_weight(one)[0]) for one in sources)
        raise DemonstrationError(f"{named}: no step holds an action to learn from")
    return rows


def _path_and_weight(source: DemoSource | Path | str) -> tuple[Path | str, float]:
    if isinstance(source, DemoSource):
        return source.path, source.weight
    return source, 1.0


def _unless_equal(weights: FloatArray) -> FloatArray | None:
    return weights if np.unique(weights).size > 1 else None


def _ending_rows(demonstration: Demonstration) -> BoolArray:
    """Bool [P] whether the pair after each one closes an episode that was not cut short."""
    ending = np.zeros(len(demonstration), dtype=np.bool_)
    ending[:-1] = (demonstration.done & ~demonstration.interrupted)[1:]
    return ending


def _episode_lengths(done: BoolArray) -> AnyArray:
    """Rows of each episode that has any; a row that closes an episode is none, nor is a file's end.

    Args:
        done: [P] whether the pair closes an episode.
    """
    counts = np.bincount(np.cumsum(done)[~done])
    return counts[counts > 0]


def _check_fits(file: Path, demonstration: Demonstration, spec: BehaviorSpec) -> None:
    found, wanted = demonstration.spec, spec
    if found.action_spec != wanted.action_spec:
        raise DemonstrationError(
            f"{file}: its actions are {found.action_spec}, the behavior's are "
            f"{wanted.action_spec}; record demonstrations of this behavior, or name another file"
        )
    if len(found.observation_specs) != len(wanted.observation_specs):
        raise DemonstrationError(
            f"{file}: it has {len(found.observation_specs)} observations, the behavior has "
            f"{len(wanted.observation_specs)}; record demonstrations of this behavior"
        )
    pairs = zip(found.observation_specs, wanted.observation_specs, strict=True)
    for index, (has, needs) in enumerate(pairs):
        if tuple(has.shape) != tuple(needs.shape):
            raise DemonstrationError(
                f"{file}: observation {index} has shape {tuple(has.shape)}, the behavior's has "
                f"{tuple(needs.shape)}; record demonstrations of this behavior"
            )
