"""The life of a run as a user has it: learn, Ctrl+C, --resume, --initialize-from, --inference."""

from __future__ import annotations

import json
import signal

import psutil
import pytest
from learn_command import PPO, checkpoint, write


@pytest.fixture
def learn(started, packed, tmp_path):
    """Runs the command in `tmp_path`; with `until`, Ctrl+C as soon as a line matches."""
    build = packed("balance_ball", tmp_path / "balance_ball")
    write(tmp_path, PPO | {"max_steps": 8000, "checkpoint_interval": 2000})

    def run(*more: str, until: str | None = None) -> tuple[int, str]:
        options = ["learn", "config.yaml", "--env", str(build), "--seed", "3", "--track", "jsonl"]
        one = started("pipeline.cli", *options, *more)
        if until is not None:
            one.until(until)
            one.process.send_signal(signal.SIGINT)
        return one.end(), one.told

    return run


def step_of(run) -> int:
    return checkpoint(run.parents[1], run.name)["learner"]["step"]


@pytest.mark.slow
def test_learn_interrupt_resume_initialize_and_inference(learn, tmp_path):
    code, told = learn("--run-id", "a", until=r"3DBall\. Step: 2000\.")
    a = tmp_path / "results" / "a"
    assert code == 130, told
    assert "give the same command with --resume" in told
    stopped = step_of(a)
    assert 2000 <= stopped < 8000
    assert (a / "3DBall.onnx").is_file()
    assert (a / "configuration.yaml").is_file()
    assert json.loads((a / "run_logs" / "timers.json").read_text())["name"] == "root"
    status = json.loads((a / "run_logs" / "training_status.json").read_text())
    assert stopped in [one["steps"] for one in status["3DBall"]["checkpoints"]]

    code, told = learn("--run-id", "a")
    assert code == 2
    assert "Previous data from this run ID was found" in told
    code, told = learn("--run-id", "a", "--resume")
    assert code == 0, told
    assert f"Resuming training of 3DBall from step {stopped}." in told
    assert step_of(a) >= 8000
    status = json.loads((a / "run_logs" / "training_status.json").read_text())
    with (a / "metrics.jsonl").open() as lines:
        assert [json.loads(line)["step"] for line in lines] == [*range(1000, 8001, 1000)]
    assert not list(a.glob("*/events.*"))
    steps = [one["steps"] for one in status["3DBall"]["checkpoints"]]
    assert steps == sorted(steps)
    assert steps[-1] == status["3DBall"]["final_checkpoint"]["steps"] == step_of(a)
    for one in status["3DBall"]["checkpoints"]:
        for path in (one["file_path"], *one["auxillary_file_paths"]):
            assert (tmp_path / path).is_file()

    code, told = learn("--run-id", "b", "--initialize-from", "a", until=r"3DBall\. Step: 1000\.")
    assert code == 130, told
    assert "3DBall begins with the weights of results/a/3DBall/checkpoint.pt" in told
    assert "were not loaded" not in told
    assert step_of(tmp_path / "results" / "b") < 8000

    before = {path: path.read_bytes() for path in a.rglob("*") if path.is_file()}
    more = ["--run-id", "a", "--resume", "--inference"]
    code, told = learn(*more, until=r"3DBall\. Step: 12000\. .*Not Training")
    assert code == 0, told
    assert "Played with seed 3" in told
    after = {path: path.read_bytes() for path in a.rglob("*") if path.is_file()}
    changed = [p.name for p in after if after[p] != before.get(p) and p.suffix != ".log"]
    assert changed == []

    code, told = learn("--run-id", "a", "--force", until=r"3DBall\. Step: 1000\.")
    assert code == 130, told
    assert "results/a.1" in told
    assert step_of(tmp_path / "results" / "a.1") >= 8000
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []
