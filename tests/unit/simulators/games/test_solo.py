"""What every simulator built on `SoloAreas` promises, whatever its task is."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import registry

MAX_STEP = {"grid_world": 100, "hallway": 150, "pyramids": 500, "sorter": 500, "collector": 300}
NAMES = ("balance_ball", *MAX_STEP)


def behavior_of(simulator):
    ((behavior, spec),) = simulator.behavior_specs.items()
    return behavior, spec.action_spec


def started(name, seed=1, n_agents=5, **options):
    simulator = registry.make(name, seed=seed, n_agents=n_agents, **options)
    simulator.reset()
    return simulator


@pytest.mark.parametrize("name", NAMES)
def test_an_area_does_the_same_whatever_the_number_of_areas(name):
    few, many = started(name, n_agents=2), started(name, n_agents=7)
    behavior, spec = behavior_of(few)
    rng = np.random.default_rng(3)
    for _ in range(320):
        action = spec.random_action(7, rng)
        first = ActionTuple(action.continuous[:2], action.discrete[:2])
        (less, _), (more, _) = (
            few.step({behavior: first})[behavior],
            many.step({behavior: action})[behavior],
        )
        for one, two in zip(less.obs, more.obs, strict=True):
            assert np.array_equal(one, two[:2])
        assert np.array_equal(less.reward, more.reward[:2])


@pytest.mark.parametrize("name", NAMES)
def test_observations_are_ordered_by_name_as_unity_orders_them(name):
    ((_, spec),) = registry.make(name, n_agents=1).behavior_specs.items()
    names = [obs.name for obs in spec.observation_specs]
    assert names == sorted(names)


@pytest.mark.parametrize("name", MAX_STEP)
def test_doing_nothing_is_interrupted_after_the_stated_number_of_decisions(name):
    simulator = started(name, n_agents=3)
    behavior, spec = behavior_of(simulator)
    nothing = {behavior: spec.empty_action(3)}
    for _ in range(MAX_STEP[name] - 1):
        decisions, terminals = simulator.step(nothing)[behavior]
        assert len(terminals) == 0
    last = decisions.obs[-1]
    decisions, terminals = simulator.step(nothing)[behavior]
    assert terminals.interrupted.tolist() == [True] * 3
    assert terminals.agent_id.tolist() == decisions.agent_id.tolist() == [0, 1, 2]
    assert decisions.reward.tolist() == [0.0] * 3
    assert np.array_equal(terminals.obs[-1], last)
    assert len(simulator.step(nothing)[behavior][1]) == 0
