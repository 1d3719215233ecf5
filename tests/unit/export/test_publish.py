import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import reference
import torch

from pipeline import files
from pipeline.errors import ExportError
from pipeline.export.layout import TensorInfo
from pipeline.export.policy import OnnxPolicy, create_session
from pipeline.export.publish import publish, record

CONTINUOUS, DISCRETE = "deterministic_continuous_actions", "deterministic_discrete_actions"


def recorded(graph, n_rows=20):
    return record(graph, reference.observations(graph, n_rows))


def with_equal_logits(*branches, bias):
    graph = reference.policy(branches=branches)
    for branch in graph.actor.heads.branches:
        reference.fill(branch, 0.0, bias)
    return graph


def choosing(graph, choices, masks=None):
    """Return a recording with other choices than the choices of the policy."""
    recording = record(graph, reference.observations(graph, len(choices)), masks)
    recording.expected[DISCRETE] = np.array(choices)
    return recording


def test_a_published_policy_can_be_run_and_its_report_is_reproducible(tmp_path):
    """`test_golden_exports` publishes every kind of policy."""
    graph = reference.policy(continuous=2, branches=(4,), memory=6)
    path = tmp_path / "a" / "policy.onnx"
    metadata = {"b": "2", "a": "1"}
    report = publish(graph, path, recording=recorded(graph), metadata=metadata)
    properties = onnx.load(path).metadata_props
    assert [(entry.key, entry.value) for entry in properties][:2] == [("a", "1"), ("b", "2")]
    assert report.sha256 == files.sha256_of(path)
    assert report.size == path.stat().st_size
    assert report.rows == 20
    assert report.max_continuous_error <= 1e-5
    assert OnnxPolicy(path).description.version == 3
    repeated = publish(graph, tmp_path / "b.onnx", recording=recorded(graph), metadata=metadata)
    assert json.dumps(asdict(repeated)) == json.dumps(asdict(report))
    assert report.inputs["obs_0"] == TensorInfo(dtype="float32", shape=("batch", 5))


RECURRENT = {"continuous": 2, "memory": 6}


@pytest.mark.parametrize(
    ("parts", "output", "place", "change", "said"),
    [
        ({"continuous": 3}, CONTINUOUS, (11, 2), lambda x: x + 1e-3, r"is -?0\.\d+, but"),
        ({"continuous": 3}, CONTINUOUS, (0, 0), lambda _: np.nan, ""),
        ({"branches": (3, 4)}, DISCRETE, (4, 1), lambda x: (x + 1) % 4, ""),
        (RECURRENT, "recurrent_out", (11, 0, 4), lambda x: x + 1e-3, "is"),
    ],
)
def test_exported_output_that_differs_from_the_recording_is_named_and_the_old_file_is_kept(
    tmp_path, parts, output, place, change, said
):
    graph = reference.policy(**parts)
    recording, path = recorded(graph), tmp_path / "policy.onnx"
    assert publish(graph, path, recording=recording).max_memory_error < 1e-5
    path.write_text("earlier")
    recording.expected[output][place] = change(recording.expected[output][place])
    with pytest.raises(ExportError, match=f"{output}, row {place[0]}, column {place[-1]} {said}"):
        publish(graph, path, recording=recording)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("logits", "choices", "n_ties"),
    [
        ([1.0, 1.0, 0.0], [[0], [1], [1], [0]], 2),
        ([1.0, 1.0, 0.0], [[0], [1], [2], [0]], None),
        ([0.002, 0.002 - 5e-6], [[0], [1]], 1),  # small logits, up to the tolerance itself
        ([0.002, 0.002 - 2e-5], [[0], [1]], None),
        # large logits: a relative tolerance, of either sign
        ([100.0, 100.0 - 5e-4], [[0], [1]], 1),
        ([-100.0, -100.0 - 5e-4], [[0], [1]], 1),
    ],
)
def test_choices_of_equal_logits_count_as_ties(tmp_path, logits, choices, n_ties):
    graph = with_equal_logits(len(logits), bias=logits)
    recording, path = choosing(graph, choices), tmp_path / "policy.onnx"
    if n_ties is None:
        row = len(choices) - 1 if len(logits) == 2 else 2
        said = rf"row {row}, column 0 is 0, but .* choice is {choices[row][0]}"
        with pytest.raises(ExportError, match=said):
            publish(graph, path, recording=recording)
    else:
        assert publish(graph, path, recording=recording).discrete_ties == n_ties


def test_recorded_masks_are_applied_when_exported_actions_are_compared(tmp_path):
    graph = reference.policy(branches=(3,))
    obs = reference.observations(graph, 9)
    masks = np.tile(np.array([[0, 1, 1]], dtype=np.float32), (9, 1))
    recording, free = record(graph, obs, masks), record(graph, obs)
    assert (recording.expected[DISCRETE] != free.expected[DISCRETE]).any()
    path = tmp_path / "policy.onnx"
    publish(graph, path, recording=recording)
    with pytest.raises(ExportError, match="the trained policy's choice"):
        publish(graph, path, recording=replace(recording, feeds=free.feeds))


def test_observations_or_masks_of_another_behavior_are_refused():
    graph = reference.policy(continuous=2, branches=(3,))
    obs = reference.observations(graph, 5)
    for wrong in ([], obs[:1], [o[:0] for o in obs], [obs[0][:4], obs[1]], [obs[1], obs[0]]):
        with pytest.raises(ExportError, match="recorded observations have shapes"):
            record(graph, wrong)
    for shape in ((5, 2), (4, 3)):
        with pytest.raises(ExportError, match="recorded action_masks have the shape"):
            record(graph, obs, np.ones(shape, np.float32))


def test_a_model_that_ignores_masks_is_refused(tmp_path, monkeypatch):
    def unmasked(graph, logits, mask):
        return graph.node("Add", [logits, graph.node("Mul", [mask, graph.scalar(0.0)])])

    monkeypatch.setattr("pipeline.nets.actor_critic.masked_to_onnx", unmasked)
    graph = reference.policy(branches=(3, 4))
    with pytest.raises(ExportError, match="the only action that the mask allows"):
        publish(graph, tmp_path / "policy.onnx", recording=recorded(graph))
    assert list(tmp_path.iterdir()) == []


def test_large_memories_are_compared_with_a_relative_tolerance(tmp_path):
    graph = reference.policy(**RECURRENT)
    for name, values in graph.actor.memory.lstm.named_parameters():
        # Every gate is open, so that cells count their steps.
        torch.nn.init.constant_(values, 10.0 if name.startswith("bias") else 0.0)
    recording = recorded(graph)
    cell = recording.expected["recurrent_out"][11, 0, 4]
    assert cell == pytest.approx(12, abs=0.1)
    for error, is_right in ((0.5e-5 * cell, True), (2e-5 * cell, False)):
        recording.expected["recurrent_out"][11, 0, 4] = cell + error
        with nullcontext() if is_right else pytest.raises(ExportError, match="row 11, column 4"):
            publish(graph, tmp_path / "p.onnx", recording=recording)


def test_a_model_with_swapped_memory_gates_is_refused(tmp_path, monkeypatch):
    graph = reference.policy(branches=(3, 4), memory=6)
    monkeypatch.setattr("pipeline.nets.memory._ONNX_GATES", (0, 1, 2, 3))
    with pytest.raises(ExportError, match="the trained policy's memory is"):
        publish(graph, tmp_path / "p.onnx", recording=recorded(graph))


def test_recording_that_begins_in_the_middle_of_an_episode_is_refused(tmp_path):
    """Single rows agree, but an agent with an empty memory would act differently."""
    graph = reference.policy(**RECURRENT)
    recording = recorded(graph)
    feeds, expected = (
        {name: values[5:] for name, values in arrays.items()}
        for arrays in (recording.feeds, recording.expected)
    )
    later = replace(recording, feeds=feeds, expected=expected)
    with pytest.raises(ExportError, match="row 0, column 0"):
        publish(graph, tmp_path / "p.onnx", recording=later)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("choice", [1, 3, -3])
def test_a_forbidden_or_missing_choice_does_not_count_as_a_tie_despite_an_equal_logit(
    tmp_path, choice
):
    graph = with_equal_logits(3, bias=[1.0, 1.0, 0.0])
    masks = np.tile(np.array([[1, 0, 1]], dtype=np.float32), (4, 1))
    recording = choosing(graph, [[0], [0], [choice], [0]], masks)
    with pytest.raises(ExportError, match=rf"row 2, column 0 is 0, but .* choice is {choice};"):
        publish(graph, tmp_path / "p.onnx", recording=recording)


def test_ties_are_judged_by_the_mask_of_their_own_branch(tmp_path):
    """The masks of the other branches forbid the choices that this branch's mask allows."""
    graph = with_equal_logits(2, 2, 2, bias=[1.0, 1.0])
    masks = np.array([[1, 0, 1, 1, 1, 0]] * 2, dtype=np.float32)
    recording = choosing(graph, [[0, 1, 0]] * 2, masks)
    assert publish(graph, tmp_path / "p.onnx", recording=recording).discrete_ties == 2
    with pytest.raises(ExportError, match="row 0, column 0 is 0, but"):
        publish(graph, tmp_path / "p.onnx", recording=choosing(graph, [[1, 0, 0]] * 2, masks))


def test_differences_within_the_tolerance_are_reported_and_larger_differences_are_refused(tmp_path):
    """Rows are compared 125 at a time; the row 100 is in no small batch."""
    graph = reference.policy(continuous=3)
    recording = recorded(graph, n_rows=130)
    exact = recording.expected[CONTINUOUS].copy()
    recording.expected[CONTINUOUS][100, 1] = exact[100, 1] + 8e-6
    report = publish(graph, tmp_path / "p.onnx", recording=recording)
    assert report.max_continuous_error == pytest.approx(8e-6, abs=1e-6)
    assert report.max_memory_error == 0.0
    recording.expected[CONTINUOUS][100, 1] = exact[100, 1] - 1.2e-5
    with pytest.raises(ExportError, match="row 100, column 1"):
        publish(graph, tmp_path / "p.onnx", recording=recording)


def test_recorded_rounding_error_is_the_distance_from_the_outputs_of_a_float64_copy():
    graph = reference.policy(continuous=3, branches=(2, 4), squash=True, normalize=False)
    obs = reference.observations(graph, 20)
    recording = record(graph, obs)
    exact = reference.evaluate(graph, obs)["continuous"]
    error = np.abs(recording.expected[CONTINUOUS] - exact).max()
    assert recording.rounding[CONTINUOUS] == pytest.approx(error, rel=1e-6)
    assert set(recording.rounding) == {CONTINUOUS, "branch.0.out", "branch.1.out"}
    assert 0 < max(recording.rounding.values()) < 1e-5


@pytest.mark.parametrize("is_discrete", [False, True])
def test_exported_outputs_may_differ_by_a_small_multiple_of_the_recorded_rounding_error(
    tmp_path, is_discrete
):
    """Two orders of addition give different float32 numbers, and both are correct."""
    if is_discrete:
        graph, output = with_equal_logits(3, bias=[1.0, 1.0 - 6e-5, 0.0]), "branch.0.out"
        recording, place = choosing(graph, [[0], [1]]), "row 1, column 0"
    else:
        graph, output = reference.policy(continuous=3), CONTINUOUS
        recording, place = recorded(graph), "row 19, column 1"
        recording.expected[CONTINUOUS][19, 1] += 6e-5
    for rounding, is_right in ((1e-5, False), (2e-5, True)):
        recording.rounding[output] = rounding
        with nullcontext() if is_right else pytest.raises(ExportError, match=place):
            publish(graph, tmp_path / "p.onnx", recording=recording)


def test_discrete_choice_is_compared_by_the_logits_and_rounding_error_of_its_own_branch(tmp_path):
    graph = with_equal_logits(2, 2, bias=[1.0, 1.0])
    reference.fill(graph.actor.heads.branches[1], 0.0, [1.0, 1.0 - 6e-5])
    recording = choosing(graph, [[1, 1]])
    for rounding, is_right in ((0.0, False), (2e-5, True)):
        recording.rounding.update({"branch.0.out": 1.0 - rounding, "branch.1.out": rounding})
        with nullcontext() if is_right else pytest.raises(ExportError, match="row 0, column 1"):
            report = publish(graph, tmp_path / "p.onnx", recording=recording)
    assert report.discrete_ties == 2


def test_every_row_of_a_long_recording_is_compared_even_if_observations_are_float64(tmp_path):
    graph = reference.policy(continuous=1)
    obs = [values.astype(np.float64) for values in reference.observations(graph, 300)]
    recording = record(graph, obs)
    assert publish(graph, tmp_path / "p.onnx", recording=recording).rows == 300
    exact = recording.expected[CONTINUOUS].copy()
    for row in (0, 124, 125, 299):
        recording.expected[CONTINUOUS] = exact.copy()
        recording.expected[CONTINUOUS][row] += 1e-3
        with pytest.raises(ExportError, match=f"row {row}, column 0"):
            publish(graph, tmp_path / "p.onnx", recording=recording)


def test_the_step_by_step_check_uses_the_memory_that_the_model_returned(tmp_path, monkeypatch):
    """Each single row is within the tolerance, but the error doubles from step to step."""
    graph = reference.policy(**RECURRENT)
    recording = recorded(graph, n_rows=5)
    known = dict(zip((row.tobytes() for row in recording.feeds["obs_0"]), range(5), strict=True))

    def session(*args):
        real = create_session(*args)

        def run(names, feeds):
            values = real.run(names, feeds)
            rows = [known[row.tobytes()] for row in feeds["obs_0"]]
            drift = feeds["recurrent_in"] - recording.feeds["recurrent_in"][rows]
            memory = recording.expected["recurrent_out"][rows] + 2 * drift + 3e-6
            values[names.index("recurrent_out")] = memory
            return values

        return SimpleNamespace(run=run)

    monkeypatch.setattr("pipeline.export.publish.create_session", session)
    with pytest.raises(ExportError, match=r"output recurrent_out, row 2, column 0 is"):
        publish(graph, tmp_path / "p.onnx", recording=recording)


def test_report_has_the_ties_of_all_batches_of_a_long_recording(tmp_path):
    ties = with_equal_logits(2, bias=[1.0, 1.0])
    recording = choosing(ties, [[int(row in (3, 60, 128))] for row in range(130)])
    assert publish(ties, tmp_path / "p.onnx", recording=recording).discrete_ties == 3
