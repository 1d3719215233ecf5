"""A run of MLflow: the stage's, or a new one for a training outside the DAG."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pipeline import files
from pipeline.errors import Interrupted
from pipeline.tracking import run_metadata
from pipeline.tracking.base import Sink
from pipeline.tracking.curve_csv import read_points
from pipeline.tracking.mlflow_run import MlflowRun, enabled
from pipeline.tracking.sinks import TrackedRun


def for_run(run: TrackedRun) -> Sink | None:
    """Return a sink, unless PIPELINE_MLFLOW switches it off."""
    if not enabled():
        return None
    return MlflowSink(run) if run.record is None else run.record


class MlflowSink(MlflowRun):
    """Writes parameters, curves, results and models as the stages `train` and `export` do.

    The run in MLflow is made when the first behavior appears, so that a training that never
    starts has none. A resumed training continues its run.

    Raises:
        ValueError: The training has no key or no row.
    """

    def __init__(self, run: TrackedRun) -> None:
        if run.key is None or run.row is None:
            raise ValueError("a row of MLflow needs the key and the row of its run")
        super().__init__(run.key, prefix=run.prefixed)
        self._run, self._row = run, run.row
        # This stays if the run neither ends nor fails: somebody has stopped it.
        self._status = "KILLED"
        self._began_s: float | None = None

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Make or continue the row; write the settings that the configuration did not list."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            self.describe(self._row, self._key.root)
        # A behavior of the environment that the configuration does not list has the default
        # settings.
        if behavior not in self._run.max_steps:
            self.params(run_metadata.parameters({behavior: settings}, prefix=True))

    def ended(self, results: Mapping[str, Mapping[str, float]]) -> None:
        """Write the final numbers, the digests of the outputs, and the models."""
        if self._began_s is None:
            return
        self._status = "FINISHED"
        folder, environment = self._run.folder, self._key.tags["pipeline.environment"]
        steps = {numbers.get(run_metadata.INTERRUPTED) for numbers in results.values()} - {None}
        self.trained(
            results,
            curve=read_points(folder / "progress.csv"),
            # The seconds of a killed attempt are unknown.
            seconds=None if self._key.resumed else time.monotonic() - self._began_s,
            interrupted=sorted(int(step) for step in steps if step is not None),
        )
        for behavior in results:
            suffix = f".{behavior}" if len(results) > 1 else ""
            checkpoint = files.named(folder, behavior) / "checkpoint.pt"
            model = files.named(folder, behavior, ".onnx")
            for stage, path in (("train", checkpoint), ("export", model)):
                if path.is_file():
                    self.made(path, what=f"{stage}{suffix}")
            if model.is_file():
                self.model(model, environment=environment, made=model)

    def failed(self, error: BaseException) -> None:
        """Mark the row as failed, unless somebody stopped the run."""
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        if self._status != "FINISHED" and not stopped:
            self._status = "FAILED"

    def close(self) -> None:
        """Write what is pending, and end the row."""
        if self._began_s is not None:
            self.end(self._status)
