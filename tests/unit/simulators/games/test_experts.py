"""Returns of experts and of random policies, with which trained policies are compared."""

import numpy as np
import pytest
from playing import policies, returns, uniform

from pipeline.cli.demo import record
from pipeline.demos.demo_file import read_demo
from pipeline.simulators import registry
from pipeline.simulators.games.hallway import Expert
from pipeline.simulators.games.pong import BEHAVIORS as PONG
from pipeline.simulators.games.tag import HUNTER, RUNNER


def first_episodes(name, policy=None, n_agents=128, parameters=(), **options):
    """Return each area's first return and whether its episode terminated; random without policy."""
    simulator = registry.make(name, seed=11, n_agents=n_agents, **options)
    for parameter in parameters:
        simulator.set_parameter(*parameter)
    ((behavior, (decisions, _)),) = simulator.reset().items()
    policy = policy or uniform(simulator.behavior_specs[behavior], np.random.default_rng(0))
    rewards, open_ = np.zeros(n_agents), np.ones(n_agents, dtype=bool)
    terminated = np.zeros(n_agents, dtype=bool)
    while open_.any():
        decisions, ended = simulator.step({behavior: policy(decisions)})[behavior]
        rewards += open_ * decisions.reward
        rewards[ended.agent_id] += open_[ended.agent_id] * ended.reward
        terminated[ended.agent_id] |= open_[ended.agent_id] & ~ended.interrupted
        open_[ended.agent_id] = False
    return rewards, terminated


@pytest.mark.parametrize(
    ("name", "n_agents", "least", "mean", "tolerance"),
    [
        ("hallway", 512, 0.8, 0.865, 0.01),
        ("pyramids", 512, 1.7, 1.82, 0.02),
        ("sorter", 256, 0.9, 10.2, 0.8),
    ],
)
def test_experts_of_hallway_pyramids_and_sorter_always_reach_their_goal(
    name, n_agents, least, mean, tolerance
):
    rewards, terminated = first_episodes(name, registry.expert(name), n_agents)
    assert terminated.all()
    assert rewards.min() > least
    assert rewards.mean() == pytest.approx(mean, abs=tolerance)


def test_experts_of_single_agent_games_have_high_returns():
    def mean(name, n_agents, **options):
        return first_episodes(name, registry.expert(name), n_agents, **options)[0].mean()

    assert mean("balance_ball", 100) >= 95.0
    assert mean("collector", 64) > 23.0
    assert mean("sorter", 128, parameters=[("num_tiles", 2.0)]) == pytest.approx(1.5, abs=0.15)


def test_random_policy_has_a_low_return_and_rarely_reaches_a_goal():
    rewards, terminated = first_episodes("hallway", n_agents=512)
    assert rewards.mean() < -0.9
    assert 0.0 < terminated.mean() < 0.05
    assert first_episodes("pyramids", n_agents=500)[1].sum() < 5
    assert first_episodes("sorter", n_agents=64)[0].mean() < -0.5
    assert abs(first_episodes("collector", n_agents=64)[0].mean()) < 1.0


def test_hallway_expert_without_memory_does_no_better_than_chance():
    class Forgetful(Expert):
        def _remember(self, agents, tag):
            super()._remember(agents, tag)
            seen = (tag == 1).any(axis=1) | (tag == 2).any(axis=1)
            return np.where(seen, self._cue[agents], 0)

    rewards, _ = first_episodes("hallway", Forgetful(), 1024)
    assert (rewards > 0.5).mean() == pytest.approx(0.5, abs=0.05)
    assert rewards.mean() < 0.36
    at_end, _ = first_episodes("hallway", Forgetful(), 256, cue_at_end=True)
    assert at_end.min() > 0.75
    assert registry.expert("hallway") is not registry.expert("hallway"), "each has its own memory"


def test_experts_of_multi_agent_games_beat_random_policies_and_draw_with_themselves():
    left, right = PONG
    for side in PONG:
        assert returns("pong", side, episodes=100)[side][:, 0].mean() > 0.95
    among = returns("pong", left, right, episodes=100)[left]
    assert abs(among[:, 0].mean()) < 0.3
    assert among[:, 3].mean() < 0.1
    assert abs(returns("pong", episodes=300)[left][:, 0].mean()) < 0.3

    def hunters_win(*scripted):
        return (returns("tag", *scripted, episodes=100)[HUNTER][:, 1] > 0).mean()

    assert hunters_win(HUNTER) > 0.95
    assert hunters_win(RUNNER) < 0.02
    assert hunters_win() < 0.2
    assert 0.25 < hunters_win(HUNTER, RUNNER) < 0.75


@pytest.mark.parametrize("name", ["couriers", "push_together"])
def test_experts_of_couriers_and_push_together_have_much_higher_returns_than_random_policies(name):
    (behavior,) = policies(name, registry.make(name))
    expert, chance = (returns(name, *by, episodes=300)[behavior] for by in ([behavior], []))
    if name == "couriers":
        assert 11.5 < expert[:, 0].mean() < 13.0
        assert chance[:, 0].mean() < 2.5
        assert not expert[:, 3].any()
        return
    filled = expert[:, 0] < 0  # the agent that fills the pit
    assert expert[~filled][:, 1] == pytest.approx(2.0)
    assert filled.mean() == pytest.approx(1 / 3, abs=0.03)
    assert expert[:, 2].max() < 25
    assert (chance[:, 1] > 1.0).mean() < 0.02
    assert chance[:, 1].mean() < 0.05


@pytest.mark.parametrize("name", ["hallway", "pyramids", "sorter", "collector"])
def test_demonstrations_of_experts_are_recorded_with_the_observation_shapes_of_the_game(
    name, tmp_path
):
    summary = record(name, tmp_path / "expert.demo", episodes=3, seed=1)
    assert "3 episodes" in summary
    demo = read_demo(tmp_path / "expert.demo")
    ((_, spec),) = registry.make(name, n_agents=1).behavior_specs.items()
    assert [obs.shape[1:] for obs in demo.obs] == [obs.shape for obs in spec.observation_specs]
