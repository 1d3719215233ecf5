"""A group critic's batched values equal the values of single sets of members."""

import math

import numpy as np
import pytest
import torch

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.nets.attention import N_HEADS
from pipeline.nets.distributions import flat_actions
from pipeline.nets.group_critic import GroupCritic, GroupLayout
from pipeline.settings.trainer.schema import ATTENTION_HEADS, NetworkSettings

VECTOR = [ObservationSpec.vector(3)]
SPECS = {
    "vector": (VECTOR, ActionSpec.create_hybrid(2, [3, 2])),
    "entities": ([*VECTOR, ObservationSpec.entities(4, 2)], ActionSpec.create_discrete([3])),
    "visual": ([*VECTOR, ObservationSpec.visual(3, 20, 20)], ActionSpec.create_continuous(1)),
}


def test_the_settings_and_the_networks_have_the_same_number_of_attention_heads():
    assert ATTENTION_HEADS == N_HEADS


def critic_and_members(name, n=6, memory=0):
    observations, actions = SPECS[name]
    spec = BehaviorSpec(observations, actions)
    torch.manual_seed(1)
    settings = NetworkSettings(hidden_units=16, num_layers=2)
    critic = GroupCritic(spec, settings, ["extrinsic", "gail"])
    with torch.no_grad():  # large enough that differences show
        for layer in critic.dense.layers:
            layer.weight *= 30.0
    critic.update_largest_group(4)
    obs = [torch.randn(n, *obs_spec.shape) for obs_spec in observations]
    continuous = torch.randn(n, actions.continuous_size)
    discrete = torch.stack(
        [torch.randint(0, size, (n,)) for size in actions.discrete_branches]
        or [torch.zeros(n, dtype=torch.int64)],
        dim=1,
    )[:, : actions.discrete_size]
    return critic, obs, flat_actions(continuous, discrete, actions.discrete_branches)


def slow_value(critic, obs, actions, members):
    """Return the value [signals] of one set, head by head; members are (number, with its action).

    It uses the critic's layers, but not its code that combines the sets.
    """
    embeddings = []
    for number, acts in members:
        code = critic.encoder([values[number : number + 1] for values in obs])[0]
        layer, x = critic.seen, code
        if acts:
            layer, x = critic.done, torch.cat((code, actions[number]))
        embeddings.append(torch.nn.functional.silu(layer(x)))
    attention, H = critic.attention, critic.size
    x = torch.nn.functional.layer_norm(torch.stack(embeddings), (H,))
    query, key, value = attention.query(x), attention.key(x), attention.value(x)
    heads = []
    for first in range(0, H, H // 4):
        part = slice(first, first + H // 4)
        scores = query[:, part] @ key[:, part].T / math.sqrt(H)
        heads.append(torch.softmax(scores, dim=1) @ value[:, part])
    y = torch.nn.functional.layer_norm(attention.out(torch.cat(heads, dim=1)) + x, (H,))
    size = 2.0 * len(members) / critic.largest - 1.0
    return critic.heads(torch.cat((critic.dense(y.mean(0)), size.view(1))))


def sets_of(present, set_numbers):
    """Return the members of each wanted set, for `slow_value`."""
    sets, first = [], 0
    for group in present:
        numbers = [None] * len(group)
        for n, is_present in enumerate(group):
            if is_present:
                numbers[n], first = first, first + 1
        members = [number for number in numbers if number is not None]
        sets.append([(number, False) for number in members])
        sets += [[(number, number != agent) for number in members] for agent in numbers]
    return [sets[k] for k in set_numbers]


FULL = [[1, 1, 1], [1, 1, 1]]
PARTLY = [[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 1, 0]]
CASES = {
    "full groups": (FULL, list(range(8))),
    "full groups, some rows in another order": (FULL, [0, 4, 6, 2]),
    "members absent": (PARTLY, [0, 1, 2, 4, 5, 8, 9, 11, 12, 14]),
    "members absent, some rows in another order": (PARTLY, [0, 4, 8, 12, 11, 2]),
    "groups of one": ([[1]] * 6, list(range(12))),
}


def groups_of(present, set_numbers):
    set_numbers = None if set_numbers is None else np.array(set_numbers)
    return GroupLayout.of(np.array(present, dtype=np.bool_), set_numbers)


def together_and_alone(critic, obs, actions, present, set_numbers):
    """Return values [K, signals] by the critic, and computed set by set."""
    together = critic(obs, None, actions, groups_of(present, set_numbers))
    sets = sets_of(present, set_numbers)
    return together, torch.stack([slow_value(critic, obs, actions, members) for members in sets])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SPECS)
def test_values_and_baselines_in_a_batch_equal_values_and_baselines_computed_one_by_one(name, case):
    critic, obs, actions = critic_and_members(name)
    together, separate = together_and_alone(critic, obs, actions, *CASES[case])
    assert together.shape == (len(CASES[case][1]), 2)
    assert separate.std(0).min() > 1e-2
    torch.testing.assert_close(together, separate, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_estimates_in_a_batch_equal_gradients_of_estimates_computed_one_by_one(case):
    critic, obs, actions = critic_and_members("vector")
    together, separate = together_and_alone(critic, obs, actions, *CASES[case])
    by_values = torch.randn_like(separate)
    parameters = dict(critic.named_parameters())
    pair = [
        torch.autograd.grad(values, list(parameters.values()), by_values, allow_unused=True)
        for values in (together, separate)
    ]
    for name, ours, slow in zip(parameters, *pair, strict=True):
        if slow is None:  # in groups of a single member no action is an input
            assert ours is None or ours.abs().max() < 1e-6, name
        else:
            torch.testing.assert_close(ours, slow, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("present", [FULL, PARTLY])
def test_values_computed_without_baselines_equal_values_computed_with_baselines(present):
    critic, obs, actions = critic_and_members("vector")
    n_looks = 1 + len(present[0])
    values = [n_looks * m for m in range(len(present))]
    with_baselines = critic(obs, None, actions, groups_of(present, values))
    without_baselines = critic(obs, None, None, groups_of(present, None))
    torch.testing.assert_close(without_baselines, with_baselines, rtol=1e-4, atol=1e-6)


def test_the_group_critic_reads_the_size_of_a_group_relative_to_the_largest_group():
    critic, _, _ = critic_and_members("vector")
    critic.update_largest_group(2)
    assert float(critic.largest) == 4.0
    all_there = groups_of([[1, 1, 1]], None)
    assert critic._how_many(torch.ones(1, 4), all_there).tolist() == [[pytest.approx(0.5)]]
    fewer = groups_of([[1, 1, 1], [1, 0, 0]], [0, 4, 5])
    sizes = critic._how_many(torch.ones(3, 4), fewer).flatten().tolist()
    assert sizes == pytest.approx([0.5, -0.5, -0.5])


def test_every_parameter_of_the_group_critic_has_a_gradient():
    critic, obs, actions = critic_and_members("entities")
    critic(obs, None, actions, groups_of([[1, 1, 1, 0], [1, 1, 1, 0]], [1, 5, 6])).sum().backward()
    without = [name for name, parameter in critic.named_parameters() if parameter.grad is None]
    assert without == []
