"""Every summary as a line of JSON, for programs that follow a run: `tail -f`, pandas, `jq`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.tracking import names
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.tracking.tracked_run import TrackedRun


class JsonLinesSink(Sink):
    """Appends `{"behavior": ..., "step": ..., "unix_s": ..., <tag>: <number>, ...}` per summary.

    A resumed run drops the lines at the steps that it repeats.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._path = run.folder / "metrics.jsonl"
        self._keep_earlier = run.keep_earlier
        self._known: set[str] = set()

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Write one summary."""
        # Not when it opens: only its first summary says from which step a resumed run repeats.
        if behavior not in self._known:
            self._drop_repeated(behavior, step)
            self._known.add(behavior)
        shown = {tag: value for tag, value in values.items() if tag not in names.HIDDEN}
        line = {"behavior": behavior, "step": step, "unix_s": round(time.time(), 3), **shown}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def _drop_repeated(self, behavior: str, step: int) -> None:
        """Keep the whole lines that are of other behaviors or of earlier steps."""
        # Lines of this run's other behaviors stay also where a run begins anew.
        earlier = self._known or self._keep_earlier
        text = self._path.read_text("utf-8") if earlier and self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines(keepends=True)  # a kill may cut the last
        read = [(line, json.loads(line)) for line in whole]
        kept = [line for line, one in read if one["behavior"] != behavior or one["step"] < step]
        files.write_whole(self._path, "".join(kept))


for_run = JsonLinesSink
