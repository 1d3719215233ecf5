"""The list of a run's checkpoints and lessons, as ML-Agents writes it."""

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline import files
from pipeline.version import __version__

# Version of the file's format in ML-Agents 1.1.0.
STATUS_FORMAT = "0.3.0"


class StatusFile:
    """`run_logs/training_status.json`: a run's existing checkpoints and its lessons."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / "run_logs" / "training_status.json"

    def read(self) -> dict[str, Any]:
        """Return the valid entries of the file; a file with invalid entries is renamed and kept."""
        status: Any = None
        # A file that is nested too deeply raises RecursionError.
        with contextlib.suppress(OSError, ValueError, RecursionError):
            text = files.decoded(self.path.read_bytes())
            status = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        is_map = isinstance(status, dict)
        entries = status if is_map else {}
        readable = {name: entry for name, entry in entries.items() if _is_entry(name, entry)}
        if (not is_map or len(readable) < len(entries)) and self.path.exists():
            files.keep_aside(self.path, "it has entries that are no checkpoints or lessons")
        return readable

    def add(
        self, behavior: str, checkpoint: Path, *, step: int, reward: float | None, **more: Any
    ) -> None:
        """Add a numbered checkpoint and its ONNX file, also as the behavior's final checkpoint.

        `reward` is the mean return of recent episodes; `more` are other values, such as `elo`.
        """
        status = self.read()
        entry = {
            "steps": step,
            "file_path": str(checkpoint.with_suffix(".onnx")),
            "reward": reward,
            "creation_time": time.time(),
            "auxillary_file_paths": [str(checkpoint)],  # ML-Agents' spelling
        }
        # ML-Agents, too, gives the final model the behavior's name without a step.
        final = {"file_path": str(files.named(self.run_dir, behavior, ".onnx"))}
        previous = status.get(behavior, {}).get("checkpoints", [])
        # A resumed run may write a checkpoint again, so its older entry is left out.
        remaining = [
            old for old in previous if old["steps"] != step and self._exists(behavior, old)
        ]
        status[behavior] = {
            "checkpoints": [*remaining, entry],
            "final_checkpoint": entry | final,
            **more,
        }
        self._write(status)

    def set_lessons(self, lessons: Mapping[str, int]) -> None:
        """Set the lesson number of each environment parameter."""
        lines = {parameter: {"lesson_num": number} for parameter, number in lessons.items()}
        self._write(self.read() | lines)

    def _exists(self, behavior: str, entry: Mapping[str, Any]) -> bool:
        folder = files.named(self.run_dir, behavior)
        return files.named(folder, behavior, f"-{entry['steps']}.pt").is_file()

    def _write(self, status: dict[str, Any]) -> None:
        status["metadata"] = {
            "stats_format_version": STATUS_FORMAT,
            "pipeline_version": __version__,
            "torch_version": str(torch.__version__),
        }
        files.write_json(self.path, status)


def _is_entry(name: str, entry: Any) -> bool:
    """Return whether this is a valid entry for a behavior, a lesson or `metadata`."""
    checkpoints = entry.get("checkpoints", []) if isinstance(entry, dict) else None
    # `bool` is a subclass of `int`, so the type is compared exactly.
    return isinstance(checkpoints, list) and (
        name == "metadata"
        or all(isinstance(c, dict) and type(c.get("steps")) is int for c in checkpoints)
    )


def _finite(text: str) -> float | None:
    """Return the number in `text`; None if it is not finite, because JSON has no such number."""
    number = float(text)
    return number if math.isfinite(number) else None
