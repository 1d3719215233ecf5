from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pipeline import files
from pipeline.errors import ExportError
from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import Recording, publish

from . import reference


def record(graph, n_rows=20):
    obs = reference.observations(graph, n_rows)
    if graph.memory_size:
        return record_in_sequence(graph, obs)
    expected = reference.evaluate(graph, obs)
    return Recording(
        obs=obs,
        continuous=expected.get("continuous"),
        discrete=expected.get("discrete"),
    )


def record_in_sequence(graph, obs):
    memory = [np.zeros((1, graph.memory_size))]
    steps = []
    for row in range(len(obs[0])):
        now = [values[row : row + 1] for values in obs]
        steps.append(reference.evaluate(graph, now, memories=memory[-1]))
        memory.append(steps[-1]["memory"])
    kinds = {k: [step[k] for step in steps] for k in ("continuous", "discrete") if k in steps[0]}
    return Recording(
        obs=obs,
        memory=np.concatenate(memory),
        **{kind: np.concatenate(rows) for kind, rows in kinds.items()},
    )


@pytest.mark.parametrize(
    "parts",
    [
        {"continuous": 3},
        {"branches": (2, 5)},
        {"continuous": 2, "branches": (3,), "squash": True, "conditional": True},
        {"branches": (4,), "hyper": "in_out"},
        {"continuous": 2, "branches": (4,), "memory": 6},
    ],
)
def test_published_policy_runs_and_its_report_repeats(tmp_path, parts):
    graph = reference.policy(**parts)
    path = tmp_path / "a" / "policy.onnx"
    report = publish(graph, path, recording=record(graph))
    assert report.sha256 == files.sha256_of(path)
    assert report.size == path.stat().st_size
    assert report.rows == 20
    assert report.max_continuous_error <= 1e-5
    assert OnnxPolicy(path).description.version == 3
    again = publish(graph, tmp_path / "b.onnx", recording=record(graph))
    assert json.dumps(again.as_dict()) == json.dumps(report.as_dict())
    assert report.as_dict()["inputs"]["obs_0"] == {"dtype": "float32", "shape": ["batch", 5]}


def test_wrong_continuous_action_is_named_and_nothing_remains(tmp_path):
    graph = reference.policy(continuous=3)
    recording = record(graph)
    recording.continuous[11, 2] += 1e-3
    with pytest.raises(
        ExportError, match=r"deterministic_continuous_actions, row 11, column 2 is -?0\.\d+, but"
    ):
        publish(graph, tmp_path / "policy.onnx", recording=recording)
    assert list(tmp_path.iterdir()) == []


def test_wrong_choice_is_named_and_an_earlier_file_stays(tmp_path):
    graph = reference.policy(branches=(3, 4))
    recording = record(graph)
    recording.discrete[4, 1] = (recording.discrete[4, 1] + 1) % 4
    path = tmp_path / "policy.onnx"
    path.write_text("earlier")
    with pytest.raises(ExportError, match="deterministic_discrete_actions, row 4, column 1"):
        publish(graph, path, recording=recording)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_choices_of_equal_logits_count_as_ties(tmp_path):
    graph = reference.policy(branches=(3,))
    branch = graph.branches[0]
    branch.weight[:] = 0.0
    branch.bias[:] = [1.0, 1.0, 0.0]
    obs = reference.observations(graph, 4)
    discrete = np.array([[0], [1], [1], [0]])
    path = tmp_path / "policy.onnx"
    report = publish(graph, path, recording=Recording(obs=obs, discrete=discrete))
    assert report.discrete_ties == 2
    discrete[2] = 2
    with pytest.raises(ExportError, match=r"row 2, column 0 is 0, but .* choice is 2"):
        publish(graph, path, recording=Recording(obs=obs, discrete=discrete))


def test_recorded_masks_are_applied(tmp_path):
    graph = reference.policy(branches=(3,))
    obs = reference.observations(graph, 9)
    masks = np.tile(np.array([[0, 1, 1]], dtype=np.float32), (9, 1))
    discrete = reference.evaluate(graph, obs, masks)["discrete"]
    free = reference.evaluate(graph, obs)["discrete"]
    assert (discrete != free).any()
    path = tmp_path / "policy.onnx"
    publish(graph, path, recording=Recording(obs=obs, discrete=discrete, action_masks=masks))
    with pytest.raises(ExportError, match="the trained policy's choice"):
        publish(graph, path, recording=Recording(obs=obs, discrete=discrete))


def test_broken_layout_of_a_goal_layer_is_caught(tmp_path):
    graph = reference.policy(continuous=2, hyper="in_out")
    wrong = replace(graph, hyper=replace(graph.hyper, layout="out_in"))
    with pytest.raises(ExportError, match="does not match it"):
        publish(wrong, tmp_path / "policy.onnx", recording=record(graph))
    assert list(tmp_path.iterdir()) == []


def test_recording_of_another_behavior_is_refused(tmp_path):
    graph = reference.policy(continuous=2)
    recording = record(graph)
    for wrong in (
        replace(recording, obs=recording.obs[:1]),
        replace(recording, continuous=None),
        replace(recording, continuous=recording.continuous[:5]),
        replace(recording, obs=[o[:0] for o in recording.obs]),
    ):
        with pytest.raises(ExportError, match="record"):
            publish(graph, tmp_path / "policy.onnx", recording=wrong)
    assert list(tmp_path.iterdir()) == []


def test_model_that_ignores_masks_is_caught(tmp_path, monkeypatch):
    def unmasked(builder, logits, mask):
        return builder.node("Add", [logits, builder.node("Mul", [mask, builder.scalar(0.0)])])

    monkeypatch.setattr("pipeline.export.heads._masked", unmasked)
    graph = reference.policy(branches=(3, 4))
    with pytest.raises(ExportError, match="the only action that the mask allows"):
        publish(graph, tmp_path / "policy.onnx", recording=record(graph))
    assert list(tmp_path.iterdir()) == []


def test_infinite_recorded_action_is_a_mismatch(tmp_path):
    graph = reference.policy(continuous=2)
    recording = record(graph)
    recording.continuous[0, 0] = np.nan
    with pytest.raises(ExportError, match="row 0, column 0"):
        publish(graph, tmp_path / "policy.onnx", recording=recording)


def test_memory_that_goes_another_way_is_named_and_nothing_remains(tmp_path):
    graph = reference.policy(continuous=2, memory=6)
    recording = record(graph)
    assert publish(graph, tmp_path / "p.onnx", recording=recording).max_memory_error < 1e-5
    (tmp_path / "p.onnx").unlink()
    recording.memory[12, 4] += 1e-3
    with pytest.raises(ExportError, match=r"output recurrent_out, row 11, column 4 is"):
        publish(graph, tmp_path / "p.onnx", recording=recording)
    for wrong in (None, recording.memory[:-1], recording.memory[:, 1:]):
        with pytest.raises(ExportError, match="recorded memory is"):
            publish(graph, tmp_path / "p.onnx", recording=replace(recording, memory=wrong))
    assert list(tmp_path.iterdir()) == []


def test_memory_of_swapped_gates_is_caught(tmp_path):
    graph = reference.policy(branches=(3, 4), memory=6)
    lstm = graph.memory
    gates = np.split(lstm.input_bias, 4)
    swapped = replace(lstm, input_bias=np.concatenate([gates[1], gates[0], *gates[2:]]))
    with pytest.raises(ExportError, match="what the trained policy remembers is"):
        publish(replace(graph, memory=swapped), tmp_path / "p.onnx", recording=record(graph))


def test_recording_that_begins_in_the_middle_of_an_episode_is_refused(tmp_path):
    """Row by row it fits; an agent that begins anew would go another way."""
    graph = reference.policy(continuous=2, memory=6)
    whole = record(graph)
    later = Recording(
        obs=[values[5:] for values in whole.obs],
        continuous=whole.continuous[5:],
        memory=whole.memory[5:],
    )
    with pytest.raises(ExportError, match="row 0, column 0"):
        publish(graph, tmp_path / "p.onnx", recording=later)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("choice", [1, 3, -3])
def test_an_equal_logit_excuses_no_choice_that_is_forbidden_or_does_not_exist(tmp_path, choice):
    graph = reference.policy(branches=(3,))
    branch = graph.branches[0]
    branch.weight[:] = 0.0
    branch.bias[:] = [1.0, 1.0, 0.0]
    obs = reference.observations(graph, 4)
    masks = np.tile(np.array([[1, 0, 1]], dtype=np.float32), (4, 1))
    discrete = np.array([[0], [0], [choice], [0]])
    recording = Recording(obs=obs, discrete=discrete, action_masks=masks)
    with pytest.raises(ExportError, match=rf"row 2, column 0 is 0, but .* choice is {choice};"):
        publish(graph, tmp_path / "p.onnx", recording=recording)


def test_ties_are_told_by_the_masks_of_their_own_branch(tmp_path):
    """The neighbours' masks forbid what is allowed here, and the other way round."""
    graph = reference.policy(branches=(2, 2, 2))
    for branch in graph.branches:
        branch.weight[:] = 0.0
        branch.bias[:] = 1.0
    obs = reference.observations(graph, 2)
    masks = np.array([[1, 0, 1, 1, 1, 0]] * 2, dtype=np.float32)
    recording = Recording(obs=obs, discrete=np.array([[0, 1, 0]] * 2), action_masks=masks)
    assert publish(graph, tmp_path / "p.onnx", recording=recording).discrete_ties == 2
    recording = replace(recording, discrete=np.array([[1, 0, 0]] * 2))
    with pytest.raises(ExportError, match="row 0, column 0 is 0, but"):
        publish(graph, tmp_path / "p.onnx", recording=recording)


def test_differences_up_to_the_tolerance_are_stated_and_larger_ones_refused(tmp_path):
    graph = reference.policy(continuous=3)
    recording = record(graph)
    exact = recording.continuous.copy()
    recording.continuous[19, 1] = exact[19, 1] + 8e-6
    report = publish(graph, tmp_path / "p.onnx", recording=recording)
    assert 7e-6 < report.max_continuous_error < 9e-6
    assert report.max_memory_error == 0.0
    recording.continuous[19, 1] = exact[19, 1] - 1.2e-5
    with pytest.raises(ExportError, match="row 19, column 1"):
        publish(graph, tmp_path / "p.onnx", recording=recording)


def test_every_row_of_a_long_recording_is_compared_also_doubles(tmp_path):
    graph = reference.policy(continuous=1)
    recording = record(graph, 300)
    doubles = replace(recording, obs=[values.astype(np.float64) for values in recording.obs])
    assert publish(graph, tmp_path / "p.onnx", recording=doubles).rows == 300
    for row in (0, 124, 125, 299):
        wrong = recording.continuous.copy()
        wrong[row] += 1e-3
        with pytest.raises(ExportError, match=f"row {row}, column 0"):
            publish(graph, tmp_path / "p.onnx", recording=replace(recording, continuous=wrong))
