"""Variable-length observations: attention turns any number of entities into one vector.

Every entity is embedded together with the agent's other observations, the entities attend to each
other in a residual block, and the mean of their new embeddings is the result (architecture: Baker
et al. 2019, arXiv 1909.07528; attention: Vaswani et al. 2017, arXiv 1706.03762). The result depends
neither on the order of the entities nor on the number of unused rows after them.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.nets.layers import IS_TRACED, dense, draw_normal
from pipeline.nets.onnx_graph import FLOAT, OnnxGraph

# These are ML-Agents' sizes.
EMBEDDING_SIZE = 128
N_HEADS = 4
# A row with a sum of squares below this threshold counts as unused, even if it is an entity of
# zeros. The threshold is the same as in all models that ML-Agents exported.
PADDING_BELOW = 0.01
WEIGHT_VARIANCE = 0.125
# This is ML-Agents' value. Minus infinity would give NaN where all scores are forbidden.
FORBIDDEN = -1e6
# The count of entities is increased by this number, because 0 / 0 would be NaN without entities.
_COUNT_EPSILON = 1e-7


def normal_linear(n_in: int, n_out: int, size: int) -> nn.Linear:
    """Return a dense layer with zero bias, and weights drawn from N(0, 0.125 / size)."""
    layer = nn.Linear(n_in, n_out)
    draw_normal(layer.weight, math.sqrt(WEIGHT_VARIANCE / size))
    nn.init.zeros_(layer.bias)
    return layer


def is_padding(entities: Tensor) -> Tensor:
    """Return bool [B, N], whether each of the entities [B, N, F] is an unused row."""
    return entities.square().sum(-1) < PADDING_BELOW


class ResidualSelfAttention(nn.Module):
    """Self-attention of embeddings [`size`] in a residual block, and the mean of the results.

    Scores are divided by the root of the embedding size, not of a head's size (arXiv 1706.03762,
    equation 1), because ML-Agents does so, and its models and settings are tuned to this scale.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if size % N_HEADS:
            raise ValueError(f"{N_HEADS} heads cannot divide an embedding of {size} numbers evenly")
        self.size = size
        self.query = normal_linear(size, size, size)
        self.key = normal_linear(size, size, size)
        self.value = normal_linear(size, size, size)
        self.out = normal_linear(size, size, size)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return the mean [B, E] of the new embeddings of entities x [B, N, E].

        `padding`, bool [B, N], marks unused rows, which have no effect; without entities the mean
        is zeros.
        """
        x, query, key, value = self.project(x)
        # Scores of padding are lowered by a million, so that their weights are 0 after the softmax.
        scores = self.scores(query, key) + (padding.to(x.dtype) * FORBIDDEN)[:, None, None]
        y = self.residual(x, self.mix(scores, value))
        # `used` [B, 1, N] has the weights of the sum: 1 for an entity, 0 for padding.
        used = (~padding).to(x.dtype).unsqueeze(1)
        total: Tensor = (used @ y).squeeze(1)
        return total / (used.sum(2) + _COUNT_EPSILON)

    def to_onnx(self, graph: OnnxGraph, x: str, paddings: Sequence[str], n: int) -> str:
        """Add the operators of `forward` for n entities to `graph`; return the result's name.

        `paddings` are the names of tensors, one for each observation, that are 1.0 for unused rows
        and 0.0 for entities.
        """
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
        """Add the attention results [batch, n, size] of n entities `x` to the ONNX graph."""
        shape = (-1, n, N_HEADS, self.size // N_HEADS)
        heads = graph.constant(np.array(shape), "entities.heads")
        parts = []
        for name in ("query", "key", "value"):
            part = _linear_per_entity(graph, getattr(self, name), x, f"entities.{name}")
            part = graph.node("Reshape", [part, heads])
            parts.append(graph.node("Transpose", [part], perm=[0, 2, 1, 3]))
        query, key, value = parts
        # Importers of inference engines merge two adjacent transpositions incorrectly. The two
        # nodes between the transpositions prevent this; they subtract 1 and add it again.
        one = graph.scalar(1.0)
        key = graph.node("Add", [graph.node("Sub", [key, one]), one])
        key = graph.node("Transpose", [key], perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", [query, key])
        unused = graph.reshape(padding, (-1, 1, 1, n), "entities.columns")
        # Scores of padding are set to 0, then lowered by a million, as in ML-Agents' models.
        scores = graph.node("Mul", [scores, graph.node("Sub", [one, unused])])
        scores = graph.node("Div", [scores, graph.scalar(math.sqrt(self.size))])
        forbidden = graph.node("Mul", [unused, graph.scalar(FORBIDDEN)])
        weights = graph.node("Softmax", [graph.node("Add", [scores, forbidden])], axis=3)
        seen = graph.node("MatMul", [weights, value])
        seen = graph.node("Transpose", [seen], perm=[0, 2, 1, 3])
        seen = graph.reshape(seen, (-1, n, self.size), "entities.merged")
        return _linear_per_entity(graph, self.out, seen, "entities.out")

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return normalised embeddings, their queries, keys and values, all [..., E]."""
        x = nn.functional.layer_norm(x, (self.size,))
        query, key, value = (
            dense(x, layer.weight, layer.bias) for layer in (self.query, self.key, self.value)
        )
        return x, query, key, value

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return scores [B, heads, Q, N] of queries [B, Q, E] and keys [B, N, E]."""
        # The query is scaled instead of the scores, because queries have fewer numbers.
        return _heads(query * (1.0 / math.sqrt(self.size))) @ _heads(key).transpose(2, 3)

    def mix(self, scores: Tensor, value: Tensor) -> Tensor:
        """Return means [B, Q, E] of values [B, N, E], weighted by the softmax of scores.

        `scores` are [B, heads, Q, N].
        """
        return (softmax_short(scores) @ _heads(value)).transpose(1, 2).flatten(2)

    def residual(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return new embeddings from normalised embeddings and attention results, all [..., E]."""
        y = dense(seen, self.out.weight, self.out.bias)
        # The normalisation has no trained scale or shift, as in `project`.
        return nn.functional.layer_norm(y + x, (self.size,))


def _linear_per_entity(graph: OnnxGraph, layer: nn.Linear, x: str, name: str) -> str:
    bias = graph.weight(layer.bias, f"{name}.bias")
    return graph.node("Add", [graph.matmul(x, layer.weight, f"{name}.weight"), bias])


def _heads(x: Tensor) -> Tensor:
    """Return `x` [B, N, E] as a contiguous tensor [B, heads, N, E / heads]."""
    B, N, size = x.shape
    return x.view(B, N, N_HEADS, size // N_HEADS).transpose(1, 2).contiguous()


def softmax_short(scores: Tensor) -> Tensor:
    """Return the softmax over a short last dimension, where torch's softmax is slow."""
    # The subtracted maximum cancels out, so that it needs no derivative.
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


class EntityEncoder(nn.Module):
    """Encodes all variable-length observations of an agent as one vector [B, 128].

    `own_size` is the size of the agent's other encoded observations, 0 if there are none;
    `entity_sizes` are the sizes of an entity of each variable-length observation.
    """

    def __init__(self, own_size: int, entity_sizes: Sequence[int]) -> None:
        super().__init__()
        size = self.output_size = EMBEDDING_SIZE
        self.own = normal_linear(own_size, size, size) if own_size else None
        self.own_width = size if own_size else 0
        # The layers are also in a list, because a ModuleList loses the type of its modules.
        self._layers = [normal_linear(self.own_width + n, size, size) for n in entity_sizes]
        self.embeddings = nn.ModuleList(self._layers)
        self.attention = ResidualSelfAttention(size)

    def forward(self, own: Tensor | None, observations: Sequence[Tensor]) -> Tensor:
        """Return the encoding [B, 128] of variable-length observations [B, N_i, F_i].

        `own` [B, own_size] is the encoding of the agent's other observations; None if there are
        none.
        """
        code = None if own is None or self.own is None else nn.functional.silu(self.own(own))
        embedded, paddings = [], []
        for layer, entities in zip(self._layers, observations, strict=True):
            padding = is_padding(entities)
            # Unused columns are cut off only on the CPU: on a GPU, reading the number of entities
            # would wait for the device. While a loss is traced, no shape may depend on this number.
            if entities.device.type == "cpu" and not IS_TRACED.get():
                n = _columns_in_use(padding)
                entities, padding = entities[:, :n], padding[:, :n]  # noqa: PLW2901  # all later rows are unused
            embedded.append(self._embed(layer, code, entities))
            paddings.append(padding)
        result: Tensor = self.attention(torch.cat(embedded, dim=1), torch.cat(paddings, dim=1))
        return result

    def _embed(self, layer: nn.Linear, code: Tensor | None, entities: Tensor) -> Tensor:
        """Return [B, N, 128]: the Swish of a dense layer that reads `code` and each entity.

        `code` is the encoding of the agent's other observations; the product with it is computed
        once for all entities.
        """
        weight, bias, k = layer.weight, layer.bias, self.own_width
        # W [code, e] = W_code code + W_e e: the columns of W for the code come first.
        x = nn.functional.linear(entities, weight[:, k:], bias)
        if code is not None:
            x = x + nn.functional.linear(code, weight[:, :k]).unsqueeze(1)
        return nn.functional.silu(x)

    def to_onnx(self, graph: OnnxGraph, own: Sequence[str], observations: Sequence[str]) -> str:
        """Add the operators of `forward` to `graph`; return the name of their result.

        `own` and `observations` are names of tensors in the graph.
        """
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
        # The model's number of entities is fixed: an observation has all rows, used or not.
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
    """Return the number of columns of `padding` [B, N] up to the last entity; at least 1."""
    used = (~padding).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 1
