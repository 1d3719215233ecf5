"""A run from start to end: learn, Ctrl+C, --resume, --initialize-from, --inference."""

import json
import signal

import psutil
import pytest
from learn_command import PPO, checkpoint, write


@pytest.fixture
def learn(started, packed, tmp_path):
    """Run the command in `tmp_path`; with `until`, send Ctrl+C when a line matches."""
    build = packed("balance_ball", tmp_path / "balance_ball")
    write(tmp_path, PPO | {"max_steps": 8000, "checkpoint_interval": 2000})

    def run(*more: str, until: str | None = None) -> tuple[int, str]:
        options = ["learn", "config.yaml", "--env", str(build), "--seed", "3", "--track", "jsonl"]
        learning = started("pipeline.cli.main", *options, *more)
        if until is not None:
            learning.until(until)
            learning.process.send_signal(signal.SIGINT)
        return learning.end(), learning.told

    return run


def step_of(run) -> int:
    return checkpoint(run.parents[1], run.name)["learner"]["step"]


@pytest.mark.slow
def test_run_can_be_interrupted_resumed_used_as_initial_weights_and_played_in_inference(
    learn, tmp_path
):
    code, output = learn("--run-id", "a", until=r"3DBall\. Step: 2000\.")
    a = tmp_path / "results" / "a"
    assert code == 130, output
    assert "give the same command with --resume" in output
    stopped = step_of(a)
    assert 2000 <= stopped < 8000
    assert (a / "3DBall.onnx").is_file()
    assert (a / "configuration.yaml").is_file()
    assert json.loads((a / "run_logs" / "timers.json").read_text())["name"] == "root"
    status = json.loads((a / "run_logs" / "training_status.json").read_text())
    assert stopped in [entry["steps"] for entry in status["3DBall"]["checkpoints"]]

    code, output = learn("--run-id", "a")
    assert code == 2
    assert "Previous data from this run ID was found" in output
    code, output = learn("--run-id", "a", "--resume")
    assert code == 0, output
    assert f"Resuming training of 3DBall from step {stopped}." in output
    assert step_of(a) >= 8000
    status = json.loads((a / "run_logs" / "training_status.json").read_text())
    with (a / "metrics.jsonl").open() as lines:
        assert [json.loads(line)["step"] for line in lines] == [*range(1000, 8001, 1000)]
    assert not list(a.glob("*/events.*"))
    steps = [entry["steps"] for entry in status["3DBall"]["checkpoints"]]
    assert steps == sorted(steps)
    assert steps[-1] == status["3DBall"]["final_checkpoint"]["steps"] == step_of(a)
    for entry in status["3DBall"]["checkpoints"]:
        for path in (entry["file_path"], *entry["auxillary_file_paths"]):
            assert (tmp_path / path).is_file()

    code, output = learn("--run-id", "b", "--initialize-from", "a", until=r"3DBall\. Step: 1000\.")
    assert code == 130, output
    assert "3DBall begins with the weights of results/a/3DBall/checkpoint.pt" in output
    assert "were not loaded" not in output
    assert step_of(tmp_path / "results" / "b") < 8000

    before = {path: path.read_bytes() for path in a.rglob("*") if path.is_file()}
    more = ["--run-id", "a", "--resume", "--inference"]
    code, output = learn(*more, until=r"3DBall\. Step: 12000\. .*Not Training")
    assert code == 0, output
    assert "Played with seed 3" in output
    after = {path: path.read_bytes() for path in a.rglob("*") if path.is_file()}
    changed = [p.name for p in after if after[p] != before.get(p) and p.suffix != ".log"]
    assert changed == []

    code, output = learn("--run-id", "a", "--force", until=r"3DBall\. Step: 1000\.")
    assert code == 130, output
    assert "results/a.1" in output
    assert step_of(tmp_path / "results" / "a.1") >= 8000
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []
