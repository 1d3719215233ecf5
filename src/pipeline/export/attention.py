"""The part of the graph that turns all variable-length observations into one vector."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import ExportError
from pipeline.export.description import EntityEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.arrays import FloatArray
    from pipeline.export.builder import GraphBuilder
    from pipeline.export.description import Attention, Dense, PolicyGraph

PADDING_BELOW = 0.01
_FORBIDDEN = -1e6
_COUNT_EPSILON = 1e-7
_FLOAT = 1


def attend(
    builder: GraphBuilder, graph: PolicyGraph, fixed: Sequence[tuple[str, int]]
) -> tuple[str, int]:
    """Add the embedding of every entity, attention between them, and their mean.

    Args:
        builder: in which the inputs `obs_i` are declared.
        graph: with a description of attention.
        fixed: tensors [batch, n] of the encoded observations of fixed size, and n.

    Returns:
        The tensor [batch, n] and n.

    Raises:
        ExportError: The described layers do not fit each other.
    """
    attention = _described(graph)
    code, width = _own_code(builder, attention, fixed)
    embedded, masks, n_entities = [], [], 0
    specs = graph.spec.observation_specs
    for index, (spec, encoder) in enumerate(zip(specs, graph.encoders, strict=True)):
        if isinstance(encoder, EntityEmbedding):
            embedded.append(_embed(builder, f"obs_{index}", spec.shape, encoder, code, width))
            masks.append(_padding(builder, f"obs_{index}"))
            n_entities += spec.shape[0]
    x = layer_norm(builder, builder.concat(embedded), attention.epsilon, axis=2)
    padding = builder.concat(masks)
    seen = _self_attention(builder, x, padding, attention, n_entities)
    y = layer_norm(builder, builder.node("Add", [seen, x]), attention.epsilon, axis=2)
    return _mean(builder, y, padding, n_entities), attention.size


def layer_norm(builder: GraphBuilder, x: str, epsilon: float, *, axis: int) -> str:
    """(x - mean) / √(variance + epsilon) over the last axis, which has number `axis`."""
    mean = builder.node("ReduceMean", [x], axes=[axis], keepdims=1)
    centered = builder.node("Sub", [x, mean])
    square = builder.node("Mul", [centered, centered])
    variance = builder.node("ReduceMean", [square], axes=[axis], keepdims=1)
    shifted = builder.node("Add", [variance, builder.scalar(epsilon)])
    return builder.node("Div", [centered, builder.node("Sqrt", [shifted])])


def _described(graph: PolicyGraph) -> Attention:
    if graph.attention is None:
        raise ExportError(
            "export: a variable-length observation needs attention, found none; describe the "
            "policy with the layers that read its entities"
        )
    if graph.attention.size % graph.attention.n_heads:
        raise ExportError(
            f"export: {graph.attention.n_heads} heads cannot share {graph.attention.size} numbers; "
            "describe the policy with as many heads as it was trained with"
        )
    return graph.attention


def _own_code(
    builder: GraphBuilder, attention: Attention, fixed: Sequence[tuple[str, int]]
) -> tuple[str | None, int]:
    """What the agent knows of itself, [batch, 1, n], and n; nothing without fixed observations."""
    if (attention.own is None) != (not fixed):
        found = "none" if attention.own is None else "one"
        raise ExportError(
            f"export: attention has {found} of the layers on the agent's own observations, while "
            f"{len(fixed)} of them are of fixed size; describe the policy with the spec it was "
            "trained on"
        )
    if attention.own is None:
        return None, 0
    own = builder.concat([name for name, _ in fixed])
    size = sum(width for _, width in fixed)
    code, width = builder.dense(own, size, attention.own, "entities.own")
    return builder.node("Unsqueeze", [builder.activation(code, "swish")], axes=[1]), width


def _embed(
    builder: GraphBuilder,
    x: str,
    shape: tuple[int, ...],
    embedding: EntityEmbedding,
    code: str | None,
    width: int,
) -> str:
    """Swish(W [code, entity] + b) [batch, entities, n]; the code's part once per agent."""
    weight = embedding.dense.weight
    out = len(weight)
    weight = builder.checked(weight, f"{x}.embedding", (out, width + shape[1]))
    own, entity = weight[:, :width], weight[:, width:]
    product = _product(builder, x, entity, f"{x}.embedding.entity")
    bias = builder.weight(embedding.dense.bias, f"{x}.embedding.bias", (out,))
    y = builder.node("Add", [product, bias])
    if code is not None:
        y = builder.node("Add", [y, _product(builder, code, own, f"{x}.embedding.own")])
    return builder.activation(y, "swish")


def _product(builder: GraphBuilder, x: str, weight: FloatArray, name: str) -> str:
    """[batch, n, in] · weightᵀ."""
    stored = builder.constant(np.ascontiguousarray(weight.T), name)
    return builder.node("MatMul", [x, stored])


def _padding(builder: GraphBuilder, x: str) -> str:
    """1 for each unused row of [batch, n, size], else 0, as [batch, n]."""
    square = builder.node("Pow", [x, builder.scalar(2.0)])
    total = builder.node("ReduceSum", [square], axes=[2], keepdims=0)
    is_unused = builder.node("Less", [total, builder.scalar(PADDING_BELOW)])
    return builder.node("Cast", [is_unused], to=_FLOAT)


def _self_attention(
    builder: GraphBuilder, x: str, padding: str, attention: Attention, n: int
) -> str:
    """What each of n entities [batch, n, size] takes from all, [batch, n, size]."""
    size, heads = attention.size, attention.n_heads
    parts = {"query": attention.query, "key": attention.key, "value": attention.value}
    shape = builder.constant(np.array([-1, n, heads, size // heads]), "entities.heads")
    query, key, value = (
        builder.node(
            "Transpose",
            [builder.node("Reshape", [_each(builder, x, layer, f"entities.{name}", size), shape])],
            perm=[0, 2, 1, 3],
        )
        for name, layer in parts.items()
    )
    # Importers of inference engines join two transpositions in a row, and wrongly; what stands
    # between these two changes nothing and keeps them apart.
    one = builder.scalar(1.0)
    key = builder.node("Add", [builder.node("Sub", [key, one]), one])
    key = builder.node("Transpose", [key], perm=[0, 1, 3, 2])
    scores = builder.node("MatMul", [query, key])
    columns = builder.constant(np.array([-1, 1, 1, n]), "entities.columns")
    unused = builder.node("Reshape", [padding, columns])
    scores = builder.node("Mul", [scores, builder.node("Sub", [one, unused])])
    scores = builder.node("Div", [scores, builder.scalar(math.sqrt(size))])
    forbidden = builder.node("Mul", [unused, builder.scalar(_FORBIDDEN)])
    weights = builder.node("Softmax", [builder.node("Add", [scores, forbidden])], axis=3)
    taken = builder.node("MatMul", [weights, value])
    taken = builder.node("Transpose", [taken], perm=[0, 2, 1, 3])
    merged = builder.constant(np.array([-1, n, size]), "entities.merged")
    taken = builder.node("Reshape", [taken, merged])
    return _each(builder, taken, attention.out, "entities.out", size)


def _each(builder: GraphBuilder, x: str, layer: Dense, name: str, size: int) -> str:
    """A dense layer on every entity, [batch, n, size] to the same shape."""
    weight = builder.checked(layer.weight, f"{name}.weight", (size, size))
    bias = builder.weight(layer.bias, f"{name}.bias", (size,))
    return builder.node("Add", [_product(builder, x, weight, f"{name}.weight"), bias])


def _mean(builder: GraphBuilder, y: str, padding: str, n: int) -> str:
    """Mean of [batch, n, size] over the entities in use, zeros if there are none."""
    used = builder.node("Sub", [builder.scalar(1.0), padding])
    rows = builder.constant(np.array([-1, n, 1]), "entities.rows")
    kept = builder.node("Mul", [y, builder.node("Reshape", [used, rows])])
    total = builder.node("ReduceSum", [kept], axes=[1], keepdims=0)
    count = builder.node("ReduceSum", [used], axes=[1], keepdims=1)
    count = builder.node("Add", [count, builder.scalar(_COUNT_EPSILON)])
    return builder.node("Div", [total, count])
