"""Probabilities of actions as pure functions of a network's outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
# The environment's range -1..1 stands for -3..3 of the Gaussian.
ACTION_RANGE = 3.0
# Not minus infinity: the entropy would multiply it with a probability of 0, which is NaN.
FORBIDDEN = -1e8


def gaussian_log_prob(*, action: Tensor, mu: Tensor, log_sigma: Tensor) -> Tensor:
    """Log density of each action component [B, A], not summed.

    Args:
        action: [B, A].
        mu: [B, A].
        log_sigma: [1, A], the same for all rows, or [B, A].
    """
    z = (action - mu) * torch.exp(-log_sigma)
    return z.square() * -0.5 - (log_sigma + HALF_LOG_TAU)


def gaussian_entropy(log_sigma: Tensor) -> Tensor:
    """Entropy [B], the mean over components (ML-Agents' convention; the sum is the usual one)."""
    return (log_sigma + (HALF_LOG_TAU + 0.5)).mean(-1)


def flat_actions(continuous: Tensor, discrete: Tensor, branches: Sequence[int]) -> Tensor:
    """Actions as one vector [B, A + sum of branch sizes]: the choices of each branch one-hot.

    Args:
        continuous: [B, A].
        discrete: int64 [B, branches].
        branches: size of each branch.
    """
    choices = [
        torch.nn.functional.one_hot(discrete[:, i], size).to(torch.float32)
        for i, size in enumerate(branches)
    ]
    return torch.cat([continuous, *choices], dim=1)


def to_environment(action: Tensor) -> Tensor:
    """Actions [B, A] of the Gaussian as the environment takes them, in -1..1."""
    return action.clamp(-ACTION_RANGE, ACTION_RANGE) / ACTION_RANGE


def masked_log_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Log probabilities [B, L] of one branch; a forbidden choice has practically none.

    Args:
        logits: [B, L].
        allowed: bool [B, L] or None when every choice is allowed.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, FORBIDDEN)
    return torch.log_softmax(logits, dim=-1)


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Entropy [B] of log probabilities [B, L]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def gumbel_scores(log_probs: Tensor, waiting: Tensor) -> Tensor:
    """Return scores [B, L]; the largest of a row is at an index drawn by its log probabilities.

    Args:
        log_probs: [B, L].
        waiting: [B, L] exponential random numbers.
    """
    # The negative logarithm of an exponential variable is a Gumbel variable.
    return log_probs - waiting.log()


def split_branches(flat: Tensor | None, branches: Sequence[int]) -> list[Tensor | None]:
    """Columns [B, sum of branch sizes] as one [B, L] per branch."""
    if flat is None:
        return [None] * len(branches)
    # Views: the columns of a branch are not copied.
    return list(torch.split(flat, list(branches), dim=1))
