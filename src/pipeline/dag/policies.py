"""`policy.pt`: the checkpoints of all behaviors of a run in one file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.errors import CheckpointError, SettingsError


def join(
    checkpoints: Mapping[str, Path], target: Path, *, history: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write the checkpoints of all behaviors into one file; equal checkpoints give equal bytes.

    `history` has the records of the stages that made the checkpoints, in the order of stages.
    """
    # The import is late, because the module imports torch, which many stages do not need.
    from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint

    # The names are sorted, because the order of the entries is part of the file's bytes.
    states = {name: load_checkpoint(path) for name, path in sorted(checkpoints.items())}
    text = json.dumps(list(history), sort_keys=True)
    save_checkpoint(target, {"behaviors": states, "history": text})


def history(path: Path) -> list[dict[str, Any]]:
    """Return the `history` that `join` wrote into a file; [] for files of earlier versions."""
    from pipeline.trainer.checkpoints.file import load_checkpoint

    records: list[dict[str, Any]] = json.loads(load_checkpoint(path).get("history", "[]"))
    return records


def split(path: Path, folder: Path) -> dict[str, Path]:
    """Write the checkpoint of each behavior into `folder`, and return their paths.

    Raises:
        CheckpointError: `path` was not written by `join`.
    """
    from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint

    states = load_checkpoint(path).get("behaviors")
    if not isinstance(states, dict):
        raise CheckpointError(
            f"{path}: was not written by a stage of the pipeline; run the stage that makes it"
        )
    try:
        checkpoints = {name: files.named(folder, name, ".pt") for name in states}
    except SettingsError as error:
        raise CheckpointError(f"{path}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in checkpoints.items():
        # The entry `format` is left out, because `save_checkpoint` adds it.
        save_checkpoint(target, {k: v for k, v in states[name].items() if k != "format"})
    return checkpoints
