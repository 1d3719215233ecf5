"""A sweep from one block of params.yaml, through both engines."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from dags import CHECK, counted_before, differences, dvc_before, dvc_nodes, snakemake_nodes
from project import ROOT, commit, copy_project, run

from pipeline.settings.params import load_params
from pipeline.settings.plan import write_plan

HERE = Path(__file__).parent
STAGES = ("env", "train", "export", "evaluate", "sweep", "report")
RATE = "behaviors.3DBall.hyperparameters.learning_rate"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A copy of the project with a sweep of two trials, nothing built."""
    root = copy_project(tmp_path_factory.mktemp("swept") / "project")
    shutil.copy(HERE / "swept.yaml", root / "params.yaml")
    write_plan(load_params(root / "params.yaml"), root / "workflow/runs.yaml")
    run(root, "dvc", "init", "--force", "--quiet")
    for name in (".dvc/config", ".dvcignore"):
        shutil.copy(ROOT / name, root / name)
    commit(root, "with a sweep")
    return root


@pytest.fixture
def swept(prepared: Path, tmp_path: Path) -> Path:
    """The same, to change at will."""
    return shutil.copytree(prepared, tmp_path / "project", symlinks=True)


def with_fast_stages(root: Path) -> Path:
    """The same, with stages that write their outputs at once."""
    for stage in STAGES:
        shutil.copy(HERE / "fake_stage.py", root / f"workflow/scripts/{stage}.py")
    with (root / ".gitignore").open("a") as file:
        file.write("ran.log\n")
    commit(root, "with fast stages")
    return root


@pytest.fixture
def toy(swept: Path) -> Path:
    return with_fast_stages(swept)


@pytest.fixture(scope="module")
def first(request, prepared: Path, tmp_path_factory) -> tuple[Path, list[str]]:
    """A toy that the engine has built once, and the jobs that it ran."""
    copy = tmp_path_factory.mktemp("first") / "project"
    root = with_fast_stages(shutil.copytree(prepared, copy, symlinks=True))
    return root, ran(root, *request.param)


def ran(root: Path, *command: str) -> list[str]:
    log = root / "ran.log"
    log.unlink(missing_ok=True)
    run(root, *command)
    return sorted(log.read_text().splitlines()) if log.exists() else []


def runs(*stages: str, of: str, seed: int) -> list[str]:
    return [f"{stage} {of} --seed {seed}" for stage in stages]


ALL_OF = ("train", "export", "evaluate")
TRIALS = [*runs(*ALL_OF, of="rates/001", seed=1), *runs(*ALL_OF, of="rates/002", seed=1)]
BEST = [*runs(*ALL_OF, of="rates_best", seed=11), *runs(*ALL_OF, of="rates_best", seed=12)]
DVC = ("dvc", "repro")
SNAKEMAKE = ("snakemake", "--cores", "2", "--quiet", "all")


def test_both_engines_expand_a_sweep_the_same_way(swept: Path):
    nodes = dvc_nodes(swept)
    names = {node.name for node in nodes}
    assert {"train@rates-002-1", "sweep@rates", "train_chosen@rates_best-12"} <= names
    theirs = snakemake_nodes(swept)
    assert differences(nodes, theirs, swept) == []
    before = {name: needed - {CHECK} for name, needed in dvc_before(swept).items()}
    assert counted_before(swept) | {CHECK: set()} == before
    asked = {node.name: node.asked for node in theirs}
    for name in ("train@ball-1", "train@rates-002-1", "train_chosen@rates_best-11"):
        assert asked[name] == {"mem_mb": 1500, "runtime": 30, "gpu": 0}, "of the experiment"
    assert asked["sweep@rates"]["mem_mb"] != 1500


@pytest.mark.parametrize(
    ("engine", "first"),
    [(DVC, DVC), (SNAKEMAKE, SNAKEMAKE)],
    indirect=["first"],
    ids=["dvc", "snakemake"],
)
def test_the_best_is_run_after_the_ranking_and_again_when_that_changes(engine, first, tmp_path):
    everything = [*TRIALS, "sweep rates", *BEST, *runs(*ALL_OF, of="ball", seed=1)]
    assert first[1] == sorted(["env balance_ball", *everything, "report"])
    toy = shutil.copytree(first[0], tmp_path / "project", symlinks=True)
    assert ran(toy, *engine) == []
    path = toy / "params.yaml"
    path.write_text(path.read_text().replace("- 3e-3", "- 2e-3"))
    write_plan(load_params(path), toy / "workflow/runs.yaml")
    second = runs(*ALL_OF, of="rates/002", seed=1)
    assert ran(toy, *engine) == sorted([*second, "sweep rates", *BEST, "report"])


@pytest.mark.parametrize("first", [SNAKEMAKE], indirect=True, ids=["snakemake"])
def test_resources_rerun_no_learning_and_threads_do(first, tmp_path):
    toy = shutil.copytree(first[0], tmp_path / "project", symlinks=True)
    path = toy / "params.yaml"
    text = path.read_text()
    path.write_text(text.replace("minutes: 30", "minutes: 40").replace("1500", "1600"))
    assert ran(toy, *SNAKEMAKE) == ["report"]  # which depends on all of `experiments`
    path.write_text(text.replace("threads: 2", "threads: 1"))
    write_plan(load_params(path), toy / "workflow/runs.yaml")
    assert "train rates/001 --seed 1" in ran(toy, *SNAKEMAKE)


def test_subsets_run_what_they_name_and_no_more(toy: Path):
    assert ran(toy, *SNAKEMAKE, "--", "results/quick") == [
        "env balance_ball",
        *sorted(runs(*ALL_OF, of="ball", seed=1)),
    ]
    assert ran(toy, *SNAKEMAKE, "--", "results/rates/train") == sorted(
        [
            *TRIALS,
            "sweep rates",
            *runs("train", of="rates_best", seed=11),
            *runs("train", of="rates_best", seed=12),
        ]
    )


def test_dvc_takes_a_stage_of_an_experiment_and_the_command_a_subset(toy: Path):
    command = ("python", "-m", "pipeline.cli", "run", "quick", "--engine", "dvc")
    assert ran(toy, *command, "--stage", "train") == [
        "env balance_ball",
        "train ball --seed 1",
    ]
    assert ran(toy, "dvc", "repro", "--glob", "export@ball-*") == ["export ball --seed 1"]
    assert ran(toy, *command) == ["evaluate ball --seed 1"]


def test_the_best_of_a_real_sweep_is_trained_on_fresh_seeds_with_its_values(swept: Path):
    policies = [f"results/train/rates_best/seed{seed}/policy.pt" for seed in (11, 12)]
    run(swept, *SNAKEMAKE, "--", *policies)
    best = json.loads((swept / "results/sweep/rates/best.json").read_text())
    with (swept / "results/sweep/rates/trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    scores = {f"rates/{int(row['trial']):03}": float(row["score"]) for row in rows}
    for name, score in scores.items():
        evaluated = swept / f"results/evaluate/{name}/seed1/metrics.json"
        assert json.loads(evaluated.read_text())["3DBall"]["mean_return"] == score
    assert best["trial"] == max(scores, key=scores.get)
    for seed in (11, 12):
        facts = json.loads(
            (swept / f"results/.work/train/rates_best/seed{seed}/stage.json").read_text()
        )
        changed = facts["params"]["overrides"]["behaviors"]["3DBall"]["hyperparameters"]
        assert changed["learning_rate"] == best["values"][RATE]
        assert facts["params"]["runtime"]["torch_threads"] == 2


@pytest.fixture
def adaptive(swept: Path) -> Path:
    """The same with Optuna, of which the last two trials are proposed one after the other."""
    path = swept / "params.yaml"
    text = path.read_text().replace("method: grid", "method: optuna\n    runs: 3\n    seed: 0")
    text = text.replace(
        "        - 1e-6\n        - 3e-3\n", "        min: 1e-5\n        max: 1e-2\n"
    )
    path.write_text(text.replace("1e-2\n", "1e-2\n    startup: 2\n    prune_after: 1000\n"))
    write_plan(load_params(path), swept / "workflow/runs.yaml")
    commit(swept, "with Optuna")
    return swept


def test_both_engines_expand_an_adaptive_sweep_the_same_way(adaptive: Path):
    nodes = dvc_nodes(adaptive)
    names = {node.name for node in nodes}
    assert {"train@rates-001-1", "propose@rates-002", "train_chosen@rates-003-1"} <= names
    assert differences(nodes, snakemake_nodes(adaptive), adaptive) == []
    before = {name: needed - {CHECK} for name, needed in dvc_before(adaptive).items()}
    assert counted_before(adaptive) | {CHECK: set()} == before


def test_an_adaptive_sweep_that_was_stopped_proposes_the_same_with_either_engine(adaptive: Path):
    results = ("propose/rates/002.json", "propose/rates/003.json", "sweep/rates/trials.csv")

    def made() -> list[bytes]:
        return [(adaptive / "results" / name).read_bytes() for name in results]

    snakemake = ("snakemake", "--cores", "2", "--quiet", "all", "--")
    run(adaptive, *snakemake, "results/propose/rates/002.json")  # and no further
    second = (adaptive / "results/propose/rates/002.json").stat().st_mtime_ns
    run(adaptive, *snakemake, "results/sweep/rates/best.json")
    assert (adaptive / "results/propose/rates/002.json").stat().st_mtime_ns == second
    first = made()
    best = json.loads((adaptive / "results/sweep/rates/best.json").read_text())
    assert list(best["values"]) == [RATE]
    shutil.rmtree(adaptive / "results")
    run(adaptive, "dvc", "repro", "sweep@rates")
    assert made() == first
