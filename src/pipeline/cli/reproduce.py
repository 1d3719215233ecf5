"""`pipeline reproduce`: run an archive's project again, and compare the results.

FOLDER/
    archive.json, results/, ...  the archive's files, never changed
    project/                     the project, in which `pipeline run` makes the results again
    .venv/                       the virtual environment, with only the packages of `locks/`
"""

import argparse
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline import files
from pipeline.cli.archive import ABOUT, FORMAT, chosen, last_error
from pipeline.cli.parser import Parser, option
from pipeline.dag.attempt import read_map
from pipeline.envs.sources.fetch import MAX_BYTES, unpack
from pipeline.errors import FetchError, NotReadyError, SettingsError, StageError, few
from pipeline.tracking.run_metadata import git

_log = logging.getLogger(__name__)

_INSTALLED = ".installed"
_MOST_BYTES = 1 << 26
"""Maximum size of archive.json in bytes."""
_KINDS = (0, 4, 8)
# With these variables of the caller, the stages could import other code or use other folders.
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIPELINE_PROJECT", "DVC_ROOT", "DVC_STAGE")


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline reproduce`."""
    parser.add_argument("archive", type=Path, metavar="ARCHIVE", help="file of `pipeline archive`")
    text = "experiments, sweeps, runs or subsets of the archive's params.yaml; default: all"
    parser.add_argument("names", nargs="*", help=text)
    option(parser, "--folder F", "the new folder; default: the archive's name", type=Path)
    text = "install the packages from the files in this folder, without the network"
    option(parser, "--wheels FOLDER", text)
    choices = {"choices": ("dvc", "snakemake"), "default": "snakemake", "metavar": None}
    option(parser, "--engine NAME", "the engine that runs the stages", **choices)
    option(parser, "--cores N", "number of jobs at a time", default=1)
    text = "refuse an archive that unpacks to more than X GB"
    option(parser, "--max-unpacked-gb X", text, default=MAX_BYTES / 1e9)


def run(arguments: argparse.Namespace) -> str:
    """Unpack an archive, install its packages, run its project, and compare the results.

    Raises:
        NotReadyError: A result differs from the archive's; the differences have been printed.
    """
    archive: Path = arguments.archive
    folder: Path = (arguments.folder or Path(archive.stem)).absolute()
    if arguments.wheels is not None and not arguments.wheels.is_dir():
        raise SettingsError(f"--wheels: {arguments.wheels} is not a folder")
    digests = _unpacked(archive, folder, int(arguments.max_unpacked_gb * 1e9))
    project = folder / "project"
    install(folder, arguments.wheels)
    if arguments.engine == "dvc" and git(project, "rev-parse", "--show-prefix") != "\n":
        git(project, "init", "--quiet")  # DVC needs a repository in this folder
    _log.info("3 of 4: running the stages in %s", project)
    options = "--engine", arguments.engine, "--cores", str(arguments.cores)
    if code := _pipeline(folder, "run", *arguments.names, *options).returncode:
        raise StageError(f"`pipeline run` in {project} ended with exit code {code}; see above")
    _log.info("4 of 4: comparing the results")
    compared = compare(project, digests, partial=bool(arguments.names))
    lines = [f"{len(compared['same'])} of {len(digests)} results are identical."]
    if missing := compared["missing"]:
        lines.append(f"not made: {few(missing)}")
    if differs := compared["differs"]:
        lines += [f"different: {few(differs)}", *_first_cause(folder, differs)]
    holds = not differs and not missing
    if (project / "claims.yaml").is_file() and not arguments.names:
        # Claims can hold without equal bytes, because they are intervals and comparisons.
        holds = _pipeline(folder, "claims", "check").returncode == 0
        lines.append(f"The claims of claims.yaml {'hold' if holds else 'do not all hold'}.")
    if not holds:
        sys.stdout.write("\n".join(lines) + "\n")
        raise NotReadyError(f"{archive}: the results were not reproduced")
    return "\n".join(lines)


def compare(project: Path, digests: Mapping[str, str], *, partial: bool) -> dict[str, list[str]]:
    """Return the names of results that are the same, differ, or are missing, by SHA-256.

    With `partial`, results that the reproduction has not made are left out.
    """
    verdicts: dict[str, list[str]] = {"same": [], "differs": [], "missing": []}
    for name, digest in sorted(digests.items()):
        made = project / name
        if not made.is_file():
            verdicts["missing"] += [] if partial else [name]
        else:
            verdicts["same" if files.sha256_of(made) == digest else "differs"].append(name)
    return verdicts


def _unpacked(archive: Path, folder: Path, max_bytes: int) -> Mapping[str, str]:
    """Unpack an archive, unless it is unpacked already, and return the digests of its results."""
    try:
        with zipfile.ZipFile(archive) as content, content.open(ABOUT) as file:
            about = file.read(_MOST_BYTES)
            # `others` has links and all other entries except files and folders. The upper bits of
            # Unix's mode are 8 for a file, 4 for a folder, 0 without a mode.
            others = [e.filename for e in content.infolist() if e.external_attr >> 28 not in _KINDS]
    except OSError as error:
        raise SettingsError(f"{archive}: cannot be read ({error.strerror})") from error
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError):
        raise SettingsError(f"{archive}: is not a file of `pipeline archive`") from None
    if others:  # `pipeline archive` writes no links
        raise FetchError(
            f"{archive}: {others[0]!r} is a link, and `pipeline archive` writes no links"
        )
    if folder.exists():
        record = folder / ABOUT
        if not record.is_file() or record.read_bytes() != about:
            raise SettingsError(
                f"{folder}: exists, and is no reproduction of this archive; give another --folder"
            )
        _log.info("1 of 4: %s has the archive's content", folder)
    else:
        _log.info("1 of 4: unpacking into %s", folder)
        part = folder.with_name(f".{folder.name}.unpacking")
        shutil.rmtree(part, ignore_errors=True)  # a killed process may have left it
        unpack(archive, part, max_bytes=max_bytes, label=str(archive))
        part.rename(folder)
    values = read_map(folder / ABOUT)
    digests = values.get("results")
    if values.get("format") != FORMAT or not isinstance(digests, dict):
        raise SettingsError(
            f"{archive}: its {ABOUT} (format {values.get('format')!r}) is no valid record of "
            f"format {FORMAT}, which this version of rl-pipeline reads; use the version in the "
            "archive"
        )
    # The archive comes from a stranger: only files inside the project are compared.
    outside = [name for name in digests if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside or not all(isinstance(digest, str) for digest in digests.values()):
        raise SettingsError(
            f"{archive}: {ABOUT} is damaged; use another copy. It has a digest that is no text, or "
            f"a path outside the project {few(outside, 1)}".rstrip()
        )
    python = ".".join(map(str, sys.version_info[:2]))
    if values.get("python") != python:
        _log.warning(
            "The results were made with Python %s, and this is %s: executables of environments "
            "differ, and so do the records in models",
            *(values.get("python"), python),
        )
    return digests


def install(folder: Path, wheels: Path | None = None) -> None:
    """Create the virtual environment of a reproduction, only with packages of its lock files."""
    if (folder / ".venv" / _INSTALLED).is_file():
        _log.info("2 of 4: the environment is installed")
        return
    _log.info("2 of 4: installing the packages, which takes minutes")
    shutil.rmtree(folder / ".venv", ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(folder / ".venv")], folder)
    packages = wheels.absolute() if wheels else folder / "packages"
    is_offline = packages.is_dir()
    pip = [_python(folder), "-m", "pip", "install", "--quiet", "--no-deps"]
    # Without a network, packages come only from the folder `packages`: --no-index excludes the
    # public index, and --isolated excludes the indexes that this machine's settings name.
    pip += ["--isolated", "--no-index", "--find-links", str(packages)] if is_offline else []
    index = None if is_offline else os.environ.get("TORCH_INDEX_URL")
    pip += ["--extra-index-url", index] if index else []
    cpu = index is not None or any(packages.glob("torch-*+cpu-*"))
    locks = chosen(sorted((folder / "locks").glob("*.txt")), cpu=cpu)
    words = [word for lock in locks for word in ("-r", str(lock))]
    _call([*pip, "--require-hashes", *words], folder)
    code = folder / "code" if (folder / "code").is_dir() else folder / "project"
    built = sorted(code.glob("*.whl"))
    editable = ["-e"] if code.name == "project" else []
    _call([*pip, "--no-build-isolation", *editable, str(built[0] if built else code)], folder)
    files.write_whole(folder / ".venv" / _INSTALLED, "")


def _python(folder: Path) -> str:
    return str(folder / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _call(command: Sequence[str], folder: Path) -> None:
    variables = _variables(folder, is_offline="--no-index" in command)
    done = subprocess.run(  # noqa: S603  # venv and pip
        command, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise StageError(f"{folder / '.venv'}: {last_error(done.stderr or done.stdout)}")


def _pipeline(
    folder: Path, *words: str, is_captured: bool = False
) -> subprocess.CompletedProcess[str]:
    """Call the archive's own `pipeline` in its project."""
    sys.stdout.flush()
    return subprocess.run(  # noqa: S603  # the archive's code, which the user trusts
        [_python(folder), "-m", "pipeline", *words],
        cwd=folder / "project",
        env=_variables(folder),
        capture_output=is_captured,
        text=True,
        check=False,
    )


def _variables(folder: Path, *, is_offline: bool = False) -> dict[str, str]:
    """Return this process's environment variables, except variables that add other Python code.

    PIPELINE_CACHE names the archive's cache if it has one. With `is_offline` pip reads no settings.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    if (folder / "cache").is_dir():  # environments that were fetched by URL
        kept["PIPELINE_CACHE"] = str(folder / "cache")
    # This variable disables pip's configuration files, which --isolated does not.
    offline = {"PIP_CONFIG_FILE": os.devnull} if is_offline else {}
    return kept | {"PYTHONNOUSERSITE": "1"} | offline


def _first_cause(folder: Path, differs: Sequence[str]) -> list[str]:
    """Return the output of `pipeline provenance --diff` for the first model that differs."""
    model = next((name for name in differs if name.endswith(".onnx")), None)
    if model is None:
        return []
    files = str(folder / "project" / model), "--diff", str(folder / model)
    done = _pipeline(folder, "provenance", *files, is_captured=True)
    return done.stdout.splitlines()[4:] or done.stderr.splitlines()
