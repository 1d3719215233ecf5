import numpy as np
import pytest
from playing import begun, now, put

from pipeline.core.specs import ActionTuple
from pipeline.simulators.games import tag
from pipeline.simulators.games.tag import HUNTER, RUNNER, Tag

STILL = (0.0, 0.0)


def act(*actions):
    return {
        HUNTER: ActionTuple(continuous=np.array(actions[:2])),
        RUNNER: ActionTuple(continuous=np.array(actions[2:])),
    }


def placed(*places):
    return put(begun(Tag, 3), place=places)


def test_a_catch_ends_the_episode_of_all_agents_and_the_rewards_of_both_teams_sum_to_zero():
    simulator = placed((0.0, 0.0), (-0.9, 0.0), (0.2, 0.0))
    steps = simulator.step(act((1, 0), STILL, STILL))
    hunters, runner = steps[HUNTER][1], steps[RUNNER][1]
    assert hunters.agent_id.tolist() == [0, 1]
    assert hunters.reward.tolist() == [0.0, 0.0]
    assert hunters.group_reward.tolist() == [1.0, 1.0]
    assert (runner.agent_id.tolist(), runner.reward.tolist()) == ([2], [-1.0])
    assert runner.group_reward.tolist() == [0.0]
    assert not hunters.interrupted.any()
    assert not runner.interrupted.any()
    assert runner.obs[0][0, :4] == pytest.approx([0.2, 0.0, -0.14, 0.0])
    assert [len(steps[name][0]) for name in (HUNTER, RUNNER)] == [2, 1]


def test_runner_wins_if_it_survives_until_the_time_limit():
    simulator = placed((-1, -1), (-1, 1), (1, 0))
    for k in range(tag.MAX_STEP):
        steps = simulator.step(act(STILL, STILL, STILL))
        assert len(steps[RUNNER][1]) == (k == tag.MAX_STEP - 1)
    assert steps[RUNNER][1].reward.tolist() == [1.0]
    assert steps[HUNTER][1].group_reward.tolist() == [-1.0, -1.0]
    assert not steps[RUNNER][1].interrupted.any()
    assert steps[RUNNER][1].obs[0][0, 6] == 0.0
    assert steps[RUNNER][0].obs[0][0, 6] == 1.0


def test_observations_are_relative_to_the_agent_and_the_runner_sees_the_nearer_hunter_first():
    simulator = placed((-0.5, 0.0), (0.5, 0.5), (0.25, 0.0))
    steps = simulator.step(act(STILL, STILL, STILL))
    hunters, runner = steps[HUNTER][0].obs[0], steps[RUNNER][0].obs[0]
    assert hunters[0] == pytest.approx([-0.5, 0, 1, 0.5, 0.75, 0, 0.99])
    assert hunters[1] == pytest.approx([0.5, 0.5, -1, -0.5, -0.25, -0.5, 0.99])
    assert runner[0] == pytest.approx([0.25, 0, 0.25, 0.5, -0.75, 0, 0.99])


def test_hunters_and_runner_begin_on_opposite_sides_of_the_field():
    x = now(begun(Tag, 300, seed=2)).place[..., 0]
    assert (np.sign(x[:, 0]) == np.sign(x[:, 1])).all()
    assert (np.sign(x[:, 2]) == -np.sign(x[:, 0])).all()
    assert 30 < (x[:, 2] > 0).sum() < 70
    assert (np.abs(x) >= 0.2).all()
