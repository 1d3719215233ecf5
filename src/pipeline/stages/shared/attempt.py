"""The attempt at a stage: one at a time, in a scratch folder, resumed or fresh, published whole.

Both engines delete a stage's declared outputs before they rerun it, so work in progress lies in
`results/.work/<stage>/<instance>/`, which neither of them declares:

    attempt.json   fingerprint of parameters, inputs and code, and whether the attempt finished
    stage.json     facts for people: versions, times, digests, MLflow run
    run/           what the stage keeps to resume from
    out/           the declared outputs, before they are moved into place
    old/           an earlier output while a new one takes its place
    tmp/           temporary files of libraries
    kept/          a copy of what a finished attempt made, where that takes long

If a job is killed after its stage has succeeded and before the engine has noted that, the engine
deletes the outputs. The retry, which workflow/rules/common.smk marks by PIPELINE_RETRY, takes the
copy, and so does the next call after a killed Snakemake, whose jobs may have finished without it.
So does a job of DVC after an edit that gives the same values another spelling. A job that the user
forces the engine to run again does all its work again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline import files, machine, progress
from pipeline.errors import PipelineError, StageError
from pipeline.settings.nodes import find, to_plain
from pipeline.settings.yaml_file import read_yaml
from pipeline.stages.shared import process, sources
from pipeline.stages.shared.project import code_of

_log = logging.getLogger(__name__)

WORK = Path("results/.work")
_RETRY, _DVC, CALL = "PIPELINE_RETRY", "DVC_STAGE", "PIPELINE_CALL"
"""Environment variables: the engine retries the job, the engine is DVC, and the identity of the
Snakemake call that runs the job."""
_VERSIONS = ("numpy", "torch", "onnx", "onnxruntime", "mlflow", "dvc", "snakemake")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of the DAG, as both engines know it. Paths are relative to the repository."""

    stage: str
    """Family, for example `train`."""
    instance: str
    """Which one, for example `collector_ppo/seed1`; `all` for a stage without instances."""
    params: Mapping[str, Any]
    """Everything from parameter and trainer files that the result depends on."""
    inputs: tuple[Path, ...] = ()
    """Files and folders that the result depends on."""
    outputs: tuple[Path, ...]
    """Files and folders that the stage makes; no two have the same name."""
    takes_long: bool = False
    """Whether the work takes so long that a copy of its outputs is kept."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.stage} {self.instance}"


@dataclass(kw_only=True, slots=True)
class Attempt:
    """A job under way."""

    job: Job
    root: Path
    folder: Path
    fingerprint: str
    digests: Mapping[str, str]
    """Of the inputs, by path."""
    sources: Mapping[str, str]
    """Git's id of each source file that the stage imports, by path below `src`."""
    resumed: bool
    """Whether `run` holds the files of a killed attempt with the same inputs."""
    done: bool
    """Whether nothing is left to do: `out` holds the outputs of a finished attempt with the same
    inputs, which the engine did not note."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Written to stage.json."""

    @property
    def run(self) -> Path:
        """Folder that survives a kill."""
        return self.folder / "run"

    def out(self, name: str) -> Path:
        """Return where to write the declared output of this name.

        Raises:
            ValueError: The job declares no such output.
        """
        if name not in {path.name for path in self.job.outputs}:
            raise ValueError(f"{self.job.name} declares no output named {name!r}")
        return self.folder / "out" / name


@contextlib.contextmanager
def attempt_at(job: Job, root: Path, now: Callable[[], Job] | None = None) -> Iterator[Attempt]:
    """Lock the job, prepare its scratch folder, and publish its outputs when the block succeeds.

    `now` gives the job as the parameter file describes it at the end.

    Raises:
        SettingsError: Another process works on the job.
        StageError: An input is missing, the block did not make an output, or DVC would take the
            outputs for those of other parameters.
    """
    folder = root / WORK / job.stage / job.instance
    folder.mkdir(parents=True, exist_ok=True)
    with progress.reporting(job.stage, job.instance, root), files.sole_writer(folder):
        # Digests are taken under the lock and before the work: they describe the inputs of the
        # result.
        digests = {str(path): _digest(job, root, path) for path in job.inputs}
        current = _begin(job, root, folder, digests)
        started = time.time()
        try:
            with _temporary_files_in(folder / "tmp"):
                yield current
            # A library may have swallowed the signal's exception and returned early with half a
            # result.
            process.stop_if_signalled()
            _check_unchanged(current, now)
            _publish(current)
            # After the outputs are in place: a kill in between leaves an attempt to resume,
            # which moves them again.
            _mark(current, finished=True)
        finally:
            # A retry that only takes the copy keeps the facts of the attempt that made it.
            if not current.done:
                _write_facts(current, started)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Make libraries put temporary files into a folder that the next attempt empties."""
    before = tempfile.tempdir
    folder.mkdir(exist_ok=True)
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def _begin(job: Job, root: Path, folder: Path, digests: Mapping[str, str]) -> Attempt:
    """Keep the scratch folder of an earlier attempt if it is usable, else empty it.

    It is usable with the same fingerprint, if the attempt did not finish or this is a retry.
    """
    src = sources.src_of(code_of(root))
    # not a string: the start of a module's name would count as an import of the whole package
    stages = __name__.rsplit(".", maxsplit=2)[0]
    used = sources.ids(src, sources.closure(src, f"{stages}.{job.stage}"))
    if _DVC in os.environ:  # the sources may have been edited since `check` ran
        sources.note(root, job.stage, code_of(root))
    fingerprint = files.fingerprint({"params": job.params, "inputs": digests, "code": used})
    before = read_map(folder / "attempt.json")
    same, finished = before.get("fingerprint") == fingerprint, before.get("finished", True)
    copy = folder / "kept"
    # Only where the engine has lost the result: a user who forces a stage wants it done again,
    # although nothing has changed.
    is_lost = _RETRY in os.environ or before.get("call", "") not in ("", os.environ.get(CALL))
    current = Attempt(
        job=job,
        root=root,
        folder=folder,
        fingerprint=fingerprint,
        digests=digests,
        sources=used,
        resumed=same and not finished,
        done=same and finished and copy.is_dir() and (is_lost or _is_respelled(root)),
    )
    for leftover in ("out", "old", "tmp"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    if current.done:
        _log.info("%s: an attempt before has finished; taking what it made", job.name)
        shutil.copytree(copy, folder / "out")
        return current
    shutil.rmtree(copy, ignore_errors=True)
    if current.resumed:
        _log.info("%s: resuming the attempt that did not finish", job.name)
    else:
        if before and not finished:
            _log.info("%s: its inputs have changed since it was stopped; starting afresh", job.name)
        # Checkpoints of other inputs must not be resumed from.
        shutil.rmtree(current.run, ignore_errors=True)
    (folder / "out").mkdir()
    current.run.mkdir(exist_ok=True)
    _mark(current, finished=False)
    return current


def _is_respelled(root: Path) -> bool:
    """Whether DVC's record of the stage has its parameters in another spelling."""
    stage = os.environ.get(_DVC, "").rpartition(":")[2]
    try:
        noted = to_plain(read_yaml(root / "dvc.lock"))["stages"][stage]["params"]
        now = {file: read_yaml(root / file) for file in noted}
    except (PipelineError, KeyError, TypeError):  # no record, or nothing that can be read
        return False
    return any(
        to_plain(find(now[file], key)) != value
        for file, values in noted.items()
        for key, value in values.items()
    )


def _digest(job: Job, root: Path, path: Path) -> str:
    if not (root / path).exists():
        raise StageError(
            f"{job.name}: {path} does not exist. Run the whole pipeline with "
            "`pipeline run` or `dvc repro`, which make it first."
        )
    return digest_of(root / path)


def digest_of(path: Path) -> str:
    """Return the hex SHA-256 of an input; for a folder, of its files except hidden ones."""
    if not path.is_dir():
        return files.sha256_of(path)
    within = sorted(p for p in path.rglob("*") if p.is_file())
    seen = [p for p in within if not p.name.startswith(".")]  # Snakemake leaves its own mark
    return files.fingerprint([[p.relative_to(path).as_posix(), files.sha256_of(p)] for p in seen])


def _check_unchanged(current: Attempt, now: Callable[[], Job] | None) -> None:
    """Refuse or warn if parameters, inputs or sources were edited while the job ran.

    The engine would take the result for one of the edited state: both engines note a job's files
    as they are at its end; for sources, DVC notes what `_begin` has written about them. DVC notes
    the parameters at the end too, Snakemake those with which it began.
    """
    job, is_dvc = current.job, _DVC in os.environ
    if now is not None and is_dvc:
        params = job.params
        with contextlib.suppress(PipelineError, OSError):  # then DVC cannot note them either
            params = now().params
        if files.fingerprint(params) != files.fingerprint(job.params):
            raise StageError(
                f"{job.name}: its parameters were changed while it ran, and DVC would take the "
                "result for one of the new ones. Run it again: with the parameters that it began "
                "with it goes on where it is, with others afresh."
            )
    noted: list[tuple[str, str, Path, Callable[[Path], str]]] = [
        (name, digest, current.root / name, digest_of) for name, digest in current.digests.items()
    ]
    if not is_dvc:
        src = sources.src_of(code_of(current.root))
        for name, source_id in current.sources.items():
            noted.append((f"src/{name}", source_id, src / name, sources.git_id))
    changed = [
        name for name, before, path, now_of in noted if not path.exists() or now_of(path) != before
    ]
    if changed:
        current.facts["changed_meanwhile"] = changed
        _log.warning(
            "%s: changed while it ran: %s. The engine will take the result, which is of the state "
            "before, for one of the state now; force it to run again if that matters.",
            job.name,
            ", ".join(changed),
        )


def _publish(current: Attempt) -> None:
    """Move every output into place; refuse before the first move if one is missing."""
    outputs = {path: current.out(path.name) for path in current.job.outputs}
    missing = [str(path) for path, temporary in outputs.items() if not temporary.exists()]
    if missing:
        raise StageError(f"{current.job.name}: did not make {', '.join(missing)}")
    if current.job.takes_long and not current.done:
        # Before the first move, which empties `out`.
        shutil.copytree(current.folder / "out", current.folder / "kept")
    for path, temporary in outputs.items():
        target, old = current.root / path, current.folder / "old"
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            # A rename cannot replace a folder that has files, so the old one is moved aside first.
            shutil.move(target, old)
            _move(temporary, target)
            shutil.rmtree(old)
        else:
            _move(temporary, target)


def _move(made: Path, target: Path) -> None:
    """Give a new file or folder its place, whole or not at all."""
    try:
        made.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # The place is a link to another disk, so the copy there is renamed.
        near = target.with_name(f".{target.name}.new")
        shutil.rmtree(near, ignore_errors=True)  # of a kill
        shutil.move(made, near)
        near.replace(target)


def _mark(current: Attempt, *, finished: bool) -> None:
    mark: dict[str, Any] = {"fingerprint": current.fingerprint, "finished": finished}
    if CALL in os.environ:
        mark["call"] = os.environ[CALL]
    files.write_json(current.folder / "attempt.json", mark)


def note_finished(root: Path, call: str) -> None:
    """Note that a call of Snakemake has ended and has noted the jobs that finished in it."""
    for path in (root / WORK).rglob("attempt.json"):
        attempt = read_map(path)
        if attempt.get("call") == call and attempt.get("finished"):
            del attempt["call"]
            files.write_json(path, attempt)


def _write_facts(current: Attempt, started: float) -> None:
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    facts = {
        "stage": current.job.stage,
        "instance": current.job.instance,
        "fingerprint": current.fingerprint,
        "params": current.job.params,
        "inputs": current.digests,
        "resumed": current.resumed,
        "started_unix_s": started,
        "duration_s": time.time() - started,
        "versions": versions,
        "machine": {"system": platform.platform(), **machine.facts()},
        **current.facts,
    }
    text = json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n"
    files.write_whole(current.folder / "stage.json", text)


def read_map(path: Path) -> dict[str, Any]:
    """Read a map from a JSON file; empty when the file is not there or holds no map."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
