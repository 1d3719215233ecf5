"""Every summary as a line of JSON, for programs that follow a run: `tail -f`, pandas, `jq`."""

import json
import time
from collections.abc import Mapping
from typing import Any

from pipeline import files
from pipeline.tracking import names
from pipeline.tracking.base import Sink
from pipeline.tracking.sinks import TrackedRun


class JsonLinesSink(Sink):
    """Appends `{"behavior": ..., "step": ..., "unix_s": ..., <tag>: <number>, ...}` per summary.

    A resumed run deletes the lines at the steps that it repeats.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._path = run.folder / "metrics.jsonl"
        self._keep_earlier = run.keep_earlier
        self._behaviors: set[str] = set()

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Write a summary."""
        # Repeated lines are deleted here and not in `__init__`, because only the first summary
        # shows from which step a resumed run repeats.
        if behavior not in self._behaviors:
            self._drop_repeated(behavior, step)
            self._behaviors.add(behavior)
        charted = {tag: value for tag, value in values.items() if tag not in names.HIDDEN}
        line = {"behavior": behavior, "step": step, "unix_s": round(time.time(), 3), **charted}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def _drop_repeated(self, behavior: str, step: int) -> None:
        """Delete all lines of a behavior from a step on, and incomplete lines."""
        # A new run deletes all lines, but not the lines that it has written for other behaviors.
        earlier = self._behaviors or self._keep_earlier
        data = self._path.read_bytes() if earlier and self._path.exists() else b""
        text = files.decoded(data)
        # The text after the last line break is empty, or a line that a kill has cut off.
        # `splitlines` would also split at other characters.
        complete = [line for line in text.split("\n")[:-1] if line.strip()]
        parsed = [(line, summary) for line in complete if (summary := _summary(line))]
        if len(parsed) < len(complete):
            files.keep_aside(self._path, "it has lines that are no summaries")
        lines = [
            f"{line}\n"
            for line, summary in parsed
            if summary["behavior"] != behavior or summary["step"] < step
        ]
        files.write_whole(self._path, "".join(lines))


def _summary(line: str) -> dict[str, Any]:
    """Return the summary in a line; {} if the line is not a summary."""
    try:
        summary = json.loads(line)
        is_known = isinstance(summary["step"], int) and "behavior" in summary
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return summary if is_known else {}


for_run = JsonLinesSink
