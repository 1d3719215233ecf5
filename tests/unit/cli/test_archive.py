"""Refusals of `pipeline archive` and `pipeline reproduce`, and the check of packages' SHA-256.

tests/workflow/test_reproduce.py archives and reproduces a project.
"""

import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from shutil import rmtree

import pytest
from made_archives import zip_link, zipped
from refusals import refusal
from repositories import commit, git
from small_project import left, params_of

from pipeline.cli import archive, reproduce
from pipeline.dag.project import checkout
from pipeline.errors import StageError

ABOUT = {"format": 1, "python": "3.11", "results": {"results/report/a.csv": "0" * 64}}
WHEEL = {
    "tiny.py": b"VALUE = 1\n",
    "tiny-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.0.dist-info/RECORD": b"tiny.py,,\ntiny-1.0.dist-info/METADATA,,\n"
    b"tiny-1.0.dist-info/WHEEL,,\ntiny-1.0.dist-info/RECORD,,\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a commit, one experiment and its results, which no engine has made."""
    root = tmp_path / "project"
    root.mkdir()
    params_of(root, "walk")
    (root / ".gitignore").write_text("workflow/\nbuilds/\n")
    for stage in ("train", "export", "evaluate"):
        left(root, stage, "walk/seed1", metrics={"value": 1})
    left(root, "report", "", summary={"value": 1})
    git(root, "init", "-q")
    commit(root, "first")
    monkeypatch.chdir(root)
    return root


def archived(folder: Path, about: object = ABOUT, **files: bytes) -> Path:
    """Write an archive with the files, and archive.json with `about`."""
    path = folder / "paper.zip"
    path.write_bytes(zipped({archive.ABOUT: json.dumps(about).encode(), **files}))
    return path


def test_archive_refuses_an_output_file_that_exists_or_is_no_zip_file(project, refused):
    (project / "there.zip").touch()
    assert refused("archive", "paper.tar") == "paper.tar: must end in .zip"
    assert refused("archive", "there.zip") == "there.zip: exists already; give another name"


def test_archive_refuses_a_project_without_a_git_commit(here, refused):
    params_of(here, "walk")
    message = refused("archive", "paper.zip")
    assert message.startswith(f"{here}: has no commit to archive; make one by `git init")


def test_archive_refuses_sources_that_differ_from_the_commit_and_names_them(project, refused):
    (project / "t.yaml").write_text("behaviors: {Ball: {trainer_type: sac}}\n")
    (project / "new.py").touch()
    (project / "results/report/more.csv").touch()  # made by a stage, so it need not be committed
    message = refused("archive", "paper.zip")
    assert message.startswith(f"{project}: t.yaml, new.py differ from the commit ")
    assert "commit them" in message


def test_archive_refuses_committed_symbolic_links(project, refused):
    (project / "link").symlink_to("t.yaml")
    commit(project, "a link")
    error = refused("archive", "paper.zip")
    assert error.startswith(f"{project}: link are links, which an archive")


def test_archive_contains_the_results_of_params_yaml_and_refuses_a_missing_result(project):
    params = archive.load_params(project / "params.yaml")
    left(project, "train", "other/seed1", metrics={})
    (project / "results/train/walk/seed1/.snakemake_timestamp").touch()
    names = [path.as_posix() for path in archive.result_files(params, project)]
    assert names == [
        "results/evaluate/walk/seed1/metrics.json",
        "results/export/walk/seed1/metrics.json",
        "results/report/summary.json",
        "results/train/walk/seed1/metrics.json",
    ]
    rmtree(project / "results/export/walk/seed1")
    message = refusal(StageError, lambda: list(archive.result_files(params, project)))
    assert message == "results/export/walk/seed1: is missing; `pipeline run` makes it"


def test_sources_in_an_archive_do_not_include_committed_results(project):
    assert "results/report/summary.json" in git(project, "ls-files")
    found, commit_id = archive._committed(project)
    assert sorted(found) == [".gitignore", "params.yaml", "t.yaml"]
    assert found["t.yaml"] == (project / "t.yaml").read_bytes()
    assert commit_id == git(project, "rev-parse", "HEAD")


def test_archive_finds_inputs_outside_of_git_in_the_records_of_stages(project):
    (project / "builds").mkdir()
    (project / "builds/game").write_text("program")
    inputs = dict.fromkeys(("builds", "t.yaml", "build/env/ball", str(checkout())), "digest")
    left(project, ".work/train", "walk/seed1", stage={"inputs": inputs})
    sources = archive._committed(project)[0]
    assert archive._other_inputs(project, sources) == ["builds/game"]
    left(project, ".work/train", "walk/seed1", stage={"inputs": {"/elsewhere/game": "digest"}})
    message = refusal(StageError, archive._other_inputs, project, sources)
    assert message.startswith("/elsewhere/game: is outside the project, but the stage of ")


def test_archive_refuses_installed_packages_whose_versions_differ_from_the_lock_files(tmp_path):
    lock = tmp_path / "a.txt"
    lock.write_text("numpy==1.0 \\\n    --hash=sha256:0\nNot_Here==2.0 ; python_version < '4'\n")
    versions = archive.locked([lock])
    assert versions == {"numpy": "1.0", "not-here": "2.0"}
    (named,) = archive.unlocked(versions)
    assert named.startswith("numpy ")
    assert named.endswith(" (locked 1.0)")
    message = refusal(StageError, archive._refuse_unlocked, tmp_path, [lock])
    assert named in message


REFUSED = {
    "a path out of the folder": (zipped({archive.ABOUT: b"{}", "../evil": b"x"}), "evil"),
    "an absolute path": (zipped({archive.ABOUT: b"{}", "/evil": b"x"}), "absolute name"),
    "a link": (zip_link("project", "/etc", {archive.ABOUT: b"{}"}), "'project' is a link"),
    "a bomb": (
        zipped({archive.ABOUT: b"{}", "bomb": b"0" * 20_000_000}),
        "unpacks to more than 10 MB",
    ),
    "no zip": (b"text", "paper.zip: is not a file of `pipeline archive`"),
    "another zip": (zipped({"a": b"b"}), "paper.zip: is not a file of `pipeline archive`"),
}


@pytest.mark.parametrize(("content", "expected"), REFUSED.values(), ids=REFUSED)
def test_reproduce_unpacks_nothing_of_hostile_and_other_files(content, expected, here, refused):
    Path("paper.zip").write_bytes(content)
    message = refused("reproduce", "paper.zip", "--max-unpacked-gb", "0.01")
    assert expected in message
    assert message.startswith("paper.zip: ")
    assert [path.name for path in here.iterdir()] == ["paper.zip"]
    assert not (here.parent / "evil").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": 2}, "its archive.json (format 2) is no valid record of format 1, which this"),
        ({"results": []}, "its archive.json (format 1) is no valid record of format 1"),
        ({"results": {"../a": "0"}}, "no text, or a path outside the project ../a"),
        ({"results": {"/a": "0"}}, "no text, or a path outside the project /a"),
        (
            {"results": {"a": 0}},
            "archive.json is damaged; use another copy. It has a digest that is no text",
        ),
    ],
)
def test_reproduce_refuses_an_archive_with_an_unknown_format_or_a_damaged_list_of_results(
    changes, expected, tmp_path, refused
):
    path = archived(tmp_path, ABOUT | changes)
    assert expected in refused("reproduce", path, "--folder", tmp_path / "again")


def test_reproduce_refuses_a_folder_that_is_no_reproduction_of_the_archive(tmp_path, refused):
    path = archived(tmp_path)
    (tmp_path / "again").mkdir()
    message = refused("reproduce", path, "--folder", tmp_path / "again")
    assert message.endswith("exists, and is no reproduction of this archive; give another --folder")
    missing = tmp_path / "wheels"
    assert refused("reproduce", path, "--wheels", missing) == f"--wheels: {missing} is not a folder"
    error = "absent.zip: cannot be read (No such file or directory)"
    assert refused("reproduce", "absent.zip") == error


def test_reproduce_warns_if_the_archive_was_made_with_another_python_version(tmp_path, caplog):
    path = archived(tmp_path, ABOUT | {"python": "3.0"})
    digests = reproduce._unpacked(path, tmp_path / "again", 10**9)
    assert digests == ABOUT["results"]
    assert "were made with Python 3.0" in caplog.text
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert reproduce._unpacked(path, tmp_path / "again", 10**9) == digests
    assert "has the archive's content" in caplog.text


def test_reproduced_results_are_compared_with_the_archive_by_sha256(tmp_path):
    (tmp_path / "same").write_text("a")
    (tmp_path / "other").write_text("b")
    digest = hashlib.sha256(b"a").hexdigest()
    digests = {"same": digest, "other": digest, "absent": digest}
    whole = reproduce.compare(tmp_path, digests, partial=False)
    assert whole == {"same": ["same"], "differs": ["other"], "missing": ["absent"]}
    assert reproduce.compare(tmp_path, digests, partial=True) == whole | {"missing": []}


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A reproduction's folder with a lock of one package, its wheel, and code as a wheel."""
    wheel = zipped(WHEEL)
    for name in ("wheels", "code", "locks"):
        (tmp_path / name).mkdir()
    (tmp_path / "wheels/tiny-1.0-py3-none-any.whl").write_bytes(wheel)
    mine = {name.replace("tiny", "mine"): data.replace(b"tiny", b"mine")
            for name, data in WHEEL.items()}  # fmt: skip
    (tmp_path / "code/mine-1.0-py3-none-any.whl").write_bytes(zipped(mine))
    digest = hashlib.sha256(wheel).hexdigest()
    (tmp_path / "locks/train.txt").write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
    return tmp_path


@pytest.mark.slow
def test_environment_of_a_reproduction_has_the_locked_packages_and_the_archived_code(locked):
    python = locked / ".venv/bin/python"
    reproduce.install(locked, locked / "wheels")
    check = [str(python), "-I", "-c", "import tiny, mine; print(tiny.VALUE + mine.VALUE)"]
    assert reproduce.subprocess.check_output(check, text=True) == "2\n"  # ours
    (locked / "wheels").rename(locked / "gone")
    reproduce.install(locked, locked / "wheels")  # nothing is installed again


@pytest.mark.slow
def test_a_wheel_with_a_changed_byte_is_refused(locked):
    wheel = locked / "wheels/tiny-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    message = refusal(StageError, reproduce.install, locked, locked / "wheels")
    assert "DO NOT MATCH THE HASHES" in message
    assert "tiny==1.0" in message
    assert not (locked / ".venv/.installed").exists()


def test_reproduce_installs_the_packages_of_only_one_of_the_two_lock_files_of_torch():
    paths = [Path("locks", name) for name in ("mine.txt", "torch-cpu.txt", "torch.txt")]
    assert archive.chosen(paths, cpu=False) == [paths[0], paths[2]]
    assert archive.chosen(paths, cpu=True) == paths[:2]
    assert archive.chosen(paths[2:], cpu=True) == paths[2:], "no lock of builds for the CPU"


def test_reproduced_stages_do_not_import_code_from_the_callers_python_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("PIPELINE_PROJECT", "elsewhere")
    variables = reproduce._variables(tmp_path)
    assert {"PYTHONPATH", "PIPELINE_PROJECT", "PIPELINE_CACHE"}.isdisjoint(variables)
    assert variables["PATH"] == os.environ["PATH"]
    (tmp_path / "cache").mkdir()
    assert reproduce._variables(tmp_path)["PIPELINE_CACHE"] == str(tmp_path / "cache")
    assert sys.flags.no_user_site or variables["PYTHONNOUSERSITE"] == "1"


def test_lock_files_pin_the_versions_of_constraints_txt_and_a_sha256_for_every_package():
    root = Path(__file__).parents[3]
    pins = archive.locked([root / "constraints.txt"])
    paths = sorted((root / "locks").glob("*.txt"))
    assert {"dev.txt", archive.TORCH, archive.TORCH_CPU, archive.TRAIN} <= {
        path.name for path in paths
    }
    versions = archive.locked(paths)
    assert {name: version for name, version in versions.items()
            if pins.get(name, version) != version} == {}  # fmt: skip
    assert {"torch", "numpy", "gymnasium", "snakemake", "setuptools-scm"} <= {*versions}
    for path in paths:
        entries = path.read_text().replace("\\\n", "").splitlines()
        assert [line for line in entries if "--hash=sha256:" not in line] == []
        assert "://" not in path.read_text(), "no address of an index"
