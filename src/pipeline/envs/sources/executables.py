"""Finds the executable in a build of an environment, and the system that it is for."""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from pipeline.errors import FetchError, shell_command
from pipeline.files import as_typed, similar
from pipeline.settings.project.environments import Platform

_log = logging.getLogger(__name__)

_SUFFIXES = {"linux": (".x86_64", ".x86"), "darwin": (".app",), "windows": (".exe",)}
# Libraries often have permission to be executed, but cannot be started.
_LIBRARIES = (".so", ".dll", ".dylib")
# Unity adds a crash handler to builds. The name of its file begins with this text, and has an
# executable's suffix.
_CRASH_HANDLER = "UnityCrashHandler"


def this_platform() -> Platform:
    """Return the system of this machine."""
    names = {"win32": "windows", "darwin": "darwin"}
    return cast("Platform", names.get(sys.platform, "linux"))


def executable_in(
    folder: Path, *, label: str, platform: str | None = None, wanted: str | None = None
) -> Path:
    """Return the executable of a build: the only one in the topmost folder with executables.

    Executables have a suffix of the platform (`.x86_64`, `.x86`, `.app`, `.exe`). If no file has
    such a suffix, the only file with permission to be executed is returned. `label` names the build
    in errors; `platform` is the system that it is for (None: this system); `wanted` is the path in
    `folder` of the executable of a build with several.

    Raises:
        FetchError: There is no executable, or there are several, or they are for another platform.
    """
    platform = platform or this_platform()
    if wanted is not None:
        return _named(folder / wanted, folder, label)
    paths = _with_suffix(folder)
    candidates = _topmost([p for p in paths if p.suffix in _SUFFIXES[platform]], folder)
    if not candidates:
        if paths:
            suffixes = {path.suffix for path in paths}
            platforms = sorted(name for name in _SUFFIXES if suffixes.intersection(_SUFFIXES[name]))
            raise FetchError(
                f"{label}: has a build for {' and '.join(platforms)} ({paths[0].name}), but a "
                f"build for {platform} is needed. Take the build for {platform}."
            )
        candidates = _topmost(_executables(folder), folder)
    if not candidates:
        raise FetchError(
            f"{label}: expected one executable, found none. The name of an executable ends in "
            ".x86_64, .x86, .app or .exe, or the file has permission to be executed."
        )
    if len(candidates) > 1:
        listed = ", ".join(path.relative_to(folder).as_posix() for path in candidates)
        raise FetchError(
            f"{label}: expected one executable, found {listed}. Move each build into its own "
            "folder; for an archive, name the right one with the setting 'executable'."
        )
    return _inside_app(candidates[0], label)


def path_hint(text: str) -> str | None:
    """Return a sentence on how to correct a path; None if no similar path exists."""
    words = text.split(" ")
    # The longest beginning of the text that is a path is taken; the rest may be arguments.
    for n in range(len(words), 0, -1):
        path = as_typed(" ".join(words[:n]))
        executables = [] if path is None else [path]
        if path is not None and path.is_dir():
            executables = _topmost(_with_suffix(path), path) or _topmost(_executables(path), path)
        if len(executables) > 1:
            return f"The folder has {', '.join(map(shell_command, executables))}; name one of them."
        if executables and n < len(words):
            option = shell_command("--env", executables[0], "--env-args", *words[n:])
            return (
                f"There is {shell_command(executables[0])}; write its arguments as in `{option}`."
            )
        if executables:
            return f"There is {shell_command(executables[0])}; give this path."
    if "\\" in text and os.name != "nt":
        return "This is a path of Windows; give the path of the executable on this system."
    return None


def executable_of(build: Path) -> Path:
    """Return the executable of a build, given as executable, application of macOS, or folder."""
    label = os.path.relpath(build)
    if not build.exists():
        raise FetchError(
            f"{label}: does not exist{similar(label)}; name the executable of a build, or its "
            "folder"
        )
    if build.is_file() or build.suffix == ".app":
        return _inside_app(build, label)
    return executable_in(build, label=label)


def runs_headless(executable: Path) -> bool:
    """Return whether an executable has to run without a display, and log a line if so.

    Binaries on Linux without a display have to, unless `PIPELINE_GRAPHICS=1` is set.
    """
    variables = ("DISPLAY", "WAYLAND_DISPLAY", "PIPELINE_GRAPHICS")
    if sys.platform != "linux" or any(os.environ.get(name) for name in variables):
        return False
    try:
        with executable.open("rb") as file:
            # Every Linux binary begins with these bytes (elf(5)).
            native = file.read(4) == b"\x7fELF"
    except OSError:
        return False
    if native:
        _log.info(
            "There is no display, so %s runs with no_graphics, and cameras see nothing. "
            "Set PIPELINE_GRAPHICS=1 to start it with graphics.",
            executable.name,
        )
    return native


def _named(path: Path, folder: Path, label: str) -> Path:
    if path.suffix == ".app" and path.is_dir():
        return _inside_app(path, label)
    if not path.is_file():
        listed = ", ".join(sorted(p.relative_to(folder).as_posix() for p in _with_suffix(folder)))
        raise FetchError(
            f"{label}: has no file {path.relative_to(folder).as_posix()!r}; the files with an "
            f"executable's suffix are {listed or 'none'}"
        )
    return path


def _with_suffix(folder: Path) -> list[Path]:
    """Return the files and macOS folders below `folder` that have an executable's suffix."""
    suffixes = {suffix for of_one in _SUFFIXES.values() for suffix in of_one}
    paths = [path for path in _content(folder) if path.suffix in suffixes]
    return [path for path in paths if path.is_dir() == (path.suffix == ".app")]


def _executables(folder: Path) -> list[Path]:
    files = [path for path in _content(folder) if path.is_file()]
    return [p for p in files if os.access(p, os.X_OK) and p.suffix not in _LIBRARIES]


def _content(folder: Path) -> list[Path]:
    paths = []
    # `rglob` would fail if a file were removed in the meantime.
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        paths += [Path(parent, name) for name in (*folders, *names)]
    return [path for path in sorted(paths) if not path.name.startswith(_CRASH_HANDLER)]


def _topmost(paths: Iterable[Path], folder: Path) -> list[Path]:
    depth = {path: len(path.relative_to(folder).parts) for path in paths}
    # Plug-ins and tools of a build are in deeper folders than its executable.
    return [path for path in depth if depth[path] == min(depth.values())]


def _inside_app(path: Path, label: str) -> Path:
    """Return the executable in an application of macOS; any other path unchanged."""
    if path.suffix != ".app":
        return path
    files = [p for p in sorted((path / "Contents/MacOS").glob("*")) if p.is_file()]
    # The executable usually has the application's name; other files may be helpers.
    named = [p for p in files if p.name == path.stem] or files
    if not named:
        raise FetchError(f"{label}: {path.name} has no executable in Contents/MacOS")
    return named[0]
