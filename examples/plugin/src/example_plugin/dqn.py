"""Deep Q-network for discrete actions, with a replay and epsilon-greedy exploration.

Sources: Mnih et al. 2015 (Nature 518); double Q-learning: van Hasselt et al. 2015, arXiv
1509.06461; several branches by the mean of their values: Tavakoli et al. 2018, arXiv 1711.08946.
Rewards of all signals are added up and discounted by the first signal's gamma.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.algos.algorithm import Algorithm
from pipeline.algos.policy import Policy, seeded_weights
from pipeline.algos.replay_sampler import ReplaySampler
from pipeline.algos.reward_signals import mean_losses
from pipeline.algos.schedules import LEARNING_RATE_FLOOR, scheduled
from pipeline.data.replay import Replay
from pipeline.errors import SettingsError
from pipeline.nets.actor_critic import ActionHeads, Sample, masked_to_onnx
from pipeline.nets.distributions import FORBIDDEN, split_branches
from pipeline.nets.fast.adam import FlatAdam

if TYPE_CHECKING:
    from collections.abc import Sequence

    from example_plugin.settings import DQNSettings
    from pipeline.algos.rows import Rows
    from pipeline.core.specs import ActionSpec, BehaviorSpec
    from pipeline.data.rollout import Rollout
    from pipeline.nets.onnx_graph import OnnxGraph
    from pipeline.settings.trainer.schema import NetworkSettings, TrainerSettings


class GreedyHeads(ActionHeads):
    """Values of choices instead of logits: the best is taken, or now and then a random one."""

    def __init__(self, n_in: int, spec: ActionSpec) -> None:
        super().__init__(n_in, spec)
        # a buffer is saved, restored and copied with the weights
        self.register_buffer("epsilon", torch.ones(()))

    def values(self, hidden: Tensor, allowed: Tensor | None = None) -> list[Tensor]:
        """[B, L] values of each branch's choices, those of forbidden ones far below all others."""
        masks = split_branches(allowed, self.spec.discrete_branches)
        found = [branch(hidden) for branch in self.branches]
        return [
            one if mask is None else one.masked_fill(~mask, FORBIDDEN)
            for one, mask in zip(found, masks, strict=True)
        ]

    def noise(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """The base's [B, L] of each branch, then uniform [B, branches] that decide who explores."""
        device = generator.device
        shape = n, self.spec.discrete_size
        return [
            *super().noise(n, generator),
            torch.rand(shape, generator=generator, device=device),
        ]

    def choose(
        self, hidden: Tensor, allowed: Tensor | None, noise: Sequence[Tensor] | None
    ) -> Sample[Tensor]:
        """The best choice of each branch, or one by `noise`."""
        chosen = []
        for index, values in enumerate(self.values(hidden, allowed)):
            choice = values.argmax(1)
            if noise is not None:
                # numbers of one distribution: each is equally often the smallest
                other = noise[index].masked_fill(values <= FORBIDDEN, math.inf).argmin(1)
                choice = torch.where(noise[-1][:, index] < self.epsilon, other, choice)
            chosen.append(choice)
        discrete = torch.stack(chosen, dim=1)
        return Sample(
            continuous=hidden[:, :0],
            in_range=hidden[:, :0],
            discrete=discrete,
            log_prob=hidden.new_zeros(discrete.shape),  # nothing learns from it
            entropy=hidden.new_zeros(1),
        )

    def to_onnx(self, graph: OnnxGraph, hidden: str) -> None:
        """The best choices, under both of the names that Unity's loader wants."""
        sizes = self.spec.discrete_branches
        masks = graph.input("action_masks", (sum(sizes),))
        best, start = [], 0
        for index, (branch, size) in enumerate(zip(self.branches, sizes, strict=True)):
            # the exporter's check reads the tensors of this name
            values = graph.linear(branch, hidden, f"branch.{index}")
            mask = graph.node("Slice", [masks], axes=[1], starts=[start], ends=[start + size])
            start += size
            best.append(
                graph.node("ArgMax", [masked_to_onnx(graph, values, mask)], axis=1, keepdims=1)
            )
        for name in ("discrete_actions", "deterministic_discrete_actions"):
            graph.concat(best, name)
            graph.output(name, np.int64, (len(sizes),))
        graph.constant_output("discrete_action_output_shape", [sizes])


class DQN(Algorithm):
    """Keeps what happened, and learns the values of choices from samples of it."""

    replay: Replay

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        super().__init__(spec, settings, seed=seed, device=device)
        _refuse(spec, settings)
        h: DQNSettings = settings.hyperparameters  # type: ignore[assignment]  # checked by trainer_type
        self.hyperparameters = h
        with seeded_weights(seed, "dqn"):
            self.policy = self.policy_for(spec, settings.network_settings).to(device)
        self.online = self.policy.actor
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.own_networks = {"policy": self.policy, "target": self.target}
        self.optimizer = FlatAdam(self.online.parameters(), learning_rate=h.learning_rate)
        self.bc = None
        self.replay = Replay(self.columns, capacity=h.buffer_size)
        self.sampler = ReplaySampler(
            self.replay,
            self.signals,
            self.policy.normalizers,
            stream=self.minibatch_stream,
            batch_size=h.batch_size,
            device=device,
        )
        self.n_updates = 0

    @classmethod
    def policy_for(cls, spec: BehaviorSpec, network: NetworkSettings) -> Policy:
        """A policy whose heads are greedy."""
        return Policy(spec, network, heads=GreedyHeads)

    def ready(self, n_rows: int) -> bool:
        """Whether there are closed rows to take in."""
        return n_rows > 0

    def update(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        """Take a rollout into the replay, and make the gradient steps that are due."""
        h = self.hyperparameters
        self.replay.add(rollout)
        epsilon = self._epsilon(step)
        self.online.heads.epsilon.fill_(epsilon)
        ready = step >= h.buffer_init_steps and len(self.replay) >= h.batch_size
        n_due = math.ceil((step - h.buffer_init_steps) / h.steps_per_update) if ready else 0
        n_due -= self.n_updates
        if n_due <= 0:
            return {}
        now = {"step": step, "max_steps": self.settings.max_steps}
        rate = scheduled(h.learning_rate_schedule, h.learning_rate, LEARNING_RATE_FLOOR, **now)
        self.optimizer.learning_rate = rate
        learned = [self._learn(batch) for batch in self.sampler.minibatches(n_due)]
        self.n_updates += n_due
        loss, value = torch.stack(learned).mean(0).tolist()
        self.refuse_divergence({"Q": loss}, step=step)
        stats = {
            "Losses/Q Loss": loss,
            "Policy/Extrinsic Value": value,
            "Policy/Epsilon": epsilon,
            "Policy/Learning Rate": rate,
        }
        if self.signals.learning:
            losses = [self.signals.update(rows) for rows in self.sampler.transitions(n_due)]
            stats |= mean_losses(losses)
        return stats

    def _learn(self, batch: Rows) -> Tensor:
        """One gradient step, and one small step of the target; gives loss and mean value [2]."""
        with torch.no_grad():
            after = self.target.heads.values(self.target(batch.next_obs))
            best = self.online.heads.values(self.online(batch.next_obs))
            parts = [
                values.gather(1, one.argmax(1, keepdim=True))
                for values, one in zip(after, best, strict=True)
            ]
            following = torch.cat(parts, dim=1).mean(1).masked_fill(batch.done, 0.0)
            y = batch.rewards.sum(1) + self.signals.gamma[0] * following
        values = self.online.heads.values(self.online(batch.obs))
        taken = [one.gather(1, batch.discrete[:, i : i + 1]) for i, one in enumerate(values)]
        value = torch.cat(taken, dim=1).mean(1)
        loss = nn.functional.smooth_l1_loss(value, y)
        self.optimizer.minimize(loss, max_norm=self.hyperparameters.max_grad_norm)
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, self.hyperparameters.tau)
        return torch.stack((loss.detach(), value.mean().detach()))

    def _epsilon(self, step: int) -> float:
        h = self.hyperparameters
        over = h.exploration_steps or self.settings.max_steps
        first, last = h.exploration_initial_eps, h.exploration_final_eps
        return scheduled(h.exploration_schedule, first, last, step=step, max_steps=over)

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues training but for the replay."""
        return {**super().state_dict(), "n_updates": self.n_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.n_updates = int(state["n_updates"])


def _refuse(spec: BehaviorSpec, settings: TrainerSettings) -> None:
    if spec.action_spec.continuous_size or not spec.action_spec.discrete_size:
        raise SettingsError(
            "trainer_type: dqn needs discrete actions and no others; use sac or ppo"
        )
    if settings.network_settings.memory is not None:
        raise SettingsError("network_settings.memory: dqn has no memory; remove the section")
    if settings.behavioral_cloning is not None:
        raise SettingsError("behavioral_cloning: dqn does not imitate; remove the section")
