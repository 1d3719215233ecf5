"""The bytes of exported models: one digest (16 digits of SHA-256) per kind of policy.

Digests may change only with an intended change of exports. Run this file as a program to print the
digests: `python -m tests.unit.export.test_golden_exports`.
"""

import hashlib
import zlib

import numpy as np
import onnx
import pytest
import torch

from pipeline.algos.policy import Policy
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.export.publish import build_model, model_bytes, publish, record
from pipeline.settings import load_run_settings

VECTOR, LIST, IMAGE = ObservationSpec.vector, ObservationSpec.entities, ObservationSpec.visual
GOAL = VECTOR(2, "goal", ObservationType.GOAL_SIGNAL)
IMAGE_GOAL = IMAGE(1, 20, 20)._replace(observation_type=ObservationType.GOAL_SIGNAL)
LIST_GOAL = LIST(4, 2)._replace(observation_type=ObservationType.GOAL_SIGNAL)
TWO = [VECTOR(6), VECTOR(3)]
CONTINUOUS, DISCRETE, HYBRID = ActionSpec(3, ()), ActionSpec(0, (3, 2)), ActionSpec(2, (4,))
MEMORY = {"memory": {"memory_size": 6}}
ALL = [VECTOR(3), LIST(6, 5), IMAGE(3, 20, 20), LIST(3, 2), GOAL]

# Observations, actions, whether squashed, network settings, digest.
KINDS = {
    "PPO continuous": (TWO, CONTINUOUS, False, {}, "7e3012d28b276491"),
    "PPO continuous normalised": (TWO, CONTINUOUS, False, {"normalize": True}, "9d79fbec3c8d3d40"),
    "PPO discrete": (TWO, DISCRETE, False, {}, "8103fd1b60a18686"),
    "PPO hybrid": (TWO, HYBRID, False, {"normalize": True, "num_layers": 3}, "0f53e48f866654a0"),
    "SAC continuous": (TWO, CONTINUOUS, True, {}, "d8b2dc24d4a0e24d"),
    "SAC discrete": (TWO, DISCRETE, True, {"normalize": True}, "3da7faa7700ef5cf"),
    "SAC hybrid": (TWO, HYBRID, True, {"normalize": True}, "df2f8701583bd974"),
    "memory": (TWO, HYBRID, False, MEMORY | {"normalize": True}, "be569598aff31b29"),
    "SAC with memory": (TWO, HYBRID, True, MEMORY, "98fc9cbf5f6209fd"),
    "goal layer": ([VECTOR(6), GOAL], HYBRID, False, {"normalize": True}, "b9fcfc7ee6d3cb6b"),
    "nothing but a goal layer": ([GOAL], CONTINUOUS, False, {"num_layers": 1}, "8ad312e15a98ec07"),
    "goal as input": ([VECTOR(6), GOAL], DISCRETE, False, {"goal_conditioning_type": "none"},
        "fb267d6211597a3b"),
    "goals of every kind": ([VECTOR(6), LIST_GOAL, GOAL, IMAGE_GOAL, LIST(3, 2)], HYBRID, False,
        {"normalize": True}, "346d1cd8f20a3042"),
    "entities": ([LIST(6, 5, "crowd"), VECTOR(4)], DISCRETE, False, {"normalize": True},
        "da40773a228d3390"),
    "nothing but entities": ([LIST(6, 5)], CONTINUOUS, True, {}, "c49fc16bf2441e1e"),
    "simple": ([IMAGE(3, 20, 23), VECTOR(4)], HYBRID, False, {"vis_encode_type": "simple",
        "normalize": True}, "049dadde1d84e43a"),
    "nature_cnn": ([VECTOR(4), IMAGE(1, 36, 37)], HYBRID, True,
        {"vis_encode_type": "nature_cnn"}, "5e8739a71d1ddfb3"),
    "match3": ([IMAGE(2, 5, 6)], DISCRETE, False, {"vis_encode_type": "match3"},
        "a9059e41256d57d6"),
    "resnet": ([VECTOR(4), IMAGE(3, 15, 17), VECTOR(2)], HYBRID, False,
        {"vis_encode_type": "resnet", "normalize": True}, "2a4d2586ccf9f987"),
    "fully_connected": ([IMAGE(2, 3, 4)], CONTINUOUS, False,
        {"vis_encode_type": "fully_connected"}, "a7354245df24ad55"),
    "everything": (ALL, HYBRID, False, MEMORY | {"normalize": True}, "4a8b8245e3c24d8d"),
    "everything squashed": (ALL, HYBRID, True, MEMORY | {"normalize": True}, "25f8482288e067c1"),
}  # fmt: skip


def policy_of(kind: str) -> Policy:
    obs, actions, squash, network, _ = KINDS[kind]
    network = {"hidden_units": 16} | network
    values = {"behaviors": {"B": {"trainer_type": "ppo", "network_settings": network}}}
    settings = load_run_settings(None, overrides=values).for_behavior("B").network_settings
    policy = Policy(BehaviorSpec(obs, actions), settings, squash=squash)
    policy.load_state_dict(
        {name: numbers(name, tensor) for name, tensor in policy.state_dict().items()}
    )
    return policy


def numbers(name: str, like: torch.Tensor) -> torch.Tensor:
    """Numbers that are the same on every machine: the bits of a stream that its name seeds.

    All lie between -0.5 and 0.5 but the statistics of normalisers, which lie above 0.
    """
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(like.numel())
    values = (np.asarray(bits) >> 40).astype(np.float64) / (1 << 24)
    is_statistic = name.startswith("normalizers.")
    values = values + 0.5 if is_statistic else values - 0.5
    return torch.from_numpy(values).to(like.dtype).view(like.shape)


def digest(kind: str) -> str:
    model = build_model(policy_of(kind))
    for tensor in model.graph.initializer:
        if tensor.name == "sigma":  # an exponential: its last bits depend on the processor
            bits = np.frombuffer(tensor.raw_data, dtype=np.uint32)
            tensor.raw_data = ((bits + 0x80) & ~np.uint32(0xFF)).tobytes()
    return hashlib.sha256(model_bytes(model)).hexdigest()[:16]


@pytest.mark.parametrize("kind", KINDS)
def test_exported_bytes_have_the_stored_digest(kind):
    assert digest(kind) == KINDS[kind][-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_file_of_each_kind_of_policy_passes_all_checks(tmp_path, kind):
    policy = policy_of(kind)
    rng = np.random.default_rng(0)
    specs, actions = policy.spec
    obs = [
        rng.normal(1, 2, (40, *observation_spec.shape)).astype(np.float32)
        for observation_spec in specs
    ]
    for entities in (values for values in obs if values.ndim == 3):
        most = entities.shape[1]
        entities[np.arange(most) >= rng.integers(0, most + 1, (40, 1))] = 0.0
    masks = np.ones((40, sum(actions.discrete_branches)), dtype=np.float32)
    masks[::3, :1] = 0
    recording = record(policy, obs, masks if actions.discrete_size else None)
    report = publish(policy, tmp_path / "p.onnx", recording=recording)
    assert (report.rows, report.discrete_ties) == (40, 0)


def test_any_changed_weight_changes_the_digest():
    """Every tensor of the policy changes the file, so that no module can be left out."""
    policy = policy_of("everything squashed")
    before = model_bytes(build_model(policy))
    for name, tensor in policy.state_dict().items():
        tensor.view(-1)[0] += 1.0
        policy.load_state_dict(policy.state_dict())
        after = model_bytes(build_model(policy))
        assert after != before, name
        before = after


if __name__ == "__main__":
    print(f"onnx {onnx.__version__}")  # noqa: T201
    for kind in KINDS:
        print(f"{kind}: {digest(kind)}")  # noqa: T201
