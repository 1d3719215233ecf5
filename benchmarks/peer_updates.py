"""ML-Agents' side of updates.py; runs with the interpreter of `make peer`, not with ours.

Reads lines `<algorithm> <batch size> <threads>` and answers each with the milliseconds that one
minibatch took: drawing it from the buffer and `optimizer.update`, as its trainers do.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from mlagents.trainers.buffer import (
    AgentBuffer,
    BufferKey,
    ObservationKeyPrefix,
    RewardSignalUtil,
)
from mlagents.trainers.policy.torch_policy import TorchPolicy
from mlagents.trainers.ppo.optimizer_torch import PPOSettings, TorchPPOOptimizer
from mlagents.trainers.settings import NetworkSettings, TrainerSettings
from mlagents.trainers.torch_entities.networks import SimpleActor
from mlagents_envs.base_env import (
    ActionSpec,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
)

N_OBS, N_ACTIONS = 8, 2
NETWORK = NetworkSettings(normalize=True, hidden_units=128, num_layers=2)


def spec() -> BehaviorSpec:
    """What balance_ball's agents see and do."""
    vector = ObservationSpec((N_OBS,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "obs")
    return BehaviorSpec([vector], ActionSpec(N_ACTIONS, ()))


def ppo(n_rows: int, batch_size: int) -> float:
    """Seconds of an epoch over `n_rows`, per minibatch."""
    plain = {"conditional_sigma": False, "tanh_squash": False}
    policy = TorchPolicy(0, spec(), NETWORK, SimpleActor, plain)
    settings = TrainerSettings(
        network_settings=NETWORK, hyperparameters=PPOSettings(batch_size=batch_size)
    )
    optimizer = TorchPPOOptimizer(policy, settings)
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    columns = {
        (ObservationKeyPrefix.OBSERVATION, 0): numbers(n_rows, N_OBS),
        BufferKey.CONTINUOUS_ACTION: numbers(n_rows, N_ACTIONS),
        BufferKey.CONTINUOUS_LOG_PROBS: numbers(n_rows, N_ACTIONS) * 0.1 - 1.0,
        BufferKey.ACTION_MASK: np.ones((n_rows, 1), np.float32),
        BufferKey.MASKS: np.ones(n_rows, np.float32),
        BufferKey.ADVANTAGES: numbers(n_rows),
        RewardSignalUtil.returns_key("extrinsic"): numbers(n_rows),
        RewardSignalUtil.value_estimates_key("extrinsic"): numbers(n_rows),
    }
    buffer = AgentBuffer()
    for key, values in columns.items():
        buffer[key].extend(list(values))

    def epoch() -> None:
        buffer.shuffle(sequence_length=1)
        for start in range(0, n_rows // batch_size * batch_size, batch_size):
            optimizer.update(buffer.make_mini_batch(start, start + batch_size), batch_size)

    epoch()  # the first allocates
    began = time.process_time()
    epoch()
    return (time.process_time() - began) / (n_rows // batch_size)


ALGORITHMS = {"ppo": ppo}


def main() -> None:
    """Answer until the other side hangs up."""
    for line in sys.stdin:
        name, batch_size, n_threads = line.split()
        torch.set_num_threads(int(n_threads))
        seconds = ALGORITHMS[name](16 * int(batch_size), int(batch_size))
        print(f"{seconds * 1e3:.4f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
