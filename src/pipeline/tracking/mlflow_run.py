"""One MLflow run per experiment and seed, written from a thread that training never waits for.

The thread imports MLflow, opens the store, and writes the queue in batches. If the store cannot be
used there is one warning, and everything later is dropped. The stages of one experiment and seed
share a run through a small record file, which also tells a killed run from a new one. A run holds
one policy: a stage that makes or takes the policy of an earlier run continues that run.
"""

# Not MLflow's own asynchronous logging: with the database locked for 25 s, it lost 5 of 30
# summaries. The queue here retries while the store is busy.

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import files, machine
from pipeline.errors import PipelineError
from pipeline.tracking import mlflow_database, mlflow_models, mlflow_store, names, run_metadata
from pipeline.tracking.base import Sink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.tracking.run_metadata import RunKey, RunMetadata

    Point = tuple[str, str, float, int]
    """Behavior, tag, value and step of a number, as `curve_csv.read_points` gives them."""

_log = logging.getLogger(__name__)

_FIRST_STAGE = "train"
PATIENT_S, QUICK_S = 120.0, 5.0
"""Patience with the store at the end of a run; short if stopped, since a scheduler kills soon."""
_GIVE_UP_AFTER = 3


def enabled() -> bool:
    """Return False if the environment variable PIPELINE_MLFLOW is off, no, false or 0."""
    return os.environ.get("PIPELINE_MLFLOW", "on").lower() not in {"off", "no", "false", "0"}


class MlflowRun(Sink):
    """Takes parameters, curves, results, artifacts and models; only `end` waits.

    When training closes it as a sink, the run goes on until `end`. With `prefix`, for runs with
    several behaviors, the behavior's name stands before the tags.
    """

    def __init__(self, key: RunKey, *, prefix: bool = False) -> None:
        self._key = key
        self._prefix = prefix
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        self._failures = 0
        self._n_processed = 0
        self.run_id: str | None = None
        self.lost = 0
        """Number of entries that could not be written."""
        # A daemon, so that a store that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Queue one summary."""
        start = f"{behavior}/" if self._prefix else ""
        now = int(time.time() * 1000)
        charted = {start + tag: value for tag, value in values.items() if tag not in names.HIDDEN}
        self._put([(mlflow_store.clean(name), value, now, step) for name, value in charted.items()])

    def trained(
        self,
        numbers: Mapping[str, Mapping[str, Any]],
        *,
        curve: Sequence[Point],
        seconds: float,
        interrupted: Sequence[int],
    ) -> None:
        """Queue the final numbers of a training by behavior; unknown numbers are None.

        `curve` has all summaries, some of which a killed attempt may not have sent. `seconds` are
        those of this attempt. At the steps `interrupted` the training was not resumed exactly.
        """
        flat = run_metadata.flat(numbers)
        results = {name: value for name, value in flat.items() if value is not None}
        if self._key.resumed:  # the seconds of the killed attempt are unknown
            self._put(lambda store, run: self._fill(store, run, curve))
        else:
            n_steps = sum(values["steps"] for values in numbers.values())
            results |= {"training_s": seconds, "steps_per_second": n_steps / max(seconds, 1e-9)}
        self.results(results)
        steps = ", ".join(map(str, interrupted))
        exact = f"interrupted at steps {steps}, not exact" if steps else "yes"
        self.settings({"exact": exact, "machine": machine.summary(machine.facts())})

    def results(self, values: Mapping[str, float]) -> None:
        """Queue a stage's final numbers as `<stage>/<name>`; at step 0 MLflow draws bars."""
        # Six digits, since MLflow's table of runs shows all digits.
        rounded = {
            name: value if float(value).is_integer() else float(f"{value:.6g}")
            for name, value in values.items()
        }
        self.points({name: [(0, value)] for name, value in rounded.items()})

    def points(
        self, values: Mapping[str, Sequence[tuple[int, float]]], *, stage: str | None = None
    ) -> None:
        """Queue `(step, value)` points of curves named `<stage>/<name>`."""
        now, stage = int(time.time() * 1000), stage or self._key.stage
        self._put(
            [
                (mlflow_store.clean(f"{stage}/{name}"), value, now, step)
                for name, curve in values.items()
                for step, value in curve
            ]
        )

    def describe(self, metadata: RunMetadata, tree: Path) -> None:
        """Queue the run's metadata, equal in all stages; paths of data are relative to `tree`."""
        self.params(metadata.params)

        def write(store: mlflow_store.Store, run: str) -> None:
            digests = store.log_data(run, metadata.data, tree)
            tags = {f"dvc.{context}": digest for context, digest in digests.items()}
            store.set_tags(run, {**tags, "mlflow.note.content": metadata.note})
            store.client.log_text(run, metadata.configuration, "configuration.yaml")

        self._put(write)

    def params(self, values: Mapping[str, Any]) -> None:
        """Queue parameters."""
        texts = mlflow_store.flatten(values)
        self._put(lambda store, run: store.log_params(run, texts))

    def settings(self, values: Mapping[str, Any]) -> None:
        """Queue this stage's own settings as tags `<stage>.<name>`, which can change."""
        tags = mlflow_store.flatten(values, f"{self._key.stage}.")
        self._put(lambda store, run: store.set_tags(run, tags))

    def made(self, path: Path, *, what: str | None = None) -> None:
        """Queue DVC's digest, as in `dvc.lock`, of an output of the stage, or of `what`.

        If an earlier run has trained the same policy, that run, which may have evaluations and
        models, becomes the current one again.
        """
        tag = f"dvc.{what or self._key.stage}"

        def write(store: mlflow_store.Store, run: str) -> None:
            digest = run_metadata.dvc_digest(path)
            earlier = store.trained(self._tags(), digest) if tag == mlflow_store.TRAINED else None
            if earlier in (None, run):
                store.set_tags(run, {tag: digest})
            else:
                store.end(run, "FINISHED")
                store.put_back(earlier, self._key.name, self._tags())
                self._remember(store, earlier, {_FIRST_STAGE: self._key.fingerprint})

        self._put(write)

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Queue copies of files into the run's artifacts, in a folder of the stage."""

        def write(store: mlflow_store.Store, run: str) -> None:
            for path in paths:
                store.client.log_artifact(run, str(path), self._key.stage)

        self._put(write)

    def picture(self, path: Path, *, step: int) -> None:
        """Queue a picture for the charts page, named after the stage and the file."""

        def write(store: mlflow_store.Store, run: str) -> None:
            from PIL import Image

            key = mlflow_store.clean(f"{self._key.stage}/{path.stem}")
            with Image.open(path) as image:
                store.client.log_image(run, image.convert("RGB"), key=key, step=step)

        self._put(write)

    def model(self, path: Path, *, environment: str, made: Path | None = None) -> None:
        """Queue an ONNX file as a logged model with its signature, and as a registered version.

        The DVC digest in its tags is that of `made`, or else of the file's folder.
        """
        key = self._key
        name = mlflow_models.model_name(environment, path.stem)
        tags = {
            mlflow_models.EXPERIMENT: key.label,
            "seed": str(key.seed),
            "run": key.name,
            "dvc.export": run_metadata.dvc_digest(made or path.parent),
            "git.commit": key.tags.get("mlflow.source.git.commit", ""),
        }
        self._put(lambda store, run: store.log_onnx(run, path, name, tags))

    def score(
        self,
        values: Mapping[str, float],
        *,
        environment: str,
        build: Path,
        params: Mapping[str, Any],
    ) -> None:
        """Queue the mean return of each behavior's policy in `build`, which may earn it an alias.

        `build` is the folder of the environment; `params` describe the evaluation.
        """
        key = self._key

        def write(store: mlflow_store.Store, run: str) -> None:
            shared = {
                mlflow_models.BUILD: run_metadata.dvc_digest(build),
                mlflow_models.EXPERIMENT: key.label,
                **{f"evaluate.{name}": str(value) for name, value in params.items()},
            }
            for behavior, value in values.items():
                name = mlflow_models.model_name(environment, behavior)
                scored = {**shared, mlflow_models.SCORE: repr(value)}
                with mlflow_database.locked(store.uri):
                    mlflow_models.score(store.client, run, name, scored)

        self._put(write)

    def end(self, status: str = "FINISHED", *, timeout_s: float | None = None) -> None:
        """Write what is queued and end the run with `status`: FINISHED, FAILED or KILLED.

        Gives up after `timeout_s`; for a finished run only after `timeout_s` without progress,
        since a busy machine may need longer for the whole queue.
        """
        if self._closed:
            return
        finished = status == "FINISHED"
        timeout_s = timeout_s or (PATIENT_S if finished else QUICK_S)
        self._put(lambda store, run: store.end(run, status))
        self._closed = True
        self._jobs.put(None)
        before: int | None = None
        while before is None or (finished and self._n_processed != before):
            before = self._n_processed
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                return
        self._warn(f"the store took nothing more within {timeout_s:g} s")

    def _put(self, job: Any) -> None:
        """Queue a list of points, or a function of the store and the run's id."""
        if self._failures < _GIVE_UP_AFTER and not self._closed:
            self._jobs.put(job)
        else:
            self.lost += 1

    def _work(self) -> None:
        try:
            store = mlflow_store.retried(lambda: mlflow_store.Store.open(self._key.root))
            mlflow_store.retried(lambda: self._begin(store))
            self._n_processed += 1
        except Exception as error:  # noqa: BLE001  # tracking never stops training
            # From now on nothing is queued, or a long run would fill the memory.
            self._failures = _GIVE_UP_AFTER
            self._warn(_reason(error))
            return
        points: list[Any] = []
        for job in iter(self._jobs.get, None):
            if isinstance(job, list):
                points += job
            # Waiting summaries are written in one transaction: SQLite does only few per second.
            if points and (callable(job) or self._jobs.empty()):
                written, points = points, []
                self._run_job(lambda store, run, rows=written: store.log_metrics(run, rows), store)
            if callable(job):
                self._run_job(job, store)

    def _run_job(self, job: Any, store: mlflow_store.Store) -> None:
        """Do a queued job, and repeat it while others keep the store busy."""
        # Each failure may have waited for minutes, and `end` must not wait for all of them.
        if self._failures >= _GIVE_UP_AFTER:
            self.lost += 1
            return
        try:
            mlflow_store.retried(lambda: job(store, self.run_id))
            self._failures = 0
        except Exception as error:  # noqa: BLE001  # tracking never stops training
            self.lost += 1
            self._failures += 1
            if self._failures == 1:
                self._warn(_reason(error))
        self._n_processed += 1

    def _fill(self, store: mlflow_store.Store, run: str, curve: Sequence[Point]) -> None:
        """Write the points of a curve that the run lacks.

        A killed process loses the points that it had not sent yet, and the resumed training would
        leave a gap. Wall times are in no file, so their gap stays.
        """
        known_steps: dict[str, set[int]] = {}
        now = int(time.time() * 1000)
        points = []
        for behavior, tag, value, step in curve:
            name = mlflow_store.clean(f"{behavior}/{tag}" if self._prefix else tag)
            if name not in known_steps:
                known_steps[name] = {
                    metric.step for metric in store.client.get_metric_history(run, name)
                }
            if step not in known_steps[name]:
                points.append((name, value, now, step))
        store.log_metrics(run, points)

    def _tags(self) -> dict[str, str]:
        key = self._key
        return {
            "pipeline.experiment": key.label,
            "pipeline.seed": str(key.seed),
            "pipeline.checkout": mlflow_store.checkout(key.root),
            **{name: str(value) for name, value in key.tags.items()},
            "pipeline.variant": key.variant,
        }

    def _begin(self, store: mlflow_store.Store) -> None:
        """Choose the run to write to: the present one, an earlier one, or a new one."""
        key, tags = self._key, self._tags()
        run, stages = _recorded(key, store)
        if run is None and key.stage != _FIRST_STAGE:
            run = store.current(tags)
        if run is not None:
            # A moved checkout and another host of a cluster have other tags; with the present
            # tags the old run is found below, and becomes a child of the new one.
            store.set_tags(run, {name: tags[name] for name in mlflow_store.IDENTITY})
        earlier = None if key.policy is None else store.trained(tags, key.policy)
        if earlier not in (None, run):
            # DVC may have restored an earlier policy, from its run cache or an experiment.
            run, stages = earlier, {}
            store.put_back(earlier, key.name, tags)
        if run is not None and _goes_on(store, run, key, stages):
            store.client.update_run(run, status="RUNNING")
            store.set_tags(run, tags)
        else:
            stages = {}
            policy = {} if key.policy is None else {mlflow_store.TRAINED: key.policy}
            new = {**tags, **policy, mlflow_store.CURRENT: "yes"}
            created = store.client.create_run(store.experiment_id, run_name=key.name, tags=new)
            run = str(created.info.run_id)
            store.supersede(run, tags)
        self._remember(store, run, {**stages, key.stage: key.fingerprint})
        if key.stage == _FIRST_STAGE:
            store.watch(run)

    def _remember(self, store: mlflow_store.Store, run: str, stages: Mapping[str, str]) -> None:
        """Write to `run` from now on, and let later stages find it."""
        self.run_id = run
        record = {"uri": store.place, "root": str(self._key.root), "run_id": run, "stages": stages}
        files.write_json(self._key.remembered, record)

    def _warn(self, reason: str) -> None:
        _log.warning(
            "MLflow is not being written (%s). The files in results/ are complete without it. "
            "Check MLFLOW_TRACKING_URI, or set PIPELINE_MLFLOW=off.",
            reason,
        )


def _goes_on(store: mlflow_store.Store, run: str, key: RunKey, stages: Mapping[str, str]) -> bool:
    """Return whether a stage continues this run instead of a new one.

    An MLflow run holds one training and its policy: a second training from the start, or on other
    inputs, gets a new run, and so does the evaluation of another policy.
    """
    trained = store.client.get_run(run).data.tags.get(mlflow_store.TRAINED)
    if key.stage != _FIRST_STAGE:
        return trained is None or key.policy in (None, trained)
    before = stages.get(_FIRST_STAGE)
    return trained is None if before is None else before == key.fingerprint and key.resumed


def _recorded(key: RunKey, store: mlflow_store.Store) -> tuple[str | None, dict[str, str]]:
    """Return the run that the record of this checkout names, and its stages' fingerprints."""
    try:
        record = json.loads(key.remembered.read_text(encoding="utf-8"))
        uri, run, stages = record["uri"], record["run_id"], record["stages"]
    except (OSError, ValueError, TypeError, KeyError):
        return None, {}
    made_in = Path(record.get("root", key.root))
    # A record that was copied from another checkout names that checkout's run.
    is_ours = store.is_local or made_in == key.root or not made_in.exists()
    if uri in (store.place, store.uri) and is_ours and store.holds(run):
        return run, stages
    return None, {}


def _reason(error: Exception) -> str:
    """Return an error's text for a warning, on one line."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, PipelineError):
        return text
    return f"{type(error).__name__}: {text[:200] or 'no details'}"
