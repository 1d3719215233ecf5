"""ML-Agents' side of updates.py; runs with the interpreter of `make peer`, not with ours.

Reads lines `<algorithm> <batch size> <agents of a group> <1 where they leave>` and answers each
with the milliseconds of processor time that one minibatch took, and how many of these were
`optimizer.update`. Buffers are filled by ML-Agents'
own `Trajectory.to_agentbuffer`, with everything that its trainers find there, and then treated as
its trainers do: PPO and POCA shuffle, cut and `optimizer.update`; SAC samples, rewards and
`optimizer.update`.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import mlagents.torch_utils  # noqa: F401  # before torch, as in its trainers
import numpy as np
import torch
from mlagents.trainers.buffer import AgentBuffer, BufferKey, RewardSignalUtil
from mlagents.trainers.poca.optimizer_torch import POCASettings, TorchPOCAOptimizer
from mlagents.trainers.policy.torch_policy import TorchPolicy
from mlagents.trainers.ppo.optimizer_torch import PPOSettings, TorchPPOOptimizer
from mlagents.trainers.sac.optimizer_torch import SACSettings, TorchSACOptimizer
from mlagents.trainers.settings import NetworkSettings, TrainerSettings
from mlagents.trainers.torch_entities.action_log_probs import LogProbsTuple
from mlagents.trainers.torch_entities.networks import SimpleActor
from mlagents.trainers.trajectory import AgentExperience, AgentStatus, Trajectory
from mlagents_envs.base_env import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
)

if TYPE_CHECKING:
    from collections.abc import Callable

N_OBS, N_ACTIONS, LENGTH = 8, 2, 64
NETWORK = NetworkSettings(normalize=True, hidden_units=int(sys.argv[1]), num_layers=2)
RNG = np.random.default_rng(0)
NO_CHOICE = np.zeros(0, np.int32)


class Stopwatch:
    """Seconds of processor time that a function took, added up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, function: Callable[..., Any], *args: object) -> Any:
        """Call it, and return its result."""
        began = time.process_time()
        result = function(*args)
        self.seconds += time.process_time() - began
        return result


UPDATES = Stopwatch()


def numbers(*shape: int) -> np.ndarray:
    """Return standard normal numbers."""
    return RNG.normal(size=shape).astype(np.float32)


def action() -> ActionTuple:
    """Return a random action of one agent."""
    result = ActionTuple()
    result.add_continuous(np.tanh(numbers(N_ACTIONS)))
    result.add_discrete(NO_CHOICE)
    return result


def experience(n_mates: int) -> AgentExperience:
    """One step of one agent."""
    log_probs = LogProbsTuple()
    log_probs.add_continuous(numbers(N_ACTIONS) * 0.1 - 1.0)
    log_probs.add_discrete(np.zeros(0, np.float32))
    return AgentExperience(
        obs=[numbers(N_OBS)],
        reward=float(RNG.normal()),
        done=False,
        action=action(),
        action_probs=log_probs,
        action_mask=None,
        prev_action=NO_CHOICE,
        interrupted=False,
        memory=None,
        group_status=[
            AgentStatus([numbers(N_OBS)], float(RNG.normal()), action(), done=False)
            for _ in range(n_mates)
        ],
        group_reward=0.0,
    )


def filled(n_rows: int, size: int, *, leave: bool) -> AgentBuffer:
    """Return rows of agents in groups of `size` members, or of ever fewer if they `leave`."""
    buffer = AgentBuffer()
    for number in range(n_rows // LENGTH):
        present = size - (number // 3) % size if leave else size
        steps = [experience(present - 1) for _ in range(LENGTH)]
        following = [[numbers(N_OBS)] for _ in range(present - 1)]
        trajectory = Trajectory(steps, [numbers(N_OBS)], following, f"agent{number}", "B")
        rows = trajectory.to_agentbuffer()
        for key in (
            RewardSignalUtil.rewards_key("extrinsic"),
            RewardSignalUtil.value_estimates_key("extrinsic"),
            RewardSignalUtil.baseline_estimates_key("extrinsic"),
            RewardSignalUtil.returns_key("extrinsic"),
            RewardSignalUtil.advantage_key("extrinsic"),
            BufferKey.ADVANTAGES,
        ):
            rows[key].set(list(numbers(LENGTH)))  # two of these keys are the same
        rows.resequence_and_append(buffer, training_length=1)
    return buffer


def policy(*, sac: bool = False) -> TorchPolicy:
    """Return a policy for balance_ball's agents."""
    obs_spec = ObservationSpec((N_OBS,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "seen")
    spec = BehaviorSpec([obs_spec], ActionSpec.create_continuous(N_ACTIONS))
    kind = {"conditional_sigma": sac, "tanh_squash": sac}
    return TorchPolicy(0, spec, NETWORK, SimpleActor, kind)


def on_policy(kind: str, batch_size: int, size: int, *, leave: bool) -> Callable[[], int]:
    """Return a function that runs an epoch and returns its number of minibatches."""
    optimizer_class, settings_class = {
        "ppo": (TorchPPOOptimizer, PPOSettings),
        "poca": (TorchPOCAOptimizer, POCASettings),
    }[kind]
    settings = TrainerSettings(
        trainer_type=kind,
        network_settings=NETWORK,
        hyperparameters=settings_class(batch_size=batch_size),
    )
    optimizer = optimizer_class(policy(), settings)
    buffer = filled(10 * batch_size, size, leave=leave)
    n_rows = buffer.num_experiences

    def epoch() -> int:
        buffer.shuffle(sequence_length=1)
        for start in range(0, n_rows // batch_size * batch_size, batch_size):
            minibatch = buffer.make_mini_batch(start, start + batch_size)
            UPDATES.run(optimizer.update, minibatch, batch_size)
        return n_rows // batch_size

    return epoch


def sac(batch_size: int) -> Callable[[], int]:
    """Return a function that makes gradient steps and returns their number."""
    settings = TrainerSettings(
        trainer_type="sac",
        network_settings=NETWORK,
        hyperparameters=SACSettings(batch_size=batch_size),
    )
    optimizer = TorchSACOptimizer(policy(sac=True), settings)
    buffer = filled(8192, 1, leave=False)
    n_steps = 64

    def steps() -> int:
        for _ in range(n_steps):
            batch = buffer.sample_mini_batch(batch_size, sequence_length=1)
            for name, signal in optimizer.reward_signals.items():
                rewards = signal.evaluate(batch) * signal.strength
                batch[RewardSignalUtil.rewards_key(name)] = rewards
            UPDATES.run(optimizer.update, batch, batch_size)
        return n_steps

    return steps


@cache
def prepared(kind: str, batch_size: int, size: int, leave: int) -> Callable[[], int]:
    """Return the function of one round, already run once."""
    run = sac(batch_size) if kind == "sac" else on_policy(kind, batch_size, size, leave=bool(leave))
    run()
    return run


def main() -> None:
    """Answer until the other side hangs up."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        kind, *sizes = line.split()
        run = prepared(kind, *map(int, sizes))
        UPDATES.seconds, everything = 0.0, Stopwatch()
        n_minibatches = everything.run(run)
        spent = (everything.seconds, UPDATES.seconds)
        print(*(f"{seconds / n_minibatches * 1e3:.4f}" for seconds in spent), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
