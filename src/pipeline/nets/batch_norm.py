"""Dense layers with batch normalisation, for networks that learn from minibatches of a replay.

In training, features are normalised by the mean and variance of the minibatch; for acting, by the
running mean and variance of all minibatches so far, so that a normalisation is an affine map. That
map is folded into the adjacent dense layer (`folded`): a policy acts, and is exported, with
ordinary dense layers.

Sources: Ioffe and Szegedy 2015, arXiv 1502.03167; batch renormalisation: Ioffe 2017, arXiv
1702.03275; in reinforcement learning: Bhatt et al. 2024, arXiv 1902.05605 (CrossQ).
"""

from collections.abc import Callable, Iterable, Sequence
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
"""Number that is added to a variance before its root is taken, because a variance may be 0."""
MOMENTUM = 0.01
"""Weight of a minibatch in the running statistics."""
MOST_SCALE, MOST_SHIFT = 3.0, 5.0
"""Limits r_max (a factor) and d_max (in standard deviations) of batch renormalisation."""
RENORMALIZED_AFTER = 100_000
"""Number of minibatches after which the running statistics are accurate, and renormalisation
begins."""
_NARROW = 64
"""With fewer inputs than this, the gradient of weights is computed twice as fast if the weights are
transposed."""

Dense = tuple[Tensor, Tensor]
"""Weight [n_out, n_in] and bias [n_out] of a dense layer."""
AnyDense = tuple[Tensor, Tensor | None]
"""Weight [n_out, n_in], and bias [n_out] or None."""
Affine = tuple[Tensor, Tensor]
"""Two numbers for each feature, such as scale and shift: [n] and [n]."""


class NormalizedLayers(nn.Module):
    """Dense layers with a normalisation of the input and of each layer.

    Args:
        n_in: size of the input.
        widths: width of each layer.
        activation: activation function of each layer.
        is_before: True to normalise before the activation, in layers without bias (XQC); False to
            normalise after it, by batch renormalisation (CrossQ).

    Attributes:
        running: [2, n] running means and variances of the features: of the input's features, then
            of each layer's features.
        n_batches: number of minibatches in `running`.
    """

    running: Tensor
    n_batches: Tensor

    def __init__(
        self,
        n_in: int,
        widths: Sequence[int],
        *,
        activation: Callable[[Tensor], Tensor],
        is_before: bool,
    ) -> None:
        super().__init__()
        sizes = [n_in, *widths]
        self.output_size = sizes[-1]
        self.activation = activation
        self.is_before = is_before
        # Initial weights are orthogonal (Saxe et al. 2013, arXiv 1312.6120), with the gain of a
        # rectified layer.
        self.weights = nn.ParameterList(
            nn.init.orthogonal_(torch.empty(b, a), gain=2.0**0.5) for a, b in pairwise(sizes)
        )
        self.biases = nn.ParameterList([] if is_before else map(torch.zeros, sizes[1:]))
        self.scales = nn.ParameterList(map(torch.ones, sizes))
        self.shifts = nn.ParameterList(map(torch.zeros, sizes))
        if is_before and widths:
            # The first shift is not trained, because the next normalisation subtracts it again, and
            # its gradient is only rounding error.
            self.shifts[0].requires_grad_(requires_grad=False)
        self._sizes = sizes
        # These are lists, because look-ups in a `ParameterList` take as long as small operations.
        biases = list(self.biases) or [None] * len(widths)
        self._dense = list(zip(self.weights, biases, strict=True))
        self._affine = list(zip(self.scales, self.shifts, strict=True))
        self.register_buffer("running", torch.tensor([[0.0], [1.0]]).repeat(1, sum(sizes)))
        self.register_buffer("n_batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, n_in] to [B, output_size], normalised by the running statistics."""
        for place, (mean, variance) in enumerate(self._statistics()):
            if place > 0:
                x = dense(x, *self._dense[place - 1])
                x = x if self.is_before else self.activation(x)
            affine = self._affine[place]
            x = nn.functional.batch_norm(x, mean, variance, *affine, eps=EPSILON)
            x = self.activation(x) if self.is_before and place > 0 else x
        return x

    def in_training(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [B, n_in] to [B, output_size], normalised by the minibatch's statistics.

        The second result has these statistics [2, n] for `observe`: means and inverse standard
        deviations.
        """
        y, last, statistics = self.unscaled(x)
        return y if last is None else torch.addcmul(last[1], y, last[0]), statistics

    def unscaled(self, x: Tensor) -> tuple[Tensor, Affine | None, Tensor]:
        """Return the result of `in_training`, before the last layer's scale and shift are applied.

        The second result is this scale and shift, or None if they are already applied.
        """
        means, inverses = [], []
        # Scale and shift of a layer's input are applied to the layer's weights, which are fewer
        # numbers than the features. In addition, no derivative with respect to the observations is
        # then needed.
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
        """Return the scale and shift of features, corrected by batch renormalisation.

        The features are normalised by the minibatch's `mean` and inverse standard deviation,
        `inverse`. The corrections r and d (arXiv 1702.03275) have no gradient.
        """
        (scale, shift), (running_mean, running_variance) = affine, running
        running_inverse = (running_variance + EPSILON).rsqrt()
        # r is the minibatch's deviation divided by the running deviation; `inverse` and
        # `running_inverse` are the reciprocals of these deviations.
        r = (running_inverse / inverse).clamp(1.0 / MOST_SCALE, MOST_SCALE)
        d = ((mean - running_mean) * running_inverse).clamp(-MOST_SHIFT, MOST_SHIFT)
        # `corrects` is a tensor, because a compiled step cannot branch on the value of `n_batches`.
        corrects = self.n_batches >= RENORMALIZED_AFTER
        r, d = torch.where(corrects, r, 1.0), torch.where(corrects, d, 0.0)
        return r * scale, torch.addcmul(shift, d, scale)

    def _statistics(self) -> list[Affine]:
        """Return running mean and variance [n] of the input and each layer: views of `running`."""
        means, variances = (torch.split(row, self._sizes) for row in self.running)
        return list(zip(means, variances, strict=True))

    @torch.no_grad()
    def observe(self, statistics: Tensor, momentum: float) -> None:
        """Move the running statistics by `momentum` towards the statistics of a minibatch.

        `statistics` is the second result of `in_training`.
        """
        mean, inverse = statistics
        # The variance follows from inverse = (variance + EPSILON)^(-1/2); rounding may make the
        # difference negative.
        variance = (inverse.pow(-2) - EPSILON).clamp_min(0.0)
        self.running.lerp_(torch.stack((mean, variance)), momentum)
        self.n_batches.add_(1)

    def folded(self, heads: Sequence[Dense]) -> list[Dense]:
        """Return dense layers that compute `forward` and then `heads`, by the running statistics.

        They are the dense layers without their activation functions, and then the heads, which read
        the output of these layers.
        """
        # With the running statistics, each normalisation is x * scale + shift.
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
                # Before the activation, (W x + b) scale + shift is itself a dense layer.
                weight, bias, entering = scale.unsqueeze(1) * weight, scale * bias + shift, None  # noqa: PLW2901
            layers.append((weight, bias))
        return [*layers, *(_after(entering, *head) for head in heads)]


def _after(affine: Affine | None, weight: Tensor, bias: Tensor | None) -> AnyDense:
    """Return one dense layer for x * scale + shift and, after it, the layer `weight`, `bias`.

    Without a bias the shift is left out, because the next normalisation subtracts it.
    """
    if affine is None:
        return weight, bias
    scale, shift = affine
    return weight * scale, None if bias is None else weight @ shift + bias


def _dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the same as `dense`, faster for weights that are trained and have few inputs."""
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
    """SAC's actor with batch normalisation, for training; `fold_into` copies it into an `Actor`.

    In the module's training mode, each call normalises by the minibatch's statistics, and moves the
    running statistics towards them.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, *, is_before: bool) -> None:
        super().__init__()
        self.body = ObservationEncoder(spec.observation_specs, settings.without_layers())
        self.layers = NormalizedLayers(
            self.body.output_size,
            settings.widths,
            activation=nn.functional.silu,  # as in SAC's actor
            is_before=is_before,
        )
        self.heads = SquashedHeads(self.layers.output_size, spec.action_spec)
        # In training mode, each call would move the running statistics.
        self.eval()

    def forward(self, obs: Sequence[Tensor], sequences: None = None) -> Tensor:  # noqa: ARG002  # Actor has it
        """Return hidden vectors [B, H].

        Features are normalised by the running statistics, or in training mode by the minibatch's
        statistics.
        """
        if self.training:
            hidden, statistics = self.in_training(obs)
            self.layers.observe(statistics, MOMENTUM)
            return hidden
        by_running: Tensor = self.layers(self.body(obs))
        return by_running

    def in_training(self, obs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return hidden vectors [B, H] that are normalised by the minibatch's statistics.

        The second result has these statistics [2, n]; see `NormalizedLayers.in_training`.
        """
        return self.layers.in_training(self.body(obs))

    @property
    def head_layers(self) -> list[nn.Linear]:
        """Dense layers of mean and log sigma, then the layers of the branches."""
        return _head_layers(self.heads)

    @property
    def unit_weights(self) -> list[Tensor]:
        """Weights [n_out, n_in] that `set_unit_norms` may scale."""
        return [*self.layers.weights, *(layer.weight for layer in self.head_layers)]

    @torch.no_grad()
    def fold_into(self, actor: Actor) -> None:
        """Copy the weights into `actor`, with the running statistics folded into its layers."""
        body, heads = actor.body, cast("SquashedHeads", actor.heads)
        for name in ("encoders", "attention"):
            # Encoders of images and entities have no batch normalisation to fold into weights, so
            # their tensors are copied.
            own, other = getattr(self.body, name), getattr(body, name)
            if own is not None:
                tensors = ([*net.parameters(), *net.buffers()] for net in (own, other))
                for source, copied in zip(*tensors, strict=True):
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
    """Action values from layers with batch normalisation; with branches, a value for each choice.

    Each value has `n_atoms` outputs; for `is_before` see `NormalizedLayers`.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, *, n_atoms: int, is_before: bool
    ) -> None:
        super().__init__()
        actions = spec.action_spec
        self.shape = (sum(actions.discrete_branches) or 1, n_atoms)
        self.body = ObservationEncoder(spec.observation_specs, settings.without_layers())
        self.layers = NormalizedLayers(
            self.body.output_size + actions.continuous_size,
            settings.widths,
            activation=torch.relu,
            is_before=is_before,
        )
        self.head = nn.Linear(self.layers.output_size, self.shape[0] * n_atoms)
        nn.init.orthogonal_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, obs: Sequence[Tensor], continuous: Tensor) -> tuple[Tensor, AnyDense, Tensor]:
        """Return the arguments of `values`, and the statistics by which features are normalised.

        They are hidden vectors [B, H], the dense layer after them, and the minibatch's statistics
        as in `NormalizedLayers.in_training`, for normalised observations and actions [B, A] in
        -1..1.
        """
        x = torch.cat((self.body(obs), continuous), dim=1)
        hidden, last, statistics = self.layers.unscaled(x)
        return hidden, _after(last, self.head.weight, self.head.bias), statistics

    def values(self, hidden: Tensor, head: AnyDense) -> Tensor:
        """Return values [B, outputs, atoms]: one output for each choice; without branches one."""
        return dense(hidden, *head).view(-1, *self.shape)

    def evaluate(self, obs: Sequence[Tensor], continuous: Tensor) -> Tensor:
        """Return values [B, outputs, atoms], with features normalised by the running statistics.

        The values have a derivative with respect to the actions, but not to the weights.
        """
        with torch.no_grad():
            joined = self.body(obs)
            # After folding, the policy's loss needs only one product per layer.
            *layers, head = self.layers.folded([(self.head.weight, self.head.bias)])
        x = torch.cat((joined, continuous), dim=1)
        for layer in layers:
            x = torch.relu(dense(x, *layer))
        return dense(x, *head).view(-1, *self.shape)

    @property
    def unit_weights(self) -> list[Tensor]:
        """Weights [n_out, n_in] that `set_unit_norms` may scale."""
        return [*self.layers.weights, self.head.weight]
