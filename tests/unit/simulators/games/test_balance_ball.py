import numpy as np
import pytest

from pipeline.core.specs import ActionTuple
from pipeline.errors import SettingsError
from pipeline.simulators import registry
from pipeline.simulators.games.balance_ball import (
    BEHAVIOR,
    DECISION_PERIOD,
    TIME_STEP_S,
    BalanceBall,
)


@pytest.fixture
def make():
    simulators = []

    def build(**options):
        simulators.append(BalanceBall(**options))
        return simulators[-1]

    yield build
    for simulator in simulators:
        simulator.close()


def turn(n_agents, about_z=0.0, about_x=0.0):
    return {BEHAVIOR: ActionTuple(continuous=np.tile((about_z, about_x), (n_agents, 1)))}


def tilts(obs):
    """Return the tilts about x and then z, in radians, from the observed components z and x."""
    z, x = obs[:, 0].astype(float), obs[:, 1].astype(float)
    half_sum, half_difference = np.arcsin(z + x), np.arcsin(z - x)
    return half_sum - half_difference, half_sum + half_difference


def test_episode_begins_with_at_most_ten_degrees_of_tilt_and_the_ball_at_height_four(make):
    decisions, terminals = make(n_agents=300).reset()[BEHAVIOR]
    obs = decisions.obs[0]
    about_x, about_z = tilts(obs)
    for degrees in np.degrees(about_x), np.degrees(about_z):
        assert np.abs(degrees).max() <= 10.0
        assert degrees.max() > 8.0
        assert degrees.min() < -8.0
    assert np.abs(obs[:, [2, 4]]).max() <= 1.5
    assert np.ptp(obs[:, [2, 4]]) > 2.5
    assert (obs[:, 3] == 4.0).all()
    assert (obs[:, 5:] == 0.0).all()
    assert len(terminals) == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_an_action_turns_the_platform_by_two_degrees_per_physics_step(make, axis):
    simulator = make(n_agents=6, seed=3)
    before = tilts(simulator.reset()[BEHAVIOR][0].obs[0])
    action = turn(6, about_z=0.5) if axis == 0 else turn(6, about_x=0.5)
    obs = simulator.step(action)[BEHAVIOR][0].obs[0]
    if axis == 0:
        after = tilts(obs)
        assert np.degrees(after[1] - before[1]) == pytest.approx(np.full(6, 5.0), abs=1e-3)
        assert after[0] == pytest.approx(before[0], abs=1e-5)
    else:
        # q = X(a) Z(b) X(5 degrees), written out for its x component.
        half_a, half_b, half_c = before[0] / 2, before[1] / 2, np.radians(2.5)
        expected = np.cos(half_b) * np.sin(half_a + half_c)
        assert obs[:, 1] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_actions_are_clipped_and_a_platform_at_the_tilt_limit_can_only_turn_back(make, sign):
    simulator = make(n_agents=8)
    simulator.reset()
    highest = 0.0
    for _ in range(6):
        decisions, _ = simulator.step(turn(8, about_z=9.0 * sign))[BEHAVIOR]
        highest = max(highest, float((sign * decisions.obs[0][:, 0]).max()))
    assert 0.25 <= highest <= 0.25 + np.sin(np.radians(1.0))
    simulator = make(n_agents=1, seed=1)
    simulator.reset()
    steps = [simulator.step(turn(1, about_z=sign)) for _ in range(4)]
    at_limit = max(sign * step[BEHAVIOR][0].obs[0][0, 0] for step in steps)
    assert at_limit >= 0.25
    after = simulator.step(turn(1, about_z=-sign))[BEHAVIOR][0].obs[0][0, 0]
    assert sign * after == pytest.approx(at_limit - 0.0844, abs=0.004)


@pytest.mark.parametrize("gravity", [None, 2 * 9.81])
def test_the_ball_falls_freely_before_it_lands_and_gravity_changes_at_once(make, gravity):
    simulator = make(n_agents=2)
    simulator.reset()
    if gravity is not None:
        simulator.set_parameter("gravity", gravity)
    obs = simulator.step(turn(2))[BEHAVIOR][0].obs[0]
    expected = -(gravity or 9.81) * DECISION_PERIOD * TIME_STEP_S
    assert obs[:, 6] == pytest.approx(expected, rel=1e-4)


def rest_heights(simulator, n_steps=40):
    policy = registry.expert("balance_ball")
    decisions, _ = simulator.reset()[BEHAVIOR]
    for _ in range(n_steps):
        decisions, _ = simulator.step({BEHAVIOR: policy(decisions)})[BEHAVIOR]
    return decisions.obs[0][:, 3]


def test_parameters_scale_and_mass_apply_from_the_next_episode(make):
    simulator = make(n_agents=3)
    assert rest_heights(simulator) == pytest.approx(3.0, abs=0.05)
    simulator.set_parameter("scale", 2.0)
    simulator.set_parameter("mass", 7.0)
    decisions, _ = simulator.step(turn(3))[BEHAVIOR]
    assert decisions.obs[0][:, 3] == pytest.approx(3.0, abs=0.05)
    assert rest_heights(simulator) == pytest.approx(3.5, abs=0.05)
    assert [model.body_mass[2] for model in simulator._models] == [7.0] * 3


def test_impossible_value_of_the_parameter_scale_is_refused(make):
    simulator = make(n_agents=1)
    simulator.set_parameter("scale", -1.0)
    with pytest.raises(SettingsError, match=r"scale must be positive, got 1.0 and -1.0"):
        simulator.reset()


def test_fallen_ball_ends_the_episode_with_reward_minus_one(make):
    simulator = make(n_agents=40)
    simulator.reset()
    ended, beyond = set(), []
    for _ in range(60):
        decisions, terminals = simulator.step(turn(40, about_z=1.0))[BEHAVIOR]
        last = terminals.obs[0]
        outside = (np.abs(last[:, [2, 4]]) > 3.0).any(axis=1) | (last[:, 3] < -2.0)
        assert outside.all()
        assert (terminals.reward == -1.0).all()
        assert not terminals.interrupted.any()
        assert len(decisions) == 40
        fresh = np.isin(decisions.agent_id, terminals.agent_id)
        assert (decisions.obs[0][fresh, 3] == 4.0).all()
        assert (decisions.reward[fresh] == 0.0).all()
        assert (decisions.reward[~fresh] == np.float32(0.1)).all()
        ended.update(terminals.agent_id.tolist())
        # The last observation is of the physics step in which the ball fell.
        sideways = np.abs(last[:, 2]) > 3.0
        beyond += ((np.abs(last[:, 2]) - 3.0) / np.abs(last[:, 5]))[sideways].tolist()
    assert ended == set(range(40))
    assert len(beyond) > 40
    assert max(beyond) <= TIME_STEP_S * 1.05


def test_episode_in_which_no_ball_falls_is_interrupted_after_1000_decisions_with_return_100(make):
    simulator = make(n_agents=3, seed=4)
    policy = registry.expert("balance_ball")
    decisions, _ = simulator.reset()[BEHAVIOR]
    total = np.zeros(3)
    for k in range(1000):
        decisions, terminals = simulator.step({BEHAVIOR: policy(decisions)})[BEHAVIOR]
        total += decisions.reward
        assert len(terminals) == (3 if k == 999 else 0)
    assert terminals.interrupted.all()
    assert total + terminals.reward == pytest.approx(np.full(3, 100.0), abs=1e-3)


def test_policy_that_does_nothing_does_not_solve_balance_ball(make):
    simulator = make(n_agents=50)
    simulator.reset()
    n_ended = sum(len(simulator.step(turn(50))[BEHAVIOR][1]) for _ in range(100))
    assert n_ended >= 45
