"""Soft actor-critic, as ML-Agents' configurations expect it.

Sources: Haarnoja et al. 2018, arXiv 1801.01290 (policy, twin action values and a state value with a
slowly moving target), and arXiv 1812.05905 (temperature that adjusts itself); for choices among few
actions the expectations are exact (Christodoulou 2019, arXiv 1910.07207). docs/explanation/sac.md
lists every detail with its reason.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.algos.off_policy import OffPolicy
from pipeline.algos.policy import Policy, seeded_weights
from pipeline.algos.replay_sampler import ReplaySampler, ReturnSampler
from pipeline.algos.rows import Rows
from pipeline.core.specs import BehaviorSpec
from pipeline.nets.actor_critic import Critic
from pipeline.nets.fast.pairs import ActorAndCritic, paired_adam
from pipeline.nets.memory import SequenceState
from pipeline.nets.q_networks import TwinQNetworks, taken_value
from pipeline.settings.trainer.schema import SACSettings, TrainerSettings


class SAC(OffPolicy):
    """Trains a policy, two action values, and a state value with a slowly moving target.

    Hooks for subclasses: `minibatches`, `targets`, `losses`, and `learn_minibatch` as a whole.
    """

    settings_class = SACSettings

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        super().__init__(spec, settings, seed=seed, device=device)
        h, network = self.hyperparameters, settings.network_settings
        with seeded_weights(seed, "sac"):
            self.policy = Policy(spec, network, squash=True).to(device)
            self.value = Critic(spec, network, self.signals.names).to(device)
            self.q_networks = TwinQNetworks(spec, network, len(self.signals.names)).to(device)
        self.target = copy.deepcopy(self.value).requires_grad_(False)
        self.own_networks = {
            "policy": self.policy,
            "value": self.value,
            "target": self.target,
            # Stored checkpoints have this key; with another key they could not be loaded.
            "twins": self.q_networks,
        }
        self.recurrent_critic = self.value
        self.both = ActorAndCritic(self.policy.actor, self.value)
        # One Adam trains all networks, because it treats every weight separately and all networks
        # have the same learning rate.
        parameters = [
            *self.policy.parameters(),
            *self.value.parameters(),
            *self.q_networks.parameters(),
            self.log_alpha,
        ]
        self.optimizer = paired_adam(
            parameters, self.both, self.q_networks, learning_rate=h.learning_rate
        )
        self._soft_update = self.follow(self.value, self.target)
        sampler: Callable[..., ReplaySampler] = ReplaySampler
        if h.n_steps > 1:
            sampler = partial(ReturnSampler, n_steps=h.n_steps, gamma=self.gammas)
        self.make_replay(seed=seed, cloned=self.policy, sampler=sampler)

    def learn_minibatch(self, batch: Rows) -> Tensor:
        """Make one joint gradient step of all networks, and return its statistics."""
        (statistics,) = self.optimizer.descend(
            partial(self.losses, sequences=batch.sequences),
            self._with_noise(batch),
            max_norm=self.hyperparameters.max_grad_norm,
        )
        # This comes after the step, so that the target follows the new weights.
        self._soft_update()
        return statistics

    def losses(
        self, inputs: Mapping[str, Any], sequences: SequenceState | None
    ) -> tuple[Tensor, tuple[Tensor]]:
        """Return the loss of all networks, and its statistics.

        `inputs` has the tensors of a minibatch, and `noise` [B, A] that new actions are drawn with;
        `sequences` are the rows' sequences, None without memory.
        """
        batch = Rows.of(inputs, sequences)
        actions = self.spec.action_spec
        actor_states, critic_states, next_states = self._sequence_states(batch)
        with torch.no_grad():
            # The target does not read the second argument, because it has its own encoder.
            next_value = self.target(batch.next_obs, batch.next_obs[0], next_states)
        targets = self.targets(batch, next_value)
        hidden, value = self.both(batch.obs, actor_states, critic_states)
        heads, noise = self.policy.actor.heads, batch.fields.get("noise")
        # New actions come from the current policy, because older policies chose the stored actions.
        sampled = self._sampled(heads, hidden, noise, batch.allowed)
        values, sampled_values = self.q_networks(
            batch.obs,
            taken=batch.continuous,
            fresh=sampled.continuous if actions.continuous_size else None,
            sequences=actor_states,
        )
        # `q_taken` [2, B, S] has the twins' values of the stored actions, trained to be `targets`.
        q_taken = taken_value(values, batch.discrete, actions.discrete_branches)
        expected = sampled.expected(sampled_values[0])
        # The policy's loss is equation 12 of arXiv 1801.01290; with branches it is the loss of
        # arXiv 1910.07207. It uses only the first twin's values, as in ML-Agents; the state value's
        # target uses the smaller of both twins' values.
        loss_pi = (sampled.entropy_cost - expected.mean(-1)).mean()
        with torch.no_grad():
            # The target of the state value is equation 5 of arXiv 1801.01290; with branches it is
            # the target of arXiv 1910.07207.
            least = torch.minimum(expected, sampled.expected(sampled_values[1]))
            soft = least - self._critic_cost(sampled).unsqueeze(1)
            entropy_gap = sampled.log_prob.mean(0) + self._targets(batch.allowed)
        errors = torch.cat((value.unsqueeze(0), q_taken)) - torch.stack((soft, targets, targets))
        # `losses` [3] has the loss of the state value and of each twin (arXiv 1801.01290, equations
        # 5 and 7), as means over rows and signals.
        losses = 0.5 * errors.square().mean((1, 2))
        # This is equation 18 of arXiv 1812.05905, with log alpha for alpha, as in ML-Agents.
        loss_alpha = -(self.log_alpha * entropy_gap * self.alpha_weight).sum()
        # All losses are added for one backward pass. Detached tensors limit each loss to the
        # networks that it trains.
        loss = loss_pi + losses.sum() + loss_alpha
        return loss, (torch.cat((loss_pi.view(1), losses, value.mean(0))),)

    def targets(self, batch: Rows, next_value: Tensor) -> Tensor:
        """Return the targets [B, S] of the action values; subclasses may return other targets.

        They are r + gamma V(s'): arXiv 1801.01290, equation 8.

        Args:
            batch: a minibatch with `rewards` [B, S], `done` [B], and for returns over several steps
                `discount` [B, S].
            next_value: [B, S] value of the next observation, by the slowly moving target.
        """
        ends = batch.done.unsqueeze(1) & ~self.signals.ignores_done
        gamma = batch.fields.get("discount", self.signals.gamma)
        return batch.rewards + gamma * next_value.masked_fill(ends, 0.0)

    def _sequence_states(
        self, batch: Rows
    ) -> tuple[SequenceState | None, SequenceState | None, SequenceState | None]:
        """Return the sequences of the rows for the actor, the state value and the target.

        The three results differ in the memories: those of the actor, of the state value, and of
        the state value one row later. Without memory all three are None.
        """
        if batch.sequences is None:
            return None, None, None
        actors, critics = batch.sequences.split(self.policy.memory_size)
        lengths = critics.lengths
        firsts = (lengths.cumsum(0) - lengths).to(self.device)
        with torch.no_grad():
            # The sequence of next observations begins one row later, so its memory is the memory
            # after the first row.
            later = self.value.step([values[firsts] for values in batch.obs], critics.memory)
        return actors, critics, SequenceState(memory=later, lengths=lengths)

    def statistics(self, means: Tensor, step: int) -> dict[str, float]:
        """Return statistics by tag, from the mean results of `learn_minibatch`."""
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
        return stats | self._temperatures()
