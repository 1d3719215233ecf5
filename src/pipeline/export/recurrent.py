"""The part of the graph that remembers: from memory and body features to features and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pipeline.arrays import FloatArray
    from pipeline.export.builder import GraphBuilder
    from pipeline.export.description import Lstm

# ONNX wants the gates in the order input, output, forget, cell; a description has them in the
# order input, forget, cell, output.
_GATES = (0, 3, 1, 2)


def recurrent_layer(
    builder: GraphBuilder, body: str, size: int, lstm: Lstm
) -> tuple[str, int, str]:
    """Add `recurrent_in` and an LSTM on body features [batch, size].

    The memory vector is the hidden state followed by the cell state. A sequence has one step; ONNX
    wants the sequence as the first axis.

    Returns:
        Features [batch, H], H, and the name of the new memory [batch, 1, 2 H], not yet declared.
    """
    H = lstm.memory_size // 2
    weights = [
        builder.weight(_reordered(lstm.input_weight)[None], "memory.weight", (1, 4 * H, size)),
        builder.weight(_reordered(lstm.recurrent_weight)[None], "memory.recurrent", (1, 4 * H, H)),
        builder.weight(_biases(lstm)[None], "memory.bias", (1, 8 * H)),
    ]
    memory = builder.input("recurrent_in", (1, 2 * H))
    memory = builder.node("Transpose", [memory], perm=[1, 0, 2])
    hidden = builder.node("Slice", [memory], axes=[2], starts=[0], ends=[H])
    cell = builder.node("Slice", [memory], axes=[2], starts=[H], ends=[2 * H])
    x = builder.node("Unsqueeze", [body], axes=[0])
    outputs = ("memory.outputs", "memory.hidden", "memory.cell")
    builder.nodes("LSTM", [x, *weights, "", hidden, cell], outputs, hidden_size=H)
    features = builder.node("Squeeze", [outputs[0]], axes=[0, 1])
    joined = builder.node("Concat", outputs[1:], axis=2)
    return features, H, builder.node("Transpose", [joined], "recurrent_out", perm=[1, 0, 2])


def _biases(lstm: Lstm) -> FloatArray:
    """[8 H]: those of the input, then those of the hidden state."""
    return np.concatenate((_reordered(lstm.input_bias), _reordered(lstm.recurrent_bias)))


def _reordered(rows: FloatArray) -> FloatArray:
    """[4 H, ...] with the gates as ONNX wants them."""
    gates = np.split(np.asarray(rows, dtype=np.float32), 4)
    result: FloatArray = np.concatenate([gates[index] for index in _GATES])
    return result
