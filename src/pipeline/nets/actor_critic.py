"""The two networks of on-policy methods: who acts, and how good the situation is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.nets.body import Body
from pipeline.nets.distributions import (
    ACTION_RANGE,
    HALF_LOG_TAU,
    categorical_entropy,
    gaussian_log_prob,
    masked_log_softmax,
    sample_categorical,
    split_branches,
    to_environment,
)
from pipeline.nets.layers import linear, xavier
from pipeline.nets.memory import memory_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.nets.memory import Memory, Recall
    from pipeline.protocol.specs import ActionSpec, BehaviorSpec
    from pipeline.settings.schema import NetworkSettings

MU_GAIN = 0.2
LOGITS_GAIN = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Actions drawn for B agents."""

    continuous: Tensor
    """[B, A] as drawn, before clipping to the environment's range."""
    discrete: Tensor
    """int64 [B, branches]."""
    log_prob: Tensor
    """[B, A + branches], one per component."""
    entropy: Tensor
    """[B], or [1] when it is the same for all."""


class ActionHeads(nn.Module):
    """From hidden vectors to distributions over a behavior's actions.

    Continuous ones are Gaussian, with the same sigma for every observation; `nets.squashed` has
    those of SAC.
    """

    def __init__(self, n_in: int, spec: ActionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.mu = linear(n_in, spec.continuous_size, gain=MU_GAIN) if spec.continuous_size else None
        self.log_sigma = nn.Parameter(torch.zeros(1, spec.continuous_size)) if self.mu else None
        self.branches = nn.ModuleList(
            linear(n_in, size, gain=LOGITS_GAIN) for size in spec.discrete_branches
        )

    def to_environment(self, continuous: Tensor) -> Tensor:
        """Continuous actions [B, A] as drawn, in the environment's range -1..1."""
        return to_environment(continuous)

    def mean_action(self, hidden: Tensor) -> Tensor | None:
        """[B, A] the most likely continuous action, in the environment's range but not clipped."""
        if self.mu is None:
            return None
        mean: Tensor = self.mu(hidden)
        return mean / ACTION_RANGE

    def branch_log_probs(self, hidden: Tensor, allowed: Tensor | None) -> list[Tensor]:
        """Log probabilities [B, L] of each discrete branch."""
        masks = split_branches(allowed, self.spec.discrete_branches)
        return [
            masked_log_softmax(branch(hidden), mask)
            for branch, mask in zip(self.branches, masks, strict=True)
        ]

    def sample(
        self,
        hidden: Tensor,
        allowed: Tensor | None,
        generator: torch.Generator,
        *,
        deterministic: bool,
    ) -> Sample:
        """Draw actions, or take the most likely ones."""
        log_probs, entropies = [], []
        continuous = hidden[:, :0]
        if self.mu is not None:
            drawn = self._draw(hidden, generator, deterministic=deterministic)
            continuous, log_prob, entropy = drawn
            log_probs.append(log_prob)
            entropies.append(entropy)
        chosen = []
        for branch in self.branch_log_probs(hidden, allowed):
            index = branch.argmax(-1) if deterministic else sample_categorical(branch, generator)
            chosen.append(index)
            log_probs.append(branch.gather(1, index.unsqueeze(1)))
            entropies.append(categorical_entropy(branch))
        discrete = (
            torch.stack(chosen, dim=1)
            if chosen
            else hidden.new_zeros((hidden.shape[0], 0), dtype=torch.int64)
        )
        return Sample(
            continuous=continuous,
            discrete=discrete,
            log_prob=log_probs[0] if len(log_probs) == 1 else torch.cat(log_probs, dim=1),
            entropy=_sum(entropies),
        )

    def gaussian(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, A] and log sigma [1, A] of continuous actions."""
        if self.mu is None or self.log_sigma is None:
            raise ValueError("there are no continuous actions")
        return self.mu(hidden), self.log_sigma

    def _draw(
        self, hidden: Tensor, generator: torch.Generator, *, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Continuous actions and their log probabilities [B, A], and the entropy [1]."""
        mu, log_sigma = self.gaussian(hidden)
        noise = torch.zeros_like(mu)
        if not deterministic:
            noise.normal_(generator=generator)
        drawn = torch.addcmul(mu, log_sigma.exp(), noise)
        log_prob = noise.square_().mul_(-0.5).sub_(log_sigma + HALF_LOG_TAU)
        return drawn, log_prob, hidden.new_full((1,), _entropy_of(log_sigma))

    def evaluate(
        self, hidden: Tensor, continuous: Tensor, discrete: Tensor, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Log probabilities [B, A + branches] of given actions, and the entropy, [B] or [1]."""
        log_probs, entropies = [], []
        if self.mu is not None:
            mu, log_sigma = self.gaussian(hidden)
            found = gaussian_log_prob(action=continuous, mu=mu, log_sigma=log_sigma)
            log_probs.append(found[0])
            entropies.append(found[1])
        for number, branch in enumerate(self.branch_log_probs(hidden, allowed)):
            log_probs.append(branch.gather(1, discrete[:, number : number + 1]))
            entropies.append(categorical_entropy(branch))
        joined = log_probs[0] if len(log_probs) == 1 else torch.cat(log_probs, dim=1)
        return joined, _sum(entropies)


def _entropy_of(log_sigma: Tensor) -> float:
    """`gaussian_entropy` of a single row [1, A]: few numbers are faster added up in Python."""
    row: list[float] = log_sigma.tolist()[0]
    return sum(row) / len(row) + (HALF_LOG_TAU + 0.5)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Sum of tensors that broadcast against each other."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class Actor(nn.Module):
    """The policy: a body, a recurrent layer if asked for, and action heads.

    Observations come normalised.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: NetworkSettings,
        heads: Callable[[int, ActionSpec], ActionHeads] = ActionHeads,
    ) -> None:
        super().__init__()
        self.body = Body(spec.observation_specs, settings)
        self.memory = memory_for(settings, self.body.output_size)
        self.output_size = (self.memory or self.body).output_size
        self.heads = heads(self.output_size, spec.action_spec)

    def forward(self, obs: Sequence[Tensor], recall: Recall | None = None) -> Tensor:
        """Hidden vectors [B, H]; a recurrent actor needs `recall`, and sequences as its rows."""
        return remembering(self.body(obs), self.memory, recall)

    def step(self, obs: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden vectors [N, H] and new memory [N, M] of agents with memory [N, M]."""
        return _recurrent(self.memory).step(self.body(obs), memory)


class Critic(nn.Module):
    """Values of each reward signal, from its own networks or from the actor's hidden vectors."""

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: NetworkSettings,
        signals: Sequence[str],
        *,
        shared: Actor | None = None,
    ) -> None:
        super().__init__()
        self.signals = tuple(signals)
        self.body = self.memory = None
        if shared is not None:
            width = shared.output_size
        else:
            self.body = Body(spec.observation_specs, settings)
            self.memory = memory_for(settings, self.body.output_size)
            width = (self.memory or self.body).output_size
        self.heads = xavier(width, len(self.signals))
        for row in range(len(self.signals)):
            nn.init.xavier_uniform_(self.heads.weight.data[row : row + 1])

    def forward(
        self, obs: Sequence[Tensor], hidden: Tensor, recall: Recall | None = None
    ) -> Tensor:
        """Values [B, signals]; `hidden` is the actor's, used when the body is shared."""
        if self.body is not None:
            hidden = remembering(self.body(obs), self.memory, recall)
        values: Tensor = self.heads(hidden)
        return values

    def step(self, obs: Sequence[Tensor], memory: Tensor) -> Tensor:
        """New memory [N, M] of agents with memory [N, M]; only for a critic with its own."""
        body = self.body
        if body is None:
            raise ValueError("a critic that shares the actor's body has no memory of its own")
        return _recurrent(self.memory).step(body(obs), memory)[1]


def remembering(features: Tensor, memory: Memory | None, recall: Recall | None) -> Tensor:
    """Features [B, F], through the recurrent layer where there is one."""
    if memory is None:
        return features
    if recall is None:
        raise ValueError("a recurrent network needs to know its sequences and their memories")
    remembered: Tensor = memory(features, recall)
    return remembered


def _recurrent(memory: Memory | None) -> Memory:
    if memory is None:
        raise ValueError("the network has no recurrent layer")
    return memory
