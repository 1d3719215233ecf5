"""TensorBoard event files, one folder per behavior, with the tags that ML-Agents writes."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files
from pipeline.tracking import names
from pipeline.tracking.console import hyperparameters_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger(__name__)

_MAX_BINS = 30


class TensorBoardSink:
    """Writes `<folder>/<behavior>/events.out.tfevents.*`; imports neither torch nor TensorFlow.

    Args:
        folder: the run directory.
        hyperparameters: text per behavior, shown once under `Hyperparameters`; what `began` gives
            counts more.
        keep_earlier: False deletes event files of an earlier run in a behavior's folder before the
            first is written there, because TensorBoard would draw both as one curve.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        hyperparameters: Mapping[str, str] | None = None,
        keep_earlier: bool = True,
    ) -> None:
        self._folder = Path(folder)
        self._keep_earlier = keep_earlier
        self._hyperparameters = dict(hyperparameters or {})
        self._writers: dict[str, Any] = {}

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Show the settings that a behavior is trained with, when none have been shown."""
        self._hyperparameters[behavior] = hyperparameters_text(settings)
        self._writer(behavior)

    def distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Write one event with the histogram `<tag>_hist`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        value = Summary.Value(tag=f"{tag}{names.HISTOGRAM}", histo=_histogram(values))
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
        self._writer(behavior).add_event(event)

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Write one event with a scalar per tag."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        charted = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if tag not in names.HIDDEN
        ]
        writer = self._writer(behavior)
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=charted))
        writer.add_event(event)

    def close(self) -> None:
        """Flush and close the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, behavior: str) -> Any:
        if behavior not in self._writers:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            folder = files.named(self._folder, behavior)
            folder.mkdir(parents=True, exist_ok=True)
            if not self._keep_earlier:
                _delete_events(folder)
            writer = EventFileWriter(str(folder), flush_secs=10)
            self._writers[behavior] = writer
            if behavior in self._hyperparameters:
                writer.add_event(_text("Hyperparameters", self._hyperparameters[behavior]))
        return self._writers[behavior]


def _delete_events(folder: Path) -> None:
    for left in sorted(folder.glob("events.out.tfevents.*")):
        _log.warning("Deleting TensorBoard data %s that was left over from a previous run.", left)
        left.unlink()


def _histogram(values: Sequence[float]) -> Any:
    """The values [N] in evenly wide bins between the smallest and the largest."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    numbers = np.asarray(values, dtype=np.float64)
    counts, edges = np.histogram(numbers, bins=min(_MAX_BINS, max(1, len(numbers))))
    return HistogramProto(
        min=float(numbers.min()),
        max=float(numbers.max()),
        num=float(len(numbers)),
        sum=float(numbers.sum()),
        sum_squares=float(np.square(numbers).sum()),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )


def _text(tag: str, text: str) -> Any:
    """An event that TensorBoard's text page shows as a preformatted block."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    shown = "\n".join(f"    {line}" for line in text.splitlines())
    value = Summary.Value(
        tag=f"{tag}/text_summary",
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype="DT_STRING", string_val=[shown.encode()]),
    )
    return Event(wall_time=time.time(), step=0, summary=Summary(value=[value]))
