"""The builder of executables: one file with a simulator and all its requirements except Python.

The same sources and installed versions give the same bytes: names are sorted, times and permissions
are fixed, and no path or name of this machine is written into the file.

A third-party environment is run for some steps in a separate process, which imports nothing else,
to find the installed distributions and modules that the environment imports:

    python -m pipeline.simulators.pack OUTPUT '{"simulator": NAME, "options": {...}}'
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import logging.handlers
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pipeline.core.specs import BehaviorSpec
from pipeline.core.steps import Steps
from pipeline.errors import PipelineError, SettingsError, StageError, where
from pipeline.files import whole, write_whole, zip_entry
from pipeline.simulators import launcher, registry
from pipeline.simulators.bridges import module_bridge

_BASE = ("numpy", "protobuf")
# Distributions with many files that are known to be unneeded. Of all other distributions, only
# tests are left out.
_LEAN = frozenset({"mujoco", "mujoco-core", "numpy", "protobuf"})
# This package, and distributions that others require but import only to draw pictures.
_UNNEEDED = frozenset({"glfw", "mujoco-studio", "pyopengl", "rl-pipeline"})
_MODULES = ("__init__", "errors", "files", "plugins", "seeding", "version")
_FOLDERS = ("core", "simulators", "wire")
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "doc", "docs", "f2py", "include", "introspect", "plugin", "proto", "sysid"}
    | {"test", "testdata", "testing", "tests", "usd", "_examples", "distutils", "cmake"}
)
_SKIPPED_ANYWHERE = frozenset({"__pycache__", "test", "testing", "tests"})
_SKIPPED_FILES = ("*.a", "*.c", "*.h", "*.pxd", "*.pyc", "*.pyi", "*.pyx", "*_test.py", "*_tests.*")
_SKIPPED_PARTS = ("_simulate.*", "_render_filament.*", "_batch.*")
# Entry points are needed at run time, and licences by law; lists of files are not needed.
_KEPT_METADATA = ("METADATA", "entry_points.txt", "LICEN[CS]E*", "NOTICE*", "COPYING*")
# Name and version of a distribution in the path of its metadata (PEP 427).
_METADATA = re.compile(r"lib/([^/]+?)-([^/-]+)\.dist-info/METADATA")
# zlib's level. 71 MB of libraries become 27 MB in 1 s (level 1), 24 MB in 2.3 s (6) or 6 s (9).
_COMPRESSION = 6
# The start of an executable: a script that finds a Python, which runs the archive after it.
# Python's options -I and -S leave out the user's settings and the installed packages.
_SHELL = """\
#!/bin/sh
# {name}: an environment executable. This script finds a Python; a zip archive follows it.
check='import os, sys
if (sys.implementation.cache_tag + sys.abiflags, sys.platform, os.uname().machine) == {tag}:
    print(sys.executable)'
cache=${{PIPELINE_CACHE:-${{XDG_CACHE_HOME:-${{HOME:-/nonexistent}}/.cache}}/rl-pipeline}}
own=$cache/executables/{digest}
for candidate in "${{PIPELINE_PYTHON:-}}" "$(cat "$own.python" 2>/dev/null)" {python} \\
  /usr/local/bin/{python} /usr/bin/{python} python3 python
do
  [ -n "$candidate" ] || continue
  python=$("$candidate" -I -S -c "$check" 2>/dev/null)
  [ -z "$python" ] || break
done
if [ -z "$python" ]; then
  echo "{name}: needs C{version_text}, which was not found;" \\
    "put {python} on PATH, or set PIPELINE_PYTHON to its path." >&2
  exit 3
fi
main=$own/__main__.py
[ -f "$main" ] || main=$0
exec "$python" -I -S "$main" "$@"
exit 3
"""

_log = logging.getLogger(__name__)

# Longest time in seconds for the steps with random actions, and for the check of an executable.
_LIMIT_S = 300
# Number of steps with random actions that find the imported modules. Most episodes have fewer
# steps, so modules that an environment imports at a reset are found, too.
_N_STEPS = 300
_OWN = Path(__file__).resolve().parents[2]
# An executable draws nothing, so libraries for drawing must not be imported and packed.
_ENVIRONMENT = {"MUJOCO_GL": "disable", "SDL_VIDEODRIVER": "dummy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The distributions and files that an executable needs, except this package."""

    distributions: tuple[str, ...]  # names of installed distributions
    files: Mapping[str, Path]  # further files to pack, by their path in the folder of libraries


def pack(simulator_name: str, target: Path | str, **options: Any) -> Path:
    """Write the executable of a simulator to `target`.

    Args:
        simulator_name: one of `registry.NAMES`, or of `registry.BRIDGES` with the option `id`.
        target: the file to write; its folder is made if needed.
        options: keywords for the simulator, fixed in the executable; JSON values. `n_agents` is the
            default of the executable's option --num-agents.

    Returns:
        The path of the executable, which everyone may execute.

    Raises:
        SettingsError: The simulator is unknown, or a required option is missing.
        StageError: A required distribution is not installed, or the executable does not run.
    """
    return pack_with(needs_of(simulator_name, options), simulator_name, Path(target), options)


def pack_with(needs: Needs, simulator_name: str, target: Path, options: dict[str, Any]) -> Path:
    """Write an executable as `pack` does, with the given requirements."""
    is_bridge = registry.entry(simulator_name).bridge
    # A bridge is named after its environment, because many executables have the same bridge.
    title = str(options["id"]) if is_bridge else simulator_name
    content = dict(_package_files())
    for name, distribution in sorted(_closure((*_BASE, *needs.distributions)).items()):
        content.update(_distribution_files(name, distribution))
    content |= {f"lib/{name}": data for name, data in _contents(needs.files).items()}
    described = {"options": options, "simulator": simulator_name}
    content["executable.json"] = json.dumps(described, sort_keys=True).encode()
    content["__main__.py"] = Path(launcher.__file__).read_bytes()
    # The digest of all other files names the folder in the cache that the archive is unpacked to.
    digest = _digest(content)
    content["DIGEST"] = digest.encode()
    with whole(target) as temporary:
        # A shell reads a script from its start, and Python reads a zip archive from its end
        # (https://docs.python.org/3/library/zipapp.html#the-python-zip-application-archive-format).
        temporary.write_bytes(_script(title, digest) + _archive(content))
    # Everyone may run the executable, whatever the permissions of temporary files are.
    target.chmod(0o755)
    # The cache has the path of this Python, so that the executable finds it even if it is not on
    # PATH. The executable itself has no path of this machine.
    with contextlib.suppress(OSError):
        write_whole(launcher.cache_folder() / f"{digest}.python", f"{sys.executable}\n")
    if is_bridge:
        try:
            verify(target, title)
        except StageError:
            # An executable that does not run must not remain at `target`.
            target.unlink()
            raise
    return target


def inputs_of(needs: Needs) -> dict[str, Any]:
    """Return everything, except the options, that determines the bytes of an executable.

    Installed packages are represented by their versions, other files by digests of their content.
    """
    # Some Linux distributions have two folders of libraries (/usr/lib and /usr/lib64).
    libraries = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    # Each module's file or package's folder has one digest, which also changes with new files.
    roots = {
        (file.parents[name.count("/")], name.partition("/")[0])
        for name, file in needs.files.items()
    }
    tops = sorted(root / top for root, top in roots if root not in libraries)
    required = _closure((*_BASE, *needs.distributions))
    return {
        "python": f"{sys.implementation.cache_tag} {sys.platform} {platform.machine()}",
        "pipeline": _digest(dict(_package_files())),
        "distributions": {name: required[name].version for name in sorted(required)},
        "files": {str(top): _digest(_contents(_files_in(top))) for top in tops},
    }


def packages_in(executable: Path) -> dict[str, str]:
    """Return the versions of the packages in an executable, by name, except NumPy and protobuf.

    Empty for executables of other programs, such as builds of Unity.
    """
    if not zipfile.is_zipfile(executable):
        return {}
    with zipfile.ZipFile(executable) as archive:
        matches = map(_METADATA.fullmatch, archive.namelist())
        versions = {_normal(match[1]): match[2] for match in matches if match}
    return {name: version for name, version in versions.items() if name not in _BASE}


def _script(name: str, digest: str) -> bytes:
    major, minor = sys.version_info[:2]
    machine = platform.machine()
    text = _SHELL.format(
        name=re.sub(r"[^\w.:/-]", "-", name),
        digest=digest,
        python=f"python{major}.{minor}",
        tag=f'("{sys.implementation.cache_tag}{sys.abiflags}", "{sys.platform}", "{machine}")',
        version_text=f"Python {major}.{minor} for {sys.platform} {machine}",
    )
    return text.encode()


def _archive(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(content):
            archive.writestr(zip_entry(name), content[name], compresslevel=_COMPRESSION)
    return buffer.getvalue()


def _digest(content: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(content):
        # A zero byte separates name and digest, because no file name can contain it.
        digest.update(f"{name}\0{hashlib.sha256(content[name]).hexdigest()}\n".encode())
    return digest.hexdigest()


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Yield this package's files that an executable needs: name in the archive, and content."""
    root = Path(__file__).resolve().parent.parent
    files = [root / f"{name}.py" for name in _MODULES]
    for folder in _FOLDERS:
        files += (root / folder).rglob("*.py")
    for file in files:
        yield f"lib/pipeline/{file.relative_to(root).as_posix()}", file.read_bytes()


def _closure(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions `names` and all that they require, except `_UNNEEDED`, by name."""
    distributions = {}
    for name in names:
        try:
            distributions[_normal(name)] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise StageError(
                f"the executable needs the distribution '{name}', which is not installed; install "
                "all requirements: pip install 'rl-pipeline[train]'"
            ) from None
    waiting = sorted(distributions)
    while waiting:
        for requirement in distributions[waiting.pop()].requires or ():
            required = re.match(r"[\w.-]+", requirement)
            # Requirements of extras and of other systems have a marker after a semicolon (PEP 508).
            if not required or ";" in requirement:
                continue
            name = _normal(required[0])
            if name not in distributions and name not in _UNNEEDED:
                # A requirement may be installed under another name.
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    distributions[name] = importlib.metadata.distribution(name)
                    waiting.append(name)
    return distributions


def _normal(name: str) -> str:
    # Equal names may be spelled differently (PEP 503).
    return re.sub(r"[-_.]+", "-", name).lower()


def _distribution_files(
    name: str, distribution: importlib.metadata.Distribution
) -> Iterator[tuple[str, bytes]]:
    """Yield an installed distribution's files that are needed to run it, and its licences."""
    if distribution.files is None:
        raise StageError(f"the distribution '{name}' has no list of its files; reinstall it.")
    for file in distribution.files:
        if _is_needed(PurePosixPath(file), lean=name in _LEAN):
            yield f"lib/{file.as_posix()}", Path(str(file.locate())).read_bytes()


def _is_needed(path: PurePosixPath, *, lean: bool) -> bool:
    # Files outside of the folder of libraries are only scripts that pip has put into `bin`.
    if ".." in path.parts or path.is_absolute():
        return False
    if path.parts[0].endswith(".dist-info"):
        return any(fnmatch(path.name, pattern) for pattern in _KEPT_METADATA)
    if (_SKIPPED_FOLDERS if lean else _SKIPPED_ANYWHERE).intersection(path.parts[:-1]):
        return False
    patterns = _SKIPPED_FILES + _SKIPPED_PARTS if lean else ("*.pyc", "*.pyi")
    return not any(fnmatch(path.name, pattern) for pattern in patterns)


def needs_of(name: str, options: Mapping[str, Any]) -> Needs:
    """Return the requirements of a simulator's executable; arguments and errors as for `pack`.

    A third-party environment is run in a separate process to find the modules that it imports.
    """
    entry = registry.entry(name)
    registry.check_options(name, options)
    if entry.bridge:
        needs = needs_from(_imported_by(name, options))
        return replace(needs, distributions=(*entry.distributions, *needs.distributions))
    if entry.package is None:
        return Needs(distributions=entry.distributions, files={})
    spec = importlib.util.find_spec(entry.package)
    if spec is None or not spec.submodule_search_locations:
        raise StageError(
            f"{entry.package}: is not a package, so it cannot be packed; move the simulator into a "
            "folder with __init__.py."
        )
    # The files are listed from the folder, because an editable installation has no list of them.
    files = _files_in(Path(spec.submodule_search_locations[0]))
    return Needs(distributions=entry.distributions, files=files)


def _imported_by(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Run a bridge's environment, and return the file of each module that it imports, by name."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "modules.json"
        described = json.dumps({"simulator": name, "options": dict(options)})
        # The environment runs in another process, because this one has imported modules that the
        # environment does not need.
        command = [sys.executable, "-m", __name__, str(target), described]
        code, output = run(command, folder)
        if code == 2:
            raise SettingsError(
                output.splitlines()[-1] if output else f"{name}: fails, but says nothing"
            )
        if code != 0:
            raise StageError(f"{options.get('id')}: fails while it runs: {_last_line(output)}")
        imported: dict[str, str]
        imported, notes = json.loads(target.read_text(encoding="utf-8"))
    for note in notes:
        _log.info("%s", note)
    return imported


def run(command: list[str], folder: str, **extra: str) -> tuple[int, str]:
    """Run a command in `folder` with this process's module path; return exit code and output."""
    # This process's own current folder is the last entry, so that the command finds the user's
    # modules, but these do not hide installed modules. Empty entries would mean the current folder
    # of the new process.
    path = os.pathsep.join([*filter(None, sys.path), str(Path.cwd())])
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **extra}
    try:
        done = subprocess.run(  # noqa: S603  # this interpreter, or the executable built just now
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise StageError(f"{command[0]}: did not end within {_LIMIT_S} s.") from None
    return done.returncode, done.stderr.strip()


def verify(executable: Path, env_id: str) -> None:
    """Check that a packed environment can begin an episode with the packed files only.

    Raises:
        StageError: The environment cannot begin an episode.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(executable.resolve()), "--describe"]
        code, output = run(command, folder, PIPELINE_PYTHON=sys.executable)
    if code != 0:
        raise StageError(
            f"{env_id}: the packed executable does not run with its own files only "
            f"({_last_line(output)}). It may lack a module that is imported late, or a file that "
            "no package lists: import the module when the environment is made, or install the file "
            "with its package."
        )


def _last_line(output: str) -> str:
    return output.splitlines()[-1] if output else "no output"


def needs_from(imported: Mapping[str, str]) -> Needs:
    """Return the distributions and the files of imported modules.

    If a module has no distribution, all files of its package are returned. `imported` has the file
    of each module by its name, and an empty text for modules without a file.
    """
    owners = importlib.metadata.packages_distributions()
    contents: dict[str, set[str]] = {}
    distributions: set[str] = set()
    files: dict[str, Path] = {}
    for module, file in imported.items():
        root = _root_of(module, file)
        if root is None:
            continue
        relative = Path(file).relative_to(root)
        for name in sorted(set(owners.get(module.partition(".")[0], ()))):
            if name not in contents:
                contents[name] = _content(name)
            # Distributions may share a top package: the module belongs to the distribution that
            # lists its file.
            if os.path.realpath(file) in contents[name]:
                distributions.add(name)
                files[relative.as_posix()] = Path(file)
                break
        else:
            # A module without a distribution is packed as its file or its package's folder.
            files |= _files_in(root / relative.parts[0])
    return Needs(distributions=tuple(sorted(distributions)), files=files)


def _root_of(module: str, file: str) -> Path | None:
    """Return the folder with a module's top package; None if the module need not be packed.

    The standard library, this package, and modules that are not named after their file need not.
    """
    path = Path(file)
    depth = module.count(".") + (path.stem == "__init__")
    if not file or len(path.parents) <= depth or _OWN in path.parents:
        return None
    root = path.parents[depth]
    # `sys.modules` has modules under names that are not their file's: os.path is posixpath.py.
    if path.relative_to(root).parts[0].partition(".")[0] != module.partition(".")[0]:
        return None
    libraries = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    standard = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    if root in libraries or not standard.intersection((root, *root.parents)):
        return root
    return None


def _content(name: str) -> set[str]:
    distribution = importlib.metadata.distribution(name)
    return {os.path.realpath(str(file.locate())) for file in distribution.files or ()}


def _files_in(top: Path) -> dict[str, Path]:
    """Return a module's file, or a package's files, by path; without bytecode and hidden files."""
    files = {}
    for file in [top] if top.is_file() else sorted(top.rglob("*")):
        name = file.relative_to(top.parent).as_posix()
        is_hidden = any(
            part.startswith(".") or part == "__pycache__" for part in name.split("/")[1:]
        )
        if file.is_file() and not is_hidden and file.suffix != ".pyc":
            files[name] = file
    return files


def _contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files.items()}


def trace(target: str, described: str) -> int:
    """Write the file of each module that a simulator imports, and log lines, to `target` as JSON.

    `described` is JSON with the simulator's name and options. Return the exit code: 0, 1 if the
    environment fails, 2 if the user made a mistake.
    """
    request = json.loads(described)
    notes = logging.handlers.BufferingHandler(capacity=100)
    bridges = logging.getLogger(module_bridge.__package__)
    bridges.addHandler(notes)
    # Lines about spaces are shown to the user, who may want to change an option.
    bridges.setLevel(logging.INFO)
    # Modules that this process has imported before the environment are not packed for it.
    before = set(sys.modules)
    try:
        _run_randomly(request["simulator"], request["options"])
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a third-party environment may raise anything
        sys.stderr.write(f"{where(error)}\n")
        return 1
    modules = {
        name: str(getattr(module, "__file__", None) or "")
        for name, module in sorted(sys.modules.items())
        if name not in before
    }
    lines = list(dict.fromkeys(record.getMessage() for record in notes.buffer))
    Path(target).write_text(json.dumps([modules, lines]), encoding="utf-8")
    return 0


def _run_randomly(name: str, options: dict[str, Any]) -> None:
    # Two copies show whether a function returns the same object twice, which is refused.
    n_agents = module_bridge.n_agents_of(options["id"], copies=2) if name == "module" else 2
    simulator = registry.make(name, seed=0, **options | {"n_agents": n_agents})
    rng = np.random.default_rng(0)
    specs = simulator.behavior_specs
    steps = simulator.reset()
    for _ in range(_N_STEPS):
        for behavior, sent in steps.items():
            _refuse_other_shapes(options["id"], behavior, sent, specs[behavior])
        steps = simulator.step(
            {
                behavior: specs[behavior].action_spec.random_action(len(decisions), rng)
                for behavior, (decisions, _) in steps.items()
            }
        )
    simulator.close()


def _refuse_other_shapes(env_id: str, behavior: str, sent: Steps, spec: BehaviorSpec) -> None:
    announced = [tuple(obs.shape) for obs in spec.observation_specs]
    for steps in sent:
        shapes = [tuple(values.shape[1:]) for values in steps.obs]
        if len(steps) and shapes != announced:
            raise SettingsError(
                f"{env_id}: an agent of {behavior} observes the shapes {shapes}, but the "
                f"specification says {announced}; correct the simulator or its specification"
            )


if __name__ == "__main__":
    sys.exit(trace(*sys.argv[1:]))
