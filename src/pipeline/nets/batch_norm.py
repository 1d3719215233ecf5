"""Dense layers with batch normalisation, for networks that learn from minibatches of a replay.

In training, features are normalised by the mean and variance of the minibatch; for acting, by the
running mean and variance of all minibatches so far, which makes a normalisation an affine map. That
map is folded into the dense layer beside it (`folded`), so that a policy acts, and is exported,
with ordinary dense layers.

Sources: Ioffe and Szegedy 2015, arXiv 1502.03167; batch renormalisation: Ioffe 2017, arXiv
1702.03275; in reinforcement learning: Bhatt et al. 2024, arXiv 1902.05605 (CrossQ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from pipeline.core.specs import BehaviorSpec
from pipeline.nets.actor_critic import Actor
from pipeline.nets.encoder import ObservationEncoder
from pipeline.nets.layers import dense
from pipeline.nets.squashed import SquashedHeads
from pipeline.settings.trainer.schema import NetworkSettings

EPSILON = 1e-3
"""Added to variances."""
MOMENTUM = 0.01
"""Share by which running statistics follow each minibatch."""
MOST_SCALE, MOST_SHIFT = 3.0, 5.0
"""How far batch renormalisation corrects at most: a factor, and standard deviations."""
RENORMALIZED_AFTER = 100_000
"""Minibatches after which the running statistics are good enough to correct by."""
_NARROW = 64
"""Inputs below which the gradient of weights takes half the time if they lie input by input."""

Dense = tuple[Tensor, Tensor]
"""Weight [n_out, n_in] and bias [n_out]."""
AnyDense = tuple[Tensor, Tensor | None]
"""As `Dense`; the bias may be None."""
Affine = tuple[Tensor, Tensor]
"""Two numbers for each feature, [n] and [n]."""


class NormalizedLayers(nn.Module):
    """Dense layers of one width, with a normalisation of the input and one for each layer.

    Args:
        n_in: size of the input.
        hidden_units: width of each layer.
        num_layers: number of layers.
        activation: of each layer.
        is_before: True to normalise before the activation, in layers without bias (XQC); False to
            normalise after it, by batch renormalisation (CrossQ).

    Attributes:
        running: [2, n] running means and variances of the input's features, then of each layer's.
        n_batches: number of minibatches that `running` is from.
    """

    running: Tensor
    n_batches: Tensor

    def __init__(
        self,
        n_in: int,
        hidden_units: int,
        num_layers: int,
        *,
        activation: Callable[[Tensor], Tensor],
        is_before: bool,
    ) -> None:
        super().__init__()
        sizes = [n_in, *[hidden_units] * num_layers]
        self.output_size = sizes[-1]
        self.activation = activation
        self.is_before = is_before
        self.weights = nn.ParameterList(
            nn.init.orthogonal_(torch.empty(b, a), gain=2.0**0.5) for a, b in pairwise(sizes)
        )
        self.biases = nn.ParameterList([] if is_before else map(torch.zeros, sizes[1:]))
        self.scales = nn.ParameterList(map(torch.ones, sizes))
        self.shifts = nn.ParameterList(map(torch.zeros, sizes))
        if is_before and num_layers:
            # The next normalisation takes it away again: its gradient is nothing but rounding.
            self.shifts[0].requires_grad_(requires_grad=False)
        self._sizes = sizes
        # Look-ups in a `ParameterList` cost as much as small operations.
        biases = list(self.biases) or [None] * num_layers
        self._dense = list(zip(self.weights, biases, strict=True))
        self._affine = list(zip(self.scales, self.shifts, strict=True))
        self.register_buffer("running", torch.tensor([[0.0], [1.0]]).repeat(1, sum(sizes)))
        self.register_buffer("n_batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """[B, n_in] to [B, output_size], normalised by the running statistics."""
        for place, (mean, variance) in enumerate(self._statistics()):
            if place > 0:
                x = dense(x, *self._dense[place - 1])
                x = x if self.is_before else self.activation(x)
            affine = self._affine[place]
            x = nn.functional.batch_norm(x, mean, variance, *affine, eps=EPSILON)
            x = self.activation(x) if self.is_before and place > 0 else x
        return x

    def in_training(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n_in] to [B, output_size], normalised by the minibatch's own statistics.

        Returns:
            The result, and [2, n] means of the minibatch and 1 over its deviations, for `observe`.
        """
        y, last, found = self.unscaled(x)
        return y if last is None else torch.addcmul(last[1], y, last[0]), found

    def unscaled(self, x: Tensor) -> tuple[Tensor, Affine | None, Tensor]:
        """As `in_training`, but what reads the result has to apply the scale and shift, if any."""
        means, inverses = [], []
        # A dense layer applies the scale and shift of what it reads to its weights: there are fewer
        # of these, and an observation then needs no derivative.
        entering: Affine | None = None
        running = None if self.is_before else self._statistics()
        for place, affine in enumerate(self._affine):
            if place > 0:
                x = _dense(x, *_after(entering, *self._dense[place - 1]))
                x = x if self.is_before else self.activation(x)
            is_applied = self.is_before and place > 0
            scale, shift = affine if is_applied else (None, None)
            x, mean, inverse = torch.native_batch_norm(
                x, scale, shift, None, None, training=True, momentum=0.0, eps=EPSILON
            )
            means.append(mean)
            inverses.append(inverse)
            if is_applied:
                x, entering = self.activation(x), None
            elif running is None:
                entering = affine
            else:
                entering = self._renormalized(affine, mean, inverse, running[place])
        return x, entering, torch.cat(means + inverses).view(2, -1)

    def _renormalized(
        self, affine: Affine, mean: Tensor, inverse: Tensor, running: Affine
    ) -> Affine:
        """Scale and shift of features that were normalised by `mean` and `inverse` deviation.

        Batch renormalisation, equations 2 and 3 of Ioffe 2017: y r + d, constants to the gradient.
        """
        (scale, shift), (running_mean, running_variance) = affine, running
        running_inverse = (running_variance + EPSILON).rsqrt()
        r = (running_inverse / inverse).clamp(1.0 / MOST_SCALE, MOST_SCALE)
        d = ((mean - running_mean) * running_inverse).clamp(-MOST_SHIFT, MOST_SHIFT)
        corrects = self.n_batches >= RENORMALIZED_AFTER  # no Python branch: a step may be compiled
        r, d = torch.where(corrects, r, 1.0), torch.where(corrects, d, 0.0)
        return r * scale, torch.addcmul(shift, d, scale)

    def _statistics(self) -> list[Affine]:
        """Running mean and variance [n] of the input and of each layer, views of `running`."""
        means, variances = (torch.split(row, self._sizes) for row in self.running)
        return list(zip(means, variances, strict=True))

    @torch.no_grad()
    def observe(self, found: Tensor, momentum: float) -> None:
        """Move the running statistics by a share towards those that `in_training` found."""
        mean, inverse = found
        variance = (inverse.pow(-2) - EPSILON).clamp_min(0.0)
        self.running.lerp_(torch.stack((mean, variance)), momentum)
        self.n_batches.add_(1)

    def folded(self, heads: Sequence[Dense]) -> list[Dense]:
        """Dense layers that compute what these layers do by the running statistics.

        Args:
            heads: dense layers that read the result.

        Returns:
            The layers, each to be followed by the activation, then the heads.
        """
        # each normalisation as x * scale + shift
        own_scales, own_shifts = (torch.cat(parts) for parts in zip(*self._affine, strict=True))
        all_scales = own_scales * (self.running[1] + EPSILON).rsqrt()
        all_shifts = torch.addcmul(own_shifts, self.running[0], all_scales, value=-1.0)
        parts = (torch.split(numbers, self._sizes) for numbers in (all_scales, all_shifts))
        first, *others = zip(*parts, strict=True)
        entering: Affine | None = first
        layers = []
        for (weight, bias), affine in zip(self._dense, others, strict=True):
            weight, bias = _after(entering, weight, torch.zeros(()) if bias is None else bias)  # noqa: PLW2901
            entering = affine
            if self.is_before:
                scale, shift = affine
                weight, bias, entering = scale.unsqueeze(1) * weight, scale * bias + shift, None  # noqa: PLW2901
            layers.append((weight, bias))
        return [*layers, *(_after(entering, *head) for head in heads)]


def _after(affine: Affine | None, weight: Tensor, bias: Tensor | None) -> AnyDense:
    """The dense layer that reads x as `weight` and `bias` read x * scale + shift.

    Where there is no bias, the shift is left out: a normalisation follows, which takes it away.
    """
    if affine is None:
        return weight, bias
    scale, shift = affine
    return weight * scale, None if bias is None else weight @ shift + bias


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `dense`; faster where inputs are few and the weights are trained."""
    if weight.shape[1] >= _NARROW:
        return dense(x, weight, bias)
    columns = weight.t().contiguous()
    return x @ columns if bias is None else torch.addmm(bias, x, columns)


@torch.no_grad()
def set_unit_norms(weights: Iterable[Tensor]) -> None:
    """Divide each row of each weight [n_out, n_in] by its Euclidean norm, in place."""
    for weight in weights:
        weight.div_(torch.linalg.vector_norm(weight, dim=1, keepdim=True).clamp_min(1e-12))


class NormalizedActor(nn.Module):
    """SAC's actor with batch normalisation, to be trained; `fold_into` makes the one that acts.

    In training mode, as a module, each call is a minibatch that it normalises by, and follows.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, *, is_before: bool) -> None:
        super().__init__()
        self.body = ObservationEncoder(spec.observation_specs, replace(settings, num_layers=0))
        self.layers = NormalizedLayers(
            self.body.output_size,
            settings.hidden_units,
            settings.num_layers,
            activation=nn.functional.silu,  # as SAC's actor has it
            is_before=is_before,
        )
        self.heads = SquashedHeads(self.layers.output_size, spec.action_spec)
        self.eval()

    def forward(self, obs: Sequence[Tensor], sequences: None = None) -> Tensor:  # noqa: ARG002  # as Actor's
        """Hidden vectors [B, H], by the running statistics unless in training mode."""
        if self.training:
            hidden, statistics = self.in_training(obs)
            self.layers.observe(statistics, MOMENTUM)
            return hidden
        by_running: Tensor = self.layers(self.body(obs))
        return by_running

    def in_training(self, obs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Hidden vectors [B, H] by the minibatch's statistics, and these."""
        return self.layers.in_training(self.body(obs))

    @property
    def head_layers(self) -> list[nn.Linear]:
        """Dense layers of mean and log sigma, then of the branches."""
        return _head_layers(self.heads)

    @property
    def unit_weights(self) -> list[Tensor]:
        """Weights [n_out, n_in] whose rows can have norm 1."""
        return [*self.layers.weights, *(layer.weight for layer in self.head_layers)]

    @torch.no_grad()
    def fold_into(self, actor: Actor) -> None:
        """Let an actor of dense layers do what this one does by its running statistics."""
        body, heads = actor.body, cast("SquashedHeads", actor.heads)
        for name in ("encoders", "attention"):
            own, other = getattr(self.body, name), getattr(body, name)
            if own is not None:
                for source, copied in zip(own.parameters(), other.parameters(), strict=True):
                    copied.copy_(source)
        dense_layers = [*body.dense.linears, *_head_layers(heads)]
        folded = self.layers.folded([(layer.weight, layer.bias) for layer in self.head_layers])
        for layer, (weight, bias) in zip(dense_layers, folded, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)


def _head_layers(heads: SquashedHeads) -> list[nn.Linear]:
    gaussian = [layer for layer in (heads.mu, heads.spread) if layer is not None]
    return [*gaussian, *(cast("nn.Linear", branch) for branch in heads.branches)]


class NormalizedCritic(nn.Module):
    """An action value with batch normalisation, of continuous actions and of each choice.

    Args:
        spec: of the behavior.
        settings: of the network.
        n_atoms: numbers that each value is made of.
        is_before: see `NormalizedLayers`.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, *, n_atoms: int, is_before: bool
    ) -> None:
        super().__init__()
        actions = spec.action_spec
        self.shape = (sum(actions.discrete_branches) or 1, n_atoms)
        self.body = ObservationEncoder(spec.observation_specs, replace(settings, num_layers=0))
        self.layers = NormalizedLayers(
            self.body.output_size + actions.continuous_size,
            settings.hidden_units,
            settings.num_layers,
            activation=torch.relu,
            is_before=is_before,
        )
        self.head = nn.Linear(self.layers.output_size, self.shape[0] * n_atoms)
        nn.init.orthogonal_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, obs: Sequence[Tensor], continuous: Tensor) -> tuple[Tensor, AnyDense, Tensor]:
        """What makes the values of a minibatch, by its own statistics; see `values`.

        Args:
            obs: [B, *shape] per observation, normalised.
            continuous: [B, A] actions in -1..1; A may be 0.

        Returns:
            Hidden vectors [B, H], the dense layer that reads them, and the statistics as
            `NormalizedLayers.in_training` gives them.
        """
        x = torch.cat((self.body(obs), continuous), dim=1)
        hidden, last, found = self.layers.unscaled(x)
        return hidden, _after(last, self.head.weight, self.head.bias), found

    def values(self, hidden: Tensor, head: AnyDense) -> Tensor:
        """Values [B, outputs, atoms], with an output for each choice of each branch, or one."""
        return dense(hidden, *head).view(-1, *self.shape)

    def evaluate(self, obs: Sequence[Tensor], continuous: Tensor) -> Tensor:
        """Values [B, outputs, atoms] by the running statistics; only actions get a derivative."""
        with torch.no_grad():
            joined = self.body(obs)
            *layers, head = self.layers.folded([(self.head.weight, self.head.bias)])
        x = torch.cat((joined, continuous), dim=1)
        for layer in layers:
            x = torch.relu(dense(x, *layer))
        return dense(x, *head).view(-1, *self.shape)

    @property
    def unit_weights(self) -> list[Tensor]:
        """Weights [n_out, n_in] whose rows can have norm 1."""
        return [*self.layers.weights, self.head.weight]
