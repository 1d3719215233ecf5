"""Proximal policy optimisation, as ML-Agents' configurations expect it.

Source: Schulman et al. 2017, arXiv 1707.06347. What differs from the paper, because published
configurations are tuned to it: the probability ratio is taken per action component rather than for
the joint action; advantages are the mean over reward signals and are normalised over the whole
buffer; the entropy of continuous actions is the mean over components. docs/ppo.md lists every
detail with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import seeding
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.policy import Policy, generator_for, rollout_fields, seeded_weights, tensors
from pipeline.algos.returns import generalized_advantages
from pipeline.algos.schedules import BETA_FLOOR, EPSILON_FLOOR, LEARNING_RATE_FLOOR, scheduled
from pipeline.errors import SettingsError, TrainingError
from pipeline.nets.actor_critic import Critic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.algos.policy import Decision
    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.data.rollout import Field, Rollout
    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import PPOSettings, TrainerSettings

ADVANTAGE_EPSILON = 1e-10
VALUE_WEIGHT = 0.5


def policy_loss(
    *, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, epsilon: float
) -> Tensor:
    """Clipped surrogate (arXiv 1707.06347, equation 7), one ratio per action component.

    Args:
        log_prob: [B, C] of the taken actions under the policy being trained.
        old_log_prob: [B, C] under the policy that took them.
        advantage: [B, 1].
        epsilon: clip range of the ratio.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon)
    return -torch.min(ratio * advantage, clipped * advantage).mean()


def value_loss(*, value: Tensor, old_value: Tensor, returns: Tensor, clip: Tensor) -> Tensor:
    """Squared error, at least that of a value moved no further than `clip` from the old one.

    Args:
        value: [B, S] for each of S reward signals.
        old_value: [B, S] when the rollout was collected.
        returns: [B, S] targets.
        clip: [S] largest useful move.
    """
    moved = old_value + torch.max(torch.min(value - old_value, clip), -clip)
    return torch.max((returns - value).square(), (returns - moved).square()).mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows to learn from: R of them for a whole rollout, B for a minibatch."""

    obs: list[Tensor]
    """[R, *shape] per observation, normalised."""
    continuous: Tensor
    """[R, A] as drawn."""
    discrete: Tensor
    """int64 [R, branches]."""
    allowed: Tensor | None
    """bool [R, sum of branch sizes]."""
    log_prob: Tensor
    """[R, A + branches] when the actions were taken."""
    advantage: Tensor
    """[R, 1], normalised."""
    value: Tensor
    """[R, S] when the rollout was complete."""
    returns: Tensor
    """[R, S]."""

    def select(self, rows: Tensor | slice) -> Batch:
        """The given rows; a slice makes views."""
        return Batch(
            obs=[values[rows] for values in self.obs],
            continuous=self.continuous[rows],
            discrete=self.discrete[rows],
            allowed=None if self.allowed is None else self.allowed[rows],
            log_prob=self.log_prob[rows],
            advantage=self.advantage[rows],
            value=self.value[rows],
            returns=self.returns[rows],
        )


class PPO:
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
        self.signals = _supported_signals(settings)
        shared = self.hyperparameters.shared_critic
        with seeded_weights(seed, "ppo"):
            self.policy = Policy(spec, settings.network_settings).to(device)
            self.critic = Critic(
                spec,
                settings.network_settings,
                list(self.signals),
                shared=self.policy.actor.body if shared else None,
            ).to(device)
        self.parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=self.hyperparameters.learning_rate, fused=True
        )
        self.action_stream = generator_for(seed, device, "actions")
        self.minibatch_stream = seeding.stream(seed, "minibatches")
        self.gamma = np.array([s.gamma for s in self.signals.values()], dtype=np.float32)
        self.strength = np.array([s.strength for s in self.signals.values()], dtype=np.float32)
        self.cloning = BehavioralCloning.from_settings(self.policy, settings, seed=seed)

    @property
    def fields(self) -> dict[str, Field]:
        """What each row of experience holds."""
        return rollout_fields(self.spec)

    def act(self, obs: Sequence[FloatArray], mask: Sequence[BoolArray] | None) -> Decision:
        """Decide for N agents; see `Policy.act`."""
        return self.policy.act(obs, mask, self.action_stream)

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Take the observations [B, *shape] of closed trajectories into the normalisers."""
        if self.policy.normalizers:
            self.policy.normalizers.update(tensors(obs, self.device))

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
            TrainingError: A loss is not finite.
        """
        h = self.hyperparameters
        max_steps = self.settings.max_steps
        now = {"step": step, "max_steps": max_steps}
        rate = scheduled(h.learning_rate_schedule, h.learning_rate, LEARNING_RATE_FLOOR, **now)
        epsilon = scheduled(h.epsilon_schedule, h.epsilon, EPSILON_FLOOR, **now)
        beta = scheduled(h.beta_schedule, h.beta, BETA_FLOOR, **now)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self._batch(rollout)
        clip = epsilon * batch.returns.std(0, correction=0).clamp_min(1e-6)
        totals = torch.zeros(5, device=self.device)
        n_minibatches = 0
        size = min(h.batch_size, rollout.n_rows)
        for _ in range(h.num_epoch):
            order = torch.from_numpy(self.minibatch_stream.permutation(rollout.n_rows))
            shuffled = batch.select(order.to(self.device))
            for start in range(0, rollout.n_rows - size + 1, size):
                minibatch = shuffled.select(slice(start, start + size))
                totals += self._learn(minibatch, epsilon=epsilon, beta=beta, clip=clip)
                n_minibatches += 1
        losses = (totals / max(n_minibatches, 1)).tolist()
        if not np.isfinite(losses).all():
            raise TrainingError(
                f"step {step}: the PPO loss is not finite (policy {losses[0]}, value {losses[1]}); "
                "lower learning_rate or the reward's scale"
            )
        stats = {
            "Losses/Policy Loss": abs(losses[0]),
            "Losses/Value Loss": losses[1],
            "Policy/Learning Rate": rate,
            "Policy/Epsilon": epsilon,
            "Policy/Beta": beta,
            "Policy/approx_kl": losses[3],
            "Policy/clip_fraction": losses[4],
            "Policy/explained_variance": _explained_variance(batch),
        }
        for column, signal in enumerate(self.signals):
            name = signal.capitalize()
            stats[f"Policy/{name} Value Estimate"] = float(batch.value[:, column].mean())
        if self.cloning is not None:
            stats["Losses/Pretraining Loss"] = self.cloning.update(step=step)
        return stats

    def _learn(self, batch: Batch, *, epsilon: float, beta: float, clip: Tensor) -> Tensor:
        """One gradient step; gives [policy loss, value loss, entropy, KL, clip fraction]."""
        hidden = self.policy.actor(batch.obs)
        log_prob, entropy = self.policy.actor.heads.evaluate(
            hidden, batch.continuous, batch.discrete, batch.allowed
        )
        loss_pi = policy_loss(
            log_prob=log_prob,
            old_log_prob=batch.log_prob,
            advantage=batch.advantage,
            epsilon=epsilon,
        )
        loss_v = value_loss(
            value=self.critic(batch.obs, hidden),
            old_value=batch.value,
            returns=batch.returns,
            clip=clip,
        )
        mean_entropy = entropy.mean()
        loss = loss_pi + VALUE_WEIGHT * loss_v - beta * mean_entropy
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.hyperparameters.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.hyperparameters.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            change = log_prob - batch.log_prob
            ratio = change.exp()
            return torch.stack(
                (
                    loss_pi,
                    loss_v,
                    mean_entropy,
                    (ratio - 1.0 - change).mean(),
                    ((ratio - 1.0).abs() > epsilon).float().mean(),
                )
            )

    @torch.no_grad()
    def _batch(self, rollout: Rollout) -> Batch:
        """Tensors of a rollout with its values, advantages and returns."""
        f = rollout.fields
        n_obs = len(self.spec.observation_specs)
        obs = self.policy.normalizers(tensors([f[f"obs_{i}"] for i in range(n_obs)], self.device))
        next_obs = self.policy.normalizers(tensors(rollout.next_obs, self.device))
        value = self._values(obs)
        bootstrap = self._values(next_obs) * ~rollout.terminated[:, None]
        rewards = f["reward"][:, None] * self.strength
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
        normalized = (mean - mean.mean()) / (mean.std() + ADVANTAGE_EPSILON)
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
        )

    def _values(self, obs: Sequence[Tensor], chunk: int = 4096) -> FloatArray:
        """Critic's estimates [R, S], in chunks that keep visual features small."""
        parts = []
        for start in range(0, len(obs[0]), chunk):
            piece = [values[start : start + chunk] for values in obs]
            hidden = self.policy.actor(piece) if self.critic.body is None else piece[0]
            parts.append(self.critic(piece, hidden))
        result: FloatArray = torch.cat(parts).cpu().numpy()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues training, as tensors and plain values."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "action_stream": self.action_stream.get_state(),
            "minibatch_stream": self.minibatch_stream.bit_generator.state,
            "cloning": None if self.cloning is None else self.cloning.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.load_weights(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.action_stream.set_state(state["action_stream"])
        self.minibatch_stream.bit_generator.state = state["minibatch_stream"]
        if self.cloning is not None and state["cloning"] is not None:
            self.cloning.load_state_dict(state["cloning"])

    def load_weights(self, state: dict[str, Any]) -> None:
        """Take over policy and, where it has one, critic of another run."""
        self.policy.load_state_dict(state["policy"])
        if state.get("critic") is not None:
            self.critic.load_state_dict(state["critic"])


def _supported_signals(settings: TrainerSettings) -> dict[str, Any]:
    unsupported = sorted(set(settings.reward_signals) - {"extrinsic"})
    if unsupported:
        raise SettingsError(
            f"reward_signals.{unsupported[0]}: this reward signal cannot be trained with yet; "
            "remove it, or keep only: extrinsic"
        )
    return dict(settings.reward_signals)


def _explained_variance(batch: Batch) -> float:
    variance = batch.returns.var(0, correction=0)
    left = (batch.returns - batch.value).var(0, correction=0)
    return float((1.0 - left / variance.clamp_min(1e-8)).mean())
