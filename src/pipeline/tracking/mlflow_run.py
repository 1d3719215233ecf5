"""One MLflow run per experiment and seed, to which all stages write.

Summaries use MLflow's asynchronous logging, so training never waits for them; other data are
written synchronously, before or after training. If the store fails, one warning is logged, and
later data are dropped. Stages find the run by its tags. A run has one policy: a stage that makes or
uses the policy of an earlier run continues that run.

Exported policies are registered. Each behavior of an environment has a registered model, because
only returns in the same environment can be compared; each version of the model is the policy of one
run. The alias `best` names the version with the highest mean return in evaluation; an alias with
the name of an experiment names the best version among the experiment's seeds. Only versions that
were evaluated in the present build of the environment count, and an equal score does not move an
alias.
"""

import contextlib
import io
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files, machine
from pipeline.core.arrays import AnyArray
from pipeline.errors import Interrupted, PipelineError
from pipeline.tracking import mlflow_store, names, run_metadata
from pipeline.tracking.base import Sink
from pipeline.tracking.mlflow_store import CHECKOUT, CURRENT, Store, clean
from pipeline.tracking.run_metadata import BASELINE, VARIANT, RunKey, RunMetadata, dvc_digest

_log = logging.getLogger(__name__)

_FIRST_STAGE = "train"
_TRAINED = "dvc.train"
"""Tag with DVC's digest of the run's policy."""
_FINGERPRINT = "train.fingerprint"
"""Tag with the digest of the training's inputs; a training with another digest begins a new run."""
_PARENT = "mlflow.parentRunId"
"""MLflow's tag with the parent of a run, below which MLflow shows the run."""
# Writes end after this many successive errors, because a dead server delays each write.
_GIVE_UP_AFTER = 3

BEST = "best"
SCORE, BUILD, EXPERIMENT, CONTENT = "score", "environment.dvc", "experiment", "sha256"
"""Tags of a model version: mean return, environment's digest, experiment, model file's digest."""

_NEEDED = ("mlflow", "onnx", "onnxruntime", "numpy")
"""Packages that `mlflow.onnx` and `mlflow.pyfunc` need to load and run a model."""

_DESCRIPTION = (
    "Policies for Unity as ONNX, a version for each run. `best` has the highest mean return in "
    "evaluation; an experiment's alias is the best of its seeds."
)
_STDERR = threading.Lock()


def enabled() -> bool:
    """Return whether runs are written: PIPELINE_MLFLOW is not set to off, no, false or 0."""
    return os.environ.get("PIPELINE_MLFLOW", "on").lower() not in {"off", "no", "false", "0"}


class MlflowRun(Sink):
    """Writes parameters, curves, results, artifacts and models; the first write opens the store.

    `close`, which a training calls on its sinks, does not end the run; `end` does. `prefix`, for
    runs with several behaviors, puts the behavior's name before tags. `times` has the start and the
    end (Unix seconds) of a run that is written after it has ended.
    """

    def __init__(
        self, key: RunKey, *, prefix: bool = False, times: tuple[float, float] | None = None
    ) -> None:
        self._key, self._prefix = key, prefix
        self._times = times and tuple(int(seconds * 1000) for seconds in times)
        self._pending: list[Any] = []
        self._failures = 0
        self._is_closed = False
        self._sampling = contextlib.ExitStack()
        self._store: Any = None
        self.run_id: str | None = None
        self.lost = 0
        """Number of entries that could not be written."""

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Queue the numbers of a summary."""
        points = [
            (self._charted(behavior, tag), value, step)
            for tag, value in values.items()
            if tag not in names.HIDDEN
        ]
        self._write(lambda store: self._pending.append(self._log_metrics(store, points, now=False)))

    def on_image(self, behavior: str, tag: str, image: AnyArray, step: int) -> None:
        """Write a picture that a callback sends, for MLflow's page of charts."""
        key = self._charted(behavior, tag)
        self._write(lambda store: store.client.log_image(self.run_id, image, key=key, step=step))

    def trained(
        self,
        numbers: Mapping[str, Mapping[str, Any]],
        *,
        curve: Sequence[tuple[str, str, float, int]],
        seconds: float | None,
        interrupted: Sequence[int],
    ) -> None:
        """Write the final numbers of a training by behavior; unknown numbers are None.

        `curve` has the points of all summaries, from `curve_csv.read_points`; points that the run
        lacks are added. `seconds` is the time of the whole training. `interrupted` has the steps at
        which the training was interrupted and not resumed exactly.
        """
        self.complete(curve)
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

    def complete(self, curve: Sequence[tuple[str, str, float, int]]) -> None:
        """Wait for queued summaries, and write the points of `curve` that the run lacks.

        A killed process loses its queued points, and a store that other processes lock refuses some
        points. Wall times are in no file, so wall times cannot be added.
        """
        self._settle()
        points = {
            (self._charted(behavior, tag), step): value
            for behavior, tag, value, step in curve
            if math.isfinite(value)
        }

        def fill(store: Store) -> None:
            for name in {name for name, _ in points}:
                # Points are unique by name and step; a point that MLflow has is not written twice.
                for metric in store.client.get_metric_history(self.run_id, name):
                    points.pop((name, metric.step), None)
            self._log_metrics(
                store, [(name, value, step) for (name, step), value in points.items()]
            )

        self._write(fill)

    def results(self, values: Mapping[str, float]) -> None:
        """Write final numbers at step 0 as `<stage>/<name>`, which MLflow draws as bars."""
        # Values have six digits, because MLflow's table of runs shows all digits of a number.
        self.points(
            {
                name: [(0, value if float(value).is_integer() else float(f"{value:.6g}"))]
                for name, value in values.items()
            }
        )

    def points(
        self, values: Mapping[str, Sequence[tuple[int, float]]], *, stage: str | None = None
    ) -> None:
        """Write `(step, value)` points of curves named `<stage>/<name>`."""
        points = [
            (clean(f"{stage or self._key.stage}/{name}"), value, step)
            for name, curve in values.items()
            for step, value in curve
        ]
        self._write(lambda store: self._log_metrics(store, points))

    def describe(self, metadata: RunMetadata, tree: Path) -> None:
        """Write the run's metadata, which all stages share; data paths are relative to `tree`."""
        self.params(metadata.params)

        def write(store: Store) -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            inputs, tags = [], {mlflow_store.NOTE: metadata.note}
            for item in metadata.data:
                if (tree / item.path).exists():
                    digest = tags[f"dvc.{item.context}"] = dvc_digest(tree / item.path)
                    dataset = Dataset(
                        name=item.name,
                        digest=digest,
                        source_type="local",
                        source=json.dumps({"uri": item.path}),
                        profile=json.dumps(dict(item.facts)),
                    )
                    context = InputTag("mlflow.data.context", item.context)
                    inputs.append(DatasetInput(dataset, [context]))
            if inputs:
                store.client.log_inputs(self.run_id, datasets=inputs)
            store.set_tags(self.run_id, tags)
            store.client.log_text(self.run_id, metadata.configuration, "configuration.yaml")

        self._write(write)

    def params(self, values: Mapping[str, Any]) -> None:
        """Write the parameters that the run lacks; MLflow refuses to change a parameter."""

        def write(store: Store) -> None:
            from mlflow.entities import Param

            present = store.client.get_run(self.run_id).data.params
            # Parameters that the run already has are left out, because MLflow refuses the whole
            # batch if one parameter has another value than before.
            texts = mlflow_store.flatten(values)
            new = [Param(name, text) for name, text in texts.items() if name not in present]
            store.client.log_batch(self.run_id, params=new)

        self._write(write)

    def settings(self, values: Mapping[str, Any]) -> None:
        """Write the stage's settings as tags `<stage>.<name>`, which can be changed later."""
        tags = mlflow_store.flatten(values, f"{self._key.stage}.")
        self._write(lambda store: store.set_tags(self.run_id, tags))

    def made(self, path: Path, *, what: str | None = None) -> None:
        """Write the digest of a stage's output, as in `dvc.lock`, to the tag `dvc.<stage>`.

        `what` is the stage; None for the present stage. If an earlier run has trained the same
        policy, that run becomes the current run again, because it may have evaluations and models.
        """
        tag = f"dvc.{what or self._key.stage}"

        def write(store: Store) -> None:
            digest = dvc_digest(path)
            # Only the output of training, the policy, identifies a run.
            earlier = self._first(store, _TRAINED, digest) if tag == _TRAINED else None
            if earlier in (None, self.run_id):
                store.set_tags(self.run_id, {tag: digest})
            else:
                # The earlier run has this policy, so this run ends, and becomes a child of the
                # earlier run.
                self._terminate("FINISHED")
                self._put_back(store, str(earlier))

        self._write(write)

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Copy files into the run's artifacts, in a folder of the stage."""

        def write(store: Store) -> None:
            for path in paths:
                store.client.log_artifact(self.run_id, str(path), self._key.stage)

        self._write(write)

    def picture(self, path: Path, *, step: int) -> None:
        """Write a picture for MLflow's page of charts, named by the stage and the file."""
        from PIL import Image

        key = clean(f"{self._key.stage}/{path.stem}")
        with Image.open(path) as image:
            picture = image.convert("RGB")
        self._write(lambda store: store.client.log_image(self.run_id, picture, key=key, step=step))

    def model(self, path: Path, *, environment: str, made: Path | None = None) -> None:
        """Write an ONNX file as a logged model with its signature, and as a registered version.

        The version's tag `dvc.export` has the DVC digest of `made`, or else of the file's folder.
        """
        tags = {
            EXPERIMENT: self._key.label,
            "seed": str(self._key.seed),
            "run": self._key.name,
            "dvc.export": dvc_digest(made or path.parent),
            "git.commit": self._key.tags.get("mlflow.source.git.commit", ""),
        }
        name = model_name(environment, path.stem)
        self._write(lambda store: log_onnx(store, str(self.run_id), path, name, tags))

    def score(
        self,
        values: Mapping[str, float],
        *,
        environment: str,
        build: Path,
        params: Mapping[str, Any],
    ) -> None:
        """Write the mean return of each behavior's policy, and update the aliases.

        `build` is the folder of the environment in which the policies were evaluated; a clone of
        the repository may lack it. `params` describe the evaluation.
        """

        def write(store: Store) -> None:
            shared = {
                BUILD: dvc_digest(build) if build.exists() else "",
                EXPERIMENT: self._key.label,
                **{f"evaluate.{name}": str(value) for name, value in params.items()},
            }
            for behavior, value in values.items():
                name = model_name(environment, behavior)
                # Two stages may score versions of one model at once, so the store is locked.
                with mlflow_store.locked(store.uri):
                    tags = shared | {SCORE: repr(value)}
                    score(store.client, str(self.run_id), name, tags)

        self._write(write)

    def end(self, status: str = "FINISHED") -> None:
        """Wait for queued summaries, and end the run with a status: FINISHED, FAILED or KILLED."""
        if not self._is_closed:
            for error in self._settle():
                self.lose(error)
            self._write(lambda _: self._terminate(status))
            self._is_closed = True

    def _charted(self, behavior: str, tag: str) -> str:
        return clean(f"{behavior}/{tag}" if self._prefix else tag)

    def _write(self, call: Callable[[Store], object]) -> None:
        """Open the run if needed, and call `call` with the store; errors are logged, not raised."""
        if self._failures >= _GIVE_UP_AFTER or self._is_closed:
            self.lost += 1
            return
        try:
            if self._store is None:
                self._store = Store.open(self._key.root)
                self._begin(self._store)
            call(self._store)
            self._failures = 0
        except Interrupted:
            raise
        except Exception as error:  # noqa: BLE001  # tracking never stops training
            # A store that cannot be opened at all is not tried again.
            self._failures += 1 if self.run_id else _GIVE_UP_AFTER
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Count an entry that could not be written; log a warning for the first."""
        self.lost += 1
        # Only the first error is logged, because later errors mostly have the same cause.
        if self.lost > 1:
            return
        reason = str(error).strip().partition("\n")[0]
        if not isinstance(error, PipelineError):
            reason = f"{type(error).__name__}: {reason[:200] or 'no details'}"
        _log.warning(
            "MLflow cannot be written (%s). The files in results/ are complete without it. "
            "Check MLFLOW_TRACKING_URI, or set PIPELINE_MLFLOW=off.",
            reason,
        )

    def _settle(self) -> list[Exception]:
        """Wait for queued summaries, and return the errors of summaries that failed."""
        pending, self._pending = self._pending, []
        errors = []
        for operation in pending:
            try:
                operation.wait()
            except Exception as error:  # noqa: BLE001  # tracking never stops training
                errors.append(error)
        return errors

    def _log_metrics(
        self, store: Store, points: Sequence[tuple[str, float, int]], *, now: bool = True
    ) -> Any:
        """Write `(name, value, step)` points; if not `now`, return MLflow's handle of the write."""
        from mlflow.entities import Metric

        unix_ms = self._times[1] if self._times else int(time.time() * 1000)
        metrics = [Metric(name, value, unix_ms, step) for name, value, step in points]
        return store.client.log_batch(self.run_id, metrics=metrics, synchronous=now)

    def _terminate(self, status: str) -> None:
        self._sampling.close()
        ended = self._times[1] if self._times else None
        self._store.client.set_terminated(self.run_id, status=status, end_time=ended)

    def _begin(self, store: Store) -> None:
        """Choose the run to write to: the current run, an earlier run, or a new run."""
        key = self._key
        run = self._first(store, CURRENT, "yes")
        earlier = None if key.policy is None else self._first(store, _TRAINED, key.policy)
        if earlier not in (None, run):
            # DVC may have restored an earlier policy from its run cache or an experiment; then the
            # run of this policy continues.
            run = earlier
            self._put_back(store, str(run))
        tags = self._identity(store) | {name: str(value) for name, value in key.tags.items()}
        tags |= {_FINGERPRINT: key.fingerprint} if key.stage == _FIRST_STAGE else {}
        if run is not None and self._goes_on(store.client.get_run(run).data.tags):
            store.client.update_run(run, status="RUNNING")
            store.set_tags(run, tags)
            self.run_id = run
        else:
            policy = {} if key.policy is None else {_TRAINED: key.policy}
            created = store.client.create_run(
                store.experiment_id,
                run_name=key.name,
                tags={**tags, **policy, CURRENT: "yes"},
                start_time=self._times[0] if self._times else None,
            )
            self._supersede(store, str(created.info.run_id))
        asked = os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "").lower()
        if key.stage == _FIRST_STAGE and asked in {"true", "1"}:
            import mlflow

            mlflow.set_tracking_uri(store.uri)
            # The run is nested, because the calling program may have an open run.
            self._sampling.enter_context(mlflow.start_run(run_id=self.run_id, nested=True))

    def _goes_on(self, tags: Mapping[str, str]) -> bool:
        """Return whether the stage continues the run with these tags.

        A run has one training and the policy of this training. A second training from the start or
        on other inputs gets a new run, and so does the evaluation of another policy.
        """
        key, trained = self._key, tags.get(_TRAINED)
        if key.stage == _FIRST_STAGE:
            return key.resumed and tags.get(_FINGERPRINT) == key.fingerprint
        return trained is None or key.policy in (None, trained)

    def _identity(self, store: Store) -> dict[str, str]:
        """Return the tags that identify experiment, seed, copy of the repository and variant."""
        key = self._key
        copy = {} if store.is_local else {CHECKOUT: run_metadata.checkout(key.root)}
        seed = {"pipeline.experiment": key.label, "pipeline.seed": str(key.seed)}
        return seed | copy | {VARIANT: key.variant}

    def _of_same(self, store: Store, **more: str) -> list[Any]:
        """Return the runs with the tags of `_identity` and the tags in `more`, newest first."""
        tags = self._identity(store) | more
        query = " and ".join(f"tags.`{name}` = {_quoted(text)}" for name, text in tags.items())
        return list(store.client.search_runs([store.experiment_id], query))

    def _first(self, store: Store, tag: str, value: str) -> str | None:
        """Return the id of the oldest run with the tags of `_identity` and this tag, or None."""
        # DVC allows experiments of the same name on different commits, so the run must also have
        # the same base commit.
        based = {name: text for name, text in self._key.tags.items() if name == BASELINE}
        runs = self._of_same(store, **{tag: value}, **based)
        return str(runs[-1].info.run_id) if runs else None

    def _put_back(self, store: Store, run: str) -> None:
        """Make an earlier run the current run again, with its original name."""
        if _PARENT in store.client.get_run(run).data.tags:
            store.client.delete_tag(run, _PARENT)
        store.client.update_run(run, name=self._key.name)
        store.set_tags(run, {CURRENT: "yes"})
        self._supersede(store, run)

    def _supersede(self, store: Store, current: str) -> None:
        """Write to the run `current` from now on; make it the parent of all runs that it replaces.

        These are the other runs with the same identity. Open runs of killed attempts are ended.
        """
        for earlier in self._of_same(store):
            run, tags = earlier.info.run_id, earlier.data.tags
            if run == current:
                continue
            if earlier.info.status == "RUNNING":
                store.client.set_terminated(run, status="KILLED")
            # All superseded runs become direct children of the current run.
            if tags.get(_PARENT) != current:
                store.set_tags(run, {CURRENT: "no", _PARENT: current})
            if tags.get(CURRENT) != "no":
                store.client.update_run(run, name=f"{earlier.info.run_name} (superseded)")
        self.run_id = current


def model_name(environment: str, behavior: str) -> str:
    """Return the registered model's name; MLflow refuses slashes and colons."""
    return re.sub(r"[/:]", "_", f"{environment}.{behavior}")


def alias_of(experiment: str) -> str:
    """Return an experiment's name as an alias: letters, digits, dashes and underscores."""
    text = re.sub(r"[^A-Za-z0-9_-]", "_", experiment)
    # MLflow reserves `latest` and names such as `v1`; `best` is the best of all versions.
    return f"{text}_" if re.fullmatch(r"[vV]\d+|latest|best", text) else text


def best(
    versions: Mapping[str, Mapping[str, str]], build: str, incumbent: str | None
) -> str | None:
    """Return the version with the highest score in a build of the environment.

    Of several versions with this score, `incumbent` is returned if it is one of them, else the
    oldest; without any score `incumbent` is returned. `versions` has the tags of the candidates by
    version number; only scores in the environment with the digest `build` are compared.
    """
    scores = {
        version: float(tags[SCORE])
        for version, tags in versions.items()
        if SCORE in tags and tags.get(BUILD) == build
    }
    winners = [version for version, score in scores.items() if score == max(scores.values())]
    # An equal score does not move the alias, so that a repeated run leaves it in place.
    return incumbent if incumbent in winners or not winners else min(winners, key=int)


def log_onnx(store: Store, run: str, path: Path, name: str, tags: Mapping[str, str]) -> None:
    """Log an ONNX file as a model of a run and register it; the same file only once per run.

    The model has the run's parameters and its final numbers.
    """
    import mlflow.onnx
    import onnx

    content = files.sha256_of(path)
    # A retried stage exports the same bytes, which need no new version.
    if any(version.tags.get(CONTENT) == content for version in _versions(store.client, run, name)):
        return
    exported = onnx.load(str(path), load_external_data=False)
    needed = {package: metadata.version(package).partition("+")[0] for package in _NEEDED}
    mlflow.set_tracking_uri(store.uri)
    # The run is nested, because the calling program may have an open run.
    with mlflow.start_run(run_id=run, nested=True, log_system_metrics=False):
        info = mlflow.onnx.log_model(
            exported,
            name=path.stem,
            signature=_signature(exported.graph),
            # Without this list, MLflow starts a process to find the packages by their imports.
            pip_requirements=[f"{package}=={version}" for package, version in needed.items()],
            onnx_execution_providers=["CPUExecutionProvider"],
            # The weights stay in the file, so that it has the same bytes as the exported file.
            save_as_external_data=False,
        )
    # `register_model` prints two lines to stderr, which would be in the output of every stage.
    # Only one thread at a time may replace stderr.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with mlflow_store.locked(store.uri), _STDERR, quiet:
        mlflow.register_model(f"models:/{info.model_id}", name, tags={**tags, CONTENT: content})
        store.client.update_registered_model(name, description=_DESCRIPTION)


def _signature(graph: Any) -> Any:
    import onnx
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def spec(value: Any) -> TensorSpec:
        tensor = value.type.tensor_type
        # MLflow writes -1 for the batch axis, which has a name in ONNX.
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        return TensorSpec(dtype, tuple(dims), value.name)

    inputs, outputs = (Schema([*map(spec, values)]) for values in (graph.input, graph.output))
    return ModelSignature(inputs, outputs)


def _versions(client: Any, run: str, name: str) -> list[Any]:
    """Return the versions of the registered model `name` that a run registered, newest first."""
    versions = client.search_model_versions(f"run_id = '{run}'")
    of_model = (version for version in versions if version.name == name)
    return sorted(of_model, key=lambda version: int(version.version), reverse=True)


def score(client: Any, run: str, name: str, tags: Mapping[str, str]) -> None:
    """Write `tags` to the run's newest version of the registered model `name`.

    The tags have SCORE, BUILD and EXPERIMENT. The score is also written as a metric of the logged
    model; afterwards the registered model's aliases are updated.
    """
    versions = _versions(client, run, name)
    if not versions:
        return
    for key, value in tags.items():
        client.set_model_version_tag(name, versions[0].version, key, value)
    # MLflow's page of the logged model shows this metric; `source` ends with the model's id.
    mean, model = float(f"{float(tags[SCORE]):.6g}"), versions[0].source.removeprefix("models:/")
    client.log_metric(run, "evaluate/mean_return", mean, step=0, model_id=model)
    _move_aliases(client, name, tags, own_only=_is_below_best(client, versions[0], tags))


def _quoted(text: str) -> str:
    """Return a text for a query; double quotes if it has a single quote, as a git reference may."""
    return f'"{text}"' if "'" in text else f"'{text}'"


def _is_below_best(client: Any, scored: Any, tags: Mapping[str, str]) -> bool:
    """Return whether BEST names another version, with at least this score in the same build."""
    from mlflow.exceptions import MlflowException

    # Without this question, each of n evaluations would read all n versions of the model.
    try:
        present = client.get_model_version_by_alias(scored.name, BEST)
    except MlflowException:  # no version has the alias yet
        return False
    is_other = str(present.version) != str(scored.version) and SCORE in present.tags
    is_comparable = is_other and present.tags.get(BUILD) == tags[BUILD]
    return is_comparable and float(present.tags[SCORE]) >= float(tags[SCORE])


def _move_aliases(
    client: Any, name: str, tags: Mapping[str, str], *, own_only: bool = False
) -> None:
    """Move BEST and the experiment's alias to the versions with the highest score in the build.

    With `own_only` BEST stays, and only the versions of the experiment are read.
    """
    from mlflow.exceptions import MlflowException

    more = f" and tags.`{EXPERIMENT}` = {_quoted(tags[EXPERIMENT])}" if own_only else ""
    registered = client.search_model_versions(f"name = '{name}'{more}")
    versions = {str(version.version): version.tags for version in registered}
    own = {k: v for k, v in versions.items() if v.get(EXPERIMENT) == tags[EXPERIMENT]}
    aliases, moved = client.get_registered_model(name).aliases, False
    for alias, candidates in ((BEST, versions), (alias_of(tags[EXPERIMENT]), own))[own_only:]:
        current = aliases.get(alias)
        chosen = best(candidates, tags[BUILD], None if current is None else str(current))
        if chosen is not None and chosen != str(current):
            try:
                client.set_registered_model_alias(name, alias, chosen)
            except MlflowException:
                # The store refuses one of two clients that set a new alias at the same time.
                if client.get_registered_model(name).aliases.get(alias) == current:
                    raise
            moved = True
    if moved:
        # The aliases are chosen again, because another stage may have scored a better version since
        # the versions were read.
        _move_aliases(client, name, tags, own_only=own_only)
