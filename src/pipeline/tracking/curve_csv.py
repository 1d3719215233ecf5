"""The learning curve as a CSV file: the record that reports and `dvc plots` read."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.tracking import names
from pipeline.tracking.base import Sink

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
_MOST_TITLES = 10
"""Lines above the header."""
_SHORT = {tag: column for column, tag in COLUMNS.items()}


class CsvSink(Sink):
    """Appends one row per summary to `path`, and survives a kill and a resume.

    Wall times are left out, so that equal runs give equal bytes.

    The first row of a behavior after opening an existing file replaces the rows at the same and
    later steps: those were written after the checkpoint that training resumed from.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._header, self._rows, is_whole = read_rows(self.path)
        if not is_whole:
            files.keep_aside(self.path, "not every row and number of this learning curve is known")
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
    _, rows, _ = read_rows(path)
    return [
        (row["behavior"], COLUMNS.get(column, column), float(text), int(row["step"]))
        for row in rows
        for column, text in row.items()
        if column not in _KEYS and text
    ]


def _is_stored(tag: str) -> bool:
    return tag not in names.HIDDEN and not tag.startswith(names.TIMING)


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]], bool]:
    """Return header and rows of a learning curve, which a spreadsheet may have saved.

    Columns are found by name. Numbers may have decimal commas where columns are not separated by
    commas. A row that a kill cut short is left out.

    Returns:
        The columns, those of `COLUMNS` first; the rows, in which `step` is a whole number and
        everything else a number; and whether nothing else was in the file.
    """
    standard = [*_KEYS, *COLUMNS]
    if not path.exists():
        return standard, [], True
    data = b"" if path.is_dir() else path.read_bytes()
    text = files.decoded(data)
    lines, header, delimiter = _table(text, standard)
    # A row without its line break was cut short by a kill, even if it looks complete.
    if text.encode() == data and delimiter == "," and "\r" not in text and text[-1:] != "\n":
        lines = lines[:-1]
    rows = [row for line in lines if (row := _row(header, line, delimiter)) is not None]
    is_known = bool(header) or not (data.strip() or path.is_dir())
    is_whole = is_known and len(rows) == len(lines) and all(None not in row for row in rows)
    for row in rows:
        row.pop(None, None)
    for behavior in {row["behavior"] for row in rows}:
        steps = [int(row["step"]) for row in rows if row["behavior"] == behavior]
        if steps != sorted(steps):  # sorted by another column
            rows.sort(key=lambda row: int(row["step"]))
    return [*standard, *(name for name in header if name not in standard)], rows, is_whole


def _table(text: str, standard: list[str]) -> tuple[list[list[str]], list[str], str]:
    """Return the lines below the header, the header, and what separates columns."""
    for delimiter in ",;\t":
        try:
            lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
        except csv.Error:
            continue
        lines = [line for line in lines if any(cell.strip() for cell in line)]
        for number, line in enumerate(lines[:_MOST_TITLES]):
            names = ",".join(cell.strip() for cell in line).rstrip(",").split(",")
            if set(_KEYS) <= set(names):
                return lines[number + 1 :], names, delimiter
        # Without a header, columns are known if there are no more than every file has.
        if lines and len(lines[0]) == len(standard) and _whole_number(lines[0][1], delimiter):
            return lines, standard, delimiter
    return [], [], ","


def _row(header: list[str], line: list[str], delimiter: str) -> dict[Any, str] | None:
    """Return a line by column, None as a key if not all is a number; None if it is no row."""
    while len(line) > len(header) and not line[-1].strip():
        line = line[:-1]
    row: dict[Any, str] = dict(zip(header, map(str.strip, line), strict=False))
    step = _whole_number(row.get("step", ""), delimiter)
    if len(line) != len(header) or not step or not row["behavior"]:
        return None
    numbers = {name: _number(row[name], delimiter) for name in row if name not in _KEYS}
    lost = [name for name, number in numbers.items() if row[name] and not number]
    return {**row, **numbers, "step": step} | ({None: ""} if lost or "" in row else {})


def _whole_number(text: str, delimiter: str) -> str:
    """Return a step as digits; empty if it is no step."""
    text = text.strip()
    if delimiter != "," and re.fullmatch(r"\d{1,3}([.\u202f\xa0 ]\d{3})+", text):
        return re.sub(r"\D", "", text)  # groups of thousands
    number = _number(text, delimiter)
    is_step = number and math.isfinite(float(number)) and float(number) >= 0
    return f"{float(number):.0f}" if is_step and float(number).is_integer() else ""


def _number(text: str, delimiter: str) -> str:
    """Return a number as Python writes it; empty if it is none."""
    for candidate in (text, text.replace(".", "").replace(",", ".") if delimiter != "," else text):
        with suppress(ValueError):
            float(candidate)
            return candidate
    return ""
