"""MA-POCA: proximal policy optimisation for groups, with a counterfactual baseline of each agent.

Source: Cohen et al. 2021, "On the Use and Misuse of Absorbing States in Multi-agent Reinforcement
Learning", arXiv 2111.05992. A critic of the whole group gives two estimates: the value of the
group's observations, which bootstraps lambda-returns, and for each agent a counterfactual baseline,
from what its mates observe *and do* but not from the agent's own action. The advantage is the
return minus the baseline. Members may join and leave: the critic's input has only present members,
without absorbing states for others. The return of an agent that ends early is bootstrapped with the
value of the mates that go on, so that the agent is credited with their later rewards.

The policy itself, its loss, and the schedules are PPO's. docs/explanation/poca.md lists every
detail.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.algos.group_batch import CriticInput, GroupBatch
from pipeline.algos.policy import Policy, rollout_fields, seeded_weights
from pipeline.algos.ppo import PPO, VALUE_WEIGHT, value_loss
from pipeline.algos.rows import Rows
from pipeline.algos.schedules import Schedule
from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.data.columns import Field
from pipeline.data.rollout import Rollout
from pipeline.nets.fast.adam import FlatAdam
from pipeline.nets.group_critic import GroupCritic
from pipeline.nets.memory import SequenceState
from pipeline.settings.trainer.schema import POCASettings

_log = logging.getLogger(__name__)

BASELINE_WEIGHT = 0.5
"""Weight of the baseline loss relative to the value loss; `VALUE_WEIGHT` weights their sum."""
_CHUNK = 2048
"""Largest number of moments that the critic evaluates at once, to limit memory for images."""
_PLACES = 4096
"""Largest number of places for members, summed over the sets of members that the critic evaluates
at once, so that the critic's tensors fit into a cache."""


class POCA(PPO):
    """PPO with a group critic; all agents of a rollout belong to groups."""

    settings_class = POCASettings
    critic: GroupCritic
    groups: GroupBatch
    """The groups of the rollout that the policy learns from."""
    estimates = ("value", "baseline")

    def make_networks(self, seed: int) -> None:
        """Make policy, group critic, and their optimizer."""
        for name in self.signals.names:
            if name != "extrinsic":
                _log.warning(
                    "Reward signal %s is not supported with the POCA trainer; results may be "
                    "unexpected: the signal rewards single agents, not their group.",
                    name.capitalize(),
                )
        network = self.settings.network_settings
        with seeded_weights(seed, "poca"):
            self.policy = Policy(self.spec, network).to(self.device)
            self.critic = GroupCritic(self.spec, network, self.signals.names).to(self.device)
        self.own_networks = {"policy": self.policy, "critic": self.critic}
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.optimizer = FlatAdam(parameters, learning_rate=self.hyperparameters.learning_rate)

    @property
    def fields(self) -> dict[str, Field]:
        """Shape and dtype of each stored column by name, except the observations and the reward."""
        fields = super().fields
        # By these numbers `GroupBatch` finds the row's agent and the members of the agent's group.
        fields["entity"] = fields["moment"] = Field(shape=(), dtype=np.int64)
        fields["next_moment"] = Field(shape=(), dtype=np.int64, at_end=True)
        return fields

    @property
    def member_fields(self) -> dict[str, Field]:
        """Fields that are stored for each group member because the critic reads them."""
        rows = rollout_fields(self.spec)
        # The critic reads what other members observe and do, but neither how probable an action
        # was nor which choices were allowed.
        fields = {name: rows[name] for name in rows if name not in ("log_prob", "allowed")}
        if self.memory_size:
            fields["memory"] = Field(shape=(self.memory_size,))
        return {**fields, "over": Field(shape=(), dtype=np.bool_)}

    def minibatches(self, rows: Rows) -> Iterator[Rows]:
        """Yield the minibatches of one pass; each has all rows of some moments."""
        # With memory a minibatch has whole sequences, so it cannot have whole moments: the rows of
        # a sequence belong to different moments.
        if rows.sequences is not None:
            return super().minibatches(rows)
        size = self.hyperparameters.batch_size
        return self.groups.minibatches(rows, self.minibatch_stream, size, self.processes)

    def statistics(
        self, steps: Sequence[list[Tensor]], rows: Rows, now: Schedule, *, step: int
    ) -> dict[str, float]:
        """Return the statistics of an update's gradient steps, by TensorBoard tag."""
        losses = torch.stack([results[0] for results in steps])
        names = ("policy", "value", "baseline")
        return self._mean_losses(losses, rows, *names, step=step) | now.stats()

    def learn_minibatch(self, batch: Rows, *, fixed: Mapping[str, Tensor]) -> list[Tensor]:
        """Make one gradient step on a minibatch; return its losses [3] and log ratios [B, C]."""
        h, groups = self.hyperparameters, self.groups
        index = batch.index.numpy()
        # Several rows may have the same moment; after `unique`, the members of a moment are encoded
        # only once.
        moments = np.unique(groups.moment[index])
        # A compiled program needs groups of one size, so small groups are padded with absent
        # members.
        is_compiled = self.optimizer.compiled is not None
        size = int(self.critic.largest) if is_compiled else 1
        critic_input = groups.pick(moments, groups.present[moments], index, size=size)
        return self.optimizer.descend(
            partial(self.losses, sequences=batch.sequences),
            {**batch.inputs, "mates": critic_input, **fixed},
            max_norm=h.max_grad_norm,
            lengths=(
                critic_input.lengths("mates", batch.inputs, h.batch_size) if is_compiled else None
            ),
        )

    def losses(
        self, inputs: Mapping[str, Any], sequences: SequenceState | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the loss, its parts [3] (policy, value, baseline), and the log ratios [B, C].

        `inputs` has the tensors of a minibatch, the critic's input `mates`, and the entropy weight
        `beta`; `sequences` are the rows' sequences, None without memory.
        """
        batch = Rows.of(inputs, sequences)
        hidden = self.policy.actor(batch.obs, sequences)
        log_prob, entropy = self.policy.actor.heads.evaluate(
            hidden, batch.continuous, batch.discrete, batch.allowed
        )
        # The group's value bootstraps returns; advantages are returns minus the baseline.
        value, baseline = self._values_and_baselines(inputs["mates"])
        log_ratio = log_prob - batch.log_prob
        loss_pi = self.policy_loss(log_ratio, batch)
        loss_v = value_loss(value=value, returns=batch.returns)
        loss_b = value_loss(value=baseline, returns=batch.returns)
        critic_loss = VALUE_WEIGHT * (loss_v + BASELINE_WEIGHT * loss_b)
        loss = loss_pi + critic_loss - inputs["beta"] * entropy
        return loss, (torch.stack((loss_pi, loss_v, loss_b)), log_ratio)

    def _values_and_baselines(self, critic_input: CriticInput) -> tuple[Tensor, Tensor]:
        """Return group values and baselines, both [B, S], for the B rows of P moments."""
        moment = critic_input.moment
        if moment is None:
            raise ValueError("the critic's input has no rows, which baselines need")
        estimates = self.critic(
            critic_input.obs, critic_input.memory, critic_input.actions, critic_input.groups
        )
        n_rows = moment.shape[0]  # `len` would be a constant in a compiled program
        # `GroupBatch.pick` puts the values of P moments first, then the baselines of B rows.
        return estimates.index_select(0, moment), estimates[estimates.shape[0] - n_rows :]

    def _rows(self, rollout: Rollout) -> Rows:
        branches = self.spec.action_spec.discrete_branches
        self.groups = GroupBatch.of(rollout, self.policy.normalizers, branches, self.device)
        # All values depend on the largest group's size, so it is set before any value is computed.
        self.critic.update_largest_group(self.processes.most(self.groups.largest))
        return super()._rows(rollout)

    def _estimates(
        self,
        rollout: Rollout,
        obs: list[Tensor],  # noqa: ARG002  # `self.groups` has them
        sequences: SequenceState | None,  # noqa: ARG002
    ) -> tuple[dict[str, FloatArray], FloatArray]:
        value, baseline, following, following_all = self._values(self.groups)
        # A group's value continues after the end of one agent while another member is present
        # (arXiv 2111.05992). For signals that ignore ends, all members count as present.
        terminated = rollout.terminated[:, None]
        bootstrap = np.where(terminated & self.ignores_done, following_all, following)
        return {"value": value, "baseline": baseline}, bootstrap

    def _values(self, groups: GroupBatch) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return the rows' values and baselines [R, S], and two kinds of bootstrap values [K, S].

        The first kind is the value of the members with an unfinished task, and 0 without such
        members; the second kind the value of all members, for signals that ignore ends.
        """
        n_rows = len(groups.moment)
        n_signals = len(self.signals.names)
        value, baseline = np.empty((2, n_rows, n_signals), np.float32)
        following, following_all = np.zeros((2, len(groups.following), n_signals), np.float32)
        # Rows are sorted by moment, so that the rows of successive moments are contiguous.
        by_moment = np.argsort(groups.moment, kind="stable")
        # The first loop computes the values and baselines of the rows, and the second loop the
        # bootstrap values after each trajectory's last row.
        for moments in _chunks(np.unique(groups.moment), groups):
            first, last = np.searchsorted(groups.moment[by_moment], (moments[0], moments[-1] + 1))
            rows = by_moment[first:last]
            critic_input = groups.pick(moments, groups.present[moments], rows)
            estimates = self._values_and_baselines(critic_input)
            value[rows], baseline[rows] = (tensor.cpu().numpy() for tensor in estimates)
        for result, everyone in ((following, False), (following_all, True)):
            if everyone and not self.signals.ignores_done.any():
                break
            for moments in _chunks(np.unique(groups.following), groups):
                present = groups.present[moments]
                if not everyone:
                    present = present & ~groups.over[moments]
                is_nonempty = present.any(axis=1)
                # The critic has no value for an empty group; the result already has a 0 for it.
                if not is_nonempty.any():
                    continue
                nonempty = moments[is_nonempty]
                critic_input = groups.pick(nonempty, present[is_nonempty])
                members = critic_input.obs, critic_input.memory, None, critic_input.groups
                values = self.critic(*members).cpu().numpy()
                inside = np.isin(groups.following, nonempty)
                result[inside] = values[np.searchsorted(nonempty, groups.following[inside])]
        return value, baseline, following, following_all


def _chunks(moments: AnyArray, groups: GroupBatch) -> Iterator[AnyArray]:
    n = groups.index.shape[1]
    # For a group of N members, the critic has a set of N places for the value, and one for each of
    # N baselines, so memory grows with the square of N: `_PLACES` limits the places of a chunk, and
    # `_CHUNK` its moments.
    size = min(max(_PLACES // (n * (1 + n)), 1), _CHUNK)
    for first in range(0, len(moments), size):
        yield moments[first : first + size]
