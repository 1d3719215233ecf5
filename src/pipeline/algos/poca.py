"""MA-POCA: agents of a group learn from what the group gains, each by what its own action changed.

Source: Cohen et al. 2021, "On the Use and Misuse of Absorbing States in Multi-agent Reinforcement
Learning", arXiv 2111.05992. A critic that sees a whole group gives two things: the value of the
group's situation, which bootstraps lambda-returns, and for each agent a counterfactual baseline,
which sees what its mates observe *and do* but not what the agent itself does (section 4.2). The
advantage is the return minus the baseline. Members may come and go: the critic sees those that are
there, without any stand-in for others, and an agent that ends early is bootstrapped with the value
of the mates that go on, so that it is credited with what they gain later (section 4.1).

The policy itself, its loss, and the schedules are PPO's. docs/poca.md lists every detail.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline import seeding
from pipeline.algos.base import AlgorithmBase
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.experience import LearnedRewards
from pipeline.algos.group_rows import GroupRows
from pipeline.algos.policy import Policy, generator_for, rollout_fields, seeded_weights, tensors
from pipeline.algos.ppo import ADVANTAGE_EPSILON, VALUE_WEIGHT, policy_loss, value_loss
from pipeline.algos.ranks import ALONE
from pipeline.algos.recurrence import stored_recall
from pipeline.algos.returns import generalized_advantages
from pipeline.algos.safety import refuse_divergence
from pipeline.algos.schedules import BETA_FLOOR, EPSILON_FLOOR, LEARNING_RATE_FLOOR, scheduled
from pipeline.algos.signals import RewardSignals
from pipeline.algos.teams import Teams
from pipeline.data.rollout import Field
from pipeline.nets.group_critic import GroupCritic
from pipeline.nets.optimizer import FlatAdam

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.arrays import AnyArray, BoolArray, FloatArray
    from pipeline.data.rollout import Rollout
    from pipeline.nets.memory import Recall
    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import POCASettings, TrainerSettings

_log = logging.getLogger(__name__)

BASELINE_WEIGHT = 0.5
"""Of the baseline's loss beside the value's; both are weighted as PPO's value loss."""
_CHUNK = 2048
"""Moments that are valued at once: few, so that visual features stay small."""
_PLACES = 16384
"""Places in all sets of the moments that are valued at once: few, so that large groups fit."""


class POCA(AlgorithmBase):
    """Acts, says when it has enough experience, and learns from it.

    Args:
        spec: what the behavior observes and does.
        settings: the behavior's trainer settings, with POCA hyperparameters.
        seed: of the run; weights, actions and minibatches have a stream each.
        device: where the networks live.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.hyperparameters: POCASettings = settings.hyperparameters  # type: ignore[assignment]  # checked by trainer_type
        self.device = device
        self.ranks = ALONE
        self.signals = RewardSignals(spec, settings, seed=seed, device=device)
        _warn_of_other_signals(self.signals)
        self.learned = (
            LearnedRewards(self.signals, device=device) if self.signals.learning else None
        )
        with seeded_weights(seed, "poca"):
            self.policy = Policy(spec, settings.network_settings).to(device)
            self.critic = GroupCritic(spec, settings.network_settings, self.signals.names).to(
                device
            )
        self.own_networks = {"policy": self.policy, "critic": self.critic}
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.optimizer = FlatAdam(parameters, learning_rate=self.hyperparameters.learning_rate)
        self.action_stream = generator_for(seed, device, "actions")
        self.minibatch_stream = seeding.stream(seed, "minibatches")
        memory = settings.network_settings.memory
        self.sequence_length = 1 if memory is None else memory.sequence_length
        self.cloning = BehavioralCloning.from_settings(self.policy, settings, seed=seed)

    @property
    def fields(self) -> dict[str, Field]:
        """What each row of experience holds."""
        fields = super().fields
        fields["entity"] = fields["moment"] = Field(shape=(), dtype=np.int64)
        fields["next_moment"] = Field(shape=(), dtype=np.int64, at_end=True)
        return fields

    @property
    def member_fields(self) -> dict[str, Field]:
        """What a group's critic knows of each member."""
        rows = rollout_fields(self.spec)
        fields = {name: rows[name] for name in rows if name not in ("log_prob", "allowed")}
        if self.memory_size:
            fields["memory"] = Field(shape=(self.memory_size,))
        return {**fields, "over": Field(shape=(), dtype=np.bool_)}

    def ready(self, n_rows: int) -> bool:
        """Whether `n_rows` of closed trajectories are enough for an update."""
        return n_rows > self.hyperparameters.buffer_size

    def update(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        """Learn from a rollout.

        Args:
            rollout: closed trajectories, and the moments of their groups.
            step: agent steps done, for the schedules.

        Returns:
            Statistics by their TensorBoard tag.

        Raises:
            TrainingError: A loss, gradient or weight is not finite.
        """
        h = self.hyperparameters
        now = {"step": step, "max_steps": self.settings.max_steps}
        rate = scheduled(h.learning_rate_schedule, h.learning_rate, LEARNING_RATE_FLOOR, **now)
        epsilon = scheduled(h.epsilon_schedule, h.epsilon, EPSILON_FLOOR, **now)
        beta = scheduled(h.beta_schedule, h.beta, BETA_FLOOR, **now)
        self.optimizer.learning_rate = rate
        rows = self._experience(rollout)
        losses = []
        for _ in range(h.num_epoch):
            for index, recall in rows.minibatches(self.minibatch_stream, h.batch_size, self.ranks):
                losses.append(self._learn(rows, index, recall, epsilon=epsilon, beta=beta))
                if self.learned is not None:
                    self.learned.learn(torch.from_numpy(index).to(self.device))
        means = torch.stack(losses).mean(0)
        self.ranks.average_(means, len(rows.log_prob))
        loss_pi, loss_v, loss_b = means.tolist()
        refuse_divergence(
            "POCA",
            step=step,
            losses={"policy": loss_pi, "value": loss_v, "baseline": loss_b},
            optimizers=[self.optimizer],
            networks=self.own_networks,
        )
        stats = {
            "Losses/Policy Loss": abs(loss_pi),
            "Losses/Value Loss": loss_v,
            "Losses/Baseline Loss": loss_b,
            "Policy/Learning Rate": rate,
            "Policy/Epsilon": epsilon,
            "Policy/Beta": beta,
        }
        for column, signal in enumerate(self.signals.names):
            name = signal.capitalize()
            stats[f"Policy/{name} Value Estimate"] = float(rows.value[:, column].mean())
            stats[f"Policy/{name} Baseline Estimate"] = float(rows.baseline[:, column].mean())
        if self.learned is not None:
            stats |= self.learned.end(step=step)
        if self.cloning is not None:
            stats["Losses/Pretraining Loss"] = self.cloning.update(step=step)
        return stats

    def _learn(
        self,
        rows: GroupRows,
        index: AnyArray,
        recall: Recall | None,
        *,
        epsilon: float,
        beta: float,
    ) -> Tensor:
        """One gradient step on rows `index` [B]; policy, value and baseline loss [3]."""
        self.optimizer.zero_gradients()
        at = torch.from_numpy(index).to(self.device)
        hidden = self.policy.actor([values[at] for values in rows.obs], recall)
        log_prob, entropy = self.policy.actor.heads.evaluate(
            hidden,
            rows.continuous[at],
            rows.discrete[at],
            None if rows.allowed is None else rows.allowed[at],
        )
        moments = np.unique(rows.teams.moment[index])
        value, baseline = self._look(rows.teams, moments, rows.teams.present[moments], index)
        with torch.no_grad():
            loss_pi, by_log_prob = policy_loss(
                log_prob=log_prob,
                old_log_prob=rows.log_prob[at],
                advantage=rows.advantage[at],
                epsilon=epsilon,
            )
            returns = rows.returns[at]
            loss_v, by_value = value_loss(value=value, returns=returns)
            loss_b, by_baseline = value_loss(value=baseline, returns=returns)
            by_entropy = torch.full_like(entropy, -beta / len(entropy))
        # policy loss + VALUE_WEIGHT (value loss + BASELINE_WEIGHT baseline loss) - beta * entropy
        torch.autograd.backward(
            (log_prob, value, baseline, entropy),
            (
                by_log_prob,
                by_value * VALUE_WEIGHT,
                by_baseline * (VALUE_WEIGHT * BASELINE_WEIGHT),
                by_entropy,
            ),
        )
        self.optimizer.step(max_norm=self.hyperparameters.max_grad_norm)
        return torch.stack((loss_pi, loss_v, loss_b))

    def _look(
        self, teams: Teams, moments: AnyArray, present: BoolArray, index: AnyArray
    ) -> tuple[Tensor, Tensor]:
        """Values of their group and baselines, [B, S] each, of rows `index` of the moments [P]."""
        seen = teams.pick(moments, present, index)
        found = self.critic(seen.obs, seen.memory, seen.actions, seen.groups)
        values, baselines = found[: len(moments)], found[len(moments) :]
        return values.index_select(0, seen.moment), baselines

    @torch.no_grad()
    def _experience(self, rollout: Rollout) -> GroupRows:
        """Tensors of a rollout with its values, baselines, returns and advantages."""
        f = rollout.fields
        n_obs = len(self.spec.observation_specs)
        teams = Teams.of(rollout, self.policy.normalizers, self.critic.flat_actions, self.device)
        self.critic.notice(self.ranks.most(teams.largest))
        value, baseline, following, further = self._values(teams)
        terminated = rollout.terminated[:, None]
        ignores = self.signals.ignores_done.cpu().numpy()
        bootstrap = np.where(terminated & ignores, further, following)
        if self.learned is None:
            rewards = f["reward"][:, None] * self.signals.strength.cpu().numpy()
        else:
            rewards = self.learned.begin(rollout)
        # a lambda-return is a generalised advantage estimate plus the value it is relative to
        returns = value + generalized_advantages(
            rewards=rewards,
            values=value,
            bootstrap=bootstrap,
            starts=rollout.starts,
            lengths=rollout.lengths,
            gamma=self.signals.gamma.cpu().numpy(),
            lambda_=self.hyperparameters.lambd,
        )
        advantage = (returns - baseline).mean(axis=1, keepdims=True)
        center, deviation = self.ranks.moments(advantage)
        normalized = (advantage - center) / (deviation + ADVANTAGE_EPSILON)
        names = ("continuous", "discrete", "log_prob")
        continuous, discrete, log_prob = tensors([f[name] for name in names], self.device)
        of_rows = tensors([normalized, returns, value, baseline], self.device)
        return GroupRows(
            obs=self.policy.normalizers(
                tensors([f[f"obs_{i}"] for i in range(n_obs)], self.device)
            ),
            continuous=continuous,
            discrete=discrete,
            log_prob=log_prob,
            allowed=tensors([f["allowed"]], self.device)[0] if "allowed" in f else None,
            advantage=of_rows[0],
            returns=of_rows[1],
            value=of_rows[2],
            baseline=of_rows[3],
            teams=teams,
            recall=stored_recall(rollout, self.sequence_length, self.device),
            sequence_length=self.sequence_length,
        )

    def _values(self, teams: Teams) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Values and baselines of rows [R, S], and values of what follows trajectories [K, S].

        The latter twice: of those whose task goes on, 0 where nobody's does; and of all members,
        for signals that ignore ends.
        """
        n_rows = len(teams.moment)
        n_signals = len(self.signals.names)
        value, baseline = (np.empty((n_rows, n_signals), dtype=np.float32) for _ in range(2))
        following, further = (
            np.zeros((len(teams.following), n_signals), np.float32) for _ in range(2)
        )
        by_moment = np.argsort(teams.moment, kind="stable")
        for moments in _chunks(np.unique(teams.moment), teams):
            first, last = np.searchsorted(teams.moment[by_moment], (moments[0], moments[-1] + 1))
            rows = by_moment[first:last]
            found = self._look(teams, moments, teams.present[moments], rows)
            value[rows], baseline[rows] = (one.cpu().numpy() for one in found)
        for result, everyone in ((following, False), (further, True)):
            if everyone and not self.signals.ignores_done.any():
                break
            for moments in _chunks(np.unique(teams.following), teams):
                present = teams.present[moments]
                if not everyone:
                    present = present & ~teams.over[moments]
                someone = present.any(axis=1)
                if not someone.any():
                    continue
                valued = moments[someone]
                seen = teams.pick(valued, present[someone])
                found = self.critic(seen.obs, seen.memory, None, seen.groups).cpu().numpy()
                inside = np.isin(teams.following, valued)
                result[inside] = found[np.searchsorted(valued, teams.following[inside])]
        return value, baseline, following, further


def _chunks(moments: AnyArray, teams: Teams) -> Iterator[AnyArray]:
    n = teams.index.shape[1]
    size = min(max(_PLACES // (n * (1 + n)), 1), _CHUNK)
    for first in range(0, len(moments), size):
        yield moments[first : first + size]


def _warn_of_other_signals(signals: RewardSignals) -> None:
    for name in signals.names:
        if name != "extrinsic":
            _log.warning(
                "Reward signal %s is not supported with the POCA trainer; results may be "
                "unexpected: it rewards each agent for itself, not for its group.",
                name.capitalize(),
            )
