"""The real stages, end to end, on a tiny configuration."""

import csv
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlflow_runs
import psutil
import pytest
from project import ROOT, commit, copy_project, environment, git, run, set_params

from pipeline.cli.sync import sync
from pipeline.dag.graph import graph_of
from pipeline.settings.project.params import load_params

TRAIN = ("python", "workflow/scripts/train.py", "plain", "--seed", "1")

pytestmark = pytest.mark.slow


def tiny_project(root: Path) -> Path:
    copy_project(root)
    set_params(root, Path(__file__).with_name("tiny.yaml").read_text())
    commit(root, "tiny")
    return root


def results(root: Path) -> dict[str, bytes]:
    """Return the content of all outputs that the engines track, by path."""
    places = [root / "results", root / "data/demos", root / "build"]
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for place in places
        for file in sorted(place.rglob("*"))
        if file.is_file() and ".work" not in file.parts and not file.name.startswith(".")
    }


@pytest.fixture(scope="module")
def by_dvc(tmp_path_factory) -> Path:
    root = tiny_project(tmp_path_factory.mktemp("dvc") / "project")
    run(root, "dvc", "repro", PIPELINE_MLFLOW="on")
    return root


@pytest.fixture(scope="module")
def by_snakemake(tmp_path_factory) -> Path:
    """Results of Snakemake, with the environment on another disk as on a cluster's node."""
    folder = tmp_path_factory.mktemp("snakemake")
    root = tiny_project(folder / "project")
    run(root, "snakemake", "--cores", "2", hash_seed="2", PIPELINE_SCRATCH=str(folder / "disk"))
    assert [path.name[:13] for path in folder.glob("disk/rl-pipeline/*.lock")] == ["balance_ball-"]
    return root


def test_dvc_and_snakemake_write_outputs_with_equal_bytes(by_dvc: Path, by_snakemake: Path):
    first, second = results(by_dvc), results(by_snakemake)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_every_output_of_the_workflow_exists_with_the_expected_content(by_dvc: Path):
    recorded = json.loads((by_dvc / "results/demos/balance_ball_expert.json").read_text())
    assert recorded["episodes"] == 2
    for name in ("plain", "cloned"):
        trained = json.loads((by_dvc / f"results/train/{name}/seed1/metrics.json").read_text())
        assert trained["3DBall"]["steps"] >= 4000
        with (by_dvc / f"results/train/{name}/seed1/progress.csv").open() as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
        assert steps == [1000, 2000, 3000, 4000]
        model = by_dvc / f"results/export/{name}/seed1/3DBall.onnx"
        output = run(by_dvc, "pipeline", "onnx", "check", str(model)).stdout
        assert "Unity can load this file with package 2.0 and newer" in output
        played = json.loads((by_dvc / f"results/evaluate/{name}/seed1/metrics.json").read_text())
        assert played["3DBall"]["episodes"] == 4
        policy = by_dvc / f"results/train/{name}/seed1/policy.pt"
        assert played["3DBall"]["policy_md5"] == mlflow_runs.md5(policy.read_bytes())
    filmed = by_dvc / "results/evaluate/cloned/seed1"
    for name in ("median.gif", "best.gif"):
        assert (filmed / name).read_bytes()[:6] == b"GIF89a"
    page = (by_dvc / "results/report/report.html").read_text()
    assert page.count("<svg") == 4
    assert page.count("data:image/gif;base64,") == 1
    assert 'href="../evaluate/cloned/seed1/best.gif"' in page
    assert 'href="../evaluate/plain/seed1/best.gif"' not in page
    assert "http" not in page
    assert "plain, cloned: 1 seed is too few for an interval; run 5 or more." in page
    with (by_dvc / "results/report/comparison.csv").open() as file:
        compared = list(csv.DictReader(file))
    assert [(row["experiment"], row["seeds"], row["iqm_low"]) for row in compared] == [
        ("plain", "1", ""),
        ("cloned", "1", ""),
    ]
    summary = json.loads((by_dvc / "results/report/summary.json").read_text())
    assert set(summary) == {"plain", "cloned"}


def provenance_of(root: Path, name: str) -> dict:
    model = f"results/export/{name}/seed1/3DBall.onnx"
    completed = run(root, "python", "-m", "pipeline.cli.main", "provenance", model, "--json")
    return json.loads(completed.stdout)


@pytest.fixture
def copied(by_dvc: Path, tmp_path: Path) -> Path:
    """A copy of the results of DVC that a test may change."""
    return shutil.copytree(by_dvc, tmp_path / "project", symlinks=True)


def test_provenance_shows_the_stages_of_a_model_and_what_has_changed_since_the_training(
    by_dvc: Path, copied: Path
):
    provenance = provenance_of(by_dvc, "cloned")
    assert [stage["stage"] for stage in provenance["stages"]] == ["pretrain", "train", "export"]
    assert [stage["run"] for stage in provenance["stages"]] == ["cloned/seed1"] * 3
    assert {check["verdict"] for check in provenance["checks"]} == {"same"}
    assert provenance["commit"]["commit"] in git(by_dvc, "log", "--format=%H").split()
    params = copied / "params.yaml"
    params.write_text(params.read_text().replace("max_steps: 4000", "max_steps: 5000"))
    source = copied / "src/pipeline/trainer/loop.py"
    source.write_text(source.read_text() + "# edited\n")
    provenance = provenance_of(copied, "plain")
    differences = {
        check["what"]: check["details"] for check in provenance["checks"] if check["details"]
    }
    assert provenance["verdict"] == "differs"
    assert differences == {
        "code": ["src/pipeline/trainer/loop.py has changed"],
        "parameters of train": ["settings.behaviors.3DBall.max_steps: 4000 then, 5000 now"],
    }


def test_every_snakemake_job_has_a_log_and_a_record_of_time_and_memory(by_snakemake: Path):
    stages = graph_of(load_params(by_snakemake / "params.yaml"), by_snakemake).names
    logs = sorted((by_snakemake / "logs").rglob("*.log"))
    assert len(logs) == len(stages) == 10
    for log in logs:
        with log.with_suffix(".tsv").open(newline="") as file:
            (row,) = csv.DictReader(file, delimiter="\t")
        assert float(row["s"]) > 0
        assert {"max_rss", "cpu_time"} <= row.keys()
    assert "Step: 1000" in (by_snakemake / "logs/train/plain/seed1.log").read_text()


def test_git_status_shows_metrics_but_no_models(by_dvc: Path):
    completed = run(by_dvc, "git", "status", "--short", "--untracked-files=all", "--", "results")
    tracked = [line.split()[1] for line in completed.stdout.splitlines()]
    assert tracked
    assert all(name.endswith((".json", ".csv")) and ".work" not in name for name in tracked)


def test_second_run_of_either_engine_does_nothing_and_sync_makes_the_other_engine_agree(
    by_dvc: Path, by_snakemake: Path
):
    before = results(by_dvc)
    assert "Data and pipelines are up to date" in run(by_dvc, "dvc", "repro").stdout
    assert "snakemake now agrees" in sync(by_dvc, None)
    nothing = run(by_dvc, "snakemake", "-n")
    assert "Nothing to be done" in nothing.stdout + nothing.stderr
    nothing = run(by_snakemake, "snakemake", "-n")
    assert "Nothing to be done" in nothing.stdout + nothing.stderr
    assert "dvc now agrees" in sync(by_snakemake, None)
    assert "up to date" in run(by_snakemake, "dvc", "status").stdout
    assert results(by_dvc) == before


def test_each_experiment_and_seed_has_one_mlflow_run(by_dvc: Path):
    client = mlflow_runs.client(by_dvc)
    runs = {run.info.run_name: run for run in client.search_runs(["1"])}
    assert set(runs) == {"plain-seed1", "cloned-seed1"}
    for mlflow_run in runs.values():
        assert mlflow_run.info.status == "FINISHED"
        assert mlflow_run.data.params["max_steps"] == "4000"
        assert mlflow_run.data.params["learning_rate"] == "0.0003"
        assert mlflow_run.data.params["environment"] == "balance_ball"
        assert mlflow_run.data.metrics["evaluate/episodes"] == 4
        assert mlflow_run.data.tags["pipeline.algorithm"] == "ppo"
        assert len(mlflow_run.data.tags["mlflow.source.git.commit"]) == 40
        name = "Environment/Cumulative Reward"
        history = client.get_metric_history(mlflow_run.info.run_id, name)
        assert [point.step for point in history] == [1000, 2000, 3000, 4000]
        place = mlflow_run.info.run_name.replace("-seed", "/seed")
        played = json.loads((by_dvc / f"results/evaluate/{place}/metrics.json").read_text())
        mean = pytest.approx(mlflow_run.data.metrics["evaluate/mean_return"])
        assert played["3DBall"]["mean_return"] == mean
        paths = {
            artifact.path for artifact in client.list_artifacts(mlflow_run.info.run_id, "evaluate")
        }
        assert "evaluate/returns.png" in paths
        assert ("evaluate/median.gif" in paths) == (mlflow_run.info.run_name == "cloned-seed1")
    assert "pretrain/loss" in runs["cloned-seed1"].data.metrics
    data = {
        dataset_input.dataset.name for dataset_input in runs["cloned-seed1"].inputs.dataset_inputs
    }
    assert data == {"balance_ball", "balance_ball_expert"}
    models = client.search_logged_models(["1"])
    assert {model.source_run_id for model in models} == {r.info.run_id for r in runs.values()}


def test_best_policy_has_the_alias_best_and_the_mlflow_run_names_the_git_revision(
    by_dvc: Path, copied: Path
):
    client = mlflow_runs.client(by_dvc)
    (model,) = client.search_registered_models()
    assert model.name == "balance_ball.3DBall"
    versions = client.search_model_versions(f"name = '{model.name}'")
    assert {version.tags["run"] for version in versions} == {"plain-seed1", "cloned-seed1"}
    top = max(float(version.tags["score"]) for version in versions)
    assert float(client.get_model_version_by_alias(model.name, "best").tags["score"]) == top
    for version in versions:
        alias = version.tags["experiment"]
        assert client.get_model_version_by_alias(model.name, alias).version == version.version

    commit(copied, "results")
    run(copied, "pipeline", "runs", "--rebuild")
    output = run(copied, "pipeline", "runs", "plain-1").stdout
    assert output.count("as in results/") == 3
    head = git(copied, "rev-parse", "HEAD").strip()
    assert f"git checkout {head[:12]} && dvc checkout" in output
    back = run(copied, "pipeline", "runs", "--at", "HEAD").stdout
    versions = mlflow_runs.client(copied).search_model_versions(f"name = '{model.name}'")
    rows = {version.tags["run"].replace("-seed", "-"): version.run_id for version in versions}
    assert {line.split()[0]: line.split()[1] for line in back.splitlines()[1:]} == rows


def rows_of(root: Path) -> dict[str, dict]:
    """Return the content of each MLflow run, by the run's name."""
    runs = mlflow_runs.client(root).search_runs(["1"], "tags.`pipeline.current` = 'yes'")
    assert len({run.info.run_name for run in runs}) == len(runs)
    return {run.info.run_name: run.to_dictionary() for run in runs}


def test_dvc_experiments_have_their_own_mlflow_runs(copied: Path):
    root = copied
    for name, value in (("user.name", "test"), ("user.email", "test@example.org")):
        git(root, "config", name, value)
    commit(root, "results")
    run(root, "python", "-m", "pipeline.cli.main", "runs", "--rebuild")
    before = rows_of(root)

    def tried(name: str, episodes: int, *options: str) -> None:
        setting = f"experiments.plain.evaluation.episodes={episodes}"
        run(root, "dvc", "exp", "run", *options, "-n", name, "-S", setting, PIPELINE_MLFLOW="on")

    tried("here", 5)
    documented = re.search(
        r"^dvc (exp show .*)$", (ROOT / "docs/how-to/dvc.md").read_text(), re.MULTILINE
    )
    assert documented is not None
    csv_lines = run(root, "dvc", *shlex.split(documented[1]), "--csv").stdout.splitlines()
    assert csv_lines[0].split(",")[4:] == [
        "plain.3DBall.iqm",
        "experiments.plain.evaluation.episodes",
    ], "what differs: an interquartile mean, and the parameter that was set"
    git(root, "checkout", "-q", "--", ".")
    run(root, "dvc", "checkout")
    tried("queued", 7, "--queue")
    run(root, "dvc", "exp", "run", "--run-all", PIPELINE_MLFLOW="on")
    after = rows_of(root)
    assert {name: after[name] for name in before} == before
    new = {name: after[name]["data"] for name in after.keys() - before.keys()}
    assert {name: row["metrics"]["evaluate/episodes"] for name, row in new.items()} == {
        "plain-seed1 (here)": 5,
        "plain-seed1 (queued)": 7,
    }
    groups = [row["data"]["tags"]["pipeline.experiment"] for row in after.values()]
    assert len(set(groups)) == len(groups), "none of them looks like a seed of the baseline"
    output = run(root, "python", "-m", "pipeline.cli.main", "runs", "plain-1 (queued)").stdout
    assert new["plain-seed1 (queued)"]["tags"]["dvc.evaluate"] in output
    retrain = ("dvc", "repro", "--force", "--single-item", "train@plain-1")
    run(root, *retrain, PIPELINE_MLFLOW="on")
    trained = rows_of(root)
    assert trained.keys() == after.keys()
    run_ids = [rows["plain-seed1"]["info"]["run_id"] for rows in (before, trained)]
    assert run_ids[0] == run_ids[1], "the same policy again has the row that it had"


def start_training(root: Path, *engine: str) -> subprocess.Popen:
    """Start the stage `train` of `plain`, alone or by an engine, and wait for a summary."""
    child = subprocess.Popen(  # noqa: S603  # the stage's own command, or an engine
        engine or (sys.executable, *TRAIN[1:]),
        cwd=root,
        env=environment(root),
        stderr=subprocess.PIPE,
        text=True,
    )
    until(child, "Step: 1000")
    return child


def until(child: subprocess.Popen, text: str) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        if text in line:
            return
    pytest.fail(f"{text!r} never came; exit code {child.wait()}")


@pytest.fixture
def trainable(copied: Path) -> Path:
    """A copy in which `plain` must be trained again, for more steps."""
    params = copied / "params.yaml"
    params.write_text(params.read_text().replace("max_steps: 4000", "max_steps: 40000", 1))
    return copied


def test_interrupted_training_leaves_earlier_results_unchanged_and_resumes(trainable: Path):
    published = trainable / "results/train/plain/seed1/metrics.json"
    before = published.read_bytes()
    with start_training(trainable) as child:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=300)
    assert child.returncode == 143
    assert published.read_bytes() == before
    resumed = run(trainable, *TRAIN)
    assert "resuming the attempt that did not finish" in resumed.stderr
    assert "Resuming training of 3DBall from step" in resumed.stderr
    assert json.loads(published.read_text())["3DBall"]["steps"] >= 40000
    with (published.parent / "progress.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == list(range(1000, 41000, 1000))


def test_training_is_not_recorded_with_parameters_that_changed_while_training_ran(trainable: Path):
    params = trainable / "params.yaml"
    before = params.read_text()
    command = ["dvc", "repro", "--single-item", "train@plain-1"]
    with start_training(trainable, *command) as child:
        params.write_text(before.replace("seeds: [1]", "seeds: [1, 2]", 1))
        params.write_text(params.read_text().replace("max_steps: 40000", "max_steps: 50000", 1))
        _, errors = child.communicate(timeout=300)
    assert child.returncode != 0
    assert "its parameters were changed while it ran" in errors
    params.write_text(before)
    resumed = run(trainable, *command)
    assert "resuming the attempt that did not finish" in resumed.stderr
    metrics = json.loads((trainable / "results/train/plain/seed1/metrics.json").read_text())
    assert 40000 <= metrics["3DBall"]["steps"] < 50000


@pytest.mark.parametrize(
    ("command", "shell"),
    [
        # dash stays until its command ends; tests/unit/dag tests shells that do not
        (("dvc", "repro", "-s", "train@plain-1"), "/bin/sh"),
        (("snakemake", "--cores", "1", "--force", "results/train/plain/seed1/policy.pt"), ""),
    ],
    ids=["dvc with sh", "snakemake"],
)
def test_no_process_of_a_stage_survives_after_its_engine_was_killed(
    trainable: Path, command: tuple[str, ...], shell: str
):
    params = trainable / "params.yaml"
    endless = params.read_text().replace("max_steps: 40000", "max_steps: 400000000")
    params.write_text(endless)
    printed = trainable.parent / "printed"
    with (
        printed.open("wb") as output,
        subprocess.Popen(  # noqa: S603  # an engine
            command,
            cwd=trainable,
            env={**environment(trainable), "PYTHONFAULTHANDLER": "1", "SHELL": shell},
            stdout=output,
            stderr=output,
        ) as engine,
    ):
        stage = wait_for_stage(psutil.Process(engine.pid))
        below = [stage, *stage.children(recursive=True)]
        engine.kill()
    gone, alive = psutil.wait_procs(below, timeout=60)
    if stage in alive:
        stage.send_signal(signal.SIGABRT)  # Python prints where each thread is
        stage.wait(timeout=30)
    assert alive == [], printed.read_text()[-4000:]
    assert stage in gone


def test_training_that_finished_after_snakemake_was_killed_is_not_repeated(trainable: Path):
    """A scheduler's job can outlive its Snakemake; the next Snakemake deletes its outputs."""
    policy = trainable / "results/train/plain/seed1/policy.pt"
    attempt = trainable / "results/.work/train/plain/seed1/attempt.json"
    log = trainable / "logs/train/plain/seed1.log"
    run(trainable, *TRAIN, PIPELINE_CALL="killed")
    before = policy.read_bytes()
    policy.unlink()
    engine = ("snakemake", "--cores", "1", str(policy.relative_to(trainable)))
    run(trainable, *engine)
    assert "using the outputs of an earlier attempt that finished" in log.read_text()
    assert policy.read_bytes() == before
    assert "call" not in json.loads(attempt.read_text()), "this call has ended, and knows of it"
    run(trainable, *engine, "--force")
    assert "using the outputs of" not in log.read_text()
    assert policy.read_bytes() == before


def wait_for_stage(engine, timeout_s: float = 120):
    """Return the training process below `engine` when it has started an environment."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for process in engine.children(recursive=True):
            try:
                command = process.cmdline()
                if command[1:2] == ["workflow/scripts/train.py"] and process.children():
                    return process
            except psutil.NoSuchProcess:
                continue
        if engine.status() == psutil.STATUS_ZOMBIE:
            break
        threading.Event().wait(0.05)  # there is no event for a new grandchild process
    pytest.fail("the engine never started the stage")
