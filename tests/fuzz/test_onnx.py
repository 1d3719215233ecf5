"""ONNX files: what `pipeline onnx check` says of them, and what evaluation does with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import reference
from fuzzing.frame import command, fuzz
from hypothesis import strategies as st
from steps import decision_steps

from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import build_model

from .mutations import mutated

_KINDS: tuple[dict[str, Any], ...] = (
    {"continuous": 2},
    {"branches": (2, 3), "normalize": False},
    {"continuous": 1, "branches": (2,), "squash": True, "hidden": 4},
    {"continuous": 2, "memory": 8, "hidden": 4},
    {"continuous": 1, "entities": ((3, 2),), "hidden": 4},
    {"branches": (2,), "visual": "match3", "hidden": 4},
)
_NAMES = st.one_of(
    st.sampled_from(("obs_0", "obs_1", "obs_9", "obs_x", "obs_-1", "obs_\u0663", "action_masks")),
    st.sampled_from(("", "continuous_actions", "discrete_actions", "recurrent_in", "action", "x")),
    st.sampled_from(("version_number", "memory_size", "continuous_action_output_shape")),
    st.sampled_from(("discrete_action_output_shape", "recurrent_out", "action_output_shape")),
)
_OPERATORS = st.one_of(
    st.sampled_from(("Identity", "Constant", "Reshape", "Gather", "Tile", "ConstantOfShape")),
    st.sampled_from(("Expand", "If", "Loop", "Scan", "MatMul", "Concat", "Split", "Squeeze")),
    st.sampled_from(("Nothing", "Multinomial", "Cast")),
)
_SIZES = st.sampled_from((0, 1, 2, 3, -1, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1))


@cache
def _graph(kind: int) -> tuple[Any, Any, onnx.ModelProto]:
    graph = reference.policy(**_KINDS[kind])
    return graph, reference.observations(graph, 3), build_model(graph)


def _spoil_node(draw: Any, model: onnx.ModelProto) -> None:
    nodes = model.graph.node
    node = nodes[draw(st.integers(0, len(nodes) - 1))]
    kind = draw(st.integers(0, 7))
    names = node.input if draw(st.booleans()) else node.output
    if kind == 0:
        node.op_type = draw(_OPERATORS)
    elif kind == 1 and names:
        names[draw(st.integers(0, len(names) - 1))] = draw(_NAMES)
    elif kind == 2:
        del names[:]
    elif kind == 3:
        names.append(draw(_NAMES))
    elif kind == 4:
        node.domain = draw(st.sampled_from(("x", "ai.onnx.ml", "com.microsoft")))
    elif kind == 5:
        del node.attribute[:]
    elif kind == 6:
        nodes.add().CopyFrom(node)
    else:
        nodes.remove(node)


def _spoil_tensor(draw: Any, model: onnx.ModelProto) -> None:
    tensors = [
        *model.graph.initializer,
        *(a.t for node in model.graph.node for a in node.attribute if a.HasField("t")),
    ]
    tensor = tensors[draw(st.integers(0, len(tensors) - 1))]
    kind = draw(st.integers(0, 6))
    if kind == 0:
        tensor.dims.append(draw(_SIZES))
    elif kind == 1 and tensor.dims:
        tensor.dims[0] = draw(_SIZES)
    elif kind == 2:
        tensor.data_type = draw(st.integers(-1, 25))
    elif kind == 3:
        tensor.raw_data = draw(st.binary(max_size=12))
    elif kind == 4:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = draw(st.sampled_from(("a.onnx", "/etc/passwd", "../../etc/passwd", "", "a\0b")))
        tensor.external_data.add(key="location", value=place)
    elif kind == 5:
        value = draw(st.sampled_from((np.nan, np.inf, -1.0, 3e38, 2.0, 4.0)))
        name = tensor.name
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([value], np.float32), name))
    else:
        tensor.name = draw(_NAMES)


def _spoil_declaration(draw: Any, model: onnx.ModelProto) -> None:
    declared = draw(st.sampled_from((model.graph.input, model.graph.output)))
    value = declared[draw(st.integers(0, len(declared) - 1))] if declared else declared.add()
    kind = draw(st.integers(0, 5))
    if kind == 0:
        value.name = draw(_NAMES)
    elif kind == 1:
        value.type.tensor_type.elem_type = draw(st.integers(-1, 25))
    elif kind == 2:
        value.type.tensor_type.shape.dim.add(dim_value=draw(_SIZES))
    elif kind == 3:
        del value.type.tensor_type.shape.dim[:]
    elif kind == 4:
        value.ClearField("type")
    else:
        declared.remove(value)


def _spoil_model(draw: Any, model: onnx.ModelProto) -> None:
    kind = draw(st.integers(0, 3))
    if kind == 0:
        version = draw(st.sampled_from((-1, 0, 7, 9, 13, 99, 1 << 40)))
        model.opset_import.add(domain=draw(st.sampled_from(("", "ai.onnx", "x"))), version=version)
    elif kind == 1:
        del model.opset_import[:]
    elif kind == 2:
        model.ir_version = draw(st.sampled_from((0, 3, 99, -1)))
    else:
        model.graph.ClearField(draw(st.sampled_from(("node", "initializer", "input", "output"))))


@st.composite
def _models(draw: Any) -> tuple[int, bytes]:
    """A policy, of which a few parts are changed, and which kind of policy it is."""
    kind = draw(st.integers(0, len(_KINDS) - 1))
    model = onnx.ModelProto()
    model.CopyFrom(_graph(kind)[2])
    for _ in range(draw(st.integers(0, 3))):
        spoil = draw(
            st.sampled_from((_spoil_node, _spoil_tensor, _spoil_declaration, _spoil_model))
        )
        if model.graph.node and model.graph.initializer:
            spoil(draw, model)
    data = model.SerializeToString()
    return kind, draw(mutated(st.just(data), most=3)) if draw(st.booleans()) else data


def _size(example: tuple[int, bytes]) -> int:
    return len(example[1])


@fuzz(_models(), examples=60, size=_size)
def test_models_keep_the_contract_or_are_refused(
    example: tuple[int, bytes], folder: Path
) -> object:
    (folder / "a.onnx").write_bytes(example[1])
    return command("onnx", "check", "a.onnx")


@fuzz(_models(), examples=60, size=_size)
def test_models_act_or_are_refused(example: tuple[int, bytes], folder: Path) -> None:
    kind, data = example
    (folder / "a.onnx").write_bytes(data)
    graph, obs, _ = _graph(kind)
    branches = graph.spec.action_spec.discrete_branches
    masks = [np.zeros((3, size), np.bool_) for size in branches] or None
    policy = OnnxPolicy(folder / "a.onnx", seed=1)
    for deterministic in (False, True):
        policy.act(decision_steps(obs, range(3), masks=masks), deterministic)
