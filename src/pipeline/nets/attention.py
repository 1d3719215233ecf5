"""Variable-length observations: any number of entities become one vector (attention).

Every entity is embedded together with what the agent knows of itself, the entities attend to each
other in a residual block, and their mean is the result (the architecture: Baker et al. 2019, arXiv
1909.07528; attention: Vaswani et al. 2017, arXiv 1706.03762). It depends neither on the order of
the entities nor on how many unused rows follow them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.nets.layers import IS_TRACED, dense
from pipeline.nets.onnx_graph import FLOAT, OnnxGraph

EMBEDDING_SIZE = 128
N_HEADS = 4
# An entity whose squares sum to less than this is an unused row. It is part of every model that
# ML-Agents exported, so an entity of zeros only cannot be told from an unused row.
PADDING_BELOW = 0.01
WEIGHT_VARIANCE = 0.125
# As in ML-Agents' models. Minus infinity would give NaN where all are forbidden.
FORBIDDEN = -1e6
# Without any entity the sum and the count are 0.
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
    """Self-attention of embeddings in a residual block, and the mean of the results.

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

        Padding has no effect; without any entity the result is zeros.
        """
        x, query, key, value = self.project(x)
        scores = self.scores(query, key) + (padding.to(x.dtype) * FORBIDDEN)[:, None, None]
        y = self.residual(x, self.mix(scores, value))
        used = (~padding).to(x.dtype).unsqueeze(1)
        total: Tensor = (used @ y).squeeze(1)
        return total / (used.sum(2) + _COUNT_EPSILON)

    def to_onnx(self, graph: OnnxGraph, x: str, paddings: Sequence[str], n: int) -> str:
        """`forward` in ONNX for n entities; paddings, to be joined, are 1.0 there, else 0.0."""
        x = graph.layer_norm(x, axis=2)
        padding = graph.concat(paddings)
        seen = self._seen_to_onnx(graph, x, padding, n)
        y = graph.layer_norm(graph.node("Add", [seen, x]), axis=2)
        used = graph.node("Sub", [graph.scalar(1.0), padding])
        masked = graph.node("Mul", [y, graph.reshape(used, (-1, n, 1), "entities.rows")])
        total = graph.node("ReduceSum", [masked], axes=[1], keepdims=0)
        count = graph.node("ReduceSum", [used], axes=[1], keepdims=1)
        count = graph.node("Add", [count, graph.scalar(_COUNT_EPSILON)])
        return graph.node("Div", [total, count])

    def _seen_to_onnx(self, graph: OnnxGraph, x: str, padding: str, n: int) -> str:
        """Attention results of n entities [batch, n, size], [batch, n, size]."""
        shape = (-1, n, N_HEADS, self.size // N_HEADS)
        heads = graph.constant(np.array(shape), "entities.heads")
        layers = {"query": self.query, "key": self.key, "value": self.value}
        query, key, value = (
            graph.node(
                "Transpose",
                [
                    graph.node(
                        "Reshape", [_linear_per_entity(graph, layer, x, f"entities.{name}"), heads]
                    )
                ],
                perm=[0, 2, 1, 3],
            )
            for name, layer in layers.items()
        )
        # Importers of inference engines join two transpositions in a row, and wrongly; the two
        # nodes between them change nothing and keep them apart.
        one = graph.scalar(1.0)
        key = graph.node("Add", [graph.node("Sub", [key, one]), one])
        key = graph.node("Transpose", [key], perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", [query, key])
        unused = graph.reshape(padding, (-1, 1, 1, n), "entities.columns")
        # To 0 first and then down by a million, as ML-Agents exports it.
        scores = graph.node("Mul", [scores, graph.node("Sub", [one, unused])])
        scores = graph.node("Div", [scores, graph.scalar(math.sqrt(self.size))])
        forbidden = graph.node("Mul", [unused, graph.scalar(FORBIDDEN)])
        weights = graph.node("Softmax", [graph.node("Add", [scores, forbidden])], axis=3)
        seen = graph.node("MatMul", [weights, value])
        seen = graph.node("Transpose", [seen], perm=[0, 2, 1, 3])
        seen = graph.reshape(seen, (-1, n, self.size), "entities.merged")
        return _linear_per_entity(graph, self.out, seen, "entities.out")

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings [..., E] normalised, and their queries, keys and values, all [..., E]."""
        x = nn.functional.layer_norm(x, (self.size,))
        query, key, value = (
            dense(x, layer.weight, layer.bias) for layer in (self.query, self.key, self.value)
        )
        return x, query, key, value

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores of Q queries and N keys: [B, Q, E] and [B, N, E] to [B, heads, Q, N]."""
        return _heads(query * (1.0 / math.sqrt(self.size))) @ _heads(key).transpose(2, 3)

    def mix(self, scores: Tensor, value: Tensor) -> Tensor:
        """Attention results [B, Q, E], by scores [B, heads, Q, N] of values [B, N, E]."""
        return (softmax_short(scores) @ _heads(value)).transpose(1, 2).flatten(2)

    def residual(self, x: Tensor, seen: Tensor) -> Tensor:
        """New embeddings [..., E] from normalised ones and attention results, both [..., E]."""
        y = dense(seen, self.out.weight, self.out.bias)
        return nn.functional.layer_norm(y + x, (self.size,))


def _linear_per_entity(graph: OnnxGraph, layer: nn.Linear, x: str, name: str) -> str:
    """A dense layer on every entity [batch, n, in]."""
    bias = graph.weight(layer.bias, f"{name}.bias")
    return graph.node("Add", [graph.matmul(x, layer.weight, f"{name}.weight"), bias])


def _heads(x: Tensor) -> Tensor:
    """[B, N, E] as one contiguous [B, heads, N, E / heads]."""
    B, N, size = x.shape
    return x.view(B, N, N_HEADS, size // N_HEADS).transpose(1, 2).contiguous()


def softmax_short(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, fast where that is short: torch's own works row by row."""
    # What is subtracted cancels out, so that it needs no derivative.
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


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
        # A list beside the ModuleList, which forgets the type of what it holds.
        self._layers = [normal_linear(self.own_width + n, size, size) for n in entity_sizes]
        self.embeddings = nn.ModuleList(self._layers)
        self.attention = ResidualSelfAttention(size)

    def forward(self, own: Tensor | None, observations: Sequence[Tensor]) -> Tensor:
        """Own encodings [B, own_size], or None, and entities [B, N_i, F_i], to [B, 128]."""
        code = None if own is None or self.own is None else nn.functional.silu(self.own(own))
        embedded, paddings = [], []
        for layer, entities in zip(self._layers, observations, strict=True):
            padding = is_padding(entities)
            # on other devices, reading the number of entities would wait for the device
            if entities.device.type == "cpu" and not IS_TRACED.get():
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

    def to_onnx(self, graph: OnnxGraph, own: Sequence[str], observations: Sequence[str]) -> str:
        """`forward` in ONNX; `observations` are inputs of the model."""
        code = None
        if self.own is not None:
            code = graph.swish(graph.linear(self.own, graph.concat(own), "entities.own"))
            code = graph.node("Unsqueeze", [code], axes=[1])
        embedded, paddings = [], []
        for layer, entities in zip(self._layers, observations, strict=True):
            embedded.append(self._embed_to_onnx(graph, layer, code, entities))
            square = graph.node("Pow", [entities, graph.scalar(2.0)])
            total = graph.node("ReduceSum", [square], axes=[2], keepdims=0)
            is_unused = graph.node("Less", [total, graph.scalar(PADDING_BELOW)])
            paddings.append(graph.node("Cast", [is_unused], to=FLOAT))
        # Fixed in the model: an observation always has room for its largest number of entities.
        n = sum(graph.input_shapes[entities][0] for entities in observations)
        return self.attention.to_onnx(graph, graph.concat(embedded), paddings, n)

    def _embed_to_onnx(
        self, graph: OnnxGraph, layer: nn.Linear, code: str | None, entities: str
    ) -> str:
        weight, k, name = layer.weight, self.own_width, f"{entities}.embedding"
        product = graph.matmul(entities, weight[:, k:], f"{name}.entity")
        x = graph.node("Add", [product, graph.weight(layer.bias, f"{name}.bias")])
        if code is not None:
            x = graph.node("Add", [x, graph.matmul(code, weight[:, :k], f"{name}.own")])
        return graph.swish(x)


def _columns_in_use(padding: Tensor) -> int:
    """Return the number of columns of bool [B, N] up to the last entity of any row, at least 1."""
    used = (~padding).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1
