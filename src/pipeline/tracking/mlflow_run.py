"""One MLflow run per experiment and seed, written from a thread that training never waits for.

The thread imports MLflow, opens the store, and writes what the queue holds in batches. When the
store cannot be used there is one warning, and everything later is dropped. The stages of one
experiment and seed share a run through a small record file, which also tells a killed run from a
new one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.tracking import mlflow_curve, mlflow_store, names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeline.tracking.base import Sink

_log = logging.getLogger(__name__)

_BEGINNERS = ("pretrain", "train")
_GIVE_UP_AFTER = 3


def enabled() -> bool:
    """False when the environment variable PIPELINE_MLFLOW says off, no, false or 0."""
    return os.environ.get("PIPELINE_MLFLOW", "on").lower() not in {"off", "no", "false", "0"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKey:
    """Which run a stage writes to."""

    experiment: str
    """Name in params.yaml."""
    seed: int
    """Seed of the run."""
    stage: str
    """Stage of the DAG; pretrain and train may begin a run, the others continue it."""
    fingerprint: str
    """Digest of the stage's inputs; training on other inputs begins a new run."""
    root: Path
    """The repository, which holds the store unless MLFLOW_TRACKING_URI names another."""
    record: Path
    """JSON file that remembers the run between stages."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Facts to search by: algorithm, digests of inputs."""


class MlflowRun:
    """Takes parameters, curves, results, artifacts and models; no method waits or raises.

    Args:
        key: which run.
        prefix: put the behavior's name before the tags, for runs with several behaviors.
    """

    def __init__(self, key: RunKey, *, prefix: bool = False) -> None:
        self._key = key
        self._prefix = prefix
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        self._failures = 0
        self._taken = 0
        self.run_id: str | None = None
        self.lost = 0
        """Number of entries that could not be written."""
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Queue one summary."""
        start = f"{behavior}/" if self._prefix else ""
        now = int(time.time() * 1000)
        self._put(
            [
                (mlflow_store.clean(start + tag), value, now, step)
                for tag, value in values.items()
                if tag not in names.HIDDEN
            ]
        )

    def curve(self) -> Sink:
        """A sink for training, which may close it while the run goes on."""
        return _Curve(self)

    def complete(self, curve: Path) -> None:
        """Queue the points of a finished curve's file that a killed attempt did not write."""
        self._put(lambda store, run: mlflow_curve.fill(store, run, curve, prefix=self._prefix))

    def results(self, values: Mapping[str, float]) -> None:
        """Queue a stage's final numbers as `<stage>/<name>`."""
        now = int(time.time() * 1000)
        stage = self._key.stage
        self._put(
            [(mlflow_store.clean(f"{stage}/{name}"), v, now, 0) for name, v in values.items()]
        )

    def params(self, values: Mapping[str, Any]) -> None:
        """Queue what the stage depends on, flattened to dotted names.

        Stages that may run again on the same run write tags, which can change; the others params.
        """
        flat = mlflow_store.flatten(values)
        if self._key.stage in _BEGINNERS:
            self._put(lambda store, run: store.log_params(run, flat))
        else:
            tags = {f"{self._key.stage}.{name}": text for name, text in flat.items()}
            self._put(lambda store, run: store.set_tags(run, tags))

    def artifacts(self, paths: Sequence[Path], folder: str | None = None) -> None:
        """Queue copies of files into the run's artifacts."""
        self._put(lambda store, run: store.log_files(run, paths, folder or self._key.stage))

    def model(self, path: Path, *, name: str) -> None:
        """Queue an ONNX file as a logged model with its signature."""
        self._put(lambda store, run: store.log_onnx(run, path, name))

    def close(self, *, status: str = "FINISHED", timeout_s: float = 120.0) -> None:
        """Write what is queued and end the run with `status`.

        Gives up after `timeout_s`; of a run that has finished, after `timeout_s` in which the store
        has taken nothing, since a busy machine may need longer for all of it.
        """
        if self._closed:
            return
        self._put(lambda store, run: store.end(run, status))
        self._closed = True
        self._jobs.put(None)
        before = -1.0
        while self._thread.is_alive() and before < self._taken:
            before = self._taken if status == "FINISHED" else math.inf
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"the store took nothing more within {timeout_s:g} s")

    def _put(self, job: Any) -> None:
        if self._failures < _GIVE_UP_AFTER and not self._closed:
            self._jobs.put(job)
        else:
            self.lost += 1

    def _work(self) -> None:
        try:
            store = mlflow_store.Store.open(self._key.root)
            self.run_id = run = self._begin(store)
            self._taken += 1
        except Exception as error:  # noqa: BLE001  # tracking never stops training
            self._failures = _GIVE_UP_AFTER
            self._warn(f"{type(error).__name__}: {_first_line(error)}")
            return
        while (batch := self._next()) is not None:
            for job in batch:
                self._run_job(job, store, run)

    def _next(self) -> list[Any] | None:
        """Everything queued, with neighboring metrics joined; None at the end."""
        jobs = [self._jobs.get()]
        while not self._jobs.empty():
            jobs.append(self._jobs.get())
        ended = jobs[-1] is None
        if ended:
            self._jobs.put(None)
            jobs.pop()
            if not jobs:
                return None
        joined: list[Any] = []
        for job in jobs:
            if isinstance(job, list) and joined and isinstance(joined[-1], list):
                joined[-1] += job
            else:
                joined.append(job)
        return joined

    def _run_job(self, job: Any, store: mlflow_store.Store, run: str) -> None:
        if self._failures >= _GIVE_UP_AFTER:
            self.lost += 1
            return
        try:
            if isinstance(job, list):
                store.log_metrics(run, job)
            else:
                action: Callable[[mlflow_store.Store, str], object] = job
                action(store, run)
        except Exception as error:  # noqa: BLE001  # tracking never stops training
            self.lost += 1
            self._failures += 1
            if self._failures == 1:
                self._warn(f"{type(error).__name__}: {_first_line(error)}")
        else:
            self._failures = 0
        self._taken += 1

    def _begin(self, store: mlflow_store.Store) -> str:
        """The run to write to: the recorded one, or a new one."""
        key, stages = self._key, dict[str, str]()
        record = _read_record(key.record)
        run: str | None = None
        if record is not None and record["uri"] == store.uri:
            stages = record["stages"]
            run = record["run_id"] if store.exists(record["run_id"]) else None
            if run is not None and _other_inputs(key, stages):
                store.end_if_running(run, "KILLED")
                run, stages = None, {}
        tags = {
            "pipeline.experiment": key.experiment,
            "pipeline.seed": str(key.seed),
            "pipeline.checkout": mlflow_store.checkout(key.root),
            **{name: str(value) for name, value in key.tags.items()},
        }
        if run is None:
            stages = {}
            run = store.create(f"{key.experiment}-seed{key.seed}", tags)
        else:
            store.reopen(run, tags)
        store.end_dead(run, tags)
        stages[key.stage] = key.fingerprint
        files.write_json(key.record, {"uri": store.uri, "run_id": run, "stages": stages})
        return run

    def _warn(self, why: str) -> None:
        _log.warning(
            "MLflow is not being written (%s). The files in results/ are complete without it. "
            "Check MLFLOW_TRACKING_URI, or set PIPELINE_MLFLOW=off.",
            why,
        )


class _Curve:
    """The part of a run that training writes."""

    def __init__(self, run: MlflowRun) -> None:
        self._run = run

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Queue one summary."""
        self._run.metrics(behavior, values, step)

    def close(self) -> None:
        """The run's owner closes it."""


def _other_inputs(key: RunKey, stages: Mapping[str, str]) -> bool:
    """Whether this stage begins a new run instead of continuing the recorded one."""
    if key.stage not in _BEGINNERS:
        return False
    before = stages.get(key.stage)
    if before is None:
        return key.stage == "pretrain"
    return before != key.fingerprint


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if {"uri", "run_id", "stages"} <= record.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else "no details"
