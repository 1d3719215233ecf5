import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interpreter import python

from pipeline import files
from pipeline.errors import SettingsError


def killed(program: str, *arguments: Path) -> None:
    """Run a program that must end by its own SIGKILL."""
    completed = python("-c", PREPARED + program, *arguments, check=False, timeout=60)
    assert completed.returncode == -signal.SIGKILL


PREPARED = "import os, sys; from pipeline import files"
KILLED_WRITING = """
with files.whole(sys.argv[1]) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), 9)
"""
KILLED_HOLDING = """
with files.sole_writer(sys.argv[1]):
    os.kill(os.getpid(), 9)
"""


def second_writer(folder: Path | str) -> BaseException | None:
    """Try to write into a folder from another thread; return the exception raised there."""

    def write() -> None:
        with files.sole_writer(folder):
            pass

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(write).exception()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_temporary_file_of_a_killed_writer_is_removed_by_the_next_write(tmp_path):
    killed(KILLED_WRITING, tmp_path / "model.pt")
    killed(KILLED_WRITING, tmp_path / "other.pt")
    assert len(names(tmp_path)) == 2
    files.write_whole(tmp_path / "model.pt", "whole")
    assert "model.pt" in names(tmp_path)
    (leftover,) = set(names(tmp_path)) - {"model.pt"}
    assert leftover.startswith(".other.pt.")


def test_remove_temporary_deletes_only_files_of_killed_writers(tmp_path):
    (tmp_path / "Walker").mkdir()
    killed(KILLED_WRITING, tmp_path / "Walker" / "replay-128.npz")
    assert len(names(tmp_path / "Walker")) == 1
    lookalikes = [
        ".tmp",
        "a.abcd1234.tmp",
        ".a.tmp",
        ".a.ABCD1234.tmp",
        ".a.abcd12345.tmp",
        "b.npz",
    ]
    for name in lookalikes:
        (tmp_path / "Walker" / name).touch()
    files.remove_temporary(tmp_path)
    assert names(tmp_path / "Walker") == sorted(lookalikes)
    files.remove_temporary(tmp_path / "missing")


def test_temporary_file_of_a_living_writer_is_kept(tmp_path):
    with files.whole(tmp_path / "model.pt") as temporary:
        temporary.write_text("slow")
        files.remove_temporary(tmp_path)
        files.write_whole(tmp_path / "model.pt", "fast")
        assert temporary.exists()
    assert (tmp_path / "model.pt").read_text() == "slow"
    assert names(tmp_path) == ["model.pt"]


def test_glob_characters_in_a_file_name_are_taken_literally(tmp_path):
    (tmp_path / ".a.abcd1234.tmp").touch()
    files.write_whole(tmp_path / "[ab]", "x")
    assert names(tmp_path) == [".a.abcd1234.tmp", "[ab]"]


def test_error_for_a_locked_folder_names_the_process_that_holds_the_lock(tmp_path):
    folder = tmp_path / "results" / "first"
    with files.sole_writer(folder):
        error = second_writer(folder)
        with files.sole_writer(str(folder)):  # the same thread may lock the folder again
            pass
        second_error = second_writer(folder)
    for raised in (error, second_error):
        assert isinstance(raised, SettingsError)
        assert str(folder) in str(raised)
        assert f"pid {os.getpid()}" in str(raised)
    assert second_writer(folder) is None
    assert names(tmp_path) == []  # no folder has been made either


def test_folder_and_symbolic_link_to_the_folder_share_one_lock(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    with files.sole_writer(tmp_path / "real"):
        assert isinstance(second_writer("link"), SettingsError)


def test_locked_folder_may_be_renamed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with files.sole_writer(folder):
        folder.rename(tmp_path / "run.1")
        assert isinstance(second_writer(folder), SettingsError)
    assert names(tmp_path) == ["run.1"]


def test_lock_of_a_killed_process_is_taken_and_removed_by_the_next_process(tmp_path):
    killed(KILLED_HOLDING, tmp_path / "run")
    with files.sole_writer(tmp_path / "run"):
        assert names(tmp_path) == [".run.lock"]
    assert names(tmp_path) == []


def test_folder_whose_parent_is_unwritable_is_locked_by_a_file_in_the_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with files.sole_writer(tmp_path / "run"):
        assert names(tmp_path / "run") == [".lock"]
    assert names(tmp_path / "run") == []
    assert names(tmp_path) == ["run"]


ORDINARY = ["3DBall", "My Behavior", "Läufer", "a.b", ".a", "a-1", "[ab]*", "CON", "a:b", "é" * 100]
IMPOSSIBLE = {
    "": "empty",
    ".": "an existing folder",
    "..": "an existing folder",
    "a/b": "separate folders",
    "../../../evil": "separate folders",
    "/etc/evil": "separate folders",
    "a\\b": "separate folders",
    "a\0b": "control character",
    "a\nb": "control character",
    "\x7f": "control character",
    "\ud800": "Unicode",
    "a" * 201: "201 bytes",
    "é" * 101: "202 bytes",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_file_of_a_behavior_has_the_name_of_the_behavior(name, tmp_path):
    path = files.named(tmp_path, name, "-12.pt")
    assert path == tmp_path / f"{name}-12.pt"
    files.write_whole(path, "x")  # with the suffix of the temporary file
    assert [file.name for file in tmp_path.iterdir()] == [f"{name}-12.pt"]


@pytest.mark.parametrize(("name", "why"), IMPOSSIBLE.items())
def test_behavior_name_that_cannot_be_a_file_name_is_refused(name, why, tmp_path):
    with pytest.raises(SettingsError, match=why) as caught:
        files.named(tmp_path, name, ".onnx")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["con", "NUL.txt", "COM1", "a:b", "a?", "a.", "a "])
def test_behavior_names_that_windows_refuses_are_refused_on_windows(name, tmp_path, monkeypatch):
    assert files.named(tmp_path, name).name == name
    monkeypatch.setattr(files.os, "name", "nt")
    with pytest.raises(SettingsError, match="Windows"):
        files.named(".", name)


def test_behavior_names_that_differ_only_in_case_are_refused_if_the_disk_ignores_case(
    tmp_path, monkeypatch
):
    files.refuse_shared_folder(tmp_path, "walker", ["Walker", "Other"])  # other case, other folder
    monkeypatch.setattr(Path, "samefile", lambda *_: True)
    files.refuse_shared_folder(tmp_path, "walker", ["Other"])
    with pytest.raises(SettingsError, match="'Walker' and 'walker': on this disk both"):
        files.refuse_shared_folder(tmp_path, "walker", ["Other", "Walker"])


def test_behavior_named_like_a_file_of_the_run_is_refused(tmp_path):
    (tmp_path / "progress.csv").touch()
    with pytest.raises(SettingsError, match="is a file of the run"):
        files.refuse_shared_folder(tmp_path, "progress.csv", [])


def test_folder_is_unchanged_if_an_error_occurs_while_its_files_are_written(tmp_path):
    for folder in (tmp_path / "new", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(FileExistsError), files.whole_folder(folder) as part:
            [(part / "half").mkdir() for _ in range(2)]
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]
        with files.whole_folder(folder) as part:
            (part / "half").write_text("1")
            (part / "other").mkdir()
        assert sorted(path.name for path in folder.iterdir()) == ["half", "other"]
        with pytest.raises(SettingsError, match="not empty"), files.whole_folder(folder):
            pass
        shutil.rmtree(folder)


def test_similar_file_is_proposed_although_an_entry_of_its_folder_is_unreadable(
    tmp_path, monkeypatch
):
    def is_file(path):
        if path.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file_before(path)

    for name in ("theirs", "trainer.yaml"):
        (tmp_path / name).touch()
    is_file_before = Path.is_file
    monkeypatch.setattr(Path, "is_file", is_file)
    expected = f"; did you mean '{tmp_path / 'trainer.yaml'}'?"
    assert files.similar(tmp_path / "trainr.yaml") == expected


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("nothere", None),
        ("ppo/Sotre.yaml", "ppo/Sorter.yaml"),
        ("Sortr.yaml", "ppo/Sorter.yaml"),
        ("Stor.yaml", None),
        ("/nope", None),
        ("/etc/passw", "/etc/passwd"),
    ],
)
def test_error_messages_propose_only_sufficiently_similar_names(tmp_path, typed, near):
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo/Sorter.yaml").touch()
    said = "" if near is None else f"; did you mean '{tmp_path / near}'?"
    assert files.similar(tmp_path / typed) == said


def test_listing_of_a_folder_names_subfolders_first_and_limits_its_entries(tmp_path, monkeypatch):
    for name in "abcdefg":
        (tmp_path / f"{name}.yaml").touch()
    (tmp_path / "ppo").mkdir()
    (tmp_path / "x.txt").touch()
    listed = "has ppo/, a.yaml, b.yaml, c.yaml, d.yaml, e.yaml and 2 more"
    assert files.listed(tmp_path / "none.yaml", ".yaml") == f"; {tmp_path} {listed}"
    monkeypatch.chdir(tmp_path)
    assert files.listed("none.txt", ".txt") == "; this folder has ppo/, x.txt"
    assert files.listed("ppo/none.yaml") == files.listed("no/none") == files.listed("/none") == ""
