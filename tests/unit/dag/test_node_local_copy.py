"""The folder from which a built environment runs."""

import json
import os
from pathlib import Path

import pytest

from pipeline.envs.executable import load
from pipeline.errors import StageError


def built(root: Path, content: str = "one") -> Path:
    folder = root / "build/env/walker"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data/level").write_text(content)
    (folder / "program").write_text("#!/bin/sh\n")
    description = {"file": "program", "args": ["-x"], "simulator": None, "build_sha256": content}
    (folder / "environment.json").write_text(json.dumps(description))
    return folder


def test_environment_runs_from_a_copy_in_the_scratch_folder_if_a_scratch_folder_is_set(
    tmp_path, monkeypatch
):
    folder = built(tmp_path)
    monkeypatch.delenv("PIPELINE_SCRATCH", raising=False)
    assert load(folder).file == tmp_path / "build/env/walker/program"
    assert os.access(folder / "program", os.X_OK)
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("PIPELINE_SCRATCH", "$NODE_DISK/mine")
    build = load(folder)
    copy = build.file.parent
    assert build.file.is_relative_to(tmp_path / "disk/mine")
    assert os.access(build.file, os.X_OK)
    assert (copy / "data/level").read_text() == "one"
    (copy / "kept").touch()
    assert load(folder) == build
    assert (copy / "kept").exists()
    copy.rename(copy.with_name(f"{copy.name}.new"))  # as if the copying had been interrupted
    (copy.with_name(f"{copy.name}.new") / "data/level").unlink()
    assert (load(folder).file.parent / "data/level").read_text() == "one"
    other = load(built(tmp_path, "two"))
    assert other.file != build.file
    assert (other.file.parent / "data/level").read_text() == "two"


def test_environment_folder_without_environment_json_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_SCRATCH", str(tmp_path / "disk"))
    with pytest.raises(StageError, match=r"environment\.json"):
        load(tmp_path)
