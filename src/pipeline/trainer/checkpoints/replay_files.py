"""Files of a replay beside the checkpoint that names them.

A run that has ended, or was stopped, has one, `replay-<step>.npz`. A resume point writes the rows
that have come since the one before, `replay-<step>-<number>.npz`, because a replay may be large and
most of it stays as it is. The files are joined again where a run goes on, and one whose rows have
all been overwritten is deleted. A run that is killed before its checkpoint is written continues
from the checkpoint before, with the files that it names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files
from pipeline.arrays import AnyArray
from pipeline.data.replay import Replay
from pipeline.trainer.checkpoints.file import digest, from_saved, not_written, reason_of
from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)


def save_replay(folder: Path, learner: Learner) -> dict[str, Any]:
    """Write the whole replay, if it is to be kept, and return its entries in the checkpoint.

    Raises:
        CheckpointError: The file cannot be written.
    """
    if learner.replay_to_keep is None:
        return {}
    state = learner.replay_to_keep.state_dict()
    name = f"replay-{learner.step}.npz"
    _write(folder / name, state)
    return {"replay": name, "replay_digest": digest(state)}


def save_new_rows(folder: Path, learner: Learner) -> dict[str, Any]:
    """Write the rows that no file has, and return the replay's entry in the checkpoint.

    Raises:
        CheckpointError: The file cannot be written.
    """
    replay = learner.replay_to_keep
    if replay is None:
        return {}
    state = replay.new_rows()
    n_new = len(state["place"])
    if n_new:
        # Numbered: rows may come without a step, and the checkpoint still names the last file.
        number = 1 + (_number(replay.kept[-1][0]) if replay.kept else 0)
        name = f"replay-{learner.step}-{number}.npz"
        _write(folder / name, state)
        replay.note_kept(name, digest(state), n_new)
    return {"replay": [list(entry) for entry in replay.kept]}


def delete_older_replays(folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Delete replay files that the checkpoint does not name; none if it names none."""
    names = {name for name, _ in _named(checkpoint)}
    for path in folder.glob("replay-*.npz") if names else ():
        if path.name not in names:
            path.unlink(missing_ok=True)


def load_replay(folder: Path, checkpoint: Mapping[str, Any], learner: Learner) -> None:
    """Fill the replay of a learner that keeps it; begin with an empty one where that fails."""
    replay = learner.replay_to_keep
    if replay is None:
        return
    if "replay_rows" in checkpoint:  # of a process that has no files of its own
        replay.load_state_dict(from_saved(checkpoint["replay_rows"]))
        return
    named = _named(checkpoint)
    reason = "" if named else "the run was not saved with save_replay_buffer: true"
    for name, expected in named:
        reason = reason or _load(replay, folder / name, expected)
    if reason:
        replay.clear()
        text = "Replay buffer was unable to load, starting from scratch. (%s)"
        _log.warning(text, reason)


def _load(replay: Replay, path: Path, expected: str | None) -> str:
    """Add the rows of a file to the replay, and return why that failed, if it did."""
    try:
        # numpy leaves a file open that it cannot read
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            state = dict(saved)
        actual = digest(state)
        if expected not in (None, actual):
            return f"{path}: its values are not those that were saved"
        replay.extend(state)
        replay.note_kept(path.name, actual, len(state["place"]))
    except Exception as error:  # noqa: BLE001  # whatever NumPy makes of a damaged file
        return f"{path}: {reason_of(error)}"
    return ""


def _named(checkpoint: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return name and digest of each file that a checkpoint needs, the oldest rows first.

    Earlier versions name one file, and the earliest of them no digest.
    """
    named = checkpoint.get("replay") or []
    if isinstance(named, str):
        return [(named, checkpoint.get("replay_digest"))]
    return [(name, expected) for name, expected, _ in named]


def _number(name: str) -> int:
    """Return the number of a file of new rows; 0 of a whole replay."""
    last = name.removesuffix(".npz").split("-")[2:]
    return int(last[0]) if last else 0


def _write(path: Path, state: Mapping[str, AnyArray]) -> None:
    try:
        with files.whole(path) as temporary, temporary.open("wb") as file:
            # numpy puts no time stamps into it: equal replays give equal bytes
            np.savez(file, **state)  # type: ignore[arg-type]  # stubs take names for its options
    except OSError as error:
        raise not_written(path, "the replay buffer", error) from error
