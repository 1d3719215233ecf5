"""Environments with known numbers, and slow, obvious versions of the conversions."""

from itertools import chain
from types import MappingProxyType

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Recorder(gymnasium.Env):
    """Gives samples of its observation space, and keeps the actions that it gets.

    Every episode has `length` steps; the last one ends as `ends` says.
    """

    def __init__(self, observation_space=None, action_space=None, length=3, ends="terminated"):
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,))
        self.action_space = action_space or spaces.Discrete(2)
        self.length, self.ends = length, ends
        self.actions, self.observations, self.options = [], [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.options.append(options)
        self._step = 0
        self.observations.append(self.observation_space.sample())
        return self.observations[-1], {}

    def step(self, action):
        self.actions.append(action)
        self._step += 1
        last = self._step == self.length
        self.observations.append(self.observation_space.sample())
        return (
            self.observations[-1],
            float(self._step),
            last and self.ends != "truncated",
            last and self.ends != "terminated",
            {},
        )


gymnasium.register("test/Recorder-v0", entry_point=Recorder)


class Dying(ParallelEnv):
    """`bug_0` terminates after 2 steps and `bug_1` after 4; `bird_0` is truncated after 5."""

    metadata = MappingProxyType({"name": "dying"})
    possible_agents = ("bug_0", "bug_1", "bird_0")
    lives = MappingProxyType({"bug_0": 2, "bug_1": 4, "bird_0": 5})

    def observation_space(self, agent):
        return spaces.Box(0, 100, (3 if agent == "bird_0" else 2,))

    def action_space(self, agent):  # noqa: ARG002  # the interface has it
        return spaces.Discrete(3, start=5)

    def reset(self, seed=None, options=None):
        self.seed, self.options = seed, options
        self.agents = list(self.possible_agents)
        self.n = 0
        self.taken = []
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.taken.append(actions)
        self.n += 1
        living = list(self.agents)
        over = {agent: self.n >= self.lives[agent] for agent in living}
        observed = self._observe()
        self.agents = [agent for agent in living if not over[agent]]
        return (
            observed,
            {agent: self.n + self.possible_agents.index(agent) for agent in living},
            {agent: over[agent] and agent != "bird_0" for agent in living},
            {agent: over[agent] and agent == "bird_0" for agent in living},
            {agent: {} for agent in living},
        )

    def _observe(self):
        sizes = {"bird_0": 3}
        return {a: np.full(sizes.get(a, 2), self.n, dtype=np.float32) for a in self.agents}


class Turns(AECEnv):
    """Three agents in a ring; the acting agent gives the others 1 and 10, by distance; 7 turns.

    The second agent, `b`, dies on its second turn.
    """

    metadata = MappingProxyType({"name": "turns"})
    possible_agents = ("a", "b", "c")

    def observation_space(self, agent):  # noqa: ARG002  # the interface has it
        return spaces.Dict(
            {
                "observation": spaces.Box(0, 100, (1,)),
                "action_mask": spaces.Box(0, 1, (4,), dtype=np.int8),
            }
        )

    def action_space(self, agent):  # noqa: ARG002  # the interface has it
        return spaces.Discrete(4)

    def observe(self, agent):
        mask = np.ones(4, dtype=np.int8)
        mask[self.possible_agents.index(agent)] = 0
        return {"observation": np.array([self.turn], dtype=np.float32), "action_mask": mask}

    def reset(self, seed=None, options=None):  # noqa: ARG002  # the interface has it
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.turn = 0
        self.agent_selection = "a"

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.turn += 1
        order = self.possible_agents
        position = order.index(agent)
        self.rewards = {
            other: {0: 0.0, 1: 1.0, 2: 10.0}[(order.index(other) - position) % 3]
            for other in self.agents
        }
        self._accumulate_rewards()
        if self.turn == 5:
            self.terminations["b"] = True
        if self.turn == 7:
            self.truncations = dict.fromkeys(self.agents, True)
        following = [order[(position + k) % 3] for k in (1, 2, 3)]
        self.agent_selection = next(name for name in following if name in self.agents)
        self._deads_step_first()


def wire_of(space, action):
    """Return the continuous and discrete numbers of `action`, in a slow and obvious way."""
    if isinstance(space, spaces.Dict):
        parts = [wire_of(inner, action[key]) for key, inner in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        parts = [wire_of(*pair) for pair in zip(space.spaces, action, strict=True)]
    elif isinstance(space, spaces.Box):
        low, high = np.float64(space.low), np.float64(space.high)
        return list(np.ravel((np.float64(action) - low) / (high - low) * 2 - 1)), []
    elif isinstance(space, spaces.MultiBinary):
        return [], [int(bit) for bit in np.ravel(action)]
    else:
        return [], [int(n) for n in np.ravel(np.int64(action) - space.start)]
    continuous, discrete = zip(*parts, strict=True)
    return list(chain(*continuous)), list(chain(*discrete))


def numbers_of(space, value):
    """Return the numbers of each leaf in order, channels last, in a slow and obvious way."""
    if isinstance(space, spaces.Dict):
        return list(chain(*(numbers_of(part, value[k]) for k, part in space.spaces.items())))
    if isinstance(space, spaces.Tuple):
        return list(chain(*(numbers_of(*pair) for pair in zip(space.spaces, value, strict=True))))
    if isinstance(space, spaces.Discrete):
        return [[float(k + space.start == value) for k in range(space.n)]]
    if isinstance(space, spaces.MultiDiscrete):
        digits = zip(np.ravel(space.nvec), np.ravel(np.int64(value) - space.start), strict=True)
        return [[float(k == digit) for size, digit in digits for k in range(size)]]
    return [[float(x) for x in np.ravel(value)]]
