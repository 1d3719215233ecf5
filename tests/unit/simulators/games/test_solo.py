"""What every simulator built on `SoloAreas` promises, whatever its task is."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from pipeline.protocol.parameters import Sampler
from pipeline.protocol.simulator import Restorable
from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import registry
from pipeline.simulators.pack import pack

MAX_STEP = {"grid_world": 100, "hallway": 150, "pyramids": 500, "sorter": 500, "collector": 300}
NAMES = ("balance_ball", *MAX_STEP)
WAIT_S = 30


def behavior_of(simulator):
    ((behavior, spec),) = simulator.behavior_specs.items()
    return behavior, spec.action_spec


def flat(steps):
    """Everything that decision and terminal steps hold, as one array; no mask is an empty one."""
    decisions, terminals = steps
    parts = [*decisions.obs, *terminals.obs, decisions.reward, terminals.reward]
    parts += [decisions.agent_id, terminals.agent_id, terminals.interrupted]
    if decisions.action_mask is not None and np.concatenate(decisions.action_mask, axis=1).any():
        parts += decisions.action_mask
    return np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])


def play(simulator, n_steps, rng):
    """What random actions bring about, without a reset before."""
    behavior, spec = behavior_of(simulator)
    seen = []
    for _ in range(n_steps):
        action = spec.random_action(len(simulator._agent_id), rng)
        seen.append(flat(simulator.step({behavior: action})[behavior]))
    return np.concatenate(seen)


def started(name, seed=1, n_agents=5, **options):
    simulator = registry.make(name, seed=seed, n_agents=n_agents, **options)
    simulator.reset()
    return simulator


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_trajectory_and_another_another(name):
    one, same, other = (
        play(started(name, seed=seed), 400, np.random.default_rng(0)) for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


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
def test_a_restored_simulator_has_the_same_future(name):
    simulator = started(name)
    simulator.parameters.set_sampler("num_tiles", Sampler(kind=0, values=(3.0, 9.0), seed=5))
    rng = np.random.default_rng(4)
    play(simulator, 137, rng)
    assert isinstance(simulator, Restorable)
    saved = pickle.dumps((simulator.state_dict(), rng.bit_generator.state))
    expected = play(simulator, 400, rng)
    other = registry.make(name, seed=99, n_agents=5)
    state, stream = pickle.loads(saved)  # noqa: S301  # what the test wrote
    other.load_state_dict(state)
    rng.bit_generator.state = stream
    assert np.array_equal(play(other, 400, rng), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_a_copy_that_later_steps_leave_alone(name):
    simulator = started(name)
    before = simulator.state_dict()
    kept = pickle.dumps(before)
    play(simulator, 320, np.random.default_rng(1))
    assert pickle.dumps(before) == kept


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_as_the_specification_says_and_not_shared(name):
    simulator = started(name)
    behavior, spec = behavior_of(simulator)
    first, _ = simulator.step({behavior: spec.empty_action(5)})[behavior]
    kept = [obs.copy() for obs in first.obs]
    second, _ = simulator.step({behavior: spec.random_action(5)})[behavior]
    for steps in (first, second):
        for obs, wanted in zip(
            steps.obs, simulator.behavior_specs[behavior].observation_specs, strict=True
        ):
            assert obs.shape == (5, *wanted.shape)
            assert obs.dtype == np.float32
            assert np.isfinite(obs).all()
        assert steps.reward.dtype == np.float32
    for obs, copy in zip(first.obs, kept, strict=True):
        assert np.array_equal(obs, copy)


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


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_number_of_actions_is_refused(name):
    simulator = started(name, n_agents=3)
    behavior, spec = behavior_of(simulator)
    with pytest.raises(ValueError, match=rf"{behavior[:4]}.*\(2, .*expected \(3, "):
        simulator.step({behavior: spec.empty_action(2)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hallway", "pyramids", "sorter", "collector"])
def test_an_executable_does_what_the_simulator_does_in_this_process(name, tmp_path, trainer):
    built = pack(name, tmp_path / name, n_agents=3)
    environment = {"PIPELINE_PYTHON": sys.executable, "PIPELINE_CACHE": str(tmp_path / "cache")}
    here = registry.make(name, seed=7, n_agents=3)
    behavior, spec = behavior_of(here)
    policy, rng = registry.expert(name), np.random.default_rng(0)
    with subprocess.Popen(  # noqa: S603  # what the test built
        [str(built), "--mlagents-port", str(trainer.port)],
        env=environment | {"PATH": "/usr/bin:/bin"},
    ) as process:
        trainer.greet(seed=7)
        there, expected = trainer.reset(), here.reset()[behavior]
        assert trainer.spec == here.behavior_specs[behavior]
        for k in range(160):
            assert np.array_equal(flat(there), flat(expected))
            action = policy(there[0]) if k < 130 else spec.random_action(3, rng)
            there, expected = trainer.step(action), here.step({behavior: action})[behavior]
        trainer.end()
        assert process.wait(timeout=WAIT_S) == 0
