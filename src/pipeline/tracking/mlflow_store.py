"""The MLflow store: how it is opened, and the rows of an experiment and seed in it.

MLflow is used by its public API alone. It keeps the locations of artifacts as absolute paths, so a
store in a checkout that was moved or copied is refused; `rebuild` makes it from the files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

from pipeline import files
from pipeline.errors import PipelineError
from pipeline.tracking.run_metadata import BASELINE, VARIANT, InputData, dvc_digest, flattened

_log = logging.getLogger(__name__)

_EXPERIMENT = "pipeline"
"""Name of MLflow's experiment, unless MLFLOW_EXPERIMENT_NAME gives another."""
_DATABASE, _ARTIFACTS = "mlflow.db", "mlartifacts"
CURRENT = "pipeline.current"
"""Tag of a run: `yes` if it is the current run of its experiment and seed."""
TRAINED = "dvc.train"
"""Tag of a run: DVC's digest of its policy."""
CHECKOUT = "pipeline.checkout"
"""Tag of a run in a store that several copies of the repository may use: which copy it is of."""
IDENTITY = ("pipeline.experiment", "pipeline.seed", CHECKOUT, VARIANT)
"""Tags that are equal for runs of the same experiment, seed, copy and variant."""
SCORE = "evaluate/mean_return"
"""The metric that rows are ordered by."""
PARENT, NOTE = "mlflow.parentRunId", "mlflow.note.content"
"""Tags of MLflow: the run under which a run is folded, and the description."""
_LOCK_WAIT_S, _BUSY_WAIT_S = 300.0, 10.0
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    # Else each summary is a transaction, of which a SQLite file takes only few in a second.
    "MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Short retries and no telemetry, unless the user chose otherwise."""
_DESCRIPTION = f"""\
One row is one experiment of `params.yaml` with one seed; all its stages write to it.

*Model registry* has a model for each behavior of an environment, a version for each run, and \
aliases: `best`, and each experiment's name for its own best. Search with what a row holds: \
``metrics.`{SCORE}` > 90``, `params.learning_rate = '0.0003'`, ``tags.`{CURRENT}` = 'yes'`` \
(without rows that later runs have replaced, which are folded). The files in `results/` are the \
record; `pipeline runs` says which row and which revision belong together.
"""


def default_uri(root: Path) -> str:
    """Return the URI of the store: MLFLOW_TRACKING_URI, else `mlflow.db` in the repository."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / _DATABASE}"


def file_of(uri: str) -> Path | None:
    """Return the file of a SQLite store, or None for a store of another kind."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def addresses(experiment_id: str) -> dict[str, str]:
    """Return MLflow's pages by title, as addresses below that of the server."""
    runs = {
        "workflowType": "machine_learning",
        "searchFilter": f"tags.`{CURRENT}` = 'yes'",
        "orderByKey": f"metrics.`{SCORE}`",
        "orderByAsc": "false",
    }
    table = f"/#/experiments/{experiment_id}/runs?{urlencode(runs)}"
    models = "/#/models?workflowType=machine_learning"
    return {"All runs": table, "Curves": f"{table}&compareRunsMode=CHART", "Models": models}


def clean(name: str) -> str:
    """Replace the characters of a name that MLflow refuses by underscores."""
    return _NOT_ALLOWED.sub("_", name)


def checkout(root: Path) -> str:
    """Return the id of this copy of the repository: it moves with the folder, a copy has another.

    The hosts of a cluster, which have one folder, read the same id.
    """
    from filelock import FileLock

    path = root / "results/.work/checkout.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_LOCK_WAIT_S):
        try:
            noted = json.loads(path.read_text(encoding="utf-8"))
            if noted["root"] == str(root):
                return str(noted["id"])
        except (OSError, ValueError, KeyError, TypeError):
            noted = {}
        if not noted or Path(noted["root"]).exists():
            noted = {"id": files.fingerprint([platform.node(), str(root)])[:12]}
        files.write_json(path, {**noted, "root": str(root)})
    return str(noted["id"])


def flatten(values: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Return nested mappings as `{dotted name: text}`; lists stay whole."""
    # MLflow cuts parameters beyond 6,000 characters, with a warning for each.
    return {clean(name): str(value)[:5900] for name, value in flattened(values, start)}


@contextlib.contextmanager
def locked(uri: str) -> Iterator[None]:
    """Lock a SQLite store for the block, so that one process at a time changes it.

    Raises:
        PipelineError: The store's file cannot be opened and written.
    """
    from filelock import FileLock

    if (path := file_of(uri)) is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock", timeout=_LOCK_WAIT_S)
        with lock:
            if path.exists():
                if not os.access(path, os.W_OK):
                    raise PermissionError(errno.EACCES, "no right to write")
                # MLflow tries for 100 s to open a file that is damaged or that others keep locked.
                # Unlike a plain BEGIN, this takes the right to write, and gives it back unused.
                ask = "BEGIN IMMEDIATE; SELECT count(*) FROM sqlite_master; ROLLBACK"
                with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_WAIT_S)) as database:
                    database.executescript(ask)
            lock.acquire()
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PipelineError(
            f"the MLflow store {path} cannot be opened: {reason}; mend it or move it away, or name "
            "another with MLFLOW_TRACKING_URI"
        ) from error
    try:
        yield
    finally:
        lock.release()


def client_of(uri: str) -> Any:
    """Return MLflow's client of a store; the caller holds the lock of a SQLite file."""
    for name, value in _ENVIRONMENT.items():
        # Before MLflow is imported, which reads some of them only then.
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    # It logs every table that it creates, and tracebacks of errors that it raises too.
    debugs = _log.isEnabledFor(logging.DEBUG)
    logging.getLogger("mlflow").setLevel(logging.WARNING if debugs else logging.CRITICAL)
    logging.getLogger("urllib3").setLevel(logging.WARNING if debugs else logging.ERROR)
    path = file_of(uri)
    if path is not None and not path.exists():
        # MLflow makes its tables in dozens of steps; killed in between, it leaves a broken file.
        new = path.with_name(f"{path.name}.new")
        for left in (new, new.with_name(f"{new.name}-journal")):
            left.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{new}")
        new.replace(path)
    return MlflowClient(tracking_uri=uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """An open store and the experiment in it."""

    uri: str
    is_local: bool
    """Whether it is a file in the checkout, and so belongs to no other."""
    experiment_id: str
    client: Any

    @classmethod
    def open(cls, root: Path, *, create: bool = True) -> Store:
        """Open the store, and create it if needed; many processes may do so at once.

        Raises:
            PipelineError: The store's file cannot be opened or was moved, or its experiment was
                deleted, or is not there and is not to be created.
            mlflow.exceptions.MlflowException: The store cannot be reached or read.
        """
        uri = default_uri(root := root.resolve())
        file = file_of(uri)
        is_local = file is not None and file.resolve().is_relative_to(root)
        # Next to a file that several checkouts share, so that none writes into another.
        artifacts = (root if is_local or file is None else file.resolve().parent) / _ARTIFACTS
        # One process at a time: MLflow fails when several create its tables at once.
        with locked(uri):
            client = client_of(uri)
            from mlflow.exceptions import MlflowException

            if is_local:
                _refuse_moved(client, artifacts)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
            experiment = client.get_experiment_by_name(name)
            if experiment is None and not create:
                others = [repr(o.name) for o in client.search_experiments() if o.name != "Default"]
                choice = f"it has {', '.join(others)}: MLFLOW_EXPERIMENT_NAME chooses one"
                first = "run `pipeline run` first"
                text = f"MLflow has no experiment {name!r}; {choice if others else first}"
                raise PipelineError(text)
            if experiment is None:
                # A server has a place of its own for artifacts.
                place, tags = artifacts.as_uri() if file else None, {NOTE: _DESCRIPTION}
                try:
                    client.create_experiment(name, artifact_location=place, tags=tags)
                except MlflowException:
                    # Usually, another client of the server was faster.
                    if client.get_experiment_by_name(name) is None:
                        raise
                experiment = client.get_experiment_by_name(name)
            identifier = experiment.experiment_id
            if experiment.lifecycle_stage != "active":
                raise PipelineError(
                    f"MLflow's experiment {name!r} was deleted; `MLFLOW_TRACKING_URI="
                    f"{shlex.quote(uri)} mlflow experiments restore -x {identifier}` brings it "
                    "back with its runs, and MLFLOW_EXPERIMENT_NAME names another"
                )
        return cls(uri=uri, is_local=is_local, experiment_id=identifier, client=client)

    @classmethod
    def existing(cls, root: Path) -> Store:
        """Open the store that earlier runs have created.

        Raises:
            PipelineError: There is no store, or it cannot be opened.
        """
        file = file_of(default_uri(root))
        if file is not None and not file.exists():
            raise PipelineError(_no_store(root, file))
        try:
            return cls.open(root, create=False)
        except Exception as error:
            # MLflow is imported late, so its exceptions are recognized by their modules' names.
            if type(error).__module__.partition(".")[0] not in ("mlflow", "sqlalchemy", "alembic"):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise PipelineError(f"the MLflow store cannot be opened: {reason}") from error

    def of_same(self, tags: Mapping[str, str], **more: str) -> list[Any]:
        """Return the runs of the same experiment, seed, checkout and variant, newest first."""
        wanted = {name: tags[name] for name in IDENTITY if name in tags} | more
        query = " and ".join(f"tags.`{name}` = {_quoted(text)}" for name, text in wanted.items())
        return list(self.client.search_runs([self.experiment_id], query))

    def first(self, tags: Mapping[str, str], name: str, value: str) -> str | None:
        """Return the first run of this experiment and seed whose tag has a value."""
        # DVC lets a name be used again on another commit.
        based = {BASELINE: tags[BASELINE]} if BASELINE in tags else {}
        runs = self.of_same(tags, **{name: value}, **based)
        return str(runs[-1].info.run_id) if runs else None

    def put_back(self, run: str, name: str, tags: Mapping[str, str]) -> None:
        """Make an earlier run the current one, under its first `name`."""
        if PARENT in self.client.get_run(run).data.tags:
            self.client.delete_tag(run, PARENT)
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
                self.client.set_terminated(run, status="KILLED")
            # Also runs that were replaced before: all are direct children of the current one.
            if run_tags.get(PARENT) != current:
                self.set_tags(run, {CURRENT: "no", PARENT: current})
            if run_tags.get(CURRENT) != "no":
                self.client.update_run(run, name=f"{earlier.info.run_name} (superseded)")

    def log_metrics(
        self, run: str, points: Sequence[tuple[str, float, int, int]], *, synchronous: bool = True
    ) -> Any:
        """Write `(name, value, unix ms, step)` points; return MLflow's handle if not at once."""
        from mlflow.entities import Metric

        metrics = [Metric(*point) for point in points]
        return self.client.log_batch(run, metrics=metrics, synchronous=synchronous)

    def log_data(self, run: str, data: Sequence[InputData], root: Path) -> dict[str, str]:
        """Write the run's inputs as datasets, each once; return DVC's digests by context."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new, digests = [], {}
        for item in data:
            if (root / item.path).exists():
                digest = digests[item.context] = dvc_digest(root / item.path)
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


def set_aside(root: Path) -> None:
    """Give the checkout's own store another name, so that the next one to open makes a new store.

    Raises:
        PipelineError: MLFLOW_TRACKING_URI names a store that is not in the checkout.
    """
    root, uri = root.resolve(), default_uri(root.resolve())
    file = file_of(uri)
    if file is None or not file.resolve().is_relative_to(root):
        raise PipelineError(
            f"MLFLOW_TRACKING_URI names {uri}, which other checkouts may use, and only a store in "
            "this folder is made from its files; unset the variable"
        )
    with locked(uri):
        if file.exists():
            kept = files.free_name(file)
            file.rename(kept)
            _log.info("The earlier store is kept as %s.", kept.name)


def _quoted(value: str) -> str:
    """Return a value quoted for MLflow's searches; a git reference may contain quotes."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def _refuse_moved(client: Any, artifacts: Path) -> None:
    """Raise PipelineError if an experiment has its artifacts in another checkout."""
    from mlflow.entities import ViewType

    for experiment in client.search_experiments(view_type=ViewType.ALL):
        # Artifacts on a server, or where a user keeps them, do not move with the file.
        location = urlsplit(experiment.artifact_location)
        place = Path(unquote(location.path))
        if location.scheme in ("", "file") and place.name == artifacts.name and place != artifacts:
            raise PipelineError(
                f"the MLflow store here was made in {place.parent} and keeps its artifacts there; "
                "`pipeline runs --rebuild` makes a store of this folder from the files in results/"
            )


def _no_store(root: Path, file: Path) -> str:
    if next((root / "results/train").rglob("seed*"), None) is None:
        return "there are no runs yet: run `pipeline run` in this folder"
    return (
        f"results/ has runs, but there is no MLflow store {file}, which neither git nor DVC "
        "carries: `pipeline runs --rebuild` makes it from the files in results/"
    )
