"""Changed ONNX files in `pipeline onnx check` and in evaluation."""

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

from .mutations import mutated, spoil

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


_VALUES = {
    "op_type": _OPERATORS,
    **dict.fromkeys(("input", "output", "name"), _NAMES),
    "domain": st.sampled_from(("", "x", "ai.onnx", "ai.onnx.ml", "com.microsoft")),
    **dict.fromkeys(("dims", "dim_value"), _SIZES),
    **dict.fromkeys(("data_type", "elem_type"), st.integers(-1, 25)),
    "raw_data": st.one_of(
        st.binary(max_size=12),
        st.sampled_from((np.nan, np.inf, -1.0, 3e38, 2.0, 4.0)).map(
            lambda number: np.float32(number).tobytes()
        ),
    ),
    "data_location": st.sampled_from((0, 1)),
    "type": st.integers(0, 14),
    "key": st.just("location"),
    "value": st.sampled_from(("a.onnx", "/etc/passwd", "../../etc/passwd", "", "a\0b")),
    "version": st.sampled_from((-1, 0, 7, 9, 13, 99, 1 << 40)),
    "ir_version": st.sampled_from((0, 3, 99, -1)),
}


def _spoil(draw: Any, model: onnx.ModelProto) -> None:
    """Change an operator, a tensor, a declared input or output, or the model's fields."""
    graph = model.graph
    parts = draw(st.sampled_from((graph.node, graph.initializer, graph.input, graph.output)))
    kind = draw(st.integers(0, 7))
    if kind <= 1 or not parts:
        spoil(draw, draw(st.sampled_from((model, graph))), _VALUES)
    elif kind == 2:
        parts.remove(draw(st.sampled_from(list(parts))))
    else:
        spoil(draw, draw(st.sampled_from(list(parts))), _VALUES)


@st.composite
def _models(draw: Any) -> tuple[int, bytes]:
    """Return the kind of a policy, and its model with a few changes."""
    kind = draw(st.integers(0, len(_KINDS) - 1))
    model = onnx.ModelProto()
    model.CopyFrom(_graph(kind)[2])
    for _ in range(draw(st.integers(0, 3))):
        _spoil(draw, model)
    data = model.SerializeToString()
    return kind, draw(mutated(st.just(data), most=3)) if draw(st.booleans()) else data


@fuzz(_models(), examples=60)
def test_changed_onnx_models_pass_the_check_or_are_refused(
    example: tuple[int, bytes], folder: Path
) -> object:
    (folder / "a.onnx").write_bytes(example[1])
    return command("onnx", "check", "a.onnx")


@fuzz(_models(), examples=60)
def test_changed_onnx_policies_choose_actions_or_are_refused(
    example: tuple[int, bytes], folder: Path
) -> None:
    kind, data = example
    (folder / "a.onnx").write_bytes(data)
    graph, obs, _ = _graph(kind)
    branches = graph.spec.action_spec.discrete_branches
    masks = [np.zeros((3, size), np.bool_) for size in branches] or None
    policy = OnnxPolicy(folder / "a.onnx", seed=1)
    for deterministic in (False, True):
        policy.act(decision_steps(obs, range(3), masks=masks), deterministic)
