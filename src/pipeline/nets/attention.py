"""Variable-length observations: any number of entities become one vector (attention).

Every entity is embedded together with what the agent knows of itself, the entities look at each
other in a residual block, and their mean is the result (the architecture: Baker et al. 2019, arXiv
1909.07528; attention: Vaswani et al. 2017, arXiv 1706.03762). It depends neither on the order of
the entities nor on how many unused rows follow them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

EMBEDDING_SIZE = 128
N_HEADS = 4
# An entity whose squares sum to less than this is an unused row. It is part of every model that
# ML-Agents exported, so an entity of zeros only cannot be told from an unused row.
PADDING_BELOW = 0.01
WEIGHT_VARIANCE = 0.125
FORBIDDEN = -1e6
_COUNT_EPSILON = 1e-7


def normal_linear(n_in: int, n_out: int, size: int) -> nn.Linear:
    """A dense layer with weights N(0, 0.125 / size), whatever its inputs, and zero bias."""
    layer = nn.Linear(n_in, n_out)
    nn.init.normal_(layer.weight, std=math.sqrt(WEIGHT_VARIANCE / size))
    nn.init.zeros_(layer.bias)
    return layer


def is_padding(entities: Tensor) -> Tensor:
    """Bool [B, N]: which of the entities [B, N, F] are unused rows."""
    return entities.square().sum(-1) < PADDING_BELOW


class ResidualSelfAttention(nn.Module):
    """Embeddings that look at each other, and the mean of what they see.

    Scores are divided by the root of the whole embedding size, not of a head's: trained models and
    published settings are made for that.

    Args:
        size: numbers of an embedding, a multiple of the number of heads.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if size % N_HEADS:
            raise ValueError(f"{N_HEADS} heads cannot share embeddings of {size} numbers")
        self.size = size
        self.query = normal_linear(size, size, size)
        self.key = normal_linear(size, size, size)
        self.value = normal_linear(size, size, size)
        self.out = normal_linear(size, size, size)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Embeddings x [B, N, E] and which are padding, bool [B, N], to [B, E].

        What stands in padding has no effect; without any entity the result is zeros.
        """
        x, query, key, value = self.project(x)
        scores = self.scores(query, key) + (padding.to(x.dtype) * FORBIDDEN)[:, None, None]
        y = self.conclude(x, self.mix(scores, value))
        used = (~padding).to(x.dtype).unsqueeze(1)
        total: Tensor = (used @ y).squeeze(1)
        return total / (used.sum(2) + _COUNT_EPSILON)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings [..., E] normalised, and their queries, keys and values, all [..., E]."""
        x = nn.functional.layer_norm(x, (self.size,))
        return x, self.query(x), self.key(x), self.value(x)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """How much each of Q asks for each of N: [B, Q, E] and [B, N, E] to [B, heads, Q, N]."""
        return _heads(query * (1.0 / math.sqrt(self.size))) @ _heads(key).transpose(2, 3)

    def mix(self, scores: Tensor, value: Tensor) -> Tensor:
        """What is seen [B, Q, E] with scores [B, heads, Q, N] of values [B, N, E]."""
        return (softmax_of_few(scores) @ _heads(value)).transpose(1, 2).flatten(2)

    def conclude(self, x: Tensor, seen: Tensor) -> Tensor:
        """Normalised embeddings and what they saw, both [..., E], to what they become [..., E]."""
        return nn.functional.layer_norm(self.out(seen) + x, (self.size,))


def _heads(x: Tensor) -> Tensor:
    """[B, N, E] as one contiguous [B, heads, N, E / heads]."""
    B, N, size = x.shape
    return x.view(B, N, N_HEADS, size // N_HEADS).transpose(1, 2).contiguous()


def softmax_of_few(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, fast where that is short: torch's own works row by row."""
    result: Tensor = _SoftmaxOfFew.apply(scores)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


class _SoftmaxOfFew(torch.autograd.Function):
    """For p = softmax(s): ds = p (dp - sum of p dp)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        p = (scores - scores.amax(-1, keepdim=True)).exp_()
        p /= p.sum(-1, keepdim=True)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (by_p,) = gradients
        (p,) = ctx.saved_tensors
        weighted = p * by_p
        return torch.addcmul(weighted, p, weighted.sum(-1, keepdim=True), value=-1.0)


class EntityEncoder(nn.Module):
    """All variable-length observations of an agent as one vector [B, 128].

    Args:
        own_size: numbers of the agent's other encoded observations, 0 if it has none.
        entity_sizes: numbers of an entity of each variable-length observation.
    """

    def __init__(self, own_size: int, entity_sizes: Sequence[int]) -> None:
        super().__init__()
        size = self.output_size = EMBEDDING_SIZE
        self.own = normal_linear(own_size, size, size) if own_size else None
        self.own_width = size if own_size else 0
        self._layers = [normal_linear(self.own_width + n, size, size) for n in entity_sizes]
        self.embeddings = nn.ModuleList(self._layers)
        self.attention = ResidualSelfAttention(size)

    def forward(self, own: Tensor | None, observations: Sequence[Tensor]) -> Tensor:
        """Own encodings [B, own_size], or None, and entities [B, N_i, F_i], to [B, 128]."""
        code = None if own is None or self.own is None else nn.functional.silu(self.own(own))
        embedded, paddings = [], []
        for layer, entities in zip(self._layers, observations, strict=True):
            padding = is_padding(entities)
            if entities.device.type == "cpu":  # elsewhere to ask how many would be to wait
                n = _columns_in_use(padding)
                entities, padding = entities[:, :n], padding[:, :n]  # noqa: PLW2901  # the rest is unused
            embedded.append(self._embed(layer, code, entities))
            paddings.append(padding)
        result: Tensor = self.attention(torch.cat(embedded, dim=1), torch.cat(paddings, dim=1))
        return result

    def _embed(self, layer: nn.Linear, code: Tensor | None, entities: Tensor) -> Tensor:
        """Swish(W [code, entity] + b) [B, N, 128], the code's part computed once per agent."""
        weight, bias, k = layer.weight, layer.bias, self.own_width
        x = nn.functional.linear(entities, weight[:, k:], bias)
        if code is not None:
            x = x + nn.functional.linear(code, weight[:, :k]).unsqueeze(1)
        return nn.functional.silu(x)


def _columns_in_use(padding: Tensor) -> int:
    """Up to which column some row of bool [B, N] holds an entity; at least 1."""
    used = (~padding).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1
