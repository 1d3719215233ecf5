"""TensorBoard event files, one folder per behavior, with the tags that ML-Agents writes."""

import io
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.record_writer import RecordWriter

from pipeline import files
from pipeline.core.arrays import AnyArray
from pipeline.tracking import names
from pipeline.tracking.base import Sink
from pipeline.tracking.console import hyperparameters_text
from pipeline.tracking.sinks import TrackedRun

_log = logging.getLogger(__name__)

# A histogram has at most this many bins, and at most as many as it has values.
_MAX_BINS = 30


class TensorBoardSink(Sink):
    """Writes `<folder>/<behavior>/events.out.tfevents.*`; imports neither torch nor TensorFlow.

    A new run deletes the event files of an earlier run in a behavior's folder before it writes
    there, because TensorBoard would draw both as one curve.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder
        self._keep_earlier = run.keep_earlier
        self._writers: dict[str, Any] = {}

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Write a behavior's settings, which TensorBoard shows in its tab Text."""
        # Lines that begin with four spaces are a code block in Markdown.
        text = "\n".join(f"    {line}" for line in hyperparameters_text(settings).splitlines())
        text_value = Summary.Value(
            # The tag and the plugin are those of ML-Agents, which calls torch's `add_text`.
            tag="Hyperparameters/text_summary",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype="DT_STRING", string_val=[text.encode()]),
        )
        self._write(behavior, [text_value], step=0)

    def on_distribution(self, behavior: str, tag: str, values: Sequence[float], step: int) -> None:
        """Write one event with the histogram `<tag>_hist`."""
        value = Summary.Value(tag=f"{tag}{names.HISTOGRAM}", histo=_histogram(values))
        self._write(behavior, [value], step)

    def on_image(self, behavior: str, tag: str, image: AnyArray, step: int) -> None:
        """Write one event with a picture."""
        from PIL import Image

        Image.fromarray(image).save(png := io.BytesIO(), format="png")
        sizes = dict(zip(("height", "width", "colorspace"), image.shape, strict=True))
        picture = Summary.Image(**sizes, encoded_image_string=png.getvalue())
        self._write(behavior, [Summary.Value(tag=tag, image=picture)], step)

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Write one event with a scalar per tag."""
        charted = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if tag not in names.HIDDEN
        ]
        self._write(behavior, charted, step)

    def close(self) -> None:
        """Flush and close the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, behavior: str, values: Sequence[Any], step: int) -> None:
        if behavior not in self._writers:
            self._writers[behavior] = self._writer(files.named(self._folder, behavior))
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writers[behavior].write(event.SerializeToString())
        # Flushing lets TensorBoard show a running training, and a kill loses nothing.
        self._writers[behavior].flush()

    def _writer(self, folder: Path) -> Any:
        """Return the writer of a new event file.

        TensorBoard's EventFileWriter is not used, because it writes in a thread, and errors of this
        thread would be printed as tracebacks.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for path in () if self._keep_earlier else sorted(folder.glob("events.out.tfevents.*")):
            _log.warning(
                "Deleting TensorBoard data %s that was left over from a previous run.", path
            )
            path.unlink()
        now = time.time()
        # This is TensorBoard's format of file names.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.0"
        writer = RecordWriter((folder / name).open("ab"))
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        return writer


for_run = TensorBoardSink


def _histogram(values: Sequence[float]) -> Any:
    numbers = np.asarray(values, dtype=np.float64)
    # In TensorBoard's default buckets, returns from 480 to 500 would be in one bucket.
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
