"""The builder of executables: one file that holds a simulator and all that it needs but Python.

The same sources and installed versions give the same bytes: names are sorted, times and permissions
are fixed, and nothing of the machine is written into the file.

Third-party environments are played for a while in a process of its own, where nothing else is
imported, to see which installed distributions and modules they need:

    python -m pipeline.simulators.pack OUTPUT '{"simulator": NAME, "options": {...}}'
"""

from __future__ import annotations

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

from pipeline.errors import PipelineError, SettingsError, StageError, where
from pipeline.files import whole, write_whole
from pipeline.protocol.specs import BehaviorSpec
from pipeline.protocol.steps import Steps
from pipeline.simulators import launcher, registry
from pipeline.simulators.bridges import module_bridge

_BASE = ("numpy", "protobuf")
_LEAN = frozenset({"mujoco", "mujoco-core", "numpy", "protobuf"})
"""Distributions of which many files are known to be unneeded; of others only tests are left out."""
_UNNEEDED = frozenset({"glfw", "mujoco-studio", "pyopengl", "rl-pipeline"})
"""Distributions that others require but import only for pictures, and this package."""
_MODULES = ("__init__", "arrays", "errors", "files", "plugins", "seeding", "version")
_FOLDERS = ("protocol", "simulators")
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "doc", "docs", "f2py", "include", "introspect", "plugin", "proto", "sysid"}
    | {"test", "testdata", "testing", "tests", "usd", "_examples", "distutils", "cmake"}
)
_SKIPPED_ANYWHERE = frozenset({"__pycache__", "test", "testing", "tests"})
_SKIPPED_FILES = ("*.a", "*.c", "*.h", "*.pxd", "*.pyc", "*.pyi", "*.pyx", "*_test.py", "*_tests.*")
_SKIPPED_PARTS = ("_simulate.*", "_render_filament.*", "_batch.*")
# Entry points and licences are needed at run time and by law, lists of files are not.
_KEPT_METADATA = ("METADATA", "entry_points.txt", "LICEN[CS]E*", "NOTICE*", "COPYING*")
_COMPRESSION = 6
"""Of 71 MB of libraries: level 1 27 MB in 1 s, 6 24 MB in 2.3 s, 9 24 MB in 6 s."""
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
"""The start of an executable: it becomes the Python process that runs what follows."""


def pack(simulator_name: str, target: Path | str, **options: Any) -> Path:
    """Write the executable of a simulator to `target`.

    Args:
        simulator_name: one of `registry.NAMES`, or of `registry.BRIDGES` with the option `id`.
        target: the file to write; its folder is made if needed.
        options: keywords for the simulator, fixed in the executable; JSON values. `n_agents` is the
            number of agents unless the command line says otherwise.

    Returns:
        The path written, executable by everyone.

    Raises:
        SettingsError: There is no simulator of that name, or it lacks an option.
        StageError: A distribution that it needs is not installed, or what is packed does not run.
    """
    return pack_with(needs_of(simulator_name, options), simulator_name, Path(target), options)


def pack_with(needs: Needs, simulator_name: str, target: Path, options: dict[str, Any]) -> Path:
    """Do what `pack` does, with given needs."""
    is_bridge = registry.entry(simulator_name).bridge
    title = str(options["id"]) if is_bridge else simulator_name
    content = dict(_package_files())
    for name, distribution in sorted(_closure((*_BASE, *needs.distributions)).items()):
        content.update(_distribution_files(name, distribution))
    content |= {f"lib/{name}": file.read_bytes() for name, file in needs.files.items()}
    described = {"options": options, "simulator": simulator_name}
    content["executable.json"] = json.dumps(described, sort_keys=True).encode()
    content["__main__.py"] = Path(launcher.__file__).read_bytes()
    # Before DIGEST itself is added; it names the folder in the cache where this is unpacked.
    digest = _digest(content)
    content["DIGEST"] = digest.encode()
    with whole(target) as temporary:
        # Scripts are read from their start, zip archives from their end.
        temporary.write_bytes(_script(title, digest) + _archive(content))
    target.chmod(0o755)
    # The executable starts with the Python that built it, even if that is not on PATH. It holds no
    # path itself; without a cache it looks for another Python.
    with contextlib.suppress(OSError):
        write_whole(launcher.cache_folder() / f"{digest}.python", f"{sys.executable}\n")
    if is_bridge:
        try:
            verify(target, title)
        except StageError:
            # Nothing that does not run may stay under the name that was asked for.
            target.unlink()
            raise
    return target


def inputs_of(needs: Needs) -> dict[str, Any]:
    """Return what decides the bytes of an executable beside its options, as plain values.

    Installed packages are given by their versions, other files by digests of their content.
    """
    libraries = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    tops = set()
    for name, file in needs.files.items():
        root = file.parents[name.count("/")]
        # Files of installed packages are known by the package's version.
        if root not in libraries:
            tops.add(root / name.partition("/")[0])
    required = _closure((*_BASE, *needs.distributions))
    return {
        "python": f"{sys.implementation.cache_tag} {sys.platform} {platform.machine()}",
        "pipeline": _digest(dict(_package_files())),
        "distributions": {name: required[name].version for name in sorted(required)},
        "files": {str(top): _tree(top) for top in sorted(tops)},
    }


def _tree(top: Path) -> str:
    """Return a digest of a module's file, or of all files in a package's folder but bytecode."""
    inside = [top] if top.is_file() else top.rglob("*")
    return _digest(
        {
            file.relative_to(top.parent).as_posix(): file.read_bytes()
            for file in inside
            if file.is_file() and "__pycache__" not in file.parts
        }
    )


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
            # The earliest time that zip can say: the bytes must not depend on today's.
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            # Unix, on every system: zipfile writes the present one.
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content[name], compresslevel=_COMPRESSION)
    return buffer.getvalue()


def _digest(content: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(content):
        # The zero byte keeps a name and a digest apart, whatever the name holds.
        digest.update(f"{name}\0{hashlib.sha256(content[name]).hexdigest()}\n".encode())
    return digest.hexdigest()


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Return what an executable needs of this package, under its names in the archive."""
    root = Path(__file__).resolve().parent.parent
    files = [root / f"{name}.py" for name in _MODULES]
    for folder in _FOLDERS:
        files += (root / folder).rglob("*.py")
    for file in files:
        yield f"lib/pipeline/{file.relative_to(root).as_posix()}", file.read_bytes()


def _closure(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return distributions by name: `names` and what they require, without extras and `_UNNEEDED`.

    Raises:
        StageError: One of `names` is not installed. What they require may be missing, as it may be
            installed under another name.
    """
    distributions = {_normal(name): _distribution(name) for name in names}
    waiting = sorted(distributions)
    while waiting:
        for requirement in distributions[waiting.pop()].requires or ():
            required = re.match(r"[\w.-]+", requirement)
            # Extras and other systems' requirements have a marker after a semicolon.
            if not required or ";" in requirement:
                continue
            name = _normal(required[0])
            if name not in distributions and name not in _UNNEEDED:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    distributions[name] = importlib.metadata.distribution(name)
                    waiting.append(name)
    return distributions


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise StageError(
            f"the executable needs the distribution '{name}', which is not installed; install the "
            "whole: pip install 'rl-pipeline[train]'"
        ) from None


def _distribution_files(
    name: str, distribution: importlib.metadata.Distribution
) -> Iterator[tuple[str, bytes]]:
    """Return the files that an installed distribution needs to run, and its licences."""
    if distribution.files is None:
        raise StageError(f"the distribution '{name}' has no list of its files; reinstall it.")
    for file in distribution.files:
        if _is_needed(PurePosixPath(file), lean=name in _LEAN):
            yield f"lib/{file.as_posix()}", Path(str(file.locate())).read_bytes()


def _is_needed(path: PurePosixPath, *, lean: bool) -> bool:
    # Scripts that pip has put into `bin`.
    if ".." in path.parts or path.is_absolute():
        return False
    if path.parts[0].endswith(".dist-info"):
        return any(fnmatch(path.name, pattern) for pattern in _KEPT_METADATA)
    if (_SKIPPED_FOLDERS if lean else _SKIPPED_ANYWHERE).intersection(path.parts[:-1]):
        return False
    patterns = _SKIPPED_FILES + _SKIPPED_PARTS if lean else ("*.pyc", "*.pyi")
    return not any(fnmatch(path.name, pattern) for pattern in patterns)


_log = logging.getLogger(__name__)

_LIMIT_S = 300
_N_STEPS = 300
"""Enough for most episodes to end and begin anew, where modules may be imported late."""
_OWN = Path(__file__).resolve().parents[2]
# An executable draws nothing, so libraries for drawing must not count as needed.
_ENVIRONMENT = {"MUJOCO_GL": "disable", "SDL_VIDEODRIVER": "dummy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The contents of an executable beside this package."""

    distributions: tuple[str, ...]
    """Names of installed distributions."""
    files: Mapping[str, Path]
    """Single files by their path under the folder of libraries: modules that were imported."""


def needs_of(name: str, options: Mapping[str, Any]) -> Needs:
    """Return the contents of a simulator's executable; see `pack.pack`.

    Third-party environments are played for a while in a process of their own, to see what they
    import.

    Raises:
        SettingsError: There is no such simulator, it lacks an option, or it cannot be made.
        StageError: It fails while it is played, or takes too long.
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
        raise StageError(f"{entry.package}: a simulator from outside must lie in a package.")
    # From its folder: an editable package has no list of its files.
    files = _files_in(Path(spec.submodule_search_locations[0]))
    return Needs(distributions=entry.distributions, files=files)


def _imported_by(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Play a bridge's environment; return the file of each module that it imports by its name."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "modules.json"
        described = json.dumps({"simulator": name, "options": dict(options)})
        # In a process of its own: this one has imported much that the environment does not need.
        command = [sys.executable, "-m", __name__, str(target), described]
        code, output = run(command, folder)
        if code == 2:
            raise SettingsError(output.splitlines()[-1] if output else f"{name}: cannot be made")
        if code != 0:
            raise StageError(f"{options.get('id')}: fails while it is played: {_end(output)}")
        played = json.loads(target.read_text(encoding="utf-8"))
    for note in played["notes"]:
        _log.info("%s", note)
    imported: dict[str, str] = played["modules"]
    return imported


def run(command: list[str], folder: str, **extra: str) -> tuple[int, str]:
    """Run a command in `folder` with this process' module path; gives exit code and output.

    The current folder ends that path, so that a module beside the caller is found there, and hides
    none that is installed.

    Raises:
        StageError: It takes too long.
    """
    # Empty entries would mean the new process's own folder.
    path = os.pathsep.join([*filter(None, sys.path), str(Path.cwd())])
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **extra}
    try:
        done = subprocess.run(  # noqa: S603  # this interpreter, or what was built just now
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
    """Let a packed environment begin an episode, with nothing but what was packed.

    Raises:
        StageError: It cannot.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(executable.resolve()), "--describe"]
        code, output = run(command, folder, PIPELINE_PYTHON=sys.executable)
    if code != 0:
        raise StageError(
            f"{env_id}: the packed executable does not run by itself ({_end(output)}); an import "
            "that happens only in it, or a file that no package lists, is missing."
        )


def _end(output: str) -> str:
    return output.splitlines()[-1] if output else "it printed nothing"


def needs_from(imported: Mapping[str, str]) -> Needs:
    """Return distributions that own modules, and the files and packages that none owns.

    `imported` has the file of each module; it is empty for those without one.
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
            # Several distributions may share a top package; the one that lists the file owns it.
            if os.path.realpath(file) in contents[name]:
                distributions.add(name)
                files[relative.as_posix()] = Path(file)
                break
        else:
            # It belongs to no distribution: take its file, or the whole folder of its package.
            top = root / relative.parts[0]
            files |= {top.name: top} if top.is_file() else _files_in(top)
    return Needs(distributions=tuple(sorted(distributions)), files=files)


def _root_of(module: str, file: str) -> Path | None:
    """Return the folder in which a module's top package lies; None if it need not be packed.

    The standard library, this package, and modules with another name than their file need not.
    """
    path = Path(file)
    depth = module.count(".") + (path.stem == "__init__")
    if not file or len(path.parents) <= depth or _OWN in path.parents:
        return None
    root = path.parents[depth]
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


def _files_in(folder: Path) -> dict[str, Path]:
    """Return all files of a package by their path beside it, but bytecode and hidden ones."""
    files = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
        if file.is_file() and not is_hidden and file.suffix != ".pyc":
            files[f"{folder.name}/{inside.as_posix()}"] = file
    return files


def trace(target: str, described: str) -> int:
    """Write the file of each imported module, and what bridges noted, to `target` as JSON.

    Returns:
        An exit code.
    """
    request = json.loads(described)
    notes = logging.handlers.BufferingHandler(capacity=100)
    bridges = logging.getLogger(module_bridge.__package__)
    bridges.addHandler(notes)
    bridges.setLevel(logging.INFO)
    # Modules that the tracing itself has imported do not count.
    before = set(sys.modules)
    try:
        _play(request["simulator"], request["options"])
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of an environment that others wrote
        sys.stderr.write(f"{where(error)}\n")
        return 1
    modules = {
        name: str(getattr(module, "__file__", None) or "")
        for name, module in sorted(sys.modules.items())
        if name not in before
    }
    lines = list(dict.fromkeys(record.getMessage() for record in notes.buffer))
    content = {"modules": modules, "notes": lines}
    Path(target).write_text(json.dumps(content), encoding="utf-8")
    return 0


def _play(name: str, options: dict[str, Any]) -> None:
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
    """Raise SettingsError if a simulator sends other shapes than it has announced."""
    announced = [tuple(obs.shape) for obs in spec.observation_specs]
    for steps in sent:
        shapes = [tuple(values.shape[1:]) for values in steps.obs]
        if len(steps) and shapes != announced:
            raise SettingsError(
                f"{env_id}: an agent of {behavior} observes the shapes {shapes}, and the "
                f"specification says {announced}; let the simulator send what it announces"
            )


if __name__ == "__main__":
    sys.exit(trace(*sys.argv[1:]))
