"""Markdown tables in pages, between markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def put(
    page: Path,
    name: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    n_keys: int = 1,
    keep: bool = False,
) -> None:
    """Write a table into `page`, between the markers called `name`.

    Args:
        page: a Markdown file.
        name: of the markers `<!-- name: begin -->` and `<!-- name: end -->`.
        header: names of the columns.
        rows: cells of each row.
        n_keys: columns that tell rows from each other.
        keep: whether rows that stand there and are not among `rows` stay, in their places.

    Raises:
        ValueError: A marker is missing.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, begin_marker, rest = page.read_text(encoding="utf-8").partition(begin)
    old, end_marker, after = rest.partition(end)
    if not begin_marker or not end_marker:
        raise ValueError(f"{page}: there are no markers called '{name}'")
    lines = [line.strip("| \n") for line in old.splitlines() if line.startswith("| ")][2:]
    cells = [line.split(" | ") for line in lines] if keep else []
    # The strip above takes empty last cells as well.
    old_rows = [[*row, *[""] * (len(header) - len(row))] for row in cells]
    merged = {tuple(row[:n_keys]): row for row in (*old_rows, *map(list, rows))}
    write_whole(page, f"{before}{begin}\n{table(header, merged.values())}\n{end}{after}")
