"""`pipeline doctor`: check that this machine has everything that the pipeline needs."""

import argparse
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.cli.archive import locked, unlocked
from pipeline.cli.parser import Parser
from pipeline.cli.ui import why_not_free
from pipeline.dag.engines import environment
from pipeline.dag.project import checkout
from pipeline.errors import NotReadyError, PipelineError, few, one_line
from pipeline.settings.project.environments import EnvironmentParams, PathSource, UnitySource
from pipeline.settings.project.params import Params, load_params
from pipeline.tracking.run_metadata import git

# These are the oldest and the newest supported releases of Python.
_PYTHONS = ((3, 11), (3, 13))
# This is the minimum free space on the disk, in gigabytes of 10^9 bytes.
_FREE_GB = 2.0
_SERVER_WAIT_S = 2.0
# The Unity Editor always connects to this port, as in ML-Agents.
_EDITOR_PORT = 5004
_WITHOUT_EXTRA = "pip install 'rl-pipeline[train]'"


class Problem(Exception):  # noqa: N818  # the machine has a problem, not the program
    """A failed check; the message says what is wrong, and what the user should do."""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline doctor`."""


def run(arguments: argparse.Namespace) -> str:  # noqa: ARG001  # the command has no options
    """Return a line for each check; if one fails, print the lines and raise NotReadyError."""
    root = Path.cwd()
    lines: list[str] = []
    problems: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            lines.append(f"OK    {name:10} {check(root)}")
        except (Problem, PipelineError, OSError) as error:
            # Every check runs, so that one call lists every problem.
            problem = one_line(error)
            # Several checks read params.yaml, so a mistake in it makes all of them fail.
            if problem in problems and isinstance(error, PipelineError):
                lines.append(f"-     {name:10} not checked: fix {problems[problem]} first")
                continue
            lines.append(f"TO DO {name:10} {problem}")
            problems[problem] = name
    text = "\n".join(lines)
    if problems:
        # The lines are the result, so they go to standard output; the exception adds one line to
        # standard error and the exit code.
        sys.stdout.write(f"{text}\n")
        count = f"{len(problems)} of {len(CHECKS)} lines begin"
        raise NotReadyError(f"{count} with TO DO and say what to do")
    return text


def _python(_: Path) -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    least, most = (".".join(map(str, release)) for release in _PYTHONS)
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        raise Problem(
            f"{version}: Python {least} to {most} is needed; make a virtual environment with it"
        )
    return f"{version}, {sys.prefix}"


def _torch(_: Path) -> str:
    version = _version("torch")
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Problem(
            f"{version} cannot be imported ({one_line(error)}); install it again"
        ) from error
    # This is the CUDA release that torch was built for, and not the release of the driver.
    device = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "CPU only"
    return f"{version}, {device}, {torch.get_num_threads()} threads unless params.yaml sets them"


def _engine(name: str) -> Callable[[Path], str]:
    """Return a check that an engine is installed and its command is on PATH."""

    def check(root: Path) -> str:
        version = _version(name)
        # `pipeline run` starts engines with this PATH; a package may be installed although its
        # command is not on this PATH.
        program = shutil.which(name, path=environment()["PATH"])
        if program is None:
            raise Problem(f"{version} has no program on PATH; activate its virtual environment")
        # Snakemake leaves its lock when it is killed, and then refuses every run.
        lock = root / ".snakemake/locks"
        if name == "snakemake" and lock.is_dir() and any(lock.iterdir()):
            text = "is running here, or was killed; if it is not running: snakemake --unlock"
            raise Problem(f"{version} {text}")
        config = root / ".dvc/config"
        needs_git = config.is_file() and "no_scm" not in config.read_text(encoding="utf-8")
        if name == "dvc" and needs_git and git(root, "rev-parse", "--git-dir") is None:
            raise Problem(f"{version} finds no git repository here; run git init, or install git")
        return f"{version}, {program}"

    return check


def _packages(_: Path) -> str:
    names = ("numpy", "onnx", "onnxruntime", "mlflow", "mujoco-core", "gymnasium", "pettingzoo")
    text = ", ".join(f"{name} {_version(name)}" for name in names)
    _check_mujoco()
    return text


def _locks(root: Path) -> str:
    folder = next((at / "locks" for at in (root, checkout()) if (at / "locks").is_dir()), None)
    if folder is None:
        return "no lock files here; `make lock` in a clone of rl-pipeline writes them"
    paths = sorted(folder.glob("*.txt"))
    # Other versions than the locked ones are not a TO DO: rl-pipeline allows ranges of versions.
    others = list(unlocked(locked(paths)))
    text = f"not the locked versions: {few(others)}"
    return text if others else "all packages have the locked versions"


def _check_mujoco() -> None:
    """Raise Problem for MuJoCo packages of several versions, which overwrite each other's files."""
    versions = {}
    for name in ("mujoco", "mujoco-core", "mujoco-mjx", "mujoco-studio", "mujoco-usd"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    try:
        import mujoco

        loaded = mujoco.mj_versionString()
    except (ImportError, OSError, AttributeError) as error:
        loaded = f"not importable: {one_line(error)}"
    # The packages must have the same major number, and the loaded library the version of
    # mujoco-core.
    is_mixed = len({version.partition(".")[0] for version in versions.values()}) > 1
    if is_mixed or loaded != versions["mujoco-core"]:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise Problem(
            f"{listed} are installed over each other (the library is {loaded}): "
            f"pip uninstall -y {' '.join(versions)}; pip install 'mujoco-core[rendering]'"
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise Problem(f"{package} is not installed: {_WITHOUT_EXTRA}") from None


def _project(root: Path) -> str:
    from pipeline.dag.stages.check import refuse_files_of_the_future, refuse_linked_results
    from pipeline.settings.project.plan import check_files, check_plan, check_settings

    params = _params(root)
    if params is None:
        return "no params.yaml here; `pipeline init DIR` writes a project"
    check_settings(params)
    check_files(params)
    refuse_files_of_the_future(params)
    if (root / "dvc.yaml").is_file():
        refuse_linked_results(root)
        check_plan(params, root / "workflow/runs.yaml")
    return f"{len(params.experiments)} experiments, planned"


def _params(root: Path) -> Params | None:
    return load_params(root / "params.yaml") if (root / "params.yaml").is_file() else None


def _store(root: Path) -> str:
    from pipeline.tracking import mlflow_store

    if os.environ.get("PIPELINE_MLFLOW") == "off":
        return "turned off by PIPELINE_MLFLOW"
    uri = mlflow_store.default_uri(root)
    address = urlsplit(uri)
    if (file := mlflow_store.file_of(uri)) is not None:
        # The file is looked for first, because a client would create an empty store.
        if not file.exists():
            return f"the first run will make {file.name}"
        try:
            with mlflow_store.locked(uri):
                # MLflow raises an error with a remedy for a store of another version.
                client = mlflow_store.client_of(uri)
            ids = [each.experiment_id for each in client.search_experiments()]
            return f"{file.name}, {len(client.search_runs(ids, max_results=50_000))} runs"
        except PipelineError:
            raise
        except Exception as error:  # MLflow, SQLAlchemy and Alembic raise errors of their own here
            raise Problem(
                f"{file} cannot be read ({one_line(error)}); `pipeline runs --rebuild` makes it "
                "again"
            ) from error
    if address.scheme in ("http", "https"):
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            # A plain connection is tried, because MLflow's client retries for more than 100 s.
            socket.create_connection((address.hostname or "", port), _SERVER_WAIT_S).close()
        except OSError as error:
            text = f"{address.hostname}:{port} cannot be reached ({one_line(error)})"
            raise Problem(f"{text}; start the server, or unset MLFLOW_TRACKING_URI") from error
        return f"{address.scheme}://{address.hostname}:{port} answers"
    return uri


def _ports(_: Path) -> str:
    # For port 0 the system chooses any free port: if this fails, there is no loopback device. Only
    # after this check, a failure at the Editor's port means that the port is in use.
    if reason := why_not_free(0) or why_not_free(_EDITOR_PORT):
        text = f"127.0.0.1:{_EDITOR_PORT} cannot be used ({reason}); end the other trainer"
        raise Problem(f"{text} that waits there for the Unity Editor")
    return f"the loopback device works, {_EDITOR_PORT} is free for the Unity Editor"


def _unity(root: Path) -> str:
    from pipeline.envs.sources.unity_build import find_editor

    projects = [source for source in _sources(root) if isinstance(source, UnitySource)]
    for project in projects:  # `find_editor` raises an error if there is no suitable Editor
        find_editor(project.editor, root / project.project)
    text = f"{len(projects)} projects, and an Editor to build them"
    return text if projects else "no Unity project in params.yaml, so no Editor is needed"


def _builds(root: Path) -> str:
    from pipeline.envs.sources.executables import executable_of

    builds = [source for source in _sources(root) if isinstance(source, PathSource)]
    for build in builds:
        executable_of(root / build.found(root))
    return (
        f"{len(builds)} in params.yaml, each with an executable"
        if builds
        else "none in params.yaml"
    )


def _sources(root: Path) -> list[EnvironmentParams]:
    params = _params(root)
    return [*params.environments.values()] if params else []


def _disk(root: Path) -> str:
    free = shutil.disk_usage(root).free / 1e9
    if not os.access(root, os.W_OK):
        raise Problem(f"{root} cannot be written to; work in another folder")
    if free < _FREE_GB:
        text = f"{free:.1f} GB free, and runs need {_FREE_GB:.0f} GB"
        raise Problem(
            f"{text}; `dvc gc --workspace` deletes old results, `make clean` the present results"
        )
    return f"{free:.0f} GB free"


CHECKS: dict[str, Callable[[Path], str]] = {
    "Python": _python,
    "torch": _torch,
    "packages": _packages,
    "locks": _locks,
    "dvc": _engine("dvc"),
    "snakemake": _engine("snakemake"),
    "project": _project,
    "MLflow": _store,
    "ports": _ports,
    "Unity": _unity,
    "builds": _builds,
    "disk": _disk,
}
"""The checks by name; a check returns a description, or raises an error with a remedy."""
