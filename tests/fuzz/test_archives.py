"""Archives of environments with links, paths out of their folder, wrong sizes and damage."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

from fuzzing.frame import fuzz
from hypothesis import strategies as st

from pipeline.envs.sources.executables import executable_in
from pipeline.envs.sources.fetch import unpack
from pipeline.errors import FetchError

from .mutations import mutated, usually

_USUAL = st.sampled_from(
    ("a", "b", "c", "a/b", "a/b/c", "d/e", "game.x86_64", "d/", "./f", "é/ü", "A", "x" * 120, "l")
)
_ODD = st.one_of(
    st.sampled_from(
        ("..", "../up", "a/../../up", "/abs", "C:/x", "C:x", "a\\b", "\\\\h\\s", ".", "")
    ),
    st.sampled_from(("a\0b", "a\nb", "CON", "a" * 300, "\udc80", "/".join("d" * 60), "a.", " ")),
    st.text(max_size=4),
)
_NAMES = usually(_USUAL, _ODD, 12)
_TARGETS = usually(
    st.sampled_from(("a", "b", "a/b", "l", "./l", ".", "d/../b", "f")),
    st.one_of(st.sampled_from(("../a", "..", "../../../../../etc/passwd")), _ODD),
)
_UNIQUE = st.sampled_from((str, str, id))
"""Key for unique names; `id` allows equal names in some archives."""
_CONTENTS = st.one_of(
    st.binary(max_size=40), st.sampled_from((b"#!/bin/sh\n", b"\x7fELF", bytes(1 << 20)))
)
_MODES = st.sampled_from((0, 0o644, 0o755, 0o4777, 0o177777))
_TYPES = st.sampled_from(
    (
        *(tarfile.REGTYPE,) * 8,
        *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE) * 3,
        *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE, b"z"),
    )
)
_PACKED = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@st.composite
def _tars(draw: Any) -> bytes:
    out = io.BytesIO()
    kind = draw(st.sampled_from((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)))
    with tarfile.open(fileobj=out, mode="w", format=kind, errors="surrogateescape") as tar:
        for name in draw(st.lists(_NAMES, max_size=6, unique_by=draw(_UNIQUE))):
            member = tarfile.TarInfo(name)
            member.type, member.mode = draw(_TYPES), draw(_MODES)
            content = draw(_CONTENTS)
            if member.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                before = tar.getnames() or ["a"]
                member.linkname = draw(st.one_of(st.sampled_from(before), _TARGETS))
            elif member.isreg():
                member.size = len(content)
            if draw(st.integers(0, 9)) == 0:
                member.pax_headers = {
                    draw(st.sampled_from(("path", "size", "linkpath", "GNU.sparse.size"))): draw(
                        st.sampled_from(("7", "-1", "99999999999999", "../up", "x"))
                    )
                }
            with contextlib.suppress(ValueError):  # the name is too long for the format
                tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


@st.composite
def _packed_tars(draw: Any) -> bytes:
    """Return a compressed tar archive, damaged before or after its compression."""
    packed = draw(st.sampled_from(sorted(_PACKED)))
    return draw(mutated(st.builds(_PACKED[packed], mutated(_tars(), most=1)), most=1))


@st.composite
def _zips(draw: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in draw(st.lists(_NAMES, max_size=6, unique_by=draw(_UNIQUE))):
            info = zipfile.ZipInfo("x")
            info.filename = info.orig_filename = name
            kind = draw(st.sampled_from((0, stat.S_IFREG, stat.S_IFREG, stat.S_IFLNK)))
            other = draw(st.sampled_from((0, 0, 0, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR)))
            info.external_attr = ((other or kind) | draw(_MODES) & 0o7777) << 16
            info.compress_type = draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
            link = stat.S_ISLNK(info.external_attr >> 16)
            content = draw(_TARGETS).encode(errors="replace") if link else draw(_CONTENTS)
            with warnings.catch_warnings(), contextlib.suppress(ValueError):
                warnings.simplefilter("ignore")  # warnings of names that occur twice
                archive.writestr(info, content)
    return out.getvalue()


_ARCHIVES = usually(
    st.one_of(_packed_tars(), mutated(_zips(), most=2)), st.binary(max_size=600), 20
)


def _tar(**fields: Any) -> bytes:
    member = tarfile.TarInfo("a")
    for name, value in fields.items():
        setattr(member, name, value)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member)
    return out.getvalue()


_FAILED_ONCE = (
    _tar(type=tarfile.SYMTYPE, linkname=""),
    _tar(pax_headers={"GNU.sparse.size": "../up"}),
)


@fuzz(_ARCHIVES, examples=150, explicit=_FAILED_ONCE)
def test_random_archives_are_unpacked_into_the_target_folder_or_refused(
    data: bytes, folder: Path
) -> None:
    archive, out = folder / "archive", folder / "out"
    archive.write_bytes(data)
    out.parent.joinpath("beside").write_text("precious")
    try:
        unpack(archive, out, max_bytes=3 << 19, label="archive")
    except BaseException:
        assert not out.exists()
        raise
    finally:
        assert sorted(path.name for path in folder.iterdir() if path != out) == [
            "archive",
            "beside",
        ]
        assert (folder / "beside").read_text() == "precious"
    size = 0
    for path in out.rglob("*"):
        assert Path(os.path.realpath(path)).is_relative_to(out)
        size += path.lstat().st_size
        assert path.is_symlink() or path.lstat().st_mode & 0o7777 in (0o644, 0o755)
    assert size <= 3 << 19
    with contextlib.suppress(FetchError):
        assert executable_in(out, label="archive", platform="linux").is_relative_to(out)
