import os
import stat
import tarfile
from pathlib import Path

import pytest
from made_archives import GAME, member, tarred, zip_link, zipped

from pipeline.envs.sources.fetch import MAX_BYTES, unpack
from pipeline.errors import FetchError

LINK, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}


def unpacked(tmp_path: Path, content: bytes, max_bytes: int = MAX_BYTES) -> Path:
    archive = tmp_path / "archive"
    archive.write_bytes(content)
    folder = tmp_path / "in" / "folder"
    unpack(archive, folder, max_bytes=max_bytes, label="the archive")
    return folder


def refusal(tmp_path: Path, content: bytes, max_bytes: int = MAX_BYTES) -> str:
    """Return the error for an archive that must be refused; check that no files are left."""
    with pytest.raises(FetchError) as caught:
        unpacked(tmp_path, content, max_bytes)
    assert [p.name for p in tmp_path.rglob("*")] in (["archive", "in"], ["in", "archive"])
    return str(caught.value)


def game_tar(kind: str) -> bytes:
    return tarred(*(member(name, content) for name, content in GAME.items()), kind=kind)


@pytest.mark.parametrize("kind", ["zip", "", "gz", "xz", "bz2"])
def test_every_kind_of_archive_is_unpacked(tmp_path, kind):
    folder = unpacked(tmp_path, zipped(GAME) if kind == "zip" else game_tar(kind))
    contents = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*")
             if p.is_file()}  # fmt: skip
    assert contents == GAME


def test_executables_get_permission_to_run_and_other_files_do_not(tmp_path):
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


def test_symbolic_links_and_hard_links_within_an_archive_are_kept(tmp_path):
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


def test_backslashes_in_file_names_of_a_zip_archive_separate_folders(tmp_path):
    folder = unpacked(tmp_path, zipped({"game\\": b"", "game\\data\\level": b"1"}))
    assert (folder / "game/data/level").read_bytes() == b"1"


OUTSIDE = "which is outside the destination"
BAD = {
    "zip ../": (zipped({"../evil": b"x"}), OUTSIDE),
    "zip inner ../": (zipped({"a/../../evil": b"x"}), OUTSIDE),
    "zip backslash ..\\": (zipped({"..\\evil": b"x"}), OUTSIDE),
    "zip absolute": (zipped({"/tmp/evil": b"x"}), "'/tmp/evil' has an absolute name"),  # noqa: S108
    "zip link": (zip_link("evil", "../../etc"), OUTSIDE),
    "zip absolute link": (zip_link("evil", "/etc/passwd"), "'evil' is a link to an absolute path"),
    "zip through a link": (
        zipped({"a": b".", "a/b": b"x"}, modes={"a": stat.S_IFLNK | 0o777}),
        "the entry 'a' cannot be unpacked: File exists",
    ),
    "zip device": (zipped({"d": b""}, modes={"d": stat.S_IFCHR | 0o666}), "'d' is a special file"),
    "tar ../": (tarred(member("../evil", b"x")), OUTSIDE),
    "tar absolute": (tarred(member("/evil", b"x")), "'/evil' has an absolute name"),
    "tar link": (tarred(member("evil", linkname="../../x", **LINK)), OUTSIDE),
    "tar link through links": (  # inside as texts, but d is a link, so d/.. is elsewhere
        tarred(
            member("x/y/z", type=tarfile.DIRTYPE),
            member("evil", linkname="x/y/z/d/../up", **LINK),
            member("x/y/z/d", linkname="../../..", **LINK),
        ),
        "the link 'evil' leads out of the archive's folder",
    ),
    "tar through a link": (
        tarred(member("a", linkname=".", **LINK), member("a/b", b"x")),
        "the archive cannot be read: unable to resolve link inside archive",
    ),
    "tar hard link": (tarred(member("evil", linkname="../archive", **HARD)), OUTSIDE),
    "tar hard link to a link": (
        tarred(member("a", linkname="b", **LINK), member("evil", linkname="a", **HARD)),
        "the hard link 'evil' leads to 'a', which is not a file of the archive",
    ),
    "tar device": (tarred(member("sda", type=tarfile.BLKTYPE)), "'sda' is a special file"),
    "tar pipe": (tarred(member("pipe", type=tarfile.FIFOTYPE)), "'pipe' is a special file"),
    "no archive": (b"just text", "is not a zip, tar, tar.gz, tar.bz2 or tar.xz arch"),
    "empty": (b"", "is not a zip, tar"),
    "html": (b"<html>" + b" " * 600, "is not a zip, tar"),
    "cut zip": (zipped(GAME)[:-30], "the archive cannot be read"),
    "cut gz": (game_tar("gz")[:-30], "the archive cannot be read"),
    "cut tar": (tarred(member("a", b"x" * 5000))[:2000], "the archive cannot be read"),
    "a program": (b"#!/bin/sh\n" + zipped(GAME), "is not a zip, tar"),
}


@pytest.mark.parametrize("bad", BAD)
def test_harmful_or_damaged_archive_is_refused_in_one_line(tmp_path, bad):
    content, message = BAD[bad]
    error = refusal(tmp_path, content)
    assert message in error
    assert error.startswith("the archive: ")
    assert "\n" not in error


@pytest.mark.parametrize("kind", ["zip", "", "gz", "xz"])
def test_archive_bomb_is_refused_before_its_content_is_written(tmp_path, kind):
    zeros = b"\0" * (4 << 20)
    bomb = zipped({"a": zeros}) if kind == "zip" else tarred(member("a", zeros), kind=kind)
    message = refusal(tmp_path, bomb, len(zeros) - 1)
    assert "unpacks to more than 4.1943 MB (max_unpacked_gb), noticed in 'a'" in message
    (tmp_path / "in").rmdir()
    assert (unpacked(tmp_path, bomb, len(zeros)) / "a").read_bytes() == zeros


def test_archive_whose_entries_are_too_large_in_total_or_have_a_password_is_refused(tmp_path):
    files = tarred(*(member(f"f{n}", b"x" * 10) for n in range(10)))
    too_small = bytearray(zipped({"zeros": bytes(4 << 20)}))
    locked = bytearray(zipped({"a": b"secret"}))
    central = too_small.rindex(b"PK\x01\x02")
    too_small[central + 24 : central + 28] = (100).to_bytes(4, "little")
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(magic) + offset] |= 1
    for content, most, said in (
        (files, 99, "noticed in 'f9'"),
        (too_small, 100, "cannot be read: Bad CRC-32"),
        (locked, MAX_BYTES, "encrypted"),
    ):
        assert said in refusal(tmp_path, bytes(content), most)
        (tmp_path / "in").rmdir()


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (False, r"the archive: .* cannot be unpacked: No space left"),
        (True, r"cannot check archives; use 3\.11\.4 or newer, or"),
    ],
)
def test_unpacking_leaves_no_folder_on_a_full_disk_or_without_the_tarfile_data_filter(
    tmp_path, monkeypatch, lacks, said
):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    if lacks:
        monkeypatch.delattr(tarfile, "data_filter")
    else:
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match=said):
        unpacked(tmp_path, zipped(GAME))
    assert not (tmp_path / "in/folder").exists()
    assert not lacks or not (tmp_path / "in").exists()
