"""Probabilities of actions as pure functions of a network's outputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
# The environment's range -1..1 stands for -3..3 of the Gaussian.
ACTION_RANGE = 3.0
FORBIDDEN = -1e8


def gaussian_log_prob(*, action: Tensor, mu: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Log density of each action component [B, A], not summed, and `gaussian_entropy` [1].

    Args:
        action: [B, A].
        mu: [B, A].
        log_sigma: [1, A], the same for all rows.
    """
    result: tuple[Tensor, Tensor] = _GaussianLogProb.apply(action, mu, log_sigma)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


class _GaussianLogProb(torch.autograd.Function):
    """With its derivatives written out: a third of the operations of automatic ones.

    For z = (a - mu) / sigma: log p = -z^2/2 - log sigma - log(2 pi)/2, d/dmu = z / sigma,
    d/dlog sigma = z^2 - 1; that of the entropy by each log sigma is 1 / A.
    """

    @staticmethod
    def forward(ctx: Any, action: Tensor, mu: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.exp(-log_sigma)
        z = (action - mu) * inverse
        squared = z.square()
        ctx.save_for_backward(z, squared, inverse)
        log_prob = squared * -0.5 - (log_sigma + HALF_LOG_TAU)
        return log_prob, gaussian_entropy(log_sigma)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        by_log_prob, by_entropy = gradients
        z, squared, inverse = ctx.saved_tensors
        by_log_sigma = (by_log_prob * (squared - 1.0)).sum(0, keepdim=True)
        by_log_sigma += by_entropy / z.shape[1]
        return None, by_log_prob * z * inverse, by_log_sigma


def gaussian_entropy(log_sigma: Tensor) -> Tensor:
    """Entropy [B], the mean over components (ML-Agents' convention; the sum is the usual one)."""
    return (log_sigma + (HALF_LOG_TAU + 0.5)).mean(-1)


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


def sample_categorical(log_probs: Tensor, generator: torch.Generator) -> Tensor:
    """One index [B] per row of log probabilities [B, L], by the Gumbel-max trick."""
    waiting = torch.empty_like(log_probs).exponential_(generator=generator)
    return (log_probs - waiting.log()).argmax(-1)


def split_branches(flat: Tensor | None, branches: Sequence[int]) -> list[Tensor | None]:
    """Columns [B, sum of branch sizes] as one [B, L] per branch."""
    if flat is None:
        return [None] * len(branches)
    return list(torch.split(flat, list(branches), dim=1))
