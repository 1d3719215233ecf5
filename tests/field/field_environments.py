"""Small environments whose best and chance returns are known.

cd tests/field
pipeline learn ppo.yaml --env field_environments:ImageOfZeroOne --run-id one --seed 1
"""

import sys

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Guess(gymnasium.Env):
    """Ten choices an episode, each right one gives 1: at best 10, by chance 5."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return self.observe(), {}

    def observe(self):
        self.answer = int(self.np_random.integers(2))
        return np.array([2.0 * self.answer - 1.0], np.float32)

    def step(self, action):
        reward = float(action == self.answer)
        self.n_steps += 1
        return self.observe(), reward, self.n_steps >= 10, False, {}


class ImageOfZeroOne(Guess):
    """A white square on the left or the right of an image whose bytes are 0 or 1."""

    observation_space = spaces.Box(0, 1, (20, 20, 1), np.uint8)

    def observe(self):
        self.answer = int(self.np_random.integers(2))
        image = np.zeros((20, 20, 1), np.uint8)
        left = 2 + 12 * self.answer
        image[8:12, left : left + 4] = 1
        return image


class FarFromZero(Guess):
    """The sign to guess has an offset of 10,000: learnable only if `normalize` removes it."""

    def observe(self):
        return super().observe() + np.float32(1e4)


class FewAllowed(gymnasium.Env):
    """Twenty actions; in a tenth of the states two are allowed, else one.

    The first of two gives 1: at best 2.0 an episode on average, at random 1.0.
    """

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Discrete(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return self.observe()

    def observe(self):
        self.has_choice = self.np_random.random() < 0.1
        mask = np.zeros(20, np.int8)
        mask[: 2 if self.has_choice else 1] = 1
        return np.array([self.has_choice, 1.0], np.float32), {"action_mask": mask}

    def step(self, action):
        reward = float(self.has_choice and action == 0)
        self.n_steps += 1
        observation, info = self.observe()
        return observation, reward, self.n_steps >= 20, False, info


class OneBasedParts(Guess):
    """Counts from 1 where its MultiDiscrete space counts from 0."""

    observation_space = spaces.MultiDiscrete([3, 2])

    def observe(self):
        self.answer = int(self.np_random.integers(2))
        return np.array([1 + 2 * self.answer, 1])


class MaskInsideObservation(Guess):
    """The mask is a part of the observation, as in RLlib; a forbidden choice costs 100."""

    observation_space = spaces.Dict(
        {"observations": spaces.Box(-2, 2, (1,), np.float32), "action_mask": spaces.MultiBinary(3)}
    )
    action_space = spaces.Discrete(3)

    def observe(self):
        return {"observations": np.ones(1, np.float32), "action_mask": np.array([0, 0, 1], np.int8)}

    def step(self, action):
        self.n_steps += 1
        return self.observe(), 1.0 if action == 2 else -100.0, self.n_steps >= 10, False, {}


class TakesItem(Guess):
    """Calls `.item()` of its action, as `action_space.sample()` allows."""

    def step(self, action):
        return super().step(action.item())


class GymBefore26(Guess):
    """`step` gives four values, as before Gymnasium 0.26."""

    def step(self, action):
        observation, reward, ended, _, info = super().step(action)
        return observation, reward, ended, info


class RewardIsArray(Guess):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


class NoInfo(Guess):
    def step(self, action):
        return *super().step(action)[:4], None


class ResetBefore26(Guess):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class ResetWithoutSeed(Guess):
    def reset(self):
        return super().reset()


class EndIsArray(Guess):
    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, np.array([False, True]), truncated, info


class NoReward(Guess):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, None, *rest


class Exits(Guess):
    def step(self, action):
        sys.exit("no license")


class ExitsAtOnce(Guess):
    def __init__(self):
        sys.exit(1)


class Fails(Guess):
    def step(self, action):
        raise ValueError("mine")


class Pair(ParallelEnv):
    """Two agents; `returned` has what `step` returns, `begun` what `reset` does."""

    metadata = {"name": "pair"}
    possible_agents = ["x", "y"]
    agents = ["x", "y"]
    begun = ({"x": np.zeros(1), "y": np.zeros(1)}, {})
    returned = None

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (1,))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return self.begun

    def step(self, actions):
        return self.returned


class KeepsEndedAgents(ParallelEnv):
    """All agents end at step 6, but stay in `agents`."""

    metadata = {"name": "keeps_ended_agents", "render_modes": []}
    render_mode = None

    def __init__(self):
        self.possible_agents = ["x", "y"]

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.n_steps = ["x", "y"], 0
        return {a: np.zeros(1, np.float32) for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions):
        self.n_steps += 1

        def all_agents(value):
            return dict.fromkeys(self.agents, value)

        ended = self.n_steps >= 6
        observations = all_agents(np.zeros(1, np.float32))
        return observations, all_agents(1.0), all_agents(False), all_agents(ended), all_agents({})


class InTurns(AECEnv):
    """Two agents act in turn, the first of `names` first."""

    names = ("p_0", "p_1")
    render_mode = None

    def __init__(self):
        self.possible_agents = list(self.names)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if self.act(agent, action):
            self.terminations = dict.fromkeys(self.agents, True)
        first, second = self.names
        self.agent_selection = second if agent == first else first
        self._accumulate_rewards()


class FirstMayFold(InTurns):
    """Zero-sum: `p_0` folds and loses, or bets and wins after `p_1` has acted in vain.

    With random actions both have a mean return of 0 over all games.
    """

    metadata = {"name": "first_may_fold", "render_modes": [], "is_parallelizable": False}

    def observation_space(self, agent):
        return spaces.Box(-2, 2, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self, agent):
        return np.zeros(1, np.float32)

    def act(self, agent, action):
        """Give rewards; return whether the game is over."""
        if agent == "p_0" and action == 0:
            self.rewards = {"p_0": -1.0, "p_1": 1.0}
        elif agent == "p_1":
            self.rewards = {"p_0": 1.0, "p_1": -1.0}
        return agent == "p_1" or action == 0


class TwoBehaviors(InTurns):
    """Agents `a` and `b` guess in turn, five times each; each right choice gives 1."""

    names = ("a", "b")
    metadata = {"name": "two_behaviors"}  # PettingZoo requires a name

    def observation_space(self, agent):
        return Guess.observation_space

    def action_space(self, agent):
        return Guess.action_space

    def reset(self, seed=None, options=None):
        super().reset(seed)
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.n_turns = 0
        self.answer = int(self.rng.integers(2))

    def observe(self, agent):
        return np.array([2.0 * self.answer - 1.0], np.float32)

    def act(self, agent, action):
        self.rewards[agent] = float(action == self.answer)
        self.answer = int(self.rng.integers(2))
        self.n_turns += 1
        return self.n_turns == 10


class Steering(gymnasium.Env):
    """A camera of bytes and one of -1 to 1, numbers, and actions of several ranges."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (20, 24, 3), np.uint8),
            "depth": spaces.Box(-1, 1, (20, 20, 1), np.float32),
            "speed": spaces.Box(-10, 10, (2,), np.float32),
        }
    )
    action_space = spaces.Dict(
        {
            "wheel": spaces.Box(np.float32([-0.4, -0.4, 0]), np.float32([0.4, 0.4, 10])),
            "gear": spaces.Discrete(4, start=-1),
            "lights": spaces.Discrete(2),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}
