"""A sweep from one block of params.yaml, through both engines."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import yaml
from project import REPRO, ball, commit, copy_project, fast_stages, init_dvc, ran, run, set_params

RATE = "behaviors.3DBall.hyperparameters.learning_rate"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A copy of the project with a sweep of two trials, without results."""
    root = copy_project(tmp_path_factory.mktemp("swept") / "project")
    grid = {"experiment": "ball", "method": "grid", "parameters": {RATE: [1e-6, 3e-3]}}
    sweeps = {"rates": grid | {"seeds": [1], "best": {"seeds": [11, 12]}}}
    set_params(root, ball(sweeps=sweeps, subsets={"quick": ["ball-1"]}))
    init_dvc(root)
    commit(root, "with a sweep")
    return root


@pytest.fixture
def swept(prepared: Path, tmp_path: Path) -> Path:
    """A copy of `prepared` that a test may change."""
    return shutil.copytree(prepared, tmp_path / "project", symlinks=True)


@pytest.fixture
def toy(swept: Path) -> Path:
    return fast_stages(swept)


@pytest.fixture(scope="module")
def first(request, prepared: Path, tmp_path_factory) -> tuple[Path, list[str]]:
    """A copy with fast stages after one run of the engine, and the jobs that ran."""
    copy = tmp_path_factory.mktemp("first") / "project"
    root = fast_stages(shutil.copytree(prepared, copy, symlinks=True))
    return root, ran(root, *request.param)


def runs(*stages: str, of: str, seed: int) -> list[str]:
    return [f"{stage} {of} --seed {seed}" for stage in stages]


ALL_OF = ("train", "export", "evaluate")
TRIALS = [*runs(*ALL_OF, of="rates/001", seed=1), *runs(*ALL_OF, of="rates/002", seed=1)]
BEST = [*runs(*ALL_OF, of="rates_best", seed=11), *runs(*ALL_OF, of="rates_best", seed=12)]
DVC, SNAKEMAKE = REPRO.values()


@pytest.mark.parametrize(
    ("engine", "first"),
    [(DVC, DVC), (SNAKEMAKE, SNAKEMAKE)],
    indirect=["first"],
    ids=["dvc", "snakemake"],
)
def test_best_trial_of_a_sweep_runs_after_the_ranking_and_again_if_the_ranking_changes(
    engine, first, tmp_path
):
    everything = [*TRIALS, "sweep rates", *BEST, *runs(*ALL_OF, of="ball", seed=1)]
    assert first[1] == sorted(["env balance_ball", *everything, "report"])
    toy = shutil.copytree(first[0], tmp_path / "project", symlinks=True)
    assert ran(toy, *engine) == []
    set_params(toy, (toy / "params.yaml").read_text().replace("- 0.003", "- 0.002"))
    second = runs(*ALL_OF, of="rates/002", seed=1)
    assert ran(toy, *engine) == sorted([*second, "sweep rates", *BEST, "report"])


@pytest.mark.parametrize("first", [SNAKEMAKE], indirect=True, ids=["snakemake"])
def test_changed_threads_rerun_training_but_other_changed_resources_rerun_only_the_report(
    first, tmp_path
):
    toy = shutil.copytree(first[0], tmp_path / "project", symlinks=True)
    path = toy / "params.yaml"
    text = path.read_text()
    path.write_text(text.replace("minutes: 30", "minutes: 40").replace("1500", "1600"))
    assert ran(toy, *SNAKEMAKE) == ["report"]  # the report depends on the whole section
    set_params(toy, text.replace("threads: 2", "threads: 1"))
    assert "train rates/001 --seed 1" in ran(toy, *SNAKEMAKE)


def test_snakemake_target_of_a_subset_or_a_sweep_runs_only_the_jobs_of_this_target(toy: Path):
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


def test_pipeline_run_accepts_a_subset_and_a_stage_and_dvc_repro_accepts_a_pattern_of_stages(
    toy: Path,
):
    command = ("python", "-m", "pipeline.cli.main", "run", "quick", "--engine", "dvc")
    assert ran(toy, *command, "--stage", "train") == [
        "env balance_ball",
        "train ball --seed 1",
    ]
    assert ran(toy, "dvc", "repro", "--glob", "export@ball-*") == ["export ball --seed 1"]
    assert ran(toy, *command) == ["evaluate ball --seed 1"]


@pytest.fixture
def adaptive(swept: Path) -> Path:
    """The same sweep with Optuna, which proposes the last two trials one after the other."""
    content = yaml.safe_load((swept / "params.yaml").read_text())
    search = {"method": "optuna", "runs": 3, "seed": 0, "startup": 2, "prune_after": 1000}
    content["sweeps"]["rates"] |= search | {"parameters": {RATE: {"min": 1e-5, "max": 1e-2}}}
    set_params(swept, content)
    commit(swept, "with Optuna")
    return swept


def test_stopped_sweep_continues_and_its_best_trial_is_trained_on_a_fresh_seed(adaptive: Path):
    results = adaptive / "results"
    run(adaptive, *SNAKEMAKE, "--", "results/propose/rates/002.json")  # only the first proposal
    second = (results / "propose/rates/002.json").stat().st_mtime_ns
    run(adaptive, *SNAKEMAKE, "--", "results/train/rates_best/seed12/policy.pt")
    assert (results / "propose/rates/002.json").stat().st_mtime_ns == second
    best = json.loads((results / "sweep/rates/best.json").read_text())
    assert list(best["values"]) == [RATE]
    with (results / "sweep/rates/trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    scores = {f"rates/{int(row['trial']):03}": float(row["score"]) for row in rows}
    assert len(scores) == 3
    for name, score in scores.items():
        evaluated = json.loads((results / f"evaluate/{name}/seed1/metrics.json").read_text())
        assert evaluated["3DBall"]["mean_return"] == score
    assert best["trial"] == max(scores, key=scores.get)
    facts = json.loads((results / ".work/train/rates_best/seed12/stage.json").read_text())
    changed = facts["params"]["overrides"]["behaviors"]["3DBall"]["hyperparameters"]
    assert changed["learning_rate"] == best["values"][RATE]
    assert facts["params"]["runtime"]["torch_threads"] == 2
