import numpy as np
import pytest
from playing import acted, begun, now, policies, put, returns
from steps import decision_steps

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import registry
from pipeline.simulators.games import pong
from pipeline.simulators.games.pong import BEHAVIORS, Pong, folded

LEFT, RIGHT = BEHAVIORS
STAY, UP, DOWN = 0, 1, 2


def act(left, right):
    return {
        name: ActionTuple(discrete=np.array([[choice]]))
        for name, choice in zip(BEHAVIORS, (left, right), strict=True)
    }


def placed(ball, paddle=(0.0, 0.0)):
    return put(begun(Pong, 2), ball=ball, paddle=paddle)


@pytest.mark.parametrize(("action", "y"), [(STAY, 0.0), (UP, 0.06), (DOWN, -0.06)])
def test_every_action_moves_its_own_paddle_only(action, y):
    simulator = placed((0, 0, 0.06, 0))
    simulator.step(act(action, STAY))
    assert now(simulator).paddle[0] == pytest.approx([y, 0.0])
    simulator = placed((0, 0, 0.06, 0))
    simulator.step(act(STAY, action))
    assert now(simulator).paddle[0] == pytest.approx([0.0, y])


def test_a_paddle_stays_on_the_court():
    simulator = placed((0, 0, 0.06, 0), paddle=(0.79, -0.79))
    simulator.step(act(UP, DOWN))
    assert now(simulator).paddle[0] == pytest.approx([0.8, -0.8])


def test_a_wall_reflects_the_ball():
    simulator = placed((0.0, 0.95, 0.08, 0.1))
    simulator.step(act(STAY, STAY))
    assert now(simulator).ball[0] == pytest.approx([0.08, 0.95, 0.08, -0.1])


@pytest.mark.parametrize(("y", "slope"), [(0.0, 0.0), (0.1, 0.5), (-0.2, -1.0)])
def test_a_paddle_returns_the_ball_faster_and_at_the_angle_of_where_it_was_met(y, slope):
    simulator = placed((0.95, y, 0.1, 0.0))
    _, terminals = simulator.step(act(STAY, STAY))[RIGHT]
    assert len(terminals) == 0
    speed = 0.1 * pong.SPEED_UP
    assert now(simulator).ball[0] == pytest.approx([1.0, y, -speed, slope * speed], abs=1e-6)


def test_the_ball_is_never_faster_than_its_limit():
    simulator = placed((-0.9, 0.0, -pong.MAX_SPEED, 0.0))
    simulator.step(act(STAY, STAY))
    assert now(simulator).ball[0, 2] == pytest.approx(pong.MAX_SPEED)


@pytest.mark.parametrize("side", [0, 1])
def test_who_misses_the_ball_loses_a_point_that_the_other_wins(side):
    direction = 1.0 if side else -1.0
    simulator = placed((0.95 * direction, 0.5, 0.1 * direction, 0.0))
    steps = simulator.step(act(STAY, STAY))
    loser, winner = steps[BEHAVIORS[side]], steps[BEHAVIORS[1 - side]]
    assert loser[1].reward.tolist() == [-1.0]
    assert winner[1].reward.tolist() == [1.0]
    for decisions, terminals in (loser, winner):
        assert terminals.interrupted.tolist() == [False]
        assert decisions.agent_id.tolist() == terminals.agent_id.tolist()
        assert decisions.reward.tolist() == [0.0]
    assert now(simulator).ball[0, 0] == 0.0


def test_a_point_without_end_is_a_draw():
    simulator = placed((0.0, 0.0, 0.08, 0.0))
    for _ in range(pong.MAX_STEP - 1):
        steps = simulator.step(act(STAY, STAY))
        assert len(steps[LEFT][1]) == 0
    steps = simulator.step(act(STAY, STAY))
    for name in BEHAVIORS:
        assert steps[name][1].reward.tolist() == [0.0]
        assert steps[name][1].interrupted.tolist() == [True]


def test_both_sides_see_the_same_game_mirrored():
    """The right player sees what the left player sees on the mirrored court, step by step."""
    rng = np.random.default_rng(0)
    game, mirrored = begun(Pong, 40, seed=1), begun(Pong, 40, seed=1)
    put(mirrored, ball=now(mirrored).ball * np.float32([-1, 1, -1, 1]))
    n_ended = 0
    while not n_ended:
        left, right = (ActionTuple(discrete=rng.integers(0, 3, (20, 1))) for _ in range(2))
        steps = game.step({LEFT: left, RIGHT: right})
        mirrored_steps = mirrored.step({LEFT: right, RIGHT: left})
        for name, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
            (decisions, terminals), (mirrored_decisions, ended) = steps[name], mirrored_steps[other]
            goes_on = ~np.isin(decisions.agent_id, terminals.agent_id)  # else served anew
            assert np.array_equal(decisions.obs[0][goes_on], mirrored_decisions.obs[0][goes_on])
            assert np.array_equal(terminals.obs[0], ended.obs[0])
            assert terminals.reward.tolist() == ended.reward.tolist()
            n_ended += len(terminals)
    assert 0 < goes_on.sum() < 20
    assert (steps[LEFT][0].obs[0][:, 2] == -steps[RIGHT][0].obs[0][:, 2]).all()


@pytest.mark.parametrize(("free", "inside"), [(0.4, 0.4), (1.3, 0.7), (-1.5, -0.5), (3.2, -0.8)])
def test_a_reflected_flight_is_foreseen(free, inside):
    assert folded(np.array([free])) == pytest.approx([inside])


def test_the_opponent_meets_every_serve():
    simulator = Pong(n_agents=200, seed=5)
    steps, by = simulator.reset(), policies("pong", simulator, scripted=BEHAVIORS)
    for _ in range(14):  # a serve arrives after 13 decisions
        steps = simulator.step(acted(steps, by))
        assert len(steps[LEFT][1]) == 0


def test_the_opponent_beats_chance_and_is_its_own_match():
    assert returns("pong", LEFT, episodes=100)[LEFT][:, 0].mean() > 0.95
    assert returns("pong", RIGHT, episodes=100)[RIGHT][:, 0].mean() > 0.95
    among = returns("pong", *BEHAVIORS, episodes=100)[LEFT]
    assert abs(among[:, 0].mean()) < 0.3
    assert among[:, 3].mean() < 0.1
    chance = returns("pong", episodes=300)[LEFT]
    assert abs(chance[:, 0].mean()) < 0.3


def test_the_opponent_aims_away_from_the_other_paddle():
    seen = np.float32([[0.0, 0.5, -0.9, 0.0, -0.4, 0.0], [0.0, -0.5, -0.9, 0.0, -0.4, 0.0]])
    assert registry.expert("pong")(decision_steps([seen])).discrete[:, 0].tolist() == [UP, DOWN]
