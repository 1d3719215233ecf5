"""Two networks with layers of equal shapes, computed together by one batched product per layer."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline.nets.actor_critic import Actor, Critic, apply_memory
from pipeline.nets.encoder import ObservationEncoder
from pipeline.nets.fast.adam import FlatAdam
from pipeline.nets.layers import ACTIVATIONS, dense, is_for_onednn
from pipeline.nets.memory import SequenceState


class Paired(Protocol):
    """Two networks that can be computed together if their layers have equal shapes."""

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of parameters of one shape; empty if the networks cannot be computed together."""

    def share_weights(self, paired: Sequence[nn.Parameter]) -> None:
        """From now on use each parameter of `paired` [2, ...] in place of a pair of parameters."""


def paired_adam(
    parameters: Iterable[nn.Parameter], *networks: Paired, learning_rate: float
) -> FlatAdam:
    """Return Adam for `parameters`, and make each of `networks` compute its `pairs` together."""
    pairs = [pair for network in networks for pair in network.pairs]
    optimizer = FlatAdam(parameters, learning_rate=learning_rate, pairs=pairs)
    joined = iter(optimizer.paired)
    for network in networks:
        network.share_weights(list(islice(joined, len(network.pairs))))
    return optimizer


class ActorAndCritic:
    """Computes an actor and a critic for the same rows, by one product per layer if possible.

    This is possible if both bodies consist of dense layers only, without layer normalisation.

    Attributes:
        pairs: pairs of parameters of one shape, which `FlatAdam` makes adjacent in memory.
    """

    def __init__(self, actor: Actor, critic: Critic) -> None:
        self.actor, self.critic = actor, critic
        self.pairs = dense_pairs(actor.body, critic.body)
        self._dense: DensePair | None = None

    def share_weights(self, paired: Sequence[nn.Parameter]) -> None:
        """From now on use `paired`, which has each of `pairs` as one parameter [2, ...]."""
        self._dense = DensePair(paired, self.actor.body.dense.activation) if paired else None

    def __call__(
        self,
        obs: Sequence[Tensor],
        actors: SequenceState | None = None,
        critics: SequenceState | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the actor's hidden vectors [B, H] and the critic's values [B, signals].

        `actors` and `critics` are the sequences of the rows, with the memories of each network.
        """
        actor, critic = self.actor, self.critic
        if self._dense is None:
            hidden = actor(obs, actors)
            return hidden, critic(obs, hidden, critics)
        # The features of the actor's body are also the critic's, because the features of a purely
        # dense body are the joined observations.
        features, critic_features = self._dense(actor.body.features(obs)[0]).unbind()
        values: Tensor = critic.heads(apply_memory(critic_features, critic.memory, critics))
        return apply_memory(features, actor.memory, actors), values


def dense_pairs(
    first: ObservationEncoder, second: ObservationEncoder | None
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return the pairs of two encoders' parameters, for a `DensePair`.

    The list is empty unless both encoders consist of dense layers only, without normalisation. The
    second is of the same observations and settings, or None if there is only one.
    """
    has_other_parts = first.encoders or first.attention is not None or first.hyper is not None
    if second is None or has_other_parts or first.dense.norms:
        return []
    return list(zip(first.dense.parameters(), second.dense.parameters(), strict=True))


class DensePair:
    """Two `DenseLayers` of one shape that read the same rows; one batched product per layer.

    `parameters` are [2, ...] weights and biases of both networks, layer after layer.
    """

    def __init__(self, parameters: Sequence[Tensor], activation: str) -> None:
        self._activate = ACTIVATIONS[activation]
        self._weights = list(zip(parameters[::2], parameters[1::2], strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [B, n_in] to the outputs [2, B, hidden_units] of both networks."""
        # Both networks read the same rows, so `expand` (a view, no copy) is enough.
        x = x.expand(2, *x.shape)
        for weight, bias in self._weights:
            x = self._activate(paired_linear(x, weight, bias))
        return x


def paired_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map x [2, B, n_in] by weight [2, n_out, n_in] and bias [2, n_out] to [2, B, n_out]."""
    _, n_out, n_in = weight.shape
    if is_for_onednn(x, x.shape[1], n_in, n_out):
        layers = zip(x.unbind(), weight.unbind(), bias.unbind(), strict=True)
        return torch.stack([dense(*layer) for layer in layers])
    # One call computes bias + x weightᵀ for both layers.
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
