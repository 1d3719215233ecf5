"""Returns of the experts and of chance, by which a trained policy is judged."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from playing import uniform

from pipeline.commands.demo import record
from pipeline.protocol.demo import read_demo
from pipeline.simulators import registry
from pipeline.simulators.games.hallway import Expert


def first_episodes(name, policy, n_agents=128, seed=11, parameters=(), **options):
    """Each area's return in its first episode, and whether that terminated."""
    simulator = registry.make(name, seed=seed, n_agents=n_agents, **options)
    for parameter in parameters:
        simulator.set_parameter(*parameter)
    ((behavior, (decisions, _)),) = simulator.reset().items()
    returns, open_ = np.zeros(n_agents), np.ones(n_agents, dtype=bool)
    terminated = np.zeros(n_agents, dtype=bool)
    while open_.any():
        decisions, ended = simulator.step({behavior: policy(decisions)})[behavior]
        returns += open_ * decisions.reward
        returns[ended.agent_id] += open_[ended.agent_id] * ended.reward
        terminated[ended.agent_id] |= open_[ended.agent_id] & ~ended.interrupted
        open_[ended.agent_id] = False
    return SimpleNamespace(returns=returns, terminated=terminated)


def chance(name):
    """Uniformly random actions among those that are allowed."""
    (spec,) = registry.make(name, n_agents=1).behavior_specs.values()
    return uniform(spec, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "n_agents", "least", "mean", "tolerance"),
    [
        ("hallway", 512, 0.8, 0.865, 0.01),
        ("pyramids", 512, 1.7, 1.82, 0.02),
        ("sorter", 256, 0.9, 10.2, 0.8),
    ],
)
def test_an_expert_always_reaches_its_goal(name, n_agents, least, mean, tolerance):
    played = first_episodes(name, registry.expert(name), n_agents)
    assert played.terminated.all()
    assert played.returns.min() > least
    assert played.returns.mean() == pytest.approx(mean, abs=tolerance)


def test_the_expert_keeps_the_ball():
    played = first_episodes("balance_ball", registry.expert("balance_ball"), 100)
    assert played.returns.mean() >= 95.0


def test_the_same_expert_without_memory_is_at_chance_in_the_hallway():
    class Forgetful(Expert):
        def _remember(self, agents, tag):
            super()._remember(agents, tag)
            seen = (tag == 1).any(axis=1) | (tag == 2).any(axis=1)
            return np.where(seen, self._cue[agents], 0)

    played = first_episodes("hallway", Forgetful(), 1024)
    assert (played.returns > 0.5).mean() == pytest.approx(0.5, abs=0.05)
    assert played.returns.mean() < 0.36
    at_end = first_episodes("hallway", Forgetful(), 256, cue_at_end=True)
    assert at_end.returns.min() > 0.75


def test_chance_hardly_ever_reaches_a_goal_of_the_hallway_in_time():
    played = first_episodes("hallway", chance("hallway"), 512)
    assert played.returns.mean() < -0.9
    assert 0.0 < played.terminated.mean() < 0.05


def test_chance_reaches_the_goal_of_pyramids_in_less_than_one_episode_in_a_hundred():
    played = first_episodes("pyramids", chance("pyramids"), 500)
    assert played.terminated.sum() < 5


def test_the_sorters_expert_visits_as_many_tiles_as_there_are():
    played = first_episodes("sorter", registry.expert("sorter"), parameters=[("num_tiles", 2.0)])
    assert played.returns.mean() == pytest.approx(1.5, abs=0.15)


def test_chance_loses_in_the_sorter():
    assert first_episodes("sorter", chance("sorter"), 64).returns.mean() < -0.5


def test_the_collectors_expert_gathers_far_more_than_chance():
    assert first_episodes("collector", registry.expert("collector"), 64).returns.mean() > 23.0
    assert abs(first_episodes("collector", chance("collector"), 64).returns.mean()) < 1.0


@pytest.mark.parametrize("name", ["hallway", "pyramids", "sorter", "collector"])
def test_demonstrations_of_the_expert_are_recorded(name, tmp_path):
    summary = record(name, tmp_path / "expert.demo", episodes=3, seed=1)
    assert "3 episodes" in summary
    demo = read_demo(tmp_path / "expert.demo")
    ((_, spec),) = registry.make(name, n_agents=1).behavior_specs.items()
    assert [obs.shape[1:] for obs in demo.obs] == [obs.shape for obs in spec.observation_specs]


def test_an_expert_that_remembers_begins_without_memories():
    first, other = registry.expert("hallway"), registry.expert("hallway")
    assert first is not other
