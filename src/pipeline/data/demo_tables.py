"""Demonstrations from tables and as tables: CSV, JSON lines and NPZ.

A row is an observation, the action taken there, what this action gained, and whether the episode
ended with it. An episode may have one row more, with its last observation and no action: empty or
NaN numbers, choices of -1. The fields of a row are

    obs0, obs1, ...          one for each observation
    continuous, discrete     what was done
    reward                   what that gained
    terminated, truncated    whether the episode ended with it, or was cut short after it
    episode                  a number or a text that changes with the episode
    mask0, mask1, ...        for each discrete branch, 1 where a choice is forbidden

A field is one column of its name, with an array or a list in it where it has several numbers, or
columns called `obs0.0`, `obs0.1` and so on, in row-major order.
"""

from __future__ import annotations

import csv
import io
import json
import math
import struct
import warnings
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline import files
from pipeline.errors import DemonstrationError, brief
from pipeline.settings.reader import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.arrays import AnyArray
    from pipeline.protocol.demo import Demonstration

    Columns = Mapping[str, Sequence[str]]
    """Columns by field, where they are not called as the field."""

_WORDS = {"": math.nan, "true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
_UNREADABLE = (
    *(ValueError, EOFError, KeyError, RecursionError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
"""What pandas, json, numpy and zipfile raise for a file that is damaged or of another kind;
NotImplementedError is zipfile's for a compression that it does not know."""
NO_CHOICE = -1
"""In place of a discrete action, in the row after the last action of an episode."""


class Numbers(NamedTuple):
    """The numbers of a field in every row."""

    values: AnyArray
    """[N, size]."""
    columns: Sequence[str]
    """[size] column of each number."""
    shape: tuple[int, ...]
    """Shape of a row in the file, () for columns of one number each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The columns of a file, each an array with one entry per row."""

    source: str
    columns: dict[str, AnyArray]
    lines: Sequence[int] | None = None
    """The line of each row, where the file has lines."""
    notes: list[str] = field(default_factory=list)
    """What was done while reading, one line for each step."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def where(self, row: int) -> str:
        """Return the place of a row, as errors name it."""
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"

    def fault(self, row: int, column: str, message: str) -> DemonstrationError:
        """Return the error `message` about a place of the table."""
        return DemonstrationError(f"{self.source}: {self.where(row)}, column {column}: {message}")

    def missing(self, what: str, name: str) -> DemonstrationError:
        """Return the error that the columns of a field are not there."""
        return DemonstrationError(
            f"{self.source}: there is no {what}; the columns are {brief(', '.join(self.columns))}. "
            f"Name those that are meant: --column {name}=COLUMN,COLUMN,..."
        )

    def numbers(self, name: str, size: int, columns: Columns) -> Numbers | None:
        """Return a field of `size` numbers; None if the table does not have it.

        Raises:
            DemonstrationError: A column is missing, has no numbers, or too few or too many.
        """
        names = self._names(name, size, columns)
        if not names:
            return None
        parts = [self._column(column) for column in names]
        values = np.concatenate([part.reshape(len(self), -1) for part in parts], axis=1)
        if values.shape[1] != size:
            raise DemonstrationError(
                f"{self.source}: {name} has {size} numbers, but {', '.join(names)} "
                f"{'have' if len(names) > 1 else 'has'} {values.shape[1]}; name as many as "
                f"belong to it: --column {name}=COLUMN,COLUMN,..."
            )
        labels = names if len(names) == size else names[:1] * size
        return Numbers(values, labels, parts[0].shape[1:] if len(names) == 1 else ())

    def names(self, name: str, columns: Columns) -> tuple[AnyArray, str] | None:
        """Return a field of numbers or texts [N], and its column; None if the table lacks it.

        Raises:
            DemonstrationError: An entry is missing, or is neither.
        """
        names = self._names(name, 1, columns)
        if not names:
            return None
        values = self.columns[names[0]]
        if len(names) > 1 or values.ndim > 1:
            raise DemonstrationError(
                f"{self.source}: {name} is one number or text in each row; name one column for it"
            )
        for row, value in enumerate(values.tolist()):
            if not isinstance(value, str | int | float) or value != value:  # NaN
                raise self.fault(row, names[0], f"{value!r} names nothing; name it in each row")
        return values, names[0]

    def _names(self, name: str, size: int, columns: Columns) -> list[str]:
        # Numbered columns count if the table has any of them; else a single column may hold lists.
        numbered = [f"{name}.{index}" for index in range(size)]
        names = [name] if {*numbered}.isdisjoint(self.columns) else numbered
        if name not in columns and names == [name] and name not in self.columns:
            return []
        names = list(columns.get(name, names))
        for column in names:
            if column not in self.columns:
                near = suggestion(column, self.columns).rstrip(".")
                raise self.missing(f"column {column!r}{near}", name)
        return names

    def _column(self, name: str) -> AnyArray:
        """Return a column as numbers [N, ...], NaN where there is none."""
        values = self.columns[name]
        if values.dtype.kind in "biuf":
            return values
        entries = [self._number(row, name, value) for row, value in enumerate(values)]
        shape = next((entry.shape for entry in entries if not _is_none(entry)), ())
        for row, entry in enumerate(entries):
            if entry.shape != shape and not _is_none(entry):
                message = f"has the shape {entry.shape}, those above have {shape}; make them equal"
                raise self.fault(row, name, message)
        return np.stack([np.broadcast_to(entry, shape) for entry in entries])

    def _number(self, row: int, column: str, value: Any) -> AnyArray:
        if isinstance(value, str):
            value = _WORDS.get(value.strip().lower(), value)
        try:
            return np.asarray(math.nan if value is None else value, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            message = f"{brief(repr(value))} is no number; write numbers such as 0.5, true or false"
            raise self.fault(row, column, message) from None


def _is_none(value: AnyArray) -> bool:
    return not value.ndim and bool(np.isnan(value))


def read_table(path: Path) -> Table:
    """Return the table that a CSV, JSON lines or NPZ file holds.

    Raises:
        DemonstrationError: The file has another form, or its rows differ in their columns.
    """
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise _unknown_format(path)
    if kind := files.kind_of(path, own=b"PK" if suffix == ".npz" else b""):
        raise DemonstrationError(f"{path}: {kind}")
    try:
        table = _FORMATS[suffix][0](path)
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise DemonstrationError(
            f"{path}: cannot be read as {suffix[1:].upper()}: {reason}; write it again"
        ) from error
    if not len(table):
        raise DemonstrationError(f"{path}: has no rows; record something first")
    return table


def write_table(fields: Mapping[str, AnyArray], path: Path) -> None:
    """Write the fields of `table_of` as CSV, JSON lines or NPZ, whole or not at all.

    Raises:
        DemonstrationError: The suffix is of no such format.
    """
    if path.suffix not in _FORMATS:
        raise _unknown_format(path)
    with files.whole(path) as temporary:
        _FORMATS[path.suffix][1](fields, temporary)


def _unknown_format(path: Path) -> DemonstrationError:
    return DemonstrationError(
        f"{path}: is no table; name a file that ends in {', '.join(_FORMATS)}, or minari:DATASET"
    )


def _read_csv(path: Path) -> Table:
    import pandas as pd

    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
    # Spreadsheets write semicolons where the comma is the decimal sign.
    separator = max(",;\t", key=header.count)
    names = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
    if not names:
        return Table(source=str(path), columns={})
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # a row longer than the header
        try:
            frame = pd.read_csv(
                path,
                sep=separator,
                header=0,
                names=names,
                index_col=False,
                encoding="utf-8-sig",
                skip_blank_lines=False,
                low_memory=False,
            )
        except pd.errors.ParserWarning as error:
            raise ValueError(f"rows have more entries than the header: {error}") from error
    frame = frame.dropna(how="all")  # blank lines
    columns = {name: frame[name].to_numpy() for name in names}
    # The header is line 1, and the index counts from 0.
    return Table(source=str(path), columns=columns, lines=(frame.index + 2).tolist())


def _read_jsonl(path: Path) -> Table:
    rows, lines = [], []
    for number, text in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: is no object; write {{...}} in each line")  # noqa: TRY004  # of the file, not of a caller
        rows.append(row)
        lines.append(number)
    columns = {
        name: np.fromiter((row.get(name) for row in rows), dtype=object, count=len(rows))
        # Of all rows, since a key may be absent in some.
        for name in dict.fromkeys(name for row in rows for name in row)
    }
    return Table(source=str(path), columns=columns, lines=lines)


def _read_npz(path: Path) -> Table:
    # in memory: of a damaged file NumPy would leave the handle open
    arrays = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise ValueError("it holds one array without a name")  # noqa: TRY004  # of the file
    columns = {name: arrays[name] for name in arrays.files if arrays[name].ndim}
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()}) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"the arrays need a row for each step, but their lengths are {listed}")
    return Table(source=str(path), columns=columns)


def _write_csv(fields: Mapping[str, AnyArray], path: Path) -> None:
    import pandas as pd

    columns = {}
    for name, values in fields.items():
        flat = values.reshape(len(values), -1)
        if values.ndim == 1:
            columns[name] = values
        else:
            columns |= {f"{name}.{index}": flat[:, index] for index in range(flat.shape[1])}
    pd.DataFrame(columns).to_csv(path, index=False, lineterminator="\n")


def _write_jsonl(fields: Mapping[str, AnyArray], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for values in zip(*fields.values(), strict=True):
            row = {
                name: value.tolist()
                for name, value in zip(fields, values, strict=True)
                if not np.isnan(value).all()  # nothing was done there
            }
            file.write(f"{json.dumps(row, allow_nan=False)}\n")


def _write_npz(fields: Mapping[str, AnyArray], path: Path) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **fields)


_FORMATS = {
    ".csv": (_read_csv, _write_csv),
    ".jsonl": (_read_jsonl, _write_jsonl),
    ".npz": (_read_npz, _write_npz),
}


def table_of(demo: Demonstration) -> tuple[dict[str, AnyArray], list[str]]:
    """Return a demonstration as fields [N, ...], a row for each pair, and lines about them.

    The reward of an action stands in its row, not one row later as in the file.
    """
    done, starts = demo.done, np.append(True, demo.done[:-1])
    next_done, next_cut = np.append(done[1:], False), np.append(demo.interrupted[1:], False)
    ended = np.where(done, starts, next_done)  # an end alone, with no action before it
    cut = np.where(done, demo.interrupted, next_cut)
    fields: dict[str, AnyArray] = {"episode": np.asarray(np.cumsum(done) - done + 1)}
    fields |= {f"obs{index}": values for index, values in enumerate(demo.obs)}
    actions = demo.spec.action_spec
    if actions.continuous_size:
        fields["continuous"] = np.where(done[:, None], np.float32(np.nan), demo.continuous)
    if actions.discrete_size:
        fields["discrete"] = np.where(done[:, None], np.int32(NO_CHOICE), demo.discrete)
    # In the file a reward stands with the observation after the action; here with the action.
    gained = np.append(demo.reward[1:], np.float32(0))
    fields["reward"] = np.where(done, np.float32(np.nan), gained)
    fields["terminated"] = (ended & ~cut).astype(np.uint8)
    fields["truncated"] = (ended & cut).astype(np.uint8)
    if demo.action_mask is not None and any(mask.any() for mask in demo.action_mask):
        masks = enumerate(demo.action_mask)
        fields |= {f"mask{branch}": mask.astype(np.uint8) for branch, mask in masks}
    shapes = ", ".join(
        f"{name} {values.shape[1:] or ''}".strip() for name, values in fields.items()
    )
    endings = f"{int((ended & ~cut).sum())} terminated, {int((ended & cut).sum())} truncated"
    steps = [
        f"fields        {shapes}",
        f"ended by      {endings}{'' if done[-1] else ', the last goes on'}",
    ]
    early = starts & ~done & (demo.reward != 0)
    lost = {
        "rewards before the first action of an episode": early,
        "rewards of a group": demo.group_reward != 0,
        "numbers of a group": demo.group_id != 0,
    }
    left_out = [f"{int(rows.sum())} {name}" for name, rows in lost.items() if rows.any()]
    return fields, steps + ([f"left out      {', '.join(left_out)}"] if left_out else [])
