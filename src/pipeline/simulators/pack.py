"""The builder of executables: one file that holds a simulator and all that it needs but Python.

The same sources and installed versions give the same bytes: names are sorted, times and permissions
are fixed, and nothing of the machine is written into the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import platform
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pipeline.errors import StageError
from pipeline.files import whole, write_whole
from pipeline.simulators import launcher, registry

if TYPE_CHECKING:
    from pipeline.simulators.needs import Needs

_BASE = ("numpy", "protobuf")
_LEAN = frozenset({"mujoco", "mujoco-core", "numpy", "protobuf"})
"""Distributions of which many files are known to be unneeded; of others only tests are left out."""
_UNNEEDED = frozenset({"glfw", "mujoco-studio", "pyopengl", "rl-pipeline"})
"""Distributions that others require but import only for pictures, and this package."""
_PACKAGE = (
    "__init__.py",
    "arrays.py",
    "errors.py",
    "files.py",
    "plugins.py",
    "seeding.py",
    "version.py",
)
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
    from pipeline.simulators.needs import needs_of

    return pack_with(needs_of(simulator_name, options), simulator_name, Path(target), options)


def pack_with(needs: Needs, simulator_name: str, target: Path, options: dict[str, Any]) -> Path:
    """Do what `pack` does, with given needs."""
    is_bridge = registry.entry(simulator_name).bridge
    title = str(options["id"]) if is_bridge else simulator_name
    _write(target, simulator_name, title, options, needs)
    if is_bridge:
        from pipeline.simulators.needs import verify

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


def _write(target: Path, simulator: str, title: str, options: dict[str, Any], needs: Needs) -> None:
    content = dict(_package_files())
    for name, distribution in sorted(_closure((*_BASE, *needs.distributions)).items()):
        content.update(_distribution_files(name, distribution))
    content |= {f"lib/{name}": file.read_bytes() for name, file in needs.files.items()}
    described = {"options": options, "simulator": simulator}
    content["executable.json"] = json.dumps(described, sort_keys=True).encode()
    content["__main__.py"] = Path(launcher.__file__).read_bytes()
    # Before DIGEST itself is added; it names the folder in the cache where this is unpacked.
    digest = _digest(content)
    content["DIGEST"] = digest.encode()
    with whole(target) as temporary:
        # Scripts are read from their start, zip archives from their end.
        temporary.write_bytes(_script(title, digest) + _archive(content))
    target.chmod(0o755)
    _remember_python(digest)


def _remember_python(digest: str) -> None:
    """Write down in the cache which Python built an executable, which holds no path itself.

    The executable starts with that Python, even if it is not on PATH; without a cache it looks for
    another one.
    """
    with contextlib.suppress(OSError):
        write_whole(launcher.cache_folder() / f"{digest}.python", f"{sys.executable}\n")


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
    files = [root / name for name in _PACKAGE]
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
