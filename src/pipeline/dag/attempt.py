"""Attempts at jobs: an attempt locks its job, can be resumed, and publishes all outputs at its end.

Both engines delete a stage's declared outputs before they rerun it, so work in progress is in
`results/.work/<stage>/<instance>/`, which is no declared output:

    attempt.json   fingerprint of parameters, inputs and code, and whether the attempt finished
    stage.json     facts for users: versions, times, digests, MLflow run
    run/           files to resume the stage from
    out/           the declared outputs, before they are moved into place
    old/           an earlier output while the new output is moved into place
    tmp/           temporary files of libraries
    kept/          a copy of a finished attempt's outputs, for stages that take long

If a job is killed after its stage has succeeded and before the engine has recorded the job, the
engine deletes the outputs. The next attempt takes the outputs from `kept` if this attempt is a
retry by the engine (workflow/rules/common.smk sets PIPELINE_RETRY), or if it belongs to the first
Snakemake call after a call that was killed. A job of DVC also uses `kept` if an edit has only
changed how parameter values are written. A job that the user forces the engine to run does all its
work again.
"""

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

from pipeline import files, machine
from pipeline.dag import process, sources
from pipeline.dag.project import code_of
from pipeline.errors import PipelineError, StageError
from pipeline.settings.nodes import find, to_plain
from pipeline.settings.yaml_file import read_yaml
from pipeline.tracking import progress

_log = logging.getLogger(__name__)

WORK = Path("results/.work")
_RETRY, _DVC, CALL = "PIPELINE_RETRY", "DVC_STAGE", "PIPELINE_CALL"
"""Environment variables: `_RETRY` is set if the engine retries the job, `_DVC` if the engine is
DVC; `CALL` has the id of the Snakemake call that runs the job.
"""
# Packages with versions in stage.json: the libraries that compute results, and the engines.
_VERSIONS = ("numpy", "torch", "onnx", "onnxruntime", "mlflow", "dvc", "snakemake")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One instance of a stage of the DAG, with its inputs and outputs.

    Paths are relative to the project.
    """

    stage: str
    """Name of the stage, such as `train`."""
    instance: str
    """Instance of the stage, such as `collector_ppo/seed1`; `all` for a stage without instances."""
    params: Mapping[str, Any]
    """All values from parameter and trainer files on which the result depends."""
    inputs: tuple[Path, ...] = ()
    """Files and folders on which the result depends."""
    outputs: tuple[Path, ...]
    """Files and folders that the stage makes; no two have the same name."""
    takes_long: bool = False
    """Whether the work takes so long that a copy of its outputs is kept."""

    @property
    def name(self) -> str:
        """The job's name in messages."""
        return f"{self.stage} {self.instance}"


@dataclass(kw_only=True, slots=True)
class Attempt:
    """A job in progress: its scratch folder, and digests of its inputs at the start."""

    job: Job
    root: Path
    folder: Path
    fingerprint: str
    digests: Mapping[str, str]
    """SHA-256 of each input, by path."""
    sources: Mapping[str, str]
    """Git's id of each source file that the stage imports, by path below `src`."""
    resumed: bool
    """Whether `run` has the files of an unfinished attempt with the same inputs."""
    done: bool
    """Whether all work is done already: `out` has the outputs of an earlier attempt that finished
    with the same inputs but was not recorded by the engine.
    """
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts to write to stage.json."""

    @property
    def run(self) -> Path:
        """Folder of the files from which the stage can be resumed; it is kept after a kill."""
        return self.folder / "run"

    def out(self, name: str) -> Path:
        """Return the path to which the stage writes the declared output of this name.

        Raises:
            ValueError: The job declares no such output.
        """
        if name not in {path.name for path in self.job.outputs}:
            raise ValueError(f"{self.job.name} declares no output named {name!r}")
        return self.folder / "out" / name


@contextlib.contextmanager
def attempt_at(job: Job, root: Path, now: Callable[[], Job] | None = None) -> Iterator[Attempt]:
    """Lock a job, prepare its scratch folder, and publish its outputs afterwards.

    At the end of the block `now` is called: it reads the parameter files again and returns the job
    that they describe, for a comparison with `job`.

    Raises:
        SettingsError: Another process works on the job.
        StageError: An input is missing, the block did not make an output, or the parameters have
            changed so that DVC would record the outputs with wrong parameters.
    """
    folder = root / WORK / job.stage / job.instance
    folder.mkdir(parents=True, exist_ok=True)
    with progress.reporting(job.stage, job.instance, root), files.sole_writer(folder):
        # Digests are computed before the work, because an input may be edited during the work.
        digests = {str(path): _digest(job, root, path) for path in job.inputs}
        current = _begin(job, root, folder, digests)
        started = time.time(), sum(os.times()[:4])
        try:
            with _temporary_files_in(folder / "tmp"):
                yield current
            # A library may have caught the signal's exception and returned an incomplete result.
            process.stop_if_signalled()
            _check_unchanged(current, now)
            _publish(current)
            # The attempt is marked as finished only after its outputs are in place. If the process
            # is killed before this line, the next attempt resumes and moves the outputs again.
            _mark(current, finished=True)
        finally:
            # If this attempt only publishes the outputs of an earlier attempt, the earlier one's
            # stage.json stays.
            if not current.done:
                _write_facts(current, started)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Make libraries write temporary files into `folder`, which is deleted after the block."""
    before = tempfile.tempdir
    folder.mkdir(exist_ok=True)
    # TMPDIR would have no effect: `tempfile` reads it only once in a process.
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def _begin(job: Job, root: Path, folder: Path, digests: Mapping[str, str]) -> Attempt:
    """Return the attempt, and prepare its scratch folder.

    The files in `run` are kept if an earlier attempt had the same fingerprint and did not finish.
    The outputs of an earlier attempt that did finish are used if the engine has lost the outputs,
    or if DVC runs the job only because parameter values are now written differently.
    """
    src = sources.src_of(code_of(root))
    # Only sources that the stage imports count: an edit of other code must not discard the stage's
    # checkpoints.
    used = sources.ids(src, sources.closure(src, f"{__package__}.stages.{job.stage}"))
    if _DVC in os.environ:  # the sources may have been edited since `check` ran
        sources.note(root, job.stage, code_of(root))
    fingerprint = files.fingerprint({"params": job.params, "inputs": digests, "code": used})
    before = read_map(folder / "attempt.json")
    # Without a readable record, `finished` is True, so that unknown files are never resumed.
    same, finished = before.get("fingerprint") == fingerprint, before.get("finished", True)
    copy = folder / "kept"
    # The copy is only used if the engine has lost the result: a user who forces a stage wants it to
    # run again, although nothing has changed. An entry `call` with another id than the present
    # call's means that the earlier call of Snakemake was killed: `note_finished` removes the entry
    # after a call that has ended.
    is_lost = _RETRY in os.environ or before.get("call", "") not in ("", os.environ.get(CALL))

    def is_respelled() -> bool:  # the values themselves are the same
        # If dvc.yaml is in another folder, DVC writes its path and a colon before the stage's name.
        return os.environ.get(_DVC, "").rpartition(":")[2] in edited_stages(root)

    current = Attempt(
        job=job,
        root=root,
        folder=folder,
        fingerprint=fingerprint,
        digests=digests,
        sources=used,
        resumed=same and not finished,
        done=same and finished and copy.is_dir() and (is_lost or is_respelled()),
    )
    for leftover in ("out", "old", "tmp"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    if current.done:
        _log.info("%s: using the outputs of an earlier attempt that finished", job.name)
        # `copy` stays, because a kill during the publication must not lose the result.
        shutil.copytree(copy, folder / "out")
        return current
    shutil.rmtree(copy, ignore_errors=True)
    if current.resumed:
        _log.info("%s: resuming the attempt that did not finish", job.name)
    else:
        if before and not finished:
            _log.info("%s: its inputs have changed since it was stopped; starting again", job.name)
        # A run must not resume from checkpoints of other inputs.
        shutil.rmtree(current.run, ignore_errors=True)
    (folder / "out").mkdir()
    current.run.mkdir(exist_ok=True)
    _mark(current, finished=False)
    return current


def edited_stages(
    root: Path, spelled: Callable[[Any], Any] = lambda value: value
) -> dict[str, dict[str, Any]]:
    """Return the entries of dvc.lock with a parameter that its file now has with another value.

    `spelled` is applied to both values before they are compared. The result is {} if a file cannot
    be read.
    """
    try:
        stages = to_plain(read_yaml(root / "dvc.lock"))["stages"]
        # Each parameter file is read once, although many stages depend on it.
        names = {name for entry in stages.values() for name in entry.get("params", {})}
        now = {name: read_yaml(root / name) for name in names}
        return {
            stage: entry
            for stage, entry in stages.items()
            if any(
                spelled(to_plain(find(now[name], key))) != spelled(value)
                for name, values in entry.get("params", {}).items()
                for key, value in values.items()
            )
        }
    except (PipelineError, KeyError, TypeError, AttributeError):
        return {}


def _digest(job: Job, root: Path, path: Path) -> str:
    if not (root / path).exists():
        raise StageError(
            f"{job.name}: {path} does not exist. Run the whole pipeline with "
            "`pipeline run` or `dvc repro`, which makes it first."
        )
    return digest_of(root / path)


def digest_of(path: Path) -> str:
    """Return the hex SHA-256 of an input; for a folder, of its files except hidden ones."""
    if not path.is_dir():
        return files.sha256_of(path)
    within = sorted(p for p in path.rglob("*") if p.is_file())
    # Snakemake writes a hidden marker file into folders of outputs.
    seen = [p for p in within if not p.name.startswith(".")]
    # Paths are relative, so that a project has the same digests in every place.
    return files.fingerprint([[p.relative_to(path).as_posix(), files.sha256_of(p)] for p in seen])


def _check_unchanged(current: Attempt, now: Callable[[], Job] | None) -> None:
    """Refuse or warn if parameters, inputs or sources were edited while the job ran.

    DVC and Snakemake compute the digests of a job's files when the job ends, so they would record
    the result as made from the edited files. DVC also reads the parameters at the end, Snakemake at
    the start. Sources are safe with DVC: it records the list of them that `_begin` has written.
    """
    job, is_dvc = current.job, _DVC in os.environ
    if now is not None and is_dvc:
        params = job.params
        # An error is ignored here, because DVC cannot record parameters that cannot be read.
        with contextlib.suppress(PipelineError, OSError):
            params = now().params
        if files.fingerprint(params) != files.fingerprint(job.params):
            raise StageError(
                f"{job.name}: its parameters were changed while it ran, and DVC would record the "
                "result with the new parameters. Run it again: with the earlier parameters it "
                "continues, with others it starts again."
            )
    # Each entry is a name, the digest at the start of the job, the path, and the function that
    # computes the digest again.
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
            "%s: changed while it ran: %s. The engine will record the result as made from the "
            "changed files, although it was made from the earlier ones; if that matters, force the "
            "job to run again.",
            job.name,
            ", ".join(changed),
        )


def _publish(current: Attempt) -> None:
    outputs = {path: current.out(path.name) for path in current.job.outputs}
    # An incomplete result must not replace a complete one, so all outputs are checked first.
    missing = [str(path) for path, temporary in outputs.items() if not temporary.exists()]
    if missing:
        raise StageError(f"{current.job.name}: did not make {', '.join(missing)}")
    if current.job.takes_long and not current.done:
        # The copy is made now, because the outputs are moved away below. A retry publishes the copy
        # if the engine has lost the outputs.
        shutil.copytree(current.folder / "out", current.folder / "kept")
    for path, temporary in outputs.items():
        target, old = current.root / path, current.folder / "old"
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            # A rename cannot replace a folder with files, so the old folder is moved away first.
            shutil.move(target, old)
            _move(temporary, target)
            shutil.rmtree(old)
        else:
            _move(temporary, target)


def _move(made: Path, target: Path) -> None:
    """Move a new file or folder to its place atomically."""
    try:
        made.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A rename cannot cross disks, so the output is first moved next to `target`.
        near = target.with_name(f".{target.name}.new")
        shutil.rmtree(near, ignore_errors=True)  # a killed process may have left it
        shutil.move(made, near)
        near.replace(target)


def _mark(current: Attempt, *, finished: bool) -> None:
    mark: dict[str, Any] = {"fingerprint": current.fingerprint, "finished": finished}
    if CALL in os.environ:
        # The id of the Snakemake call is noted, because the job may end after Snakemake was killed;
        # then Snakemake has no record that the job finished.
        mark["call"] = os.environ[CALL]
    files.write_json(current.folder / "attempt.json", mark)


def note_finished(root: Path, call: str) -> None:
    """Mark the finished attempts of a Snakemake call as recorded by Snakemake.

    This function must be called after the Snakemake call has ended; `call` is its id.
    """
    for path in (root / WORK).rglob("attempt.json"):
        attempt = read_map(path)
        if attempt.get("call") == call and attempt.get("finished"):
            # Without the entry `call`, a retry uses the copy of the outputs (see `_begin`), but the
            # next ordinary run does not.
            del attempt["call"]
            files.write_json(path, attempt)


def _write_facts(current: Attempt, started: tuple[float, float]) -> None:
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
        "started_unix_s": started[0],
        "duration_s": time.time() - started[0],
        # The CPU time of this process and of its ended child processes, such as environments.
        "cpu_s": sum(os.times()[:4]) - started[1],
        "versions": versions,
        "machine": {"system": platform.platform(), **machine.facts()},
        **current.facts,
    }
    text = json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n"
    files.write_whole(current.folder / "stage.json", text)


def read_map(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file cannot be read or contains no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
