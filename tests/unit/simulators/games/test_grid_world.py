import itertools
from collections import deque

import numpy as np
import pytest
from playing import begun, now, put, step
from steps import decision_steps

from pipeline.core.specs import ObservationType
from pipeline.simulators import registry
from pipeline.simulators.games import grid_world
from pipeline.simulators.games.grid_world import BEHAVIOR, GridWorld, draw, forbidden

UP, DOWN, LEFT, RIGHT = 1, 2, 3, 4
CELLS = list(itertools.product(range(5), range(5)))


def placed(agent, plus, ex, wanted=0):
    """Return a game of one area with the given cells."""
    return put(begun(GridWorld), agent=agent, goals=(plus, ex), wanted=wanted)


def shortest(start, goal, blocked):
    seen, waiting = {start: 0}, deque([start])
    while waiting:
        row, column = waiting.popleft()
        if (row, column) == goal:
            return seen[goal]
        for cell in (row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1):
            if cell in CELLS and cell != blocked and cell not in seen:
                seen[cell] = seen[row, column] + 1
                waiting.append(cell)
    raise AssertionError("there is always a way")


def test_second_observation_of_grid_world_is_a_goal_signal():
    _, goal = GridWorld(n_agents=1).behavior_specs[BEHAVIOR].observation_specs
    assert goal.observation_type == ObservationType.GOAL_SIGNAL


def test_image_shows_agent_and_goals_in_their_colors_and_places():
    image = draw(np.array([[0, 4]]), np.array([[[2, 1], [4, 0]]]))[0]
    assert image.dtype == np.float32
    assert (image[2, 0:4, 16:20] == 1.0).all()
    assert image[2].sum() == 16
    assert image[1, 8:12, 4:8].tolist() == grid_world.PLUS.tolist()
    assert image[1].sum() == 12
    assert image[0, 16:20, 0:4].tolist() == grid_world.EX.tolist()
    assert image[0].sum() == 8


@pytest.mark.parametrize(
    ("cell", "closed"),
    [((0, 0), {UP, LEFT}), ((4, 4), {DOWN, RIGHT}), ((0, 2), {UP}), ((2, 2), set())],
)
def test_action_mask_forbids_exactly_the_moves_off_the_grid(cell, closed):
    assert set(np.flatnonzero(forbidden(np.array([cell]))[0])) == closed


@pytest.mark.parametrize(("wanted", "reward"), [(0, 0.99), (1, -1.01)])
def test_both_goals_end_the_episode_and_only_the_target_goal_gives_a_positive_reward(
    wanted, reward
):
    simulator = placed((2, 2), (2, 3), (4, 4), wanted)
    decisions, terminals = step(simulator, RIGHT)
    assert terminals.reward == pytest.approx([reward])
    assert terminals.interrupted.tolist() == [False]
    assert terminals.obs[1].tolist() == [[1.0, 0.0] if wanted == 0 else [0.0, 1.0]]
    assert (terminals.obs[0][0, 2, 8:12, 12:16] == 1.0).all()
    assert decisions.reward.tolist() == [0.0]
    assert decisions.agent_id.tolist() == terminals.agent_id.tolist()


def test_agent_and_goals_begin_on_different_cells_and_both_goals_can_be_the_target():
    simulator = GridWorld(n_agents=600, seed=2)
    decisions, _ = simulator.reset()[BEHAVIOR]
    cells = np.concatenate([now(simulator).agent[:, None], now(simulator).goals], axis=1)
    numbers = cells[..., 0] * 5 + cells[..., 1]
    assert all(len(set(row)) == 3 for row in numbers.tolist())
    assert all(set(numbers[:, k].tolist()) == set(range(25)) for k in range(3))
    assert 0.4 < decisions.obs[1][:, 0].mean() < 0.6


def test_grid_world_expert_takes_a_shortest_path_from_every_cell():
    placements = np.array(list(itertools.permutations(CELLS, 3)))
    agent, goals = placements[:, 0].copy(), placements[:, 1:]
    expected = [shortest(*map(tuple, row)) for row in placements.tolist()]
    signal = np.tile(np.float32([1, 0]), (len(agent), 1))
    n_steps = np.zeros(len(agent), dtype=int)
    policy = registry.expert("grid_world")
    for _ in range(10):
        steps = decision_steps([draw(agent, goals), signal])
        walking = (agent != goals[:, 0]).any(axis=1)
        moves = grid_world.MOVES[policy(steps).discrete[:, 0]]
        agent[walking] += moves[walking]
        n_steps += walking
        assert (agent != goals[:, 1]).any(axis=1).all()
    assert n_steps.tolist() == expected
    assert 1 - 0.01 * np.mean(expected) == pytest.approx(0.96638, abs=1e-5)
