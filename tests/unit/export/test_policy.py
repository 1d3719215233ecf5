from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import reference
from interpreter import python
from onnx import helper, numpy_helper
from steps import decision_steps

from pipeline.algos.policy import Policy
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import ExportError
from pipeline.export.policy import OnnxPolicy, _in_old_layout, create_session
from pipeline.export.publish import build_model, model_bytes
from pipeline.settings.trainer.schema import NetworkSettings


def steps(graph, n_agents, *, masks=None, agent_ids=None, seed=1):
    return decision_steps(reference.observations(graph, n_agents, seed), agent_ids, masks=masks)


@pytest.fixture
def hybrid():
    return reference.policy(continuous=2, branches=(3, 4))


def test_deterministic_actions_equal_the_actions_of_the_trained_policy(hybrid):
    batch = steps(hybrid, 6)
    expected = reference.evaluate(hybrid, batch.obs)
    action = OnnxPolicy(build_model(hybrid)).act(batch, deterministic=True)
    np.testing.assert_allclose(action.continuous, expected["continuous"], atol=1e-5)
    np.testing.assert_array_equal(action.discrete, expected["discrete"])
    assert (action.continuous.dtype, action.discrete.dtype) == (np.float32, np.int32)


def test_actions_that_the_mask_of_the_environment_forbids_are_not_taken(hybrid):
    masks = [np.ones((50, 3), dtype=bool), np.ones((50, 4), dtype=bool)]
    masks[0][:, 2] = False
    masks[1][:, 1] = False
    for deterministic in (False, True):
        action = OnnxPolicy(build_model(hybrid)).act(steps(hybrid, 50, masks=masks), deterministic)
        assert (action.discrete == [2, 1]).all()


def trace(policy, graph, n_steps=3):
    actions = [policy.act(steps(graph, 5, seed=t), deterministic=False) for t in range(n_steps)]
    return [(a.continuous.tolist(), a.discrete.tolist()) for a in actions]


def test_sampled_actions_depend_on_the_seed_and_not_on_draws_of_other_policies(hybrid):
    model = build_model(hybrid)
    first = trace(OnnxPolicy(model, seed=3), hybrid)
    other, policy = OnnxPolicy(model, seed=4), OnnxPolicy(model, seed=3)
    assert trace(other, hybrid) != first
    assert trace(policy, hybrid) == first
    other.reset(seed=3)
    assert trace(other, hybrid) == first
    batch = steps(hybrid, 5)
    assert (policy.act(batch, False).continuous != policy.act(batch, False).continuous).all()


def test_every_random_operator_has_its_own_seed_that_float32_represents_exactly(monkeypatch):
    models = []
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda data, *_, **__: models.append(data))
    model = build_model(reference.policy(continuous=2, branches=(3, 4)))
    for seed in range(100):
        create_session(model, seed)
    seeds = [
        attribute.f
        for data in models
        for node in onnx.load_from_string(data).graph.node
        for attribute in node.attribute
        if attribute.name == "seed"
    ]
    assert len(set(seeds)) == len(seeds) == 300  # one continuous draw, and one of each branch
    assert all(seed.is_integer() and 0 <= seed < 1 << 24 for seed in seeds)
    # The model itself has no seeds, because it may still be published.
    assert not any(a.name == "seed" for node in model.graph.node for a in node.attribute)


def test_same_seed_gives_the_same_samples_in_another_process(hybrid, tmp_path):
    path = tmp_path / "policy.onnx"
    path.write_bytes(model_bytes(build_model(hybrid)))
    code = (
        "import sys, numpy as np; from pipeline.export.policy import create_session;"
        "from pipeline.export.layout import load;"
        "feeds = {'obs_0': np.zeros((9, 5), 'f'), 'obs_1': np.zeros((9, 3), 'f'),"
        " 'action_masks': np.ones((9, 7), 'f')};"
        "run = create_session(load(sys.argv[1]), 7).run(['continuous_actions',"
        " 'discrete_actions'], feeds); print([values.tolist() for values in run])"
    )
    first, second = (python("-c", code, path).stdout for _ in range(2))
    assert first == second


def test_each_agent_keeps_its_memory_in_any_order_of_agents():
    graph = reference.policy(continuous=2, memory=6)
    policy = OnnxPolicy(build_model(graph))
    first = steps(graph, 3, agent_ids=[4, 9, 2])
    policy.act(first, deterministic=True)
    later = steps(graph, 3, agent_ids=[9, 7, 4], seed=2)
    memories = reference.evaluate(graph, first.obs, memories=np.zeros((3, 6), np.float32))["memory"]
    expected = reference.evaluate(
        graph, later.obs, memories=np.stack([memories[1], np.zeros(6, np.float32), memories[0]])
    )
    action = policy.act(later, deterministic=True)
    np.testing.assert_allclose(action.continuous, expected["continuous"], atol=1e-5)
    assert np.abs(memories).max() > 0.1
    policy.end(np.array([9, 5], np.int32))
    last = steps(graph, 2, agent_ids=[4, 9], seed=3)
    fresh = OnnxPolicy(build_model(graph)).act(last, deterministic=True).continuous
    after_end = policy.act(last, deterministic=True).continuous
    np.testing.assert_array_equal(after_end[1], fresh[1])
    assert np.abs(after_end[0] - fresh[0]).max() > 1e-3, "agent 4 remembers"


def test_agents_without_a_decision_keep_their_memory_until_a_reset():
    graph = reference.policy(continuous=2, memory=6)
    model = build_model(graph)
    first, other = steps(graph, 2, agent_ids=[4, 9]), steps(graph, 1, agent_ids=[7], seed=2)
    asked, both, fresh = (OnnxPolicy(model, seed=3) for _ in range(3))
    for policy in (asked, both):
        policy.act(first, deterministic=True)
    both.act(other, deterministic=True)
    last = steps(graph, 2, agent_ids=[9, 4], seed=5)
    actions = [policy.act(last, deterministic=True).continuous for policy in (asked, both, fresh)]
    np.testing.assert_array_equal(actions[0], actions[1])
    assert np.abs(actions[0] - actions[2]).min() > 1e-4
    both.reset(seed=3)
    np.testing.assert_array_equal(both.act(last, deterministic=True).continuous, actions[2])


def test_a_refused_step_changes_no_memory():
    graph = reference.policy(continuous=2, memory=6)
    model = build_model(graph)
    first, last = (steps(graph, 2, agent_ids=[4, 9], seed=seed) for seed in (1, 2))
    policies = [OnnxPolicy(model), OnnxPolicy(model)]
    for policy in policies:
        policy.act(first, deterministic=True)
    session = policies[0]._session

    def run(names, feeds):
        action, memory = session.run(names, feeds)
        return [action * np.nan, memory]

    policies[0]._session = SimpleNamespace(run=run)
    with pytest.raises(ExportError, match="not finite"):
        policies[0].act(steps(graph, 3, agent_ids=[9, 7, 4], seed=3), deterministic=True)
    policies[0]._session = session
    actions = [policy.act(last, deterministic=True).continuous for policy in policies]
    np.testing.assert_array_equal(*actions)


def test_model_inputs_are_found_by_name_in_any_order_of_the_inputs_in_the_file():
    spec = BehaviorSpec([ObservationSpec.vector(3)] * 3, ActionSpec(2, (3,)))
    batch = decision_steps([np.full((4, 3), number) for number in (1.0, -2.0, 0.5)])
    model = build_model(Policy(spec, NetworkSettings(hidden_units=8)))
    expected = OnnxPolicy(model).act(batch, deterministic=True)
    listed = [model.graph.input.pop() for _ in range(len(model.graph.input))]
    model.graph.input.extend(listed)
    action = OnnxPolicy(model).act(batch, deterministic=True)
    np.testing.assert_array_equal(action.continuous, expected.continuous)
    np.testing.assert_array_equal(action.discrete, expected.discrete)


def test_an_empty_batch_gives_no_actions_and_observations_of_other_behaviors_are_refused(hybrid):
    policy = OnnxPolicy(build_model(hybrid))
    action = policy.act(steps(hybrid, 0))
    assert (action.continuous.shape, action.discrete.shape) == ((0, 2), (0, 2))
    other = reference.policy(continuous=2, visual="match3")
    with pytest.raises(
        ExportError, match=r"obs_1 wants shape \[3\], the behavior sends \[2, 5, 6\]"
    ):
        policy.act(steps(other, 2))
    vector = BehaviorSpec([ObservationSpec.vector(60)], ActionSpec(1, ()))
    model = build_model(Policy(vector, NetworkSettings(hidden_units=8)))
    picture = decision_steps([np.zeros((2, 2, 5, 6), np.float32)])
    with pytest.raises(ExportError, match=r"has a picture where the other has a vector: see"):
        OnnxPolicy(model).act(picture)


@pytest.mark.parametrize("shift", [-4, 4])
def test_choices_outside_their_branch_are_refused(hybrid, shift):
    model = build_model(hybrid)
    (joined,) = [n for n in model.graph.node if "deterministic_discrete_actions" in n.output]
    joined.output[0] = "choices"
    model.graph.initializer.append(numpy_helper.from_array(np.array([shift]), "shift"))
    shifted = ["deterministic_discrete_actions"]
    model.graph.node.append(helper.make_node("Add", ["choices", "shift"], shifted))
    policy = OnnxPolicy(model)
    with pytest.raises(ExportError, match=r"has choices outside the branches \[3, 4\]"):
        policy.act(steps(hybrid, 3), deterministic=True)
    assert policy.act(steps(hybrid, 3), deterministic=False).discrete.max() < 4


def test_inputs_of_a_unity_package_1_model_are_joined_vectors_numbered_images_and_entity_lists():
    rng = np.random.default_rng(0)
    shapes = [(3,), (1, 4, 4), (2,), (5, 2), (3, 6, 6)]
    obs = [rng.random((2, *shape)).astype(np.float32) for shape in shapes]
    sent = _in_old_layout(obs)
    expected = {"visual_observation_0": obs[1], "visual_observation_1": obs[4], "obs_3": obs[3]}
    expected["vector_observation"] = np.hstack([obs[0], obs[2]])
    assert sent.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(sent[name], array)


def test_file_that_is_not_onnx_is_refused(tmp_path):
    path = tmp_path / "policy.onnx"
    path.write_text("version https://git-lfs")
    with pytest.raises(ExportError, match="is a pointer of Git LFS"):
        OnnxPolicy(path)
    with pytest.raises(ExportError, match="cannot be read"):
        OnnxPolicy(tmp_path / "absent.onnx")


def test_discrete_actions_of_a_unity_package_1_model_are_drawn_from_the_stream_of_the_seed(hybrid):
    model, mask = build_model(hybrid), [np.zeros((40, 3), np.bool_)]
    first, same, other = (OnnxPolicy(model, seed=seed) for seed in (3, 3, 4))
    even = np.zeros((40, 3), np.float32)
    drawn = first._drawn(even, mask)
    np.testing.assert_array_equal(same._drawn(even, mask), drawn)
    for policy in (other, first):
        assert (policy._drawn(even, mask) != drawn).any()
        policy.reset(3)
        np.testing.assert_array_equal(policy._drawn(even, mask), drawn)
