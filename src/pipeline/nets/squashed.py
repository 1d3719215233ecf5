"""Gaussian actions squashed into the environment's range by tanh, as in SAC.

Source: Haarnoja et al. 2018, arXiv 1801.01290, appendix C (equations 20 and 21).
"""

import math

import torch
from torch import Tensor

from pipeline.core.specs import ActionSpec
from pipeline.nets.actor_critic import MU_GAIN, ActionHeads
from pipeline.nets.distributions import HALF_LOG_TAU, gaussian_entropy
from pipeline.nets.layers import linear
from pipeline.nets.onnx_graph import OnnxGraph

# These are ML-Agents' limits; beyond them exp or the log density overflows.
LOG_SIGMA_MIN, LOG_SIGMA_MAX = -20.0, 2.0


def squashed_action(*, mu: Tensor, log_sigma: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions a = tanh(u), u = mu + sigma noise, and log densities, both [B, A].

    log p(a) = log N(u; mu, sigma) - log(1 - a^2), not summed over components. All arguments are [B,
    A]; `noise` has standard normal numbers.
    """
    u = mu + log_sigma.exp() * noise
    # `log_slope` is log(1 - tanh(u)^2), in a form that is finite where tanh(u) is 1 in float32.
    log_slope = 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
    return torch.tanh(u), noise.square() * -0.5 - (log_sigma + HALF_LOG_TAU) - log_slope


class SquashedHeads(ActionHeads):
    """Action heads with squashed continuous actions, and a sigma that depends on the input."""

    def __init__(self, n_in: int, spec: ActionSpec) -> None:
        super().__init__(n_in, spec)
        # These heads do not use the parameter `log_sigma` of `ActionHeads`, so it is removed and
        # not saved in checkpoints.
        self.log_sigma = None
        size = spec.continuous_size
        self.spread = linear(n_in, size, gain=MU_GAIN) if size else None

    def gaussian(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log sigma, both [B, A], before squashing."""
        if self.mu is None or self.spread is None:
            raise ValueError("the behavior has no continuous actions")
        mu: Tensor = self.mu(hidden)
        return mu, self.spread(hidden).clamp(LOG_SIGMA_MIN, LOG_SIGMA_MAX)

    def to_environment(self, continuous: Tensor) -> Tensor:
        """Return the actions unchanged: squashed actions are in the environment's range."""
        return continuous

    def mean_action(self, hidden: Tensor) -> Tensor | None:
        """Return the squashed mean actions [B, A]; None without continuous actions."""
        return None if self.mu is None else torch.tanh(self.mu(hidden))

    def _sigma_to_onnx(self, graph: OnnxGraph, hidden: str) -> str:
        if self.spread is None:
            raise ValueError("the behavior has no continuous actions")
        raw = graph.linear(self.spread, hidden, "log_sigma")
        return graph.node("Exp", [graph.node("Clip", [raw], min=LOG_SIGMA_MIN, max=LOG_SIGMA_MAX)])

    def _range_to_onnx(self, graph: OnnxGraph, action: str, output: str) -> None:
        graph.node("Tanh", [action], output)

    def _draw(self, hidden: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return drawn actions, log probabilities, both [B, A], and the Gaussian's entropy [B]."""
        mu, log_sigma = self.gaussian(hidden)
        noise = torch.zeros_like(mu) if noise is None else noise
        action, log_prob = squashed_action(mu=mu, log_sigma=log_sigma, noise=noise)
        # The entropy of the squashed distribution has no closed form, so the entropy of the
        # Gaussian is returned.
        return action, log_prob, gaussian_entropy(log_sigma)
