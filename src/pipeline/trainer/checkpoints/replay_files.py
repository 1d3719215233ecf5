"""Files of a replay buffer; the checkpoint in the same folder lists their names.

A run that has ended or was stopped has one file, `replay-<step>.npz`. At a resume point only the
rows since the previous resume point are written, to `replay-<step>-<number>.npz`, because a replay
may be large and most of its rows do not change. A resumed run reads all files; a file is deleted
when all of its rows have been overwritten. A run that is killed before its checkpoint is written
continues from the previous checkpoint, with the files that the previous checkpoint names.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files
from pipeline.core.arrays import AnyArray
from pipeline.data.replay import Replay
from pipeline.trainer.checkpoints.file import digest, from_saved, reason_of, written
from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)


def save_replay(folder: Path, learner: Learner) -> dict[str, Any]:
    """Write the whole replay if `save_replay_buffer` is set; return the entries that name it."""
    if learner.replay_to_keep is None:
        return {}
    state = learner.replay_to_keep.state_dict()
    name = f"replay-{learner.step}.npz"
    _write(folder / name, state)
    return {"replay": name, "replay_digest": digest(state)}


def save_new_rows(folder: Path, learner: Learner) -> dict[str, Any]:
    """Write the rows that are in no file yet, if `save_replay_buffer` is set.

    Returns the checkpoint's entry that names all files of the replay, or an empty map.
    """
    replay = learner.replay_to_keep
    if replay is None:
        return {}
    state = replay.new_rows()
    n_new = len(state["place"])
    if n_new:
        # The number makes the name unique: new rows may come without a new step, and the last
        # checkpoint still names the earlier file.
        number = 1 + (_number(replay.kept[-1][0]) if replay.kept else 0)
        name = f"replay-{learner.step}-{number}.npz"
        _write(folder / name, state)
        replay.note_kept(name, digest(state), n_new)
    return {"replay": [list(entry) for entry in replay.kept]}


def delete_older_replays(folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Delete the replay files that `checkpoint` does not name; delete none if it names none."""
    names = {name for name, _ in _named(checkpoint)}
    for path in folder.glob("replay-*.npz") if names else ():
        if path.name not in names:
            path.unlink(missing_ok=True)


def load_replay(folder: Path, checkpoint: Mapping[str, Any], learner: Learner) -> None:
    """Load a learner's replay from its files; if that fails, warn and leave the replay empty."""
    replay = learner.replay_to_keep
    if replay is None:
        return
    if "replay_rows" in checkpoint:  # a process of rank 1 or above, which writes no files
        replay.load_state_dict(from_saved(checkpoint["replay_rows"]))
        return
    named = _named(checkpoint)
    reason = "" if named else "the run was not saved with save_replay_buffer: true"
    for name, expected in named:
        # Without one of the files the rows would have a gap, so no later file is read.
        reason = reason or _load(replay, folder / name, expected)
    if reason:
        replay.clear()
        # The first sentence is the text of ML-Agents.
        text = "Replay buffer was unable to load, starting from scratch. (%s)"
        _log.warning(text, reason)


def _load(replay: Replay, path: Path, expected: str | None) -> str:
    """Add the rows of a file to the replay; return why that failed, or "" if it did not fail."""
    try:
        # The file is opened here, because np.load does not close a file that it cannot read.
        # Pickles are refused, because a pickle in a foreign file could run any code.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            state = dict(saved)
        actual = digest(state)
        if expected not in (None, actual):
            return f"{path}: its values do not match its digest"
        replay.extend(state)
        replay.note_kept(path.name, actual, len(state["place"]))
    except Exception as error:  # noqa: BLE001  # NumPy raises many types for a damaged file
        return f"{path}: {reason_of(error)}"
    return ""


def _named(checkpoint: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return name and digest of each file that a checkpoint needs, the oldest rows first.

    Checkpoints of earlier versions name one file; the earliest versions stored no digest.
    """
    named = checkpoint.get("replay") or []
    if isinstance(named, str):
        return [(named, checkpoint.get("replay_digest"))]
    return [(name, expected) for name, expected, _ in named]


def _number(name: str) -> int:
    """Return the number in the name of a file of new rows; 0 for a whole replay."""
    last = name.removesuffix(".npz").split("-")[2:]
    return int(last[0]) if last else 0


def _write(path: Path, state: Mapping[str, AnyArray]) -> None:
    with (
        written(path, "the replay buffer"),
        files.whole(path) as temporary,
        temporary.open("wb") as file,
    ):
        # np.savez writes no time stamps, so equal replays give equal bytes.
        np.savez(file, **state)  # type: ignore[arg-type]  # stubs take names for its options
