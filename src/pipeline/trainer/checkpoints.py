"""Checkpoints: written whole, read without running anything they contain."""

from __future__ import annotations

import glob
import io
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import CheckpointError
from pipeline.files import named, write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = 1


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` atomically; equal states give equal bytes.

    Raises:
        CheckpointError: The file cannot be written; what was there before is untouched.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(_without_identity({"format": FORMAT, **state}, {}), buffer)
    try:
        write_whole(path, buffer.getvalue())
    except OSError as error:
        what = f"the checkpoint of {len(buffer.getvalue())} bytes"
        raise not_written(path, what, error) from error


def _without_identity(value: Any, texts: dict[Any, Any]) -> Any:
    """`value` with one object for equal texts, and containers of its own in each place.

    Pickle writes an object that it meets again as a reference. Which objects are shared depends on
    whether they come from a program or from a file, and the bytes must not.
    """
    if isinstance(value, str | bytes):
        return texts.setdefault(value, value)
    if isinstance(value, dict):
        return {
            _without_identity(key, texts): _without_identity(item, texts)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_without_identity(item, texts) for item in value)
    return value


def not_written(path: Path, what: str, error: OSError) -> CheckpointError:
    """The error for a file of a run that cannot be written."""
    return CheckpointError(
        f"{path}: {what} cannot be written ({error.strerror or error}); the last good one is kept. "
        "Free space or choose another --results-dir, then resume"
    )


def load_checkpoint(path: Path, *, device: str = "cpu") -> dict[str, Any]:
    """Read what `save_checkpoint` wrote.

    Raises:
        CheckpointError: The file is missing, damaged, or of another format.
    """
    import torch

    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no checkpoint here") from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: this checkpoint cannot be read ({error.strerror or error})"
        ) from error
    if not _is_whole(content):
        raise CheckpointError(
            f"{path}: this is not a checkpoint, or it is damaged; use an older one"
        )
    try:
        state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:
        # whatever a foreign file makes of torch's reader; its own message advises to run the file
        raise CheckpointError(
            f"{path}: this is not a checkpoint of this program: it holds more than weights and "
            f"plain values ({type(error).__name__})"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: this is not a checkpoint of this program (format {FORMAT} is expected)"
        )
    return state


def to_saved(value: Any) -> Any:
    """`value` with tensors in place of NumPy arrays, at any depth."""
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, dict):
        return {key: to_saved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_saved(item) for item in value]
    return value


def from_saved(value: Any) -> Any:
    """What `to_saved` was given; arrays are new and may be written to."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.cpu().numpy().copy()
    if isinstance(value, dict):
        return {key: from_saved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_saved(item) for item in value]
    return value


def reason_of(error: Exception) -> str:
    """The first two lines of an error's message, in one: torch lists every weight that differs."""
    return " ".join(" ".join(str(error).splitlines()[:2]).split())


def _is_whole(content: bytes) -> bool:
    """Whether these are the bytes of an archive whose parts all have their checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, OSError):
        return False


def numbered(folder: Path, behavior: str, keep: int, step: int) -> tuple[Path, list[Path]]:
    """The file for a checkpoint at `step`, and the older ones to delete so that `keep` remain."""
    path = named(folder, behavior, f"-{step}.pt")
    existing = sorted(
        (
            p
            for p in folder.glob(f"{glob.escape(behavior)}-*.pt")
            if p.stem.removeprefix(f"{behavior}-").isdigit()
        ),
        key=lambda p: int(p.stem.removeprefix(f"{behavior}-")),
    )
    others = [p for p in existing if p != path]
    n_surplus = len(others) + 1 - keep
    return path, others[:n_surplus] if keep > 0 and n_surplus > 0 else []
