"""Probabilities of actions as pure functions of a network's outputs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
# The range -1..1 of the environment's actions is -3..3 of the Gaussian, as in ML-Agents.
ACTION_RANGE = 3.0
# Forbidden choices do not get minus infinity: minus infinity times a probability of 0 would make
# the entropy NaN.
FORBIDDEN = -1e8


def gaussian_log_prob(*, action: Tensor, mu: Tensor, log_sigma: Tensor) -> Tensor:
    """Return the log density of each action component [B, A], not summed.

    Actions and means are [B, A]; `log_sigma` is [1, A] for all rows, or [B, A].
    """
    # The log density is -z^2 / 2 - log sigma - log(2 pi) / 2; z needs one exponential, but no
    # division by sigma.
    z = (action - mu) * torch.exp(-log_sigma)
    return z.square() * -0.5 - (log_sigma + HALF_LOG_TAU)


def gaussian_entropy(log_sigma: Tensor) -> Tensor:
    """Return entropies [B]: the mean over components, as in ML-Agents, not the joint entropy."""
    return (log_sigma + (HALF_LOG_TAU + 0.5)).mean(-1)


def flat_actions(continuous: Tensor, discrete: Tensor, branches: Sequence[int]) -> Tensor:
    """Return actions as vectors [B, A + sum of branch sizes], choices as one-hot vectors.

    `continuous` are [B, A], `discrete` int64 [B, branches], and `branches` the sizes of branches.
    """
    # `one_hot` gives int64, but networks read float32.
    choices = [
        torch.nn.functional.one_hot(discrete[:, i], size).to(torch.float32)
        for i, size in enumerate(branches)
    ]
    return torch.cat([continuous, *choices], dim=1)


def to_environment(action: Tensor) -> Tensor:
    """Return a Gaussian's actions [B, A] in the environment's range -1..1."""
    return action.clamp(-ACTION_RANGE, ACTION_RANGE) / ACTION_RANGE


def masked_log_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Return log probabilities [B, L] of a branch's choices; forbidden choices have about -1e8.

    `logits` [B, L] are outputs of the network; `allowed` is bool [B, L], None for every choice.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, FORBIDDEN)
    return torch.log_softmax(logits, dim=-1)


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Return the entropies [B] of distributions with the log probabilities [B, L]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def gumbel_scores(log_probs: Tensor, exponential: Tensor) -> Tensor:
    """Return scores [B, L]; the argmax of a row is a choice, drawn with the row's probabilities.

    Log probabilities and exponential random numbers are [B, L].
    """
    # This is the Gumbel-max trick: minus the logarithm of an exponential variable is a Gumbel
    # variable (Maddison et al. 2014, arXiv 1411.0030).
    return log_probs - exponential.log()


def split_branches(flat: Tensor | None, branches: Sequence[int]) -> list[Tensor | None]:
    """Return for each branch its columns [B, L] of `flat` [B, sum of branch sizes].

    If `flat` is None, the result is None for each branch.
    """
    if flat is None:
        return [None] * len(branches)
    return list(torch.split(flat, list(branches), dim=1))
