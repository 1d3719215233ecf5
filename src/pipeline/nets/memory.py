"""The recurrent layer of a policy or critic: an agent's memory from step to step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipeline.nets.onnx_graph import OnnxGraph
from pipeline.settings.trainer.schema import NetworkSettings

N_GATES = 4
# torch keeps the gates in the order input, forget, cell, output.
FORGET_GATE = 1
# ONNX keeps the gates in the order input, output, forget, cell.
_ONNX_GATES = (0, 3, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """S sequences of rows, B rows in all, and the memory at the start of each sequence."""

    memory: Tensor
    """[S, M] memory before each sequence's first row."""
    lengths: Tensor
    """int64 [S] number of rows of each sequence, on the CPU; rows are ordered by sequence."""

    def split(self, n: int) -> tuple[SequenceState, SequenceState]:
        """Return the sequences with the first `n` numbers of each memory, and with the rest."""
        first, rest = self.memory[:, :n], self.memory[:, n:]
        return replace(self, memory=first), replace(self, memory=rest)


class Memory(nn.Module):
    """An LSTM of one layer (Hochreiter and Schmidhuber 1997), with its state in one memory vector.

    The memory vector [M] is the hidden state followed by the cell state, M/2 numbers each. Each
    gate's weights are Xavier uniform; biases are 0, except the forget gate's, which are 1 in
    both of torch's bias vectors, so that early gradients reach far back (Gers et al. 2000).
    """

    def __init__(self, n_in: int, memory_size: int) -> None:
        super().__init__()
        self.memory_size = memory_size
        # `memory_size` counts hidden and cell state together, as in ML-Agents.
        self.output_size = H = memory_size // 2
        self.lstm = nn.LSTM(n_in, H, batch_first=True)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                for gate in range(N_GATES):
                    nn.init.xavier_uniform_(parameter.data[gate * H : (gate + 1) * H])
            else:
                nn.init.zeros_(parameter)
                parameter.data[FORGET_GATE * H : (FORGET_GATE + 1) * H] = 1.0
        # The order is: input weights, recurrent weights, input biases, recurrent biases.
        self._weights = tuple(self.lstm.parameters())

    def forward(self, x: Tensor, sequences: SequenceState) -> Tensor:
        """Return outputs [B, M/2] for rows x [B, n_in], ordered by sequence.

        Shorter sequences are padded at their end inside this layer only. Padding has no effect: an
        LSTM reads only earlier rows, and outputs of padding are not returned.
        """
        n, lengths = len(sequences.memory), sequences.lengths
        T = int(lengths.max())
        # cuDNN refuses states that are not contiguous; they are [1, S, M/2].
        halves = torch.split(sequences.memory.unsqueeze(0), self.output_size, dim=2)
        state = tuple(half.contiguous() for half in halves)
        # If all sequences have the same length, a view of x is enough and nothing is padded.
        if n * T == len(x):
            outputs: Tensor = self.lstm(x.view(n, T, -1), state)[0].reshape(len(x), -1)
            return outputs
        # `rows` has the places of the rows in the padded tensor [n T], sequence after sequence.
        rows = (torch.arange(T) < lengths[:, None]).flatten().nonzero().squeeze(1).to(x.device)
        padded = x.new_zeros(n * T, x.shape[1]).index_copy(0, rows, x)
        unpadded: Tensor = self.lstm(padded.view(n, T, -1), state)[0].reshape(n * T, -1)[rows]
        return unpadded

    def step(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [N, n_in] and memory [N, M] of N agents to outputs [N, M/2] and new memory."""
        state = torch.split(memory, self.output_size, dim=1)
        # For one step `lstm_cell` is faster than nn.LSTM, which is made for whole sequences.
        hidden, cell = torch.lstm_cell(x, state, *self._weights)
        return hidden, torch.cat((hidden, cell), dim=1)

    def to_onnx(self, graph: OnnxGraph, x: str) -> str:
        """Add the operators of `step` to `graph`; return the name of the layer's output.

        The operators read the model's input `recurrent_in` and write the output `recurrent_out`,
        both of which the caller declares. A sequence has one step in the model; steps are the first
        axis of ONNX's LSTM.
        """
        H = self.output_size
        from_input, from_hidden, *biases = (
            torch.cat([rows.chunk(N_GATES)[gate] for gate in _ONNX_GATES]) for rows in self._weights
        )
        weights = [
            # ONNX has a leading axis for directions, and both biases in one tensor.
            graph.weight(from_input[None], "memory.weight"),
            graph.weight(from_hidden[None], "memory.recurrent"),
            graph.weight(torch.cat(biases)[None], "memory.bias"),
        ]
        memory = graph.node("Transpose", ["recurrent_in"], perm=[1, 0, 2])
        hidden = graph.node("Slice", [memory], axes=[2], starts=[0], ends=[H])
        cell = graph.node("Slice", [memory], axes=[2], starts=[H], ends=[2 * H])
        x = graph.node("Unsqueeze", [x], axes=[0])
        outputs = ("memory.outputs", "memory.hidden", "memory.cell")
        # The empty name leaves out the optional input `sequence_lens`, which follows the biases:
        # https://onnx.ai/onnx/operators/onnx__LSTM.html.
        graph.nodes("LSTM", [x, *weights, "", hidden, cell], outputs, hidden_size=H)
        features = graph.node("Squeeze", [outputs[0]], axes=[0, 1])
        joined = graph.node("Concat", outputs[1:], axis=2)
        graph.node("Transpose", [joined], "recurrent_out", perm=[1, 0, 2])
        return features


def memory_for(settings: NetworkSettings, n_in: int) -> Memory | None:
    """Return the recurrent layer for features [B, n_in]; None if the settings have no `memory`."""
    return None if settings.memory is None else Memory(n_in, settings.memory.memory_size)
