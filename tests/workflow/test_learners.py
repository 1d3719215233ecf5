"""One run on several processes, as a user has it: learned, killed, resumed, stopped, repeated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from pipeline.simulators.pack import pack
from pipeline.trainer.checkpoints import load_checkpoint

PPO = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 64, "buffer_size": 512, "num_epoch": 1},
    "network_settings": {"hidden_units": 16, "num_layers": 1, "normalize": True},
    "max_steps": 4000,
    "time_horizon": 32,
    "summary_freq": 1000,
}
WAIT_S = 200


class Learning:
    """A command that learns in `folder`, with what it has said so far."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder = folder
        self.told = ""
        self.process = subprocess.Popen(  # noqa: S603  # the tests' own commands
            [sys.executable, "-m", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
        )

    def until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told += line
            if re.search(pattern, line):
                return
        pytest.fail(f"never said {pattern}: {self.told}")

    def end(self) -> int:
        assert self.process.stdout is not None
        self.told += self.process.stdout.read()
        code = self.process.wait(timeout=WAIT_S)
        self.process.stdout.close()
        return code

    @property
    def follower(self) -> psutil.Process:
        """The process of rank 1."""
        children = psutil.Process(self.process.pid).children()
        (one,) = (one for one in children if "pipeline.trainer.follower" in one.cmdline())
        return one

    def processes(self) -> list[psutil.Process]:
        """The command and everything below it."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@pytest.fixture
def learn(tmp_path):
    """Starts `pipeline learn` with two learners in `tmp_path`; none of them outlives the test."""
    build = pack("balance_ball", tmp_path / "balance_ball")
    write(tmp_path, PPO)
    begun: list[Learning] = []

    def start(*more: str, launcher: tuple[str, ...] = (), seed: int = 3) -> Learning:
        options = ["learn", "config.yaml", "--env", str(build), "--seed", str(seed), *more]
        options += [] if launcher else ["--learners", "2"]
        begun.append(Learning(tmp_path, *launcher, "pipeline.cli", *options))
        return begun[-1]

    yield start
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


def write(folder: Path, settings: dict) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"behaviors": {"3DBall": settings}}))


def checkpoint(folder: Path, run: str) -> dict:
    return load_checkpoint(folder / "results" / run / "3DBall" / "checkpoint.pt")


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.slow
def test_two_learners_give_the_same_bytes_again_and_under_torchrun(learn, tmp_path):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    for run, how in (("a", ()), ("b", launcher)):
        one = learn("--run-id", run, launcher=how)
        assert one.end() == 0, one.told
        assert "Trained with seed 3" in one.told
    a, b = tmp_path / "results" / "a", tmp_path / "results" / "b"
    for name in ("3DBall.onnx", "3DBall/checkpoint.pt", "progress.csv"):
        content = (a / name).read_bytes()
        if name.endswith(".onnx"):  # names its run
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
def test_two_killed_learners_leave_nothing_and_go_on_when_resumed(learn, tmp_path):
    write(tmp_path, PPO | {"max_steps": 1_000_000, "checkpoint_interval": 1000})
    one = learn("--run-id", "a")
    one.until(r"Exported .*3DBall-2\d\d\d\.onnx")
    processes = one.processes()
    assert len(processes) == 4  # two learners, an environment each
    one.process.kill()
    assert gone(processes)
    one.end()
    before = checkpoint(tmp_path, "a")["learner"]
    write(tmp_path, PPO | {"max_steps": before["step"] + 1000})
    again = learn("--run-id", "a", "--resume")
    assert again.end() == 0, again.told
    assert f"Resuming training of 3DBall from step {before['step']}." in again.told
    after = checkpoint(tmp_path, "a")["learner"]
    assert after["step"] >= before["step"] + 1000
    assert after["n_updates"] > before["n_updates"]


@pytest.mark.slow
def test_a_dead_learner_ends_the_run_with_one_line_and_no_orphans(learn, tmp_path):
    write(tmp_path, PPO | {"max_steps": 1_000_000})
    one = learn("--run-id", "a")
    one.until(r"Step: 1000\.")
    processes = one.processes()
    one.follower.kill()
    assert one.end() == 2, one.told
    errors = [line for line in one.told.splitlines() if line.startswith("error")]
    assert len(errors) == 1, one.told
    assert "the learner of rank 1 (of 2) was ended by SIGKILL" in errors[0]
    assert "learner-1.log" in errors[0]
    assert "Traceback" not in one.told
    assert gone(processes)


@pytest.mark.slow
def test_the_failure_of_another_learners_environment_is_told(learn, tmp_path):
    restarts = {"env_settings": {"max_lifetime_restarts": 0}}
    behaviors = {"behaviors": {"3DBall": PPO | {"max_steps": 1_000_000}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(behaviors | restarts))
    one = learn("--run-id", "a")
    one.until(r"Step: 1000\.")
    processes = one.processes()
    (environment,) = one.follower.children()
    environment.kill()
    assert one.end() == 2, one.told
    errors = [line for line in one.told.splitlines() if line.startswith("error")]
    assert len(errors) == 1, one.told
    assert "the learner of rank 1 (of 2) has failed: Worker 0 exceeded" in errors[0]
    assert gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_saves_once_and_ends_all_learners(learn, tmp_path, number, code):
    write(tmp_path, PPO | {"max_steps": 1_000_000})
    one = learn("--run-id", "a")
    one.until(r"Step: 1000\.")
    processes = one.processes()
    one.process.send_signal(number)
    assert one.end() == code, one.told
    assert one.told.count("give the same command with --resume") == 1
    assert one.told.count("Exported") == 1
    assert gone(processes)
    assert checkpoint(tmp_path, "a")["learner"]["step"] >= 1000
    status = json.loads((tmp_path / "results/a/run_logs/training_status.json").read_text())
    assert len(status["3DBall"]["checkpoints"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["poca", "sac"])
def test_other_algorithms_learn_with_two_learners_too(learn, tmp_path, algorithm):
    rows = {"batch_size": 64, "buffer_size": 512}
    if algorithm == "sac":
        rows = {"batch_size": 32, "buffer_size": 4000, "steps_per_update": 10}
    write(tmp_path, PPO | {"trainer_type": algorithm, "hyperparameters": rows, "max_steps": 2000})
    one = learn("--run-id", "a")
    assert one.end() == 0, one.told
    state = checkpoint(tmp_path, "a")["learner"]
    assert state["step"] >= 2000
    assert state["n_updates"] >= (3 if algorithm == "poca" else 10)
    assert state["statistics"]["n_episodes"] > 20


def test_what_several_learners_cannot_do_is_one_line_and_leaves_nothing(learn, tmp_path):
    rows = {"batch_size": 65, "buffer_size": 520}
    write(tmp_path, PPO | {"trainer_type": "sac", "hyperparameters": rows})
    one = learn("--run-id", "a")
    assert one.end() == 2
    (line,) = [line for line in one.told.splitlines() if line.startswith("error")]
    assert "behaviors.3DBall.hyperparameters.batch_size: 65 cannot be shared equally" in line
    assert not (tmp_path / "results").exists()
