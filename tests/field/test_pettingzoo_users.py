"""Reports of users who train in environments of PettingZoo."""

import field_environments
import numpy as np
import pytest
from gymnasium import spaces

from pipeline.core.specs import ActionTuple
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.pettingzoo_wrapper import (
    UnityAECEnv,
    UnityParallelEnv,
    UnityPettingZooException,
)
from pipeline.errors import UnityEnvironmentException
from pipeline.evaluation.episodes import evaluate
from pipeline.simulators import registry
from pipeline.simulators.bridges.pettingzoo_bridge import PettingZooSimulator


class RandomPolicy:
    """Draws each action of one branch of two choices."""

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)

    def act(self, steps, deterministic=False):  # noqa: ARG002  # the interface has it
        choices = self.rng.integers(2, size=(len(steps), 1), dtype=np.int32)
        return ActionTuple(np.zeros((len(steps), 0), np.float32), choices)

    def end(self, agent_ids):
        pass


def played(env_class, n_agents=1, episodes=2000, **options):
    """Return the episodes of random players, by behavior."""
    sim = PettingZooSimulator(id=[env_class() for _ in range(n_agents)], teams="index", **options)
    env = InProcessEnvironment(sim)
    policies = {"p": RandomPolicy()}
    ended = evaluate(env, policies, episodes=episodes, seed=3)
    by_behavior = {name: [] for name in env.behavior_specs}
    for episode in ended:
        by_behavior[episode.behavior].append(episode)
    return by_behavior


def act(sim, steps, choice=0):
    """Return the steps after the same action of all deciding agents."""
    return sim.step(
        {
            name: ActionTuple(
                np.zeros((len(decisions), 0), np.float32),
                np.full((len(decisions), 1), choice, np.int32),
            )
            for name, (decisions, _) in steps.items()
        }
    )


# Games that are over before the first turn.


@pytest.mark.parametrize("n_copies", [1, 4])
def test_agent_that_wins_before_its_first_turn_gets_its_reward(n_copies):
    """PettingZoo#355, tianshou#900."""
    by_behavior = played(field_environments.FirstMayFold, n_copies)
    assert list(by_behavior) == ["p?team=0", "p?team=1"]
    for episodes in by_behavior.values():
        returns = np.array([episode.episode_return for episode in episodes])
        assert len(returns) == 2000
        assert set(returns) == {-1.0, 1.0}
        assert abs(returns.mean()) < 1.96 * returns.std() / np.sqrt(len(returns))
    lengths = [{episode.length for episode in episodes} for episodes in by_behavior.values()]
    assert lengths == [{1}, {0, 1}]
    second = by_behavior["p?team=1"]
    assert all(episode.episode_return == 1 for episode in second if episode.length == 0)


def test_returns_of_a_zero_sum_game_add_up_to_zero():
    first, second = played(field_environments.FirstMayFold, episodes=50).values()
    sums = [a.episode_return + b.episode_return for a, b in zip(first, second, strict=True)]
    assert sums == [0.0] * 50


class Folds(field_environments.FirstMayFold):
    """`p_0` always folds."""

    def step(self, action):
        super().step(0 if self.agent_selection == "p_0" and action is not None else action)


def test_evaluation_ends_although_an_agent_never_acts():
    by_behavior = played(Folds, episodes=20)
    assert [episode.length for episode in by_behavior["p?team=1"]] == [0] * 20
    assert {episode.episode_return for episode in by_behavior["p?team=1"]} == {1.0}


def test_agent_that_never_acted_gets_one_terminal_step_per_game():
    sim = PettingZooSimulator(id=[Folds()])
    steps = sim.reset()
    for _ in range(3):
        steps = act(sim, steps)
        decisions, terminals = steps["p?team=0"]
        ends = zip(terminals.agent_id.tolist(), terminals.reward.tolist(), strict=True)
        assert sorted(ends) == [(0, -1.0), (1, 1.0)]
        assert decisions.agent_id.tolist() == [0]


# Agents that stay in `agents`.


class KeepsInTurns(field_environments.FirstMayFold):
    """Does nothing when the turn of an agent comes that has ended."""

    def _was_dead_step(self, action):
        assert action is None
        self.agent_selection = "p_1" if self.agent_selection == "p_0" else "p_0"


class OneStays(field_environments.KeepsEndedAgents):
    """`x` ends at step 2 and stays until `y` has ended at step 6; then both leave."""

    def step(self, actions):
        observations, rewards, _, truncations, infos = super().step(actions)
        truncations["x"] = self.n_steps >= 2
        if self.n_steps == 6:
            self.agents = []
        return observations, rewards, dict.fromkeys(rewards, False), truncations, infos


def test_ended_agent_may_stay_in_the_list_agents_until_all_agents_have_ended():
    sim = PettingZooSimulator(id=[OneStays()])
    ends, steps = [], sim.reset()
    for _ in range(12):
        steps = act(sim, steps)
        (_, terminals), *others = steps.values()
        ends.append(terminals.agent_id.tolist() + [i for _, t in others for i in t.agent_id])
    once = [[], [0], [], [], [], [1]]
    assert ends == once * 2


class LeavesAtOnce(field_environments.FirstMayFold):
    """Empties `agents` when the game is over, so that nobody gets the last rewards."""

    def step(self, action):
        super().step(action)
        if all(self.terminations.values()):
            self.agents = []


@pytest.mark.parametrize(
    ("env_class", "n_steps", "said"),
    [
        (
            field_environments.KeepsEndedAgents,  # PettingZoo#513, PettingZoo#881
            5,
            r"the agents \['x', 'y'\] have ended, but stay in `agents`.*; remove an agent in the "
            "step in which it is terminated or t",
        ),
        (KeepsInTurns, 0, "let `step` remove an agent that has end"),
        (LeavesAtOnce, 0, "the agent 'p_0' has left without a last"),
    ],
)
def test_environment_that_ends_agents_against_the_rules_of_pettingzoo_is_refused(
    env_class, n_steps, said
):
    sim = PettingZooSimulator(id=[env_class()])
    steps = sim.reset()
    for _ in range(n_steps):
        steps = act(sim, steps)
    with pytest.raises(UnityEnvironmentException, match=said):
        act(sim, steps)


# Actions and masks.


class TakesItem(field_environments.KeepsEndedAgents):
    def step(self, actions):
        self.taken = [action.item() for action in actions.values()]
        return super().step(actions)


def test_pettingzoo_environment_gets_its_discrete_action_as_a_numpy_scalar():
    """tf-agents#520."""
    env = TakesItem()
    sim = PettingZooSimulator(id=[env])
    act(sim, sim.reset(), 1)
    assert env.taken == [1, 1]


class Masked(field_environments.FirstMayFold):
    def observation_space(self, agent):
        parts = {"obs": super().observation_space(agent), "action_mask": spaces.MultiBinary(2)}
        return spaces.Dict(parts)

    def observe(self, agent):
        mask = np.array([agent == "p_0", 1], np.int8)
        return {"obs": super().observe(agent), "action_mask": mask}


def test_action_mask_inside_a_pettingzoo_observation_is_found():
    sim = PettingZooSimulator(id=[Masked()])
    steps = sim.reset()
    assert steps["p?team=0"][0].action_mask[0].tolist() == [[False, False]]
    steps = act(sim, steps, 1)
    assert steps["p?team=0"][0].action_mask[0].tolist() == [[True, False]]
    assert [obs.shape for obs in sim.behavior_specs["p?team=0"].observation_specs] == [(1,)]


# An executable as an environment of PettingZoo.


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrapper", [UnityParallelEnv, UnityAECEnv])
def test_pettingzoo_wrappers_list_spaces_of_all_agents(wrapper):
    env = wrapper(InProcessEnvironment(registry.make("tag", seed=1, n_agents=3)))
    env.reset()
    assert len(env.possible_agents) > 1
    for spaces_of, space_of in (
        (env.action_spaces, env.action_space),
        (env.observation_spaces, env.observation_space),
    ):
        assert list(spaces_of) == env.possible_agents
        assert all(space is space_of(agent) for agent, space in spaces_of.items())


def test_error_about_an_action_for_an_unknown_agent_names_the_agent():
    env = UnityParallelEnv(InProcessEnvironment(registry.make("tag", seed=1, n_agents=3)))
    env.reset()
    for use in (lambda: env.step({"nobody": 0}), lambda: env.action_space("nobody")):
        with pytest.raises(UnityPettingZooException, match="has had no agent 'nobody' since its"):
            use()
    # actions of agents that have ended since the reset are accepted without effect
    agents = list(env.agents)
    for _ in range(5):
        env.step({agent: env.action_space(agent).sample() for agent in agents})
