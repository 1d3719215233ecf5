"""Points of a learning curve that an MLflow run lacks, from the CSV file that is the record."""

from __future__ import annotations

import csv
import time
from typing import TYPE_CHECKING

from pipeline.tracking import mlflow_store
from pipeline.tracking.csvfile import COLUMNS

if TYPE_CHECKING:
    from pathlib import Path

_KEYS = frozenset({"behavior", "step"})


def fill(store: mlflow_store.Store, run: str, path: Path, *, prefix: bool) -> int:
    """Write the points of a curve that the run lacks, and give how many those were.

    A killed process takes along what it had not sent yet; training resumes after that, and would
    leave a gap. Wall times are in no file, so theirs stays.

    Args:
        store: where the run is.
        run: its id.
        path: a file of `CsvSink`.
        prefix: whether the run's names begin with the behavior's.
    """
    known: dict[str, set[int]] = {}
    now = int(time.time() * 1000)
    points = []
    for name, value, step in _points(path, prefix=prefix):
        if name not in known:
            known[name] = store.steps_of(run, name)
        if step not in known[name]:
            points.append((name, value, now, step))
    store.log_metrics(run, points)
    return len(points)


def _points(path: Path, *, prefix: bool) -> list[tuple[str, float, int]]:
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            start = f"{row['behavior']}/" if prefix else ""
            for column, text in row.items():
                if column not in _KEYS and text:
                    name = mlflow_store.clean(start + COLUMNS.get(column, column))
                    found.append((name, float(text), int(row["step"])))
    return found
