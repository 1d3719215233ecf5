"""A sink: every summary as one line of JSON in `summaries.jsonl` of the run's folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.tracking.sinks import TrackedRun


def for_run(run: TrackedRun) -> JsonLinesSink | None:
    """Every run is recorded; None would leave one out."""
    return JsonLinesSink(run.folder / "summaries.jsonl")


class JsonLinesSink(Sink):
    """Appends one line per summary to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Write one summary."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"behavior": behavior, "step": step, **values})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
