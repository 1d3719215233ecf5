"""Publish a policy: write it, prove that it acts as the trained policy does, put it in place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files
from pipeline.errors import ExportError
from pipeline.export.graph import build_model, model_bytes
from pipeline.export.layout import describe, load
from pipeline.export.policy import create_session
from pipeline.export.rules import publishing_findings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.arrays import AnyArray, FloatArray, IntArray
    from pipeline.export.description import PolicyGraph
    from pipeline.export.layout import TensorInfo

TOLERANCE = 1e-5
MASK_DRAWS = 1000
_BATCH_SIZES = (1, 7)
_CHUNK = 125
CONTINUOUS = "deterministic_continuous_actions"
RECURRENT_IN, RECURRENT_OUT = "recurrent_in", "recurrent_out"
_FLOATS = {
    CONTINUOUS: "the trained policy's action",
    RECURRENT_OUT: "what the trained policy remembers",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recording:
    """What the trained policy saw and what it would do, deterministically."""

    obs: Sequence[FloatArray]
    """One [N, *shape] per observation, in wire order; N at least 1."""
    continuous: FloatArray | None = None
    """[N, n] mean actions in the environment's range; None without continuous actions."""
    discrete: IntArray | None = None
    """[N, branches] most probable choices; None without discrete actions."""
    action_masks: FloatArray | None = None
    """[N, Σ branch sizes], 1 = allowed; None allows everything."""
    memory: FloatArray | None = None
    """[N + 1, M] of a recurrent policy, the rows then being successive steps of one agent: zeros,
    what it remembers after the first row, and so on; None without memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was published. Equal policies give equal reports: no times, no paths."""

    sha256: str
    """Of the file's bytes."""
    size: int
    """Bytes of the file."""
    opset: int
    """Version of the default operator domain."""
    ir_version: int
    """Version of the file format."""
    inputs: dict[str, dict[str, Any]]
    """dtype and shape of each input."""
    outputs: dict[str, dict[str, Any]]
    """dtype and shape of each output."""
    rows: int
    """Recorded observations that were compared."""
    max_continuous_error: float
    """Largest difference to the trained policy; 0.0 without continuous actions."""
    max_memory_error: float
    """Largest difference to what the trained policy remembers; 0.0 without memory."""
    discrete_ties: int
    """Choices that differ because two logits are equal within the tolerance."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def publish(
    graph: PolicyGraph,
    target: Path,
    *,
    recording: Recording,
    metadata: Mapping[str, str] | None = None,
) -> ExportReport:
    """Write a policy to `target` after proving that the file is right; on failure nothing remains.

    The file must keep the loader's contract and our own stricter rules, give the trained policy's
    deterministic actions on every recorded observation whatever the batch size, and never choose a
    forbidden action. A recurrent one must also do so step by step, with the memory that it returned
    the step before.

    Args:
        graph: the trained policy.
        target: the ONNX file to write or replace.
        recording: observations that the policy met, with its deterministic actions.
        metadata: properties of the file that Unity does not read.

    Raises:
        ExportError: The policy cannot be exported, or the file is not right; the message names the
            output, the row and both values.
        OSError: The file cannot be written.
    """
    model = build_model(graph)
    for key, value in sorted((metadata or {}).items()):
        model.metadata_props.add(key=key, value=value)
    content = model_bytes(model)
    with files.whole(target) as temporary:
        temporary.write_bytes(content)
        description = describe(temporary)
        findings = publishing_findings(temporary, graph.spec)
        if findings:
            listed = "; ".join(str(finding) for finding in findings)
            raise ExportError(f"{target}: the exported model breaks the ONNX contract: {listed}")
        check = _Check(graph, temporary, target, recording)
        ties = check.same_actions()
        check.masks_hold()
        digest = files.sha256_of(temporary)
    return ExportReport(
        sha256=digest,
        size=len(content),
        opset=description.opset,
        ir_version=description.ir_version,
        inputs=_listed(description.inputs),
        outputs=_listed(description.outputs),
        rows=check.n_rows,
        max_continuous_error=check.errors[CONTINUOUS],
        max_memory_error=check.errors[RECURRENT_OUT],
        discrete_ties=ties,
    )


class _Check:
    """Runs the written file beside what the trained policy did."""

    def __init__(self, graph: PolicyGraph, path: Path, target: Path, recording: Recording) -> None:
        self._target = target
        self._branches = graph.spec.action_spec.discrete_branches
        self._feeds = _feeds(graph, recording)
        self._expected = _expected(graph, recording, len(self._feeds["obs_0"]))
        self.n_rows = len(self._feeds["obs_0"])
        self._logits = [f"branch.{index}.out" for index in range(len(self._branches))]
        self.errors = dict.fromkeys(_FLOATS, 0.0)
        self._session = create_session(load(path), 0, self._logits)

    def same_actions(self) -> int:
        """Compare every row in every batch size, and all as one agent's; gives the ties."""
        ties = 0
        for rows, is_first_pass in self._batches():
            feeds = {name: values[rows] for name, values in self._feeds.items()}
            found = self._compare(self._run(feeds), rows, feeds)
            ties += found if is_first_pass else 0
        if RECURRENT_IN in self._feeds:
            self._carry_on()
        return ties

    def _carry_on(self) -> None:
        """Step by step from no memory, with the memory that the model itself returned."""
        memory = np.zeros_like(self._feeds[RECURRENT_IN][:1])
        for row in range(self.n_rows):
            feeds = {name: values[row : row + 1] for name, values in self._feeds.items()}
            feeds[RECURRENT_IN] = memory
            result = self._run(feeds)
            self._compare(result, np.array([row]), feeds)
            memory = result[RECURRENT_OUT]

    def _run(self, feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        names = [*self._expected, *self._logits]
        return dict(zip(names, self._session.run(names, feeds), strict=True))

    def _compare(
        self, result: dict[str, AnyArray], rows: AnyArray, feeds: dict[str, AnyArray]
    ) -> int:
        """Refuse what differs from the trained policy; notes the errors and gives the ties."""
        for name, what in _FLOATS.items():
            if name in self._expected:
                error = self._float_error(name, result, rows, what)
                self.errors[name] = max(self.errors[name], error)
        if "deterministic_discrete_actions" not in self._expected:
            return 0
        return self._discrete_ties(result, rows, feeds["action_masks"])

    def masks_hold(self) -> None:
        """With one action allowed per branch, that one is always chosen."""
        if not self._branches:
            return
        for start in range(0, MASK_DRAWS, _CHUNK):
            self._mask_holds(np.arange(start, start + _CHUNK))

    def _mask_holds(self, draws: AnyArray) -> None:
        names = ["discrete_actions", "deterministic_discrete_actions"]
        rows = draws % self.n_rows
        allowed = np.stack([draws % size for size in self._branches], axis=1)
        masks = [
            np.eye(size, dtype=np.float32)[allowed[:, branch]]
            for branch, size in enumerate(self._branches)
        ]
        feeds = {name: values[rows] for name, values in self._feeds.items()}
        feeds["action_masks"] = np.concatenate(masks, axis=1)
        for name, actions in zip(names, self._session.run(names, feeds), strict=True):
            wrong = np.argwhere(actions != allowed)
            if len(wrong):
                row, branch = wrong[0]
                self._fail(
                    name,
                    int(rows[row]),
                    int(branch),
                    actions[row, branch],
                    allowed[row, branch],
                    "the only action that the mask allows",
                )

    def _batches(self) -> Iterator[tuple[AnyArray, bool]]:
        """Row numbers: first all in large chunks, then a few in each small batch size."""
        for start in range(0, self.n_rows, _CHUNK):
            yield np.arange(start, min(start + _CHUNK, self.n_rows)), True
        for size in _BATCH_SIZES:
            for start in range(0, min(self.n_rows, 8 * size), size):
                yield np.arange(start, start + size) % self.n_rows, False

    def _float_error(
        self, name: str, result: dict[str, AnyArray], rows: AnyArray, what: str
    ) -> float:
        expected = self._expected[name][rows].reshape(len(rows), -1)
        found = result[name].reshape(len(rows), -1)
        error = np.abs(found - expected)
        limit = TOLERANCE * np.maximum(1.0, np.abs(expected))
        wrong = np.argwhere(~(error <= limit))
        if len(wrong):
            row, column = wrong[0]
            values = found[row, column], expected[row, column]
            self._fail(name, int(rows[row]), int(column), *values, what)
        return float(error.max())

    def _discrete_ties(self, result: dict[str, AnyArray], rows: AnyArray, masks: FloatArray) -> int:
        """Differences where both choices have the same logit; any other difference fails."""
        name = "deterministic_discrete_actions"
        expected = self._expected[name][rows]
        wrong = np.argwhere(result[name] != expected)
        starts = np.cumsum((0, *self._branches))
        for row, branch in wrong:
            found, wanted = int(result[name][row, branch]), int(expected[row, branch])
            logits = result[self._logits[branch]][row]
            allowed = masks[row, starts[branch] : starts[branch + 1]]
            limit = TOLERANCE * max(1.0, float(np.abs(logits).max()))
            is_tie = 0 <= wanted < len(logits) and allowed[wanted] > 0
            if not is_tie or abs(logits[found] - logits[wanted]) > limit:
                self._fail(
                    name, int(rows[row]), int(branch), found, wanted, "the trained policy's choice"
                )
        return len(wrong)

    def _fail(
        self, output: str, row: int, column: int, found: Any, expected: Any, what: str
    ) -> None:
        raise ExportError(
            f"{self._target}: not written: output {output}, row {row}, column {column} is {found}, "
            f"but {what} is {expected}; the description of the network does not match it"
        )


def _feeds(graph: PolicyGraph, recording: Recording) -> dict[str, AnyArray]:
    specs = graph.spec.observation_specs
    shapes = [tuple(values.shape[1:]) for values in recording.obs]
    n_rows = {len(values) for values in recording.obs}
    if shapes != [obs.shape for obs in specs] or len(n_rows) != 1 or 0 in n_rows:
        raise ExportError(
            f"export: recorded observations have shapes {[o.shape for o in recording.obs]}, wanted "
            f"[rows, …] of {[list(obs.shape) for obs in specs]} with the same rows, at least one; "
            "record them with this behavior"
        )
    feeds: dict[str, AnyArray] = {
        f"obs_{index}": np.asarray(values, dtype=np.float32)
        for index, values in enumerate(recording.obs)
    }
    size = sum(graph.spec.action_spec.discrete_branches)
    if size:
        rows = n_rows.pop()
        masks = np.ones((rows, size)) if recording.action_masks is None else recording.action_masks
        feeds["action_masks"] = _matrix("action_masks", masks, rows, size).astype(np.float32)
    if graph.memory_size:
        feeds[RECURRENT_IN] = _memories(graph, recording)[:-1]
    return feeds


def _memories(graph: PolicyGraph, recording: Recording) -> FloatArray:
    """[N + 1, 1, M] of a recurrent policy's recording."""
    shape = (len(recording.obs[0]) + 1, graph.memory_size)
    if recording.memory is None or recording.memory.shape != shape:
        found = "nothing" if recording.memory is None else list(recording.memory.shape)
        raise ExportError(
            f"export: recorded memory is {found}, wanted {list(shape)}; record the trained policy "
            "step by step"
        )
    return np.asarray(recording.memory, dtype=np.float32)[:, None]


def _expected(graph: PolicyGraph, recording: Recording, n_rows: int) -> dict[str, AnyArray]:
    action = graph.spec.action_spec
    parts = {
        "continuous": (recording.continuous, action.continuous_size),
        "discrete": (recording.discrete, action.discrete_size),
    }
    expected = {
        f"deterministic_{kind}_actions": _matrix(kind, values, n_rows, size)
        for kind, (values, size) in parts.items()
        if size
    }
    if graph.memory_size:
        expected[RECURRENT_OUT] = _memories(graph, recording)[1:]
    return expected


def _matrix(name: str, values: AnyArray | None, n_rows: int, size: int) -> AnyArray:
    if values is None or np.shape(values) != (n_rows, size):
        found = "nothing" if values is None else list(np.shape(values))
        raise ExportError(
            f"export: recorded {name} is {found}, wanted [{n_rows}, {size}]; record the trained "
            "policy's deterministic actions for the same observations"
        )
    return np.asarray(values)


def _listed(tensors: dict[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": info.dtype, "shape": list(info.shape)} for name, info in tensors.items()
    }
