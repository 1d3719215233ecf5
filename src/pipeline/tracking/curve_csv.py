"""CSV files of a run: the learning curve, for reports and `dvc plots`, and a log of updates.

The log has a row for each update of networks, like the metrics file that `mlagents-learn --debug`
wrote in ML-Agents 0.8 to 0.12.
"""

from __future__ import annotations

import csv
import io
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipeline import files
from pipeline.tracking import names
from pipeline.tracking.base import Sink, Update

COLUMNS = {
    "reward": names.REWARD,
    "reward_std": names.REWARD_STD,
    "episode_length": names.EPISODE_LENGTH,
    "policy_loss": names.POLICY_LOSS,
    "value_loss": names.VALUE_LOSS,
    "entropy": names.ENTROPY,
    "learning_rate": names.LEARNING_RATE,
}
"""Columns that every file has, with their tags; other tags get columns when they first appear."""

_KEYS = ("behavior", "step")
_MOST_TITLES = 10
"""Maximum number of lines above the header, such as titles of a spreadsheet."""
_SHORT = {tag: column for column, tag in COLUMNS.items()}


class CsvSink(Sink):
    """Appends a row per summary to `path`; a resumed run continues the file.

    Wall times are not written, so that equal runs give equal bytes.

    In an existing file, the first new row of a behavior replaces the behavior's rows at the same
    and later steps: they were written after the checkpoint from which training resumed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._header, self._rows, is_whole = read_rows(self.path)
        if not is_whole:
            files.keep_aside(self.path, "it has rows or values that are not of a learning curve")
        self._behaviors: set[str] = set()
        self._rewrite()

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Add a row; rewrite the file when it gets a new column or loses rows."""
        # Six significant digits keep the file short; float32 has about seven.
        row = {_SHORT.get(tag, tag): f"{v:.6g}" for tag, v in values.items() if _is_stored(tag)}
        row |= {"behavior": behavior, "step": str(step)}
        rows = self._rows
        if behavior not in self._behaviors:
            # A resumed run repeats the steps since its checkpoint, which must not be written twice.
            self._behaviors.add(behavior)
            rows = [r for r in self._rows if r["behavior"] != behavior or int(r["step"]) < step]
        new = [column for column in row if column not in self._header]
        # Rows are appended if possible, because this cannot damage earlier rows.
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
        # Earlier rows get empty cells in a new column (`restval`).
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
    """Return header and rows of a learning curve, which a spreadsheet program may have saved.

    Columns are found by name. Numbers may have decimal commas if another character separates
    columns. An incomplete last row, left by a kill, is dropped.

    Returns:
        The columns, with the behavior, the step and `COLUMNS` first; the rows, in which all values
        are text; and whether all lines and values of the file could be read.
    """
    standard = [*_KEYS, *COLUMNS]
    if not path.exists():
        return standard, [], True
    data = b"" if path.is_dir() else path.read_bytes()
    text = files.decoded(data)
    lines, header, delimiter = _table(text, standard)
    # In a file that no spreadsheet program has saved, a row without a line break at its end was
    # cut off by a kill, even if it looks complete.
    if text.encode() == data and delimiter == "," and "\r" not in text and text[-1:] != "\n":
        lines = lines[:-1]
    rows = [row for line in lines if (row := _row(header, line, delimiter)) is not None]
    # An empty file is a learning curve without rows.
    is_known = bool(header) or not (data.strip() or path.is_dir())
    is_whole = is_known and len(rows) == len(lines) and all(None not in row for row in rows)
    for row in rows:
        row.pop(None, None)
    for behavior in {row["behavior"] for row in rows}:
        steps = [int(row["step"]) for row in rows if row["behavior"] == behavior]
        # The order is wrong if the user has sorted the file by another column.
        if steps != sorted(steps):
            rows.sort(key=lambda row: int(row["step"]))
    return [*standard, *(name for name in header if name not in standard)], rows, is_whole


def _table(text: str, standard: list[str]) -> tuple[list[list[str]], list[str], str]:
    """Return the lines below the header, the header, and the delimiter of columns."""
    # Spreadsheet programs write tabs, or semicolons where commas are decimal points.
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
        # Without a header, columns are known if the file has only the standard columns.
        if lines and len(lines[0]) == len(standard) and _whole_number(lines[0][1], delimiter):
            return lines, standard, delimiter
    return [], [], ","


def _row(header: list[str], line: list[str], delimiter: str) -> dict[Any, str] | None:
    """Return the values of a line by column; None if the line is not a row of the table.

    A row with a value that is not a number also has the key None.
    """
    # Spreadsheet programs add empty cells up to their widest line.
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
    """Return a step as digits; empty if the text is not a step."""
    text = text.strip()
    if delimiter != "," and re.fullmatch(r"\d{1,3}([.\u202f\xa0 ]\d{3})+", text):
        return re.sub(r"\D", "", text)  # without the thousands separators
    number = _number(text, delimiter)
    is_step = number and math.isfinite(float(number)) and float(number) >= 0
    return f"{float(number):.0f}" if is_step and float(number).is_integer() else ""


def _number(text: str, delimiter: str) -> str:
    """Return a number as Python writes it; empty if the text is not a number."""
    # The text is tried as written, and then with points between thousands and a decimal comma.
    for candidate in (text, text.replace(".", "").replace(",", ".") if delimiter != "," else text):
        with suppress(ValueError):
            float(candidate)
            return candidate
    return ""


UPDATES_HEADER = (
    "Brain name",
    "Time to update policy",
    "Time since start of training",
    "Time for last experience collection",
    "Number of experiences used for training",
    "Mean return",
)
"""The header that ML-Agents 0.8 to 0.12 wrote; times are in seconds."""


@dataclass(kw_only=True, slots=True)
class _Last:
    """Counts and times at a behavior's last update; None for unknown values."""

    file: TextIO
    at: float
    update_s: float = 0.0
    step: int | None = None
    n_episodes: int | None = None


class UpdatesCsvSink(Sink):
    """Appends a row per update to `<folder>/<behavior>.csv`.

    The number of experiences is the number of steps since the previous update, and the mean return
    is of the episodes since then. Both are empty in the first row after a resume, because they are
    unknown.
    """

    def __init__(self, folder: Path | str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = Path(folder)
        self._clock = clock
        self._start = clock()
        self._last: dict[str, _Last] = {}

    def on_update(self, behavior: str, update: Update) -> None:
        """Write one row."""
        now = self._clock()
        last = self._last.get(behavior) or self._opened(behavior)
        # `update_s` is a sum over updates, so the difference is the time of one update.
        spent_s = update.update_s - last.update_s
        # Only the latest returns are kept, so the mean may leave out some new episodes.
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
        # The file is flushed after each row, so that a killed run has all its rows.
        last.file.flush()
        last.at, last.update_s = now, update.update_s
        last.step, last.n_episodes = update.step, update.n_episodes

    def close(self) -> None:
        """Close the files."""
        for last in self._last.values():
            last.file.close()
        self._last.clear()

    def _opened(self, behavior: str) -> _Last:
        path = files.named(self._folder, behavior, ".csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        header = ",".join(UPDATES_HEADER) + "\n"
        resumed = path.exists()
        if resumed and not (path.is_file() and path.read_bytes().startswith(header.encode())):
            files.keep_aside(path, "it does not begin with the header of a file of updates")
            resumed = False
        file = path.open("a", encoding="utf-8", newline="")
        # In a resumed file `step` and `n_episodes` stay None: only the earlier process knew them.
        last = _Last(file=file, at=self._start)
        if not resumed:
            csv.writer(file, lineterminator="\n").writerow(UPDATES_HEADER)
            last.step = last.n_episodes = 0
        self._last[behavior] = last
        return last
