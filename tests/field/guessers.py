"""Policies for `Guess` in the layouts of several ML-Agents releases, node by node."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

MARGIN = 1.0
"""Difference of the two log-probabilities: the right choice has a probability of 0.731."""


def guesser(path: Path, *, version: int = 3, deterministic: bool = True) -> Path:
    """Write the policy that takes the right choice of two with a probability of 0.731."""
    seen = "obs_0" if version == 3 else "vector_observation"
    constants = {
        "version_number": [float(version)],
        "memory_size": [0.0],
        "discrete_action_output_shape": [[2.0]] if version == 3 else [2.0],
    }
    weight = np.array([[-MARGIN / 2, MARGIN / 2]], np.float32)
    logits = "discrete_actions" if version == 2 else "logits"
    nodes = [
        helper.make_node("MatMul", [seen, "weight"], ["scores"]),
        helper.make_node("Mul", ["scores", "action_masks"], [logits]),
    ]
    outputs = {"discrete_actions": (TensorProto.FLOAT, 2)}
    if version == 3:
        outputs = {"discrete_actions": (TensorProto.INT64, 1)}
        nodes.append(
            helper.make_node("Multinomial", [logits], ["discrete_actions"], dtype=7, sample_size=1)
        )
        if deterministic:
            best = "deterministic_discrete_actions"
            outputs[best] = outputs["discrete_actions"]
            nodes.append(helper.make_node("ArgMax", [logits], [best], axis=1, keepdims=1))
    arrays = {name: np.array(value, np.float32) for name, value in constants.items()}
    graph = helper.make_graph(
        nodes,
        "guesser",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
            for name, size in ((seen, 1), ("action_masks", 2))
        ],
        [
            *(
                helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
                for name, array in arrays.items()
            ),
            *(
                helper.make_tensor_value_info(name, kind, ["batch", size])
                for name, (kind, size) in outputs.items()
            ),
        ],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()]
        + [numpy_helper.from_array(weight, "weight")],
    )
    opset = [helper.make_opsetid("", 9)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=4), path)
    return path
