"""Proximal policy optimisation, as ML-Agents' configurations expect it.

Source: Schulman et al. 2017, arXiv 1707.06347. What differs from the paper, because published
configurations are tuned to it: the probability ratio is taken per action component rather than for
the joint action; advantages are the mean over reward signals and are normalised over the whole
buffer; the entropy of continuous actions is the mean over components. docs/ppo.md lists every
detail with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline import seeding
from pipeline.algos.base import AlgorithmBase
from pipeline.algos.batch import Batch
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.experience import LearnedRewards
from pipeline.algos.policy import Policy, generator_for, seeded_weights, tensors
from pipeline.algos.ranks import ALONE
from pipeline.algos.recurrence import stored_recall, values_in_sequence
from pipeline.algos.returns import generalized_advantages
from pipeline.algos.safety import refuse_divergence
from pipeline.algos.schedules import BETA_FLOOR, EPSILON_FLOOR, LEARNING_RATE_FLOOR, scheduled
from pipeline.algos.signals import RewardSignals
from pipeline.nets.actor_critic import Critic
from pipeline.nets.optimizer import FlatAdam

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.arrays import FloatArray
    from pipeline.data.rollout import Rollout
    from pipeline.nets.memory import Recall
    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import PPOSettings, TrainerSettings

ADVANTAGE_EPSILON = 1e-10
VALUE_WEIGHT = 0.5


def policy_loss(
    *, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (arXiv 1707.06347, equation 7), one ratio per action component.

    Args:
        log_prob: [B, C] of the taken actions under the policy being trained.
        old_log_prob: [B, C] under the policy that took them.
        advantage: [B, 1].
        epsilon: clip range of the ratio.

    Returns:
        The loss -mean(min(ratio A, clip(ratio) A)), and its derivative [B, C] by `log_prob`: that
        of -ratio A where the minimum is the unclipped term, else 0.
    """
    plain = torch.exp(log_prob - old_log_prob) * advantage
    bound = (1.0 + epsilon * advantage.sign()) * advantage
    gain = torch.min(plain, bound)
    scale = -1.0 / plain.numel()
    return gain.sum() * scale, torch.where(plain <= bound, plain * scale, 0.0)


def value_loss(*, value: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of (R - V)^2 of values and returns [B, S], and its derivative [B, S] by `value`."""
    error = value - returns
    scale = 1.0 / error.numel()
    return error.square().sum() * scale, error * (2.0 * scale)


def clipped_value_loss(
    *, value: Tensor, old_value: Tensor, returns: Tensor, clip: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared error, at least that of a value moved no further than `clip` from the old one.

    Args:
        value: [B, S] for each of S reward signals.
        old_value: [B, S] when the rollout was collected.
        returns: [B, S] targets.
        clip: [S] largest useful move.

    Returns:
        The mean of max((R - V)^2, (R - V_moved)^2), and its derivative [B, S] by `value`: 0 where
        the second term is the larger, because V_moved no longer follows V there.
    """
    error = value - returns
    move = value - old_value
    moved = old_value + torch.max(torch.min(move, clip), -clip) - returns
    plain, clipped = error.square(), moved.square()
    scale = 1.0 / error.numel()
    loss = torch.max(plain, clipped).sum() * scale
    follows = (move.abs() <= clip) | (plain >= clipped)
    return loss, torch.where(follows, error * (2.0 * scale), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What one gradient step found."""

    losses: Tensor
    """[2] policy loss and value loss."""
    log_ratio: Tensor
    """[B, C] how far the policy had moved from the one that collected the rollout."""


class PPO(AlgorithmBase):
    """Acts, says when it has enough experience, and learns from it.

    Args:
        spec: what the behavior observes and does.
        settings: the behavior's trainer settings, with PPO hyperparameters.
        seed: of the run; weights, actions and minibatches have a stream each.
        device: where the networks live.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.hyperparameters: PPOSettings = settings.hyperparameters  # type: ignore[assignment]  # checked by trainer_type
        self.device = device
        self.ranks = ALONE
        self.signals = RewardSignals(spec, settings, seed=seed, device=device)
        self.learned = (
            LearnedRewards(self.signals, device=device) if self.signals.learning else None
        )
        shared = self.hyperparameters.shared_critic
        with seeded_weights(seed, "ppo"):
            self.policy = Policy(spec, settings.network_settings).to(device)
            self.critic = Critic(
                spec,
                settings.network_settings,
                self.signals.names,
                shared=self.policy.actor if shared else None,
            ).to(device)
        self.own_networks = {"policy": self.policy, "critic": self.critic}
        self.reader = self.critic
        self.parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.optimizer = FlatAdam(self.parameters, learning_rate=self.hyperparameters.learning_rate)
        self.action_stream = generator_for(seed, device, "actions")
        self.minibatch_stream = seeding.stream(seed, "minibatches")
        self.gamma, self.strength, self.ignores_done = (
            values.cpu().numpy()
            for values in (self.signals.gamma, self.signals.strength, self.signals.ignores_done)
        )
        memory = settings.network_settings.memory
        self.sequence_length = 1 if memory is None else memory.sequence_length
        self.cloning = BehavioralCloning.from_settings(self.policy, settings, seed=seed)

    def ready(self, n_rows: int) -> bool:
        """Whether `n_rows` of closed trajectories are enough for an update."""
        return n_rows > self.hyperparameters.buffer_size

    def update(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        """Learn from a rollout.

        Args:
            rollout: closed trajectories.
            step: agent steps done, for the schedules.

        Returns:
            Statistics by their TensorBoard tag.

        Raises:
            TrainingError: A loss, a gradient or a weight is not finite.
        """
        h = self.hyperparameters
        max_steps = self.settings.max_steps
        now = {"step": step, "max_steps": max_steps}
        rate = scheduled(h.learning_rate_schedule, h.learning_rate, LEARNING_RATE_FLOOR, **now)
        epsilon = scheduled(h.epsilon_schedule, h.epsilon, EPSILON_FLOOR, **now)
        beta = scheduled(h.beta_schedule, h.beta, BETA_FLOOR, **now)
        self.optimizer.learning_rate = rate
        batch = self._batch(rollout)
        clip = None
        if h.clip_value:
            clip = epsilon * self.ranks.deviation(batch.returns).clamp_min(1e-6)
        learned: list[Learned] = []
        size = max(h.batch_size // self.sequence_length, 1)
        for _ in range(h.num_epoch):
            for minibatch in batch.minibatches(self.minibatch_stream, size, self.ranks):
                learned.append(self._learn(minibatch, epsilon=epsilon, beta=beta, clip=clip))
                if self.learned is not None and minibatch.index is not None:
                    self.learned.learn(minibatch.index)
        means = torch.stack([one.losses for one in learned]).mean(0)
        self.ranks.average_(means, len(batch.log_prob))
        loss_pi, loss_v = means.tolist()
        refuse_divergence(
            "PPO",
            step=step,
            losses={"policy": loss_pi, "value": loss_v},
            optimizers=[self.optimizer],
            networks=self.own_networks,
        )
        last_epoch = torch.cat([one.log_ratio for one in learned[-len(learned) // h.num_epoch :]])
        change = last_epoch.exp() - 1.0
        stats = {
            "Losses/Policy Loss": abs(loss_pi),
            "Losses/Value Loss": loss_v,
            "Policy/Learning Rate": rate,
            "Policy/Epsilon": epsilon,
            "Policy/Beta": beta,
            "Policy/approx_kl": float((change - last_epoch).mean()),
            "Policy/clip_fraction": float((change.abs() > epsilon).float().mean()),
            "Policy/explained_variance": _explained_variance(batch),
        }
        for column, signal in enumerate(self.signals.names):
            name = signal.capitalize()
            stats[f"Policy/{name} Value Estimate"] = float(batch.value[:, column].mean())
        if self.learned is not None:
            stats |= self.learned.end(step=step)
        if self.cloning is not None:
            stats["Losses/Pretraining Loss"] = self.cloning.update(step=step)
        return stats

    def _learn(self, batch: Batch, *, epsilon: float, beta: float, clip: Tensor | None) -> Learned:
        """One gradient step on a minibatch; `clip` [S] if values are clipped."""
        self.optimizer.zero_gradients()
        own, critics = self._recalls(batch.recall)
        hidden = self.policy.actor(batch.obs, own)
        value = self.critic(batch.obs, hidden, critics)
        log_prob, entropy = self.policy.actor.heads.evaluate(
            hidden, batch.continuous, batch.discrete, batch.allowed
        )
        with torch.no_grad():
            loss_pi, by_log_prob = policy_loss(
                log_prob=log_prob,
                old_log_prob=batch.log_prob,
                advantage=batch.advantage,
                epsilon=epsilon,
            )
            if clip is None:
                loss_v, by_value = value_loss(value=value, returns=batch.returns)
            else:
                loss_v, by_value = clipped_value_loss(
                    value=value, old_value=batch.value, returns=batch.returns, clip=clip
                )
            by_entropy = torch.full_like(entropy, -beta / len(entropy))
        # policy loss + VALUE_WEIGHT * value loss - beta * mean entropy, from its derivatives
        torch.autograd.backward(
            (log_prob, value, entropy), (by_log_prob, by_value * VALUE_WEIGHT, by_entropy)
        )
        self.optimizer.step(max_norm=self.hyperparameters.max_grad_norm)
        return Learned(
            losses=torch.stack((loss_pi, loss_v)), log_ratio=log_prob.detach() - batch.log_prob
        )

    @torch.no_grad()
    def _batch(self, rollout: Rollout) -> Batch:
        """Tensors of a rollout with its values, advantages and returns."""
        f = rollout.fields
        n_obs = len(self.spec.observation_specs)
        obs = self.policy.normalizers(tensors([f[f"obs_{i}"] for i in range(n_obs)], self.device))
        next_obs = self.policy.normalizers(tensors(rollout.next_obs, self.device))
        recall = stored_recall(rollout, self.sequence_length, self.device)
        if recall is None:
            value, following = self._values(obs), self._values(next_obs)
        else:
            value, following = (
                found.cpu().numpy()
                for found in values_in_sequence(self._value, obs, next_obs, rollout, recall=recall)
            )
        bootstrap = following * (~rollout.terminated[:, None] | self.ignores_done)
        if self.learned is None:
            rewards = f["reward"][:, None] * self.strength
        else:
            rewards = self.learned.begin(rollout)
        advantages = generalized_advantages(
            rewards=rewards,
            values=value,
            bootstrap=bootstrap,
            starts=rollout.starts,
            lengths=rollout.lengths,
            gamma=self.gamma,
            lambda_=self.hyperparameters.lambd,
        )
        mean = advantages.mean(axis=1, keepdims=True)
        center, deviation = self.ranks.moments(mean)
        normalized = (mean - center) / (deviation + ADVANTAGE_EPSILON)
        names = ("continuous", "discrete", "log_prob")
        continuous, discrete, log_prob = tensors([f[name] for name in names], self.device)
        return Batch(
            obs=obs,
            continuous=continuous,
            discrete=discrete,
            allowed=tensors([f["allowed"]], self.device)[0] if "allowed" in f else None,
            log_prob=log_prob,
            advantage=torch.from_numpy(normalized).to(self.device),
            value=torch.from_numpy(value).to(self.device),
            returns=torch.from_numpy(advantages + value).to(self.device),
            recall=recall,
        )

    def _values(self, obs: Sequence[Tensor], chunk: int = 4096) -> FloatArray:
        """Critic's estimates [R, S], in chunks that keep visual features small."""
        parts = []
        for start in range(0, len(obs[0]), chunk):
            piece = [values[start : start + chunk] for values in obs]
            parts.append(self._value(piece))
        result: FloatArray = torch.cat(parts).cpu().numpy()
        return result

    def _value(self, obs: list[Tensor], recall: Recall | None = None) -> Tensor:
        own, critics = self._recalls(recall)
        hidden = self.policy.actor(obs, own) if self.critic.body is None else obs[0]
        value: Tensor = self.critic(obs, hidden, critics)
        return value

    def _recalls(self, recall: Recall | None) -> tuple[Recall | None, Recall | None]:
        """The actor's part of the memories, and the critic's."""
        return (None, None) if recall is None else recall.split(self.policy.memory_size)


def _explained_variance(batch: Batch) -> float:
    variance = batch.returns.var(0, correction=0)
    left = (batch.returns - batch.value).var(0, correction=0)
    return float((1.0 - left / variance.clamp_min(1e-8)).mean())
