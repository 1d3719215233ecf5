"""Proximal policy optimisation, as ML-Agents' configurations expect it.

Source: Schulman et al. 2017, arXiv 1707.06347. These points differ from the paper, because
published configurations are tuned to them: the probability ratio is taken per action component
rather than for the joint action; advantages are the mean over reward signals and are normalised
over the whole buffer; the entropy of continuous actions is the mean over components.
docs/explanation/ppo.md lists every detail with its reason.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.algos.algorithm import Algorithm
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.policy import Policy, seeded_weights
from pipeline.algos.process_group import ProcessGroup
from pipeline.algos.reward_scale import RewardScale
from pipeline.algos.reward_signals import IntrinsicRewards
from pipeline.algos.rows import Rows, named_tensors, stored_sequences, tensors, values_in_sequence
from pipeline.algos.schedules import Schedule, adapted_rate
from pipeline.core.arrays import FloatArray, IntArray
from pipeline.core.specs import BehaviorSpec
from pipeline.data.rollout import Rollout
from pipeline.nets.actor_critic import Critic
from pipeline.nets.fast.pairs import ActorAndCritic, paired_adam
from pipeline.nets.memory import SequenceState
from pipeline.settings.trainer.schema import (
    HyperparameterSettings,
    OnPolicySettings,
    PPOSettings,
    TrainerSettings,
)

# This is ML-Agents' value; it only matters where all advantages are equal (deviation 0).
ADVANTAGE_EPSILON = 1e-10
VALUE_WEIGHT = 0.5  # c1 of arXiv 1707.06347, equation 9; ML-Agents' value
LARGEST_WEIGHT = 2.0
"""Largest weight of a row that an older policy collected; see `reweighted_to_current_policy`."""
STORED = ("continuous", "discrete", "log_prob", "allowed")
"""Fields of a rollout that the losses read; `allowed` exists only with discrete branches."""
CHUNK = 4096
"""Largest number of rows that a network evaluates at once where no gradient is computed."""


def generalized_advantages(
    *,
    rewards: FloatArray,
    values: FloatArray,
    bootstrap: FloatArray,
    starts: IntArray,
    lengths: IntArray,
    gamma: FloatArray,
    lambda_: float,
) -> FloatArray:
    """Return generalised advantage estimates of K trajectories, stored one after another in R rows.

    delta_t = r_t + gamma V(s_t+1) - V(s_t); A_t = delta_t + gamma lambda A_t+1, where V(s_t+1) of a
    trajectory's last row is its bootstrap value. Source: Schulman et al. 2015, arXiv 1506.02438,
    equations 11 and 16. One loop goes backwards through the rows of all trajectories at once.

    Args:
        rewards: [R, S] for each of S reward signals.
        values: [R, S] critic's estimates.
        bootstrap: [K, S] value after each trajectory's last row, 0 where it terminated.
        starts: [K] first row of each trajectory.
        lengths: [K] rows of each trajectory, all at least 1.
        gamma: [S] discount per step.
        lambda_: lambda, the weight of estimates over more steps, in [0, 1].

    Returns:
        [R, S] advantages; returns are advantages plus values.
    """
    following = np.empty_like(values)
    following[:-1] = values[1:]
    ends = starts + lengths - 1
    # At the end of a trajectory, this overwrites the value of the next trajectory's first row,
    # which is not a successor.
    following[ends] = bootstrap
    # The advantages begin as delta_t; the loop adds the discounted deltas of later rows.
    advantages = rewards + gamma * following - values
    # Trajectories are ordered from longest to shortest, so that the trajectories with more than
    # `back` rows come first in `carry`.
    order = np.argsort(-lengths, kind="stable")
    last_rows = ends[order]
    carry = np.zeros_like(bootstrap)
    decay = (gamma * lambda_).astype(np.float32)
    # `n_active` is the number of trajectories that have more than `back` rows.
    n_active_at = len(lengths) - np.cumsum(np.bincount(lengths))
    for back, n_active in enumerate(n_active_at[:-1]):
        rows = last_rows[:n_active] - back
        # This is A_t = delta_t + gamma lambda A_t+1 for the rows that are `back` steps before the
        # ends of their trajectories.
        carry = advantages[rows] + decay * carry[:n_active]
        advantages[rows] = carry
    return advantages


def policy_loss(*, log_ratio: Tensor, advantage: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Clipped surrogate -mean(min(ratio A, clip(ratio) A)), arXiv 1707.06347, equation 7.

    A is the advantage. The minimum clips a ratio on one side only, where a further move would raise
    the objective: from above where A is positive, from below where it is negative.

    Args:
        log_ratio: [B, C] log probabilities of the taken actions under the policy being trained,
            less the stored log probabilities of the rows, for C action components.
        advantage: [B, 1], or [B, C] after `reweighted_to_current_policy`.
        lowest: lower bounds of the ratio, in the shape of `advantage`; see `with_clip_range`.
        highest: upper bounds of the ratio, in the same shape.
    """
    # `lowest` and `highest` depend on the sign of A, so one clamp gives the minimum of both terms.
    return -(log_ratio.exp().clamp(lowest, highest) * advantage).mean()


def with_clip_range(rows: Rows, epsilon: float) -> Rows:
    """Return rows with the fields `lowest` and `highest`: bounds of ratios for `policy_loss`."""
    # The bounds are computed once for all minibatches, to save operations in each of them.
    advantage = rows.advantage
    bounds = {
        "lowest": torch.where(advantage < 0.0, 1.0 - epsilon, -torch.inf),
        "highest": torch.where(advantage > 0.0, 1.0 + epsilon, torch.inf),
    }
    return replace(rows, fields={**rows.fields, **bounds})


def value_loss(*, value: Tensor, returns: Tensor) -> Tensor:
    """Return the mean of (R - V)^2, both [B, S]: L^VF of arXiv 1707.06347, equation 9."""
    return nn.functional.mse_loss(value, returns)


def clipped_value_loss(
    *, value: Tensor, old_value: Tensor, returns: Tensor, clip: Tensor
) -> Tensor:
    """Return the mean of max((R - V)^2, (R - V_clipped)^2) of values V and returns R, both [B, S].

    V_clipped is V, limited to a distance of at most `clip` [S] from `old_value` [B, S], the
    estimates when the rollout was collected.
    """
    # Value clipping is not in PPO's paper but in its code: Engstrom et al. 2020, arXiv 2005.12729.
    clipped = old_value + torch.clamp(value - old_value, -clip, clip)
    return torch.max((value - returns).square(), (clipped - returns).square()).mean()


def value_range(returns: Tensor, epsilon: float, processes: ProcessGroup) -> Tensor:
    """Return the clip range of values [S]: `epsilon` standard deviations of the returns [R, S].

    The range is relative to the deviation, because the scale of returns differs between tasks and
    signals.
    """
    # If all returns are equal, a range of 0 would forbid every change of the value.
    return epsilon * processes.std(returns).clamp_min(1e-6)


def reweighted_to_current_policy(rows: Rows, now: Tensor) -> Rows:
    """Return an older policy's rows, changed so that the current policy can learn from them.

    Ratios are clipped relative to the current policy, so that an update can change the policy as
    much as with rows of the current policy; advantages are weighted by the ratio of the current
    policy to the policy that acted. Source: Hilton et al. 2021, arXiv 2110.00641; here per action
    component as in `policy_loss`.

    Args:
        rows: with `log_prob` [R, C] of the policy that acted, and `advantage` [R, 1]; the result
            has `now` as `log_prob`, and `advantage` [R, C].
        now: [R, C] log probabilities of the same actions under the current policy.
    """
    # Weights are limited, because a single action that was unlikely for the older policy could
    # outweigh all other rows of the minibatch.
    weight = (now - rows.log_prob).exp().clamp(max=LARGEST_WEIGHT)
    changed = {"log_prob": now, "advantage": rows.advantage * weight}
    return replace(rows, fields={**rows.fields, **changed})


@torch.no_grad()
def log_probs(policy: Policy, rows: Rows, sequences: SequenceState | None) -> Tensor:
    """Return log probabilities [R, C] of the rows' actions, computed in pieces to limit memory."""
    # Sequences stay in one piece, because `Rows.split` would lose their memories.
    parts = [rows] if sequences is not None else rows.split(CHUNK)
    actor, results = policy.actor, []
    for part in parts:
        hidden = actor(part.obs, sequences)
        actions = part.continuous, part.discrete, part.allowed
        results.append(actor.heads.evaluate(hidden, *actions)[0])
    return torch.cat(results)


class PPO(Algorithm):
    """Learns from each rollout in `num_epoch` passes, and then discards the rollout.

    Hooks for subclasses: `advantages`, `minibatches`, `policy_loss`, or all of `losses`.
    """

    schedules = ("learning_rate", "epsilon", "beta")
    settings_class: ClassVar[type[HyperparameterSettings]] = PPOSettings
    critic: Any
    """A `Critic`, or a `GroupCritic`."""
    estimates: ClassVar[tuple[str, ...]] = ("value",)
    """Names of the critic's estimates; the mean of each is a statistic of each reward signal."""
    _rewards: FloatArray
    """[R, S] rewards of the present rollout: each signal's rewards times its strength."""

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        super().__init__(spec, settings, seed=seed, device=device)
        self.hyperparameters: OnPolicySettings = settings.hyperparameters  # type: ignore[assignment]  # checked by trainer_type
        if self.signals.learning:
            self.intrinsic = IntrinsicRewards(self.signals, device=device)
        self.make_networks(seed)
        self.gamma, self.strength, self.ignores_done = (
            values.cpu().numpy()
            for values in (self.signals.gamma, self.signals.strength, self.signals.ignores_done)
        )
        self.return_scale: RewardScale | None = None
        if self.hyperparameters.return_normalization:
            n_signals = len(self.signals.names)
            # The discount has no effect: only `RewardScale.observe` reads it, and PPO calls only
            # `RewardScale.add`.
            self.return_scale = RewardScale(n_signals, gamma=1.0)
        self.bc = BehavioralCloning.from_settings(self.policy, settings, seed=seed)

    def make_networks(self, seed: int) -> None:
        """Make policy, critic, and their optimizer."""
        h, network = self.hyperparameters, self.settings.network_settings
        with seeded_weights(seed, "ppo"):
            self.policy = Policy(self.spec, network).to(self.device)
            is_shared = isinstance(h, PPOSettings) and h.shared_critic
            shared = self.policy.actor if is_shared else None
            self.critic = Critic(self.spec, network, self.signals.names, shared=shared)
            self.critic.to(self.device)
        self.own_networks = {"policy": self.policy, "critic": self.critic}
        self.recurrent_critic = self.critic
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        self.both = ActorAndCritic(self.policy.actor, self.critic)
        self.optimizer = paired_adam(parameters, self.both, learning_rate=h.learning_rate)

    def ready(self, n_rows: int) -> bool:
        """Return whether `n_rows` rows of closed trajectories are enough for an update."""
        # As in ML-Agents, exactly `buffer_size` rows are not enough, because published buffer sizes
        # are tuned to this.
        return n_rows > self.hyperparameters.buffer_size

    def update_in_parts(
        self, rollout: Rollout, *, step: int
    ) -> Generator[int, None, dict[str, float]]:
        """Learn from a rollout, a minibatch at a time: see `Algorithm.update_in_parts`."""
        h = self.hyperparameters
        now = replace(Schedule.at(step, h, self.settings.max_steps), **self.set_values)
        # With `desired_kl` the rate of the last gradient step is kept (see `_adapt_rate`), unless
        # `set_values` has a rate.
        if h.desired_kl is None or "learning_rate" in self.set_values:
            self.optimizer.learning_rate = now.learning_rate
        rows = with_clip_range(self._rows(rollout), now.epsilon)
        # `beta` is a tensor, because a compiled program would keep a Python number as a constant.
        fixed = {"beta": torch.tensor(now.beta, device=self.device)}
        if isinstance(h, PPOSettings) and h.clip_value:
            fixed["clip"] = value_range(rows.returns, now.epsilon, self.processes)
        steps: list[list[Tensor]] = []
        n_left = h.num_epoch * (len(rows) // h.batch_size) + (self.bc.n_parts if self.bc else 0)
        for batch in self._passes(rollout, rows, now.epsilon):
            yield n_left - len(steps)
            steps.append(self.learn_minibatch(batch, fixed=fixed))
            # The KL divergence of the first step is left out: it is 0, because the policy has not
            # changed yet, and a divergence of 0 would raise the learning rate.
            if len(steps) > 1:
                self._adapt_rate(steps[-1][-1])
            if self.intrinsic is not None and batch.steps is not None:
                self.intrinsic.learn(batch.steps)
        now = replace(now, learning_rate=self.optimizer.learning_rate)
        stats = self.statistics(steps, rows, now, step=step)
        # The estimates are in the critic's unit, but charts show them in the unit of the rewards.
        unit = self._unit.tolist()
        for column, signal in enumerate(self.signals.names):
            for name in self.estimates:
                tag = f"Policy/{signal.capitalize()} {name.capitalize()} Estimate"
                stats[tag] = float(rows.fields[name][:, column].mean()) * unit[column]
        if self.intrinsic is not None:
            stats |= self.intrinsic.end(step=step)
        if self.bc is not None:
            stats["Losses/Pretraining Loss"] = yield from self.bc.update_in_parts(step=step)
        return stats

    def _passes(self, rollout: Rollout, rows: Rows, epsilon: float) -> Iterator[Rows]:
        latest = rows
        for number in range(self.hyperparameters.num_epoch):
            # The rows of the first pass already have advantages by the current critic.
            if number and self.hyperparameters.recompute_advantages:
                latest = with_clip_range(self._revalued(rollout, rows), epsilon)
            yield from self.minibatches(latest)

    def _adapt_rate(self, log_ratio: Tensor) -> None:
        """With `desired_kl`, adapt the learning rate to the KL divergence of log ratios [B, C]."""
        desired_kl = self.hyperparameters.desired_kl
        if desired_kl is None or "learning_rate" in self.set_values:
            return
        # The sum over components is the divergence of the joint action; see `statistics`.
        kl = (log_ratio.exp() - 1.0 - log_ratio).sum(1).mean()
        self.processes.average_(kl, len(log_ratio))
        rate = self.optimizer.learning_rate
        self.optimizer.learning_rate = adapted_rate(rate, float(kl), desired_kl)

    @property
    def _unit(self) -> FloatArray:
        """float32 [S] factors from critic outputs to returns: 1, or `return_scale.divisor`."""
        if self.return_scale is None or self.return_scale.count == 0:
            return np.ones(len(self.signals.names), np.float32)
        unit: FloatArray = self.return_scale.divisor.astype(np.float32)
        return unit

    def minibatches(self, rows: Rows) -> Iterator[Rows]:
        """Yield the minibatches of one pass over the rows."""
        # With memory `size` counts sequences, as if each of them had `sequence_length` rows.
        size = max(self.hyperparameters.batch_size // self.sequence_length, 1)
        return rows.minibatches(self.minibatch_stream, size, self.processes)

    def _mean_losses(self, losses: Tensor, rows: Rows, *names: str, step: int) -> dict[str, float]:
        """Return, by tag, the mean absolute value of each loss, which ML-Agents also charts.

        `losses` [P, L] are the losses of P gradient steps, called `names`.
        """
        self.processes.average_(losses, len(rows))
        means = dict(zip(names, losses.abs().mean(0).tolist(), strict=True))
        self.refuse_divergence(means, step=step)
        return {f"Losses/{name.capitalize()} Loss": mean for name, mean in means.items()}

    def statistics(
        self, steps: Sequence[list[Tensor]], rows: Rows, now: Schedule, *, step: int
    ) -> dict[str, float]:
        """Return the statistics of an update's gradient steps, by TensorBoard tag.

        Raises:
            TrainingError: A loss, a gradient or a weight is not finite.
        """
        losses = torch.stack([loss for results in steps for loss in results[:2]]).view(-1, 2)
        stats = self._mean_losses(losses, rows, "policy", "value", step=step)
        # The ratios are those of the last epoch, when the policy has changed most; at the start of
        # an update all ratios are 1.
        n_per_epoch = len(steps) // self.hyperparameters.num_epoch
        last_epoch = torch.cat([log_ratio for _, _, log_ratio in steps[-n_per_epoch:]])
        # The KL divergence is estimated by the mean of (r - 1) - ln r, which is never negative and
        # has a low variance: Schulman 2020, http://joschu.net/blog/kl-approx.html (the estimator
        # k3).
        change = last_epoch.exp() - 1.0
        # The explained variance is 1 - Var(R - V) / Var(R), as a mean over signals.
        variance = rows.returns.var(0, correction=0)
        residual = (rows.returns - rows.value).var(0, correction=0)
        explained = 1.0 - residual / variance.clamp_min(1e-8)
        return {
            **stats,
            **now.stats(),
            "Policy/approx_kl": float((change - last_epoch).mean()),
            "Policy/clip_fraction": float((change.abs() > now.epsilon).float().mean()),
            "Policy/explained_variance": float(explained.mean()),
        }

    def learn_minibatch(self, batch: Rows, *, fixed: Mapping[str, Tensor]) -> list[Tensor]:
        """Make one gradient step; `fixed` has the inputs of `losses` that all minibatches share.

        Returns:
            Policy loss and value loss, scalars, and the log ratio [B, C]: log probabilities under
            the policy before this step, less the rows' `log_prob`.
        """
        return self.optimizer.descend(
            partial(self.losses, sequences=batch.sequences),
            {**batch.inputs, **fixed},
            max_norm=self.hyperparameters.max_grad_norm,
        )

    def losses(
        self, inputs: Mapping[str, Any], sequences: SequenceState | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss, its policy and value parts, and the log ratio [B, C] of the actions.

        `inputs` has the tensors of a minibatch, the entropy weight `beta`, and `clip` [S] if values
        are clipped; `sequences` are the rows' sequences, None without memory.
        """
        batch = Rows.of(inputs, sequences)
        hidden, value = self.both(batch.obs, *self._sequence_states(batch.sequences))
        log_prob, entropy = self.policy.actor.heads.evaluate(
            hidden, batch.continuous, batch.discrete, batch.allowed
        )
        log_ratio = log_prob - batch.log_prob
        loss_pi = self.policy_loss(log_ratio, batch)
        if "clip" in inputs:
            loss_v = clipped_value_loss(
                value=value, old_value=batch.value, returns=batch.returns, clip=inputs["clip"]
            )
        else:
            loss_v = value_loss(value=value, returns=batch.returns)
        # This is the objective of arXiv 1707.06347, equation 9, with its sign changed.
        loss = loss_pi.add(loss_v, alpha=VALUE_WEIGHT).addcmul(inputs["beta"], entropy, value=-1.0)
        return loss, (loss_pi, loss_v, log_ratio)

    def policy_loss(self, log_ratio: Tensor, batch: Rows) -> Tensor:
        """Return the policy's loss, a scalar: the clipped surrogate; subclasses may change it.

        `log_ratio` [B, C] are log probabilities of the taken actions, less `batch.log_prob`;
        `batch` has `advantage` [B, 1], and the fields of `with_clip_range`.
        """
        bounds = {name: batch.fields[name] for name in ("lowest", "highest")}
        return policy_loss(log_ratio=log_ratio, advantage=batch.advantage, **bounds)

    @torch.no_grad()
    def _rows(self, rollout: Rollout) -> Rows:
        """Return a rollout's rows with the critic's estimates, `returns` [R, S] and `advantage`.

        Estimates stay NumPy arrays until advantages are computed: torch adds numbers in another
        order than NumPy, so its results would differ from the results of earlier versions. Tensors
        on the CPU share memory with the arrays. `advantage` is [R, 1], or [R, C] with `threaded`.
        """
        obs = self.policy.normalizers(tensors(rollout.obs, self.device))
        sequences = stored_sequences(rollout, self.sequence_length, self.device)
        estimates, bootstrap = self._estimates(rollout, obs, sequences)
        steps = None
        if self.intrinsic is None:
            self._rewards = rollout.fields["reward"][:, None] * self.strength
        else:
            self._rewards, steps = self.intrinsic.begin(rollout)
        targets = self._targets(rollout, estimates, bootstrap, is_new=True)
        columns = {**rollout.fields, **targets}
        fields = named_tensors(columns, (*STORED, *targets), self.device)
        rows = Rows(obs=obs, fields=fields, sequences=sequences, steps=steps)
        if not self.settings.threaded:
            return rows
        # With `threaded`, agents acted during the last update, so the policy has changed since it
        # chose these actions.
        now = log_probs(self.policy, rows, self._sequence_states(sequences)[0])
        return reweighted_to_current_policy(rows, now)

    @torch.no_grad()
    def _revalued(self, rollout: Rollout, rows: Rows) -> Rows:
        """Return `rows` with returns and advantages computed again with the current critic."""
        estimates, bootstrap = self._estimates(rollout, rows.obs, rows.sequences)
        targets = self._targets(rollout, estimates, bootstrap, is_new=False)
        changed = named_tensors(targets, ("returns", "advantage"), self.device)
        if not self.settings.threaded:
            return replace(rows, fields={**rows.fields, **changed})
        # The weights are ratios to the policy that acted, so the log probabilities of that policy
        # are put back first.
        (changed["log_prob"],) = tensors([rollout.fields["log_prob"]], self.device)
        collected = replace(rows, fields={**rows.fields, **changed})
        return reweighted_to_current_policy(collected, rows.log_prob)

    def _estimates(
        self, rollout: Rollout, obs: list[Tensor], sequences: SequenceState | None
    ) -> tuple[dict[str, FloatArray], FloatArray]:
        """Return the critic's estimates for a rollout's rows, before multiplication by `_unit`.

        They are `value` [R, S], with `baseline` [R, S] if advantages subtract a baseline instead of
        the value; the second result has values [K, S] of the observations after the trajectories.
        `obs` [R, *shape] are normalised; `sequences` are None without memory.
        """
        next_obs = self.policy.normalizers(tensors(rollout.next_obs, self.device))
        if sequences is None:
            value, following = self._values_in_parts(obs), self._values_in_parts(next_obs)
        else:
            pair = values_in_sequence(self._value, obs, next_obs, rollout, sequences=sequences)
            value, following = (values.cpu().numpy() for values in pair)
        # A signal that ignores ends has a value after the end of the task, too.
        bootstrap = following * (~rollout.terminated[:, None] | self.ignores_done)
        return {"value": value}, bootstrap

    def _targets(
        self,
        rollout: Rollout,
        estimates: dict[str, FloatArray],
        bootstrap: FloatArray,
        *,
        is_new: bool,
    ) -> dict[str, FloatArray]:
        """Return `estimates` with `returns` [R, S] and `advantage` [R, 1], by name.

        With `return_normalization` returns and estimates are divided by `return_scale.divisor`. If
        the rollout `is_new`, its returns are first added to the statistics of `return_scale`.
        """
        estimates = {name: values * self._unit for name, values in estimates.items()}
        advantages = self.advantages(
            rollout, self._rewards, estimates["value"], bootstrap * self._unit
        )
        # The lambda-return is the generalised advantage estimate plus the value, which the estimate
        # subtracts.
        returns = advantages + estimates["value"]
        if self.return_scale is not None and is_new:
            self.return_scale.add(returns)
        if "baseline" in estimates:
            advantages = returns - estimates["baseline"]
        # `mean` [R, 1] is the mean of the advantages of all reward signals, as in ML-Agents.
        mean = advantages.mean(axis=1, keepdims=True)
        # Mean and deviation are those of the whole buffer and all processes, so that all
        # minibatches have the same scale.
        center, std = self.processes.moments(mean)
        return {
            **{name: values / self._unit for name, values in estimates.items()},
            "returns": returns / self._unit,
            "advantage": (mean - center) / (std + ADVANTAGE_EPSILON),
        }

    def advantages(
        self, rollout: Rollout, rewards: FloatArray, values: FloatArray, bootstrap: FloatArray
    ) -> FloatArray:
        """Return generalised advantage estimates [R, S]; subclasses may compute other advantages.

        The other arguments are those of `generalized_advantages`; `rewards` [R, S] are multiplied
        by the signals' strengths. The policy learns from normalised advantages.
        """
        return generalized_advantages(
            rewards=rewards,
            values=values,
            bootstrap=bootstrap,
            starts=rollout.starts,
            lengths=rollout.lengths,
            gamma=self.gamma,
            lambda_=self.hyperparameters.lambd,
        )

    def _values_in_parts(self, obs: Sequence[Tensor]) -> FloatArray:
        """Return the critic's values [R, S], computed in pieces to limit the memory for images."""
        parts = [self._value(part.obs) for part in Rows(obs=list(obs)).split(CHUNK)]
        values: FloatArray = torch.cat(parts).cpu().numpy()
        return values

    def _value(self, obs: list[Tensor], sequences: SequenceState | None = None) -> Tensor:
        actors, critics = self._sequence_states(sequences)
        # A critic with its own body ignores the argument `hidden`, so it gets `obs[0]`, which costs
        # nothing, instead of the actor's output.
        hidden = self.policy.actor(obs, actors) if self.critic.body is None else obs[0]
        value: Tensor = self.critic(obs, hidden, critics)
        return value

    def _sequence_states(
        self, sequences: SequenceState | None
    ) -> tuple[SequenceState | None, SequenceState | None]:
        """Return the sequences with the actor's memories, and with the critic's memories.

        Without sequences both are None.
        """
        return (None, None) if sequences is None else sequences.split(self.policy.memory_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training, without experience, as tensors and plain values."""
        state = super().state_dict()
        if self.return_scale is not None:
            state["return_scale"] = self.return_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state)
        # A checkpoint of a run without return normalisation has no key `return_scale`.
        if self.return_scale is not None and "return_scale" in state:
            self.return_scale.load_state_dict(state["return_scale"])
