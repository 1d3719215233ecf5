"""What people reported who fetch environments and policies from a server."""

from __future__ import annotations

import errno
import gzip
import io
import os
import struct
from pathlib import Path

import made_archives
import pytest

from pipeline import files
from pipeline.envs.sources import download, fetch
from pipeline.errors import FetchError


def fetched(web, name: str, archive: bytes) -> Path:
    return fetch.fetch(web.add(name, archive), sha256=made_archives.digest(archive))


GAME = [made_archives.member(name, content) for name, content in made_archives.GAME.items()]


def with_wrong_checksum(archive: bytes) -> bytes:
    """A gzip file whose last bytes, the checksum and the length, do not fit its content."""
    return archive[:-8] + struct.pack("<I", 12345) + archive[-4:]


def with_flipped_bit(archive: bytes) -> bytes:
    middle = len(archive) // 2
    return archive[:middle] + bytes([archive[middle] ^ 16]) + archive[middle + 1 :]


def stored_gzip(data: bytes) -> bytes:
    """A gzip file without compression, in which a flipped bit shows in the checksum alone."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=0) as file:
        file.write(data)
    return out.getvalue()


def flipped_content() -> bytes:
    archive = stored_gzip(made_archives.tarred(*GAME))
    return archive.replace(b"levellevel", b"levelLevel", 1)


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("game.tar.gz", flipped_content()),
        ("game.tar.gz", with_wrong_checksum(made_archives.tarred(*GAME, kind="gz"))),
        ("game.tar.bz2", with_flipped_bit(made_archives.tarred(*GAME, kind="bz2"))),
        ("game.tar.xz", with_flipped_bit(made_archives.tarred(*GAME, kind="xz"))),
        ("game.tar.xz", made_archives.tarred(*GAME, kind="xz")[:-9]),
        (
            "game.zip",
            made_archives.zipped(made_archives.GAME, compressed=False).replace(
                b"levellevel", b"levelLevel", 1
            ),
        ),
    ],
    ids=["gz content", "gz checksum", "bz2", "xz", "xz without its end", "zip"],
)
def test_damaged_archive_is_refused_by_name(private_cache, web, name, archive):
    with pytest.raises(FetchError, match=rf"{name}: the archive cannot be read: "):
        fetched(web, name, archive)
    assert not any((private_cache / "environments").glob("*.unpacking"))


@pytest.mark.parametrize("kind", ["", "gz", "bz2", "xz"])
def test_whole_archive_is_still_unpacked(private_cache, web, kind):
    folder = fetched(web, "game.tar", made_archives.tarred(*GAME, kind=kind))
    assert {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    } == made_archives.GAME


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_entry_with_a_name_of_300_characters_is_refused_by_archive_and_entry(
    private_cache, web, kind
):
    name = "x" * 300
    archive = (
        made_archives.zipped({name: b"1"})
        if kind == "zip"
        else made_archives.tarred(made_archives.member(name, b"1"))
    )
    with pytest.raises(
        FetchError, match=rf"game.{kind}: the entry 'x{{200}}...' cannot be unpacked: File name too"
    ):
        fetched(web, f"game.{kind}", archive)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def test_full_disk_names_the_file_that_is_downloaded(web, tmp_path, monkeypatch):
    url = web.add("game.tar", b"x" * 100)
    monkeypatch.setattr(download, "_receive", full)
    with pytest.raises(OSError, match=r"File too large: '.*game\.part'"):
        download.download(url, tmp_path / "game.archive", max_bytes=1000)


def test_full_disk_names_the_file_that_is_written(tmp_path):
    target = tmp_path / "metrics.json"
    with pytest.raises(OSError, match=rf"File too large: '{target}'"), files.whole(target):
        full()
    assert list(tmp_path.iterdir()) == []
