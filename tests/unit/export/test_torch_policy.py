from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

from pipeline.algos.policy import Policy
from pipeline.export.publish import publish
from pipeline.export.torch_policy import describe_policy, record
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.settings import load_run_settings

from .reference import VISUAL_SIDES

VECTOR, GOAL = ObservationSpec.vector, ObservationType.GOAL_SIGNAL
LIST = ObservationSpec.entities
IMAGE_GOAL = ObservationSpec.visual(1, 20, 20)._replace(observation_type=GOAL)
LIST_GOAL = LIST(4, 2)._replace(observation_type=GOAL)
CASES = {
    "continuous": ([VECTOR(6), VECTOR(3)], ActionSpec(3, ()), {"normalize": True}),
    "discrete": ([VECTOR(6)], ActionSpec(0, (3, 2)), {}),
    "hybrid": ([VECTOR(6)], ActionSpec(2, (4,)), {"normalize": True, "num_layers": 3}),
    "goal": ([VECTOR(6), VECTOR(2, "", GOAL)], ActionSpec(2, (5,)), {"normalize": True}),
    "goal as input": (
        [VECTOR(6), VECTOR(2, "", GOAL)],
        ActionSpec(0, (5,)),
        {"goal_conditioning_type": "none"},
    ),
    "one goal layer": ([VECTOR(2, "", GOAL)], ActionSpec(1, ()), {"num_layers": 1}),
    "memory": (
        [VECTOR(6)],
        ActionSpec(2, (4, 3)),
        {"normalize": True, "memory": {"memory_size": 10}},
    ),
    "memory after a goal layer": (
        [VECTOR(6), VECTOR(2, "", GOAL)],
        ActionSpec(0, (5,)),
        {"memory": {"memory_size": 6}},
    ),
    "entities": (
        [LIST(6, 5, "crowd"), VECTOR(4)],
        ActionSpec(0, (3, 2)),
        {"normalize": True},
    ),
    "nothing but entities": ([LIST(6, 5)], ActionSpec(2, ()), {}),
    "goals of every kind": (
        [VECTOR(6), LIST_GOAL, VECTOR(2, "", GOAL), IMAGE_GOAL, LIST(3, 2)],
        ActionSpec(1, (3,)),
        {"normalize": True, "hidden_units": 16},
    ),
    "two lists, an image, a goal layer and memory": (
        [VECTOR(3), LIST(6, 5), ObservationSpec.visual(3, 20, 20), LIST(3, 2), VECTOR(2, "", GOAL)],
        ActionSpec(2, (3,)),
        {"normalize": True, "hidden_units": 16, "memory": {"memory_size": 6}},
    ),
} | {
    kind: (
        [ObservationSpec.visual(3, *sides), VECTOR(4)],
        ActionSpec(2, (3,)),
        {"vis_encode_type": kind, "normalize": True},
    )
    for kind, sides in VISUAL_SIDES.items()
}


def make(obs, actions, network, *, squash=False):
    torch.manual_seed(0)
    values = {"behaviors": {"B": {"trainer_type": "ppo", "network_settings": network}}}
    settings = load_run_settings(None, overrides=values).for_behavior("B").network_settings
    policy = Policy(BehaviorSpec(obs, actions), settings, squash=squash)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.normalizers.update([torch.from_numpy(o) for o in rows(obs, 50, seed=1)])
    return policy


def rows(obs, n_rows, seed=0):
    rng = np.random.default_rng(seed)
    values = [rng.normal(1, 2, (n_rows, *o.shape)).astype(np.float32) for o in obs]
    for one in (one for one in values if one.ndim == 3):
        most = one.shape[1]
        one[np.arange(most) >= rng.integers(0, most + 1, (n_rows, 1))] = 0.0
    return values


SQUASHED = [name for name, (_, actions, _) in CASES.items() if actions.continuous_size]


@pytest.mark.parametrize(
    ("name", "squash"),
    [(name, False) for name in CASES] + [(name, True) for name in SQUASHED],
)
def test_exported_torch_policy_acts_as_it_did(tmp_path, name, squash):
    obs, actions, network = CASES[name]
    policy = make(obs, actions, network, squash=squash)
    values = rows(obs, 40)
    masks = None
    if actions.discrete_size:
        masks = np.ones((40, sum(actions.discrete_branches)), dtype=np.float32)
        masks[::3, 0] = 0
    recording = record(policy, values, masks)
    report = publish(describe_policy(policy), tmp_path / "p.onnx", recording=recording)
    assert report.rows == 40
    assert report.discrete_ties == 0


def test_exported_squashed_policy_draws_from_the_trained_distribution(tmp_path):
    """Mean and spread of the samples before squashing, at one observation."""
    policy = make([VECTOR(4)], ActionSpec(2, ()), {}, squash=True)
    (seen,) = rows([VECTOR(4)], 1)
    publish(
        describe_policy(policy),
        tmp_path / "p.onnx",
        recording=record(policy, [np.repeat(seen, 3, axis=0)]),
    )
    session = onnxruntime.InferenceSession(tmp_path / "p.onnx", providers=["CPUExecutionProvider"])
    (drawn,) = session.run(["continuous_actions"], {"obs_0": np.repeat(seen, 20_000, axis=0)})
    with torch.no_grad():
        hidden = policy.actor(policy.normalizers([torch.from_numpy(seen)]))
        mu, log_sigma = policy.actor.heads.gaussian(hidden)
    assert np.abs(drawn).max() <= 1.0
    u = np.arctanh(np.clip(drawn.astype(np.float64), -1 + 1e-7, 1 - 1e-7))
    sigma = log_sigma.exp().numpy()[0]
    np.testing.assert_allclose(u.mean(0), mu.numpy()[0], atol=5 * sigma.max() / 20_000**0.5)
    np.testing.assert_allclose(u.std(0), sigma, rtol=0.03)


def test_description_is_a_copy_that_training_does_not_change():
    policy = make(*CASES["continuous"])
    graph = describe_policy(policy)
    before = graph.layers[0].weight.copy()
    with torch.no_grad():
        policy.actor.body.dense.layers[0].weight += 1.0
    np.testing.assert_array_equal(graph.layers[0].weight, before)
