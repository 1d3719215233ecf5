"""Off-policy learning: the replay buffer, the times of updates, and the entropy temperatures.

`sac` and `xqc` add their losses. Source of the temperatures: Haarnoja et al. 2018, arXiv
1812.05905, section 5.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipeline.algos.algorithm import Algorithm
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.policy import Decision, Policy, generator_for, restore_generator
from pipeline.algos.replay_sampler import ReplaySampler
from pipeline.algos.reward_scale import RewardScale
from pipeline.algos.reward_signals import mean_losses, steps_of
from pipeline.algos.rows import Rows
from pipeline.algos.schedules import LEARNING_RATE_FLOOR, scheduled
from pipeline.core.arrays import BoolArray, FloatArray
from pipeline.core.specs import BehaviorSpec
from pipeline.data.columns import Field
from pipeline.data.replay import Replay
from pipeline.data.rollout import Rollout
from pipeline.errors import SettingsError
from pipeline.nets.actor_critic import ActionHeads
from pipeline.nets.squashed import squashed_action
from pipeline.settings.pace import AUTO
from pipeline.settings.trainer.schema import OffPolicySettings, TrainerSettings

# CONTINUOUS_ENTROPY is the target entropy of each continuous component (arXiv 1812.05905, appendix
# D: -dim A for their sum). DISCRETE_ENTROPY is a branch's target entropy as a share of the largest
# entropy that its allowed choices can have.
CONTINUOUS_ENTROPY = -1.0
DISCRETE_ENTROPY = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledActions:
    """Actions that the policy being trained draws at B observations, with gradients."""

    continuous: Tensor
    """[B, A] continuous actions."""
    log_prob: Tensor
    """[B, C] log density of the continuous actions, and for each branch the sum of p log p."""
    entropy_cost: Tensor
    """[B] `log_prob` times the temperatures: the continuous actions' part plus the mean of the
    branches' parts."""
    probability: Tensor | None
    """[B, sum of branch sizes] probability of each choice; None if there are no branches."""
    n_branches: int

    def expected(self, values: Tensor) -> Tensor:
        """Return the mean over branches of each branch's expected value, [..., B, S].

        `values` [..., B, S, outputs] have one output for each choice of each branch. Without
        branches they have a single output, which is returned.
        """
        if self.probability is None:
            return values.squeeze(-1)
        return (values * self.probability.unsqueeze(1)).sum(-1) / self.n_branches


class OffPolicy(Algorithm):
    """Stores experience in a replay buffer, and learns from samples of it.

    A subclass makes its networks, `policy` among them, calls `make_replay`, and implements
    `learn_minibatch` and `statistics`.
    """

    schedules = ("learning_rate",)
    squashed = True
    replay: Replay

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        super().__init__(spec, settings, seed=seed, device=device)
        h: OffPolicySettings = settings.hyperparameters  # type: ignore[assignment]  # checked by trainer_type
        self.hyperparameters = h
        actions = spec.action_spec
        # There is one temperature for all continuous actions together, and one for each branch.
        n_temperatures = (actions.continuous_size > 0) + actions.discrete_size
        # The logarithm of a temperature is trained, so that the temperature stays positive.
        start = torch.full((n_temperatures,), math.log(h.init_entcoef))
        self.log_alpha = nn.Parameter(start.to(device))
        # `target_entropy` [C] is what `_targets` returns if every choice is allowed. The weights of
        # temperatures [C] are 1 for continuous actions, and 1 / b for each of b branches.
        targets, weights = [], []
        if actions.continuous_size:
            # The entropy of N(0, sigma^2) is log(2 pi e sigma^2) / 2.
            sigma, entropy = h.target_sigma, CONTINUOUS_ENTROPY
            if sigma is not None:
                entropy = 0.5 * math.log(2.0 * math.pi * math.e * sigma**2)
            targets, weights = [entropy * actions.continuous_size], [1.0]
        targets += [DISCRETE_ENTROPY * math.log(size) for size in actions.discrete_branches]
        weights += [1.0 / actions.discrete_size for _ in actions.discrete_branches]
        self.target_entropy = torch.tensor(targets, device=device)
        self.alpha_weight = torch.tensor(weights, device=device)
        self.noise_stream = generator_for(seed, device, "noise")
        self.learning_rate_floor = LEARNING_RATE_FLOOR
        """Learning rate at the end of a linear schedule."""
        signals = settings.reward_signals.values()
        self.gammas = np.array([signal.gamma for signal in signals])
        self.reward_scale: RewardScale | None = None
        if h.reward_normalization:
            self.reward_scale = RewardScale(len(self.gammas), gamma=self.gammas)
        # The two counts start at 1, because `_due` expects 1 plus the number of steps made.
        self.n_updates = self.n_signal_updates = 1

    def follow(self, source: nn.Module, target: nn.Module) -> Callable[[], None]:
        """Return a function that moves the weights of `target` by `tau` towards `source`.

        It makes one step of the Polyak average of arXiv 1801.01290, algorithm 1.
        """
        step = get_ema_multi_avg_fn(1.0 - self.hyperparameters.tau)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        own: list[Tensor] = list(target.parameters())
        return partial(step, own, list(source.parameters()), None)

    def make_replay(
        self, *, seed: int, cloned: Policy, sampler: Callable[..., ReplaySampler] = ReplaySampler
    ) -> None:
        """Make the replay buffer, its `sampler`, and behavioral cloning for the policy `cloned`."""
        h = self.hyperparameters
        length = self.sequence_length
        self.replay = Replay(self.columns, capacity=h.buffer_size, sequence_length=length)
        self.sampler = sampler(
            self.replay,
            self.signals,
            self.policy.normalizers,
            stream=self.minibatch_stream,
            batch_size=h.batch_size,
            device=self.device,
            scaled=self._scaled,
        )
        self.bc = BehavioralCloning.from_settings(cloned, self.settings, seed=seed)

    @property
    def _holds_noise(self) -> bool:
        return self.hyperparameters.held_noise > 1 and self.spec.action_spec.continuous_size > 0

    @property
    def memory_size(self) -> int:
        """Size of an agent's memory vector.

        With held noise the vector has the noise of each continuous action [A], and the number of
        decisions for which this noise is still used.
        """
        n_actions = self.spec.action_spec.continuous_size
        return n_actions + 1 if self._holds_noise else super().memory_size

    @property
    def fields(self) -> dict[str, Field]:
        """Shape and dtype of each stored column by name, except the observations and the reward."""
        fields = super().fields
        # Off-policy losses do not read log probabilities, which need memory in a large replay.
        del fields["log_prob"]
        if self._holds_noise:  # the memory is held noise, which no loss reads
            del fields["memory"]
        return fields

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Random streams of actions and of noise, by name."""
        return {**super().generators, "noise_stream": self.noise_stream}

    def act(
        self,
        obs: Sequence[FloatArray],
        mask: Sequence[BoolArray] | None,
        memory: FloatArray | None = None,
    ) -> Decision:
        """Choose actions for N agents, as `Algorithm.act` does.

        With held noise, `memory` [N, A + 1] has each agent's noise [A], and the number of decisions
        for which the agent still uses this noise. New noise is used for n decisions, and n is drawn
        with a probability in proportion to 1 / n^2 (FlashSAC 2026).
        """
        if memory is None or not self._holds_noise:
            return super().act(obs, mask, memory)
        n_agents, stream = len(obs[0]), self.action_stream
        drawn = torch.empty(n_agents, memory.shape[1], device=self.device)
        drawn.normal_(generator=stream)
        drawn[:, -1].uniform_(generator=stream)
        chances = np.arange(1, self.hyperparameters.held_noise + 1) ** -2.0
        fresh = drawn.cpu().numpy()
        # `ends` has the cumulative probability of each count except the largest, which gets all the
        # remaining probability.
        ends = (chances / chances.sum()).cumsum()[:-1]
        # A uniform random number, mapped by the inverse of the cumulative distribution, is a draw
        # from the distribution.
        fresh[:, -1] = np.searchsorted(ends, fresh[:, -1], side="right") + 1
        # Noise with a count of 0 is replaced by fresh noise. A new episode begins with a memory of
        # zeros, so it also gets fresh noise.
        held = np.where(memory[:, -1:] > 0, memory, fresh)
        decision = self.policy.act(obs, mask, stream, noise=held[:, :-1])
        held[:, -1] -= 1
        return replace(decision, memory=held)

    def ready(self, n_rows: int) -> bool:
        """Return whether there are rows to store; `update_in_parts` decides whether to learn."""
        return n_rows > 0

    def update_in_parts(
        self, rollout: Rollout, *, step: int
    ) -> Generator[int, None, dict[str, float]]:
        """Store a rollout in the replay, and make the gradient steps that are due, in parts."""
        h = self.hyperparameters
        if self.reward_scale is not None:
            # The scale is updated before learning, so that it takes account of the new rewards
            # before it divides them.
            self.reward_scale.observe(rollout, self._rewards_of(rollout))
        self.replay.add(rollout)
        n_due = self._due(step, self.n_updates, h.steps_per_update)
        stats: dict[str, float] = {}
        if n_due:
            now = {"step": step, "max_steps": self.settings.max_steps}
            floor = self.learning_rate_floor
            rate = scheduled(h.learning_rate_schedule, h.learning_rate, floor, **now)
            rate = self.set_values.get("learning_rate", rate)
            for optimizer in self.own_optimizers:
                optimizer.learning_rate = rate
            learned: list[Tensor] = []
            cloned = []
            for batch in self.minibatches(n_due):
                yield n_due - len(learned)
                learned.append(self.learn_minibatch(batch))
                self.n_updates += 1
                if self.bc is not None:
                    cloned.append(self.bc.update(step=step))
            stats = self.statistics(self._means(torch.stack(learned)), step)
            stats["Policy/Learning Rate"] = rate
            if cloned:
                stats["Losses/Pretraining Loss"] = float(np.mean(cloned))
        return stats | self._update_signals(step)

    def may_learn(self, step: int, n_rows: int) -> bool:
        """Return whether gradient steps may be due when the replay has `n_rows` rows."""
        h = self.hyperparameters
        return step >= h.buffer_init_steps and n_rows >= h.batch_size

    def take_pace(self, settings: TrainerSettings) -> None:
        """From now on use `settings`, which have a number in place of `steps_per_update: auto`."""
        self.settings = settings
        self.hyperparameters = settings.hyperparameters  # type: ignore[assignment]  # of the same class

    def _due(self, step: int, n_done: int, steps_per_update: float | str) -> int:
        """Return the number of due gradient steps at `step`; `n_done` is 1 plus the steps made."""
        h = self.hyperparameters
        # The smallest replay decides, because all processes must make the same number of steps.
        if not self.may_learn(step, self.processes.least(len(self.replay))):
            return 0
        if isinstance(steps_per_update, str):
            raise SettingsError(
                "steps_per_update: auto becomes a number only in a run that measures its speed; "
                "give a number"
            )
        # This is the smallest n with (step - buffer_init_steps) / n <= steps_per_update, minus
        # `n_done`.
        return max(math.ceil((step - h.buffer_init_steps) / steps_per_update) - n_done, 0)

    def _update_signals(self, step: int) -> dict[str, float]:
        """Make the due gradient steps of the reward signals; return their mean losses by tag."""
        if not self.signals.learning:
            return {}
        h = self.hyperparameters
        every = h.reward_signal_steps_per_update
        every = h.steps_per_update if every == AUTO else every
        n_due = self._due(step, self.n_signal_updates, every)
        losses = [self.signals.update(rows) for rows in self.sampler.transitions(n_due)]
        self.n_signal_updates += n_due
        return mean_losses(losses)

    def minibatches(self, n: int) -> Iterator[Rows]:
        """Return `n` random minibatches of the replay; a subclass may choose other rows."""
        return self.sampler.minibatches(n)

    @abstractmethod
    def learn_minibatch(self, batch: Rows) -> Tensor:
        """Make one gradient step on a minibatch, and return its statistics."""

    @abstractmethod
    def statistics(self, means: Tensor, step: int) -> dict[str, float]:
        """Return the statistics of an update, by TensorBoard tag.

        `means` are the results of `learn_minibatch`, averaged over the update's gradient steps.
        """

    def _means(self, learned: Tensor) -> Tensor:
        """Return means [k] over n gradient steps of the results of `learn_minibatch` [n, k]."""
        return learned.mean(0)

    def _rewards_of(self, rollout: Rollout) -> Any:
        """Return a rollout's rewards [R, S] of each signal, times its strength."""
        steps = steps_of(rollout, device=self.device, with_next_obs=self.signals.needs_next_obs)
        # `steps_of` scales actions as if a Gaussian policy had drawn them. The actions here are
        # already in -1..1, so they are read again without scaling.
        continuous = torch.from_numpy(np.array(rollout.fields["continuous"])).to(self.device)
        steps = replace(steps, fields={**steps.fields, "continuous": continuous})
        with torch.no_grad():
            return self.signals.rewards(steps).cpu().numpy()

    def _reward_factors(self, scale: RewardScale) -> Tensor:
        """Return factors [S]: each signal's share of all strengths, divided by `scale.divisor`."""
        strengths = np.array([s.strength for s in self.settings.reward_signals.values()])
        shares = np.abs(strengths) / np.abs(strengths).sum()
        return torch.from_numpy((shares / scale.divisor).astype(np.float32)).to(self.device)

    def _scaled(self, rewards: Tensor) -> Tensor:
        """Return the rewards [R, S] that the critics learn, from rewards times strength.

        With `reward_normalization` the rewards of each signal are divided by the spread of the
        signal's own returns, and multiplied by S times the signal's share of all strengths, because
        the policy loss takes the mean over the S signals.
        """
        if self.reward_scale is None:
            return rewards
        return rewards * (self._reward_factors(self.reward_scale) * rewards.shape[1])

    def _with_noise(self, batch: Rows) -> dict[str, Any]:
        """Return a minibatch's tensors by name, with `noise` [B, A] for drawing new actions."""
        inputs = batch.inputs
        if n_actions := self.spec.action_spec.continuous_size:
            noise = torch.empty(len(batch), n_actions, device=self.device)
            inputs["noise"] = noise.normal_(generator=self.noise_stream)
        return inputs

    def _sampled(
        self, heads: ActionHeads, hidden: Tensor, noise: Tensor | None, allowed: Tensor | None
    ) -> SampledActions:
        """Draw actions for hidden vectors [B, H], with gradients.

        `noise` [B, A] is standard normal, None without continuous actions; `allowed` is bool [B,
        sum of branch sizes], None without branches.
        """
        columns = []
        if noise is None:
            continuous = hidden[:, :0]
        else:
            mu, log_sigma = heads.gaussian(hidden)
            continuous, density = squashed_action(mu=mu, log_sigma=log_sigma, noise=noise)
            columns.append(density.sum(1))
        branches = heads.branch_log_probs(hidden, allowed)
        # A branch's column has the expectation of log p, not the log p of one drawn choice.
        columns += [(branch.exp() * branch).sum(1) for branch in branches]
        log_prob = torch.stack(columns, dim=1)
        return SampledActions(
            continuous=continuous,
            log_prob=log_prob,
            # The temperatures are detached, because the policy's loss must not train them.
            entropy_cost=log_prob @ (self.log_alpha.detach().exp() * self.alpha_weight),
            probability=torch.cat(branches, dim=1).exp() if branches else None,
            n_branches=len(branches),
        )

    def _critic_cost(self, sampled: SampledActions) -> Tensor:
        """Return the part [B] of `entropy_cost` that the critics' targets contain."""
        # With `decoupled_entropy` the entropy of choices is left out: arXiv 2509.09838.
        if not self.hyperparameters.decoupled_entropy:
            return sampled.entropy_cost
        if not self.spec.action_spec.continuous_size:
            return torch.zeros(len(sampled.log_prob), device=self.device)
        return self.log_alpha.detach()[0].exp() * sampled.log_prob[:, 0]

    def _targets(self, allowed: Tensor | None) -> Tensor:
        """Return target entropies [C]: of all continuous actions together, and of each branch.

        A branch's target is the mean over rows of 0.2 ln(n), with n choices in the row that
        `allowed` [B, sum of branch sizes] allows; `allowed` is None without branches.
        """
        if allowed is None:
            return self.target_entropy
        parts = torch.split(allowed, list(self.spec.action_spec.discrete_branches), dim=1)
        # The logarithm of the share of allowed choices is exactly 0 where every choice is allowed.
        # A row that forbids every choice counts as one choice, because the logarithm of 0 is
        # infinite.
        shares = [part.sum(1).clamp_min(1) / part.shape[1] for part in parts]
        change = DISCRETE_ENTROPY * torch.stack(shares, dim=1).log().mean(0)
        n_continuous = len(self.target_entropy) - len(parts)
        return self.target_entropy + nn.functional.pad(change, (n_continuous, 0))

    def _temperatures(self) -> dict[str, float]:
        stats, alpha = {}, self.log_alpha.detach().exp().tolist()
        if self.spec.action_spec.continuous_size:
            stats["Policy/Continuous Entropy Coeff"] = alpha.pop(0)
        if alpha:
            # ML-Agents charts one number for all branches, so this is their mean temperature.
            stats["Policy/Discrete Entropy Coeff"] = sum(alpha) / len(alpha)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training, without the replay, as tensors and plain values."""
        state = {
            **super().state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "noise_stream": self.noise_stream.get_state(),
            "n_updates": self.n_updates,
            "n_signal_updates": self.n_signal_updates,
        }
        if self.reward_scale is not None:
            state["reward_scale"] = self.reward_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state)
        self.log_alpha.data.copy_(state["log_alpha"])
        restore_generator(self.noise_stream, state["noise_stream"])
        self.n_updates = int(state["n_updates"])
        self.n_signal_updates = int(state["n_signal_updates"])
        # A checkpoint of a run without reward normalisation has no key `reward_scale`.
        if self.reward_scale is not None and "reward_scale" in state:
            self.reward_scale.load_state_dict(state["reward_scale"])
