"""Valid and harmful archives for tests."""

import hashlib
import io
import stat
import tarfile
import zipfile

GAME = {"game/Game.x86_64": b"#!/bin/sh\necho played\n", "game/Game_Data/level": b"level" * 100}


def zipped(
    files: dict[str, bytes], *, modes: dict[str, int] | None = None, compressed: bool = True
) -> bytes:
    """Return a zip archive; `modes` are whole `st_mode` values, files without one have no mode."""
    buffer = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = kind
            mode = (modes or {}).get(name)
            info.create_system = 0 if mode is None else 3
            info.external_attr = (mode or 0) << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def zip_link(name: str, target: str, files: dict[str, bytes] | None = None) -> bytes:
    """Return a zip archive with a symbolic link."""
    content = {**(files or {}), name: target.encode()}
    return zipped(content, modes={name: stat.S_IFLNK | 0o777})


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    """Return an entry for `tarred`."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def tarred(*members: tuple[tarfile.TarInfo, bytes], kind: str = "") -> bytes:
    """Return a tar archive; `kind` is `gz`, `xz`, `bz2` or empty."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
