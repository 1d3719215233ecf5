"""The learning curve as a CSV file: the record that reports and `dvc plots` read."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.tracking import names
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS = {
    "reward": names.REWARD,
    "reward_std": names.REWARD_STD,
    "episode_length": names.EPISODE_LENGTH,
    "policy_loss": names.POLICY_LOSS,
    "value_loss": names.VALUE_LOSS,
    "entropy": names.ENTROPY,
    "learning_rate": names.LEARNING_RATE,
}
"""Columns that every file has, and the tags they hold; other tags become columns as they appear."""

_KEYS = ("behavior", "step")
_SHORT = {tag: column for column, tag in COLUMNS.items()}


class CsvSink(Sink):
    """Appends one row per summary to `path`, and survives a kill and a resume.

    Wall times are left out, so that equal runs give equal bytes.

    The first row of a behavior after opening an existing file replaces the rows at the same and
    later steps: those were written after the checkpoint that training resumed from.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._header, self._rows = _read(self.path)
        self._behaviors: set[str] = set()
        self._rewrite()

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Add a row; rewrite the file when it gets a new column or loses rows."""
        row = {_SHORT.get(tag, tag): f"{v:.6g}" for tag, v in values.items() if _is_stored(tag)}
        row |= {"behavior": behavior, "step": str(step)}
        rows = self._rows
        if behavior not in self._behaviors:
            # A resumed run repeats the steps since its checkpoint, and must not chart them twice.
            self._behaviors.add(behavior)
            rows = [r for r in self._rows if r["behavior"] != behavior or int(r["step"]) < step]
        new = [column for column in row if column not in self._header]
        # Appending is enough for nearly every row, and cannot lose the ones before.
        if new or len(rows) < len(self._rows):
            self._header += new
            self._rows = [*rows, row]
            self._rewrite()
            return
        self._rows.append(row)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            self._writer(file).writerow(row)

    def _rewrite(self) -> None:
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(self._rows)
        files.write_whole(self.path, text.getvalue())

    def _writer(self, file: io.TextIOBase | io.StringIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._header, restval="", lineterminator="\n")


def read_points(path: Path) -> list[tuple[str, str, float, int]]:
    """Return behavior, tag, value and step of each number in a file of `CsvSink`."""
    _, rows = _read(path)
    return [
        (row["behavior"], COLUMNS.get(column, column), float(text), int(row["step"]))
        for row in rows
        for column, text in row.items()
        if column not in _KEYS and text
    ]


def _is_stored(tag: str) -> bool:
    return tag not in names.HIDDEN and not tag.startswith(names.TIMING)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return header and rows of an earlier attempt; a row that a kill cut short is dropped."""
    header = [*_KEYS, *COLUMNS]
    if not path.exists():
        return header, []
    text = path.read_text(encoding="utf-8")
    # A row without its line break was cut short by a kill, even if it looks complete.
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    rows = [row for row in reader if (row.get("step") or "").isdigit() and None not in row.values()]
    old = list(reader.fieldnames or [])
    return (old if old[: len(header)] == header else header), rows
