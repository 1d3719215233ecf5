import numpy as np
import pytest
from playing import begun, now, put, sights

from pipeline.core.specs import ActionTuple
from pipeline.simulators.games.collector import BAD, BEHAVIOR, GOOD, N_GOOD, WALL, Collector

FAR = (9.0, 9.0)


def placed(good=(), bad=(), position=(0.0, 0.0)):
    """Return a game of one area with the given places, and all other food in a corner."""
    simulator = put(begun(Collector), position=position, degrees=0.0, food=FAR, places=FAR)
    food = now(simulator).food
    food[0, : len(good)] = np.reshape(good, (-1, 2))
    food[0, N_GOOD : N_GOOD + len(bad)] = np.reshape(bad, (-1, 2))
    return put(simulator, food=food)


def step(simulator, ahead=0.0, fire=0):
    action = ActionTuple(np.float32([[ahead, 0.0, 0.0]]), np.array([[fire]]))
    decisions, terminals = simulator.step({BEHAVIOR: action})[BEHAVIOR]
    assert len(terminals) == 0
    return decisions


@pytest.mark.parametrize(("kind", "reward"), [("good", 1.0), ("bad", -1.0)])
def test_food_within_reach_is_eaten_and_appears_elsewhere(kind, reward):
    simulator = put(placed(**{kind: [(0.0, 1.2)]}), places=(-5.0, -6.0))
    assert step(simulator, ahead=1.0).reward.tolist() == [reward]
    assert now(simulator).food[0, 0 if kind == "good" else N_GOOD].tolist() == [-5.0, -6.0]
    assert step(simulator, ahead=-1.0).reward.tolist() == [0.0]


def test_rewards_of_food_eaten_in_one_step_are_added_and_each_food_reappears_at_another_place():
    simulator = placed(good=[(0.5, 0.0), (-0.5, 0.0)], bad=[(0.0, 0.5)])
    places = now(simulator).places
    places[0, :3] = [(1.0, 5.0), (2.0, 5.0), (3.0, 5.0)]
    put(simulator, places=places)
    assert step(simulator).reward.tolist() == [1.0]
    assert now(simulator).food[0, [0, 1, N_GOOD], 0].tolist() == [1.0, 2.0, 3.0]
    assert now(simulator).n_placed.tolist() == [3]


def test_the_laser_burns_the_nearest_food_in_its_beam_and_recharges():
    simulator = placed(good=[(0.0, 4.5)], bad=[(0.3, 3.0), (0.8, 2.0), (0.0, -2.0)])
    decisions = step(simulator, fire=1)
    assert decisions.reward.tolist() == [0.0]
    assert now(simulator).food[0, N_GOOD].tolist() == list(FAR)
    assert now(simulator).food[0, 0].tolist() == [0.0, 4.5]
    assert now(simulator).food[0, N_GOOD + 1 :, 1].tolist()[:2] == [2.0, -2.0]
    for _ in range(5):
        assert decisions.action_mask[0].tolist() == [[False, True]]
        assert decisions.obs[1][0, 2] == 0.0
        decisions = step(simulator, fire=1)  # a forbidden shot has no effect
    assert now(simulator).food[0, 0].tolist() == [0.0, 4.5]
    assert decisions.action_mask[0].tolist() == [[False, False]]
    assert decisions.obs[1][0, 2] == 1.0
    step(simulator, fire=1)
    assert now(simulator).food[0, 0].tolist() == list(FAR)


def test_laser_beam_has_a_limited_length_and_burnt_food_is_not_eaten():
    simulator = placed(bad=[(0.0, 5.1)])
    step(simulator, fire=1)
    assert now(simulator).food[0, N_GOOD, 1] == pytest.approx(5.1)
    assert step(placed(bad=[(0.0, 0.9)]), fire=1).reward.tolist() == [0.0]


def test_rays_distinguish_good_food_bad_food_and_walls():
    decisions = step(placed(good=[(0.0, 3.0)], bad=[(3.0, 0.6)], position=(0.0, 0.0)))
    tag, distance = sights(decisions.obs[0], 3, 12.0)
    assert (tag[0], distance[0]) == (GOOD, pytest.approx(2.5, abs=1e-4))
    assert BAD in (tag[5], tag[7])  # 60 and 80 degrees to the right
    assert tag[8] == WALL
    assert distance[8] == pytest.approx(10.0 / np.sin(np.radians(80.0)), rel=1e-4)


def test_food_and_agents_start_at_positions_spread_over_the_whole_field():
    state = now(begun(Collector, 500, seed=1))
    for positions in (state.position, state.food.reshape(-1, 2)):
        assert (np.abs(positions) <= 9.0).all()
        assert np.abs(positions.mean(axis=0)).max() < 0.8
        assert positions.std(axis=0) == pytest.approx([18 / 12**0.5] * 2, rel=0.1)
    assert len(np.unique(state.food)) > 19000
