import numpy as np
import pytest
from playing import acted, begun, now, policies, put
from steps import decision_steps

from pipeline.core.specs import ActionTuple
from pipeline.simulators import registry
from pipeline.simulators.games import pong
from pipeline.simulators.games.pong import BEHAVIORS, Pong, folded

LEFT, RIGHT = BEHAVIORS
STAY, UP, DOWN = 0, 1, 2


def stay():
    return {name: ActionTuple(discrete=np.array([[STAY]])) for name in BEHAVIORS}


@pytest.mark.parametrize("side", [0, 1])
def test_team_that_misses_the_ball_loses_the_point(side):
    direction = 1.0 if side else -1.0
    ball = (0.95 * direction, 0.5, 0.1 * direction, 0.0)
    simulator = put(begun(Pong, 2), ball=ball, paddle=(0.0, 0.0))
    steps = simulator.step(stay())
    loser, winner = steps[BEHAVIORS[side]], steps[BEHAVIORS[1 - side]]
    assert loser[1].reward.tolist() == [-1.0]
    assert winner[1].reward.tolist() == [1.0]
    for decisions, terminals in (loser, winner):
        assert terminals.interrupted.tolist() == [False]
        assert decisions.agent_id.tolist() == terminals.agent_id.tolist()
        assert decisions.reward.tolist() == [0.0]
    assert now(simulator).ball[0, 0] == 0.0


def test_pong_game_that_reaches_the_step_limit_is_a_draw():
    simulator = put(begun(Pong, 2), ball=(0.0, 0.0, 0.08, 0.0), paddle=(0.0, 0.0))
    for k in range(pong.MAX_STEP):
        steps = simulator.step(stay())
        assert len(steps[LEFT][1]) == (k == pong.MAX_STEP - 1)
    for name in BEHAVIORS:
        assert steps[name][1].reward.tolist() == [0.0]
        assert steps[name][1].interrupted.tolist() == [True]


def test_right_pong_player_observes_the_mirror_image_of_what_the_left_player_observes():
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
            goes_on = ~np.isin(decisions.agent_id, terminals.agent_id)  # else a new serve
            assert np.array_equal(decisions.obs[0][goes_on], mirrored_decisions.obs[0][goes_on])
            assert np.array_equal(terminals.obs[0], ended.obs[0])
            assert terminals.reward.tolist() == ended.reward.tolist()
            n_ended += len(terminals)
    assert 0 < goes_on.sum() < 20
    assert (steps[LEFT][0].obs[0][:, 2] == -steps[RIGHT][0].obs[0][:, 2]).all()


@pytest.mark.parametrize(("free", "inside"), [(0.4, 0.4), (1.3, 0.7), (-1.5, -0.5), (3.2, -0.8)])
def test_pong_expert_predicts_the_position_of_a_ball_that_walls_reflect(free, inside):
    assert folded(np.array([free])) == pytest.approx([inside])


def test_pong_expert_hits_back_every_serve():
    simulator = Pong(n_agents=200, seed=5)
    steps, by = simulator.reset(), policies("pong", simulator, scripted=BEHAVIORS)
    for _ in range(14):  # a serve arrives after 13 decisions
        steps = simulator.step(acted(steps, by))
        assert len(steps[LEFT][1]) == 0


def test_pong_expert_aims_away_from_the_other_paddle():
    seen = np.float32([[0.0, 0.5, -0.9, 0.0, -0.4, 0.0], [0.0, -0.5, -0.9, 0.0, -0.4, 0.0]])
    assert registry.expert("pong")(decision_steps([seen])).discrete[:, 0].tolist() == [UP, DOWN]
