# ruff: noqa: ARG002, RUF012  # the interfaces of Gymnasium and PettingZoo
"""Third-party environments that continue exactly from a restored state."""

import os
import platform
import subprocess
import sys

import bridge_toys
import gymnasium
import numpy as np
import pytest
from pettingzoo import ParallelEnv

from pipeline.errors import UnityEnvironmentException
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator
from pipeline.simulators.bridges.pettingzoo_bridge import ParallelCopy, PettingZooSimulator
from pipeline.wire.channels import state
from pipeline.wire.channels.parameters import Parameters

KNOWN = ["CartPole-v1", "MountainCar-v0", "Acrobot-v1", "Pendulum-v1", "FrozenLake-v1"]
KNOWN += ["Blackjack-v1", "Hopper-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "Reacher-v5"]


def played(simulator, steps, rng, n):
    """Return all numbers of `n` steps with random actions, and the last steps."""
    seen = []
    for _ in range(n):
        actions = {}
        for name, (decisions, _) in steps.items():
            spec = simulator.behavior_specs[name].action_spec
            actions[name] = spec.random_action(len(decisions), rng)
        steps = simulator.step(actions)
        for name, pair in steps.items():
            for batch in pair:
                seen.append((name, [obs.tolist() for obs in batch.obs], batch.reward.tolist()))
                seen.append(batch.agent_id.tolist())
    return seen, steps


def check_goes_on(make, n=40):
    original, restored = make(), make()
    _, steps = played(original, original.reset(), np.random.default_rng(0), n)
    saved = state.encode(original.state_dict())
    expected, _ = played(original, steps, np.random.default_rng(1), n)
    restored.load_state_dict(state.decode(saved))
    actual, _ = played(restored, steps, np.random.default_rng(1), n)
    assert actual == expected
    original.close()
    restored.close()


@pytest.mark.parametrize("env_id", KNOWN)
def test_restored_gymnasium_environments_continue_from_the_saved_state(env_id):
    # A Pendulum ends by its time limit only, so the steps until then must also be restored.
    kwargs = {"max_episode_steps": 47} if env_id == "Pendulum-v1" else {}
    check_goes_on(lambda: GymnasiumSimulator(id=env_id, kwargs=kwargs, seed=5, n_agents=3))


FALLEN = """
import hashlib, numpy as np
from pipeline.wire.channels import state
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator

simulator = GymnasiumSimulator(id="Humanoid-v5", seed=5)
(name,) = simulator.behavior_specs
spec, rng = simulator.behavior_specs[name].action_spec, np.random.default_rng(0)
steps, digest = simulator.reset(), hashlib.sha256()
for _ in range(60):
    steps = simulator.step({name: spec.random_action(len(steps[name][0]), rng)})
    digest.update(state.encode(simulator.state_dict()))
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="MALLOC_PERTURB_ is glibc's")
def test_bytes_of_a_saved_environment_state_do_not_depend_on_uninitialized_memory():
    digests = {
        subprocess.run(  # noqa: S603  # this interpreter
            [sys.executable, "-c", FALLEN],
            env={**os.environ, "MALLOC_PERTURB_": filler},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for filler in ("85", "170")
    }
    assert len(digests) == 1


class Walk(gymnasium.Env):
    """A random walk that ends at random."""

    observation_space = gymnasium.spaces.Box(-1e3, 1e3, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options
        self.at = [self.np_random.normal()]
        return np.array(self.at, dtype=np.float32), {}

    def step(self, action):
        self.at[0] += self.np_random.normal() + action
        done = bool(self.np_random.random() < 0.1)
        return np.array(self.at, dtype=np.float32), self.at[0], done, False, {}


class Restorable(Walk):
    def get_state(self):
        return {"at": list(self.at)}

    def set_state(self, saved):
        self.at = list(saved["at"])


def test_environment_of_an_unknown_class_returns_a_state_only_with_the_method_get_state():
    check_goes_on(lambda: GymnasiumSimulator(id=[Restorable(), Restorable()], seed=5))
    hidden = type("Hidden", (gymnasium.Wrapper,), {})(gymnasium.make("CartPole-v1"))
    for env in (Walk(), hidden):  # the second is in an unknown wrapper
        simulator = GymnasiumSimulator(id=[env], seed=5)
        simulator.reset()
        assert simulator.state_dict() is None


class Together(ParallelEnv):
    """Two agents; the second observes every other step only."""

    metadata = {"name": "together"}
    possible_agents = ["a_0", "b_0"]

    def observation_space(self, agent):
        return gymnasium.spaces.Box(-1e3, 1e3, (1,))

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.rng, self.options = np.random.default_rng(seed), options
        self.agents, self.n = list(self.possible_agents), 0
        return {agent: np.float32([self.rng.normal()]) for agent in self.agents}, {}

    def step(self, actions):
        self.n += 1
        seen = self.agents[: 1 + self.n % 2]
        over = self.n % 6 == 5
        obs = {agent: np.float32([self.rng.normal()]) for agent in seen}
        rewards = {agent: self.rng.normal() for agent in self.agents}
        ends = dict.fromkeys(self.agents, over)
        if over:
            obs = {agent: np.float32([0.0]) for agent in self.agents}
            self.agents = []
        return obs, rewards, ends, dict.fromkeys(ends, False), {}

    def get_state(self):
        return {"rng": self.rng.bit_generator.state, "n": self.n, "agents": list(self.agents)}

    def set_state(self, saved):
        self.rng.bit_generator.state = saved["rng"]
        self.n, self.agents = saved["n"], list(saved["agents"])


def test_restored_parallel_environment_still_delivers_rewards_that_were_pending_when_saved():
    for n in (9, 10, 12):
        check_goes_on(lambda: PettingZooSimulator(id=[Together(), Together()], seed=5), n)


class Turns(bridge_toys.Turns):
    """Three agents in a ring, of which one dies before the others."""

    def get_state(self):
        names = ["turn", "agents", "agent_selection", "rewards", "_cumulative_rewards"]
        return {name: getattr(self, name) for name in [*names, "terminations", "truncations"]}

    def set_state(self, saved):
        vars(self).update(saved)


def test_restored_turn_based_environment_continues_with_the_agent_whose_turn_it_was():
    check_goes_on(lambda: PettingZooSimulator(id=[Turns(), Turns(), Turns()], seed=5))


@pytest.mark.parametrize(
    ("kind", "env"), [(GymnasiumSimulator, Restorable), (PettingZooSimulator, Together)]
)
def test_environment_parameters_are_restored_with_the_states_of_environments(kind, env):
    original, restored = (kind(id=[env(), env()], seed=5) for _ in range(2))
    original.set_parameter("wind", 2.0)
    restored.set_parameter("gone", 1.0)
    original.reset()
    restored.load_state_dict(original.state_dict())
    restored.reset()
    assert [copy.options for copy in restored._envs] == [{"wind": 2.0}] * 2


class Guest:
    """Agent b ends before a decision, ends again, comes back, ends, and is observed once more."""

    possible_agents = ["a", "b"]

    def reset(self, seed=None, options=None):
        self.agents, self.n = ["a"], 0
        return {"a": 0.0}, {}

    def step(self, actions):
        self.n += 1
        self.agents = {3: ["a", "b"], 6: []}.get(self.n, ["a"])
        seen = ["a"] if self.n == 6 else ["a", "b"]
        over = {"a": self.n == 6, "b": self.n in (1, 2, 4)}
        return dict.fromkeys(seen, 0.0), {"a": 1.0}, over, {}, {}

    def get_state(self):
        return {"n": self.n, "agents": list(self.agents)}

    def set_state(self, saved):
        self.n, self.agents = saved["n"], list(saved["agents"])


def guests() -> ParallelCopy:
    rng, parameters = np.random.default_rng(0), Parameters()
    return ParallelCopy(Guest(), groups=[["a", "b"]], rng=rng, where="g", parameters=parameters)


@pytest.mark.parametrize("restores", [False, True])
def test_each_end_of_an_agent_is_reported_once_in_every_episode_also_after_a_restore(restores):
    copy = guests()
    assert [event.agent for event in copy.reset()] == [0]
    asks, goes = (0, None, 1.0), (1, False, 0.0)
    episode = [[asks, goes], [asks], [asks, (1, None, 0.0)], [asks, goes], [asks]]
    episode.append([(0, False, 1.0), (0, None, 0.0)])
    for expected in episode * 2:
        events = [(e.agent, e.interrupted, e.group_reward) for e in copy.step({0: 0})]
        assert events == expected
        if restores:
            saved, copy = state.decode(state.encode(copy.state_dict())), guests()
            copy.load_state_dict(saved)


def test_agent_that_disappears_after_a_restore_causes_an_error_that_names_the_agent():
    copy, restored = guests(), guests()
    list(copy.reset())
    restored.load_state_dict(copy.state_dict())
    restored.env.step = lambda _: (restored.env.agents.clear(), ({}, {}, {}, {}, {}))[1]
    with pytest.raises(UnityEnvironmentException, match="the agent 'a' has left"):
        list(restored.step({0: 0}))
