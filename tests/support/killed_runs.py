"""A run in an own process that is killed after an update and continued, and the same run unkilled.

As a program, it trains with `run.yaml` of a folder, and kills itself after an update (0: never).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from interpreter import python

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.simulators import registry
from pipeline.trainer.learner import Learner


class Halves(pipeline.Callback):
    """Halves the learning rate at each update, and counts the updates in a curve."""

    n_updates = 0

    def on_update(self, behavior, update):  # noqa: ARG002  # the signature is the contract
        self.n_updates += 1
        if behavior != "Corridor":  # its trainer has no values that can be set
            self.set("learning_rate", 3e-4 / 2**self.n_updates)
        self.log("Halves/Updates", self.n_updates)

    def state_dict(self):
        return {"n_updates": self.n_updates}

    def load_state_dict(self, state):
        self.n_updates = state["n_updates"]


def whole_and_killed(
    folder: Path, run: dict[str, Any], simulator: str, *, kill_at: int, first: Path
) -> tuple[list[Path], list[str]]:
    """Return the checkpoint of each run, and the last step and count of its updates as text.

    `first` is a folder with modules of the run.
    """
    checkpoints, counts = [], []
    for name, kills in (("whole", [0]), ("killed", [kill_at, 0])):
        (folder / name).mkdir()
        (folder / name / "run.yaml").write_text(yaml.safe_dump(run))
        for update in kills:
            words = (__file__, folder / name, update, simulator)
            completed = python(*words, first=[first], check=False)
            assert completed.returncode == (-9 if update else 0), completed.stderr
        checkpoints += (folder / name).glob("*/checkpoint.pt")
        counts.append(completed.stdout.splitlines()[-1])
    return checkpoints, counts


def main(folder: str, kill_at: str, simulator: str) -> None:
    torch.set_num_threads(1)
    learn = Learner.learn

    def counted(self: Learner) -> bool:
        learned = learn(self)
        if learned and self.n_updates == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return learned

    Learner.learn = counted
    env = InProcessEnvironment(registry.make(simulator, seed=3, n_agents=8))
    run = yaml.safe_load(Path(folder, "run.yaml").read_text())
    options = {"resume": True, "resume_interval_s": 0.0, "callbacks": [Halves()]}
    result = pipeline.train([env], run, seed=5, run_dir=Path(folder), **options)
    (curves,) = result.curves.values()
    print(*curves["Halves/Updates"][-1])  # noqa: T201  # the result of the program


if __name__ == "__main__":
    main(*sys.argv[1:])
