"""Executables that are killed while a run trains in four of them."""

import re
import signal

import psutil
import pytest
import yaml
from learn_command import PPO, Learning, checkpoint


@pytest.fixture
def learn(started, packed, tmp_path):
    """Train in four executables, and kill one at the next line that matches each pattern."""
    build = packed("balance_ball", tmp_path / "balance_ball", n_agents=3)
    # both kills count, however long a busy machine takes from one to the other
    hour = {"env_settings": {"restarts_rate_limit_period_s": 3600}}
    settings = {"behaviors": {"3DBall": PPO | {"max_steps": 12000}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings | hour))
    command = ["learn", "config.yaml", "--env", str(build), "--num-envs", "4", "--seed", "1"]

    def run(kill_at: list[str]) -> Learning:
        learning = started("pipeline.cli.main", *command)
        for pattern in kill_at:
            learning.until(pattern)
            kill_newest(learning.process.pid)
        return learning

    return run


def kill_newest(trainer: int) -> None:
    """Kill -9 the executable that was started last: after a restart, the restarted one."""
    environments = psutil.Process(trainer).children()
    assert len(environments) == 4
    max(environments, key=lambda process: (process.create_time(), process.pid)).send_signal(
        signal.SIGKILL
    )


def nothing_is_left(folder) -> bool:
    return not any(str(folder) in str(p.info["cmdline"]) for p in psutil.process_iter(["cmdline"]))


@pytest.mark.slow
def test_killed_environment_restarts_and_too_many_restarts_save_and_end_the_run(learn, tmp_path):
    learning = learn([r"Step: 3000\.", r"Step: 5000\."])
    assert learning.end() == 2, learning.told
    (restart,) = [line for line in learning.told.splitlines() if "Restarting worker" in line]
    assert re.search(r"Restarting worker\[3\] after '.*(killed|signal|SIGKILL|-9)", restart)
    assert "Worker[3] continues from its last step." in learning.told
    assert "Worker 3 exceeded the allowed number of restarts, 1 of 1 in 3600 s" in learning.error()
    assert 5000 <= checkpoint(tmp_path, "ppo")["learner"]["step"] < 12000
    assert (tmp_path / "results/ppo/3DBall.onnx").is_file()
    assert nothing_is_left(tmp_path)
