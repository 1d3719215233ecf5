"""Files that are written whole or not at all, folders with one writer, and digests of content."""

from __future__ import annotations

import codecs
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError, few

_log = logging.getLogger(__name__)

LONGEST_NAME = 200
"""Most bytes of a name: systems allow 255, and suffixes are added to it."""
_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_MOST_FILES, _DEEPEST = 2000, 3
"""Limits of the search of `similar`: it only serves a message, and a home folder may be large."""
_ALIKE_HERE, _ALIKE_BELOW = 0.65, 0.8
"""How alike a name has to be to one that is proposed, in the same folder and below it."""
_MOST_NAMED = 6
"""Entries of a folder that a message names."""
_OF_PROGRAMS = ("", ".x86_64", ".x86", ".exe", ".app")
_RANDOM = "[a-z0-9_]" * 8
"""The random part of a temporary file's name, as a pattern."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the file's name to an OSError of the block that has none, as when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """Replace a file atomically: the block writes to the temporary path that it gets.

    The temporary file is flushed to disk before it is moved to `path`, so that after a crash `path`
    holds either its old content or all of the new. If the block raises, nothing remains.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent.glob(f".{glob.escape(target.name)}.{_RANDOM}.tmp"))
    handle, temporary = _temporary(target)
    try:
        with naming(target):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        # Only now: the lock on it says that the file's writer lives.
        os.close(handle)
    sync_folder(target.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Fill a new folder: the block writes into the temporary folder that it gets.

    If the block raises, the folder is as it was before.

    Raises:
        SettingsError: The folder is there already, and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder}: is there already and not empty; name another with -o")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        yield Path(temporary)
        folder.mkdir(exist_ok=True)
        for path in Path(temporary).iterdir():  # one by one: the folder may be the working folder
            path.replace(folder / path.name)


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files of killed writers in a folder and below.

    Files that are still being written stay.
    """
    _remove_abandoned(folder.rglob(f".*.{_RANDOM}.tmp"))


@contextmanager
def sole_writer(folder: Path | str) -> Iterator[None]:
    """Lock a folder against other writers for the block; the folder need not exist.

    Temporary files of killed writers are removed first.

    The lock is the operating system's, so a killed process holds none. Its file stands beside the
    folder, which the block may rename, and is removed afterwards. The thread that holds the lock
    may take it again.

    Raises:
        SettingsError: Another process, or another thread, writes there.
    """
    from filelock import FileLock, Timeout

    real = Path(folder).resolve()
    missing = [path for path in real.parents if not path.exists()]
    real.parent.mkdir(parents=True, exist_ok=True)
    beside = os.access(real.parent, os.W_OK)  # else the folder is a volume, and is not renamed
    path = real.with_name(f".{real.name}.lock") if beside else real / ".lock"
    # One object for a path, so that a nested block counts up instead of waiting for itself.
    lock = FileLock(path, is_singleton=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        raise SettingsError(
            f"{folder}: another process (pid {holder or 'unknown'}) is writing into this folder; "
            "wait until it has ended, end it, or use another folder"
        ) from None
    try:
        path.write_text(f"{os.getpid()}\n", encoding="utf-8")
        remove_temporary(real)
        yield
    finally:
        if lock.lock_counter == 1:
            path.unlink(missing_ok=True)
        lock.release()
        for parent in missing:
            with suppress(OSError):  # no longer empty
                parent.rmdir()


def named(folder: Path | str, name: str, suffix: str = "") -> Path:
    """Return the path in `folder` of a behavior's file or folder.

    Names come from environments and files. The path is the name itself with the suffix, as in
    ML-Agents' results; a name that cannot be a path is refused.
    """
    reason = _why_no_file_name(name)
    if reason is not None:
        short_name = name if len(name) <= LONGEST_NAME else f"{name[:60]}..."
        raise SettingsError(
            f"behavior {short_name!r}: this name cannot name a folder, because {reason}; give the "
            "behavior another name in its environment, and in the files that mention it"
        )
    return Path(folder) / f"{name}{suffix}"


def _why_no_file_name(name: str) -> str | None:
    if name in ("", ".", ".."):
        return "it is empty" if not name else "it means a folder that is there already"
    if "/" in name or "\\" in name:
        return "'/' and '\\' separate folders"
    if any(character < " " or character == "\x7f" for character in name):
        return "it has a control character"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "it is no valid Unicode"
    if size > LONGEST_NAME:
        return f"it has {size} bytes, and {LONGEST_NAME} are allowed"
    if os.name == "nt" and (
        set(name) & set('<>:"|?*') or name[-1] in ". " or _WINDOWS_DEVICES.fullmatch(name)
    ):
        return "Windows does not allow it"
    return None


def as_typed(text: str) -> Path | None:
    """Return the file or folder that a path means as a person may type it; None if there is none.

    It may have quotes, `~`, `$HOME` and the separators of Windows, other letters in upper case, and
    as a program another suffix or none.
    """
    plain = os.path.expandvars(text.strip("'\" ").replace("\\", "/"))
    typed = Path(plain).expanduser() if plain else Path("/", "nothing")
    here = Path(typed.anchor)
    for part in typed.parts[bool(typed.anchor) :]:
        word, entries = Path(part), [here / part]
        if not entries[0].exists():
            with suppress(OSError):  # it may not be read
                entries += sorted(here.iterdir())
        same = [entry for entry in entries if entry.name.casefold() == part.casefold()]
        if word.suffix in _OF_PROGRAMS:
            stem = word.stem.casefold()
            same += [e for e in entries if e.suffix in _OF_PROGRAMS and e.stem.casefold() == stem]
        found = next((entry for entry in same if entry.exists()), None)
        if found is None:
            return None
        here = found
    return here


def similar(path: Path | str) -> str:
    """Return `; did you mean 'x'?` for the file most like a missing path, or an empty string.

    Only files with the same suffix count, in the nearest existing folder and a few levels below,
    where names have to be more alike. Below the root of the file system nothing is looked for.
    """
    meant = as_typed(str(path))
    if meant is not None and meant.is_file():
        return f"; did you mean '{meant}'?"
    path = Path(path)
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    n_levels = 1 if folder == Path(folder.anchor or "/") else _DEEPEST
    candidates: dict[str, Path] = {}
    for file in _below(folder, n_levels):
        if path.suffix in ("", file.suffix) or {path.suffix, file.suffix} == {".yml", ".yaml"}:
            candidates.setdefault(file.stem, file)  # the first of a stem lies highest
    for name in get_close_matches(path.stem, candidates, cutoff=_ALIKE_HERE):
        file = candidates[name]
        if file.parent == folder or get_close_matches(path.stem, [name], cutoff=_ALIKE_BELOW):
            return f"; did you mean '{file}'?"
    return ""


def near_entry(path: Path) -> str | None:
    """Return the most similar name beside a missing path; None without any."""
    with suppress(OSError):  # the folder may not be there, or may not be read
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.name[0] != ".")
        return next(iter(get_close_matches(path.name, names, n=1, cutoff=_ALIKE_HERE)), None)
    return None


def listed(path: Path | str, *suffixes: str) -> str:
    """Return `; FOLDER has a.yaml, ppo/`: what a missing path's folder has, or an empty string.

    Only subfolders count, and files with one of the suffixes; without any, every file.
    """
    folder = Path(path).parent
    names: list[str] = []
    with suppress(OSError):  # it may not be there, or may not be read
        entries = [entry for entry in sorted(folder.iterdir()) if entry.name[0] != "."]
        names += [f"{entry.name}/" for entry in entries if entry.is_dir()]
        files = [entry for entry in entries if not entry.is_dir()]
        names += [file.name for file in files if not suffixes or file.suffix in suffixes]
    if not names or folder == Path(folder.anchor or "/"):
        return ""
    return f"; {'this folder' if folder == Path() else folder} has {few(names, _MOST_NAMED)}"


def _below(folder: Path, n_levels: int) -> list[Path]:
    """Return files of a folder and of its subfolders, without hidden ones, up to the limits."""
    levels, paths = [folder], list[Path]()
    for _ in range(n_levels):
        entries: list[Path] = []
        for level in levels:
            with suppress(OSError):  # it may not be read
                entries += sorted(entry for entry in level.iterdir() if entry.name[0] != ".")
        # Not Path's own methods, which raise where a link leads into a folder of somebody else.
        entries = entries[:_MOST_FILES]
        paths += [entry for entry in entries if os.path.isfile(entry)]  # noqa: PTH113
        levels = [
            entry
            for entry in entries
            if os.path.isdir(entry) and not os.path.islink(entry)  # noqa: PTH112, PTH114
        ]
    return paths


def refuse_shared_folder(folder: Path | str, name: str, others: Iterable[str]) -> None:
    """Refuse a behavior that shares another's folder on a case-insensitive disk."""
    target = named(folder, name)
    if target.exists() and not target.is_dir():
        raise SettingsError(
            f"behavior {name!r}: the folder of this name cannot be made, because {target} is a file"
            " of the run; give the behavior another name in its environment"
        )
    for other in others:
        if other.casefold() != name.casefold():
            continue
        for path in (target, named(folder, other)):
            path.mkdir(parents=True, exist_ok=True)
        if target.samefile(named(folder, other)):
            raise SettingsError(
                f"behaviors {other!r} and {name!r}: on this disk both have the folder {target}, "
                "because it does not tell upper case from lower; rename one in the environment"
            )


def free_name(path: Path) -> Path:
    """Return the first of `<name>.1`, `<name>.2`, ... that does not exist."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def keep_aside(path: Path, reason: str) -> None:
    """Give a file that the run writes another name, because not all of it can be read."""
    kept = free_name(path)
    path.rename(kept)
    _log.warning(
        "%s: %s. The file is kept as %s; a new file has what could be read.", path, reason, kept
    )


_KINDS = {
    rb"\Z": "is empty; copy or download it again",
    rb"version https://git-lfs": "is a pointer of Git LFS; `git lfs pull` fetches the file itself",
    rb"\x7fELF": "is a program for Linux; {program}",
    rb"MZ.{0,200}\0": "is a program for Windows; {program}",
    rb"\xfe\xed\xfa[\xce\xcf]|[\xce\xcf]\xfa\xed\xfe|\xca\xfe\xba\xbe\0": "is a program for macOS; "
    "{program}",
    rb"#!.*\0": "is an executable of `pipeline env build`; {program}",
    rb"\s*<(?i:!doctype html|html)": "is a web page; download the file itself instead of its page",
    rb"\x08[\3-\x1f][\x12:B]": "is an ONNX model, which `pipeline evaluate` plays",
    rb"PK\x03\x04[^/]{26,90}/data\.pkl": "is a checkpoint; Unity and `pipeline evaluate` take the "
    ".onnx file of its run",
    rb"PK\x03\x04|7z\xbc\xaf|\x1f\x8b|BZh[1-9]1AY|\xfd7zXZ": "is an archive; unpack it first",
}
"""Files that are often given in place of another, by how they begin."""
_PROGRAM = re.compile(rb"#!|\x7fELF|MZ|\xfe\xed\xfa|[\xce\xcf]\xfa\xed\xfe|\xca\xfe\xba\xbe")
_TEXTS = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".md": "Markdown", ".csv": "CSV"}


def foreign(data: bytes, *, own: bytes = b"", program: str = "name it with --env") -> str | None:
    """Return what a file is by its first bytes, and what to do; None for every other file.

    A file of the kind that is asked for begins with `own`. `program` says what to do with a
    program.
    """
    if own and data.startswith(own):
        return None
    found = (text for start, text in _KINDS.items() if re.match(start, data, re.DOTALL))
    return next((text.format(program=program) for text in found), None)


def kind_of(path: Path | str, **options: Any) -> str | None:
    """Return what a file is, as `foreign` says it; None if it cannot be read."""
    return foreign(_head(path), **options)


def what_is(path: Path | str) -> str:
    """Return what a file is, for a message to somebody who took it for another kind."""
    name = _TEXTS.get(Path(path).suffix, "text")
    is_binary = re.search(rb"[\0-\x08\x0e-\x1a]", _head(path))
    plain = "holds binary data" if is_binary else f"is a {name} file"
    return kind_of(path) or plain


def may_be_program(path: Path) -> bool:
    """Return whether a file looks like a program of any system, executable or not."""
    return path.suffix in _OF_PROGRAMS[1:] or _PROGRAM.match(_head(path)) is not None


def _head(path: Path | str) -> bytes:
    with suppress(OSError), Path(path).open("rb") as file:
        return file.read(512)
    return b"?"


def decoded(data: bytes) -> str:
    """Return the text of a file that another program may have saved, in whatever encoding."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")  # of spreadsheets on Windows


def write_whole(path: Path | str, content: bytes | str) -> None:
    """Write `content` to `path` atomically; text is encoded as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    with whole(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, so that equal values give equal bytes."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def sha256_of(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes, or of a folder's sorted relative names and file digests."""
    path = Path(path)
    if path.is_dir():
        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_of(file)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON-like value, the same for equal values in any key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _temporary(target: Path) -> tuple[int, Path]:
    """Return the locked handle and the path of a new file beside `target`.

    Others see by the lock that the writer is alive.
    """
    # While it is written, only those may read it who may read the file that it replaces.
    mode = 0o600 | target.stat().st_mode & 0o666 if target.exists() else 0o666
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with suppress(ImportError, OSError):  # without locks nobody takes the file for abandoned
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)  # another process was faster than the lock


def _remove_abandoned(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(ImportError, OSError), path.open("r+b") as file:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError while its writer lives
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, on systems that can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
