import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interpreter import variables
from made_archives import GAME, digest, zipped

from pipeline.envs.sources import fetch
from pipeline.errors import FetchError

ROOT = Path(__file__).parents[4]
ARCHIVE = zipped(GAME, compressed=False)
CHUNK = 1 << 16
BIG = zipped({**GAME, "game/noise": os.urandom(3 << 20)}, compressed=False)


EVIL = zipped({"../evil": b"x"})


@pytest.fixture(autouse=True)
def cache(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for one test, without pauses between attempts to download."""
    monkeypatch.setattr(fetch, "PAUSE_S", 0.0)
    return private_cache / "environments"


def left(cache: Path) -> list[str]:
    """Return the names of the files in the cache, except locks."""
    names = [p.relative_to(cache).as_posix() for p in cache.rglob("*")]
    return sorted(name for name in names if not name.startswith("locks") and name != "downloads")


def played(folder: Path) -> bool:
    return (folder / "game/Game.x86_64").read_bytes() == GAME["game/Game.x86_64"]


def test_archive_is_downloaded_once_and_then_read_from_the_cache(web, cache):
    url = web.add("game.zip", ARCHIVE)
    folder = fetch.fetch(url, sha256=digest(ARCHIVE).upper())
    assert folder == cache / digest(ARCHIVE)
    assert played(folder)
    assert os.access(folder / "game/Game.x86_64", os.X_OK)
    assert fetch.fetch(url, sha256=digest(ARCHIVE)) == folder
    assert fetch.fetch("http://127.0.0.1:1/elsewhere.zip", sha256=digest(ARCHIVE)) == folder
    assert len(web.asked) == 1
    assert {name.partition("/")[0] for name in left(cache)} == {digest(ARCHIVE)}


def test_url_of_an_archive_may_name_a_local_file(tmp_path, cache):
    path = tmp_path / "my game.zip"
    path.write_bytes(ARCHIVE)
    assert played(fetch.fetch(path.as_uri(), sha256=digest(ARCHIVE)))
    assert path.exists()
    missing = (tmp_path / "no.zip").as_uri()
    with pytest.raises(FetchError, match=r"no\.zip: there is no such file"):
        fetch.fetch(missing, sha256="0" * 64)


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (ARCHIVE, {"sha256": "0" * 64}, f"expected {'0' * 64} but got {digest(ARCHIVE)}"),
        (ARCHIVE, {"sha256": "123"}, "needs 64 hex digits"),
        (EVIL, {"sha256": digest(EVIL)}, r"game\.zip\S*: .*'\.\./evil' would be extracted to"),
    ],
    ids=["other digest", "no digest", "harmful"],
)
def test_refused_archive_leaves_no_files_in_the_cache_and_no_secret_in_the_log(
    web, cache, caplog, content, options, said
):
    url = web.add("game.zip", content).replace("http://", "http://me:word@") + "?token=secret"
    with pytest.raises(FetchError, match=said) as caught:
        fetch.fetch(url, **options)
    assert left(cache) == []
    text = str(caught.value) + caplog.text
    assert "word" not in text
    assert "secret" not in text


def test_an_archive_above_the_limit_is_not_downloaded(web, cache):
    url = web.add("game.zip", BIG)
    with pytest.raises(FetchError, match=r"has more than 1 MB, the limit \(max_unpacked_gb\)"):
        fetch.fetch(url, sha256=digest(BIG), max_bytes=1_000_000)
    assert left(cache) == []


def test_download_is_retried_after_a_dropped_connection_and_leaves_no_files_if_it_fails(web, cache):
    url = web.add("game.zip", BIG)
    web.drops = [20 * CHUNK + 5, 0]
    assert played(fetch.fetch(url, sha256=digest(BIG)))
    assert len(web.asked) == 3
    web.drops = [10] * fetch.ATTEMPTS
    with pytest.raises(FetchError, match=r"game\.zip: the connection failed .*5 times in a row"):
        fetch.digest_of(url)
    assert {name.partition("/")[0] for name in left(cache)} == {digest(BIG)}


@pytest.mark.parametrize("during", ["fetch._check_size", "fetch.shutil.copyfileobj"])
def test_interrupted_download_leaves_no_files(web, cache, monkeypatch, during):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"pipeline.envs.sources.{during}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(web.add("game.zip", BIG), sha256=digest(BIG))
    assert left(cache) == []


def test_download_is_tried_again_after_a_server_error_but_not_after_status_404(web, cache):
    url = web.add("game.zip", ARCHIVE)
    web.errors = [503, 429]
    assert played(fetch.fetch(url, sha256=digest(ARCHIVE)))
    with pytest.raises(FetchError, match=r"other\.zip: the server answered 404"):
        fetch.fetch(f"{web.url}/other.zip", sha256="0" * 64)
    assert len(web.asked) == 4
    web.errors = [500] * fetch.ATTEMPTS
    with pytest.raises(FetchError, match=r"the server answered 500 .*5 times in a row"):
        fetch.fetch(f"{web.url}/other.zip", sha256="0" * 64)


def test_unreachable_download_server_is_reported_in_one_line(cache):
    with pytest.raises(FetchError) as caught:
        fetch.fetch("http://127.0.0.1:1/game.zip", sha256="0" * 64)
    assert str(caught.value).startswith("http://127.0.0.1:1/game.zip: the connection failed (")
    assert "Connection refused" in str(caught.value)
    assert str(caught.value).endswith("), 5 times in a row. Check the connection and try again")
    assert left(cache) == []


@pytest.mark.parametrize("url", ["ftp://host/game.zip", "http:///game.zip", "game.zip"])
def test_invalid_url_of_an_archive_is_refused(url, cache):
    with pytest.raises(FetchError, match="is not a URL that can be fetched"):
        fetch.fetch(url, sha256="0" * 64)
    with pytest.raises(FetchError, match=r"http://\[.: is not a URL \(Invalid IPv6 URL\)"):
        fetch.digest_of("http://[")
    with pytest.raises(FetchError, match="three slashes"):
        fetch.fetch("file://folder/game.zip", sha256="0" * 64)


def test_digest_of_an_archive_is_computed_without_unpacking_and_the_download_is_used_later(
    web, cache
):
    url = web.add("game.zip", ARCHIVE)
    assert fetch.digest_of(url) == digest(ARCHIVE)
    assert not (cache / digest(ARCHIVE)).exists()
    assert played(fetch.fetch(url, sha256=digest(ARCHIVE)))
    assert len(web.asked) == 1
    web.add("game.zip", BIG)
    assert fetch.digest_of(url) == digest(BIG)


def test_files_of_a_killed_download_are_removed_by_the_next_download(web, cache):
    unfinished = cache / f"{digest(ARCHIVE)}.unpacking/old"
    unfinished.mkdir(parents=True)
    old = cache / "downloads/abandoned.part"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (0, 0))
    folder = fetch.fetch(web.add("game.zip", ARCHIVE), sha256=digest(ARCHIVE))
    assert not (folder / "old").exists()
    assert not unfinished.parent.exists()
    assert not old.exists()


def test_two_processes_share_one_download(web, cache):
    url = web.add("game.zip", BIG)
    web.hold.clear()
    command = [
        sys.executable,
        "-m",
        "pipeline.cli.main",
        "env",
        "fetch",
        url,
        "--sha256",
        digest(BIG),
    ]
    processes = [
        subprocess.Popen(  # noqa: S603  # this interpreter
            command, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert web.arrived.acquire(timeout=30)
    with ThreadPoolExecutor(2) as pool:
        is_waiting = threading.Event()
        futures = [pool.submit(_listen, process, is_waiting) for process in processes]
        assert is_waiting.wait(30), "neither process waits for the other"
        web.hold.set()
        logs = [future.result(60) for future in futures]
    programs = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0], logs
    assert programs == {str(cache / digest(BIG) / "game/Game.x86_64")}
    assert len(web.asked) == 1


def _listen(process: subprocess.Popen[str], is_waiting: threading.Event) -> str:
    """Return the log of a process until its end; set the event when the log says that it waits."""
    lines = []
    for line in process.stderr or ():
        lines.append(line)
        if "Waiting for another process" in line:
            is_waiting.set()
    return "".join(lines)
