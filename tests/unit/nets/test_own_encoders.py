"""Encoders in a file of the user, and the shape of the dense layers."""

import numpy as np
import onnx
import pytest
import torch

from pipeline.algos.policy import Policy
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import SettingsError
from pipeline.export.contract import SAFE_OPERATORS
from pipeline.export.publish import build_model, publish, record
from pipeline.nets.encoder import ObservationEncoder
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

VECTOR, IMAGE = ObservationSpec.vector(12), ObservationSpec.visual(3, 16, 20)
HYBRID = ActionSpec(2, (3,))
ACTIVATIONS = ("swish", "relu", "tanh", "elu", "gelu", "leaky_relu")
UNTRACED = "cannot be exported to ONNX"


def policy_of(*specs, actions=HYBRID, squash=False, **network):
    torch.manual_seed(3)
    policy = Policy(BehaviorSpec(list(specs), actions), NetworkSettings(**network), squash=squash)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def observations(policy, n=20):
    rng = np.random.default_rng(4)
    shapes = [spec.shape for spec in policy.spec.observation_specs]
    return [rng.normal(size=(n, *shape)).astype(np.float32) for shape in shapes]


def published(policy, path):
    """Publish a policy, which compares all its actions with the file's."""
    report = publish(policy, path, recording=record(policy, observations(policy)))
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert operators <= SAFE_OPERATORS
    return report


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *((name, VECTOR) for name in ("Normalised", "Residual", "Sequence", "Attentive")),
        ("Convolutional", IMAGE),
    ],
)
def test_exported_encoder_of_a_user_computes_the_same_as_torch(tmp_path, name, spec):
    policy = policy_of(spec, encoder=f"own_parts:{name}", hidden_units=16, normalize=True)
    policy.normalizers.update([torch.from_numpy(x) for x in observations(policy)])
    report = published(policy, tmp_path / "policy.onnx")
    assert report.rows == 20
    again = publish(policy, tmp_path / "b.onnx", recording=record(policy, observations(policy)))
    assert again.sha256 == report.sha256


def test_encoders_of_a_user_are_exported_for_vectors_with_memory_and_for_images(tmp_path):
    memory = MemorySettings(memory_size=8, sequence_length=4)
    policy = policy_of(VECTOR, VECTOR, encoder="own_parts:Residual", memory=memory, squash=True)
    assert len(policy.actor.body.encoders) == 2
    published(policy, tmp_path / "policy.onnx")
    images = policy_of(IMAGE, VECTOR, vis_encode_type="own_parts:Convolutional")
    assert list(images.actor.body.encoders) == ["0"]
    published(images, tmp_path / "images.onnx")


@pytest.mark.parametrize(
    ("name", "spec", "said"),
    [
        ("ExactGelu", VECTOR, f"{UNTRACED}: gelu needs approximate='tanh'"),
        ("Recurrent", VECTOR, f"{UNTRACED}: it computes [a-z_]+; docs/how-to/plugins.md"),
        ("Upsampled", IMAGE, f"{UNTRACED}: it computes upsample_nearest2d; docs"),
        ("WithToken", VECTOR, f"{UNTRACED}: a constant has a shape that depends on the number of"),
        ("Narrow", VECTOR, r"its forward maps \[3, 12\] to \[3, 15\], but must give \[3, 16\]"),
        ("Pair", VECTOR, r"its forward maps \[3, 12\] to tuple, but must give \[3, 16\]"),
        ("OfBatch", VECTOR, "depends on the other observations, or on chance"),
        ("WithoutOutput", VECTOR, r"fails for observations of shape \[12\]: TypeError: .*"),
        ("Broken", VECTOR, r"KeyError: 'a missing size' \(own_parts.py:\d+\)$"),
        ("NoModule", VECTOR, "is not a torch.nn.Module"),
        ("function", VECTOR, "is not a class: see docs/how-to/plugins.md"),
        ("Attentiv", VECTOR, "own_parts.py has no function or class 'Attentiv'; did you mean"),
    ],
)
def test_unusable_encoder_of_a_user_is_refused_with_a_message_of_one_line(name, spec, said):
    with pytest.raises(SettingsError, match=said) as error:
        policy_of(spec, encoder=f"own_parts:{name}", hidden_units=16)
    assert f"own_parts:{name}: " in str(error.value)
    assert "\n" not in str(error.value)


def test_encoder_of_a_user_stays_in_evaluation_mode():
    policy = policy_of(VECTOR, encoder="own_parts:Normalised", hidden_units=16)
    obs = [torch.from_numpy(x) for x in observations(policy)]
    acted = policy.actor(obs)
    policy.train()
    assert torch.equal(policy.actor(obs), acted)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_policies_of_dense_layers_choose_equal_actions_in_numpy_torch_and_onnx(
    tmp_path, activation, layer_norm, squash
):
    options = {"activation": activation, "layer_norm": layer_norm, "hidden_units": (24, 8, 16)}
    policy = policy_of(VECTOR, squash=squash, **options)
    widths = [layer.out_features for layer in policy.actor.body.dense.linears]
    assert widths == [24, 8, 16]
    published(policy, tmp_path / "policy.onnx")
    obs = observations(policy, n=9)
    in_torch = policy.actor([torch.from_numpy(x) for x in obs])
    sample = policy.actor.heads.choose(in_torch, None, None)
    in_numpy = policy.numpy_actor(obs, None, None)
    np.testing.assert_allclose(in_numpy.in_range, sample.in_range.detach(), rtol=1e-4, atol=1e-5)


def test_single_number_as_hidden_units_makes_two_layers_and_equals_a_list_of_two_widths():
    torch.manual_seed(1)
    body = ObservationEncoder([VECTOR], NetworkSettings(hidden_units=8))
    names = list(body.state_dict())
    assert names == [f"dense.layers.{i}.{part}" for i in range(2) for part in ("weight", "bias")]
    torch.manual_seed(1)
    same = ObservationEncoder([VECTOR], NetworkSettings(hidden_units=(8, 8), num_layers=3))
    for one, other in zip(body.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)


def test_layer_with_generated_weights_uses_the_activation_and_refuses_layer_norm():
    goal = VECTOR._replace(observation_type=1)
    options = {"activation": "relu", "hidden_units": 8}
    assert build_model(policy_of(VECTOR, goal, **options)).graph.node
    with pytest.raises(SettingsError, match=r"layer_norm: .* set goal_conditioning_type to none"):
        policy_of(VECTOR, goal, layer_norm=True, **options)
