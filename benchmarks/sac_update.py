"""Time of one SAC gradient step of all networks: ours, and with a peer's Python ML-Agents'.

    python benchmarks/sac_update.py [--peer PYTHON] [--rounds 5] [--steps 200] [--rows 128]

PYTHON is an interpreter that has mlagents 1.1.0. Both take minibatches of 128 rows (or --rows) with
eight numbers observed and two continuous actions, normalised, networks of two layers of 128, one
reward signal, and one thread. Both read no environment; ours reads its minibatches from the replay
and rewards them, the peer gets the same minibatch each time. Processor time, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from pipeline.algos.sac import SAC
from pipeline.data.rollout import Rollout
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

SPEC = BehaviorSpec([ObservationSpec.vector(8)], ActionSpec.create_continuous(2))
N_STORED = 4096

PEER = """
import sys, time
import numpy as np
import mlagents.torch_utils
import torch
from mlagents.trainers.buffer import (
    AgentBuffer, BufferKey, ObservationKeyPrefix, RewardSignalUtil
)
from mlagents.trainers.policy.torch_policy import TorchPolicy
from mlagents.trainers.sac.optimizer_torch import SACSettings, TorchSACOptimizer
from mlagents.trainers.settings import NetworkSettings, TrainerSettings
from mlagents.trainers.torch_entities.networks import SimpleActor
from mlagents_envs.base_env import (
    ActionSpec, BehaviorSpec, DimensionProperty, ObservationSpec, ObservationType
)

n_rows, n_steps = map(int, sys.argv[1:])
torch.set_num_threads(1)
seen = ObservationSpec((8,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "seen")
spec = BehaviorSpec([seen], ActionSpec.create_continuous(2))
settings = TrainerSettings(
    trainer_type="sac",
    hyperparameters=SACSettings(batch_size=n_rows, buffer_size=4096),
    network_settings=NetworkSettings(hidden_units=128, num_layers=2, normalize=True),
)
traits = {"conditional_sigma": True, "tanh_squash": True}
policy = TorchPolicy(1, spec, settings.network_settings, SimpleActor, traits)
optimizer = TorchSACOptimizer(policy, settings)
rng = np.random.default_rng(0)
rows = AgentBuffer()
number = lambda: np.float32(rng.normal())
makers = {
    (ObservationKeyPrefix.OBSERVATION, 0): lambda: rng.normal(size=8).astype(np.float32),
    (ObservationKeyPrefix.NEXT_OBSERVATION, 0): lambda: rng.normal(size=8).astype(np.float32),
    BufferKey.CONTINUOUS_ACTION: lambda: np.tanh(rng.normal(size=2)).astype(np.float32),
    BufferKey.ACTION_MASK: lambda: np.ones(1, np.float32),
    BufferKey.DONE: lambda: np.float32(0),
    BufferKey.MASKS: lambda: np.float32(1),
    BufferKey.ENVIRONMENT_REWARDS: number,
    RewardSignalUtil.rewards_key("extrinsic"): number,
}
for _ in range(n_rows):
    for key, make in makers.items():
        rows[key].append(make())
for _ in range(20):
    optimizer.update(rows, 1)
for _ in sys.stdin:
    began = time.process_time()
    for _ in range(n_steps):
        optimizer.update(rows, 1)
    print((time.process_time() - began) / n_steps * 1e3, flush=True)
"""


def algorithm(n_rows: int) -> SAC:
    """With a filled replay."""
    own = {
        "trainer_type": "sac",
        "hyperparameters": {"batch_size": n_rows, "buffer_size": N_STORED},
        "network_settings": {"hidden_units": 128, "num_layers": 2, "normalize": True},
    }
    run = load_run_settings(None, overrides={"behaviors": {"B": own}})
    made = SAC(SPEC, run.behaviors["B"], seed=1, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    lengths = np.full(N_STORED // 32, 32)
    fields = {
        "obs_0": rng.normal(size=(N_STORED, 8)).astype(np.float32),
        "continuous": np.tanh(rng.normal(size=(N_STORED, 2))).astype(np.float32),
        "discrete": np.zeros((N_STORED, 0), dtype=np.int64),
        "reward": rng.normal(size=N_STORED).astype(np.float32),
    }
    made.replay.add(
        Rollout(
            fields=fields,
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            terminated=np.zeros(len(lengths), dtype=np.bool_),
            next_obs=[rng.normal(size=(len(lengths), 8)).astype(np.float32)],
        )
    )
    return made


def measure(one: SAC, n_steps: int) -> float:
    """Milliseconds of a gradient step."""
    began = time.process_time()
    for batch in one.samples.minibatches(n_steps):
        one._learn(batch)
    return (time.process_time() - began) / n_steps * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = algorithm(options.rows)
    measure(ours, 50)
    peer = None
    if options.peer is not None:
        peer = subprocess.Popen(  # noqa: S603  # what stands above
            [options.peer, "-c", PEER, str(options.rows), str(options.steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    ratios = []
    for number in range(1, options.rounds + 1):
        found = measure(ours, options.steps)
        line = f"round {number}: ours {found:6.2f} ms"
        if peer is not None and peer.stdin is not None and peer.stdout is not None:
            peer.stdin.write("go\n")
            peer.stdin.flush()
            theirs = float(peer.stdout.readline())
            ratios.append(theirs / found)
            line += f"   ML-Agents {theirs:6.2f} ms   ratio {ratios[-1]:5.2f}"
        sys.stdout.write(line + "\n")
    if peer is not None:
        peer.communicate("")
        sys.stdout.write(f"ratio: median {statistics.median(ratios):.2f}\n")


if __name__ == "__main__":
    main()
