"""Reports of users who fetch environments and policies from a server."""

import errno
import gzip
import io
import os
import struct
from pathlib import Path

import hub_server
import made_archives
import pytest
from onnx import TensorProto, helper

from pipeline import files
from pipeline.cli import main as cli
from pipeline.envs.sources import fetch
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
def test_error_about_a_damaged_environment_archive_names_the_file(
    private_cache, web, name, archive
):
    with pytest.raises(FetchError, match=rf"{name}: .*(cannot be read: |or is damaged)"):
        fetched(web, name, archive)
    assert not any((private_cache / "environments").glob("*.unpacking"))


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_error_about_an_archive_entry_whose_name_is_too_long_gives_the_name(
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


def test_full_disk_error_names_the_file_being_written(web, tmp_path, monkeypatch):
    url, target = web.add("game.tar", b"x" * 100), tmp_path / "metrics.json"
    monkeypatch.setattr(fetch, "_download", full)
    with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/\w+\.archive'"):
        fetch.download(url, tmp_path, max_bytes=1000)
    with pytest.raises(OSError, match=rf"File too large: '{target}'"), files.whole(target):
        full()
    assert [path for path in tmp_path.iterdir() if path.suffix != ".archive"] == []


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub server with a policy; the working folder is empty."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    monkeypatch.chdir(tmp_path)
    with hub_server.hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repos["me/echo"] = {"README.md": b"# Echo", "Echo.onnx": b"1", "more/a.txt": b"2"}
        yield server


def test_pull_after_a_failed_download_starts_from_the_beginning(hub, tmp_path, capsys):
    hub.errors["Echo.onnx"] = 503
    assert cli.main(["pull", "me/echo"]) == 2
    error = capsys.readouterr().err
    assert "me/echo: " in error
    assert "the Hub answered 503: repeat the command later" in error
    assert "log in" not in error
    assert list(tmp_path.iterdir()) == []
    hub.errors.clear()
    assert cli.main(["pull", "me/echo"]) == 0
    assert {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    } == {"echo/README.md": b"# Echo", "echo/Echo.onnx": b"1", "echo/more/a.txt": b"2"}
    assert cli.main(["pull", "me/echo"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_pull_accepts_the_empty_working_folder_as_target(hub, tmp_path):
    assert cli.main(["pull", "me/echo", "-o", "."]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Echo.onnx", "README.md", "more"]


@pytest.mark.parametrize("status", [401, 403, None])
def test_login_is_advised_only_if_the_hub_refuses_access(hub, refused, monkeypatch, status):
    if status is None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    else:
        hub.errors["/api/models/me/echo"] = status
    error = refused("pull", "me/echo")
    assert ("; log in with `hf auth login` or HF_TOKEN" in error) == (status is not None)
    assert ("check the connection, the name and HF_ENDPOINT" in error) == (status is None)


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
@pytest.mark.parametrize("part", ["/objects/", "/commit/"])
def test_failed_push_to_the_hub_can_be_repeated(hub, tmp_path, capsys, part):
    folder = tmp_path / "card"
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: [onnx]\n---\n# Echo\n")
    action = helper.make_tensor_value_info("action", TensorProto.FLOAT, [1])
    graph = helper.make_graph([], "policy", [], [action])
    model = helper.make_model(graph).SerializeToString()
    (folder / "Echo.onnx").write_bytes(model)
    hub.errors[part] = 500
    assert cli.main(["push", "card", "--repo-id", "me/new"]) == 2
    assert "the Hub answered 500: repeat the command later" in capsys.readouterr().err
    assert list(hub.repos["me/new"]) == [".gitattributes"]
    hub.errors.clear()
    assert cli.main(["push", "card", "--repo-id", "me/new"]) == 0
    assert hub.repos["me/new"]["Echo.onnx"] == model
