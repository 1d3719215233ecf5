"""`pipeline learn` on several processes: trained, killed, resumed, stopped and repeated."""

import hashlib
import json
import re
import signal
from pathlib import Path

import pytest
from learn_command import PPO, Learning, checkpoint, gone, write
from project import commit, run, set_params, tiny

SUFFIXES = (".pt", ".onnx", ".npz")


@pytest.fixture
def learn(started, packed, tmp_path):
    """Start `pipeline learn` with two learners in `tmp_path`; `settings` change PPO's settings."""
    build = packed("balance_ball", tmp_path / "balance_ball")

    def start(*more: str, launcher: tuple[str, ...] = (), **settings: object) -> Learning:
        write(tmp_path, PPO | settings)
        options = ["learn", "config.yaml", "--env", str(build), "--seed", "3", *more]
        options += [] if launcher or "--learners" in more else ["--learners", "2"]
        return started(*launcher, "pipeline.cli.main", *options)

    return start


@pytest.mark.slow
def test_two_learners_write_the_same_bytes_whether_or_not_torchrun_starts_the_learners(
    learn, tmp_path
):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    for run_id, prefix in (("a", ()), ("b", launcher)):
        learning = learn("--run-id", run_id, launcher=prefix)
        assert learning.end() == 0, learning.told
        assert "Trained with seed 3" in learning.told
    a, b = tmp_path / "results" / "a", tmp_path / "results" / "b"
    for name in ("3DBall.onnx", "3DBall/checkpoint.pt", "progress.csv"):
        content = (a / name).read_bytes()
        if name.endswith(".onnx"):  # contains the run's name
            content = content.replace(b'"run":"a"', b'"run":"b"')
        assert content == (b / name).read_bytes(), name
    state = checkpoint(tmp_path, "a")["learner"]
    assert 4000 <= state["step"] < 4000 + 2 * 12 * 32
    assert 6 <= state["n_updates"] <= 7
    steps = [int(line.split(",")[1]) for line in (a / "progress.csv").read_text().splitlines()[1:]]
    assert steps == [1000, 2000, 3000, 4000]
    assert {path.name for path in a.glob("run_logs/Player-*.log")} == {
        "Player-0.log",
        "Player-1.log",
    }
    written = {path.relative_to(a).as_posix() for path in a.rglob("events*")}
    assert len(written) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["first", "second"])
def test_killed_learners_leave_no_process_and_resume_exactly(learn, tmp_path, victim):
    settings = {"max_steps": 20_000, "checkpoint_interval": 1000}
    uninterrupted = learn("--run-id", "b", **settings)
    assert uninterrupted.end() == 0, uninterrupted.told
    learning = learn("--run-id", "a", **settings)
    learning.until(r"Exported .*3DBall-2\d\d\d\.onnx")
    processes = learning.processes()
    assert len(processes) == 4  # two learners with an environment each
    (learning.process if victim == "first" else learning.follower).kill()
    assert gone(processes)
    learning.end()
    before = checkpoint(tmp_path, "a")
    assert len(before["ranks"]) == 1
    resumed = learn("--run-id", "a", "--resume", **settings)
    assert resumed.end() == 0, resumed.told
    assert f"Resuming training of 3DBall from step {before['learner']['step']}." in resumed.told
    assert results(tmp_path, "a") == results(tmp_path, "b")


@pytest.mark.slow
def test_run_resumed_with_another_number_of_learners_is_marked_as_inexact(learn, tmp_path):
    learning = learn("--run-id", "a", max_steps=1_000_000, checkpoint_interval=1000)
    learning.until(r"Exported .*3DBall-2\d\d\d\.onnx")
    learning.process.kill()
    learning.end()
    step = checkpoint(tmp_path, "a")["learner"]["step"]
    resumed = learn("--run-id", "a", "--resume", "--learners", "1", max_steps=step + 1000)
    assert resumed.end() == 0, resumed.told
    assert checkpoint(tmp_path, "a")["run"]["interrupted"] == [step]


def results(folder: Path, run: str) -> dict[str, str]:
    """Return digests of a run's files, which must not depend on the run's name."""
    files = [path for path in (folder / "results" / run).glob("*/*") if path.suffix in SUFFIXES]
    contents = {path.name: path.read_bytes() for path in files}
    assert len(contents) > 5
    return {
        name: hashlib.sha256(content.replace(f'"run":"{run}"'.encode(), b"")).hexdigest()
        for name, content in contents.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("learner", r"the learner of rank 1 \(of 2\) was ended by SIGKILL.*learner-1\.log"),
        ("environment", r"the learner of rank 1 \(of 2\) has failed: Worker 0 exceeded"),
    ],
)
def test_failure_of_one_learner_is_reported_in_one_line_and_leaves_no_process(
    learn, tmp_path, victim, said
):
    learning = learn("--run-id", "a", "--max-lifetime-restarts", "0", max_steps=1_000_000)
    learning.until(r"Step: 1000\.")
    processes = learning.processes()
    (environment,) = learning.follower.children()
    (learning.follower if victim == "learner" else environment).kill()
    assert learning.end() == 2, learning.told
    assert re.search(said, learning.error())
    assert gone(processes)


@pytest.mark.slow
def test_learners_that_get_a_signal_save_the_run_once_and_all_end(learn, tmp_path):
    learning = learn("--run-id", "a", max_steps=1_000_000)
    learning.until(r"Step: 1000\.")
    processes = learning.processes()
    learning.process.send_signal(signal.SIGUSR1)
    assert learning.end() == 138, learning.told
    assert learning.told.count("give the same command with --resume") == 1
    assert learning.told.count("Exported") == 1
    assert gone(processes)
    assert checkpoint(tmp_path, "a")["learner"]["step"] >= 1000
    status = json.loads((tmp_path / "results/a/run_logs/training_status.json").read_text())
    assert len(status["3DBall"]["checkpoints"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["poca", "sac"])
def test_poca_and_sac_train_with_two_learners(learn, tmp_path, algorithm):
    rows = {"batch_size": 64, "buffer_size": 512}
    if algorithm == "sac":
        rows = {"batch_size": 32, "buffer_size": 4000, "steps_per_update": 10}
    learning = learn("--run-id", "a", trainer_type=algorithm, hyperparameters=rows, max_steps=2000)
    assert learning.end() == 0, learning.told
    state = checkpoint(tmp_path, "a")["learner"]
    assert state["step"] >= 2000
    assert state["n_updates"] >= (3 if algorithm == "poca" else 10)
    assert state["statistics"]["n_episodes"] > 20


def test_settings_that_two_learners_do_not_support_are_refused_in_one_line(learn, tmp_path):
    rows = {"batch_size": 65, "buffer_size": 520}
    learning = learn("--run-id", "a", trainer_type="sac", hyperparameters=rows)
    assert learning.end() == 2
    assert "3DBall.hyperparameters.batch_size: 65 cannot be split evenly" in learning.error()
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_train_stage_uses_two_learners_with_dvc_and_with_snakemake(project: Path):
    """`learners: 2` of an experiment in params.yaml, through the same rule of both engines."""
    content = tiny("plain")
    content["experiments"]["plain"] |= {"learners": 2, "resources": {"memory_mb": 700, "gpus": 1}}
    set_params(project, content)
    commit(project, "with two learners")
    snakemake = ("snakemake", "--cores", "2", "--quiet", "all")
    folder = project / "results/train/plain/seed1"
    run(project, *snakemake, "--", "results/train/plain/seed1/policy.pt")
    metrics = json.loads((folder / "metrics.json").read_text())["3DBall"]
    assert metrics["steps"] >= 4000
    work = project / "results/.work/train/plain/seed1"
    facts = json.loads((work / "stage.json").read_text())
    assert facts["params"]["learners"] == 2
    assert (work / "run/logs/learner-1.log").is_file()
    run(project, "dvc", "init", "--force", "--quiet")
    # A dry run needs the files that all other stages depend on.
    run(project, "dvc", "repro", "check")
    status = run(project, "dvc", "repro", "--dry", "train@plain-1").stdout
    assert "python workflow/scripts/train.py plain --seed 1" in status
