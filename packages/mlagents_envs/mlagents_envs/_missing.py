"""Why a name of ML-Agents has no equivalent."""

from collections.abc import Callable, Mapping
from typing import Any


def reasons(table: Mapping[str, str], module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`; a key has names, separated by blanks, of one reason."""
    notes = {name: note for names, note in table.items() for name in names.split()}

    def refuse(name: str) -> Any:
        if name in notes:
            text = f"{module}.{name} has no equivalent: {notes[name]} (docs/how-to/migrating.md)"
            raise ImportError(text, name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse
