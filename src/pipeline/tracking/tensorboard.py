"""TensorBoard event files, one folder per behavior, with the tags that ML-Agents writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.tracking import names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_BUCKETS = 30
"""Of a histogram."""


class TensorBoardSink:
    """Writes `<folder>/<behavior>/events.out.tfevents.*`; imports neither torch nor TensorFlow.

    Args:
        folder: the run directory.
        hyperparameters: text per behavior, shown once under `Hyperparameters`.
    """

    def __init__(
        self, folder: Path | str, *, hyperparameters: Mapping[str, str] | None = None
    ) -> None:
        self._folder = Path(folder)
        self._hyperparameters = dict(hyperparameters or {})
        self._writers: dict[str, Any] = {}

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

    def distributions(
        self, behavior: str, values: Mapping[str, Sequence[float]], step: int
    ) -> None:
        """Write one event with a histogram `<tag>_hist` per tag."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        charted = [
            Summary.Value(tag=f"{tag}_hist", histo=_histogram(many)) for tag, many in values.items()
        ]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=charted))
        self._writer(behavior).add_event(event)

    def close(self) -> None:
        """Flush and close the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, behavior: str) -> Any:
        if behavior not in self._writers:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            folder = self._folder / behavior
            folder.mkdir(parents=True, exist_ok=True)
            writer = EventFileWriter(str(folder), flush_secs=10)
            self._writers[behavior] = writer
            if behavior in self._hyperparameters:
                writer.add_event(_text("Hyperparameters", self._hyperparameters[behavior]))
        return self._writers[behavior]


def _histogram(values: Sequence[float]) -> Any:
    """TensorBoard's histogram of the values; `bucket_limit` holds each bucket's upper end."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    array = np.asarray(values, dtype=np.float64)
    counts, edges = np.histogram(array, bins=_BUCKETS)
    return HistogramProto(
        min=array.min(),
        max=array.max(),
        num=len(array),
        sum=array.sum(),
        sum_squares=(array * array).sum(),
        bucket_limit=edges.tolist(),
        bucket=[0.0, *counts.tolist()],
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
