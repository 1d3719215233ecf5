"""Simulators that are made from a function or class of a Python file."""

import sys
from pathlib import Path

import bridge_toys
import numpy as np
import pytest

from pipeline.core.specs import ActionTuple
from pipeline.errors import SettingsError
from pipeline.seeding import derive, stream
from pipeline.simulators import registry

FILE = """
import bridge_toys
import gymnasium, numpy
from pipeline.simulators.games.grid_world import GridWorld

class Count(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (1,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, start=0.0):
        self.start = start
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return numpy.float32([self.start]), {}
    def step(self, action):
        return numpy.float32([self.start]), 1.0, True, False, {}

def pole():
    return gymnasium.make("CartPole-v1")

def game():
    return bridge_toys.Turns()

def squares(*, seed, n_agents=6):
    return GridWorld(seed=seed, n_agents=n_agents)

ONE = Count()
def same():
    return ONE

def number():
    return 3

def broken():
    return 1 / 0

def forgets(*, seed, n_agents):
    squares(seed=seed, n_agents=n_agents)

A_TEXT = "text"

IMAGE = gymnasium.spaces.Box(0, 255, (24, 24, 3), numpy.uint8)
PUSH = gymnasium.spaces.Box(-numpy.inf, numpy.inf, (1,), numpy.float32)

def painter(length=3, render_mode=None):
    env = bridge_toys.Recorder(IMAGE, PUSH, length)
    env.render_mode = render_mode
    return env

class Flock(bridge_toys.Dying):
    def __init__(self, wind, render_mode=None):
        self.wind, self.render_mode = wind, render_mode
    def observation_space(self, agent):
        return IMAGE if agent == "bird_0" else super().observation_space(agent)
    def action_space(self, agent):
        return PUSH if agent == "bird_0" else super().action_space(agent)
    def _observe(self):
        return {**super()._observe(), "bird_0": IMAGE.sample()}
"""
SPACES = {"visual": "never", "action_scale": 7.0}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "of_module_bridge.py"
    file.write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield file
    sys.modules.pop(file.stem, None)


def made(function: str, **options: object):
    return registry.make("module", id=f"of_module_bridge:{function}", **options)


@pytest.mark.parametrize(
    ("function", "behavior", "n_asking"),
    [
        ("Count", "Count?team=0", 16),
        ("pole", "CartPole-v1?team=0", 16),
        ("game", "a?team=0", 16),
        ("squares", "GridWorld?team=0", 6),
    ],
)
def test_function_of_a_module_makes_a_simulator_or_the_copies_of_an_environment(
    function, behavior, n_asking
):
    simulator = made(function)
    steps = simulator.reset()
    assert len(steps[behavior][0]) == n_asking
    simulator.close()
    fewer = made(function, n_agents=3)
    assert len(fewer.reset()[behavior][0]) == 3


def test_module_simulator_gets_the_seed_and_a_module_function_gets_its_keyword_arguments():
    ((first, _),) = made("squares", seed=1).reset().values()
    ((other, _),) = made("squares", seed=2).reset().values()
    assert any(not np.array_equal(a, b) for a, b in zip(first.obs, other.obs, strict=True))
    ((decision, _),) = made("Count", kwargs={"start": 4.0}).reset().values()
    assert set(decision.obs[0].ravel().tolist()) == {4.0}


def test_every_option_reaches_each_copy_of_a_gymnasium_environment_of_the_user():
    drawn = {"kwargs": {"length": 2}, "render_mode": "rgb_array"}
    simulator = made("painter", seed=5, n_agents=2, **SPACES, **drawn)
    envs = simulator._envs
    assert [(env.length, env.render_mode) for env in envs] == [(2, "rgb_array")] * 2
    assert len({id(env) for env in envs}) == 2
    simulator.set_parameter("wind", 0.5)
    simulator.reset()
    for k, env in enumerate(envs):
        first = bridge_toys.Recorder(env.observation_space).reset(seed=derive(5, "gymnasium", k))
        assert np.array_equal(env.observations[0], first[0])
        assert env.options == [{"wind": 0.5}]
    ((name, spec),) = simulator.behavior_specs.items()
    assert spec.observation_specs[0].shape == (24 * 24 * 3,)
    simulator.step({name: ActionTuple(np.float32([[1], [-0.5]]), None)})
    assert [float(env.actions[0][0]) for env in envs] == [7.0, -3.5]


def test_every_option_reaches_each_copy_of_a_pettingzoo_environment_of_the_user():
    drawn = {"kwargs": {"wind": 3}, "render_mode": "rgb_array"}
    sides = {"teams": {"bug_1": 2, "bird": 1}, "groups": "all"}
    simulator = made("Flock", seed=5, n_agents=2, **sides, **SPACES, **drawn)
    envs = simulator._envs
    assert [(env.wind, env.render_mode) for env in envs] == [(3, "rgb_array")] * 2
    simulator.reset()
    seeds = [stream(5, "pettingzoo", k).integers(2**31) for k in range(2)]
    assert [env.seed for env in envs] == seeds
    specs = simulator.behavior_specs
    assert {name: spec.observation_specs[0].shape for name, spec in specs.items()} == {
        "bug?team=0": (2,),
        "bug?team=2": (2,),
        "bird?team=1": (24 * 24 * 3,),
    }
    actions = dict.fromkeys(("bug?team=0", "bug?team=2"), ActionTuple(None, np.int32([[0], [2]])))
    actions["bird?team=1"] = ActionTuple(np.float32([[1], [-0.5]]), None)
    steps = simulator.step(actions)
    assert [float(env.taken[0]["bird_0"][0]) for env in envs] == [7.0, -3.5]
    assert [env.taken[0]["bug_1"] for env in envs] == [5, 7]
    for decisions, _ in steps.values():
        assert decisions.group_id.tolist() == [1, 2]
        assert decisions.group_reward.tolist() == [2.0, 2.0]  # the mean of 1, 2 and 3


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("of_module_bridg:pole", "there is no of_module_bridg.py in the current folder"),
        ("of_module_bridg:pole", r"did you mean 'of_module_bridge:pole'\?$"),
        ("of_module_bridge:pol", r"did you mean 'of_module_bridge:pole'\?$"),
        ("of_module_bridge:A_TEXT", "has no function or class 'A_TEXT'"),
        ("of_module_bridge:number", "returns an object of type int; it must return an environ"),
        ("of_module_bridge:forgets", "returns an object of type NoneType; it must return"),
        ("of_module_bridge:same", "returns the same object twice"),
        (
            "of_module_bridge:broken",
            r"fails: ZeroDivisionError: division by zero \(of_module_bridge.py:34\)$",
        ),
        ("lost:pole", r"the module cannot be imported: .*No module named 'no_such' \(lost.py:1\)$"),
        ("torn:pole", r"the module cannot be imported: .*SyntaxError: .* \(torn.py, line 1\)$"),
    ],
)
def test_mistake_in_a_module_of_the_user_is_reported_in_one_line_with_the_place(module, id, said):
    module.with_name("lost.py").write_text("import no_such\n")
    module.with_name("torn.py").write_text("def pole(:\n")
    with pytest.raises(SettingsError, match=said) as refused:
        registry.make("module", id=id)
    assert str(refused.value).startswith(f"{id}: ")
    assert "\n" not in str(refused.value)
