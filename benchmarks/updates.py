"""Milliseconds per minibatch of our updates against ML-Agents', side by side.

    python benchmarks/updates.py [--rounds 5] [--batch-size 64 1024] [--algorithm ppo]

Both learn from random experience with balance_ball's shapes (8 numbers seen, 2 continuous actions)
in networks of two layers of 128, on one thread each; rounds alternate between the two programs.
Times are processor time. Ours is of whole updates, with values, advantages and statistics in them;
ML-Agents' is of drawing minibatches and `optimizer.update` alone. The ratio is taken within each
round. ML-Agents runs in the environment of `make peer`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from peer import peer_command

from pipeline.algos.ppo import PPO
from pipeline.data.rollout import Rollout
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = BehaviorSpec([ObservationSpec.vector(8)], ActionSpec(2, ()))
LENGTH = 64
N_MINIBATCHES = 16


def ppo(batch_size: int) -> tuple[Callable[[], object], int]:
    """A whole update, and how many minibatches it has."""
    n_rows = N_MINIBATCHES * batch_size
    numbers = {"batch_size": batch_size, "buffer_size": n_rows, "num_epoch": 3}
    network = {"normalize": True, "hidden_units": 128, "num_layers": 2}
    behavior = {"trainer_type": "ppo", "hyperparameters": numbers, "network_settings": network}
    run = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
    algorithm = PPO(SPEC, run.behaviors["B"], seed=1, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    n = n_rows // LENGTH
    rollout = Rollout(
        fields={
            "obs_0": rng.normal(size=(n_rows, 8)).astype(np.float32),
            "continuous": rng.normal(size=(n_rows, 2)).astype(np.float32),
            "discrete": np.zeros((n_rows, 0), np.int64),
            "log_prob": rng.normal(-1.0, 0.1, size=(n_rows, 2)).astype(np.float32),
            "reward": rng.normal(size=n_rows).astype(np.float32),
        },
        starts=np.arange(n) * LENGTH,
        lengths=np.full(n, LENGTH),
        terminated=np.zeros(n, np.bool_),
        next_obs=[rng.normal(size=(n, 8)).astype(np.float32)],
    )
    return lambda: algorithm.update(rollout, step=0), 3 * N_MINIBATCHES


ALGORITHMS = {"ppo": ppo}


def ours(name: str, batch_size: int) -> float:
    """Milliseconds per minibatch."""
    update, n_minibatches = ALGORITHMS[name](batch_size)
    update()
    began = time.process_time()
    update()
    return (time.process_time() - began) / n_minibatches * 1e3


def main() -> None:
    """Print a line for each algorithm and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--algorithm", nargs="+", choices=list(ALGORITHMS), default=["ppo"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [
        str(Path(peer_command()).with_name("python")),
        str(Path(__file__).with_name("peer_updates.py")),
    ]
    with subprocess.Popen(  # noqa: S603  # the program that is compared with
        command,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as peer:
        for name in options.algorithm:
            for size in options.batch_size:
                rounds = []
                for _ in range(options.rounds):
                    mine = ours(name, size)
                    peer.stdin.write(f"{name} {size} 1\n")
                    rounds.append((mine, float(peer.stdout.readline())))
                middle = [statistics.median(column) for column in zip(*rounds, strict=True)]
                ratio = statistics.median(theirs / mine for mine, theirs in rounds)
                print(  # noqa: T201
                    f"{name}, minibatches of {size}: ours {middle[0]:.2f} ms, ML-Agents "
                    f"{middle[1]:.2f} ms, ratio {ratio:.2f}"
                )
        peer.stdin.close()


if __name__ == "__main__":
    main()
