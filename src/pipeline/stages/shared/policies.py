"""`policy.pt`: the checkpoints of all behaviors of a run in one file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.errors import CheckpointError, SettingsError
from pipeline.stages.shared.attempt import read_map
from pipeline.tracking.run_metadata import dvc_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

DIGEST = "policy_md5"
"""Key in export.json, and in the metrics.json of `evaluate`: DVC's digest of the policy.pt."""


def join(
    checkpoints: Mapping[str, Path], target: Path, *, history: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write one file from a checkpoint for each behavior; equal states give equal bytes.

    `history` has the records of the stages that made them, the first stage's first.
    """
    from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint

    # Sorted, because the order of the entries is part of the file's bytes.
    states = {name: load_checkpoint(path) for name, path in sorted(checkpoints.items())}
    text = json.dumps(list(history), sort_keys=True)
    save_checkpoint(target, {"behaviors": states, "history": text})


def history(path: Path) -> list[dict[str, Any]]:
    """Return the `history` of `join`; empty for a file of an earlier version."""
    from pipeline.trainer.checkpoints.file import load_checkpoint

    records: list[dict[str, Any]] = json.loads(load_checkpoint(path).get("history", "[]"))
    return records


def is_outdated(record: Path, policy: Path) -> bool:
    """Return whether `policy`, a policy.pt, is another one than an evaluation or export is of.

    `record` is the metrics.json of `evaluate` or the export.json. Without the policy, as in a clone
    that has not pulled it, nothing is known.
    """
    noted = {values.get(DIGEST) for values in read_map(record).values() if isinstance(values, dict)}
    return policy.is_file() and not noted <= {None, dvc_digest(policy)}


def split(path: Path, folder: Path) -> dict[str, Path]:
    """Write the checkpoint of each behavior into `folder`, and return their paths.

    Raises:
        CheckpointError: `path` was not written by `join`.
    """
    from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint

    states = load_checkpoint(path).get("behaviors")
    if not isinstance(states, dict):
        raise CheckpointError(f"{path}: this is not the policy.pt of a stage; run its stage again")
    try:
        checkpoints = {name: files.named(folder, name, ".pt") for name in states}
    except SettingsError as error:
        raise CheckpointError(f"{path}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in checkpoints.items():
        # `format` is written again by `save_checkpoint`.
        save_checkpoint(target, {k: v for k, v in states[name].items() if k != "format"})
    return checkpoints
