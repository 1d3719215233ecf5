"""A group critic's shared work gives what each set would give by itself."""

import pytest
import torch

from pipeline.nets.group_critic import GroupCritic, Sets
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings.schema import NetworkSettings

VECTOR = [ObservationSpec.vector(3)]
SPECS = {
    "vector": (VECTOR, ActionSpec.create_hybrid(2, [3, 2])),
    "entities": ([*VECTOR, ObservationSpec.entities(4, 2)], ActionSpec.create_discrete([3])),
    "visual": ([*VECTOR, ObservationSpec.visual(3, 20, 20)], ActionSpec.create_continuous(1)),
}


def critic_and_members(name, n=6, memory=0):
    observations, actions = SPECS[name]
    spec = BehaviorSpec(observations, actions)
    torch.manual_seed(1)
    settings = NetworkSettings(hidden_units=16, num_layers=2)
    critic = GroupCritic(spec, settings, ["extrinsic", "gail"])
    with torch.no_grad():  # not so small that nothing shows
        for layer in critic.dense.layers:
            layer.weight *= 30.0
    critic.notice(4)
    obs = [torch.randn(n, *one.shape) for one in observations]
    continuous = torch.randn(n, actions.continuous_size)
    discrete = torch.stack(
        [torch.randint(0, size, (n,)) for size in actions.discrete_branches]
        or [torch.zeros(n, dtype=torch.int64)],
        dim=1,
    )[:, : actions.discrete_size]
    return critic, obs, critic.flat_actions(continuous, discrete)


def value_of(critic, obs, actions, members):
    """Value of one set alone; each member is (number, whether its action is seen)."""
    rows = torch.tensor([number for number, _ in members])
    alone = torch.arange(len(members))
    index = alone + len(members) * torch.tensor([acts for _, acts in members])
    sets = Sets(index=index[None])
    return critic([one[rows] for one in obs], None, actions[rows], sets)[0]


CASES = [
    [(0, False), (1, False), (2, False)],
    [(0, False), (1, True), (2, True)],
    [(3, False)],
    [(4, True), (5, False)],
    [(0, True), (2, False), (4, True), (5, True)],
]


@pytest.mark.parametrize("name", SPECS)
def test_sets_of_different_sizes_in_one_pass_have_the_values_they_have_alone(name):
    critic, obs, actions = critic_and_members(name)
    n = len(actions)
    index = torch.zeros(len(CASES), 4, dtype=torch.int64)
    absent = torch.ones(len(CASES), 4, dtype=torch.bool)
    for row, members in enumerate(CASES):
        for column, (number, acts) in enumerate(members):
            index[row, column] = number + n * acts
            absent[row, column] = False
    together = critic(obs, None, actions, Sets(index=index, absent=absent))
    alone = torch.stack([value_of(critic, obs, actions, members) for members in CASES])
    assert together.shape == (len(CASES), 2)
    assert alone.std(0).min() > 1e-2
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_order_of_members_does_not_matter():
    critic, obs, actions = critic_and_members("vector")
    members = CASES[4]
    torch.testing.assert_close(
        value_of(critic, obs, actions, members), value_of(critic, obs, actions, members[::-1])
    )


def test_a_baseline_sees_what_mates_do_and_not_what_the_agent_itself_does():
    critic, obs, actions = critic_and_members("vector")
    before = value_of(critic, obs, actions, CASES[1])
    own, mates = actions.clone(), actions.clone()
    own[0] += 1.0
    mates[2] += 1.0
    assert torch.equal(value_of(critic, obs, own, CASES[1]), before)
    assert not torch.allclose(value_of(critic, obs, mates, CASES[1]), before, atol=1e-3)


def test_the_number_of_members_enters_relative_to_the_largest_group_seen():
    critic, _, _ = critic_and_members("vector")
    critic.notice(2)
    assert float(critic.largest) == 4.0
    sets = Sets(index=torch.zeros(1, 3, dtype=torch.int64))
    assert float(critic._how_many(sets)) == pytest.approx(0.5)
    fewer = Sets(index=sets.index, absent=torch.tensor([[False, True, True]]))
    assert float(critic._how_many(fewer)) == pytest.approx(-0.5)


def test_gradients_reach_every_parameter():
    critic, obs, actions = critic_and_members("entities")
    value_of(critic, obs, actions, CASES[1]).sum().backward()
    without = [name for name, one in critic.named_parameters() if one.grad is None]
    assert without == []
