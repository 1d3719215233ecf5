"""The runs and the tables of `benchmarks/mujoco`, with results that stand in for trainings."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from pipeline.dag.policies import join
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import check_files, plan

ROOT = Path(__file__).parents[2]
STAGES = ("train_from_scratch", "export", "evaluate")
PLACES = ("train", "evaluate", ".work/train")
FOLDER, DOCS = ROOT / "benchmarks/mujoco", ROOT / "docs/evidence"
_spec = importlib.util.spec_from_file_location("mujoco_page", FOLDER / "page.py")
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


def run_page(monkeypatch, project, docs):
    monkeypatch.setattr("sys.argv", ["page.py", "--project", str(project), "--docs", str(docs)])
    page.main()


def copy_project(target):
    """Copy the project without its results."""
    for file in FOLDER.glob("*.yaml"):
        shutil.copy(file, target)


@pytest.fixture
def docs(tmp_path):
    """A copy of the page without CSV files."""
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "mujoco.md", tmp_path / "docs")
    return tmp_path / "docs"


def write_run(project, name, seed, *, returns, steps=50_000, resumed=False):
    """Write what train and evaluate leave of a run in HalfCheetah-v4."""
    places = {stage: project / "results" / stage / name / f"seed{seed}" for stage in PLACES}
    for place in places.values():
        place.mkdir(parents=True)
    progress = f"behavior,step,reward\nHalfCheetah-v4,{steps},1.0\n"
    (places["train"] / "progress.csv").write_text(progress)
    trained = {"HalfCheetah-v4": {"steps": steps}}
    (places["train"] / "metrics.json").write_text(json.dumps(trained))
    record = {"versions": {"torch": "2.0", "mujoco": "4.0", "onnx": "1.0"}}
    join({}, places["train"] / "policy.pt", history=[record])
    evaluated = {"mean_return": returns, "std_return": 2.5, "episodes": 20}
    (places["evaluate"] / "metrics.json").write_text(json.dumps({"HalfCheetah-v4": evaluated}))
    facts = {"cpu_s": 120.0 * seed, "duration_s": 1.0, "resumed": resumed}
    (places[".work/train"] / "stage.json").write_text(json.dumps(facts))


def test_mujoco_project_plans_five_seeds_of_each_task_with_settings_that_can_be_used():
    params = load_params(FOLDER / "params.yaml")
    check_files(params)
    runs = plan(params)["runs"]
    counts = {table: len(entries) for table, entries in runs.items() if entries}
    assert counts == {"environments": 8, **dict.fromkeys(STAGES, 91)}
    per_table = {table: len(params.runs_of(table)) for table in params.subsets}
    assert per_table == {"v4": 30, "v4_100k": 6, "v5": 30, "ppo": 25}
    settings = [params.run_settings(name).default_settings for name in params.experiments]
    steps = Counter((one.trainer_type, one.max_steps) for one in settings)
    expected = {("xqc", 50_000): 6, ("sac", 50_000): 6, ("xqc", 100_000): 2, ("ppo", 1_000_000): 5}
    assert steps == expected


def test_mujoco_page_has_a_row_of_all_seeds_and_a_csv_row_of_each(monkeypatch, tmp_path, docs):
    copy_project(tmp_path)
    write_run(tmp_path, "xqc_halfcheetah_v4", 1, returns=10.0)
    write_run(tmp_path, "xqc_halfcheetah_v4", 2, returns=14.0, resumed=True)
    write_run(tmp_path, "xqc_halfcheetah_v4", 3, returns=99.0, steps=49_999)  # not in full
    run_page(monkeypatch, tmp_path, docs)
    first, second = csv.DictReader((docs / "mujoco/v4.csv").read_text().splitlines())
    assert list(first.values()) == [
        *("HalfCheetah-v4", "XQC", "1", "50000", "10.0", "2.5", "20", "120"),
        "mujoco 4.0; torch 2.0",
    ]
    assert (second["seed"], second["mean_return"], second["cpu_s"]) == ("2", "14.0", "")
    text = (docs / "mujoco.md").read_text()
    # t(1) = 12.706, s / sqrt(2) = 2
    row = "HalfCheetah-v4 | XQC | 50,000 | 12 [-13, 37] | 10 / 14 | 2.0 (1 of 2 runs)"
    assert f"| {row} |\n" in text
    assert text.count("| XQC |") == 1

    # A clone without these results keeps the rows of the file.
    shutil.rmtree(tmp_path / "results")
    run_page(monkeypatch, tmp_path, docs)
    assert (docs / "mujoco.md").read_text() == text


def test_mujoco_page_of_the_repository_is_made_from_its_csv_files(monkeypatch, tmp_path):
    (tmp_path / "docs/mujoco").mkdir(parents=True)
    for file in (DOCS / "mujoco").glob("*.csv"):
        shutil.copy(file, tmp_path / "docs/mujoco")
    shutil.copy(DOCS / "mujoco.md", tmp_path / "docs")
    copy_project(tmp_path)
    run_page(monkeypatch, tmp_path, tmp_path / "docs")
    assert (tmp_path / "docs/mujoco.md").read_text() == (DOCS / "mujoco.md").read_text()
