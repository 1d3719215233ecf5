"""Write a policy as an ONNX model that Unity's inference engines load.

The model follows the v3 layout (package 2.0 and later): opset 9, named constants for the loader,
sampled and deterministic actions side by side. It is written node by node rather than traced, so
equal weights give equal bytes whatever the versions of torch and ONNX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import ExportError
from pipeline.export.attention import attend, layer_norm
from pipeline.export.builder import GraphBuilder
from pipeline.export.heads import continuous_head, discrete_heads
from pipeline.export.observations import encode_observations
from pipeline.export.recurrent import recurrent_layer

if TYPE_CHECKING:
    import onnx

    from pipeline.export.description import HyperLayer, PolicyGraph

VERSION_NUMBER = 3.0


def build_model(graph: PolicyGraph) -> onnx.ModelProto:
    """The ONNX model of a policy.

    Raises:
        ExportError: The policy uses something that cannot be exported, its parts do not fit each
            other, or a weight is not finite.
    """
    _check_actions(graph)
    builder = GraphBuilder()
    features = encode_observations(builder, graph)
    body, size = _body(builder, graph, features)
    recurrent_out = None
    if graph.memory is not None:
        body, size, recurrent_out = recurrent_layer(builder, body, size, graph.memory)
    builder.constant_output("version_number", np.array([VERSION_NUMBER], dtype=np.float32))
    builder.constant_output("memory_size", np.array([graph.memory_size], dtype=np.float32))
    if graph.continuous is not None:
        continuous_head(builder, body, size, graph.continuous)
    if graph.branches:
        discrete_heads(builder, body, size, graph.branches)
    if recurrent_out is not None:
        builder.output(recurrent_out, np.float32, ("batch", 1, graph.memory_size))
    return builder.model("policy")


def model_bytes(model: onnx.ModelProto) -> bytes:
    """The bytes of a model: the same for equal models."""
    return bytes(model.SerializeToString(deterministic=True))


def _check_actions(graph: PolicyGraph) -> None:
    action = graph.spec.action_spec
    sizes = tuple(len(branch.weight) for branch in graph.branches)
    if sizes != action.discrete_branches:
        raise ExportError(
            f"export: the policy has branches {list(sizes)}, the behavior "
            f"{list(action.discrete_branches)}; export it with the spec it was trained on"
        )
    continuous = 0 if graph.continuous is None else len(graph.continuous.mu.weight)
    if continuous != action.continuous_size:
        raise ExportError(
            f"export: the policy has {continuous} continuous actions, the behavior "
            f"{action.continuous_size}; export it with the spec it was trained on"
        )
    if continuous == 0 and not sizes:
        raise ExportError("export: the behavior has no actions; there is nothing to export")


def _body(
    builder: GraphBuilder, graph: PolicyGraph, features: dict[int, tuple[str, int]]
) -> tuple[str, int]:
    parts = list(features.values())
    if len(features) < len(graph.encoders):
        parts.append(attend(builder, graph, parts))
    x = builder.concat([name for name, _ in parts])
    size = sum(width for _, width in parts)
    for index, layer in enumerate(graph.layers):
        x, size = builder.dense(x, size, layer, f"body.{index}")
        x = builder.activation(x, "swish")
    if graph.hyper is None:
        return x, size
    goals = [features[index] for index in graph.goals if index in features]
    if not goals:
        raise ExportError(
            "export: the policy has a goal-conditioned layer, but no vector or image is a goal "
            "signal; describe the policy with the spec it was trained on"
        )
    goal = builder.concat([name for name, _ in goals])
    return _hyper_layer(builder, x, size, goal, sum(width for _, width in goals), graph.hyper)


def _hyper_layer(
    builder: GraphBuilder, x: str, size: int, goal: str, goal_size: int, layer: HyperLayer
) -> tuple[str, int]:
    """Features x [batch, size] → Swish(x · W(goal) + bias) [batch, out]."""
    for index, dense in enumerate(layer.encoder):
        goal, goal_size = builder.dense(goal, goal_size, dense, f"goal.{index}")
        goal = builder.activation(goal, "swish")
    goal = layer_norm(builder, goal, layer.epsilon, axis=1)
    out = len(layer.bias)
    flat, generated = builder.dense(goal, goal_size, layer.generator, "goal.generator")
    if generated != size * out:
        raise ExportError(
            f"export: goal.generator gives {generated} numbers, but {size} x {out} weights are "
            "wanted"
        )
    inner = (size, out) if layer.layout == "in_out" else (out, size)
    shape = builder.constant(np.array([-1, *inner]), "goal.shape")
    weights = builder.node("Reshape", [flat, shape])
    axis = 1 if layer.layout == "in_out" else 2
    row = builder.node("Unsqueeze", [x], axes=[axis])
    product = builder.node("MatMul", [row, weights] if axis == 1 else [weights, row])
    bias = builder.weight(layer.bias, "goal.bias", (out,))
    y = builder.node("Add", [builder.node("Squeeze", [product], axes=[axis]), bias])
    return builder.activation(y, "swish"), out
