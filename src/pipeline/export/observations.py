"""The part of the graph that turns each observation into features."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np

from pipeline.errors import ExportError
from pipeline.export.description import (
    Activation,
    Conv,
    Dense,
    EntityEmbedding,
    Flatten,
    MaxPool,
    Normalizer,
    Residual,
    VisualEncoder,
    VisualLayer,
)

if TYPE_CHECKING:
    from pipeline.export.builder import GraphBuilder
    from pipeline.export.description import PolicyGraph

_VECTOR, _ENTITIES, _VISUAL = 1, 2, 3
_WANTED = {
    _VECTOR: "a Normalizer or None",
    _ENTITIES: "an EntityEmbedding",
    _VISUAL: "a VisualEncoder",
}


def encode_observations(builder: GraphBuilder, graph: PolicyGraph) -> dict[int, tuple[str, int]]:
    """Declare the inputs `obs_i` and encode those of fixed size.

    Returns:
        By their number the tensor [batch, n] and n.

    Raises:
        ExportError: An observation cannot be exported, or its encoder does not fit it.
    """
    specs = graph.spec.observation_specs
    if not specs:
        raise ExportError("export: the behavior has no observations; a policy needs at least one")
    if len(graph.encoders) != len(specs):
        raise ExportError(
            f"export: {len(graph.encoders)} encoders for {len(specs)} observations; give one each "
            "(None for a plain vector)"
        )
    features = {}
    for index, (obs, encoder) in enumerate(zip(specs, graph.encoders, strict=True)):
        where = f"obs_{index}" + (f" ({obs.name})" if obs.name else "")
        _check_rank(where, obs.shape, encoder)
        name = builder.input(f"obs_{index}", obs.shape)
        if isinstance(encoder, Normalizer):
            features[index] = _normalize(builder, name, encoder, obs.shape[0]), obs.shape[0]
        elif isinstance(encoder, VisualEncoder):
            features[index] = _encode_image(builder, name, encoder, obs.shape)
        elif encoder is None:
            features[index] = name, obs.shape[0]
    return features


def _check_rank(where: str, shape: tuple[int, ...], encoder: object) -> None:
    rank = len(shape)
    if rank not in _WANTED:
        raise ExportError(
            f"export: observation {where} with shape {list(shape)} is of rank {rank}, which cannot "
            "be exported; use vectors (rank 1), lists of entities (rank 2) and images (rank 3)"
        )
    fitting = {EntityEmbedding: _ENTITIES, VisualEncoder: _VISUAL}
    if fitting.get(type(encoder), _VECTOR) != rank:
        found = "none" if encoder is None else type(encoder).__name__
        raise ExportError(
            f"export: observation {where} with shape {list(shape)} needs {_WANTED[rank]}, found "
            f"{found}"
        )


def _normalize(builder: GraphBuilder, x: str, normalizer: Normalizer, size: int) -> str:
    if not (np.asarray(normalizer.std) > 0.0).all():
        raise ExportError(
            f"export: {x}.std holds values that are not above 0; the normaliser's statistics are "
            "broken"
        )
    mean = builder.weight(normalizer.mean, f"{x}.mean", (size,))
    std = builder.weight(normalizer.std, f"{x}.std", (size,))
    scaled = builder.node("Div", [builder.node("Sub", [x, mean]), std])
    return builder.node("Clip", [scaled], min=-normalizer.clip, max=normalizer.clip)


def _encode_image(
    builder: GraphBuilder, x: str, encoder: VisualEncoder, shape: tuple[int, ...]
) -> tuple[str, int]:
    encoded, result = _sequence(builder, x, shape, encoder.layers, x)
    if len(result) != 1:
        raise ExportError(
            f"export: the encoder of {x} ends with shape {list(result)}; it must end with Flatten "
            "or a Dense layer"
        )
    return encoded, result[0]


def _sequence(
    builder: GraphBuilder,
    x: str,
    shape: tuple[int, ...],
    layers: tuple[VisualLayer, ...],
    name: str,
) -> tuple[str, tuple[int, ...]]:
    for index, layer in enumerate(layers):
        x, shape = _layer(builder, x, shape, layer, f"{name}.{index}")
    return x, shape


def _layer(
    builder: GraphBuilder, x: str, shape: tuple[int, ...], layer: VisualLayer, name: str
) -> tuple[str, tuple[int, ...]]:
    if isinstance(layer, Activation):
        return builder.activation(x, layer.name), shape
    if isinstance(layer, Residual):
        inner, result = _sequence(builder, x, shape, layer.layers, name)
        if result != shape:
            raise ExportError(
                f"export: the residual block {name} turns shape {list(shape)} into {list(result)}; "
                "it must keep it"
            )
        return builder.node("Add", [inner, x]), shape
    if isinstance(layer, Dense):
        if len(shape) != 1:
            raise ExportError(f"export: {name} is Dense on shape {list(shape)}; Flatten first")
        x, size = builder.dense(x, shape[0], layer, name)
        return x, (size,)
    if len(shape) != _VISUAL:
        raise ExportError(f"export: {name} ({type(layer).__name__}) needs [C, H, W], has {shape}")
    if isinstance(layer, Flatten):
        target = builder.constant(np.array([-1, prod(shape)]), f"{name}.shape")
        return builder.node("Reshape", [x, target]), (prod(shape),)
    return _window(builder, x, shape, layer, name)


def _window(
    builder: GraphBuilder, x: str, shape: tuple[int, ...], layer: Conv | MaxPool, name: str
) -> tuple[str, tuple[int, ...]]:
    """A convolution or a pooling: both slide a window over the image."""
    sides = (layer.size, layer.size) if isinstance(layer, MaxPool) else layer.weight.shape[2:]
    output = [
        (length + 2 * layer.padding - side) // layer.stride + 1
        for length, side in zip(shape[1:], sides, strict=True)
    ]
    if min(output) < 1:
        raise ExportError(
            f"export: {name} has a window of {list(sides)} on an image of {list(shape[1:])}; "
            "choose an encoder for smaller images"
        )
    attributes = {
        "kernel_shape": list(sides),
        "strides": [layer.stride] * 2,
        "pads": [layer.padding] * 4,
    }
    if isinstance(layer, MaxPool):
        return builder.node("MaxPool", [x], **attributes), (shape[0], *output)
    out = len(layer.weight)
    weight = builder.weight(layer.weight, f"{name}.weight", (out, shape[0], *sides))
    bias = builder.weight(layer.bias, f"{name}.bias", (out,))
    inputs = [x, weight, bias]
    return builder.node("Conv", inputs, **attributes), cast("tuple[int, ...]", (out, *output))
