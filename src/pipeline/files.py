"""Atomic writes of files, folders with a single writer, similar names, and digests of content."""

import codecs
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError, few

_log = logging.getLogger(__name__)

LONGEST_NAME = 200
"""Maximum bytes of a name: systems allow 255, and suffixes are added."""
_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_MOST_FILES, _DEEPEST = 2000, 3
"""Maximum number of entries that `similar` reads on each level of folders, and maximum number of
levels. A folder may be very large, and the search only improves a message."""
_ALIKE_HERE, _ALIKE_BELOW = 0.65, 0.8
"""Minimum similarity of a name that `similar` proposes: in the searched folder, and below it."""
_MOST_NAMED = 6
"""Maximum number of a folder's entries that a message names."""
_OF_PROGRAMS = ("", ".x86_64", ".x86", ".exe", ".app")
_RANDOM = "[a-z0-9_]" * 8
"""Glob pattern of the random part of a temporary file's name."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the file name `path` to an OSError of the block without one, as of a full disk."""
    try:
        yield
    except OSError as error:
        # Errors of write() and fsync() do not contain the file's name.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """Replace a file atomically: yield a temporary path for the `with` block to write to.

    The temporary file is flushed to disk before it is renamed, so that after a crash `path` has its
    old or its complete new content. If the block raises, the temporary file is deleted.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Temporary files of killed writers of this file are removed, or they would accumulate.
    _remove_abandoned(target.parent.glob(f".{glob.escape(target.name)}.{_RANDOM}.tmp"))
    handle, temporary = _temporary(target)
    try:
        with naming(target):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        if target.exists():
            # A file that replaces an old file gets the permissions of the old file; a new file
            # keeps the permissions that the umask gives.
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        # The handle is closed last: its lock shows that the file's writer is alive.
        os.close(handle)
    sync_folder(target.parent)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files become those of `folder` unless the block raises."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder}: exists and is not empty; give another folder with -o")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is on the same file system, because a rename works only within one.
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        yield Path(temporary)
        folder.mkdir(exist_ok=True)
        # The entries are moved one by one, because `folder` itself may be the working folder, which
        # must not be replaced.
        for path in Path(temporary).iterdir():
            path.replace(folder / path.name)


def remove_temporary(folder: Path) -> None:
    """Remove temporary files of killed writers below a folder; files being written are kept."""
    _remove_abandoned(folder.rglob(f".*.{_RANDOM}.tmp"))


@contextmanager
def sole_writer(folder: Path | str) -> Iterator[None]:
    """Lock a folder against other writers during the block; the folder need not exist.

    The operating system releases the lock of a killed process, whose temporary files are removed.
    The thread that holds the lock may acquire it again.

    Raises:
        SettingsError: Another process or thread writes into the folder.
    """
    from filelock import FileLock, Timeout

    real = Path(folder).resolve()
    missing = [path for path in real.parents if not path.exists()]
    real.parent.mkdir(parents=True, exist_ok=True)
    # The lock file is next to the folder, because the folder may be renamed. If the parent folder
    # cannot be written, as for a mounted volume, the lock file is in the folder itself.
    in_parent = os.access(real.parent, os.W_OK)
    path = real.with_name(f".{real.name}.lock") if in_parent else real / ".lock"
    # There is one lock object per path, so that a nested block increments its counter and does not
    # wait.
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
        # The process id is for the error message of the next process that wants the folder.
        path.write_text(f"{os.getpid()}\n", encoding="utf-8")
        remove_temporary(real)
        yield
    finally:
        # Only the outermost block removes the lock file.
        if lock.lock_counter == 1:
            path.unlink(missing_ok=True)
        lock.release()
        for parent in missing:
            with suppress(OSError):  # a parent with other files stays
                parent.rmdir()


def named(folder: Path | str, name: str, suffix: str = "") -> Path:
    """Return the path in `folder` of a behavior's file or folder, named as in ML-Agents' results.

    A name that cannot be a file name is refused.
    """
    # Names come over the network, and `../x` must not leave the run's folder.
    reason = _why_no_file_name(name)
    if reason is not None:
        short_name = name if len(name) <= LONGEST_NAME else f"{name[:60]}..."
        raise SettingsError(
            f"behavior {short_name!r}: this name cannot be a folder's name, because {reason}; give "
            "the behavior another name in its environment, and in the files that mention it"
        )
    return Path(folder) / f"{name}{suffix}"


def _why_no_file_name(name: str) -> str | None:
    if name in ("", ".", ".."):
        return "it is empty" if not name else "it means an existing folder"
    if "/" in name or "\\" in name:
        return "'/' and '\\' separate folders"
    if any(character < " " or character == "\x7f" for character in name):
        return "it has a control character"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if size > LONGEST_NAME:
        return f"it has {size} bytes, and {LONGEST_NAME} are allowed"
    if os.name == "nt" and (
        set(name) & set('<>:"|?*') or name[-1] in ". " or _WINDOWS_DEVICES.fullmatch(name)
    ):
        return "Windows does not allow it"
    return None


def as_typed(text: str) -> Path | None:
    """Return the existing file or folder that a mistyped path probably means; None if none fits.

    It may have quotes, `~`, `$HOME`, backslashes, another case, or an executable's other suffix.
    """
    plain = os.path.expandvars(text.strip("'\" ").replace("\\", "/"))
    typed = Path(plain).expanduser() if plain else Path("/", "nothing")
    # The path is followed part by part from the root, because any part may be mistyped.
    here = Path(typed.anchor)
    for part in typed.parts[bool(typed.anchor) :]:
        word, entries = Path(part), [here / part]
        if not entries[0].exists():
            with suppress(OSError):  # the folder may be unreadable
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
    """Return `; did you mean 'x'?` for the file most similar to a missing path; else "".

    Files with its suffix are searched in the nearest existing folder and a few levels below.
    """
    meant = as_typed(str(path))
    if meant is not None and meant.is_file():
        return f"; did you mean '{meant}'?"
    path = Path(path)
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    # A search from the root would read the whole disk.
    n_levels = 1 if folder == Path(folder.anchor or "/") else _DEEPEST
    candidates: dict[str, Path] = {}
    for file in _below(folder, n_levels):
        if path.suffix in ("", file.suffix) or {path.suffix, file.suffix} == {".yml", ".yaml"}:
            # Of several files with one stem, the first is kept, because `_below` lists the highest
            # level first.
            candidates.setdefault(file.stem, file)
    for name in get_close_matches(path.stem, candidates, cutoff=_ALIKE_HERE):
        file = candidates[name]
        if file.parent == folder or get_close_matches(path.stem, [name], cutoff=_ALIKE_BELOW):
            return f"; did you mean '{file}'?"
    return ""


def near_entry(path: Path) -> str | None:
    """Return the most similar name in the folder of the missing `path`; None without one."""
    with suppress(OSError):  # the folder may not exist, or not be readable
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.name[0] != ".")
        return next(iter(get_close_matches(path.name, names, n=1, cutoff=_ALIKE_HERE)), None)
    return None


def listed(path: Path | str, *suffixes: str) -> str:
    """Return a missing path's subfolders and files (with `suffixes`), as `; FOLDER has a, b/`."""
    folder = Path(path).parent
    names: list[str] = []
    with suppress(OSError):  # the folder may be missing or unreadable
        entries = [entry for entry in sorted(folder.iterdir()) if entry.name[0] != "."]
        names += [f"{entry.name}/" for entry in entries if entry.is_dir()]
        files = [entry for entry in entries if not entry.is_dir()]
        names += [file.name for file in files if not suffixes or file.suffix in suffixes]
    if not names or folder == Path(folder.anchor or "/"):
        return ""
    return f"; {'this folder' if folder == Path() else folder} has {few(names, _MOST_NAMED)}"


def _below(folder: Path, n_levels: int) -> list[Path]:
    """Return the files in a folder's upper levels: none hidden, `_MOST_FILES` a level at most."""
    levels, paths = [folder], list[Path]()
    for _ in range(n_levels):
        entries: list[Path] = []
        for level in levels:
            with suppress(OSError):  # the folder may be unreadable
                entries += sorted(entry for entry in level.iterdir() if entry.name[0] != ".")
        entries = entries[:_MOST_FILES]
        # `os.path` is used, because Path's methods raise for a link into a folder that may not be
        # read.
        paths += [entry for entry in entries if os.path.isfile(entry)]  # noqa: PTH113
        levels = [
            entry
            for entry in entries
            if os.path.isdir(entry) and not os.path.islink(entry)  # noqa: PTH112, PTH114
        ]
    return paths


def refuse_shared_folder(folder: Path | str, name: str, others: Iterable[str]) -> None:
    """Refuse a behavior that would share another behavior's folder on a case-insensitive disk."""
    target = named(folder, name)
    if target.exists() and not target.is_dir():
        raise SettingsError(
            f"behavior {name!r}: the folder of this name cannot be made, because {target} is a file"
            " of the run; give the behavior another name in its environment"
        )
    for other in others:
        if other.casefold() != name.casefold():
            continue
        # Only the disk itself knows whether it ignores case, so both folders are made and compared.
        for path in (target, named(folder, other)):
            path.mkdir(parents=True, exist_ok=True)
        if target.samefile(named(folder, other)):
            raise SettingsError(
                f"behaviors {other!r} and {name!r}: on this disk both have the folder {target}, "
                "because it ignores the case of names; rename one of them in the environment"
            )


def free_name(path: Path) -> Path:
    """Return the first of `<name>.1`, `<name>.2`, ... that does not exist."""
    # Numbers count up, so the highest is the latest.
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


class RunFolder:
    """Folder of a run, which `run_folder` replaces by the earlier run unless `start` was called.

    Attributes:
        path: the folder.
        replaced: new path of the renamed folder of an earlier run; None if none was renamed.
        started: whether the run has started.
    """

    # A dataclass would need `dataclasses`, which adds a twentieth to the time of `--help`.
    def __init__(self, path: Path, replaced: Path | None = None) -> None:
        self.path, self.replaced, self.started = path, replaced, False

    def start(self) -> None:
        """Record that the run has started: from now on its folder stays, even after an error."""
        self.started = True
        if self.replaced is not None:
            _log.info("Renamed the folder of the earlier run to %s.", self.replaced)

    def current_path(self, path: Path) -> Path:
        """Return the present path of a file, which may be in the renamed earlier run."""
        # Only files inside the run's folder moved with it.
        if self.replaced is None or not path.is_relative_to(self.path):
            return path
        return self.replaced / path.relative_to(self.path)


@contextmanager
def run_folder(folder: Path, *, replace: bool) -> Iterator[RunFolder]:
    """Create a run's folder for a `with` block, which calls `start` once the run has started.

    With `replace`, the folder of the earlier run is renamed to `<folder>.1`, `<folder>.2`, ...,
    because it may be hours of training. If the block ends before the run has started, a new folder
    is deleted, and the earlier run gets its name back.
    """
    is_new = replace or not folder.exists()
    run = RunFolder(folder, free_name(folder) if replace else None)
    if run.replaced is not None:
        folder.rename(run.replaced)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield run
    finally:
        if is_new and not run.started:
            shutil.rmtree(folder, ignore_errors=True)
            if run.replaced is not None:
                run.replaced.rename(folder)


def keep_aside(path: Path, reason: str) -> None:
    """Rename a file that cannot be read completely, and log the `reason` and the new name."""
    kept = free_name(path)
    path.rename(kept)
    _log.warning(
        "%s: %s. The file was renamed to %s; its valid part is in a new file.", path, reason, kept
    )


# The patterns are tried in this order; `{program}` is replaced by advice for executables.
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
"""For each pattern of a file's first bytes: a text that gives the type of the file, and says what
to do with the file."""
_PROGRAM = re.compile(rb"#!|\x7fELF|MZ|\xfe\xed\xfa|[\xce\xcf]\xfa\xed\xfe|\xca\xfe\xba\xbe")
_TEXTS = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".md": "Markdown", ".csv": "CSV"}


def foreign(data: bytes, *, own: bytes = b"", program: str = "give it with --env") -> str | None:
    """Return the type of a file by its first bytes, and what to do with it; None if unknown.

    None also for the expected type, which begins with `own`; `program` is for executables.
    """
    if own and data.startswith(own):
        return None
    found = (text for start, text in _KINDS.items() if re.match(start, data, re.DOTALL))
    return next((text.format(program=program) for text in found), None)


def kind_of(path: Path | str, **options: Any) -> str | None:
    """Return the text of `foreign` about a file; None if `foreign` does not know its type."""
    return foreign(_head(path), **options)


def what_is(path: Path | str) -> str:
    """Return a text with a file's type, for a message about a file of a wrong type."""
    name = _TEXTS.get(Path(path).suffix, "text")
    is_binary = re.search(rb"[\0-\x08\x0e-\x1a]", _head(path))
    plain = "has binary data" if is_binary else f"is a {name} file"
    return kind_of(path) or plain


def may_be_program(path: Path) -> bool:
    """Return whether a file looks like an executable; it need not have the permission to run."""
    return path.suffix in _OF_PROGRAMS[1:] or _PROGRAM.match(_head(path)) is not None


def _head(path: Path | str) -> bytes:
    with suppress(OSError), Path(path).open("rb") as file:
        return file.read(512)
    return b"?"


def decoded(data: bytes) -> str:
    """Return the text of a file in UTF-8, UTF-16 or Windows-1252, as other programs may save it."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # Spreadsheets on Windows write this encoding.
        return data.decode("cp1252", errors="replace")


def write_whole(path: Path | str, content: bytes | str) -> None:
    """Write `content` to `path` atomically; text is encoded as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    with whole(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, so that equal values give equal bytes."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def zip_entry(name: str) -> zipfile.ZipInfo:
    """Return the entry of a zip archive for a file; the entry depends only on the file's name."""
    # This is the earliest time that zip can store. A fixed time is stored, because the bytes must
    # not depend on the date.
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    # 3 means Unix: zipfile would store the system on which it runs.
    info.create_system = 3
    info.external_attr = 0o100644 << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def sha256_of(path: Path | str) -> str:
    """Return the hex SHA-256 of a file, or of a folder's sorted file names and digests."""
    path = Path(path)
    if path.is_dir():
        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            # Names have "/" on every system, so that equal folders have equal digests.
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_of(file)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """Return the hex SHA-256 of a JSON-like value, equal for equal values in any key order."""
    # `default=str` encodes paths, and other objects that JSON does not have, as text.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _temporary(target: Path) -> tuple[int, Path]:
    """Return the handle and the path of a new file beside `target`; its lock shows a writer."""
    # The new file has the permissions of the file that it will replace, so that only users who may
    # read the old file can read the new file.
    mode = 0o600 | target.stat().st_mode & 0o666 if target.exists() else 0o666
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        # Without fcntl or locks, temporary files of killed writers are not cleaned up.
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink:
            return handle, path
        os.close(handle)  # another process has removed the file before it was locked


def _remove_abandoned(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(ImportError, OSError), path.open("r+b") as file:
            import fcntl

            # This raises OSError while the writer is alive.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, on POSIX systems."""
    if os.name != "posix":
        return
    # A rename is only durable when its folder has been flushed, too.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
