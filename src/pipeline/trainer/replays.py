"""The file that a replay is kept in, beside the checkpoint that continues the run.

Each state of a replay has a file of its own, `replay-<step>.npz`, which the checkpoint names: a run
that is killed between writing the two continues from the older of both. Plain arrays, nothing that
could be run.
"""

from __future__ import annotations

import logging
import zipfile
from typing import TYPE_CHECKING

import numpy as np

from pipeline import files
from pipeline.trainer.checkpoints import not_written, reason_of

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

_UNREADABLE = (OSError, KeyError, ValueError, EOFError, IndexError, zipfile.BadZipFile)


def save_replay(folder: Path, learner: Learner) -> str | None:
    """Write the replay, if it is to be kept, and give its file's name.

    Raises:
        CheckpointError: The file cannot be written.
    """
    if learner.replay_to_keep is None:
        return None
    path = folder / f"replay-{learner.step}.npz"
    try:
        with files.whole(path) as temporary, temporary.open("wb") as file:
            # numpy puts no time stamps into it: equal replays give equal bytes
            np.savez(file, **learner.replay_to_keep.state_dict())  # type: ignore[arg-type]  # stubs take names for its options
    except OSError as error:
        raise not_written(path, "the replay buffer", error) from error
    return path.name


def delete_older_replays(folder: Path, name: str | None) -> None:
    """Delete those that the checkpoint, which names `name`, does not need."""
    if name is None:
        return
    for path in folder.glob("replay-*.npz"):
        if path.name != name:
            path.unlink(missing_ok=True)


def load_replay(folder: Path, name: str | None, learner: Learner) -> None:
    """Fill the replay of a learner that keeps it; begin with an empty one where that fails."""
    replay = learner.replay_to_keep
    if replay is None:
        return
    reason = "the run was not saved with save_replay_buffer: true"
    try:
        if name is not None:
            # numpy leaves a file open that it cannot read
            with (folder / name).open("rb") as file, np.load(file, allow_pickle=False) as saved:
                replay.load_state_dict(dict(saved))
            return
    except _UNREADABLE as error:
        reason = f"{folder / name}: {reason_of(error)}" if name else reason
    _log.warning("Replay buffer was unable to load, starting from scratch. (%s)", reason)
