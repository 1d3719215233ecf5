"""Soft actor-critic, as ML-Agents' configurations expect it.

Sources: Haarnoja et al. 2018, arXiv 1801.01290 (policy, twin action values and a state value with a
slowly moving target), and arXiv 1812.05905 (temperature that adjusts itself); for choices among few
actions the expectations are exact (Christodoulou 2019, arXiv 1910.07207). docs/explanation/sac.md
lists every detail with its reason.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipeline.algos.algorithm import Algorithm
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.policy import Policy, generator_for, restore_generator, seeded_weights
from pipeline.algos.replay_sampler import ReplaySampler
from pipeline.algos.reward_signals import mean_losses
from pipeline.algos.rows import Rows
from pipeline.algos.schedules import LEARNING_RATE_FLOOR, scheduled
from pipeline.data.columns import Field
from pipeline.data.replay import Replay
from pipeline.data.rollout import Rollout
from pipeline.nets.actor_critic import Critic
from pipeline.nets.fast.pairs import ActorAndCritic, paired_adam
from pipeline.nets.memory import SequenceState
from pipeline.nets.q_networks import TwinQNetworks, taken_value
from pipeline.nets.squashed import squashed_action
from pipeline.protocol.specs import ActionSpec, BehaviorSpec
from pipeline.settings.schema import SACSettings, TrainerSettings

# Target entropies: per continuous component, for the sum over all components; and of a branch, as a
# share of the largest entropy that its allowed choices can have.
CONTINUOUS_ENTROPY = -1.0
DISCRETE_ENTROPY = 0.2


def value_targets(
    *, rewards: Tensor, done: Tensor, next_value: Tensor, gamma: Tensor, ignores_done: Tensor
) -> Tensor:
    """Return the targets of action values: reward plus the discounted next value.

    Args:
        rewards: [B, S] of each reward signal.
        done: bool [B] whether the task ended with the step.
        next_value: [B, S] of the next observation.
        gamma: [S] discount per step.
        ignores_done: bool [S] whether the signal looks beyond the end.

    Returns:
        [B, S].
    """
    ends = done.unsqueeze(1) & ~ignores_done
    return rewards + gamma * next_value.masked_fill(ends, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fresh:
    """New actions of the policy being trained, at B observations."""

    continuous: Tensor
    """[B, A] drawn."""
    log_prob: Tensor
    """[B, C] log density of the continuous action (if there is one), then of each branch the sum of
    p log p."""
    entropy_cost: Tensor
    """[B] the temperatures times `log_prob`, branches by their mean."""
    probability: Tensor | None
    """[B, sum of branch sizes]; None without branches."""
    n_branches: int

    def expected(self, values: Tensor) -> Tensor:
        """Values [..., B, S, outputs] to [..., B, S]: expected over choices, mean over branches."""
        if self.probability is None:
            return values.squeeze(-1)
        return (values * self.probability.unsqueeze(1)).sum(-1) / self.n_branches


class SAC(Algorithm):
    """Stores experience in a replay buffer, and learns from samples of it."""

    squashed = True
    replay: Replay

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        super().__init__(spec, settings, seed=seed, device=device)
        h: SACSettings = settings.hyperparameters  # type: ignore[assignment]  # checked by trainer_type
        self.hyperparameters = h
        network = settings.network_settings
        with seeded_weights(seed, "sac"):
            self.policy = Policy(spec, network, squash=True).to(device)
            self.value = Critic(spec, network, self.signals.names).to(device)
            self.q_networks = TwinQNetworks(spec, network, len(self.signals.names)).to(device)
        self.target = copy.deepcopy(self.value).requires_grad_(False)
        self.own_networks = {
            "policy": self.policy,
            "value": self.value,
            "target": self.target,
            "twins": self.q_networks,
        }
        self.recurrent_critic = self.value
        actions = spec.action_spec
        n_temperatures = (actions.continuous_size > 0) + actions.discrete_size
        # The logarithm is trained, so that a temperature stays positive.
        start = torch.full((n_temperatures,), math.log(h.init_entcoef))
        self.log_alpha = nn.Parameter(start.to(device))
        self.target_entropy = _target_entropy(actions).to(device)
        self.alpha_weight = _alpha_weight(actions).to(device)
        self.both = ActorAndCritic(self.policy.actor, self.value)
        # one Adam for all: it treats every number by itself, and all have one learning rate
        parameters = [
            *self.policy.parameters(),
            *self.value.parameters(),
            *self.q_networks.parameters(),
            self.log_alpha,
        ]
        self.optimizer = paired_adam(
            parameters, self.both, self.q_networks, learning_rate=h.learning_rate
        )
        self._soft_update = get_ema_multi_avg_fn(1.0 - h.tau)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._source: list[Tensor] = list(self.value.parameters())
        self._target: list[Tensor] = list(self.target.parameters())
        self.noise_stream = generator_for(seed, device, "noise")
        self.replay = Replay(
            self.columns,
            capacity=h.buffer_size,
            sequence_length=self.sequence_length,
        )
        self.sampler = ReplaySampler(
            self.replay,
            self.signals,
            self.policy.normalizers,
            stream=self.minibatch_stream,
            batch_size=h.batch_size,
            device=device,
        )
        # counted from 1, as the schedule of updates has it
        self.n_updates = self.n_signal_updates = 1
        self.bc = BehavioralCloning.from_settings(self.policy, settings, seed=seed)

    @property
    def fields(self) -> dict[str, Field]:
        """What each row of experience holds."""
        fields = super().fields
        # An off-policy learner has no use for it, and a replay is large.
        del fields["log_prob"]
        return fields

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Random streams of actions and of noise, by name."""
        return {**super().generators, "noise_stream": self.noise_stream}

    def ready(self, n_rows: int) -> bool:
        """Whether there are closed rows to store; `update` decides whether to learn."""
        return n_rows > 0

    def update_in_parts(
        self, rollout: Rollout, *, step: int
    ) -> Generator[int, None, dict[str, float]]:
        """Take a rollout into the replay, and make the gradient steps that are due in parts."""
        h = self.hyperparameters
        self.replay.add(rollout)
        n_due = self._due(step, self.n_updates, h.steps_per_update)
        stats: dict[str, float] = {}
        if n_due:
            now = {"step": step, "max_steps": self.settings.max_steps}
            rate = scheduled(h.learning_rate_schedule, h.learning_rate, LEARNING_RATE_FLOOR, **now)
            self.optimizer.learning_rate = rate
            learned: list[Tensor] = []
            cloned = []
            for batch in self.sampler.minibatches(n_due):
                yield n_due - len(learned)
                learned.append(self._learn(batch))
                if self.bc is not None:
                    cloned.append(self.bc.update(step=step))
            self.n_updates += n_due
            stats = self._statistics(torch.stack(learned).mean(0), step)
            stats["Policy/Learning Rate"] = rate
            if cloned:
                stats["Losses/Pretraining Loss"] = float(np.mean(cloned))
        return stats | self._update_signals(step)

    def _due(self, step: int, n_done: int, steps_per_update: float) -> int:
        """Gradient steps to make now, after `n_done` (counted from 1)."""
        h = self.hyperparameters
        # The least over processes: all make as many steps, or one would wait for ever.
        if step < h.buffer_init_steps or self.processes.least(len(self.replay)) < h.batch_size:
            return 0
        # the smallest n with (step - init) / n <= steps_per_update
        return max(math.ceil((step - h.buffer_init_steps) / steps_per_update) - n_done, 0)

    def _update_signals(self, step: int) -> dict[str, float]:
        """Make the gradient steps of the reward signals that are due; return mean losses by tag."""
        if not self.signals.learning:
            return {}
        every = self.hyperparameters.reward_signal_steps_per_update
        n_due = self._due(step, self.n_signal_updates, every)
        losses = [self.signals.update(rows) for rows in self.sampler.transitions(n_due)]
        self.n_signal_updates += n_due
        return mean_losses(losses)

    def _learn(self, batch: Rows) -> Tensor:
        """Make one joint gradient step of all networks, and return its statistics."""
        inputs = batch.inputs
        if n_actions := self.spec.action_spec.continuous_size:
            noise = torch.empty(len(batch), n_actions, device=self.device)
            inputs["noise"] = noise.normal_(generator=self.noise_stream)
        (statistics,) = self.optimizer.descend(
            partial(self._losses, sequences=batch.sequences),
            inputs,
            max_norm=self.hyperparameters.max_grad_norm,
        )
        # After the step, so that the target follows the new weights.
        self._soft_update(self._target, self._source, None)
        return statistics

    def _losses(
        self, inputs: Mapping[str, Any], sequences: SequenceState | None
    ) -> tuple[Tensor, tuple[Tensor]]:
        """Return the loss of all networks, and its statistics.

        Args:
            inputs: of a minibatch, and `noise` [B, A] for the actions that are drawn.
            sequences: the sequences that the rows form; None without memory.
        """
        batch = Rows.of(inputs, sequences)
        actions = self.spec.action_spec
        actor_states, critic_states, next_states = self._sequence_states(batch)
        with torch.no_grad():
            next_value = self.target(batch.next_obs, batch.next_obs[0], next_states)
        targets = value_targets(
            rewards=batch.rewards,
            done=batch.done,
            next_value=next_value,
            gamma=self.signals.gamma,
            ignores_done=self.signals.ignores_done,
        )
        hidden, value = self.both(batch.obs, actor_states, critic_states)
        fresh = self._fresh(batch, hidden)
        values, fresh_values = self.q_networks(
            batch.obs,
            taken=batch.continuous,
            fresh=fresh.continuous if actions.continuous_size else None,
            sequences=actor_states,
        )
        q_taken = taken_value(values, batch.discrete, actions.discrete_branches)
        expected = fresh.expected(fresh_values[0])
        # The first twin's value only, as in ML-Agents; the value's target takes the smaller one.
        loss_pi = (fresh.entropy_cost - expected.mean(-1)).mean()
        with torch.no_grad():
            least = torch.minimum(expected, fresh.expected(fresh_values[1]))
            soft = least - fresh.entropy_cost.unsqueeze(1)
            entropy_gap = fresh.log_prob.mean(0) + self._targets(batch.allowed)
        errors = torch.cat((value.unsqueeze(0), q_taken)) - torch.stack((soft, targets, targets))
        # [3]: the value's loss and those of both twins, each by its mean over rows and signals.
        losses = 0.5 * errors.square().mean((1, 2))
        loss_alpha = -(self.log_alpha * entropy_gap * self.alpha_weight).sum()
        # One loss for all: detached parts keep each loss to its own networks.
        loss = loss_pi + losses.sum() + loss_alpha
        return loss, (torch.cat((loss_pi.view(1), losses, value.mean(0))),)

    def _fresh(self, batch: Rows, hidden: Tensor) -> Fresh:
        """What the policy would do after `hidden` [B, H] of a minibatch, with gradients."""
        actions, heads = self.spec.action_spec, self.policy.actor.heads
        continuous, columns = batch.continuous, []
        if actions.continuous_size:
            mu, log_sigma = heads.gaussian(hidden)
            noise = batch.fields["noise"]
            continuous, density = squashed_action(mu=mu, log_sigma=log_sigma, noise=noise)
            columns.append(density.sum(1))
        branches = heads.branch_log_probs(hidden, batch.allowed)
        columns += [(branch.exp() * branch).sum(1) for branch in branches]
        log_prob = torch.stack(columns, dim=1)
        return Fresh(
            continuous=continuous,
            log_prob=log_prob,
            entropy_cost=log_prob @ (self.log_alpha.detach().exp() * self.alpha_weight),
            probability=torch.cat(branches, dim=1).exp() if branches else None,
            n_branches=len(branches),
        )

    def _targets(self, allowed: Tensor | None) -> Tensor:
        """Return target entropies [C]: of a branch, the mean over rows of 0.2 ln(allowed choices).

        Args:
            allowed: bool [B, sum of branch sizes]; None without branches.
        """
        if allowed is None:
            return self.target_entropy
        parts = torch.split(allowed, list(self.spec.action_spec.discrete_branches), dim=1)
        # As shares, whose logarithm is exactly 0 where everything is allowed. A row that forbids
        # everything counts as one choice, or its logarithm would be infinite.
        shares = [part.sum(1).clamp_min(1) / part.shape[1] for part in parts]
        change = DISCRETE_ENTROPY * torch.stack(shares, dim=1).log().mean(0)
        n_continuous = len(self.target_entropy) - len(parts)
        return self.target_entropy + nn.functional.pad(change, (n_continuous, 0))

    def _sequence_states(
        self, batch: Rows
    ) -> tuple[SequenceState | None, SequenceState | None, SequenceState | None]:
        """Return memories of the actor, of the value network, and of the latter one row later."""
        if batch.sequences is None:
            return None, None, None
        actors, critics = batch.sequences.split(self.policy.memory_size)
        lengths = critics.lengths
        firsts = (lengths.cumsum(0) - lengths).to(self.device)
        with torch.no_grad():
            # The next observation's memory is the one after the sequence's first row.
            later = self.value.step([values[firsts] for values in batch.obs], critics.memory)
        return actors, critics, SequenceState(memory=later, lengths=lengths)

    def _statistics(self, means: Tensor, step: int) -> dict[str, float]:
        """Statistics by tag from the means over gradient steps of what `_learn` gives."""
        loss_pi, loss_v, loss_1, loss_2, *values = means.tolist()
        losses = {"policy": loss_pi, "value": loss_v, "Q1": loss_1, "Q2": loss_2}
        self.refuse_divergence(losses, step=step)
        stats = {
            "Losses/Policy Loss": loss_pi,
            "Losses/Value Loss": loss_v,
            "Losses/Q1 Loss": loss_1,
            "Losses/Q2 Loss": loss_2,
        }
        for name, value in zip(self.signals.names, values, strict=True):
            stats[f"Policy/{name.capitalize()} Value"] = value
        alpha = self.log_alpha.detach().exp().tolist()
        if self.spec.action_spec.continuous_size:
            stats["Policy/Continuous Entropy Coeff"] = alpha.pop(0)
        if alpha:
            stats["Policy/Discrete Entropy Coeff"] = sum(alpha) / len(alpha)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue training but the replay, as tensors and plain values."""
        return {
            **super().state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "noise_stream": self.noise_stream.get_state(),
            "n_updates": self.n_updates,
            "n_signal_updates": self.n_signal_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.log_alpha.data.copy_(state["log_alpha"])
        restore_generator(self.noise_stream, state["noise_stream"])
        self.n_updates = int(state["n_updates"])
        self.n_signal_updates = int(state["n_signal_updates"])


def _target_entropy(actions: ActionSpec) -> Tensor:
    """Return target entropies [C] without masks: of continuous actions if any, then by branch."""
    targets = [CONTINUOUS_ENTROPY * actions.continuous_size] if actions.continuous_size else []
    targets += [DISCRETE_ENTROPY * math.log(size) for size in actions.discrete_branches]
    return torch.tensor(targets)


def _alpha_weight(actions: ActionSpec) -> Tensor:
    """Return weights [C] of temperatures: 1 for continuous actions, 1 shared by all branches."""
    shares = [1.0] if actions.continuous_size else []
    shares += [1.0 / actions.discrete_size for _ in actions.discrete_branches]
    return torch.tensor(shares)
