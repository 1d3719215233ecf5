"""The operations on an MLflow store that we need, through its client and without global state."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import shlex
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline import files
from pipeline.errors import PipelineError
from pipeline.tracking import mlflow_database, mlflow_models, mlflow_view
from pipeline.tracking.run_metadata import BASELINE, VARIANT, WORKSPACE, dvc_digest, flattened, git

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeline.tracking.run_metadata import InputData

_log = logging.getLogger(__name__)
T = TypeVar("T")

_EXPERIMENT = "pipeline"
"""Name of MLflow's experiment, unless MLFLOW_EXPERIMENT_NAME gives another."""
_DATABASE, _ARTIFACTS = "mlflow.db", "mlartifacts"
_WRITTEN = ("src", "config", "workflow", "params.yaml", "dvc.yaml", "Snakefile")
"""Paths that people edit; results are rewritten by every run."""
CURRENT = "pipeline.current"
"""Tag of a run: `yes` if it is the current run of its experiment and seed."""
TRAINED = "dvc.train"
"""Tag of a run: DVC's digest of its policy."""
CHECKOUT = "pipeline.checkout"
"""Tag of a run: the copy of the repository that it is of, by its `checkout`."""
IDENTITY = ("pipeline.experiment", "pipeline.seed", CHECKOUT, VARIANT)
"""Tags that are equal for runs of the same experiment, seed, checkout and variant."""
_GIT_WAIT_S = 5.0
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses between attempts to use a busy store; SQLite waits 20 s itself, as MLflow sets it."""
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Short retries and no telemetry, unless the user chose otherwise."""


def default_uri(root: Path) -> str:
    """Return the URI of the store: MLFLOW_TRACKING_URI, else `mlflow.db` in the repository."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / _DATABASE}"


def clean(name: str) -> str:
    """Replace the characters of a name that MLflow refuses by underscores."""
    return _NOT_ALLOWED.sub("_", name)


def checkout(root: Path) -> str:
    """Return an id for this copy of the repository that does not reveal its path."""
    return files.fingerprint([platform.node(), str(root)])[:12]


def flatten(values: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Return nested mappings as `{dotted name: text}`; lists stay whole."""
    # MLflow cuts parameters beyond 6,000 characters, with a warning for each.
    return {clean(name): str(value)[:5900] for name, value in flattened(values, start)}


def retried(call: Callable[[], T]) -> T:
    """Return what `call` returns; call again while the store or its server is busy."""
    for pause_s in _PAUSES_S:
        try:
            return call()
        except Exception as error:
            # After attempts of its own MLflow gives a server's 503 another code.
            was_asked_again = "error responses" in str(error)
            code = getattr(error, "error_code", None)
            if not was_asked_again and code != "TEMPORARILY_UNAVAILABLE":
                raise
        time.sleep(pause_s)
    return call()


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """An open store and the experiment in it."""

    uri: str
    place: str
    """Path of a store in the checkout, with which it moves; of any other store the URI."""
    experiment_id: str
    client: Any
    _monitors: list[Any] = field(default_factory=list)

    @classmethod
    def open(cls, root: Path, *, create: bool = True) -> Store:
        """Open the store, and create it if needed; many processes may do so at once.

        Raises:
            PipelineError: The store's file cannot be opened, or its experiment was deleted, or is
                not there and is not to be created.
            mlflow.exceptions.MlflowException: The store cannot be reached or read.
            filelock.Timeout: Another process holds the new store's lock for too long.
        """
        uri = default_uri(root := root.resolve())
        mlflow_database.check(uri)
        for name, value in _ENVIRONMENT.items():
            # Before MLflow is imported, which reads some of them only then.
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table it creates
        if not _log.isEnabledFor(logging.DEBUG):
            # Both also raise what they log, MLflow with a traceback; we report it in one line.
            logging.getLogger("mlflow.store").setLevel(logging.CRITICAL)
            logging.getLogger("urllib3").setLevel(logging.ERROR)
        file, artifacts, place = mlflow_database.file_of(uri), root / _ARTIFACTS, uri
        if file is not None and file.resolve().is_relative_to(root):
            place = file.resolve().relative_to(root).as_posix()
        elif file is not None:
            # Beside a file that several checkouts share, so that none writes into another.
            artifacts = file.resolve().parent / _ARTIFACTS
        # One process at a time: MLflow fails when several create its tables at once.
        with mlflow_database.locked(uri):
            mlflow_database.make_whole(uri)
            client = MlflowClient(tracking_uri=uri)
            if place != uri:
                mlflow_database.follow(uri, _locations(client), artifacts)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
            experiment = client.get_experiment_by_name(name)
            if experiment is None and not create:
                raise PipelineError(_missing(client, name))
            if experiment is None:
                # A server has a place of its own for artifacts.
                location = artifacts.as_uri() if file is not None else None
                experiment = _create_experiment(client, name, location)
            identifier = experiment.experiment_id
            if experiment.lifecycle_stage != "active":
                restore = f"{_mlflow(uri)} restore -x {identifier}"
                raise PipelineError(
                    f"MLflow's experiment {name!r} was deleted; `{restore}` brings it back with "
                    "its runs, and MLFLOW_EXPERIMENT_NAME names another"
                )
            for tag, text in mlflow_view.missing(identifier, experiment.tags).items():
                # Another client may write the same tag; a later stage writes a missing one.
                with contextlib.suppress(MlflowException):
                    client.set_experiment_tag(identifier, tag, text)
        return cls(uri=uri, place=place, experiment_id=identifier, client=client)

    @classmethod
    def existing(cls, root: Path) -> Store:
        """Open the store that earlier runs have created.

        Raises:
            PipelineError: There is no store, or it cannot be opened.
        """
        uri = default_uri(root)
        file = mlflow_database.file_of(uri)
        if file is not None and not file.exists():
            raise PipelineError(_no_store(root, file))
        try:
            return cls.open(root, create=False)
        except Exception as error:
            # MLflow is imported late, so its exceptions are recognized by their modules' names.
            if type(error).__module__.partition(".")[0] not in ("mlflow", "sqlalchemy"):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise PipelineError(f"the MLflow store cannot be opened: {reason}") from error

    @property
    def is_local(self) -> bool:
        """Whether it lies in the checkout, and so belongs to no other."""
        return self.place != self.uri

    def holds(self, run: str) -> bool:
        """Return whether the experiment has the run, not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            info = self.client.get_run(run).info
        except MlflowException:
            return False
        return bool(info.lifecycle_stage == "active" and info.experiment_id == self.experiment_id)

    def end(self, run: str, status: str) -> None:
        """Close the run with `status`: FINISHED, FAILED or KILLED."""
        while self._monitors:
            self._monitors.pop().finish()
        self.client.set_terminated(run, status=status)

    def watch(self, run: str) -> None:
        """Let MLflow sample this machine for `run`, if its variable asks for it."""
        if os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "").lower() in {"true", "1"}:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            monitor: Any = SystemMetricsMonitor(  # type: ignore[no-untyped-call]  # has no types
                run, resume_logging=True, tracking_uri=self.uri
            )
            monitor.start()
            self._monitors.append(monitor)

    def of_same(self, tags: Mapping[str, str], *, more: str = "") -> list[Any]:
        """Return the runs of the same experiment, seed, checkout and variant, newest first."""
        # A checkout's own store moves with it, so every run in it is this checkout's.
        names = [name for name in IDENTITY if not (self.is_local and name == CHECKOUT)]
        query = " and ".join(f"tags.`{name}` = {_quoted(tags[name])}" for name in names)
        return list(self.client.search_runs([self.experiment_id], query + more))

    def current(self, tags: Mapping[str, str]) -> str | None:
        """Return the current run of this experiment and seed, if there is one."""
        return next(iter(self._with_tag(tags, CURRENT, "yes")), None)

    def trained(self, tags: Mapping[str, str], digest: str) -> str | None:
        """Return the first run of this experiment and seed with a policy of this digest."""
        return next(reversed(self._with_tag(tags, TRAINED, digest)), None)

    def _with_tag(self, tags: Mapping[str, str], name: str, value: str) -> list[str]:
        more = f" and tags.`{name}` = {_quoted(value)}"
        if BASELINE in tags:  # DVC lets a name be used again on another commit
            more += f" and tags.`{BASELINE}` = {_quoted(tags[BASELINE])}"
        return [str(run.info.run_id) for run in self.of_same(tags, more=more)]

    def put_back(self, run: str, name: str, tags: Mapping[str, str]) -> None:
        """Make an earlier run the current one, under its first `name`."""
        if "mlflow.parentRunId" in self.client.get_run(run).data.tags:
            self.client.delete_tag(run, "mlflow.parentRunId")
        self.client.update_run(run, name=name)
        self.set_tags(run, {CURRENT: "yes"})
        self.supersede(run, tags)

    def supersede(self, current: str, tags: Mapping[str, str]) -> None:
        """Make earlier runs of the same experiment and seed children of the current run.

        Runs that killed attempts have left open are closed.
        """
        for earlier in self.of_same(tags):
            run, run_tags = earlier.info.run_id, earlier.data.tags
            if run == current:
                continue
            if earlier.info.status == "RUNNING":
                self.end(run, "KILLED")
            # Also runs that were replaced before: all are direct children of the current one.
            if run_tags.get("mlflow.parentRunId") != current:
                self.set_tags(run, {CURRENT: "no", "mlflow.parentRunId": current})
            if run_tags.get(CURRENT) != "no":
                self.client.update_run(run, name=f"{earlier.info.run_name} (superseded)")

    def log_metrics(self, run: str, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Write `(name, value, unix ms, step)` points."""
        from mlflow.entities import Metric

        self.client.log_batch(run, metrics=[Metric(*point) for point in points])

    def log_params(self, run: str, values: Mapping[str, str]) -> None:
        """Write the parameters that the run lacks; MLflow refuses to change one."""
        from mlflow.entities import Param

        present = self.client.get_run(run).data.params
        new = [Param(name, text) for name, text in values.items() if name not in present]
        if new:
            self.client.log_batch(run, params=new)

    def log_data(self, run: str, data: Sequence[InputData], root: Path) -> dict[str, str]:
        """Write the run's inputs as datasets, each once; return DVC's digests by context."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = self.client.get_run(run).inputs.dataset_inputs
        present = {(entry.dataset.name, entry.dataset.digest) for entry in inputs}
        new, digests = [], {}
        for item in data:
            if not (root / item.path).exists():
                continue
            digest = digests[item.context] = dvc_digest(root / item.path)
            if (item.name, digest) in present:
                continue
            dataset = Dataset(
                name=item.name,
                digest=digest,
                source_type="local",
                source=json.dumps({"uri": item.path}),
                profile=json.dumps(dict(item.facts)),
            )
            new.append(DatasetInput(dataset, [InputTag("mlflow.data.context", item.context)]))
        if new:
            self.client.log_inputs(run, datasets=new)
        return digests

    def set_tags(self, run: str, values: Mapping[str, str]) -> None:
        """Write tags, replacing earlier values."""
        from mlflow.entities import RunTag

        self.client.log_batch(run, tags=[RunTag(name, text) for name, text in values.items()])

    def log_onnx(self, run: str, path: Path, name: str, tags: Mapping[str, str]) -> None:
        """Log an ONNX file as a model, and register it; the same file of a run only once."""
        import mlflow

        content = files.sha256_of(path)
        # A retried stage exports the same bytes, which are no new version.
        versions = mlflow_models.versions_of(self.client, run, name)
        if any(version.tags.get(mlflow_models.CONTENT) == content for version in versions):
            return
        run_data = self.client.get_run(run).data
        # A model shows the final numbers of its training; points with a model_id are copies.
        final = [
            point
            for name in run_data.metrics
            if name.startswith("train/")
            for point in self.client.get_metric_history(run, name)
            if point.model_id is None
        ]
        source = mlflow_models.log_model(
            self.client, run, path, params=run_data.params, metrics=final
        )
        version_tags = {**tags, mlflow_models.CONTENT: content}
        mlflow.set_tracking_uri(self.uri)  # the registry looks the model up in the global one
        with mlflow_database.locked(self.uri):
            mlflow_models.register(self.client, name, source, run, version_tags)


def _quoted(value: str) -> str:
    """Return a value quoted for MLflow's searches; a git reference may contain quotes."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def source_tags(root: Path) -> dict[str, str]:
    """Return tags of the code's origin: commit, edits since then, and DVC's experiment."""
    tags = {VARIANT: WORKSPACE}
    if experiment := os.environ.get("DVC_EXP_NAME"):
        tags = {VARIANT: experiment, BASELINE: os.environ.get("DVC_EXP_BASELINE_REV", "")}
    commit = git(root, "rev-parse", "HEAD", timeout_s=_GIT_WAIT_S)
    if commit:
        tags["mlflow.source.git.commit"] = commit.strip()
        # Tracked files only, and those that people edit: results change with every run.
        edited = git(root, "status", "--porcelain", "-uno", "--", *_WRITTEN, timeout_s=_GIT_WAIT_S)
        tags["pipeline.uncommitted"] = "yes" if edited else "no"
    return tags


def _locations(client: Any) -> list[str]:
    """Return the artifact locations of the experiments of ours, deleted ones too."""
    from mlflow.entities import ViewType

    experiments = client.search_experiments(view_type=ViewType.ALL)
    return [each.artifact_location for each in experiments if mlflow_view.is_ours(each.tags)]


def _no_store(root: Path, file: Path) -> str:
    if next((root / "results/train").rglob("seed*"), None) is None:
        return (
            "there are no runs yet: run `dvc repro` or `snakemake --cores 1` in this folder first"
        )
    return (
        f"results/ has runs, but there is no MLflow store {file}, which neither git nor DVC "
        f"carries: copy {file.name} and {_ARTIFACTS}/ from the folder in which they were made, or "
        "name that store with MLFLOW_TRACKING_URI; `dvc repro --force` makes runs and rows again"
    )


def _missing(client: Any, name: str) -> str:
    """Return what to do when the experiment is not there, which may have been renamed."""
    ours = [each for each in client.search_experiments() if mlflow_view.is_ours(each.tags)]
    if not ours:
        return f"MLflow has no experiment {name!r} yet: run `dvc repro` or `snakemake --cores 1`"
    rename = f"{_mlflow(client.tracking_uri)} rename -x {ours[0].experiment_id} --new-name"
    names = ", ".join(repr(each.name) for each in ours)
    return (
        f"MLflow has no experiment {name!r}; this pipeline's runs are in {names}: "
        f"MLFLOW_EXPERIMENT_NAME={shlex.quote(ours[0].name)} chooses it, and "
        f"`{rename} {shlex.quote(name)}` renames it"
    )


def _mlflow(uri: str) -> str:
    """Return the start of a command about an experiment, for a shell."""
    return f"MLFLOW_TRACKING_URI={shlex.quote(uri)} mlflow experiments"


def _create_experiment(client: Any, name: str, place: str | None) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        client.create_experiment(name, artifact_location=place)
    except MlflowException:
        # On a server, another client may have been faster.
        if client.get_experiment_by_name(name) is None:
            raise
    return client.get_experiment_by_name(name)
