from __future__ import annotations

import os
import stat
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from made_archives import GAME, member, tarred, zip_link, zipped

from pipeline.envs.sources import archives
from pipeline.envs.sources.archives import ArchiveLimits, unpack
from pipeline.errors import FetchError

LIMITS = ArchiveLimits()
LINK, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}


def unpacked(tmp_path: Path, content: bytes, limits: ArchiveLimits = LIMITS) -> Path:
    archive = tmp_path / "archive"
    archive.write_bytes(content)
    folder = tmp_path / "in" / "folder"
    unpack(archive, folder, limits=limits, label="the archive")
    return folder


def refusal(tmp_path: Path, content: bytes, limits: ArchiveLimits = LIMITS) -> str:
    """The message of an archive that must be refused, after which nothing is left."""
    with pytest.raises(FetchError) as caught:
        unpacked(tmp_path, content, limits)
    assert [p.name for p in tmp_path.rglob("*")] in (["archive", "in"], ["in", "archive"])
    return str(caught.value)


def game_tar(kind: str) -> bytes:
    return tarred(*(member(name, content) for name, content in GAME.items()), kind=kind)


@pytest.mark.parametrize("kind", ["zip", "", "gz", "xz", "bz2"])
def test_every_kind_of_archive_gives_its_files(tmp_path, kind):
    folder = unpacked(tmp_path, zipped(GAME) if kind == "zip" else game_tar(kind))
    contents = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*")
             if p.is_file()}  # fmt: skip
    assert contents == GAME


def test_programs_may_be_executed_and_other_files_not_whatever_the_archive_lacks(tmp_path):
    files = {
        "Game.x86_64": b"anything",
        "UnityPlayer.so": b"\x7fELF...",
        "run": b"#!/bin/sh\n",
        "data": b"data",
        "kept": b"said to be a program",
        "root": b"said to run as its owner",
    }
    modes = {"kept": stat.S_IFREG | 0o744, "root": stat.S_IFREG | 0o6755}
    folder = unpacked(tmp_path, zipped(files, modes=modes))
    unpacked_modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    program = dict.fromkeys(["Game.x86_64", "UnityPlayer.so", "run", "kept", "root"], 0o755)
    assert unpacked_modes == program | {"data": 0o644}


def test_links_and_hard_links_inside_are_kept(tmp_path):
    folder = unpacked(
        tmp_path,
        tarred(
            member("a/file", b"content"),
            member("a/hard", linkname="a/file", **HARD),
            member("b/link", linkname="../a/file", **LINK),
        ),
    )
    assert (folder / "a/hard").read_bytes() == b"content"
    assert not (folder / "a/hard").is_symlink()
    assert (folder / "b/link").readlink() == Path("../a/file")
    assert (folder / "b/link").read_bytes() == b"content"


def test_names_that_windows_wrote_become_folders(tmp_path):
    folder = unpacked(tmp_path, zipped({"game\\": b"", "game\\data\\level": b"1"}))
    assert (folder / "game/data/level").read_bytes() == b"1"


OUTSIDE = "leads out of its folder"
BAD = {
    "zip ../": (zipped({"../evil": b"x"}), f"'../evil' {OUTSIDE}"),
    "zip inner ../": (zipped({"a/../../evil": b"x"}), f"'a/../../evil' {OUTSIDE}"),
    "zip backslash ..\\": (zipped({"..\\evil": b"x"}), rf"'..\\evil' {OUTSIDE}"),
    "zip absolute": (zipped({"/tmp/evil": b"x"}), "'/tmp/evil' has an absolute name"),  # noqa: S108
    "zip drive": (zipped({"C:\\evil": b"x"}), r"'C:\\evil' has an absolute name"),
    "zip link": (zip_link("evil", "../../etc"), f"the link 'evil' {OUTSIDE}, to '../../etc'"),
    "zip absolute link": (zip_link("evil", "/etc/passwd"), f"'evil' {OUTSIDE}, to '/etc/passwd'"),
    "zip through a link": (
        zipped({"a": b".", "a/b": b"x"}, modes={"a": stat.S_IFLNK | 0o777}),
        "the entry 'a' is a link and a folder",
    ),
    "zip device": (zipped({"d": b""}, modes={"d": stat.S_IFCHR | 0o666}), "'d' is a device file"),
    "zip control": (zipped({"a\nb": b"x"}), "has no usable name"),
    "tar ../": (tarred(member("../evil", b"x")), f"'../evil' {OUTSIDE}"),
    "tar absolute": (tarred(member("/evil", b"x")), "'/evil' has an absolute name"),
    "tar link": (
        tarred(member("evil", linkname="../../x", **LINK)),
        f"the link 'evil' {OUTSIDE}, to '../../x'",
    ),
    "tar link through links": (  # each text stays inside, but d/.. is not the folder of d
        tarred(
            member("x/y/z", type=tarfile.DIRTYPE),
            member("x/y/z/d", linkname="../../..", **LINK),
            member("evil", linkname="x/y/z/d/../up", **LINK),
        ),
        f"the link 'evil' {OUTSIDE}",
    ),
    "tar hard link": (
        tarred(member("evil", linkname="../archive", **HARD)),
        "the hard link 'evil' leads to '../archive', which is no file before it",
    ),
    "tar hard link to a link": (
        tarred(member("a", linkname="b", **LINK), member("evil", linkname="a", **HARD)),
        "the hard link 'evil' leads to 'a', which is no file",
    ),
    "tar link to nowhere": (tarred(member("a", linkname="", **LINK)), "'a' has no target"),
    "tar sparse": (
        tarred(member("a", pax_headers={"GNU.sparse.size": "many"})),
        "the archive cannot be read: invalid literal",
    ),
    "tar device": (tarred(member("sda", type=tarfile.BLKTYPE)), "'sda' is a device file"),
    "tar pipe": (tarred(member("pipe", type=tarfile.FIFOTYPE)), "'pipe' is a pipe"),
    "tar twice": (tarred(member("a", b"1"), member("./a", b"2")), "the entry './a' twice"),
    "tar link replaced": (
        tarred(member("a", linkname="b", **LINK), member("a", b"x")),
        "the entry 'a' twice",
    ),
    "no archive": (b"just text", "is no zip, tar, tar.gz, tar.bz2 or tar.xz archive"),
    "empty": (b"", "is no zip, tar"),
    "html": (b"<html>" + b" " * 600, "is no zip, tar"),
    "cut zip": (zipped(GAME)[:-30], "the archive cannot be read"),
    "cut gz": (game_tar("gz")[:-30], "the archive cannot be read"),
    "cut tar": (tarred(member("a", b"x" * 5000))[:2000], "the archive cannot be read"),
    "a program": (b"#!/bin/sh\n" + zipped(GAME), "is no zip, tar"),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_entry_that_could_do_harm_is_refused_by_name(tmp_path, bad):
    content, message = BAD[bad]
    error = refusal(tmp_path, content)
    assert message in error
    assert error.startswith("the archive: ")
    assert "\n" not in error


ZEROS = b"\0" * (4 << 20)


@pytest.fixture
def small_bombs(monkeypatch):
    """Lower the size that is harmless at any ratio from 64 MB to 1 MB."""
    monkeypatch.setattr(archives, "_HARMLESS_BYTES", 1 << 20)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path, small_bombs):
    message = refusal(tmp_path, zipped({"zeros": ZEROS}))
    assert "unpacks to 4.2 MB, more than the limit of 1.0 MB" in message


def test_a_zip_that_lies_about_its_size_is_refused_when_it_has_grown(tmp_path, small_bombs):
    content = bytearray(zipped({"zeros": ZEROS}))
    central = content.rindex(b"PK\x01\x02")
    content[central + 24 : central + 28] = (100).to_bytes(4, "little")
    message = refusal(tmp_path, bytes(content))
    assert "cannot be read" in message or "max_ratio" in message


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_compressed_tar_bomb_is_refused_while_it_unpacks(tmp_path, small_bombs, kind):
    message = refusal(tmp_path, tarred(member("zeros", ZEROS), kind=kind))
    assert "unpacks to more than 100 times the archive's size (max_ratio), noticed in 'zero" in (
        message
    )


def test_the_ratio_and_the_size_can_be_chosen(tmp_path, small_bombs):
    content = tarred(member("zeros", ZEROS), kind="gz")
    folder = unpacked(tmp_path, content, ArchiveLimits(max_ratio=2000))
    assert (folder / "zeros").stat().st_size == len(ZEROS)
    small = tmp_path / "other"
    small.mkdir()
    message = refusal(small, tarred(member("a", b"x" * 2000)), ArchiveLimits(max_bytes=1000))
    assert "more than 0.001 MB (max_unpacked_gb), noticed in 'a'" in message


def test_a_bomb_of_many_entries_is_refused(tmp_path):
    members = [member(f"f{index}") for index in range(11)]
    message = refusal(tmp_path, tarred(*members), ArchiveLimits(max_entries=10))
    assert "has more than 10 entries" in message


def test_a_header_that_says_it_is_huge_is_not_read(tmp_path):
    long_name, _ = member("././@LongLink", type=tarfile.GNUTYPE_LONGNAME)
    long_name.size = 1 << 33
    content = long_name.tobuf(tarfile.GNU_FORMAT) + b"\0" * 4096
    assert "a header of the archive says it has" in refusal(tmp_path, content)


def test_headers_of_entries_gone_by_take_no_memory(tmp_path):
    headers = {f"comment{n}": "x" * 300 for n in range(10)}
    content = tarred(
        *(member(f"d{n}", type=tarfile.DIRTYPE, pax_headers=headers) for n in range(500))
    )
    (tmp_path / "archive").write_bytes(content)
    tracemalloc.start()
    with archives.entries_of(tmp_path / "archive", max_bytes=1 << 30, label="a") as entries:
        assert sum(1 for _ in entries) == 500
    assert tracemalloc.get_traced_memory()[1] < 500_000
    tracemalloc.stop()


def test_a_locked_zip_is_refused(tmp_path):
    content = bytearray(zipped({"a": b"secret"}))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(magic) + offset] |= 1
    assert "encrypted" in refusal(tmp_path, bytes(content))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match=r"the archive: .* cannot be unpacked: No space left"):
        unpacked(tmp_path, zipped(GAME))
    assert not (tmp_path / "in/folder").exists()
