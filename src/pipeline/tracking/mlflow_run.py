"""One MLflow run per experiment and seed, which all its stages write to.

Summaries go through MLflow's asynchronous logging, so training never waits for them; everything
else is written at once, before or after training. If the store cannot be used there is one warning,
and everything later is dropped. Stages find the run by its tags. A run holds one policy: a stage
that makes or takes the policy of an earlier run continues that run.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import machine
from pipeline.errors import Interrupted, PipelineError
from pipeline.tracking import mlflow_models, mlflow_store, names, run_metadata
from pipeline.tracking.base import Sink
from pipeline.tracking.mlflow_store import CHECKOUT, CURRENT, TRAINED, Store
from pipeline.tracking.run_metadata import RunKey, RunMetadata

Point = tuple[str, str, float, int]
"""Behavior, tag, value and step of a number, as `curve_csv.read_points` gives them."""

_log = logging.getLogger(__name__)

_FIRST_STAGE = "train"
_FINGERPRINT = "train.fingerprint"
"""Tag: the digest of the training's inputs; training on other inputs begins a new run."""
_GIVE_UP_AFTER = 3


def enabled() -> bool:
    """Return False if the environment variable PIPELINE_MLFLOW is off, no, false or 0."""
    return os.environ.get("PIPELINE_MLFLOW", "on").lower() not in {"off", "no", "false", "0"}


class MlflowRun(Sink):
    """Takes parameters, curves, results, artifacts and models; the first of them opens the store.

    When training closes it as a sink, the run goes on until `end`. With `prefix`, for runs with
    several behaviors, the behavior's name stands before the tags. `times` has the start and the end
    (unix seconds) of a run that was made earlier.
    """

    def __init__(
        self, key: RunKey, *, prefix: bool = False, times: tuple[float, float] | None = None
    ) -> None:
        self._key, self._prefix = key, prefix
        self._times = times and tuple(int(seconds * 1000) for seconds in times)
        self._pending: list[Any] = []
        self._failures = 0
        self._is_sampled = self._is_closed = False
        self._store: Any = None
        self.run_id: str | None = None
        self.lost = 0
        """Number of entries that could not be written."""

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Queue one summary."""
        now = self._now()
        points = [
            (self._charted(behavior, tag), value, now, step)
            for tag, value in values.items()
            if tag not in names.HIDDEN
        ]
        self._write(
            lambda store, run: self._pending.append(
                store.log_metrics(run, points, synchronous=False)
            )
        )

    def trained(
        self,
        numbers: Mapping[str, Mapping[str, Any]],
        *,
        curve: Sequence[Point],
        seconds: float | None,
        interrupted: Sequence[int],
    ) -> None:
        """Write the final numbers of a training by behavior; unknown numbers are None.

        `curve` has all summaries, some of which may be missing in the run. `seconds` are those of
        the whole training. At the steps `interrupted` the training was not resumed exactly.
        """
        self._settle()
        self._write(lambda store, run: self._fill(store, run, curve))
        flat = run_metadata.flat(numbers)
        results = {name: value for name, value in flat.items() if value is not None}
        if seconds is not None:
            n_steps = sum(values["steps"] for values in numbers.values())
            results |= {"training_s": seconds, "steps_per_second": n_steps / max(seconds, 1e-9)}
        self.results(results)
        steps = ", ".join(map(str, interrupted))
        here = {} if self._times else {"machine": machine.summary(machine.facts())}
        self.settings(
            {"exact": f"interrupted at steps {steps}, not exact" if steps else "yes"} | here
        )

    def results(self, values: Mapping[str, float]) -> None:
        """Write a stage's final numbers as `<stage>/<name>`; at step 0 MLflow draws bars."""
        # Six digits, since MLflow's table of runs shows all digits.
        rounded = {
            name: value if float(value).is_integer() else float(f"{value:.6g}")
            for name, value in values.items()
        }
        self.points({name: [(0, value)] for name, value in rounded.items()})

    def points(
        self, values: Mapping[str, Sequence[tuple[int, float]]], *, stage: str | None = None
    ) -> None:
        """Write `(step, value)` points of curves named `<stage>/<name>`."""
        now, stage = self._now(), stage or self._key.stage
        points = [
            (mlflow_store.clean(f"{stage}/{name}"), value, now, step)
            for name, curve in values.items()
            for step, value in curve
        ]
        self._write(lambda store, run: store.log_metrics(run, points))

    def describe(self, metadata: RunMetadata, tree: Path) -> None:
        """Write the run's metadata, equal in all stages; paths of data are relative to `tree`."""
        self.params(metadata.params)

        def write(store: Store, run: str) -> None:
            digests = store.log_data(run, metadata.data, tree)
            tags = {f"dvc.{context}": digest for context, digest in digests.items()}
            store.set_tags(run, {**tags, mlflow_store.NOTE: metadata.note})
            store.client.log_text(run, metadata.configuration, "configuration.yaml")

        self._write(write)

    def params(self, values: Mapping[str, Any]) -> None:
        """Write the parameters that the run lacks; MLflow refuses to change one."""

        def write(store: Store, run: str) -> None:
            from mlflow.entities import Param

            present = store.client.get_run(run).data.params
            texts = mlflow_store.flatten(values)
            new = [Param(name, text) for name, text in texts.items() if name not in present]
            store.client.log_batch(run, params=new)

        self._write(write)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write this stage's own settings as tags `<stage>.<name>`, which can change."""
        tags = mlflow_store.flatten(values, f"{self._key.stage}.")
        self._write(lambda store, run: store.set_tags(run, tags))

    def made(self, path: Path, *, what: str | None = None) -> None:
        """Write DVC's digest, as in `dvc.lock`, of an output of the stage, or of `what`.

        If an earlier run has trained the same policy, that run, which may have evaluations and
        models, becomes the current one again.
        """
        tag = f"dvc.{what or self._key.stage}"

        def write(store: Store, run: str) -> None:
            digest = run_metadata.dvc_digest(path)
            earlier = None
            if tag == TRAINED:
                earlier = store.first(self._tags(), TRAINED, digest)
            if earlier in (None, run):
                store.set_tags(run, {tag: digest})
            else:
                self._terminate("FINISHED")
                store.put_back(earlier, self._key.name, self._tags())
                self.run_id = earlier

        self._write(write)

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Copy files into the run's artifacts, in a folder of the stage."""

        def write(store: Store, run: str) -> None:
            for path in paths:
                store.client.log_artifact(run, str(path), self._key.stage)

        self._write(write)

    def picture(self, path: Path, *, step: int) -> None:
        """Write a picture for the charts page, named after the stage and the file."""
        from PIL import Image

        key = mlflow_store.clean(f"{self._key.stage}/{path.stem}")
        with Image.open(path) as image:
            picture = image.convert("RGB")
        self._write(lambda store, run: store.client.log_image(run, picture, key=key, step=step))

    def model(self, path: Path, *, environment: str, made: Path | None = None) -> None:
        """Write an ONNX file as a logged model with its signature, and as a registered version.

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
        self._write(lambda store, run: mlflow_models.log_onnx(store, run, path, name, tags))

    def score(
        self,
        values: Mapping[str, float],
        *,
        environment: str,
        build: Path,
        params: Mapping[str, Any],
    ) -> None:
        """Write the mean return of each behavior's policy in `build`, which may earn it an alias.

        `build` is the folder of the environment, which a clone may lack; `params` describe the
        evaluation.
        """

        def write(store: Store, run: str) -> None:
            shared = {
                mlflow_models.BUILD: run_metadata.dvc_digest(build) if build.exists() else "",
                mlflow_models.EXPERIMENT: self._key.label,
                **{f"evaluate.{name}": str(value) for name, value in params.items()},
            }
            for behavior, value in values.items():
                name = mlflow_models.model_name(environment, behavior)
                scored = {**shared, mlflow_models.SCORE: repr(value)}
                with mlflow_store.locked(store.uri):
                    mlflow_models.score(store.client, run, name, scored)

        self._write(write)

    def end(self, status: str = "FINISHED") -> None:
        """Wait for summaries under way, and end the run: FINISHED, FAILED or KILLED."""
        if self._is_closed:
            return
        for error in self._settle():
            self._lose(error)
        self._write(lambda _store, _run: self._terminate(status))
        self._is_closed = True

    def _now(self) -> int:
        return self._times[1] if self._times else int(time.time() * 1000)

    def _charted(self, behavior: str, tag: str) -> str:
        return mlflow_store.clean(f"{behavior}/{tag}" if self._prefix else tag)

    def _write(self, call: Callable[[Store, str], None]) -> None:
        """Call a function of the store and the run's id, which must not stop training."""
        if self._failures >= _GIVE_UP_AFTER or self._is_closed:
            self.lost += 1
            return
        try:
            if self._store is None:
                self._store = Store.open(self._key.root)
                self._begin()
            call(self._store, str(self.run_id))
            self._failures = 0
        except Interrupted:
            raise
        except Exception as error:  # noqa: BLE001  # tracking never stops training
            self._failures += 1 if self.run_id else _GIVE_UP_AFTER
            self._lose(error)

    def _settle(self) -> list[Exception]:
        """Wait for the summaries that are being written; return the errors of those that failed."""
        pending, self._pending = self._pending, []
        errors = []
        for operation in pending:
            try:
                operation.wait()
            except Exception as error:  # noqa: BLE001  # tracking never stops training
                errors.append(error)
        return errors

    def _fill(self, store: Store, run: str, curve: Sequence[Point]) -> None:
        """Write the points of a curve that the run lacks.

        A killed process loses the points that it had not sent yet, and a store that others keep
        locked refuses some. Wall times are in no file, so their gap stays.
        """
        known_steps: dict[str, set[int]] = {}
        points = []
        for behavior, tag, value, step in curve:
            name = self._charted(behavior, tag)
            if name not in known_steps:
                known_steps[name] = {
                    metric.step for metric in store.client.get_metric_history(run, name)
                }
            if step not in known_steps[name] and math.isfinite(value):
                points.append((name, value, self._now(), step))
        store.log_metrics(run, points)

    def _terminate(self, status: str) -> None:
        if self._is_sampled:
            import mlflow

            mlflow.end_run(status)
            self._is_sampled = False
        ended = self._times[1] if self._times else None
        self._store.client.set_terminated(self.run_id, status=status, end_time=ended)

    def _tags(self) -> dict[str, str]:
        key = self._key
        shared = {} if self._store.is_local else {CHECKOUT: mlflow_store.checkout(key.root)}
        trained = {_FINGERPRINT: key.fingerprint} if key.stage == _FIRST_STAGE else {}
        return {
            "pipeline.experiment": key.label,
            "pipeline.seed": str(key.seed),
            **shared,
            **trained,
            **{name: str(value) for name, value in key.tags.items()},
            "pipeline.variant": key.variant,
        }

    def _begin(self) -> None:
        """Choose the run to write to: the present one, an earlier one, or a new one."""
        key, tags, store = self._key, self._tags(), self._store
        run = store.first(tags, CURRENT, "yes")
        earlier = None if key.policy is None else store.first(tags, TRAINED, key.policy)
        if earlier not in (None, run):
            # DVC may have restored an earlier policy, from its run cache or an experiment.
            run = earlier
            store.put_back(run, key.name, tags)
        if run is not None and self._goes_on(store.client.get_run(run).data.tags):
            store.client.update_run(run, status="RUNNING")
            store.set_tags(run, tags)
        else:
            policy = {} if key.policy is None else {TRAINED: key.policy}
            created = store.client.create_run(
                store.experiment_id,
                run_name=key.name,
                tags={**tags, **policy, CURRENT: "yes"},
                start_time=self._times[0] if self._times else None,
            )
            run = str(created.info.run_id)
            store.supersede(run, tags)
        self.run_id = run
        asked = os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "").lower()
        if key.stage == _FIRST_STAGE and asked in {"true", "1"}:
            import mlflow

            mlflow.set_tracking_uri(store.uri)
            # Nested, since a program may have a run of its own open.
            mlflow.start_run(run_id=run, nested=True)
            self._is_sampled = True

    def _goes_on(self, tags: Mapping[str, str]) -> bool:
        """Return whether the stage continues the run with these tags instead of a new one.

        An MLflow run holds one training and its policy: a second training from the start, or on
        other inputs, gets a new run, and so does the evaluation of another policy.
        """
        key, trained = self._key, tags.get(TRAINED)
        if key.stage == _FIRST_STAGE:
            return key.resumed and tags.get(_FINGERPRINT) == key.fingerprint
        return trained is None or key.policy in (None, trained)

    def _lose(self, error: Exception) -> None:
        self.lost += 1
        if self.lost == 1:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0]
        if not isinstance(error, PipelineError):
            reason = f"{type(error).__name__}: {reason[:200] or 'no details'}"
        _log.warning(
            "MLflow is not being written (%s). The files in results/ are complete without it. "
            "Check MLFLOW_TRACKING_URI, or set PIPELINE_MLFLOW=off.",
            reason,
        )
