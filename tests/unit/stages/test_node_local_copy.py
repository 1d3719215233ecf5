"""Where a built environment is run from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline.errors import StageError
from pipeline.stages.shared.executable import load


@pytest.fixture(autouse=True)
def _no_scratch(monkeypatch):
    monkeypatch.delenv("PIPELINE_SCRATCH", raising=False)


def built(root: Path, content: str = "one") -> Path:
    folder = root / "build/env/walker"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data/level").write_text(content)
    (folder / "program").write_text("#!/bin/sh\n")
    description = {"file": "program", "args": ["-x"], "simulator": None, "build_sha256": content}
    (folder / "environment.json").write_text(json.dumps(description))
    return folder


def test_a_build_is_run_where_it_lies(tmp_path: Path):
    build = load(built(tmp_path))
    assert build.file == tmp_path / "build/env/walker/program"
    assert os.access(build.file, os.X_OK)


def test_with_a_scratch_folder_a_build_is_copied_once_and_run_from_there(tmp_path, monkeypatch):
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("PIPELINE_SCRATCH", "$NODE_DISK/mine")
    folder = built(tmp_path)
    build = load(folder)
    assert build.file.is_relative_to(tmp_path / "disk/mine")
    assert os.access(build.file, os.X_OK)
    assert (build.file.parent / "data/level").read_text() == "one"
    (build.file.parent / "kept").touch()
    assert load(folder) == build
    assert (build.file.parent / "kept").exists()


def test_another_build_gets_a_copy_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_SCRATCH", str(tmp_path / "disk"))
    first = load(built(tmp_path))
    second = load(built(tmp_path, "two"))
    assert first.file != second.file
    assert (second.file.parent / "data/level").read_text() == "two"


def test_a_copy_that_was_cut_short_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_SCRATCH", str(tmp_path / "disk"))
    folder = built(tmp_path)
    copy = load(folder).file.parent
    copy.rename(copy.with_name(f"{copy.name}.new"))
    (copy.with_name(f"{copy.name}.new") / "data/level").unlink()
    assert (load(folder).file.parent / "data/level").read_text() == "one"


def test_a_folder_without_a_description_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_SCRATCH", str(tmp_path / "disk"))
    with pytest.raises(StageError, match=r"environment\.json"):
        load(tmp_path)
