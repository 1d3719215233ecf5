"""The sinks of a run: the standard ones, and those that are chosen by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pipeline.errors import SettingsError
from pipeline.settings.experiments import SINKS, SinkNames
from pipeline.settings.nodes import from_plain
from pipeline.tracking.base import Sink
from pipeline.tracking.run_metadata import TrackedRun

__all__ = ["TrackedRun", "named_sinks", "standard_sinks"]

_log = logging.getLogger(__name__)

_LEFT_OUT = "The sink %s takes no part in this run: %s"


def standard_sinks(run: TrackedRun, names: Sequence[str] | None = None) -> list[Sink]:
    """Return the sinks of a run: console and CSV files, and the chosen ones.

    Args:
        run: the run that they record.
        names: in `SINKS`; None for TensorBoard, for MLflow in a stage, and for the sinks and
            ML-Agents' statistics writers of all packages that are installed.

    Raises:
        SettingsError: A sink that was named cannot be imported.
    """
    from pipeline.tracking.console import ConsoleSink
    from pipeline.tracking.curve_csv import CsvSink, UpdatesCsvSink

    # The CSV file is the record, so it does not depend on which sinks are chosen.
    sinks: list[Sink] = [ConsoleSink(), CsvSink(run.folder / "progress.csv")]
    if run.debug_folder is not None:
        sinks.append(UpdatesCsvSink(run.debug_folder))
    return sinks + (_by_default(run) if names is None else named_sinks(run, names))


def named_sinks(run: TrackedRun, names: Sequence[str]) -> list[Sink]:
    """Return the sinks of these names that are enabled; warn of one that cannot open.

    Raises:
        SettingsError: A sink is not installed, or cannot be imported.
    """
    checked = SinkNames.from_node(from_plain(list(names), "pipeline.train"), "sinks")
    makers = {name: SINKS.load(name, room=f"{__name__}.") for name in checked}
    sinks = []
    for name, make in makers.items():
        try:
            sink = make(run)
        except Exception as error:  # noqa: BLE001  # no sink may stop training
            _log.warning(_LEFT_OUT, name, error)
            continue
        if sink is not None:
            sinks.append(sink)
    return sinks


def _by_default(run: TrackedRun) -> list[Sink]:
    names = ["stats_writers", "tensorboard", *(["mlflow"] if run.record is not None else [])]
    sinks = named_sinks(run, names)
    for name in (name for name in SINKS if name not in SINKS.ours):
        try:
            sinks += named_sinks(run, [name])
        except SettingsError as error:  # used because it is installed, not by choice
            _log.warning(_LEFT_OUT, name, error)
    return sinks
