"""A policy's decisions for few agents, in NumPy.

A small network spends a tenth of its time on arithmetic and the rest on function calls, and a call
of NumPy takes a third of the time of a call of torch (docs/explanation/fast-networks.md). Results
equal the results of `ActionHeads.choose`, except for rounding. Torch computes the hidden vectors of
other networks than dense layers with Swish, ReLU or tanh: NumPy would hardly be faster.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.nets.actor_critic import ActionHeads, Actor, Sample
from pipeline.nets.distributions import ACTION_RANGE, FORBIDDEN, HALF_LOG_TAU
from pipeline.nets.encoder import Normalizers
from pipeline.nets.layers import CLIP, RunningNormalizer
from pipeline.nets.squashed import LOG_SIGMA_MAX, LOG_SIGMA_MIN, SquashedHeads

Dense: TypeAlias = tuple[FloatArray, FloatArray]
"""Weight [n_in, n_out] and bias [n_out]."""

MOST_AGENTS = 128
"""Largest number of agents; for more agents, arithmetic takes most of the time."""
_FEW_ROWS = 3


class NumpyActor:
    """Computes normalisers, actor and action heads in NumPy; each call uses the present weights.

    The actor must be one for which `fits` is true.
    """

    def __init__(self, normalizers: Normalizers, actor: Actor) -> None:
        by_observation = normalizers.by_observation.items()
        self._normalizers = [
            (int(i), cast("RunningNormalizer", normalizer)) for i, normalizer in by_observation
        ]
        self._scales: dict[int, tuple[object, FloatArray, FloatArray]] = {}
        """For each observation: its normaliser's `statistics`, and the arrays made from these."""
        self._noise: list[FloatArray] = []
        """Random numbers of the last call, which `_draw` overwrites."""
        self._heads = heads = actor.heads
        self._body = body = actor.body
        is_dense = not body.encoders and body.attention is None and body.hyper is None
        self._is_dense = is_dense and not body.dense.norms and body.dense.activation in _ACTIVATIONS
        self._is_squashed = isinstance(heads, SquashedHeads)
        self._activate = _ACTIVATIONS.get(body.dense.activation)
        self._layers: list[list[nn.Module]] = [
            list(body.dense.linears) if self._is_dense else [],
            list(heads.branches),
            [layer for layer in (heads.mu, *_spread(heads)) if layer is not None],
        ]
        self._weights: list[Tensor] = [
            tensor for group in self._layers for layer in group for tensor in layer.parameters()
        ]
        if heads.log_sigma is not None:
            self._weights.append(heads.log_sigma)
        self._pointers: list[int] = []
        self._trunk: list[Dense] = []
        self._branches: list[Dense] = []
        self._sizes = np.array(heads.spec.discrete_branches, np.intp)
        ends = self._sizes.cumsum()
        self._starts = ends - self._sizes
        self._places = list(map(slice, self._starts.tolist(), ends.tolist()))
        self._gaussian: list[Dense] = []
        """The layer of the mean and, if actions are squashed, the layer of log sigma."""
        self._log_sigma = np.zeros((1, 0), np.float32)
        """[1, A] log sigma of actions that are not squashed."""

    @staticmethod
    def fits(actor: Actor) -> bool:
        """Return whether the actor has no memory, and action heads that this class can compute."""
        # The heads of a plug-in may have other distributions than this class computes.
        return actor.memory is None and type(actor.heads) in (ActionHeads, SquashedHeads)

    def __call__(
        self,
        obs: Sequence[FloatArray],
        allowed: BoolArray | None,
        generator: torch.Generator | None,
        held: FloatArray | None = None,
    ) -> Sample[AnyArray]:
        """Return actions for N agents; the arguments are as for `Policy.act`.

        `allowed` is bool [N, sum of branch sizes], None if every choice is allowed. Without a
        `generator` the most likely actions are chosen; `held` [N, A] replaces the drawn noise.
        """
        self._look_up()
        noise = None if generator is None else self._draw(len(obs[0]), generator)
        if noise is not None and held is not None:
            noise = [held, *noise[1:]]
        # NumPy's warnings are turned off, because the caller reports numbers that are not finite.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            values = self._normalized(obs)
            if not self._is_dense:
                return self._chosen(self._hidden_by_torch(values), allowed, noise)
            x = values[0] if len(values) == 1 else np.concatenate(values, axis=1)
            for layer in self._trunk:
                x = _dense(layer, x)
                if self._activate is None:  # Swish
                    x /= 1.0 + np.exp(-x)
                else:
                    x = self._activate(x)
            return self._chosen(x, allowed, noise)

    def _look_up(self) -> None:
        """Make new views of the weights if an optimizer or a change of device moved the weights."""
        # The addresses of the weights change when an optimizer makes the weights flat.
        pointers = [weight.data_ptr() for weight in self._weights]
        if pointers == self._pointers:
            return
        self._pointers = pointers
        arrays = iter([weight.detach().numpy() for weight in self._weights])
        self._trunk, self._branches, self._gaussian = (
            [(next(arrays).T, next(arrays)) for _ in group] for group in self._layers
        )
        if self._heads.log_sigma is not None:
            self._log_sigma = next(arrays)

    def _draw(self, n: int, generator: torch.Generator) -> list[FloatArray]:
        """Return the random numbers of `ActionHeads.noise`; the next call overwrites the arrays."""
        # Torch's generator fills the arrays, because torch's policy must draw the same numbers.
        if self._noise and len(self._noise[0]) == n:
            self._heads.draw([torch.from_numpy(values) for values in self._noise], generator)
        else:
            self._noise = [values.numpy() for values in self._heads.noise(n, generator)]
        return self._noise

    def _normalized(self, obs: Sequence[FloatArray]) -> list[FloatArray]:
        """Return the observations, with normalised vectors if the settings have `normalize`."""
        values = list(obs)
        for index, normalizer in self._normalizers:
            statistics = normalizer.statistics()
            before, mean, deviation = self._scales.get(index, _NO_SCALE)
            if before is not statistics:
                mean, deviation = (tensor.numpy() for tensor in statistics)
                self._scales[index] = statistics, mean, deviation
            scaled = (values[index] - mean) / deviation
            values[index] = np.minimum(np.maximum(scaled, -CLIP), CLIP)
        return values

    def _hidden_by_torch(self, obs: Sequence[FloatArray]) -> FloatArray:
        # Read-only arrays are copied, because torch would warn about them.
        writable = [np.require(values, requirements="W") for values in obs]
        with torch.inference_mode():
            hidden: Tensor = self._body([torch.from_numpy(values) for values in writable])
        return hidden.numpy()

    def _chosen(
        self, hidden: FloatArray, allowed: BoolArray | None, noise: Sequence[FloatArray] | None
    ) -> Sample[AnyArray]:
        n = len(hidden)
        log_probs: list[FloatArray] = []
        entropies: list[FloatArray] = []
        continuous = in_range = np.zeros((n, 0), np.float32)
        if self._heads.mu is not None:
            drawn, noise = (None, None) if noise is None else (noise[0], noise[1:])
            continuous, in_range, log_prob, entropy = self._continuous(hidden, drawn)
            log_probs.append(log_prob)
            entropies.append(entropy)
        discrete = np.zeros((n, len(self._branches)), np.int64)
        if self._branches:
            discrete, log_prob, entropy = self._discrete(hidden, allowed, noise)
            log_probs.append(log_prob)
            entropies.append(entropy)
        return Sample(
            continuous=continuous,
            in_range=in_range,
            discrete=discrete,
            log_prob=log_probs[0] if len(log_probs) == 1 else np.concatenate(log_probs, axis=1),
            entropy=sum(entropies[1:], entropies[0]),
        )

    def _continuous(self, hidden: FloatArray, noise: FloatArray | None) -> tuple[AnyArray, ...]:
        """Return actions as drawn and in range, their log probabilities, and the entropy.

        Actions and log probabilities are [N, A]; the entropy is [1] or [N].
        """
        mu = _dense(self._gaussian[0], hidden)
        noise = np.zeros_like(mu) if noise is None else noise
        if self._is_squashed:
            spread = _dense(self._gaussian[1], hidden)
            log_sigma = np.minimum(np.maximum(spread, LOG_SIGMA_MIN), LOG_SIGMA_MAX)
        else:
            log_sigma = self._log_sigma
        action = mu + np.exp(log_sigma) * noise
        log_prob = noise * noise * _MINUS_HALF - (log_sigma + _HALF_LOG_TAU)
        entropy = log_sigma.sum(1) / log_sigma.shape[1] + _ENTROPY
        if not self._is_squashed:
            in_range = np.minimum(np.maximum(action, -ACTION_RANGE), ACTION_RANGE) / ACTION_RANGE
            return action, in_range, log_prob, entropy
        # This is the formula of `squashed_action`; logaddexp(0, x) is softplus.
        log_slope = 2.0 * (math.log(2.0) - action - np.logaddexp(np.float32(0.0), -2.0 * action))
        squashed = np.tanh(action)
        return squashed, squashed, log_prob - log_slope, entropy

    def _discrete(
        self, hidden: FloatArray, allowed: BoolArray | None, noise: Sequence[FloatArray] | None
    ) -> tuple[AnyArray, ...]:
        """Return choices and their log probabilities, both [N, branches], and the entropy [N]."""
        n, starts, sizes = len(hidden), self._starts, self._sizes
        log_p = np.empty((n, self._places[-1].stop), np.float32)  # columns of all branches
        for place, (weight, bias) in zip(self._places, self._branches, strict=True):
            np.add(_product(hidden, weight), bias, out=log_p[:, place])
        if allowed is not None:
            log_p[~allowed] = FORBIDDEN
        # `log_p` becomes the log softmax of each branch. The maximum is subtracted first, so that
        # exp cannot overflow.
        log_p -= np.maximum.reduceat(log_p, starts, axis=1).repeat(sizes, axis=1)
        total = np.add.reduceat(np.exp(log_p), starts, axis=1)
        log_p -= np.log(total).repeat(sizes, axis=1)
        # This is the Gumbel-max trick, as in `gumbel_scores`.
        scores = log_p if noise is None else log_p - np.log(np.concatenate(noise, axis=1))
        discrete = np.stack([scores[:, place].argmax(1) for place in self._places], axis=1)
        chosen_log_p = log_p[np.arange(n)[:, None], discrete + starts]
        return discrete, chosen_log_p, -(np.exp(log_p) * log_p).sum(1)


_NO_SCALE = None, np.zeros(0, np.float32), np.zeros(0, np.float32)
_MINUS_HALF, _HALF_LOG_TAU = np.float32(-0.5), np.float32(HALF_LOG_TAU)
_ENTROPY = np.float32(HALF_LOG_TAU + 0.5)


# Swish is computed in `__call__`, because calling a function takes as long as computing a small
# layer.
_ACTIVATIONS: dict[str, Callable[[FloatArray], FloatArray] | None] = {
    "swish": None,
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
}


def _spread(heads: ActionHeads) -> list[nn.Linear | None]:
    return [heads.spread] if isinstance(heads, SquashedHeads) else []


def _dense(layer: Dense, x: FloatArray) -> FloatArray:
    y = _product(x, layer[0])
    y += layer[1]
    return y


def _product(x: FloatArray, weight: FloatArray) -> FloatArray:
    if not 1 < len(x) <= _FEW_ROWS:
        return cast("FloatArray", x @ weight)
    # OpenBLAS packs all weights before it multiplies matrices, which takes longer than a few
    # products with vectors: these take half the time for two rows and 512 by 512 weights.
    y = np.empty((len(x), weight.shape[1]), np.result_type(x, weight))
    for row, out in zip(x, y, strict=True):
        np.dot(row, weight, out=out)
    return y
