"""Decisions in NumPy equal decisions in torch, except for rounding."""

import copy

import numpy as np
import pytest
import torch

from pipeline.algos import policy as policy_module
from pipeline.algos.policy import Policy
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.nets.fast.adam import FlatAdam
from pipeline.nets.fast.numpy_actor import MOST_AGENTS
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

ACTIONS = {
    "continuous": ActionSpec(3, ()),
    "discrete": ActionSpec(0, (2, 4)),
    "hybrid": ActionSpec(2, (3, 2, 5)),
}
STREAM = torch.Generator()
GOAL = ObservationSpec.vector(3)._replace(observation_type=ObservationType.GOAL_SIGNAL)
IMAGE = ObservationSpec.visual(3, 20, 20)


def policy_of(actions, *, squash=False, seen=(5, 2), specs=None, spread=0.3, **network):
    torch.manual_seed(0)
    spec = BehaviorSpec(specs or [ObservationSpec.vector(n) for n in seen], actions)
    policy = Policy(spec, NetworkSettings(hidden_units=16, **network), squash=squash)
    with torch.no_grad():
        for parameter in policy.parameters():  # initial biases and log sigmas are zeros
            parameter.add_(spread * torch.randn_like(parameter))
    return policy


def decisions(policy, n=6, *, masked=True, n_goals=None):
    """Return decisions of NumPy and of torch, for equal observations and random numbers.

    With `n_goals`, goals repeat after as many rows.
    """
    rng = np.random.default_rng(n)
    specs = policy.spec.observation_specs
    obs = [(3.0 * rng.normal(size=(n, *spec.shape))).astype(np.float32) for spec in specs]
    for values, spec in zip(obs, specs, strict=True):
        if n_goals and spec.observation_type == ObservationType.GOAL_SIGNAL:
            values[:] = values[np.arange(n) % n_goals]
        values.flags.writeable = False  # as arrays from the wire may be
    mask = [rng.random((n, size)) < 0.4 for size in policy.spec.action_spec.discrete_branches]
    for branch_mask in mask:
        branch_mask[:, 1] = False  # a choice is allowed
    mask = mask if masked and mask else None
    in_numpy, in_torch = policy, copy.deepcopy(policy)
    in_torch.numpy_actor = None
    return [x.act(obs, mask, torch.Generator().manual_seed(3)) for x in (in_numpy, in_torch)]


def assert_same(decision, expected):
    for name, values in expected.rows.items():
        assert np.asarray(decision.rows[name]).dtype == np.asarray(values).dtype, name
        np.testing.assert_allclose(decision.rows[name], values, rtol=1e-5, atol=2e-6, err_msg=name)
    assert decision.action.continuous.dtype == np.float32
    np.testing.assert_allclose(decision.action.continuous, expected.action.continuous, atol=2e-6)
    np.testing.assert_array_equal(decision.action.discrete, expected.action.discrete)
    assert decision.entropy == pytest.approx(expected.entropy, rel=1e-5)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("squash", [True, False])
@pytest.mark.parametrize("actions", ACTIONS)
def test_numpy_decisions_equal_torch_decisions(actions, squash, deterministic, masked):
    policy = policy_of(ACTIONS[actions], squash=squash, deterministic=deterministic)
    assert policy.numpy_actor is not None
    for n in (1, 2, 6, MOST_AGENTS):
        assert_same(*decisions(policy, n, masked=masked))


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_numpy_decisions_from_normalised_observations_equal_torch_decisions(layers):
    policy = policy_of(ActionSpec(2, (3,)), normalize=True, num_layers=layers)
    for scale in (1.0, 10.0):  # the statistics change, and some numbers are clipped
        policy.normalizers.update([scale * torch.randn(9, 5), torch.randn(9, 2) + scale])
        assert_same(*decisions(policy))


def test_numpy_decisions_with_nearly_certain_choices_equal_torch_decisions():
    policy = policy_of(ActionSpec(0, (3, 2)), seen=(5,))
    for branch in policy.actor.heads.branches:
        branch.weight.data.mul_(300.0)  # exp of these logits is not finite in float32
    assert_same(*decisions(policy))


def test_numpy_decisions_use_the_current_weights():
    policy = policy_of(ActionSpec(2, (3,)))
    first, _ = decisions(policy)
    optimizer = FlatAdam(policy.parameters(), learning_rate=0.1)  # moves them
    assert_same(*decisions(policy))
    optimizer.gradient.fill_(1.0)
    optimizer.step()
    changed, in_torch = decisions(policy)
    assert_same(changed, in_torch)
    assert not np.allclose(changed.rows["log_prob"], first.rows["log_prob"])
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        twin.actor.heads.log_sigma.fill_(0.5)
    assert_same(*decisions(twin))
    np.testing.assert_array_equal(decisions(policy)[0].rows["log_prob"], changed.rows["log_prob"])


@pytest.mark.parametrize("actions", ACTIONS)
def test_each_decision_draws_new_random_numbers_and_a_copied_policy_draws_separate_numbers(actions):
    policy = policy_of(ACTIONS[actions], normalize=True)
    in_numpy, in_torch = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for n in (4, 4, 2, 4):
        obs = [np.ones((n, 5), np.float32), np.ones((n, 2), np.float32)]
        twin = copy.deepcopy(policy)
        twin.numpy_actor = None
        drawn = policy.act(obs, None, in_numpy)
        assert_same(drawn, twin.act(obs, None, in_torch))
        log_prob = drawn.rows["log_prob"].copy()
        policy = copy.deepcopy(policy)  # the copy must not share drawn numbers
        policy.act(obs, None, torch.Generator())
        np.testing.assert_array_equal(drawn.rows["log_prob"], log_prob)


@pytest.mark.parametrize("n_goals", [1, 3, 6])
@pytest.mark.parametrize(
    "others",
    [
        {"goal": GOAL},
        {"goal": GOAL, "more": GOAL},
        {"image": IMAGE, "goal": GOAL},
        {"image": IMAGE._replace(observation_type=ObservationType.GOAL_SIGNAL)},
        {"entities": ObservationSpec.entities(4, 3)},
        {"entities": ObservationSpec.entities(4, 3), "goal": GOAL, "image": IMAGE},
    ],
    ids="+".join,
)
def test_numpy_decisions_from_images_entities_and_goals_equal_torch_decisions(others, n_goals):
    specs = [ObservationSpec.vector(4), *others.values()]
    for layers in (1, 2):
        policy = policy_of(
            ActionSpec(2, (3,)), specs=specs, spread=0.05, normalize=True, num_layers=layers
        )
        policy.normalizers.update([torch.randn(9, *spec.shape) + 1.0 for spec in specs])
        assert policy.numpy_actor is not None
        assert_same(*decisions(policy, n_goals=n_goals))


def test_decisions_with_memory_or_for_many_agents_are_computed_by_torch(monkeypatch):
    memory = MemorySettings(memory_size=8, sequence_length=4)
    assert policy_of(ActionSpec(2, ()), memory=memory).numpy_actor is None
    policy = policy_of(ActionSpec(2, ()))
    monkeypatch.setattr(policy_module, "MOST_AGENTS", 5)
    calls, ours = [], policy.numpy_actor
    monkeypatch.setattr(policy, "numpy_actor", lambda *args: calls.append(1) or ours(*args))
    for n in (6, 5):
        policy.act([np.zeros((n, 5), np.float32), np.zeros((n, 2), np.float32)], None, STREAM)
        assert bool(calls) == (n == 5)
