"""The sink for MLflow: the stage's run, or a new run for a training outside the DAG."""

import time
from collections.abc import Mapping
from typing import Any

from pipeline import files
from pipeline.errors import Interrupted
from pipeline.tracking import run_metadata
from pipeline.tracking.base import Sink
from pipeline.tracking.curve_csv import read_points
from pipeline.tracking.mlflow_run import MlflowRun, enabled
from pipeline.tracking.result import TrainResult
from pipeline.tracking.sinks import TrackedRun


def for_run(run: TrackedRun) -> Sink | None:
    """Return the sink; None if PIPELINE_MLFLOW switches MLflow off."""
    if not enabled():
        return None
    return MlflowSink(run) if run.record is None else run.record


class MlflowSink(MlflowRun):
    """Writes parameters, curves, results and models as the stages `train` and `export` do.

    The run in MLflow is created when the first behavior appears, so that a training that does not
    start has no run. A resumed training continues its run.

    Raises:
        ValueError: The `key` or the `row` of the run is None.
    """

    def __init__(self, run: TrackedRun) -> None:
        if run.key is None or run.row is None:
            raise ValueError("a run of MLflow needs the `key` and the `row` of the tracked run")
        super().__init__(run.key, prefix=run.prefixed)
        self._run, self._row = run, run.row
        # If a user stops the run, no method sets another status, and the status stays KILLED.
        self._status = "KILLED"
        self._began_s: float | None = None

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Create or continue the run; write settings of a behavior that is not configured."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            # A training that does not start leaves no run, so the run is not made in `__init__`.
            self.describe(self._row, self._key.root)
        # A behavior that the configuration does not list has the default settings.
        if behavior not in self._run.max_steps:
            self.params(run_metadata.parameters({behavior: settings}, prefix=True))

    def on_end(self, result: TrainResult) -> None:
        """Write the final numbers, the digests of the outputs, and the models."""
        if self._began_s is None:
            return
        self._status, results = "FINISHED", result.numbers()
        folder, environment = self._run.folder, self._key.tags["pipeline.environment"]
        steps = {numbers.get(run_metadata.INTERRUPTED) for numbers in results.values()} - {None}
        self.trained(
            results,
            curve=read_points(folder / "progress.csv"),
            # The time of a resumed run is unknown, because the killed attempt stored none.
            seconds=None if self._key.resumed else time.monotonic() - self._began_s,
            interrupted=sorted(int(step) for step in steps if step is not None),
        )
        for behavior in results:
            # As in the stages of the DAG, tags of a single behavior have no suffix.
            suffix = f".{behavior}" if len(results) > 1 else ""
            checkpoint = files.named(folder, behavior) / "checkpoint.pt"
            model = files.named(folder, behavior, ".onnx")
            for stage, path in (("train", checkpoint), ("export", model)):
                if path.is_file():
                    self.made(path, what=f"{stage}{suffix}")
            if model.is_file():
                self.model(model, environment=environment, made=model)

    def on_failure(self, error: BaseException) -> None:
        """Mark the run as failed, unless a user has stopped it."""
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        if self._status != "FINISHED" and not stopped:
            self._status = "FAILED"

    def close(self) -> None:
        """Write pending data, and end the run."""
        if self._began_s is not None:
            self.end(self._status)
