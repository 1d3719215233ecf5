"""The sinks of a run: its record in any case, and those that are chosen by name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError
from pipeline.settings.experiments import SINKS, SinkNames
from pipeline.settings.nodes import from_plain
from pipeline.tracking.tracked_run import TrackedRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.tracking.base import Sink

__all__ = ["TrackedRun", "named_sinks", "standard_sinks"]

_log = logging.getLogger(__name__)


def standard_sinks(run: TrackedRun, names: Sequence[str] | None = None) -> list[Sink]:
    """Return the sinks of a run: console and CSV files, and the chosen ones.

    Args:
        run: what they record.
        names: in `SINKS`; None for TensorBoard, for MLflow in a stage, and for the sinks and
            ML-Agents' statistics writers of all packages that are installed.

    Raises:
        SettingsError: A sink that was named cannot be imported.
    """
    from pipeline.tracking.sinks import console, curve_csv, progress, updates_csv

    # The CSV file is the record, so it does not depend on which sinks are chosen.
    always = [module.for_run(run) for module in (console, curve_csv, progress, updates_csv)]
    chosen = _by_default(run) if names is None else named_sinks(run, names)
    return [sink for sink in [*always, *chosen] if sink is not None]


def named_sinks(run: TrackedRun, names: Sequence[str]) -> list[Sink]:
    """Return the sinks of these names that want the run; one that cannot open is only named.

    Raises:
        SettingsError: A sink is not installed, or cannot be imported.
    """
    checked = SinkNames.from_node(from_plain(list(names), "pipeline.train"), "sinks")
    makers = {name: SINKS.load(name, room=f"{__name__}.") for name in checked}
    opened = [_opened(name, make, run) for name, make in makers.items()]
    return [sink for sink in opened if sink is not None]


def _by_default(run: TrackedRun) -> list[Sink]:
    names = ["stats_writers", "tensorboard", *(["mlflow"] if run.record is not None else [])]
    sinks = named_sinks(run, names)
    for name in (name for name in SINKS if name not in SINKS.ours):
        try:
            sinks += named_sinks(run, [name])
        except SettingsError as error:  # it takes part because it is installed, not by choice
            _log.warning("The sink %s takes no part in this run: %s", name, error)
    return sinks


def _opened(name: str, make: Any, run: TrackedRun) -> Sink | None:
    try:
        sink: Sink | None = make(run)
    except Exception as error:  # noqa: BLE001  # no sink may stop training
        _log.warning("The sink %s takes no part in this run: %s", name, error)
        return None
    return sink
