"""The MLflow store, opened by MLflow's public API.

MLflow stores absolute paths of artifacts, so the store of a moved or copied checkout is refused;
`pipeline runs --rebuild` makes it again from the files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.errors import PipelineError
from pipeline.tracking.run_metadata import flattened

_log = logging.getLogger(__name__)

_EXPERIMENT = "pipeline"
"""Name of MLflow's experiment, unless MLFLOW_EXPERIMENT_NAME gives another."""
_DATABASE, _ARTIFACTS = "mlflow.db", "mlartifacts"
CURRENT = "pipeline.current"
"""Tag of a run: `yes` for the current run of its experiment and seed."""
CHECKOUT = "pipeline.checkout"
"""Tag with the id of a run's copy of the repository, in stores that several copies may use."""
SCORE = "evaluate/mean_return"
"""The metric by which MLflow's table of runs is sorted."""
NOTE = "mlflow.note.content"
"""MLflow's tag with the description of a run or an experiment."""
# The wait for the lock of `locked` is long, because many stages may wait for a stage that creates
# the tables. The other wait is for SQLite's own lock.
_LOCK_WAIT_S, _BUSY_WAIT_S = 300.0, 10.0
# The pattern finds every character that MLflow's own check of names refuses.
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    # Writes are collected for a second, because otherwise each summary is a transaction, and SQLite
    # can commit only few per second.
    "MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Environment variables for MLflow and the values that they get, unless the user has set them."""
_DESCRIPTION = f"""\
One row is one experiment of `params.yaml` with one seed; all its stages write to it.

*Model registry* has a model for each behavior of an environment, and a version of it for each \
run. The alias `best` names the best version, an experiment's name the best version of that \
experiment. Examples of searches: \
``metrics.`{SCORE}` > 90``, `params.learning_rate = '0.0003'`, ``tags.`{CURRENT}` = 'yes'`` \
(leaves out rows that later runs have replaced). The files in `results/` are the \
record; `pipeline runs` says which row and which revision belong together.
"""


def default_uri(root: Path) -> str:
    """Return the URI of the store: MLFLOW_TRACKING_URI, else `mlflow.db` in the project."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / _DATABASE}"


def file_of(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def clean(name: str) -> str:
    """Return a name with underscores for the characters that MLflow refuses."""
    return _NOT_ALLOWED.sub("_", name)


def flatten(values: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Return nested mappings as `{dotted name: text}`; a list becomes one text."""
    # Texts are cut here, because MLflow truncates parameters to 6,000 characters with a warning for
    # each.
    return {clean(name): str(value)[:5900] for name, value in flattened(values, start)}


@contextlib.contextmanager
def locked(uri: str) -> Iterator[None]:
    """Lock a SQLite store during the `with` block, so that one process at a time changes it.

    Raises:
        PipelineError: The store's file cannot be opened and written.
    """
    from filelock import FileLock

    # A server has its own locks, so only a file is locked here.
    if (path := file_of(uri)) is None:
        yield
        return
    lock = FileLock(f"{path}.lock", timeout=_LOCK_WAIT_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        if path.exists():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, "no right to write")
            # MLflow would try for 100 s to open a file that is damaged or locked. BEGIN IMMEDIATE,
            # unlike BEGIN, takes SQLite's write lock (sqlite.org/lang_transaction.html).
            ask = "BEGIN IMMEDIATE; SELECT count(*) FROM sqlite_master; ROLLBACK"
            with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_WAIT_S)) as database:
                database.executescript(ask)
    except (OSError, sqlite3.Error) as error:
        lock.release()
        reason = getattr(error, "strerror", None) or str(error)
        raise PipelineError(
            f"the MLflow store {path} cannot be opened: {reason}; repair it or move it away, or "
            "use another store (MLFLOW_TRACKING_URI)"
        ) from error
    try:
        yield
    finally:
        lock.release()


def client_of(uri: str) -> Any:
    """Return MLflow's client of a store; for a SQLite file the caller must hold the lock."""
    for name, value in _ENVIRONMENT.items():
        # The variables are set before MLflow is imported, because MLflow reads some of them only
        # when it is imported.
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    # MLflow's log is off by default, because it lists every table that MLflow creates, and has
    # tracebacks of errors that MLflow also raises.
    debugs = _log.isEnabledFor(logging.DEBUG)
    logging.getLogger("mlflow").setLevel(logging.WARNING if debugs else logging.CRITICAL)
    logging.getLogger("urllib3").setLevel(logging.WARNING if debugs else logging.ERROR)
    path = file_of(uri)
    if path is not None and not path.exists():
        # MLflow creates its tables in dozens of steps. They are made in a new file, because a kill
        # in between leaves a broken file.
        new = path.with_name(f"{path.name}.new")
        for left in (new, new.with_name(f"{new.name}-journal")):
            left.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{new}")
        new.replace(path)
    return MlflowClient(tracking_uri=uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """An open store and its experiment."""

    uri: str
    is_local: bool
    """Whether the store is a file in the project, so that no other project uses it."""
    experiment_id: str
    client: Any

    @classmethod
    def open(cls, root: Path, *, create: bool = True) -> Store:
        """Open the store, and create it if needed; several processes may do so at once.

        Raises:
            PipelineError: The store's file cannot be opened or was moved, or its experiment was
                deleted, or does not exist and `create` is False.
            mlflow.exceptions.MlflowException: The store cannot be reached or read.
        """
        uri = default_uri(root := root.resolve())
        file = file_of(uri)
        is_local = file is not None and file.resolve().is_relative_to(root)
        # A store that several projects share has its artifacts next to its file, in no project.
        artifacts = (root if is_local or file is None else file.resolve().parent) / _ARTIFACTS
        # Only one process opens the store, because MLflow cannot create its tables twice at once.
        with locked(uri):
            client = client_of(uri)
            from mlflow.exceptions import MlflowException

            if is_local:
                _refuse_moved(client, artifacts)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
            if client.get_experiment_by_name(name) is None:
                if not create:
                    listed = [o.name for o in client.search_experiments() if o.name != "Default"]
                    others = f"it has {', '.join(map(repr, listed))}: MLFLOW_EXPERIMENT_NAME"
                    first = "run `pipeline run` first"
                    text = f"{others} chooses one" if listed else first
                    raise PipelineError(f"MLflow has no experiment {name!r}; {text}")
                # A server decides itself where artifacts are stored, so it gets no place.
                place = artifacts.as_uri() if file else None
                try:
                    client.create_experiment(name, place, {NOTE: _DESCRIPTION})
                except MlflowException:  # another client may have created it
                    if client.get_experiment_by_name(name) is None:
                        raise
            experiment = client.get_experiment_by_name(name)
            identifier = experiment.experiment_id
            if experiment.lifecycle_stage != "active":
                raise PipelineError(
                    f"MLflow's experiment {name!r} was deleted; `MLFLOW_TRACKING_URI="
                    f"{shlex.quote(uri)} mlflow experiments restore -x {identifier}` restores it "
                    "with its runs, and MLFLOW_EXPERIMENT_NAME chooses another"
                )
        return cls(uri=uri, is_local=is_local, experiment_id=identifier, client=client)

    @classmethod
    def existing(cls, root: Path) -> Store:
        """Open the store that earlier runs have created.

        Raises:
            PipelineError: The store does not exist or cannot be opened.
        """
        file = file_of(default_uri(root))
        if file is not None and not file.exists():
            if not any((root / "results/train").rglob("seed*")):
                raise PipelineError("there are no runs yet: run `pipeline run` in this folder")
            raise PipelineError(
                f"results/ has runs, but the MLflow store {file} does not exist (neither git nor "
                "DVC copies it): `pipeline runs --rebuild` makes it from the files in results/"
            )
        try:
            return cls.open(root, create=False)
        except Exception as error:
            # MLflow is imported late, so its errors are recognized by their modules' names.
            if type(error).__module__.partition(".")[0] not in ("mlflow", "sqlalchemy", "alembic"):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise PipelineError(f"the MLflow store cannot be opened: {reason}") from error

    def runs(self) -> Iterator[Any]:
        """Yield every run of the experiment, the newest first."""
        # Pages keep memory small: all of MLflow's objects take 0.15 MB per run.
        token = None
        while True:
            page = self.client.search_runs([self.experiment_id], max_results=500, page_token=token)
            yield from page
            if not (token := page.token):
                return

    def set_tags(self, run: str | None, values: Mapping[str, str]) -> None:
        """Write tags, replacing earlier values."""
        from mlflow.entities import RunTag

        self.client.log_batch(run, tags=[RunTag(name, text) for name, text in values.items()])


def _refuse_moved(client: Any, artifacts: Path) -> None:
    """Raise PipelineError if an experiment has its artifacts in another project's folder."""
    from mlflow.entities import ViewType

    for experiment in client.search_experiments(view_type=ViewType.ALL):
        # Only a local folder with the default name must move with the store's file, not artifacts
        # on a server or in a folder that the user chose.
        location = urlsplit(experiment.artifact_location)
        place = Path(unquote(location.path))
        if location.scheme in ("", "file") and place.name == artifacts.name and place != artifacts:
            raise PipelineError(
                f"the MLflow store here was made in {place.parent} and keeps its artifacts there; "
                "`pipeline runs --rebuild` makes a store of this folder from the files in results/"
            )
