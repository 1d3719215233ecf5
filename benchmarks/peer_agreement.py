"""ML-Agents' side of agreement.py; runs with the interpreter of `make peer`, not with ours.

    python peer_agreement.py ALGORITHM GIVEN FOUND EPSILON BETA RATE CONTINUOUS [BRANCH ...]

Takes weights and minibatches from the file GIVEN, makes an `optimizer.update` of each minibatch,
and writes the weights to FOUND.
"""

from __future__ import annotations

import sys
from typing import Any

import mlagents.torch_utils  # noqa: F401  # before torch, as in its trainers
import numpy as np
import torch
from mlagents.trainers.buffer import AgentBuffer, BufferKey, RewardSignalUtil
from mlagents.trainers.policy.torch_policy import TorchPolicy
from mlagents.trainers.ppo.optimizer_torch import PPOSettings, TorchPPOOptimizer
from mlagents.trainers.sac.optimizer_torch import SACSettings, TorchSACOptimizer
from mlagents.trainers.settings import NetworkSettings, ScheduleType, TrainerSettings
from mlagents.trainers.torch_entities.networks import SimpleActor
from mlagents.trainers.trajectory import ObsUtil
from mlagents_envs.base_env import (
    ActionSpec,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
)

NETWORK = NetworkSettings(normalize=False, hidden_units=64, num_layers=2)


def main() -> None:
    """Learn, and write what became of the weights."""
    kind, given, found, *numbers = sys.argv[1:]
    epsilon, beta, rate = map(float, numbers[:3])
    n_continuous, *branches = map(int, numbers[3:])
    torch.set_num_threads(1)
    with np.load(given) as content:
        data = {name: content[name] for name in content.files}
    optimizer, networks = made(kind, n_continuous, tuple(branches), epsilon, beta, rate)
    for name, network in networks.items():
        for number, one in enumerate(learned(network)):
            values = torch.from_numpy(data[f"{name}/{number}"])
            one.data.copy_(values.view_as(one))
    n_updates, n_rows = data["obs"].shape[:2]
    for number in range(n_updates):
        rows = {name: values[number] for name, values in data.items() if "/" not in name}
        if kind == "sac":
            noise = torch.from_numpy(rows["noise"])
            torch.randn_like = lambda like, noise=noise: noise.view_as(like).clone()
        optimizer.update(buffer(rows, n_continuous, sum(branches)), n_rows)
    result = {
        f"{name}/{number:03}": one.detach().numpy()
        for name, network in networks.items()
        for number, one in enumerate(learned(network))
    }
    if kind == "sac":
        temperatures = optimizer._log_ent_coef
        used = temperatures.discrete if branches else temperatures.continuous
        result["temperature/000"] = used.detach().numpy()
    np.savez(found, **result)


def made(
    kind: str, n_continuous: int, branches: tuple[int, ...], *numbers: float
) -> tuple[Any, dict[str, torch.nn.Module]]:
    """An optimizer and its networks."""
    epsilon, beta, rate = numbers
    seen = ObservationSpec((8,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "seen")
    spec = BehaviorSpec([seen], ActionSpec(n_continuous, branches))
    constant = {"learning_rate": rate, "learning_rate_schedule": ScheduleType.CONSTANT}
    if kind == "sac":
        own = SACSettings(**constant)
    else:
        schedules = {
            "beta_schedule": ScheduleType.CONSTANT,
            "epsilon_schedule": ScheduleType.CONSTANT,
        }
        own = PPOSettings(**constant, **schedules, epsilon=epsilon, beta=beta)
    settings = TrainerSettings(trainer_type=kind, network_settings=NETWORK, hyperparameters=own)
    squash = {"conditional_sigma": kind == "sac", "tanh_squash": kind == "sac"}
    policy = TorchPolicy(0, spec, NETWORK, SimpleActor, squash)
    if kind == "ppo":
        optimizer: Any = TorchPPOOptimizer(policy, settings)
        return optimizer, {"policy": policy.actor, "value": optimizer.critic}
    optimizer = TorchSACOptimizer(policy, settings)
    twins = {"q1": optimizer.q_network.q1_network, "q2": optimizer.q_network.q2_network}
    networks = {"policy": policy.actor, "value": optimizer.critic}
    return optimizer, {**networks, "target": optimizer.target_network, **twins}


def learned(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Its weights, without the numbers that are stored as parameters for Unity."""
    return [one for one in network.parameters() if one.requires_grad]


def buffer(rows: dict[str, np.ndarray], n_continuous: int, n_choices: int) -> AgentBuffer:
    """A minibatch."""
    n = len(rows["obs"])
    result = AgentBuffer()
    columns = {
        ObsUtil.get_name_at(0): rows["obs"],
        BufferKey.MASKS: np.ones(n, np.float32),
        BufferKey.ACTION_MASK: np.ones((n, n_choices), np.float32),
        BufferKey.CONTINUOUS_ACTION: rows["continuous"],
        BufferKey.DISCRETE_ACTION: rows["discrete"],
    }
    if "log_prob" in rows:
        columns |= {
            BufferKey.CONTINUOUS_LOG_PROBS: rows["log_prob"][:, :n_continuous],
            BufferKey.DISCRETE_LOG_PROBS: rows["log_prob"][:, n_continuous:],
            BufferKey.ADVANTAGES: rows["advantage"],
            RewardSignalUtil.value_estimates_key("extrinsic"): rows["value"],
            RewardSignalUtil.returns_key("extrinsic"): rows["returns"],
        }
    else:
        columns |= {
            ObsUtil.get_name_at_next(0): rows["next_obs"],
            BufferKey.DONE: rows["done"],
            RewardSignalUtil.rewards_key("extrinsic"): rows["reward"],
        }
    for key, values in columns.items():
        result[key].set(list(values))
    return result


if __name__ == "__main__":
    main()
