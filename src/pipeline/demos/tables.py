"""Demonstrations from tables and as tables: CSV, JSON lines and Parquet.

A row has an observation, the action at this observation, the reward of the action, and whether the
episode ended with the action. An episode may have one more row, with the last observation and
without an action: the numbers of the action are empty or NaN, and the choices -1. The fields of a
row are

    obs0, obs1, ...          the observations
    continuous, discrete     the action
    reward                   the reward of the action
    terminated, truncated    whether the episode ended with the action, or was cut short after it
    episode                  a number or a text that changes with the episode
    mask0, mask1, ...        for each discrete branch, 1 where a choice is forbidden

A field is either one column with its name, which has arrays or lists if the field has several
numbers, or columns with the names `obs0.0`, `obs0.1` and so on, in row-major order.
"""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline import files
from pipeline.core.arrays import AnyArray
from pipeline.demos.demo_file import Demonstration
from pipeline.errors import DemonstrationError, brief
from pipeline.settings.reader import suggestion

if TYPE_CHECKING:
    import pandas as pd

Columns = Mapping[str, Sequence[str]]
"""Columns of fields that are not named like the field."""

# The number for each word in a text column. Spreadsheets and pandas write flags with these words.
_WORDS = {"": math.nan, "true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
NO_CHOICE = -1
"""Value of discrete actions in the row after the last action of an episode."""


class Numbers(NamedTuple):
    """The numbers of one field of a table, in every row."""

    values: AnyArray
    """[N, size] numbers."""
    columns: Sequence[str]
    """[size] name of each number's column."""
    shape: tuple[int, ...]
    """Shape of the field in a row of the file; () if each number has its own column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The columns of a file, each an array with one entry per row."""

    source: str
    columns: dict[str, AnyArray]
    lines: Sequence[int] | None = None
    """Number of each row's line in the file; None if the file has no lines."""
    notes: list[str] = field(default_factory=list)
    """Lines of text about conversions while reading."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def where(self, row: int) -> str:
        """Return the name of a row for error messages: its line in the file, or its number."""
        return f"row {row + 1}" if self.lines is None else f"line {self.lines[row]}"

    def fault(self, row: int, column: str, message: str) -> DemonstrationError:
        """Return an error with the file, a row, a column and `message`."""
        return DemonstrationError(f"{self.source}: {self.where(row)}, column {column}: {message}")

    def missing(self, what: str, name: str) -> DemonstrationError:
        """Return the error for the field `name` without a column; `what` describes the column."""
        return DemonstrationError(
            f"{self.source}: there is no {what}; the columns are {brief(', '.join(self.columns))}. "
            f"Name the right columns: --column {name}=COLUMN,COLUMN,..."
        )

    def numbers(self, name: str, size: int, columns: Columns) -> Numbers | None:
        """Return a field of `size` numbers; None if the table does not have the field."""
        names = self._names(name, size, columns)
        if not names:
            return None
        parts = [self._column(column) for column in names]
        values = np.concatenate([part.reshape(len(self), -1) for part in parts], axis=1)
        if values.shape[1] != size:
            raise DemonstrationError(
                f"{self.source}: {name} has {size} numbers, but {', '.join(names)} "
                f"{'have' if len(names) > 1 else 'has'} {values.shape[1]}; name the right "
                f"columns: --column {name}=COLUMN,COLUMN,..."
            )
        # One name per number, so that an error can name the column of any number.
        labels = names if len(names) == size else names[:1] * size
        return Numbers(values, labels, parts[0].shape[1:] if len(names) == 1 else ())

    def names(self, name: str, columns: Columns) -> tuple[AnyArray, str] | None:
        """Return a field of one number or text per row, and its column; None without the field."""
        names = self._names(name, 1, columns)
        if not names:
            return None
        values = self.columns[names[0]]
        if len(names) > 1 or values.ndim > 1:
            raise DemonstrationError(
                f"{self.source}: {name} must be one number or text in each row; name one column: "
                f"--column {name}=COLUMN"
            )
        for row, value in enumerate(values.tolist()):
            # Empty entries are NaN, which is the only value that differs from itself.
            if not isinstance(value, str | int | float) or value != value:
                message = f"{value!r} is not usable as a name; give a number or a text in each row"
                raise self.fault(row, names[0], message)
        return values, names[0]

    def _names(self, name: str, size: int, columns: Columns) -> list[str]:
        # The columns `NAME.0`, `NAME.1`, ... are used if the table has any of them; else a column
        # `NAME` may have lists.
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
        """Return a column as numbers [N, ...], NaN for empty entries."""
        values = self.columns[name]
        if values.dtype.kind in "biuf":
            return values
        entries = [self._number(row, name, value) for row, value in enumerate(values)]
        # An empty entry, which is NaN, has no shape.
        shapes = {
            row: entry.shape for row, entry in enumerate(entries) if entry.ndim or entry == entry
        }
        shape = next(iter(shapes.values()), ())
        for row, other in shapes.items():
            if other != shape:
                message = f"has the shape {other}, rows above have {shape}; make them equal"
                raise self.fault(row, name, message)
        return np.stack([np.broadcast_to(entry, shape) for entry in entries])

    def _number(self, row: int, column: str, value: Any) -> AnyArray:
        if isinstance(value, str):
            value = _WORDS.get(value.strip().lower(), value)
        value = math.nan if value is None else _nested(value)
        try:
            numbers = np.asarray(value)
            # The dtype is kept, because an image of bytes is divided by 255.
            return numbers if numbers.dtype.kind in "biuf" else np.asarray(value, np.float64)
        except (TypeError, ValueError, OverflowError):
            message = f"{brief(repr(value))} is not a number; write 0.5, true, false or the like"
            raise self.fault(row, column, message) from None


def _nested(value: Any) -> Any:
    """Return nested arrays of a Parquet file as lists of arrays, which NumPy can stack."""
    is_outer = isinstance(value, np.ndarray) and value.dtype == object
    return [_nested(part) for part in value] if is_outer else value


def read_table(path: Path) -> Table:
    """Return the table in a CSV, JSON lines or Parquet file.

    Raises:
        DemonstrationError: The file has another format, or its rows have different columns.
    """
    suffix = path.suffix.lower()
    _check_format(path, suffix)
    if kind := files.kind_of(path):
        raise DemonstrationError(f"{path}: {kind}")
    try:
        frame = _READERS[suffix](path)
    # pandas, json and pyarrow raise these errors for files that they cannot read.
    except (ValueError, KeyError, RecursionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise DemonstrationError(
            f"{path}: cannot be read as {suffix[1:].upper()}: {reason}; write it again"
        ) from error
    # A file with a header only is probably a failed recording.
    if frame.empty:
        raise DemonstrationError(f"{path}: has no rows; record something first")
    columns = {str(name): frame[name].to_numpy() for name in frame}
    lines = None if suffix == ".parquet" else frame.index.tolist()
    return Table(source=str(path), columns=columns, lines=lines)


def write_table(fields: Mapping[str, AnyArray], path: Path) -> None:
    """Write the fields of `table_of`; raise DemonstrationError for an unknown format.

    After an error, no file is left.
    """
    import pandas as pd

    _check_format(path, path.suffix)
    with files.whole(path) as temporary:
        if path.suffix == ".csv":
            frame = pd.DataFrame(_spread(fields))
            frame.to_csv(temporary, index=False, lineterminator="\n")
        elif path.suffix == ".parquet":
            frame = pd.DataFrame({name: values.tolist() for name, values in fields.items()})
            frame.to_parquet(temporary, index=False)
        else:
            temporary.write_text("".join(_json_lines(fields)), encoding="utf-8", newline="\n")


def _spread(fields: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Return one column [N] for each number of each field."""
    columns: dict[str, AnyArray] = {}
    for name, values in fields.items():
        flat = enumerate(values.reshape(len(values), -1).T)
        columns |= {name if values.ndim == 1 else f"{name}.{index}": part for index, part in flat}
    return columns


def _json_lines(fields: Mapping[str, AnyArray]) -> Iterator[str]:
    # pandas is not used, because it writes a fixed number of decimals and so rounds small numbers.
    for values in zip(*fields.values(), strict=True):
        row = {
            name: value.tolist()
            for name, value in zip(fields, values, strict=True)
            if not np.isnan(value).all()  # a row without an action leaves out these fields
        }
        yield f"{json.dumps(row, allow_nan=False)}\n"


def _check_format(path: Path, suffix: str) -> None:
    if suffix == ".npz":
        raise DemonstrationError(
            f"{path}: NPZ is not read or written any more; use Parquet (.parquet), which "
            "pandas.DataFrame.to_parquet writes, or CSV"
        )
    if suffix not in _READERS:
        raise DemonstrationError(
            f"{path}: is not a table; name a file that ends in {', '.join(_READERS)}, or "
            "minari:DATASET"
        )


def _read_csv(path: Path) -> pd.DataFrame:
    """Return the rows of a CSV file, with line numbers as the index."""
    import pandas as pd

    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
    # Spreadsheets write semicolons if the comma is the decimal sign, so the separator is the most
    # frequent of these characters in the header.
    separator = max(",;\t", key=header.count)
    names = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
    if not names:
        return pd.DataFrame()
    with warnings.catch_warnings():
        # pandas only warns of rows that are longer than the header; here they are an error.
        warnings.simplefilter("error", pd.errors.ParserWarning)
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
    # The header is line 1, and the index counts from 0; blank lines are not rows.
    return frame.set_index(frame.index + 2).dropna(how="all")


def _read_jsonl(path: Path) -> pd.DataFrame:
    """Return the rows of a JSON lines file, with line numbers as the index."""
    import pandas as pd

    # pandas is not used, because its errors have no line number.
    rows = {}
    for number, text in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not text.strip():
            continue
        try:
            rows[number] = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(rows[number], dict):
            raise ValueError(f"line {number}: is not an object; write {{...}} in each line")  # noqa: TRY004  # an error in the file, not of a caller
    return pd.DataFrame(list(rows.values()), index=list(rows), dtype=object)


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    content = io.BytesIO(path.read_bytes())
    try:
        return pd.read_parquet(content)
    except OSError as error:  # pyarrow raises OSError for a damaged page
        raise ValueError(str(error)) from error


_READERS = {".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def table_of(demo: Demonstration) -> tuple[dict[str, AnyArray], list[str]]:
    """Return the fields [N, ...] of a table with a row for each pair, and text about the table.

    The reward of an action is in the action's row, not in the next row as in the file.
    """
    done, starts = demo.done, np.append(True, demo.done[:-1])
    # In a demonstration the closing pair tells how the episode ended; in the table the row of the
    # last action tells this, or the closing pair if the episode begins with it and has no action.
    ended = np.where(done, starts, np.append(done[1:], False))
    cut = np.where(done, demo.interrupted, np.append(demo.interrupted[1:], False))
    fields: dict[str, AnyArray] = {"episode": np.asarray(np.cumsum(done) - done + 1)}
    fields |= {f"obs{index}": values for index, values in enumerate(demo.obs)}
    actions = demo.spec.action_spec
    if actions.continuous_size:
        fields["continuous"] = np.where(done[:, None], np.float32(np.nan), demo.continuous)
    if actions.discrete_size:
        fields["discrete"] = np.where(done[:, None], np.int32(NO_CHOICE), demo.discrete)
    next_reward = np.append(demo.reward[1:], np.float32(0))
    fields["reward"] = np.where(done, np.float32(np.nan), next_reward)
    fields["terminated"] = (ended & ~cut).astype(np.uint8)
    fields["truncated"] = (ended & cut).astype(np.uint8)
    if demo.action_mask is not None and any(mask.any() for mask in demo.action_mask):
        masks = enumerate(demo.action_mask)
        fields |= {f"mask{branch}": mask.astype(np.uint8) for branch, mask in masks}
    shapes = [f"{name} {values.shape[1:] or ''}".strip() for name, values in fields.items()]
    endings = f"{int((ended & ~cut).sum())} terminated, {int((ended & cut).sum())} truncated"
    # A table has no field for the following values, so they are reported as lost.
    lost = {
        "rewards before the first action of an episode": starts & ~done & (demo.reward != 0),
        "rewards of a group": demo.group_reward != 0,
        "numbers of a group": demo.group_id != 0,
    }
    left_out = [f"{int(rows.sum())} {name}" for name, rows in lost.items() if rows.any()]
    return fields, [
        f"fields        {', '.join(shapes)}",
        f"ended by      {endings}{'' if done[-1] else ', the last has not ended'}",
        *([f"left out      {', '.join(left_out)}"] if left_out else []),
    ]
