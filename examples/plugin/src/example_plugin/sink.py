"""A sink: every summary as one line of JSON in `summaries.jsonl` of the run's folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.tracking.sinks import TrackedRun


def for_run(run: TrackedRun) -> JsonLinesSink | None:
    """Every run is recorded; None would leave one out."""
    return JsonLinesSink(run.folder / "summaries.jsonl")


class JsonLinesSink(Sink):
    """Appends one line per summary to `path`; a resumed run drops the lines that it repeats."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._behaviors: set[str] = set()

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Write one summary."""
        if behavior not in self._behaviors:
            self._behaviors.add(behavior)
            self._drop_repeated(behavior, step)
        line = json.dumps({"behavior": behavior, "step": step, **values})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _drop_repeated(self, behavior: str, step: int) -> None:
        text = self._path.read_text("utf-8") if self._path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("}\n")]
        earlier = [json.loads(line) for line in lines]  # a kill may have cut the last
        kept = [
            line
            for line, old in zip(lines, earlier, strict=True)
            if old["behavior"] != behavior or old["step"] < step
        ]
        files.write_whole(self._path, "".join(kept))
