"""Models that ML-Agents trained and shipped can be described, checked and run."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from steps import decision_steps

from pipeline.algos.policy import Policy
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import ExportError
from pipeline.export.contract import check_model, model_findings
from pipeline.export.layout import describe
from pipeline.export.policy import OnnxPolicy, create_session
from pipeline.export.publish import build_model
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

pytestmark = pytest.mark.fixtures

VECTOR = ObservationSpec.vector
SPECS = {
    "3DBall": BehaviorSpec([VECTOR(8)], ActionSpec(2, ())),
    "Basic": BehaviorSpec([VECTOR(20)], ActionSpec(0, (3,))),
    "Hallway": BehaviorSpec([VECTOR(105), VECTOR(3)], ActionSpec(0, (5,))),
    "SmallWallJump": BehaviorSpec([*map(VECTOR, (210, 210, 24))], ActionSpec(0, (3, 3, 3, 2))),
    "SoccerTwos": BehaviorSpec([VECTOR(264), VECTOR(72)], ActionSpec(0, (3, 3, 3))),
    "Sorter": BehaviorSpec(
        [ObservationSpec.entities(20, 23), VECTOR(10), VECTOR(8)], ActionSpec(0, (3, 3, 3))
    ),
    "deterContinuous2vis8vec2action_v2_0": BehaviorSpec([VECTOR(8)], ActionSpec(2, ())),
    "discrete1vis0vec_2_3action_v1_0": BehaviorSpec(
        [ObservationSpec.visual(3, 20, 21)], ActionSpec(0, (2, 3))
    ),
    "hybrid0vis8vec_2c_2_3d_v2_0": BehaviorSpec([VECTOR(8)], ActionSpec(2, (2, 3))),
}
CONTINUOUS = "continuous_actions continuous_action_output_shape"
DISCRETE = "discrete_actions discrete_action_output_shape"
# inputs with shapes, outputs in order, (version, memory, continuous, branches)
SHAPES = {
    "3DBall": ({"obs_0": (8,)}, f"{CONTINUOUS} deterministic_continuous_actions", (3, 0, 2, ())),
    "Basic": ({"obs_0": (20,), "action_masks": (3,)},
              f"{DISCRETE} deterministic_discrete_actions", (3, 0, 0, (3,))),
    "Hallway": ({"obs_0": (105,), "obs_1": (3,), "action_masks": (5,), "recurrent_in": (1, 128)},
                f"{DISCRETE} recurrent_out", (3, 128, 0, (5,))),
    "SmallWallJump": ({"obs_0": (210,), "obs_1": (210,), "obs_2": (24,), "action_masks": (11,)},
                      f"{DISCRETE} deterministic_discrete_actions", (3, 0, 0, (3, 3, 3, 2))),
    "SoccerTwos": ({"vector_observation": (336,), "action_masks": (9,)},
                   f"{DISCRETE} action is_continuous_control action_output_shape",
                   (2, 0, 0, (9,))),
    "Sorter": ({"obs_0": (20, 23), "obs_1": (10,), "obs_2": (8,), "action_masks": (9,)},
               f"{DISCRETE} deterministic_discrete_actions", (3, 0, 0, (3, 3, 3))),
    "deterContinuous2vis8vec2action_v2_0": (
        {"obs_0": (8,)}, f"{CONTINUOUS} deterministic_continuous_actions", (3, 0, 2, ())),
    "discrete1vis0vec_2_3action_v1_0": (
        {"visual_observation_0": (3, 20, 21), "action_masks": (5,)},
        "action discrete_actions is_continuous_control action_output_shape "
        "continuous_action_output_shape discrete_action_output_shape", (2, 0, 0, (5,))),
    "hybrid0vis8vec_2c_2_3d_v2_0": (
        {"obs_0": (8,), "action_masks": (5,), "recurrent_in": (1, 128)},
        f"{CONTINUOUS} {DISCRETE} recurrent_out", (3, 128, 2, (2, 3))),
}  # fmt: skip
V3 = [name for name, (_, _, facts) in SHAPES.items() if facts[0] == 3]
DETERMINISTIC = [name for name in V3 if "deterministic" in SHAPES[name][1]]


@pytest.fixture(scope="module")
def models(fixtures):
    return fixtures / "onnx"


def random_steps(spec, n_agents, seed=0):
    rng = np.random.default_rng(seed)
    obs = [rng.random((n_agents, *o.shape)).astype(np.float32) for o in spec.observation_specs]
    masks = [np.zeros((n_agents, n), dtype=bool) for n in spec.action_spec.discrete_branches]
    return decision_steps(obs, range(n_agents), masks=masks or None)


def test_every_onnx_model_in_the_fixtures_has_an_expected_description(models):
    assert {path.stem for path in models.glob("*.onnx")} == set(SHAPES) == set(SPECS)


@pytest.mark.parametrize("name", SHAPES)
def test_description_of_a_shipped_model_has_its_declared_shapes(models, name):
    inputs, outputs, facts = SHAPES[name]
    description = describe(models / f"{name}.onnx")
    assert {n: info.shape for n, info in description.inputs.items()} == {
        n: ("batch", *shape) for n, shape in inputs.items()
    }
    constants = {"version_number", "memory_size"}
    assert [n for n in description.outputs if n not in constants] == outputs.split()
    assert constants < set(description.outputs)
    assert (
        description.version,
        description.memory_size,
        description.continuous_size,
        description.discrete_branches,
    ) == facts
    assert (description.opset, description.ir_version in (4, 6)) == (9, True)


@pytest.mark.parametrize("name", SPECS)
def test_check_of_a_shipped_model_with_the_right_behavior_has_no_findings(models, name):
    assert check_model(models / f"{name}.onnx") == []
    assert check_model(models / f"{name}.onnx", SPECS[name]) == []
    assert model_findings(models / f"{name}.onnx", SPECS[name]) == []
    assert check_model(models / f"{name}.onnx", BehaviorSpec([VECTOR(2)], ActionSpec(1, (7,))))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("n_agents", [1, 7])
def test_shipped_model_runs_with_any_batch_size(models, name, n_agents):
    spec = SPECS[name]
    policy = OnnxPolicy(models / f"{name}.onnx", seed=1)
    assert policy.has_deterministic_actions == (name in DETERMINISTIC)
    for deterministic in {False, name in DETERMINISTIC}:
        action = policy.act(random_steps(spec, n_agents), deterministic)
        assert action.continuous.shape == (n_agents, spec.action_spec.continuous_size)
        assert action.discrete.shape == (n_agents, spec.action_spec.discrete_size)
        assert np.abs(action.continuous).max(initial=0) <= 1
        assert (action.discrete < np.array(spec.action_spec.discrete_branches or 1)).all()


def test_hallway_model_rebuilt_from_its_weights_gives_equal_logits_and_memories(models):
    """Checks gate order, memory layout and body over 12 steps, each model with its own memory."""
    theirs = onnx.load(models / "Hallway.onnx")
    spec = SPECS["Hallway"]
    ours = build_model(hallway(theirs, spec))
    assert check_model(ours, spec) == []
    (gemm,) = [node for node in theirs.graph.node if "branches.0.weight" in " ".join(node.input)]
    logits = (gemm.output[0], "branch.0.out")
    sessions = [
        create_session(model, 0, [name]) for model, name in zip((theirs, ours), logits, strict=True)
    ]
    memories = [np.zeros((5, 1, 128), dtype=np.float32)] * 2
    for step in range(12):
        feeds = {f"obs_{i}": o for i, o in enumerate(random_steps(spec, 5, seed=step).obs)}
        feeds["action_masks"] = np.ones((5, 5), dtype=np.float32)
        results = [
            session.run([name, "recurrent_out"], feeds | {"recurrent_in": memory})
            for session, name, memory in zip(sessions, logits, memories, strict=True)
        ]
        np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-4)
        memories = [memory for _, memory in results]
        np.testing.assert_allclose(*memories, atol=1e-5)
    assert np.abs(memories[0]).max() > 0.5


def hallway(model, spec):
    """Return a policy with Hallway's weights, the LSTM's gates in torch's order."""
    weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    memory = MemorySettings(memory_size=128)
    policy = Policy(spec, NetworkSettings(hidden_units=128, num_layers=2, memory=memory))

    def gates(rows):
        enter, leave, keep, value = np.split(rows, 4)
        return torch.tensor(np.concatenate([enter, keep, value, leave]))

    def dense(name):
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    (lstm,) = [node for node in model.graph.node if node.op_type == "LSTM"]
    from_x, from_h, biases = (weights[name][0] for name in lstm.input[1:4])
    parts = (from_x, from_h, biases[:256], biases[256:])
    layers, branches = policy.actor.body.dense.layers, policy.actor.heads.branches
    give(layers, [dense(f"{BODY}.{place}") for place in (0, 2)])
    give(branches, [dense(f"{BRANCHES}.0")])
    with torch.no_grad():
        for parameter, rows in zip(policy.actor.memory.lstm.parameters(), parts, strict=True):
            parameter.copy_(gates(rows))
    return policy


def give(layers, weights):
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, weights, strict=True):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))


@pytest.mark.parametrize("n_tiles", [0, 1, 7, 20])
def test_sorter_model_rebuilt_from_its_weights_gives_equal_logits(models, n_tiles):
    """Checks padding, embeddings, heads, scale and mean of attention by the logits."""
    theirs = onnx.load(models / "Sorter.onnx")
    spec = SPECS["Sorter"]
    policy = sorter(theirs, spec)
    ours = build_model(policy)
    assert check_model(ours, spec) == []
    feeds = {f"obs_{i}": o for i, o in enumerate(random_steps(spec, 5, seed=n_tiles).obs)}
    feeds["obs_0"][:, n_tiles:] = 0.0
    with torch.inference_mode():
        hidden = policy.actor([torch.from_numpy(o) for o in feeds.values()])
        by_torch = [branch(hidden).numpy() for branch in policy.actor.heads.branches]
    feeds["action_masks"] = np.ones((5, 9), dtype=np.float32)
    actions = "deterministic_discrete_actions"
    # Output tensors of the three branches of Sorter.
    logits = [n.output[0] for n in theirs.graph.node if ".branches." in " ".join(n.input)]
    expected = create_session(theirs, 0, logits).run([actions, *logits], feeds)
    logits = [f"branch.{i}.out" for i in (0, 1, 2)]
    outputs = create_session(ours, 0, logits).run([actions, *logits], feeds)
    for expected_output, output in zip(
        [*expected, *expected[1:]], [*outputs, *by_torch], strict=True
    ):
        np.testing.assert_allclose(expected_output, output, atol=1e-5)
    assert np.concatenate(expected[1:]).std(axis=0).max() > 0.05


ROLES = {"fc_q": "query", "fc_k": "key", "fc_v": "value", "fc_out": "out"}


BODY = "network_body._body_endoder.seq_layers"
BRANCHES = "action_model._discrete_distribution.branches"


def sorter(model, spec):
    """Return a policy with Sorter's weights; weights of MatMul nodes are found by their bias."""
    weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    products = {n.output[0]: n.input[1] for n in model.graph.node if n.op_type == "MatMul"}
    biases = {n.input[0]: n.input[1] for n in model.graph.node if n.op_type == "Add"}

    def dense(name):
        bias = weights[f"{name}.bias"]
        if f"{name}.weight" in weights:
            return weights[f"{name}.weight"], bias
        return weights[products[biases[f"{name}.bias"]]].T, bias

    policy = Policy(spec, NetworkSettings(hidden_units=128, num_layers=2))
    entities, encoder = policy.actor.body.attention, "network_body.observation_encoder"
    pairs = {
        entities.own: f"{encoder}.x_self_encoder.seq_layers.0",
        entities.embeddings[0]: f"{encoder}.processors.0.self_ent_encoder.seq_layers.0",
    }
    for theirs, ours in ROLES.items():
        pairs[getattr(entities.attention, ours)] = f"{encoder}.rsa.{theirs}"
    for place, layer in zip((0, 2), policy.actor.body.dense.layers, strict=True):
        pairs[layer] = f"{BODY}.{place}"
    for index, branch in enumerate(policy.actor.heads.branches):
        pairs[branch] = f"{BRANCHES}.{index}"
    dense_weights = [dense(name) for name in pairs.values()]
    sizes = sum(weight.size + bias.size for weight, bias in dense_weights)
    assert sizes == sum(p.numel() for p in policy.actor.parameters())
    give(pairs, dense_weights)
    return policy


def test_deterministic_actions_are_refused_if_the_model_has_no_output_for_them(models):
    policy = OnnxPolicy(models / "Hallway.onnx")
    with pytest.raises(ExportError, match="no output deterministic_discrete_actions"):
        policy.act(random_steps(SPECS["Hallway"], 1), deterministic=True)


def test_discrete_actions_of_a_version_2_model_follow_the_probabilities_and_masks(models):
    path, n_draws = models / "SoccerTwos.onnx", 4000
    one = random_steps(SPECS["SoccerTwos"], 1)
    steps = decision_steps(
        [np.repeat(array, n_draws, axis=0) for array in one.obs],
        masks=[np.tile([branch == 1, False, False], (n_draws, 1)) for branch in range(3)],
    )
    vectors = np.concatenate(one.obs, axis=1)
    allowed = np.array([[1, 1, 1, 0, 1, 1, 1, 1, 1]], np.float32)
    feeds = {"vector_observation": vectors, "action_masks": allowed}
    (log_probs,) = create_session(onnx.load(path), 0).run(["discrete_actions"], feeds)
    policy = OnnxPolicy(path, seed=1)
    choices = policy.act(steps, deterministic=False).discrete
    for branch in range(3):
        found = np.bincount(choices[:, branch], minlength=3) / n_draws
        expected = np.exp(log_probs[0, 3 * branch : 3 * branch + 3])
        np.testing.assert_allclose(found, expected, atol=0.03)
    assert (choices[:, 1] != 0).all()
    assert (choices[:, 0] != choices[:, 1]).any()
    policy.reset(1)
    np.testing.assert_array_equal(policy.act(steps, deterministic=False).discrete, choices)
    with pytest.raises(ExportError, match="no output deterministic_action; it was exported"):
        policy.act(steps, deterministic=True)
    no_masks = decision_steps(one.obs)
    with pytest.raises(
        ExportError, match="the sizes of the branches, only their sum; give the action_m"
    ):
        policy.act(no_masks, deterministic=False)


def test_model_of_an_unknown_version_is_refused(models):
    model = onnx.load(models / "SoccerTwos.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "version_number":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.ones(1, np.float32), tensor.name))
    with pytest.raises(
        ExportError, match="version_number is 1, but only models of the versions 2 and 3"
    ):
        OnnxPolicy(model)
