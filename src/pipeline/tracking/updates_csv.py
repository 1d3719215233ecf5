"""A row for every update of the networks: the metrics file that `mlagents-learn --debug` had."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pipeline import files
from pipeline.tracking.base import Sink, Update

HEADER = (
    "Brain name",
    "Time to update policy",
    "Time since start of training",
    "Time for last experience collection",
    "Number of experiences used for training",
    "Mean return",
)
"""The header of ML-Agents 0.8 to 0.12; times in seconds."""


@dataclass(kw_only=True, slots=True)
class _Last:
    """The state after a behavior's last update; None where unknown."""

    file: TextIO
    at: float
    update_s: float = 0.0
    step: int | None = None
    n_episodes: int | None = None


class UpdatesCsvSink(Sink):
    """Appends a row per update to `<folder>/<behavior>.csv`.

    The number of experiences is the steps since the update before, and the mean return is that of
    the episodes since then. Both are empty in the first row after a resume, where neither is known.
    """

    def __init__(self, folder: Path | str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = Path(folder)
        self._clock = clock
        self._start = clock()
        self._last: dict[str, _Last] = {}

    def updated(self, behavior: str, update: Update) -> None:
        """Write one row."""
        now = self._clock()
        last = self._last.get(behavior) or self._opened(behavior)
        # `update_s` is the sum of this process, so the difference is that of one update.
        spent_s = update.update_s - last.update_s
        # Only the latest returns are kept; with more new episodes the mean is over these alone.
        n_new = None if last.n_episodes is None else update.n_episodes - last.n_episodes
        returns = list(update.recent_returns)[-n_new:] if n_new else []
        row = [
            behavior,
            f"{spent_s:.6g}",
            f"{now - self._start:.6g}",
            f"{max(now - last.at - spent_s, 0.0):.6g}",
            "" if last.step is None else str(update.step - last.step),
            f"{sum(returns) / len(returns):.6g}" if returns else "",
        ]
        csv.writer(last.file, lineterminator="\n").writerow(row)
        # At once, so that a killed run has its rows.
        last.file.flush()
        last.at, last.update_s = now, update.update_s
        last.step, last.n_episodes = update.step, update.n_episodes

    def close(self) -> None:
        """Close the files."""
        for last in self._last.values():
            last.file.close()
        self._last.clear()

    def _opened(self, behavior: str) -> _Last:
        """Open the behavior's file, and write its header when it is new."""
        path = files.named(self._folder, behavior, ".csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        header = ",".join(HEADER) + "\n"
        resumed = path.exists()
        if resumed and not (path.is_file() and path.read_bytes().startswith(header.encode())):
            files.keep_aside(path, "it does not begin with the header of this file")
            resumed = False
        file = path.open("a", encoding="utf-8", newline="")
        last = _Last(file=file, at=self._start)
        if not resumed:
            csv.writer(file, lineterminator="\n").writerow(HEADER)
            last.step = last.n_episodes = 0
        self._last[behavior] = last
        return last
