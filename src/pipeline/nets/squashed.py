"""Gaussian actions bent into the environment's range by tanh, as SAC has them.

Source: Haarnoja et al. 2018, arXiv 1801.01290, appendix C (equation 20 and 21).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.nets.actor_critic import MU_GAIN, ActionHeads
from pipeline.nets.distributions import HALF_LOG_TAU, gaussian_entropy
from pipeline.nets.layers import linear

if TYPE_CHECKING:
    from pipeline.protocol.specs import ActionSpec

LOG_SIGMA_MIN, LOG_SIGMA_MAX = -20.0, 2.0


def squashed_action(*, mu: Tensor, log_sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions a = tanh(u), u = mu + sigma noise, and their log densities, both [B, A].

    log p(a) = log N(u; mu, sigma) - log(1 - a^2), not summed over components.

    Args:
        mu: [B, A].
        log_sigma: [B, A].
        noise: [B, A] standard normal.
    """
    result: tuple[Tensor, Tensor] = _Squashed.apply(mu, log_sigma, noise)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


class _Squashed(torch.autograd.Function):
    """With its derivatives written out: they are shorter than what automatic ones do.

    For fixed noise: da/du = 1 - a^2, dlog p/du = 2 a, du/dmu = 1, du/dlog sigma = sigma noise, and
    dlog p/dlog sigma has -1 of its own. log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)) holds
    where 1 - a^2 is 0 in float32.
    """

    @staticmethod
    def forward(ctx: Any, mu: Tensor, log_sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        spread = log_sigma.exp() * noise
        u = mu + spread
        action = torch.tanh(u)
        log_slope = 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
        log_prob = noise.square() * -0.5 - (log_sigma + HALF_LOG_TAU) - log_slope
        ctx.save_for_backward(action, spread)
        return action, log_prob

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        by_action, by_log_prob = gradients
        action, spread = ctx.saved_tensors
        by_u = by_action * (1.0 - action.square()) + by_log_prob * (2.0 * action)
        return by_u, by_u * spread - by_log_prob, None


class SquashedHeads(ActionHeads):
    """Heads whose continuous actions are squashed, with a sigma for each observation."""

    def __init__(self, n_in: int, spec: ActionSpec) -> None:
        super().__init__(n_in, spec)
        self.log_sigma = None
        size = spec.continuous_size
        self.spread = linear(n_in, size, gain=MU_GAIN) if size else None

    def gaussian(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log sigma [B, A] before squashing."""
        if self.mu is None or self.spread is None:
            raise ValueError("there are no continuous actions")
        mu: Tensor = self.mu(hidden)
        return mu, self.spread(hidden).clamp(LOG_SIGMA_MIN, LOG_SIGMA_MAX)

    def to_environment(self, continuous: Tensor) -> Tensor:
        """They are in the environment's range as they are."""
        return continuous

    def mean_action(self, hidden: Tensor) -> Tensor | None:
        """[B, A] the action at the Gaussian's mean."""
        return None if self.mu is None else torch.tanh(self.mu(hidden))

    def _draw(
        self, hidden: Tensor, generator: torch.Generator, *, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Continuous actions, their log probabilities [B, A], and the Gaussian's entropy [B]."""
        mu, log_sigma = self.gaussian(hidden)
        noise = torch.zeros_like(mu)
        if not deterministic:
            noise.normal_(generator=generator)
        action, log_prob = squashed_action(mu=mu, log_sigma=log_sigma, noise=noise)
        return action, log_prob, gaussian_entropy(log_sigma)
