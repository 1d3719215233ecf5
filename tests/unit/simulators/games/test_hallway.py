import numpy as np
import pytest
from playing import begun, now, put, sights, walk

from pipeline.simulators.games import hallway
from pipeline.simulators.games.hallway import GOAL_O, MAX_STEP, SYMBOL_O, SYMBOL_X, WALL, Hallway

NOTHING, FORWARD, BACK, RIGHT, LEFT = range(5)
PENALTY = -1.0 / MAX_STEP


def placed(n_agents=1, position=(0.0, -4.0), heading=0, cue=0, o_side=-1, **options):
    """Return a game with the given state, and the symbol at x = 1."""
    simulator = begun(Hallway, n_agents, **options)
    things = now(simulator).things
    things[:, :2] = hallway.rays.HIDDEN
    things[:, cue] = (1.0, -1.5)
    things[:, 2], things[:, 3] = (2.5 * o_side, 11.0), (-2.5 * o_side, 11.0)
    return put(simulator, position=position, heading=heading, cue=cue, things=things)


def seen(simulator):
    return sights(walk(simulator, NOTHING)[0].obs[0], 5, hallway.RAY_LENGTH)


@pytest.mark.parametrize(("cue", "symbol"), [(0, SYMBOL_O), (1, SYMBOL_X)])
def test_agent_in_the_hallway_room_sees_the_symbol_of_the_cue(cue, symbol):
    tag, distance = seen(placed(cue=cue))
    assert tag.count(symbol) > 0
    assert (SYMBOL_O + SYMBOL_X - symbol) not in tag
    assert distance[tag.index(symbol)] < 2.6


def test_agent_that_leaves_the_room_is_put_in_the_corridor_and_the_door_closes():
    simulator = placed(position=(-2.0, -0.2), heading=2)
    decisions, _ = walk(simulator, FORWARD)
    assert now(simulator).position[0].tolist() == [0.0, 0.5]
    assert decisions.obs[1][0] == pytest.approx([0.0, 1.0, 1.0], abs=1e-5)
    walk(simulator, BACK, BACK)
    assert now(simulator).position[0].tolist() == pytest.approx([0.0, 0.5], abs=1e-5)
    put(simulator, heading=9)
    tag, distance = seen(simulator)
    assert tag == [WALL] * 7
    assert distance[0] == pytest.approx(0.5)


def test_observations_in_the_corridor_do_not_depend_on_the_cue_or_on_earlier_actions():
    """Therefore a policy without memory can only guess."""
    simulator_a = placed(2, position=(-1.5, -3.5), heading=1, cue=0)
    simulator_b = placed(2, position=(1.0, -5.0), heading=17, cue=1)
    for simulator in (simulator_a, simulator_b):
        things = now(simulator).things
        things[1, 2:4] = things[1, 3:1:-1]
        put(simulator, things=things)
    walk(simulator_a, LEFT, *[FORWARD] * 4)
    walk(simulator_b, RIGHT, RIGHT, LEFT, *[FORWARD] * 5)
    assert now(simulator_a).is_past.all()
    assert now(simulator_b).is_past.all()
    rng = np.random.default_rng(0)
    for choice in [NOTHING, *rng.choice([1, 1, 1, 2, 3, 4], 120)]:
        ((first, ended), (second, _)) = walk(simulator_a, choice), walk(simulator_b, choice)
        if len(ended):
            break
        for obs_a, obs_b in zip(first.obs, second.obs, strict=True):
            assert np.array_equal(obs_a, obs_b)
    assert first.obs[0].shape == (2, 49)
    assert len(ended) > 0


@pytest.mark.parametrize(("cue", "reward"), [(0, 1.0), (1, -0.1)])
@pytest.mark.parametrize("side", [-1, 1])
def test_both_goals_end_the_episode_and_only_the_goal_of_the_cue_gives_a_positive_reward(
    cue, side, reward
):
    simulator = placed(position=(2.5 * side, 9.0), cue=cue, o_side=side)
    put(simulator, is_past=True)
    tag, _ = seen(simulator)
    assert tag[0] == GOAL_O
    decisions, terminals = walk(simulator, FORWARD)
    assert terminals.reward == pytest.approx([reward + PENALTY])
    assert terminals.interrupted.tolist() == [False]
    assert terminals.obs[1][0, 2] == 1.0
    assert decisions.obs[1][0, 2] == 0.0
    assert decisions.reward.tolist() == [0.0]


def test_option_cue_at_end_also_shows_the_cue_between_the_goals():
    simulator = placed(position=(0.0, 0.5), cue=1, cue_at_end=True)
    things = now(simulator).things
    things[:, :2], things[:, 4:] = hallway.rays.HIDDEN, hallway.rays.HIDDEN
    things[:, 5] = (0.0, 12.0)
    put(simulator, is_past=True, things=things)
    tag, distance = seen(simulator)
    assert tag[0] == SYMBOL_X
    assert distance[0] == pytest.approx(10.6, abs=1e-3)
    fresh = now(begun(Hallway, 300, cue_at_end=True))
    at_end = fresh.things[:, 4:, 1] == 12.0
    assert (at_end.argmax(axis=1) == fresh.cue).all()


def test_episodes_start_with_both_cues_both_orders_of_the_goals_and_all_headings():
    state = now(begun(Hallway, 2000, seed=3))
    o_left = state.things[:, 2, 0] < 0
    shares = [(o_left & (state.cue == cue)).mean() for cue in (0, 1)]
    assert 0.2 < min(shares) < max(shares) < 0.3
    assert set(state.heading) == set(range(18))
    assert (np.abs(state.position[:, 0]) <= 2.0).all()
    assert (state.things[np.arange(2000), state.cue, 1] == -1.5).all()
