"""Each agent of each copy has its own observation, mask, reward, group, action and picture."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from pipeline.core.specs import ActionTuple
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator
from pipeline.simulators.bridges.pettingzoo_bridge import PettingZooSimulator

AGENTS = ["fox_0", "fox_1", "hen_0"]


class Farm(ParallelEnv):
    """Observations show copy and agent; rewards, ends and masks are scripted for each step."""

    possible_agents = AGENTS

    def __init__(self, copy, script) -> None:
        self.copy, self.script, self.acted, self.seeds = copy, script, [], []
        self.agents: list[str] = []

    def observation_space(self, _):
        return spaces.Box(-1e3, 1e3, (1,))

    def action_space(self, _):
        return spaces.Discrete(3)

    def _seen(self, agent, at=0.0):
        return np.array([10 * self.copy + AGENTS.index(agent) + at], np.float32)

    def reset(self, seed=None, options=None):  # noqa: ARG002
        self.seeds.append(seed)
        self.agents, self.at = list(AGENTS), 0
        return {agent: self._seen(agent) for agent in AGENTS}, {}

    def step(self, actions):
        self.acted.append({agent: int(action) for agent, action in actions.items()})
        now = self.script[self.at]
        self.at += 1
        seen = [agent for agent in self.agents if agent not in now.get("silent", ())]
        ends = now.get("ends", {})
        self.agents = [agent for agent in self.agents if agent not in ends]
        return (
            {agent: self._seen(agent, 0.5) for agent in seen},
            {agent: now["rewards"].get(agent, 0.0) for agent in AGENTS},
            {agent: end == "terminated" for agent, end in ends.items()},
            {agent: end == "truncated" for agent, end in ends.items()},
            {
                agent: {"action_mask": np.array(mask)}
                for agent, mask in now.get("masks", {}).items()
            },
        )

    def render(self):
        return np.full((2, 2, 3), self.copy, np.uint8)

    def close(self):
        pass


def rows(steps):
    """Return observation, reward, group and group reward by agent id."""
    return {
        int(agent): (float(obs[0]), float(reward), int(group), float(shared))
        for agent, obs, reward, group, shared in zip(
            steps.agent_id,
            steps.obs[0],
            steps.reward,
            steps.group_id,
            steps.group_reward,
            strict=True,
        )
    }


def choose(**choices):
    """Return discrete actions by behavior."""
    return {
        f"{name[:3]}?team={name[3:]}": ActionTuple(
            np.zeros((len(rows), 0), np.float32), np.array(rows, np.int32)[:, None]
        )
        for name, rows in choices.items()
    }


def test_pettingzoo_simulator_keeps_the_steps_of_copies_agents_and_groups_apart():
    first = [
        {
            "rewards": {"fox_0": 3.0, "hen_0": 6.0},
            "ends": {"fox_1": "truncated"},
            "masks": {"fox_0": [1, 0, 1]},
        },
        {"rewards": {}},
    ]
    second = [{"rewards": {"fox_1": -3.0, "hen_0": 9.0}, "silent": ["hen_0"]}, {"rewards": {}}]
    farms = [Farm(0, first), Farm(1, second)]
    simulator = PettingZooSimulator(
        id=farms, seed=5, groups="all", teams={"fox": 1, "fox_1": 2, "hen": 0}
    )
    assert set(simulator.behavior_specs) == {"fox?team=1", "fox?team=2", "hen?team=0"}
    begun = simulator.reset()
    assert rows(begun["fox?team=2"][0]) == {1: (1.0, 0.0, 1, 0.0), 4: (11.0, 0.0, 2, 0.0)}
    steps = simulator.step(choose(fox1=[0, 1], fox2=[2, 0], hen0=[1, 2]))
    assert farms[0].acted == [{"fox_0": 0, "fox_1": 2, "hen_0": 1}]
    assert farms[1].acted == [{"fox_0": 1, "fox_1": 0, "hen_0": 2}]
    # the mean of a copy's rewards, 3 and 2, is the group's; the difference is an agent's own
    (fox, _), (other, ended), (hen, _) = steps.values()
    assert rows(fox) == {0: (0.5, 0.0, 1, 3.0), 3: (10.5, -2.0, 2, 2.0)}
    assert rows(ended) == {1: (1.5, -3.0, 1, 3.0)}
    assert ended.interrupted.tolist() == [True]
    assert rows(other) == {4: (11.5, -5.0, 2, 2.0)}
    assert rows(hen) == {2: (2.5, 3.0, 1, 3.0)}
    assert [mask.tolist() for mask in fox.action_mask] == [[[False, True, False], [False] * 3]]
    assert hen.action_mask is None
    # pending rewards of an agent without an observation do not enter its next episode
    simulator.reset()
    steps = simulator.step(choose(fox1=[0, 0], fox2=[0, 0], hen0=[0, 0]))
    farms[1].script[0].pop("silent")
    simulator.reset()
    steps = simulator.step(choose(fox1=[0, 0], fox2=[0, 0], hen0=[0, 0]))
    assert rows(steps["hen?team=0"][0])[5] == (12.5, 9.0 - 2.0, 2, 2.0)
    assert [int(simulator.render(agent)[0, 0, 0]) for agent in (1, 4)] == [0, 1]
    seeds = [seed for farm in farms for seed in farm.seeds]
    assert len(set(seeds)) == 6, "each episode of each copy has a seed of its own"


class Lane(gymnasium.Env):
    """Has given ends, a mask by its number, and a record of the arguments of each reset.

    All observations are in one array, which each step overwrites.
    """

    observation_space = spaces.Box(-1e3, 1e3, (1,))
    action_space = spaces.Discrete(3)

    def __init__(self, number, *ends) -> None:
        self.number, self.ends, self.resets, self.actions = number, list(ends), [], []
        self.age, self.obs = 0, np.zeros(1, np.float32)

    def _seen(self):
        self.obs[0] = 10.0 * self.number + self.age
        return self.obs, {"action_mask": np.arange(3) != (self.number + self.age) % 3}

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        self.age = 0
        return self._seen()

    def step(self, action):
        self.actions.append(int(action))
        self.age += 1
        obs, info = self._seen()
        over, cut = self.ends.pop(0) if self.ends else (False, False)
        return obs, float(self.number + 1), over, cut, info

    def render(self):
        return np.full((2, 2, 3), self.number, np.uint8)


def test_episodes_of_the_copies_of_a_gymnasium_environment_end_and_begin_independently():
    over, cut, both, neither = (True, False), (False, True), (True, True), (False, False)
    lanes = [Lane(0, neither, both), Lane(1, cut, over), Lane(2, neither, cut)]
    simulator = GymnasiumSimulator(id=lanes, seed=5)
    (name,) = simulator.behavior_specs
    simulator.reset()
    actions = ActionTuple(np.zeros((3, 0), np.float32), np.array([[0], [1], [2]], np.int32))
    simulator.set_parameter("wind", 2.0)
    decision, terminal = simulator.step({name: actions})[name]
    assert decision.obs[0].ravel().tolist() == [1.0, 10.0, 21.0]
    assert decision.reward.tolist() == [1.0, 0.0, 3.0]
    assert [row.tolist().index(True) for row in decision.action_mask[0]] == [1, 1, 0]
    assert (terminal.agent_id.tolist(), terminal.obs[0].ravel().tolist()) == ([1], [11.0])
    assert (terminal.reward.tolist(), terminal.interrupted.tolist()) == ([2.0], [True])
    decision, terminal = simulator.step({name: actions})[name]
    assert terminal.agent_id.tolist() == [0, 1, 2]
    assert terminal.interrupted.tolist() == [False, False, True]
    assert terminal.obs[0].ravel().tolist() == [2.0, 11.0, 22.0]
    assert decision.obs[0].ravel().tolist() == [0.0, 10.0, 20.0]
    assert decision.reward.tolist() == [0.0] * 3
    assert [lane.actions for lane in lanes] == [[0, 0], [1, 1], [2, 2]]
    seeds = [lane.resets[0][0] for lane in lanes]
    assert len(set(seeds)) == 3
    assert None not in seeds
    # later episodes continue the copy's own generator, and get the parameters
    assert [lane.resets[1:] for lane in lanes] == [[(None, {"wind": 2.0})] * n for n in (1, 2, 1)]
    assert [int(simulator.render(agent)[0, 0, 0]) for agent in range(3)] == [0, 1, 2]
