"""Players: which file of a build is the program, and which system it is for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from pipeline.errors import FetchError, shell_command
from pipeline.files import as_typed, similar
from pipeline.settings.environments import Platform

_log = logging.getLogger(__name__)

_SUFFIXES = {"linux": (".x86_64", ".x86"), "darwin": (".app",), "windows": (".exe",)}
_LIBRARIES = (".so", ".dll", ".dylib")
_NO_PLAYER = "UnityCrashHandler"


def this_platform() -> Platform:
    """Return the system that this program runs on."""
    names = {"win32": "windows", "darwin": "darwin"}
    return cast("Platform", names.get(sys.platform, "linux"))


def find_program(
    folder: Path, *, label: str, platform: str | None = None, wanted: str | None = None
) -> Path:
    """Return the program of a build: the only player in its topmost folder that has one.

    Where no file has the suffix of a player for the platform (`.x86_64`, `.x86`, `.app`, `.exe`),
    the only executable file counts.

    Args:
        folder: the build.
        label: what errors call it.
        platform: the system that it is for; this one if None.
        wanted: path of the program inside `folder`, for a build that has several.

    Raises:
        FetchError: There is none or there are several, or they are for another platform.
    """
    platform = platform or this_platform()
    if wanted is not None:
        return _named(folder / wanted, folder, label)
    players = _players(folder)
    candidates = _topmost([p for p in players if p.suffix in _SUFFIXES[platform]], folder)
    if not candidates:
        other_players = [p for p in players if p.suffix not in _SUFFIXES[platform]]
        if other_players:
            raise FetchError(_other_platform(other_players, label, platform))
        candidates = _topmost(_executables(folder), folder)
    if len(candidates) != 1:
        raise FetchError(_not_one(candidates, folder, label))
    return _inside_app(candidates[0], label)


def meant(text: str) -> str | None:
    """Return how to write the program that a path with a slip means; None if nothing is there."""
    words = text.split(" ")
    for n in range(len(words), 0, -1):
        path = as_typed(" ".join(words[:n]))
        programs = [] if path is None else [path]
        if path is not None and path.is_dir():
            programs = _topmost(_players(path), path) or _topmost(_executables(path), path)
        if len(programs) > 1:
            return f"The folder has {', '.join(map(shell_command, programs))}; name one of them."
        if programs and n < len(words):
            option = shell_command("--env", programs[0], "--env-args", *words[n:])
            return f"There is {shell_command(programs[0])}; write its arguments as in `{option}`."
        if programs:
            return f"There is {shell_command(programs[0])}; write it so."
    if "\\" in text and os.name != "nt":
        return "This is a path of Windows; give the path that the program has on this system."
    return None


def program_of(build: Path) -> Path:
    """Return the program of a build: a program, an application of macOS, or a folder with one.

    Raises:
        FetchError: There is none or there are several, or they are for another platform.
    """
    label = os.path.relpath(build)
    if not build.exists():
        raise FetchError(
            f"{label}: does not exist{similar(label)}; name the program of a build, or its folder"
        )
    if build.is_file() or build.suffix == ".app":
        return _inside_app(build, label)
    return find_program(build, label=label)


def runs_headless(program: Path) -> bool:
    """Return whether a player has to run without a display; log it if so.

    That is a binary on a Linux without display. Scripts, such as packed simulators, decide for
    themselves; `PIPELINE_GRAPHICS=1` says that a display is not needed.
    """
    variables = ("DISPLAY", "WAYLAND_DISPLAY", "PIPELINE_GRAPHICS")
    if sys.platform != "linux" or any(os.environ.get(name) for name in variables):
        return False
    try:
        with program.open("rb") as file:
            native = file.read(4) == b"\x7fELF"
    except OSError:
        return False
    if native:
        _log.info(
            "There is no display, so %s runs with no_graphics, and cameras see nothing. "
            "PIPELINE_GRAPHICS=1 starts it as with a display.",
            program.name,
        )
    return native


def _named(path: Path, folder: Path, label: str) -> Path:
    if path.suffix == ".app" and path.is_dir():
        return _inside_app(path, label)
    if not path.is_file():
        listed = ", ".join(sorted(p.relative_to(folder).as_posix() for p in _players(folder)))
        raise FetchError(
            f"{label}: has no file {path.relative_to(folder).as_posix()!r}; its programs are "
            f"{listed or 'none that is called like one'}"
        )
    return path


def _players(folder: Path) -> list[Path]:
    """Return files, and folders of macOS, with the suffix of a player of any platform."""
    suffixes = {suffix for of_one in _SUFFIXES.values() for suffix in of_one}
    players = [path for path in _content(folder) if path.suffix in suffixes]
    return [path for path in players if path.is_dir() == (path.suffix == ".app")]


def _executables(folder: Path) -> list[Path]:
    files = [path for path in _content(folder) if path.is_file()]
    return [p for p in files if os.access(p, os.X_OK) and p.suffix not in _LIBRARIES]


def _content(folder: Path) -> list[Path]:
    paths = []
    # Not `rglob`, which fails where a file vanishes while it looks.
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        paths += [Path(parent, name) for name in (*folders, *names)]
    return [path for path in sorted(paths) if not path.name.startswith(_NO_PLAYER)]


def _topmost(paths: Iterable[Path], folder: Path) -> list[Path]:
    depth = {path: len(path.relative_to(folder).parts) for path in paths}
    # Plug-ins and tools of a player lie deeper than the player.
    return [path for path in depth if depth[path] == min(depth.values())]


def _inside_app(path: Path, label: str) -> Path:
    """Return the program inside an application of macOS; any other path as it is."""
    if path.suffix != ".app":
        return path
    files = [p for p in sorted((path / "Contents/MacOS").glob("*")) if p.is_file()]
    named = [p for p in files if p.name == path.stem] or files
    if not named:
        raise FetchError(f"{label}: {path.name} has no program in Contents/MacOS")
    return named[0]


def _other_platform(other_players: list[Path], label: str, platform: str) -> str:
    platforms = sorted(
        {name for p in other_players for name, ends in _SUFFIXES.items() if p.suffix in ends}
    )
    return (
        f"{label}: has a build for {' and '.join(platforms)} ({other_players[0].name}), but this "
        f"needs one for {platform}. Take the build for {platform}."
    )


def _not_one(candidates: list[Path], folder: Path, label: str) -> str:
    listed = ", ".join(path.relative_to(folder).as_posix() for path in candidates)
    if not candidates:
        return (
            f"{label}: expected one program, found none. It must end in .x86_64, .x86, .app or "
            ".exe, or be executable."
        )
    return (
        f"{label}: expected one program, found {listed}. Move each build into a folder of its own; "
        "for an archive, say which is meant, with 'executable'."
    )
