"""Draw the rooms of the package and who imports whom, from the import statements themselves.

`python docs/tools/rooms.py` writes the drawing and the table into the architecture page.
`tests/unit/test_pages.py` says when they are stale. A room is a folder of `src/pipeline`; a file
next to the folders is a room, too, unless it imports no folder: those files are the room `base`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/pipeline"
PAGE = ROOT / "docs/explanation/architecture.md"
BEGIN, END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->\n"
BASE = "base"

Arrows = Mapping[tuple[str, str], int]


def arrows() -> Arrows:
    """Return how many modules of one room import a module of another room, by both names."""
    graph = grimp.build_graph(PACKAGE.name, cache_dir=None)  # type-only and late imports, too
    found = Counter(
        (_part(importer), _part(imported))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    # Files that lead to a folder are rooms of their own.
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    while more := {importer for importer, imported in found if imported in rooms} - rooms:
        rooms |= more
    merged: Counter[tuple[str, str]] = Counter()
    for pair, n in found.items():
        importer, imported = (part if part in rooms else BASE for part in pair)
        if importer != imported:
            merged[importer, imported] += n
    return merged


def _part(module: str) -> str:
    """Return the folder or file below the package that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def in_order(found: Arrows) -> list[str]:
    """Return the rooms, each before the rooms that it imports.

    Raises:
        graphlib.CycleError: Rooms import each other in a circle.
    """
    sorter = TopologicalSorter[str]()
    for importer, imported in sorted(found):
        sorter.add(imported, importer)
    return list(sorter.static_order())


def direct(found: Arrows) -> list[tuple[str, str]]:
    """Return the arrows that no longer way from room to room replaces."""
    below: dict[str, set[str]] = {}
    for room in reversed(in_order(found)):
        nexts = {b for a, b in found if a == room}
        below[room] = nexts.union(*(below[one] for one in nexts))
    return [
        (importer, imported)
        for importer, imported in sorted(found)
        if not any(imported in below[other] for one, other in found if one == importer)
    ]


def purpose(room: str) -> str:
    """Return the first sentence of a room's docstring."""
    path = PACKAGE / room
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"[.:;]\s", " ".join(text.split()) + " ")[0].translate({96: None, 34: None})


def drawing() -> str:
    """Return the Mermaid drawing, and the table of all arrows."""
    found = arrows()
    rooms = in_order(found)
    lines = ["```mermaid", "flowchart TD"]
    purposes = {room: purpose(room) for room in rooms if room != BASE}
    files = sorted(path.stem for path in PACKAGE.glob("*.py"))
    purposes[BASE] = ", ".join(stem for stem in files if stem not in rooms)
    # `room_`, because some names, such as `end`, are words of Mermaid.
    lines += [f'  room_{room}["{_title(room)}<br/>{purposes[room]}"]' for room in rooms]
    lines += [f"  room_{a} -->|{found[a, b]}| room_{b}" for a, b in direct(found)]
    lines += ["```", "", "| Room | imports, with the number of imports |", "| --- | --- |"]
    for room in rooms:
        imported = [f"`{_title(b)}` {found[room, b]}" for b in rooms if (room, b) in found]
        lines.append(f"| `{_title(room)}` | {', '.join(imported) or 'no other room'} |")
    return "\n".join(lines) + "\n"


def _title(room: str) -> str:
    return f"{room}.py" if (PACKAGE / f"{room}.py").exists() else room


def page() -> str:
    """Return the architecture page with the present drawing."""
    text = PAGE.read_text("utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{drawing()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
