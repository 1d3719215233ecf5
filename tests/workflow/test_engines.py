"""The jobs that both engines choose to run, on a copy of the project with fast stages."""

import re
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from project import (
    REPRO,
    ball,
    commit,
    copy_project,
    fast_stages,
    git,
    init_dvc,
    ran,
    run,
    set_params,
)

from pipeline.cli.sync import sync
from pipeline.dag import engines
from pipeline.errors import StageError
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import plan

pytestmark = pytest.mark.slow


def repro(root: Path, engine: str) -> list[str]:
    """Bring the copy up to date, and return the jobs that ran."""
    return ran(root, *REPRO[engine])


def state_of(root: Path, engine: str) -> engines.State:
    return engines.dvc_state(root) if engine == "dvc" else engines.snakemake_state(root)


@pytest.fixture(scope="module", params=REPRO)
def built(request, tmp_path_factory) -> tuple[Path, str, list[str]]:
    """A copy that one engine has built once."""
    root = copy_project(tmp_path_factory.mktemp(request.param) / "project")
    text = (root / "params.yaml").read_text()
    five, three = ("".join(f"      - {seed}\n" for seed in range(1, n + 1)) for n in (5, 3))
    fewer = text.replace(five, "      - 1\n").replace(three, "      - 1\n      - 2\n")
    set_params(root, fewer)
    init_dvc(root)
    fast_stages(root)
    done = repro(root, request.param)
    shutil.copy(root / "ran.log", root.parent / "first.log")
    return root, request.param, done


@pytest.fixture
def toy(built, tmp_path) -> tuple[Path, str]:
    """A copy of `built` that a test may change."""
    root = tmp_path / "project"
    shutil.copytree(built[0], root, symlinks=True)
    return root, built[1]


def all_jobs(root: Path) -> int:
    tables = plan(load_params(root / "params.yaml"))["runs"]
    return sum(len(table) for table in tables.values()) + 1


def of_experiment(name: str, *stages: str, seeds: tuple[int, ...] = (1, 2)) -> list[str]:
    return [f"{stage} {name} --seed {seed}" for stage in stages for seed in seeds]


def test_runs_are_evaluated_soon_after_their_training_and_not_after_all_trainings(built):
    """The first score comes after one training, not after all; Snakemake has two cores here."""
    root, engine, _ = built
    order = (root.parent / "first.log").read_text().splitlines()
    trained = [job for job in order if job.startswith("train ")]
    late = []
    for number, job in enumerate(trained):
        before = order[: order.index(job.replace("train ", "evaluate ", 1))]
        late.append(sum(other.startswith("train ") for other in before) - number - 1)
    assert max(late) <= (0 if engine == "dvc" else 2), order


def test_first_call_of_the_engine_runs_all_jobs_and_the_second_call_runs_none(built):
    root, engine, first = built
    assert len(first) == all_jobs(root)
    assert repro(root, engine) == []


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


def test_changed_values_rerun_exactly_the_jobs_that_depend_on_them(toy):
    """A learning rate in an override and one in a trainer file, episodes, and a comment."""
    root, engine = toy
    params = root / "params.yaml"
    text = f"# a remark\n{params.read_text()}"
    head, tail = text.split("  collector_bc_ppo:\n")
    size = "            batch_size: 256\n"
    tail = tail.replace(size, f"{size}            learning_rate: 1e-05\n", 1)
    head = head.replace("      episodes: 64\n", "      episodes: 65\n", 1)
    params.write_text(f"{head}  collector_bc_ppo:\n{tail}")
    trainer = root / "config/ppo/GridWorld.yaml"
    text = trainer.read_text()
    assert "learning_rate:" in text
    trainer.write_text(text.replace("learning_rate:", "learning_rate: 2.5e-5  #", 1))
    learned = ("train", "export", "evaluate")  # the pretraining has its own learning rate
    assert repro(root, engine) == sorted(
        [
            *of_experiment("collector_ppo", "evaluate", seeds=(1,)),
            *of_experiment("collector_bc_ppo", *learned, seeds=(1,)),
            *of_experiment("grid_world_ppo", *learned),
            "report",
        ]
    )


def test_values_that_are_only_spelled_differently_rerun_nothing(toy):
    root, engine = toy
    params = root / "params.yaml"
    for old, new in (
        ("  torch_threads: 1\n  device: cpu\n", "  device: 'cpu'\n  torch_threads: 1.0\n"),
        ("max_steps: 24000\n", "max_steps: 2.4e4\n"),
        ("learning_rate: 3.0e-4\n", "learning_rate: 0.0003\n"),
        ("episodes: 64\n", "episodes: 64.0\n"),
        ("    seed: 100\n", "    seed: 1e2\n"),
        ("    source: builtin\n    args: []\n", "    args: []\n    source: builtin\n"),
    ):
        text = params.read_text()
        assert old in text
        params.write_text(text.replace(old, new))
    assert repro(root, engine) == []


def test_edited_source_of_an_algorithm_reruns_training_but_builds_no_environment_again(toy):
    root, engine = toy
    with (root / "src/pipeline/algos/ppo.py").open("a") as file:
        file.write("\n# a remark\n")
    ran = {line.split()[0] for line in repro(root, engine)}
    assert "train" in ran
    assert not ran & {"env", "demos"}


def test_new_seed_and_new_network_size_are_refused_until_the_plan_is_written_again(toy):
    root, engine = toy
    replace(root / "config/ppo/FoodCollector.yaml", "hidden_units: 256", "hidden_units: 64")
    with pytest.raises(StageError, match="pipeline plan"):
        sync(root, engine)
    grid_world = "          summary_freq: 5000\n    seeds:\n"
    replace(root / "params.yaml", grid_world, f"{grid_world}      - 3\n")
    if engine == "snakemake":
        completed = run(root, "snakemake", "--cores", "1", check=False)
        assert completed.returncode != 0
        assert "pipeline plan" in completed.stdout + completed.stderr
    run(root, "python", "-m", "pipeline.cli.main", "plan")
    ran = repro(root, engine)
    assert "pretrain collector_bc_ppo --seed 1" in ran
    expected = of_experiment("grid_world_ppo", "train", "export", "evaluate", seeds=(3,))
    assert [job for job in ran if "grid_world" in job] == sorted(expected)


def test_sync_makes_the_other_engine_accept_the_results_and_later_changes_are_still_noticed(toy):
    root, engine = toy
    (other,) = REPRO.keys() - {engine}
    with pytest.raises(StageError, match=other):
        sync(root, other)
    files = [file for file in (root / "results").rglob("*") if file.is_file()]
    before = {file: file.stat().st_mtime_ns for file in files}
    assert f"{other} now agrees with {engine}" in sync(root, None)
    if other == "dvc":  # Snakemake compares large files only by their times
        assert {file: file.stat().st_mtime_ns for file in files} == before
    assert repro(root, other) == []
    assert sync(root, None) == "DVC and Snakemake already agree."
    replace(root / "params.yaml", "    seed: 100\n", "    seed: 101\n")
    assert "demos@collector_expert" in state_of(root, other).pending


RUN_BY_DVC = ("python", "-m", "pipeline.cli.main", "run", "ball", "--engine", "dvc")


def test_pipeline_run_makes_dvc_accept_results_of_snakemake_and_refuses_a_parallel_run(tmp_path):
    """Earlier, DVC made all results again, and a second run failed because of DVC's lock."""
    root = copy_project(tmp_path / "project")
    set_params(root, ball())
    shutil.rmtree(root / ".dvc", ignore_errors=True)
    fast_stages(root)
    assert repro(root, "snakemake")
    refused = run(root, *RUN_BY_DVC, check=False)
    assert (refused.returncode, "run `git init && dvc init`" in refused.stderr) == (2, True)
    init_dvc(root)
    with FileLock(root / "results/.work/run.lock"):
        refused = run(root, *RUN_BY_DVC, check=False)
    assert "another `pipeline run` is running here" in refused.stderr
    assert ran(root, *RUN_BY_DVC) == []
    assert state_of(root, "dvc").up_to_date
    replace(root / "params.yaml", "threads: 2", "threads: 3")
    assert "train ball --seed 1" in ran(root, *RUN_BY_DVC)


def test_snakemake_warns_about_results_of_dvc_without_a_snakemake_record(toy):
    """Earlier, Snakemake printed `Nothing to be done` after `dvc repro` and an edit."""
    root, engine = toy

    def warned() -> list[str]:
        printed = run(root, "snakemake", "--dry-run", "--cores", "1").stdout
        return [line for line in printed.splitlines() if "`pipeline sync`" in line]

    if engine == "dvc":
        (line,) = warned()
        assert re.match(
            r"Snakemake has no record of \d+ results \(the first is build/env/\w+\)", line
        )
        sync(root, engine)
    assert warned() == []


def test_sync_refuses_results_that_are_not_up_to_date(toy):
    root, engine = toy
    file = "src/pipeline/algos/ppo.py"
    with (root / file).open("a") as source:
        source.write("\n# edited during the run\n")
    with pytest.raises(StageError, match=rf"would run .* \(changed: {file}\)\. Run") as caught:
        sync(root, engine)
    assert len(str(caught.value).splitlines()) == 1
    replace(root / "params.yaml", "    seed: 100\n", "    seed: 101\n")
    with pytest.raises(StageError, match="demos@collector_expert"):
        sync(root, engine)
    with pytest.raises(StageError, match="neither engine is up to date"):
        sync(root, None)
    with (root / "workflow/runs.yaml").open("a") as table:
        table.write("# by hand\n")
    with pytest.raises(StageError, match="pipeline plan"):
        sync(root, engine)


def test_output_that_was_deleted_is_noticed_and_made_again(toy):
    root, engine = toy
    metrics = root / "results/evaluate/grid_world_ppo/seed1/metrics.json"
    content = metrics.read_text()
    metrics.unlink()
    assert "evaluate@grid_world_ppo-1" in state_of(root, engine).pending
    repro(root, engine)
    assert metrics.read_text() == content


def made_by_stages(root: Path) -> dict[str, bytes]:
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for place in ("results", "data", "build")
        for file in sorted((root / place).rglob("*"))
        if file.is_file()
    }


# A seed that is not planned, unknown keys, no YAML, and a mistake in a trainer file.
MISTAKES = [
    ("params.yaml", "seeds:\n      - 1\n", "seeds:\n      - 7\n"),
    ("params.yaml", "episodes: 48", "episoden: 48"),
    ("params.yaml", "runtime:\n", "runtime: [\n"),
    ("config/ppo/GridWorld.yaml", "learning_rate:", "learning_rat:"),
]


def test_mistake_in_the_parameters_is_refused_before_any_result_is_deleted(toy):
    root, engine = toy
    before = made_by_stages(root)
    assert any("results/report" in name for name in before)
    (root / "ran.log").unlink(missing_ok=True)
    command = ("dvc", "repro") if engine == "dvc" else ("snakemake", "--cores", "1")
    for name, old, new in MISTAKES:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new, 1))
        assert run(root, *command, check=False).returncode != 0, new
        (root / name).write_text(text)
    assert not (root / "ran.log").exists()
    assert made_by_stages(root) == before
    assert repro(root, engine) == []


def test_pipeline_run_shows_the_end_of_the_log_of_a_failed_stage(toy):
    root, engine = toy
    replace(root / "params.yaml", "    episodes: 48\n", "    episodes: 49\n")
    (root / "workflow/scripts/demos.py").write_text(
        "from pathlib import Path\n"
        "from pipeline.tracking.progress import reporting\n"
        "with reporting('demos', 'collector_expert', Path.cwd()):\n"
        "    raise SystemExit('no luck')\n"
    )
    completed = run(root, "pipeline", "run", "--engine", engine, check=False)
    assert completed.returncode == 2
    log = "logs/demos/collector_expert.log"
    message = f"demos collector_expert failed; the end of {log}:\n  no luck\n"
    assert message in completed.stderr
    assert f"logs/{engine}.log" in completed.stderr.splitlines()[-1]
    # the total is not compared: it is not known yet which later stages must run
    assert completed.stderr.startswith("stage 1 of ")
    assert completed.stdout == ""


def test_clone_that_pulled_from_the_dvc_remote_reruns_only_the_changed_evaluation(tmp_path: Path):
    root, clone = copy_project(tmp_path / "project"), tmp_path / "clone"
    set_params(root, ball())
    init_dvc(fast_stages(root))
    run(root, "dvc", "remote", "add", "--default", "store", str(tmp_path / "store"))
    run(root, "dvc", "repro")
    commit(root, "built")
    run(root, "dvc", "push")
    git(root, "clone", "-q", str(root), str(clone))
    assert not (clone / "build").exists()
    run(clone, "dvc", "pull")
    run(clone, "dvc", "repro")
    assert not (clone / "ran.log").exists()
    path = clone / "params.yaml"
    path.write_text(path.read_text().replace("episodes: 4", "episodes: 5"))
    run(clone, "dvc", "repro")
    assert (clone / "ran.log").read_text().splitlines() == ["evaluate ball --seed 1", "report"]


@pytest.mark.parametrize("engine", REPRO)
def test_sync_accepts_results_of_which_dvc_made_some_and_snakemake_made_others(engine, tmp_path):
    """Earlier, Snakemake did nothing after `dvc repro`, and `pipeline sync` refused."""
    root = copy_project(tmp_path / "project")
    content = ball()
    content["experiments"]["ball"]["seeds"] = [1, 2]
    set_params(root, content)
    init_dvc(fast_stages(root))
    assert len(repro(root, engine)) == 8
    content["experiments"]["ball"]["resources"]["threads"] = 3
    set_params(root, content)
    target = "results/export/ball/seed1"
    first = ["export ball --seed 1", "train ball --seed 1"]
    assert ran(root, "snakemake", "--cores", "1", target) == first
    with pytest.raises(StageError, match=r"snakemake would run .*train@ball-2.*Run `dvc repro` or"):
        sync(root, None)
    learned = of_experiment("ball", "train", "export", "evaluate")
    assert repro(root, "snakemake") == sorted({*learned, "report"} - {*first})
    made = made_by_stages(root)
    told = {"dvc": "each had made a part", "snakemake": "dvc now agrees with snakemake"}
    assert told[engine] in sync(root, None)
    assert made.items() <= made_by_stages(root).items()  # also Snakemake's marker files
    assert repro(root, "snakemake") == repro(root, "dvc") == []
