"""The trainer settings with which a project of `pipeline init` begins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.protocol.specs import BehaviorSpec

_IMAGE = 3
"""Dimensions of a visual observation."""
_NATURE_CNN_PIXELS, _SIMPLE_PIXELS = 36, 20
"""Least sides of the images that these encoders take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Behavior:
    """Facts about one behavior, as the environment reports them."""

    spec: BehaviorSpec
    """Observations and actions."""
    n_agents: int
    """Agents at the first step."""
    in_groups: bool = False
    """Whether agents share rewards."""
    n_teams: int = 1
    """Teams that play against each other."""


def trainer_of(behavior: Behavior, trainer: str | None = None) -> dict[str, Any]:
    """Return trainer settings that suit a behavior's observations and actions.

    Common sizes: small networks for few numbers, a convolution and more exploration for images and
    discrete actions; self-play for teams. Without `trainer` POCA for agents that share rewards,
    else PPO.
    """
    observations, actions = behavior.spec
    images = [observation.shape for observation in observations if len(observation.shape) == _IMAGE]
    n_numbers = sum(
        math.prod(observation.shape)
        for observation in observations
        if len(observation.shape) < _IMAGE
    )
    choices = bool(actions.discrete_branches)
    buffer_size = rollout_of(behavior)
    network: dict[str, Any] = {
        "normalize": n_numbers > 0,
        "hidden_units": 256 if images else 64 if n_numbers <= 16 else 128,
        "num_layers": 2,
    }
    if images:
        pixels = min(side for shape in images for side in shape[1:])
        network["vis_encode_type"] = (
            "nature_cnn" if pixels >= _NATURE_CNN_PIXELS
            else "simple" if pixels >= _SIMPLE_PIXELS else "match3"
        )  # fmt: skip
    kind = trainer or ("poca" if behavior.in_groups else "ppo")
    on_policy = {
        "batch_size": buffer_size // (8 if images else 16),
        "buffer_size": buffer_size,
        "learning_rate": 3e-4 if images else 1e-3 if choices else 3e-4,
        "learning_rate_schedule": "constant" if behavior.n_teams > 1 else "linear",
        "beta": 0.01 if images else 0.005 if choices else 0.001,
        "epsilon": 0.2,
        "lambd": 0.95,
        "num_epoch": 4 if images else 10,
    }
    settings: dict[str, Any] = {
        "trainer_type": kind,
        "hyperparameters": _sac_of(behavior) if kind == "sac" else on_policy,
        "network_settings": network,
        "reward_signals": {"extrinsic": {"gamma": 0.99, "strength": 1.0}},
        "keep_checkpoints": 3,
        "max_steps": 1000000 if images or behavior.n_teams > 1 else 300000,
        "time_horizon": 128,
        "summary_freq": 10000,
    }
    if behavior.n_teams > 1:
        settings["self_play"] = {"save_steps": 20000, "team_change": 100000, "swap_steps": 10000}
    return settings


def _sac_of(behavior: Behavior) -> dict[str, Any]:
    """Return SAC's hyperparameters: an update for each step of all agents."""
    observations, actions = behavior.spec
    n_numbers = sum(math.prod(observation.shape) for observation in observations)
    return {
        "batch_size": 256,
        # At most a gigabyte of observations.
        "buffer_size": min(200_000, 2**28 // max(n_numbers, 1)),
        "buffer_init_steps": 1000,
        "learning_rate": 3e-4,
        "learning_rate_schedule": "constant",
        # Entropy is measured against the reward: of choices it is larger than of small moves.
        "init_entcoef": 0.05 if actions.discrete_branches else 0.5,
        "steps_per_update": max(behavior.n_agents, 1),
        "tau": 0.005,
    }


def rollout_of(behavior: Behavior) -> int:
    """Return 128 steps of each agent, within limits between too rare and too noisy updates."""
    rows: int = 2 ** math.ceil(math.log2(max(behavior.n_agents, 1) * 128))
    return min(max(rows, 2048), 16384)
