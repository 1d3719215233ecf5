"""ML-Agents' side of agreement.py; runs with the interpreter of `make peer`, not with ours.

    python peer_agreement.py KIND GIVEN FOUND GROUPS EPSILON BETA RATE CONTINUOUS [BRANCH ...]

Takes weights and minibatches from the file GIVEN, makes an `update` of each minibatch, with an
optimizer or a reward provider, and writes the weights to FOUND.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import mlagents.torch_utils  # noqa: F401  # before torch, as in its trainers
import numpy as np
import torch
from mlagents.trainers.buffer import AgentBuffer, BufferKey, RewardSignalUtil
from mlagents.trainers.poca.optimizer_torch import POCASettings, TorchPOCAOptimizer
from mlagents.trainers.policy.torch_policy import TorchPolicy
from mlagents.trainers.ppo.optimizer_torch import PPOSettings, TorchPPOOptimizer
from mlagents.trainers.sac.optimizer_torch import SACSettings, TorchSACOptimizer
from mlagents.trainers.settings import (
    CuriositySettings,
    GAILSettings,
    NetworkSettings,
    RNDSettings,
    ScheduleType,
    TrainerSettings,
)
from mlagents.trainers.torch_entities.components.reward_providers import (
    CuriosityRewardProvider,
    GAILRewardProvider,
    RNDRewardProvider,
    gail_reward_provider,
)
from mlagents.trainers.torch_entities.networks import SimpleActor
from mlagents.trainers.torch_entities.utils import ModelUtils
from mlagents.trainers.trajectory import GroupObsUtil, ObsUtil
from mlagents_envs.base_env import (
    ActionSpec,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NETWORK = NetworkSettings(normalize=False, hidden_units=64, num_layers=2)
CONSTANT = {"beta_schedule": ScheduleType.CONSTANT, "epsilon_schedule": ScheduleType.CONSTANT}
Networks = dict[str, torch.nn.Module]
Rows = dict[str, np.ndarray]


def main() -> None:
    """Learn, and write what became of the weights."""
    kind, given, found, sizes, *numbers = sys.argv[1:]
    epsilon, beta, rate = map(float, numbers[:3])
    n_continuous, *branches = map(int, numbers[3:])
    groups = [int(size) for size in sizes.split(",")]
    torch.set_num_threads(1)
    with np.load(given) as content:
        data = {name: content[name] for name in content.files}
    actions = ActionSpec(n_continuous, tuple(branches))
    if kind in ("rnd", "curiosity", "gail"):
        learn, networks = provider(kind, actions, rate)
    else:
        learn, networks = optimizer(kind, actions, groups, (epsilon, beta, rate))
    for name, network in networks.items():
        for number, one in enumerate(learned(network)):
            values = torch.from_numpy(data[f"{name}/{number}"])
            one.data.copy_(values.view_as(one))
    for number in range(len(data["obs"])):
        learn({name: values[number] for name, values in data.items() if "/" not in name})
    result = {
        f"{name}/{number:03}": one.detach().numpy()
        for name, network in networks.items()
        for number, one in enumerate(learned(network))
    }
    np.savez(found, **result)


def behavior(actions: ActionSpec) -> BehaviorSpec:
    """What is observed and done."""
    seen = ObservationSpec((8,), (DimensionProperty.NONE,), ObservationType.DEFAULT, "seen")
    return BehaviorSpec([seen], actions)


def optimizer(
    kind: str, actions: ActionSpec, groups: list[int], numbers: tuple[float, float, float]
) -> tuple[Callable[[Rows], Any], Networks]:
    """An algorithm's step, and its networks."""
    epsilon, beta, rate = numbers
    constant = {"learning_rate": rate, "learning_rate_schedule": ScheduleType.CONSTANT}
    clipped = {**constant, **CONSTANT, "epsilon": epsilon, "beta": beta}
    own = {
        "sac": lambda: SACSettings(**constant),
        "ppo": lambda: PPOSettings(**clipped),
        "poca": lambda: POCASettings(**clipped),
    }[kind]()
    settings = TrainerSettings(trainer_type=kind, network_settings=NETWORK, hyperparameters=own)
    squash = {"conditional_sigma": kind == "sac", "tanh_squash": kind == "sac"}
    policy = TorchPolicy(0, behavior(actions), NETWORK, SimpleActor, squash)
    kinds = {"sac": TorchSACOptimizer, "ppo": TorchPPOOptimizer, "poca": TorchPOCAOptimizer}
    made: Any = kinds[kind](policy, settings)
    networks = {"policy": policy.actor, "critic" if kind == "poca" else "value": made.critic}
    if kind == "sac":
        temperatures = made._log_ent_coef
        used = temperatures.discrete if actions.discrete_size else temperatures.continuous
        networks.update(
            target=made.target_network, q1=made.q_network.q1_network, q2=made.q_network.q2_network
        )
        networks["temperature"] = torch.nn.ParameterList([used])
    if kind == "poca":
        without_clipping_of_baselines()

    def learn(rows: Rows) -> Any:
        if kind == "sac":
            noise = torch.from_numpy(rows["noise"])
            torch.randn_like = lambda like: noise.view_as(like).clone()
        batch = buffer(rows, actions)
        if kind == "poca":
            add_mates(batch, rows, groups)
        return made.update(batch, len(rows["obs"]))

    return learn, networks


def without_clipping_of_baselines() -> None:
    """Ours clips neither values, which has no effect here anyway, nor baselines."""
    original = ModelUtils.trust_region_value_loss

    def unclipped(values: Any, old: Any, returns: Any, _: float, masks: Any) -> Any:
        return original(values, old, returns, 1e9, masks)

    ModelUtils.trust_region_value_loss = staticmethod(unclipped)


def provider(kind: str, actions: ActionSpec, rate: float) -> tuple[Callable[[Rows], Any], Networks]:
    """A reward signal's step, and its networks."""
    expert: dict[str, AgentBuffer] = {}

    class Demonstrations:
        def sample_mini_batch(self, *_: int) -> AgentBuffer:
            return expert["rows"]

    gail_reward_provider.demo_to_buffer = lambda *_: (None, Demonstrations())
    common = {"network_settings": NETWORK, "learning_rate": rate}
    made: Any
    if kind == "rnd":
        made = RNDRewardProvider(behavior(actions), RNDSettings(**common))
        networks = {"predictor": made._training_network, "target": made._random_network}
    elif kind == "curiosity":
        made = CuriosityRewardProvider(behavior(actions), CuriositySettings(**common))
        networks = {"models": made._network}
    else:
        made = GAILRewardProvider(behavior(actions), GAILSettings(demo_path="", **common))
        networks = {"discriminator": made._discriminator_network}

    def learn(rows: Rows) -> Any:
        if kind == "gail":
            expert["rows"] = buffer({**rows, "obs": rows["expert"]}, actions)
            torch.rand = lambda shape: torch.from_numpy(rows["share"]).float().view(shape)
        return made.update(buffer(rows, actions))

    return learn, networks


def learned(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Its weights, without the numbers that are stored as parameters for Unity."""
    return [one for one in network.parameters() if one.requires_grad]


def buffer(rows: Rows, actions: ActionSpec) -> AgentBuffer:
    """A minibatch."""
    n, n_continuous = len(rows["obs"]), actions.continuous_size
    result = AgentBuffer()
    columns = {
        ObsUtil.get_name_at(0): rows["obs"],
        BufferKey.MASKS: np.ones(n, np.float32),
        BufferKey.ACTION_MASK: np.ones((n, sum(actions.discrete_branches)), np.float32),
        BufferKey.CONTINUOUS_ACTION: rows["continuous"],
        BufferKey.DISCRETE_ACTION: rows["discrete"],
    }
    if "log_prob" in rows:
        columns.update(
            {
                BufferKey.CONTINUOUS_LOG_PROBS: rows["log_prob"][:, :n_continuous],
                BufferKey.DISCRETE_LOG_PROBS: rows["log_prob"][:, n_continuous:],
                BufferKey.ADVANTAGES: rows["advantage"],
                RewardSignalUtil.value_estimates_key("extrinsic"): rows["value"],
                RewardSignalUtil.returns_key("extrinsic"): rows["returns"],
            }
        )
    else:
        columns.update(
            {
                ObsUtil.get_name_at_next(0): rows["next_obs"],
                BufferKey.DONE: rows["done"],
                RewardSignalUtil.rewards_key("extrinsic"): rows["reward"],
            }
        )
    if "baseline" in rows:
        columns[RewardSignalUtil.baseline_estimates_key("extrinsic")] = rows["baseline"]
    for key, values in columns.items():
        result[key].set(list(values))
    return result


def add_mates(batch: AgentBuffer, rows: Rows, groups: list[int]) -> None:
    """What the others of each row's group see and do; groups lie one after another."""
    ends = np.cumsum(groups)
    members = [range(end - size, end) for size, end in zip(groups, ends, strict=True)]
    mates = [[other for other in group if other != one] for group in members for one in group]
    for key, name in (
        (GroupObsUtil.get_name_at(0), "obs"),
        (BufferKey.GROUP_CONTINUOUS_ACTION, "continuous"),
        (BufferKey.GROUP_DISCRETE_ACTION, "discrete"),
    ):
        batch[key].set([[rows[name][other] for other in some] for some in mates])


if __name__ == "__main__":
    main()
