"""The sinks of every training run; a module in this folder with `for_run` is one of them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.tracking.base import Sink


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a sink may need to know of the run that it records."""

    folder: Path
    max_steps: Mapping[str, int]
    """Last step of each behavior."""
    keep_earlier: bool = True
    """Whether records of an earlier run in the folder are continued."""
    debug_folder: Path | None = None
    """Where records for debugging go; None when nobody asked for them."""


def standard_sinks(run: TrackedRun) -> list[Sink]:
    """Return the sinks that want this run, by the names of their modules."""
    # Found by listing the folder, so that a new sink is a new file and nothing else.
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    made: list[Sink | None] = [module.for_run(run) for module in modules]
    return [sink for sink in made if sink is not None]
