"""Publishing a policy: record its actions, write a file, check the file, move it into place.

The model follows the v3 layout (package 2.0 and later): opset 9, named constants for the loader,
sampled and deterministic actions. It is written node by node instead of traced, so that equal
weights give equal bytes with any version of torch and ONNX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files
from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.core.specs import BehaviorSpec, scales_of
from pipeline.errors import ExportError, brief
from pipeline.export.contract import NEWEST_VERSION, publishing_findings
from pipeline.export.layout import MEANING, SPACES_KEY, TensorInfo, describe, load
from pipeline.export.policy import create_session
from pipeline.nets.onnx_graph import OnnxGraph

if TYPE_CHECKING:
    import onnx
    from torch import Tensor

    from pipeline.algos.policy import Policy

CONTINUOUS, DISCRETE = "deterministic_continuous_actions", "deterministic_discrete_actions"
RECURRENT_IN, RECURRENT_OUT = "recurrent_in", "recurrent_out"

# torch and ONNX Runtime add float32 numbers in different orders. Their results agree to about this
# relative tolerance, or to about `ROUNDINGS` times the policy's own rounding if that is larger.
TOLERANCE = 1e-5
ROUNDINGS = 4
# With this many rows, every choice of a usual branch is the only allowed choice in some row.
MASK_DRAWS = 1000
# Two sizes of batches: one agent, and a number that divides no other size in a model, so that a
# fixed batch axis is detected.
_BATCH_SIZES = (1, 7)
_CHUNK = 125
_FLOATS = {CONTINUOUS: "the trained policy's action", RECURRENT_OUT: "the trained policy's memory"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """Facts about a published file, without times and paths: equal policies give equal reports."""

    sha256: str
    """SHA-256 of the file."""
    size: int
    """Size of the file in bytes."""
    opset: int
    """Version of the default operator domain."""
    ir_version: int
    """Version of the file format."""
    inputs: dict[str, TensorInfo]
    outputs: dict[str, TensorInfo]
    rows: int
    """Number of recorded observations that were compared."""
    max_continuous_error: float
    """Largest difference from the trained policy's actions; 0.0 without continuous actions."""
    max_memory_error: float
    """Largest difference from the trained policy's memory; 0.0 without memory."""
    discrete_ties: int
    """Number of choices that differ because two logits are equal within the tolerance."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recording:
    """N rows of inputs for the trained policy, and the policy's deterministic actions."""

    feeds: dict[str, AnyArray]
    """Arrays [N, ...] by the name of the model's input. With memory the rows are successive steps
    of one agent, with an empty memory at the first step."""
    expected: dict[str, AnyArray]
    """Arrays [N, ...] by the name of the model's deterministic output."""
    rounding: dict[str, float]
    """Largest difference between the policy's results in float32 and in float64, by the name of the
    continuous output or of the logits."""


def record(
    policy: Policy, obs: Sequence[FloatArray], action_masks: FloatArray | None = None
) -> Recording:
    """Return the policy's deterministic actions for given observations.

    Args:
        policy: a policy on the CPU.
        obs: [N, *shape] per observation, N at least 1; with memory the rows are successive steps of
            one agent.
        action_masks: [N, sum of branch sizes], 1 = allowed; None allows every choice.

    Raises:
        ExportError: The observations or the masks do not fit the policy.
    """
    import torch

    from pipeline.algos.rows import tensors

    shapes, lengths = [spec.shape for spec in policy.spec.observation_specs], set(map(len, obs))
    if [values.shape[1:] for values in obs] != shapes or len(lengths) != 1 or 0 in lengths:
        raise ExportError(
            f"export: recorded observations have shapes {[list(array.shape) for array in obs]}; "
            "they must be arrays [rows, *shape] of the shapes "
            f"{[list(shape) for shape in shapes]} with the same number of rows, at least one; "
            "record them with this behavior"
        )
    (n_rows,), actions = lengths, policy.spec.action_spec
    feeds = {f"obs_{i}": np.asarray(values, dtype=np.float32) for i, values in enumerate(obs)}
    inputs, allowed = tensors(list(feeds.values()), torch.device("cpu")), None
    if actions.discrete_size:
        size = sum(actions.discrete_branches)
        masks = np.ones((n_rows, size)) if action_masks is None else action_masks
        if masks.shape != (n_rows, size):
            raise ExportError(
                f"export: the recorded action_masks have the shape {list(masks.shape)}, not "
                f"[{n_rows}, {size}]; record them with this behavior"
            )
        feeds["action_masks"] = masks.astype(np.float32)
        allowed = torch.from_numpy(masks > 0)
    outputs = _outputs(policy, inputs, allowed)
    # The outputs of a copy in float64 show the rounding of float32.
    exact = _outputs(deepcopy(policy).double(), [tensor.double() for tensor in inputs], allowed)
    # Choices are not rounded; the logits tell how close the choices were.
    rounding = {
        name: float(np.abs(values - exact[name]).max())
        for name, values in outputs.items()
        if name != DISCRETE
    }
    names = (CONTINUOUS, RECURRENT_OUT, DISCRETE)
    expected = {name: outputs[name] for name in names if name in outputs}
    if policy.memory_size:
        # Each step's memory is the output of the step before; the first step has zeros.
        before = np.zeros_like(expected[RECURRENT_OUT][:1])
        feeds[RECURRENT_IN] = np.concatenate((before, expected[RECURRENT_OUT][:-1]))
    return Recording(feeds=feeds, expected=expected, rounding=rounding)


def _outputs(
    policy: Policy, inputs: Sequence[Tensor], allowed: Tensor | None
) -> dict[str, AnyArray]:
    """Return the policy's outputs, including logits, by the names of the graph's tensors."""
    import torch

    outputs, heads = {}, policy.actor.heads
    with torch.no_grad():
        obs = policy.normalizers(inputs)
        if policy.memory_size:
            hidden, outputs[RECURRENT_OUT] = _carried(policy, obs)
        else:
            hidden = policy.actor(obs)
        sample = heads.choose(hidden, allowed, None)
        if policy.spec.action_spec.continuous_size:
            outputs[CONTINUOUS] = sample.in_range
        if policy.spec.action_spec.discrete_size:
            outputs[DISCRETE] = sample.discrete
        outputs |= {logits_of(index): branch(hidden) for index, branch in enumerate(heads.branches)}
    return {name: values.numpy() for name, values in outputs.items()}


def logits_of(branch: int) -> str:
    """Return the name of the graph's tensor with the logits of a discrete branch."""
    return f"branch.{branch}.out"


def _carried(policy: Policy, obs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the hidden vectors [N, H] and the memories [N, 1, M] after an agent's N steps."""
    import torch

    memory = obs[0].new_zeros(1, policy.memory_size)
    outputs, memories = [], []
    for row in range(len(obs[0])):
        hidden, memory = policy.actor.step([values[row : row + 1] for values in obs], memory)
        outputs.append(hidden)
        memories.append(memory)
    return torch.cat(outputs), torch.stack(memories)


def build_model(policy: Policy) -> onnx.ModelProto:
    """Return the ONNX model of a policy.

    Raises:
        ExportError: The behavior has no actions, or a weight is not finite.
    """
    actions = policy.spec.action_spec
    if not actions.continuous_size and not actions.discrete_size:
        raise ExportError("export: the behavior has no actions; there is nothing to export")
    graph = OnnxGraph()
    specs = enumerate(policy.spec.observation_specs)
    # `inputs` is a generator, so that each input is declared when the encoder reads it. This fixes
    # the order of names in the file's bytes.
    inputs = (graph.input(f"obs_{index}", obs.shape) for index, obs in specs)
    hidden = policy.actor.to_onnx(graph, policy.normalizers.to_onnx(graph, inputs))
    graph.constant_output("version_number", [NEWEST_VERSION])
    graph.constant_output("memory_size", [policy.memory_size])
    policy.actor.heads.to_onnx(graph, hidden)
    if policy.memory_size:
        # The memory is declared after the masks, which the heads declare, as in ML-Agents' exports.
        graph.input(RECURRENT_IN, (1, policy.memory_size))
        graph.output(RECURRENT_OUT, np.float32, (1, policy.memory_size))
    return graph.model("policy")


def model_bytes(model: onnx.ModelProto) -> bytes:
    """Return the bytes of a model, which are equal for equal models."""
    # Without `deterministic`, protobuf does not guarantee the order of map entries.
    return bytes(model.SerializeToString(deterministic=True))


def meanings(spec: BehaviorSpec) -> dict[str, str]:
    """Return metadata with each sensor's name, and the ranges from which numbers were scaled."""
    said: dict[str, list[str]] = {}
    for scale in scales_of(spec):
        tensor, _, text = scale.partition(": ")
        said.setdefault(tensor, []).append(text)
    texts = {}
    for index, obs in enumerate(spec.observation_specs):
        # Unity does not describe the scale of images, and sends PNGs or numbers from 0 to 1.
        unsaid = ["0 to 1; bytes were divided by 255"] if len(obs.shape) == 3 else []
        name = f"obs_{index}"
        texts[name] = [brief(obs.name) or "no name", *said.get(name, unsaid)]
    if spec.action_spec.continuous_size:
        texts["continuous_actions"] = said.get("continuous_actions", ["-1 to 1, not scaled"])
    if spec.action_spec.discrete_size and "discrete_actions" in said:
        texts["discrete_actions"] = said["discrete_actions"]
    known = {MEANING + tensor: "; ".join(parts) for tensor, parts in texts.items()}
    if "spaces" in said:
        known[SPACES_KEY] = said["spaces"][0]
    return known


def publish(
    policy: Policy, target: Path, *, recording: Recording, metadata: Mapping[str, str] | None = None
) -> ExportReport:
    """Write a policy to `target` if the file passes all checks; otherwise write nothing.

    The `metadata`, which Unity does not read, also gets the meaning of inputs and outputs.

    The file must pass the loader's checks and the stricter rules, give the trained policy's
    deterministic actions for every recorded observation with any batch size, and never choose a
    forbidden action. A recurrent policy must also give these actions step by step, with the memory
    that the file returned at the previous step.

    Raises:
        ExportError: The policy cannot be exported, or the file fails a check; the message gives the
            output, the row and both values.
        OSError: The file cannot be written.
    """
    model = build_model(policy)
    # The metadata is sorted, because its order is part of the file's bytes.
    for key, value in sorted(({**meanings(policy.spec), **(metadata or {})}).items()):
        model.metadata_props.add(key=key, value=value)
    content = model_bytes(model)
    with files.whole(target) as temporary:
        temporary.write_bytes(content)
        # The checks read the written file, because that is the file that users load.
        description = describe(temporary)
        findings = publishing_findings(temporary, policy.spec)
        if findings:
            listed = "; ".join(str(finding) for finding in findings)
            raise ExportError(f"{target}: the exported model breaks rules for ONNX files: {listed}")
        check = _Check(policy, temporary, target, recording)
        ties = check.same_actions()
        check.masks_hold()
        digest = files.sha256_of(temporary)
    return ExportReport(
        sha256=digest,
        size=len(content),
        opset=description.opset,
        ir_version=description.ir_version,
        inputs=description.inputs,
        outputs=description.outputs,
        rows=check.n_rows,
        max_continuous_error=check.errors[CONTINUOUS],
        max_memory_error=check.errors[RECURRENT_OUT],
        discrete_ties=ties,
    )


class _Check:
    """Compares the written file with the trained policy's recorded actions."""

    def __init__(self, policy: Policy, path: Path, target: Path, recording: Recording) -> None:
        self._target = target
        self._branches = policy.spec.action_spec.discrete_branches
        self._feeds, self._expected = recording.feeds, recording.expected
        self._rounding = recording.rounding
        self.n_rows = len(self._feeds["obs_0"])
        # If a choice differs, the logits show whether it is wrong or equally likely.
        self._logits = [logits_of(index) for index in range(len(self._branches))]
        self.errors = dict.fromkeys(_FLOATS, 0.0)
        self._session = create_session(load(path), 0, self._logits)

    def same_actions(self) -> int:
        """Compare the outputs for all rows; return the number of ties (see `_discrete_ties`).

        A recurrent policy is also compared step by step.
        """
        ties = 0
        for rows, is_first_pass in self._batches():
            feeds = {name: values[rows] for name, values in self._feeds.items()}
            n_ties = self._compare(self._run(feeds), rows, feeds)
            # Ties are counted once per row, although small batches repeat rows.
            ties += n_ties if is_first_pass else 0
        if RECURRENT_IN not in self._feeds:
            return ties
        # Each step gets the memory that the model returned at the previous step. With the recorded
        # memories, an error that grows from step to step would not be seen.
        memory = np.zeros_like(self._feeds[RECURRENT_IN][:1])
        for row in range(self.n_rows):
            feeds = {name: values[row : row + 1] for name, values in self._feeds.items()}
            feeds[RECURRENT_IN] = memory
            result = self._run(feeds)
            self._compare(result, np.array([row]), feeds)
            memory = result[RECURRENT_OUT]
        return ties

    def _run(self, feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        names = [*self._expected, *self._logits]
        return dict(zip(names, self._session.run(names, feeds), strict=True))

    def _compare(
        self, result: dict[str, AnyArray], rows: AnyArray, feeds: dict[str, AnyArray]
    ) -> int:
        """Refuse outputs that differ from the recorded outputs; return the number of ties."""
        for name in (name for name in _FLOATS if name in self._expected):
            expected = self._expected[name][rows].reshape(len(rows), -1)
            actual = result[name].reshape(len(rows), -1)
            error = np.abs(actual - expected)
            # The limit is relative for large numbers, and absolute near 0.
            limit = np.maximum(TOLERANCE * np.abs(expected), self._least(name))
            # The comparison is negated, because `error > limit` would be False for NaN.
            for row, column in np.argwhere(~(error <= limit)):
                values = actual[row, column], expected[row, column]
                self._fail(name, int(rows[row]), int(column), *values, _FLOATS[name])
            self.errors[name] = max(self.errors[name], float(error.max()))
        if DISCRETE not in self._expected:
            return 0
        return self._discrete_ties(result, rows, feeds["action_masks"])

    def masks_hold(self) -> None:
        """Check that the only allowed action of a branch is always chosen."""
        names = ["discrete_actions", DISCRETE]
        for start in range(0, MASK_DRAWS if self._branches else 0, _CHUNK):
            draws = np.arange(start, start + _CHUNK)
            rows = draws % self.n_rows
            # Each choice in turn is the only allowed one, so a model that ignores masks fails.
            allowed = np.stack([draws % size for size in self._branches], axis=1)
            masks = [
                np.eye(size, dtype=np.float32)[choices]
                for size, choices in zip(self._branches, allowed.T, strict=True)
            ]
            feeds = {name: values[rows] for name, values in self._feeds.items()}
            feeds["action_masks"] = np.concatenate(masks, axis=1)
            for name, actions in zip(names, self._session.run(names, feeds), strict=True):
                for row, branch in np.argwhere(actions != allowed):
                    values = actions[row, branch], allowed[row, branch]
                    what = "the only action that the mask allows"
                    self._fail(name, int(rows[row]), int(branch), *values, what)

    def _batches(self) -> Iterator[tuple[AnyArray, bool]]:
        """Yield row numbers of large chunks (True), then of small batches of first rows (False)."""
        for start in range(0, self.n_rows, _CHUNK):
            yield np.arange(start, min(start + _CHUNK, self.n_rows)), True
        for size in _BATCH_SIZES:
            for start in range(0, min(self.n_rows, 8 * size), size):
                # Row numbers wrap around, so that few recorded rows fill a batch.
                yield np.arange(start, start + size) % self.n_rows, False

    def _least(self, tensor: str) -> float:
        """Return the least tolerance of a tensor, which allows for sums in another order."""
        return max(TOLERANCE, ROUNDINGS * self._rounding[tensor])

    def _discrete_ties(self, result: dict[str, AnyArray], rows: AnyArray, masks: FloatArray) -> int:
        """Return the number of choices that differ because of a tie; refuse other differences.

        In a tie, the logits of both choices are equal up to rounding.
        """
        expected = self._expected[DISCRETE][rows]
        wrong = np.argwhere(result[DISCRETE] != expected)
        starts = np.cumsum((0, *self._branches))
        for row, branch in wrong:
            actual, chosen = int(result[DISCRETE][row, branch]), int(expected[row, branch])
            logits = result[self._logits[branch]][row]
            allowed = masks[row, starts[branch] : starts[branch + 1]]
            largest = float(np.abs(logits).max())
            limit = max(TOLERANCE * largest, self._least(self._logits[branch]))
            # A forbidden choice is never a tie, whatever its logit.
            is_tie = 0 <= chosen < len(logits) and allowed[chosen] > 0
            if not is_tie or abs(logits[actual] - logits[chosen]) > limit:
                what = "the trained policy's choice"
                self._fail(DISCRETE, int(rows[row]), int(branch), actual, chosen, what)
        return len(wrong)

    def _fail(
        self, output: str, row: int, column: int, actual: Any, expected: Any, label: str
    ) -> None:
        raise ExportError(
            f"{self._target}: not written: output {output}, row {row}, column {column} is "
            f"{actual}, but {label} is {expected}; the written graph does not compute the same as "
            "the network"
        )
