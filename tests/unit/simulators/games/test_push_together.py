import itertools

import numpy as np
import pytest
from playing import begun, now, put, returns, step

from pipeline.simulators import registry
from pipeline.simulators.games import push_together
from pipeline.simulators.games.push_together import BEHAVIOR, PushTogether

NOTHING, _, DOWN, LEFT, RIGHT = range(5)


def placed(*cells, block=2, pit=(1, 5)):
    """Return a game of one area with the given cells."""
    return put(begun(PushTogether, 3), cell=cells, block=block, pit=pit, open=True)


def test_agent_that_fills_the_pit_ends_its_episode_while_the_other_agents_continue():
    simulator = placed((0, 5), (4, 0), (4, 1))
    decisions, terminals = step(simulator, DOWN, NOTHING, NOTHING)
    assert terminals.agent_id.tolist() == [0]
    assert terminals.reward == pytest.approx([-0.1])
    assert terminals.interrupted.tolist() == [False]
    assert terminals.group_id.tolist() == [1]
    assert decisions.agent_id.tolist() == [1, 2]
    assert decisions.reward.tolist() == [0.0, 0.0]
    # The other agents observe that the pit is filled, and that one agent has left.
    assert decisions.obs[0][:, 5].tolist() == [0.0, 0.0]
    assert decisions.obs[0][:, [6, 9]].tolist() == [[0.0, 1.0], [0.0, 1.0]]
    decisions, terminals = step(simulator, RIGHT, RIGHT)
    assert (len(decisions), len(terminals)) == (2, 0)


def test_only_the_first_of_two_agents_that_enter_the_pit_ends_its_episode():
    simulator = placed((1, 6), (0, 5), (4, 1))
    decisions, terminals = step(simulator, LEFT, DOWN, NOTHING)
    assert terminals.agent_id.tolist() == [0]
    assert decisions.agent_id.tolist() == [1, 2]


def test_success_ends_the_episode_of_the_group_and_replaces_the_agent_that_filled_the_pit():
    simulator = placed((0, 6), (1, 4), (2, 4), block=5, pit=(1, 6))
    step(simulator, DOWN, NOTHING, NOTHING)
    decisions, terminals = step(simulator, RIGHT, RIGHT)
    assert terminals.agent_id.tolist() == [1, 2]
    assert terminals.group_reward == pytest.approx([1.25, 1.25])
    assert terminals.interrupted.tolist() == [False, False]
    assert decisions.agent_id.tolist() == [3, 1, 2]
    assert decisions.group_reward.tolist() == [0.0] * 3
    assert decisions.obs[0][:, [6, 9]].tolist() == [[1.0, 1.0]] * 3


def test_step_limit_interrupts_the_remaining_agents():
    simulator = placed((0, 5), (4, 0), (4, 1))
    step(simulator, DOWN, NOTHING, NOTHING)
    for _ in range(push_together.MAX_STEP - 2):
        _, terminals = step(simulator, NOTHING, NOTHING)
        assert len(terminals) == 0
    decisions, terminals = step(simulator, NOTHING, NOTHING)
    assert terminals.agent_id.tolist() == [1, 2]
    assert terminals.interrupted.tolist() == [True, True]
    assert len(decisions) == 3


def test_agents_and_pit_begin_on_different_cells_and_use_every_allowed_cell():
    state = now(begun(PushTogether, 1800, seed=2))
    cells = np.concatenate((state.cell, state.pit[:, None]), axis=1)
    numbers = cells[..., 0] * push_together.COLUMNS + cells[..., 1]
    assert all(len(set(row)) == 4 for row in numbers.tolist())
    block = {push_together.COLUMNS * row + push_together.START for row in (1, 2, 3)}
    assert set(numbers[:, :3].ravel().tolist()) == set(range(40)) - block
    assert {tuple(pit) for pit in state.pit.tolist()} == set(itertools.product((1, 2, 3), (4, 5)))


def test_areas_have_no_pit_if_the_parameter_pit_is_0():
    simulator = PushTogether(n_agents=30)
    simulator.set_parameter("pit", 0.0)
    decisions, _ = simulator.reset()[BEHAVIOR]
    assert not now(simulator).open.any()
    assert not decisions.obs[0][:, 5].any()


def test_filling_the_pit_lowers_the_return_of_the_agent_and_raises_the_return_of_its_group():
    """The dilemma that group credit solves: each agent alone gains if another agent falls."""
    expert = registry.expert("push_together")
    ended = returns("push_together", BEHAVIOR, episodes=300)[BEHAVIOR]
    fell = ended[:, 0] < 0
    who_fell, mates = (ended[rows, :2].sum(axis=1) for rows in (fell, ~fell))
    simulator = registry.make("push_together", seed=3)
    decisions, _ = simulator.reset()[BEHAVIOR]
    group_return = 0.0
    for _ in range(push_together.MAX_STEP):
        decisions.obs[0][:, 5] = 0.0  # as if the pit were filled
        decisions, terminals = simulator.step({BEHAVIOR: expert(decisions)})[BEHAVIOR]
        group_return += decisions.group_reward.sum() + terminals.group_reward.sum()
    if_none_falls = group_return / registry.entry("push_together").n_agents
    assert who_fell.mean() < 0.0 < 0.25 < if_none_falls < 0.5 < mates.min()
