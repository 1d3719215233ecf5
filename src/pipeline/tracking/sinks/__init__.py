"""The sinks of every run: modules in this folder with `for_run`, and those of plug-ins."""

from __future__ import annotations

import logging
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.plugins import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pipeline.tracking.base import Sink


_log = logging.getLogger(__name__)


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
    """Return the sinks that want this run: ours by the names of their modules, then others."""
    # Found by listing the folder, so that a new sink is a new file and nothing else.
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    group: Group[Callable[[TrackedRun], Sink | None]] = Group(
        "pipeline.sinks", {name: f"{__name__}.{name}:for_run" for name in names}
    )
    found = [group[name](run) for name in names]
    others = [name for name in group if name not in group.ours]
    found += [_from_outside(group, name, run) for name in others]
    return [sink for sink in found if sink is not None]


def _from_outside(
    group: Group[Callable[[TrackedRun], Sink | None]], name: str, run: TrackedRun
) -> Sink | None:
    """Return the sink of an installed package; one that fails must not stop training."""
    try:
        return group[name](run)
    except Exception as error:  # noqa: BLE001  # it is used because it is installed
        _log.warning("The sink %s takes no part in this run: %s", name, error)
        return None
