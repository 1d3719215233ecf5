"""`pipeline archive`: write a project's results, and all inputs of its runs, into one zip file.

    archive.json     format, commit, Python's version, and the SHA-256 of each result
    README.md        how to reproduce the results
    CITATION.cff     how to cite them
    project/         the project's commit, and the inputs of its runs that git does not have
    code/            rl-pipeline, unless the project is a checkout of it
    locks/           the SHA-256 of each package, for pip's --require-hashes
    packages/        the packages themselves, with --with-packages
    cache/           the unpacked archives of environments that were fetched by URL
    results/, data/  the results: demonstrations, curves, models, evaluations, report

The same commit and results give the same bytes: names are sorted, and times and permissions are
fixed.
"""

import argparse
import io
import json
import logging
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from pipeline import __version__, files
from pipeline.cli.parser import Parser, option
from pipeline.dag import engines
from pipeline.dag.attempt import WORK, read_map
from pipeline.dag.project import checkout, code_of
from pipeline.dag.sources import src_of
from pipeline.envs.sources import fetch
from pipeline.envs.sources.executables import this_platform
from pipeline.errors import SettingsError, StageError, few
from pipeline.settings.project.environments import FetchSource
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import RUNS_FILE, write_plan
from pipeline.tracking.run_metadata import git

_log = logging.getLogger(__name__)

ABOUT = "archive.json"
FORMAT = 1
TORCH, TORCH_CPU, TRAIN = "torch.txt", "torch-cpu.txt", "train.txt"
"""Names of the lock files: torch as PyPI has it, torch for the CPU only, and the other packages
that make results. One more lock file, `dev.txt`, has the tools of developers."""
_CRATE, _CITATION = "ro-crate-metadata.json", "CITATION.cff"
_MADE = ("results", "build/env", "data/demos", "workflow/code", "workflow/runs.yaml", "dvc.lock")
"""Paths that stages or engines write. They do not count as sources, even if git tracks them."""
_LOCKED = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
_README = """\
# {title}: results and everything that made them

Any installation of rl-pipeline can make the results again and compare them, for example the copy in
this file:

    unzip ARCHIVE.zip {code}/* -d unpacked && pip install unpacked/{code}{wheel}
    pipeline reproduce ARCHIVE.zip

This makes a folder with a virtual environment, which has only packages with a SHA-256 in `locks/`.
By hand, with Python {python}: install `locks/torch.txt` and `locks/train.txt` with
`pip install --require-hashes --no-deps`, then `{code}{wheel}` with `--no-deps`, and call
`pipeline run` in `project/`. `{about}` has the SHA-256 of each result.

Commit {commit}, rl-pipeline {version}.
"""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline archive`."""
    parser.add_argument("output", type=Path, metavar="OUT.zip", help="the file to write")
    option(
        parser,
        "--with-packages",
        "also add the Python packages for this platform and Python version: 0.5 GB, 3 GB with CUDA",
    )


def run(arguments: argparse.Namespace) -> str:
    """Write the archive of the project in the present folder."""
    root, output = Path.cwd(), arguments.output
    if output.suffix != ".zip" or output.exists():
        reason = "exists already; give another name" if output.exists() else "must end in .zip"
        raise SettingsError(f"{output}: {reason}")
    params = load_params(root / "params.yaml")
    write_plan(params, root / RUNS_FILE)
    sources, commit = _committed(root)
    _log.info("Asking Snakemake whether all results are up to date")
    if pending := engines.snakemake_summary(root).pending:
        raise StageError(f"not up to date: {few(pending)}; `pipeline run` makes them again")
    results = {path.as_posix(): path for path in result_files(params, root)}
    digests = {name: files.sha256_of(root / path) for name, path in results.items()}
    content: dict[str, Path | bytes] = {f"project/{name}": data for name, data in sources.items()}
    content |= {f"project/{name}": root / name for name in _other_inputs(root, sources)}
    content |= {name: root / path for name, path in results.items()}
    content |= dict(_fetched(params))
    content |= _code(root)
    locks = _locks(root)
    _refuse_unlocked(root, locks.values())
    content |= {f"locks/{name}": path for name, path in locks.items()}
    for name, places in ((_CITATION, (root, checkout())), (_CRATE, (root,))):
        found = next((folder / name for folder in places if (folder / name).is_file()), None)
        content |= {name: found} if found else {}
    python = ".".join(map(str, sys.version_info[:2]))
    about = {"format": FORMAT, "commit": commit, "python": python, "results": digests}
    content[ABOUT] = f"{json.dumps(about, indent=2, sort_keys=True)}\n".encode()
    content["README.md"] = _README.format(
        title=root.name,
        python=python,
        commit=commit,
        version=__version__,
        about=ABOUT,
        code="code" if code_of(root) != root else "project",
        wheel="/*.whl" if any(name.endswith(".whl") for name in content) else "",
    ).encode()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.with_packages:
            content |= _packages(locks, Path(folder))
        _log.info("Writing %d files", len(content))
        _write(output, content)
    size = output.stat().st_size / 1e6
    return (
        f"Wrote {output}: {len(digests)} results and all inputs of their runs, {size:.1f} MB, "
        f"sha256 {files.sha256_of(output)}. `pipeline reproduce {output.name}` makes the results "
        "again."
    )


def result_files(params: Params, root: Path) -> Iterator[Path]:
    """Yield the sorted paths in the project of all runs' results; refuse if one is missing."""
    names = [*params.experiments, *params.sweeps]
    runs = dict.fromkeys(run for name in names for run in params.runs_of(name))
    places = {Path("results/report")} if runs else set()
    for name, seed in runs:
        experiment = params.experiment(name)
        places |= {Path("results", stage, name, f"seed{seed}") for stage in experiment.stages}
        if experiment.demonstrations is not None:
            places.add(Path("data/demos", f"{experiment.demonstrations}.demo"))
    places |= {Path("results/sweep", name) for name in params.sweeps}
    for place in sorted(places):
        if not (root / place).exists():
            raise StageError(f"{place}: is missing; `pipeline run` makes it")
        inside = [root / place] if (root / place).is_file() else sorted((root / place).rglob("*"))
        # Hidden files are left out, because Snakemake marks folders with them.
        shown = (path for path in inside if path.is_file() and not path.name.startswith("."))
        yield from (path.relative_to(root) for path in shown)


def _committed(root: Path) -> tuple[dict[str, bytes], str]:
    """Return the newest commit's files by name, without results, and the commit's id.

    A source that differs from it is refused: the archive would not reproduce the results.
    """
    commit = git(root, "rev-parse", "HEAD")
    if commit is None:
        raise StageError(
            f"{root}: has no commit to archive; make one by `git init && git add -A && git commit`"
        )
    except_made = [f":(exclude){name}" for name in _MADE]
    edited = git(root, "status", "--porcelain", "--no-renames", "--", ".", *except_made) or ""
    if names := [line[3:] for line in edited.splitlines()]:
        raise StageError(
            f"{root}: {few(names)} differ from the commit {commit[:12]}, so the "
            "archive would not have the files that made the results; commit them, and call "
            "`pipeline run` again"
        )
    command = ["git", "-C", str(root), "archive", "--format=tar", "HEAD"]
    packed = subprocess.run(command, capture_output=True, check=True)  # noqa: S603  # fixed command
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        members = [member for member in archive if not member.isdir()]
        if links := [member.name for member in members if not member.isreg()]:
            raise StageError(
                f"{root}: {few(links)} are links, which an archive cannot contain; "
                "commit the files themselves"
            )
        readers = ((member.name, archive.extractfile(member)) for member in members)
        found = {name: reader.read() for name, reader in readers if reader is not None}
    made = tuple(f"{name}/" for name in _MADE)
    kept = [name for name in found if not name.startswith(made) and name not in _MADE]
    return {name: found[name] for name in kept}, commit.strip()


def _other_inputs(root: Path, sources: Mapping[str, bytes]) -> list[str]:
    """Return the paths of files that stages have read but git does not track, such as builds."""
    names: set[str] = set()
    for facts in sorted((root / WORK).rglob("stage.json")):
        for name in read_map(facts).get("inputs", {}):
            path = Path(name)
            if path.is_absolute() and path.is_relative_to(checkout()):
                continue  # a file of the installed package, which the archive has in `code`
            if path.is_absolute() or ".." in path.parts:
                raise StageError(
                    f"{name}: is outside the project, but the stage of {facts.parent} has read it; "
                    "move it into the project"
                )
            inside = [root / path] if (root / path).is_file() else sorted((root / path).rglob("*"))
            names |= {file.relative_to(root).as_posix() for file in inside if file.is_file()}
    made = tuple(f"{name}/" for name in _MADE)
    others = names - {*sources, *_MADE}
    return sorted(n for n in others if not n.startswith(made) and "__pycache__" not in n)


def _fetched(params: Params) -> Iterator[tuple[str, Path]]:
    """Yield cached files of environments with a URL, so that a reproduction fetches nothing."""
    cache = fetch.cache_folder()
    for environment in params.environments.values():
        archive = isinstance(environment, FetchSource) and environment.archive(this_platform())
        for path in sorted((cache / archive[1].lower()).rglob("*")) if archive else ():
            if path.is_file():
                yield f"cache/{path.relative_to(cache.parent).as_posix()}", path


def _code(root: Path) -> dict[str, Path | bytes]:
    """Return the files of rl-pipeline; {} if the project is a checkout of it."""
    code = checkout()
    if code_of(root) == root:
        return {}
    if (code / "pyproject.toml").is_file():
        return {f"code/{name}": data for name, data in _committed(code)[0].items()}
    # The package was installed from a wheel: a wheel is made again from the files that pip lists.
    distribution, place = metadata.distribution("rl-pipeline"), src_of(code)
    names = [file.as_posix() for file in distribution.files or () if ".." not in file.parts]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        for name in sorted(name for name in names if not name.endswith(".pyc")):
            wheel.writestr(files.zip_entry(name), (place / name).read_bytes())
    return {f"code/rl_pipeline-{distribution.version}-py3-none-any.whl": buffer.getvalue()}


def _locks(root: Path) -> dict[str, Path]:
    """Return the lock files of rl-pipeline and of the project by name; the project's files win."""
    folders = (code_of(root) / "locks", root / "locks")
    found = {path.name: path for folder in folders for path in sorted(folder.glob("*.txt"))}
    if missing := [name for name in (TORCH, TRAIN) if name not in found]:
        file = f"{root}: locks/{missing[0]}"
        raise StageError(
            f"{file} is missing; `make lock` in a clone of rl-pipeline writes this file"
        )
    return {name: path for name, path in found.items() if name != "dev.txt"}


def chosen(locks: Iterable[Path], *, cpu: bool) -> list[Path]:
    """Return the lock files, of the two for torch only the one for the CPU or the one for PyPI."""
    by_name = {path.name: path for path in locks}
    by_name.pop(TORCH if cpu and TORCH_CPU in by_name else TORCH_CPU, None)
    return list(by_name.values())


def locked(paths: Iterable[Path]) -> dict[str, str]:
    """Return the version of each package in lock files, by the package's normalised name."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    # The suffix of a build, such as `+cpu`, is cut off, because all builds of a version count as
    # this version.
    return {_normal(name): version.partition("+")[0] for name, version in _LOCKED.findall(text)}


def unlocked(versions: Mapping[str, str]) -> Iterator[str]:
    """Yield a text for each package that is installed, but not in the version of `versions`."""
    for name, version in sorted(versions.items()):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            # The package is for another platform or Python version, or for an extra.
            continue
        if installed.partition("+")[0] != version:
            yield f"{name} {installed} (locked {version})"


def _refuse_unlocked(root: Path, paths: Iterable[Path]) -> None:
    """Refuse if installed or packed packages differ from the lock files."""
    from pipeline.envs.executable import DESCRIPTION, load
    from pipeline.simulators.pack import packages_in

    versions = locked(paths)
    if others := list(unlocked(versions)):
        raise StageError(
            f"{few(others)}: the installed versions are not the locked ones; install "
            "the locked versions and call `pipeline run`, or lock the installed ones (`make lock` "
            "in a clone of rl-pipeline)"
        )
    for description in sorted((root / "build/env").glob(f"*/{DESCRIPTION}")):
        needed = packages_in(load(description.parent).file)
        if absent := [f"{name} {needed[name]}" for name in sorted({*needed} - {*versions})]:
            raise StageError(
                f"environment {description.parent.name}: no lock file has "
                f"{few(absent)}; write a file in locks/ with `uv pip compile "
                "--generate-hashes`"
            )


def _packages(locks: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Download the locked packages for this platform and Python; return them by archived name."""
    _log.info("Downloading the packages")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"]
    command += ["--dest", str(folder)]
    wanted = chosen(locks.values(), cpu="+cpu" in metadata.version("torch"))
    command += [word for path in wanted for word in ("-r", str(path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # pip
    if done.returncode:
        error = last_error(done.stderr)
        raise StageError(f"--with-packages: pip cannot download the packages: {error}")
    return {f"packages/{path.name}": path for path in sorted(folder.iterdir())}


def last_error(text: str) -> str:
    """Return the last error of pip's output as one line."""
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    # After an error about a wrong hash, further lines name the package, so all lines from the last
    # error on are returned.
    last = text[text.rfind(errors[-1]) + len("ERROR: ") :] if errors else text[-300:]
    return " ".join(last.split())


def _write(output: Path, content: Mapping[str, Path | bytes]) -> None:
    with files.whole(output) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, source in sorted(content.items()):
            # Executables need no permission here: `unpack` recognizes them by their first bytes.
            entry = files.zip_entry(name)
            if name.startswith("packages/"):  # wheels are already compressed
                entry.compress_type = zipfile.ZIP_STORED
            if isinstance(source, bytes):
                archive.writestr(entry, source)
                continue
            # The file is copied in blocks, because packages and builds may have gigabytes.
            entry.file_size = source.stat().st_size
            with source.open("rb") as reader, archive.open(entry, "w") as writer:
                while block := reader.read(1 << 20):
                    writer.write(block)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # PEP 503
