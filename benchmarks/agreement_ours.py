"""Our side of agreement.py: what learns, and how it makes one gradient step of given rows."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algos import gail as gail_module
from pipeline.algos import sac as sac_module
from pipeline.algos.batch import Batch
from pipeline.algos.group_rows import GroupRows
from pipeline.algos.poca import POCA
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.algos.samples import Minibatch
from pipeline.algos.signals import LEARNED, Transitions
from pipeline.algos.teams import Teams
from pipeline.data.demonstrations import ExpertRows
from pipeline.protocol.specs import BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from pipeline.arrays import AnyArray
    from pipeline.protocol.specs import ActionSpec

N_OBS, N_ROWS = 8, 64
EPSILON, BETA, RATE = 0.2, 0.005, 3e-4
GROUPS = (4,) * 8 + (2,) * 16
"""Sizes of the groups whose members' rows are a minibatch of POCA."""
_CPU = torch.device("cpu")
_NETWORK = {"hidden_units": 64, "num_layers": 2, "normalize": False}
_CONSTANT = {"learning_rate": RATE, "learning_rate_schedule": "constant"}


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What learns."""

    networks: dict[str, nn.Module]
    """Its networks, by the names that the table shows."""
    learn: Callable[[dict[str, AnyArray]], object]
    """Makes a gradient step of a minibatch's rows."""


def learner(kind: str, actions: ActionSpec) -> Learner:
    """One that learns with `kind`, an algorithm or a reward signal, from N_OBS numbers."""
    spec = BehaviorSpec([ObservationSpec.vector(N_OBS)], actions)
    if kind in LEARNED:
        return _signal(kind, spec)
    behavior = {"trainer_type": kind, "hyperparameters": _CONSTANT, "network_settings": _NETWORK}
    own = load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]
    make: Any = {"ppo": PPO, "sac": SAC, "poca": POCA}[kind]
    made = make(spec, own, seed=1, device=_CPU)
    made.optimizer.learning_rate = RATE
    return {"ppo": _ppo, "sac": _sac, "poca": _poca}[kind](made)


def _ppo(made: PPO) -> Learner:
    # in ML-Agents' buffer old values and returns are one column, so no value is ever clipped
    clip = torch.full((1,), torch.inf)

    def learn(rows: dict[str, AnyArray]) -> object:
        t = _tensors(rows)
        column = {name: t[name].unsqueeze(1) for name in ("advantage", "value", "returns")}
        batch = Batch(
            obs=[t["obs"]],
            continuous=t["continuous"],
            discrete=t["discrete"],
            log_prob=t["log_prob"],
            allowed=_anything(made.spec.action_spec),
            **column,
        )
        return made._learn(batch, epsilon=EPSILON, beta=BETA, clip=clip)

    networks = {"policy": made.policy.actor, "value": made.critic}
    return Learner(networks=networks, learn=learn)


def _sac(made: SAC) -> Learner:
    def learn(rows: dict[str, AnyArray]) -> object:
        t = _tensors(rows)
        batch = Minibatch(
            obs=[t["obs"]],
            next_obs=[t["next_obs"]],
            continuous=t["continuous"],
            discrete=t["discrete"],
            rewards=t["reward"].unsqueeze(1),
            done=t["done"] > 0,
            allowed=_anything(made.spec.action_spec),
        )
        given = sac_module.squashed_action

        def squashed(*, mu: Tensor, log_sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            return given(mu=mu, log_sigma=log_sigma, noise=t["noise"].view_as(noise))

        with _instead(sac_module, "squashed_action", squashed):
            return made._learn(batch)

    twins = {"q1": made.twins.first, "q2": made.twins.second}
    networks = {"policy": made.policy.actor, "value": made.value, "target": made.target, **twins}
    networks["temperature"] = torch.nn.ParameterList([made.log_alpha])
    return Learner(networks=networks, learn=learn)


def _poca(made: POCA) -> Learner:
    made.critic.notice(max(GROUPS))
    moment = np.repeat(np.arange(len(GROUPS)), GROUPS)
    column = np.concatenate([np.arange(size) for size in GROUPS])
    present = np.arange(max(GROUPS)) < np.array(GROUPS)[:, None]
    index = np.zeros(present.shape, np.int64)
    index[present] = np.arange(N_ROWS)

    def learn(rows: dict[str, AnyArray]) -> object:
        t = _tensors(rows)
        names = ("advantage", "value", "returns", "baseline")
        teams = Teams(
            obs=[t["obs"]],
            memory=None,
            actions=made.critic.flat_actions(t["continuous"], t["discrete"]),
            index=index,
            present=present,
            over=np.zeros_like(present),
            moment=moment,
            column=column,
            following=np.zeros(0, np.int64),
        )
        own = GroupRows(
            obs=[t["obs"]],
            continuous=t["continuous"],
            discrete=t["discrete"],
            log_prob=t["log_prob"],
            allowed=_anything(made.spec.action_spec),
            teams=teams,
            **{name: t[name].unsqueeze(1) for name in names},
        )
        return made._learn(own, np.arange(N_ROWS), None, epsilon=EPSILON, beta=BETA)

    networks = {"policy": made.policy.actor, "critic": made.critic}
    return Learner(networks=networks, learn=learn)


def _signal(kind: str, spec: BehaviorSpec) -> Learner:
    section: dict[str, Any] = {"learning_rate": RATE, "network_settings": _NETWORK}
    if kind == "gail":
        section["demo_path"] = "given.demo"
    signals = {"reward_signals": {kind: section}}
    behaviors = {"behaviors": {"B": {"trainer_type": "ppo", **signals}}}
    own = load_run_settings(None, overrides=behaviors).behaviors["B"].reward_signals[kind]
    size = spec.action_spec.continuous_size
    nobody = ExpertRows(
        obs=[np.zeros((1, N_OBS), np.float32)],
        continuous=np.zeros((1, size), np.float32),
        discrete=np.zeros((1, len(spec.action_spec.discrete_branches)), np.int32),
    )
    with _instead(gail_module, "load_expert_rows", lambda *_: nobody):
        made: Any = LEARNED[kind](spec, own, seed=1, device=_CPU)

    def learn(rows: dict[str, AnyArray]) -> object:
        t = _tensors(rows)
        steps = Transitions(
            obs=[t["obs"]],
            next_obs=[t["next_obs"]],
            continuous=t["continuous"],
            discrete=t["discrete"],
            reward=t["reward"],
            done=t["done"] > 0,
        )
        if kind == "gail":
            made._draw = lambda _: [t["expert"]]
            made._between = lambda one, other: torch.lerp(other, one, t["share"].float())
        return made.update(steps)

    if kind == "rnd":
        networks = {"predictor": made.predictor, "target": made.target}
    else:
        networks = {{"gail": "discriminator", "curiosity": "models"}[kind]: made.network}
    return Learner(networks=networks, learn=learn)


def _tensors(rows: dict[str, AnyArray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in rows.items()}


def _anything(actions: ActionSpec) -> Tensor | None:
    """The mask that forbids nothing."""
    n_choices = sum(actions.discrete_branches)
    return torch.ones(N_ROWS, n_choices, dtype=torch.bool) if n_choices else None


@contextmanager
def _instead(module: Any, name: str, value: object) -> Iterator[None]:
    """Within it, `module` has another `name`."""
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)
