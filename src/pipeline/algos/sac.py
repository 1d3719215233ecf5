"""Soft actor-critic, as ML-Agents' configurations expect it.

Sources: Haarnoja et al. 2018, arXiv 1801.01290 (policy, twin action values and a state value with a
slowly moving target), and arXiv 1812.05905 (temperature that adjusts itself); for choices among few
actions the expectations are exact (Christodoulou 2019, arXiv 1910.07207). docs/sac.md lists every
detail with its reason.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import seeding
from pipeline.algos.base import AlgorithmBase
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.policy import Policy, generator_for, seeded_weights
from pipeline.algos.ranks import ALONE
from pipeline.algos.sac_losses import Fresh, squared_errors, taken_value, value_targets
from pipeline.algos.safety import refuse_divergence
from pipeline.algos.samples import Samples
from pipeline.algos.schedules import LEARNING_RATE_FLOOR, scheduled
from pipeline.algos.signals import RewardSignals, mean_losses
from pipeline.data.replay import Replay
from pipeline.nets.action_value import TwinActionValues
from pipeline.nets.actor_critic import Critic
from pipeline.nets.memory import Recall
from pipeline.nets.optimizer import FlatAdam
from pipeline.nets.squashed import squashed_action

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.algos.policy import Decision
    from pipeline.algos.samples import Minibatch
    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.data.rollout import Field, Rollout
    from pipeline.protocol.specs import ActionSpec, BehaviorSpec
    from pipeline.settings.schema import SACSettings, TrainerSettings

# Entropy that is aimed for: of all continuous components together, for each of them; and of a
# branch, as a share of the most that it can have.
CONTINUOUS_ENTROPY = -1.0
DISCRETE_ENTROPY = 0.2


class SAC(AlgorithmBase):
    """Acts, keeps what happened, and learns from samples of it.

    Args:
        spec: what the behavior observes and does.
        settings: the behavior's trainer settings, with SAC hyperparameters.
        seed: of the run; weights, actions, noise and minibatches have a stream each.
        device: where the networks live.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.hyperparameters: SACSettings = settings.hyperparameters  # type: ignore[assignment]  # checked by trainer_type
        self.device = device
        self.ranks = ALONE
        self.signals = RewardSignals(spec, settings, seed=seed, device=device)
        network, n_signals = settings.network_settings, len(self.signals.names)
        with seeded_weights(seed, "sac"):
            self.policy = Policy(spec, network, squash=True).to(device)
            self.value = Critic(spec, network, self.signals.names).to(device)
            self.twins = TwinActionValues(spec, network, n_signals).to(device)
        self.target = copy.deepcopy(self.value).requires_grad_(False)
        self.own_networks = {
            "policy": self.policy,
            "value": self.value,
            "target": self.target,
            "twins": self.twins,
        }
        self.reader = self.value
        actions = spec.action_spec
        n_temperatures = (actions.continuous_size > 0) + actions.discrete_size
        start = torch.full((n_temperatures,), math.log(self.hyperparameters.init_entcoef))
        self.log_alpha = nn.Parameter(start.to(device))
        self.entropy = _wanted_entropy(actions).to(device)
        self.share = _shares(actions).to(device)
        # one Adam for all: it treats every number by itself, and all have one learning rate
        self.optimizer = FlatAdam(
            [
                *self.policy.parameters(),
                *self.value.parameters(),
                *self.twins.parameters(),
                self.log_alpha,
            ],
            learning_rate=self.hyperparameters.learning_rate,
        )
        self.twins.share_weights()
        self._source: list[Tensor] = list(self.value.parameters())
        self._target: list[Tensor] = list(self.target.parameters())
        self.action_stream = generator_for(seed, device, "actions")
        self.noise_stream = generator_for(seed, device, "noise")
        self.minibatch_stream = seeding.stream(seed, "minibatches")
        memory = network.memory
        self.sequence_length = 1 if memory is None else memory.sequence_length
        self.replay = Replay(
            self.fields,
            n_obs=len(spec.observation_specs),
            capacity=self.hyperparameters.buffer_size,
            sequence_length=self.sequence_length,
        )
        self.samples = Samples(
            self.replay,
            self.signals,
            self.policy.normalizers,
            stream=self.minibatch_stream,
            batch_size=self.hyperparameters.batch_size,
            device=device,
        )
        # counted from 1, as the schedule of updates has it
        self.n_updates = self.n_signal_updates = 1
        self.cloning = BehavioralCloning.from_settings(self.policy, settings, seed=seed)

    @property
    def fields(self) -> dict[str, Field]:
        """What each row of experience holds."""
        fields = super().fields
        del fields["log_prob"]
        return fields

    def act(
        self,
        obs: Sequence[FloatArray],
        mask: Sequence[BoolArray] | None,
        memory: FloatArray | None = None,
    ) -> Decision:
        """Decide for N agents; how likely that was, nobody will ask."""
        decision = super().act(obs, mask, memory)
        rows = {name: values for name, values in decision.rows.items() if name != "log_prob"}
        return replace(decision, rows=rows)

    def ready(self, n_rows: int) -> bool:
        """Whether there are closed rows to take in; `update` sees whether it is time to learn."""
        return n_rows > 0

    def update(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        """Take a rollout into the replay, and make the gradient steps that are due.

        Args:
            rollout: closed trajectories.
            step: agent steps done, for the schedules.

        Returns:
            Statistics by their TensorBoard tag; empty when no gradient step was due.

        Raises:
            TrainingError: A loss, gradient or weight is not finite.
        """
        h = self.hyperparameters
        self.replay.add(rollout)
        n_due = self._due(step, self.n_updates, h.steps_per_update)
        stats: dict[str, float] = {}
        if n_due:
            now = {"step": step, "max_steps": self.settings.max_steps}
            rate = scheduled(h.learning_rate_schedule, h.learning_rate, LEARNING_RATE_FLOOR, **now)
            self.optimizer.learning_rate = rate
            learned, cloned = [], []
            for batch in self.samples.minibatches(n_due):
                learned.append(self._learn(batch))
                if self.cloning is not None:
                    cloned.append(self.cloning.update(step=step))
            self.n_updates += n_due
            stats = self._statistics(torch.stack(learned).mean(0), step)
            stats["Policy/Learning Rate"] = rate
            if cloned:
                stats["Losses/Pretraining Loss"] = float(np.mean(cloned))
        return stats | self._update_signals(step)

    def _due(self, step: int, n_done: int, steps_per_update: float) -> int:
        """Gradient steps to make now, after `n_done` (counted from 1)."""
        h = self.hyperparameters
        if step < h.buffer_init_steps or self.ranks.least(len(self.replay)) < h.batch_size:
            return 0
        # the smallest n with (step - init) / n <= steps_per_update
        return max(math.ceil((step - h.buffer_init_steps) / steps_per_update) - n_done, 0)

    def _update_signals(self, step: int) -> dict[str, float]:
        """The reward signals' own gradient steps, on minibatches of their own."""
        if not self.signals.learning:
            return {}
        every = self.hyperparameters.reward_signal_steps_per_update
        n_due = self._due(step, self.n_signal_updates, every)
        losses = [self.signals.update(rows) for rows in self.samples.transitions(n_due)]
        self.n_signal_updates += n_due
        return mean_losses(losses)

    def _learn(self, batch: Minibatch) -> Tensor:
        """One gradient step of all networks from the state before it; gives its statistics."""
        actions = self.spec.action_spec
        own, critics, nexts = self._recalls(batch)
        with torch.no_grad():
            next_value = self.target(batch.next_obs, batch.next_obs[0], nexts)
        y = value_targets(
            rewards=batch.rewards,
            done=batch.done,
            next_value=next_value,
            gamma=self.signals.gamma,
            ignores_done=self.signals.ignores_done,
        )
        self.optimizer.zero_gradients()
        fresh = self._fresh(batch, own)
        values, again = self.twins(
            batch.obs,
            taken=batch.continuous,
            fresh=fresh.continuous if actions.continuous_size else None,
            recall=own,
        )
        taken = [taken_value(one, batch.discrete, actions.discrete_branches) for one in values]
        value = self.value(batch.obs, batch.obs[0], critics)
        expected = fresh.expected(again[0])
        loss_pi = (fresh.cost - expected.mean(-1)).mean()
        with torch.no_grad():
            soft = torch.minimum(expected, fresh.expected(again[1])) - fresh.cost.unsqueeze(1)
            losses, by_values = squared_errors(
                torch.stack((value, *taken)), torch.stack((soft, y, y))
            )
            by_log_alpha = -(fresh.log_prob.mean(0) + self.entropy) * self.share
        torch.autograd.backward(
            (loss_pi, value, *taken, self.log_alpha), (None, *by_values.unbind(), by_log_alpha)
        )
        self.optimizer.step(max_norm=self.hyperparameters.max_grad_norm)
        with torch.no_grad():
            torch._foreach_lerp_(self._target, self._source, self.hyperparameters.tau)
        return torch.cat((loss_pi.detach().view(1), losses, value.detach().mean(0)))

    def _fresh(self, batch: Minibatch, recall: Recall | None) -> Fresh:
        """What the policy would do at the observations of a minibatch, with gradients."""
        actions, heads = self.spec.action_spec, self.policy.actor.heads
        hidden = self.policy.actor(batch.obs, recall)
        continuous, columns = batch.continuous, []
        if actions.continuous_size:
            mu, log_sigma = heads.gaussian(hidden)
            noise = torch.empty_like(mu).normal_(generator=self.noise_stream)
            continuous, density = squashed_action(mu=mu, log_sigma=log_sigma, noise=noise)
            columns.append(density.sum(1))
        branches = heads.branch_log_probs(hidden, batch.allowed)
        columns += [(branch.exp() * branch).sum(1) for branch in branches]
        log_prob = torch.stack(columns, dim=1)
        return Fresh(
            continuous=continuous,
            log_prob=log_prob,
            cost=log_prob @ (self.log_alpha.detach().exp() * self.share),
            probability=torch.cat(branches, dim=1).exp() if branches else None,
            n_branches=len(branches),
        )

    def _recalls(self, batch: Minibatch) -> tuple[Recall | None, Recall | None, Recall | None]:
        """Memories of the actor, of the value network, and of the latter one row later."""
        if batch.recall is None:
            return None, None, None
        own, critics = batch.recall.split(self.policy.memory_size)
        lengths = critics.lengths
        firsts = (lengths.cumsum(0) - lengths).to(self.device)
        with torch.no_grad():
            later = self.value.step([values[firsts] for values in batch.obs], critics.memory)
        return own, critics, Recall(memory=later, lengths=lengths)

    def _statistics(self, means: Tensor, step: int) -> dict[str, float]:
        """Statistics by tag from the means over gradient steps of what `_learn` gives."""
        loss_pi, loss_v, loss_1, loss_2, *values = means.tolist()
        refuse_divergence(
            "SAC",
            step=step,
            losses={"policy": loss_pi, "value": loss_v, "Q1": loss_1, "Q2": loss_2},
            optimizers=[self.optimizer],
            networks=self.own_networks,
        )
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
        """Everything that continues training but for the replay, as tensors and plain values."""
        return {
            **super().state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "noise_stream": self.noise_stream.get_state(),
            "n_updates": self.n_updates,
            "n_signal_updates": self.n_signal_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        super().load_state_dict(state)
        self.log_alpha.data.copy_(state["log_alpha"])
        self.noise_stream.set_state(state["noise_stream"])
        self.n_updates = int(state["n_updates"])
        self.n_signal_updates = int(state["n_signal_updates"])


def _wanted_entropy(actions: ActionSpec) -> Tensor:
    """[C] of the continuous actions, where there are any, then of each branch."""
    wanted = [CONTINUOUS_ENTROPY * actions.continuous_size] if actions.continuous_size else []
    wanted += [DISCRETE_ENTROPY * math.log(size) for size in actions.discrete_branches]
    return torch.tensor(wanted)


def _shares(actions: ActionSpec) -> Tensor:
    """[C] what each temperature counts: branches share what one is worth."""
    shares = [1.0] if actions.continuous_size else []
    shares += [1.0 / actions.discrete_size for _ in actions.discrete_branches]
    return torch.tensor(shares)
