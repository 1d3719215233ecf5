import sys

import bridge_toys
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces

from pipeline.core.specs import ActionTuple
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.seeding import stream
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.pettingzoo_bridge import PettingZooSimulator


@pytest.fixture
def module(monkeypatch):
    """Return a function that makes a module of toy environments."""

    def make(**creators):
        toy_module = type(sys)("toy_games_v0")
        toy_module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(
            "toy_games_v0", None
        )
        for name, creator in creators.items():
            setattr(toy_module, name, creator)
        monkeypatch.setitem(sys.modules, "toy_games_v0", toy_module)
        return "toy_games_v0"

    return make


def choose(simulator, steps, discrete):
    """Step with `discrete` for every agent that asks: a number, or a number per behavior."""
    chosen = {}
    for name, (decisions, _) in steps.items():
        choice = discrete[name] if isinstance(discrete, dict) else discrete
        chosen[name] = ActionTuple(discrete=np.full((len(decisions), 1), choice, dtype=np.int32))
    return simulator.step(chosen)


def asking(steps):
    return [(n, agent) for n, (decisions, _) in steps.items() for agent in decisions]


def ended(steps):
    return {
        agent: (name, terminals[agent].interrupted, terminals[agent].reward)
        for name, (_, terminals) in steps.items()
        for agent in terminals
    }


def test_agent_can_end_while_the_other_agents_continue(module):
    simulator = PettingZooSimulator(id=module(parallel_env=bridge_toys.Dying))
    env = simulator._copies[0].env
    steps = simulator.reset()
    seen = []
    for _ in range(5):
        steps = choose(simulator, steps, {"bug?team=0": 0, "bird?team=0": 2})
        seen.append(([agent for _, agent in asking(steps)], ended(steps)))
    assert seen == [
        ([0, 1, 2], {}),
        ([1, 2], {0: ("bug?team=0", False, 2.0)}),
        ([1, 2], {}),
        ([2], {1: ("bug?team=0", False, 5.0)}),
        ([0, 1, 2], {2: ("bird?team=0", True, 7.0)}),  # truncated; then all begin a new episode
    ]
    assert steps["bird?team=0"][1].obs[0].tolist() == [[5.0] * 3]
    assert steps["bird?team=0"][0].obs[0].tolist() == [[0.0] * 3]
    assert env.taken == []
    choose(simulator, steps, {"bug?team=0": 1, "bird?team=0": 2})
    assert env.taken == [{"bug_0": 6, "bug_1": 6, "bird_0": 7}]  # Discrete that starts at 5


def test_only_the_agent_with_the_turn_decides_and_gets_its_rewards_since_its_last_action(module):
    simulator = PettingZooSimulator(id=module(env=bridge_toys.Turns))
    assert list(simulator.behavior_specs) == ["a?team=0", "b?team=0", "c?team=0"]
    steps = simulator.reset()
    turns = []
    for _ in range(8):
        ((behavior, agent),) = asking(steps)
        turns.append((behavior[0], agent, steps[behavior][0][agent].reward, ended(steps)))
        steps = choose(simulator, steps, 3)
    # a gives b 1, c 10; b gives c 1, a 10; c gives a 1, b 10.
    assert turns[:5] == [
        ("a", 0, 0.0, {}),
        ("b", 1, 1.0, {}),
        ("c", 2, 11.0, {}),
        ("a", 0, 11.0, {}),
        ("b", 1, 11.0, {}),
    ]
    # The fifth turn ends b: it ends with its rewards since then, and c asks at once.
    assert turns[5] == ("c", 2, 11.0, {1: ("b?team=0", False, 0.0)})
    # c's turn gives a 1, and a's gives c 10; then both are truncated, and a begins again.
    assert turns[6] == ("a", 0, 11.0, {})
    assert turns[7] == ("a", 0, 0.0, {0: ("a?team=0", True, 0.0), 2: ("c?team=0", True, 10.0)})


def test_tic_tac_toe_ends_with_a_winner_and_the_next_game_begins_at_once():
    simulator = PettingZooSimulator(id="pettingzoo.classic.tictactoe_v3", teams="index")
    steps = simulator.reset()
    assert list(simulator.behavior_specs) == ["player?team=0", "player?team=1"]
    order = []
    for move in (0, 3, 1, 4):
        ((behavior, agent),) = asking(steps)
        order.append((behavior, agent))
        assert ended(steps) == {}
        steps = choose(simulator, steps, move)
    assert order == [("player?team=0", 0), ("player?team=1", 1)] * 2
    decisions, _ = steps["player?team=0"]
    assert np.flatnonzero(decisions.action_mask[0][0]).tolist() == [0, 1, 3, 4]
    steps = choose(simulator, steps, 2)
    assert ended(steps) == {0: ("player?team=0", False, 1.0), 1: ("player?team=1", False, -1.0)}
    assert asking(steps) == [("player?team=0", 0)]
    assert not steps["player?team=0"][0].obs[0].any()


@pytest.mark.parametrize(("api", "n_asking"), [("auto", 4), ("aec", 1)])
def test_parallel_environment_can_be_used_through_the_parallel_or_the_aec_interface(api, n_asking):
    simulator = PettingZooSimulator(id="mpe2.simple_tag_v3", api=api)
    assert len(asking(simulator.reset())) == n_asking


def test_parallel_environment_gives_the_same_steps_with_and_without_the_bridge():
    from mpe2 import simple_tag_v3

    simulator = PettingZooSimulator(id="mpe.simple_tag_v3", n_agents=2, seed=5)
    assert list(simulator.behavior_specs) == ["adversary?team=0", "agent?team=0"]
    envs = [simple_tag_v3.parallel_env() for _ in range(2)]
    rngs = [stream(5, "pettingzoo", k) for k in range(2)]
    pairs = zip(envs, rngs, strict=True)
    seen = [env.reset(seed=int(rng.integers(2**31)))[0] for env, rng in pairs]
    names = envs[0].possible_agents
    steps = simulator.reset()
    rng = np.random.default_rng(1)
    for _ in range(60):
        chosen = {k: int(rng.integers(5)) for k in range(8)}
        agent_steps = {agent: steps[name][0][agent] for name, agent in asking(steps)}
        for copy in range(2):
            for k, agent in enumerate(names):
                assert np.array_equal(
                    agent_steps[4 * copy + k].obs[0], np.float32(seen[copy][agent])
                )
        steps = simulator.step(
            {
                name: ActionTuple(discrete=np.array([[chosen[a]] for a in decisions]))
                for name, (decisions, _) in steps.items()
            }
        )
        for copy, env in enumerate(envs):
            actions = {agent: chosen[4 * copy + k] for k, agent in enumerate(names)}
            seen[copy], rewards, _, truncated, _ = env.step(actions)
            for k, agent in enumerate(names):
                name = f"{agent.partition('_')[0]}?team=0"
                part = steps[name][1] if truncated[agent] else steps[name][0]
                assert part[4 * copy + k].reward == pytest.approx(rewards[agent], rel=1e-5)
            if not env.agents:
                seen[copy], _ = env.reset(seed=int(rngs[copy].integers(2**31)))


def test_agents_with_equal_names_but_different_spaces_have_different_behaviors(module):
    class Unlike(bridge_toys.Dying):
        def action_space(self, agent):
            return spaces.Discrete(4 if agent == "bug_1" else 3, start=5)

    simulator = PettingZooSimulator(id=module(parallel_env=Unlike))
    assert list(simulator.behavior_specs) == ["bug?team=0", "bug_1?team=0", "bird?team=0"]


def test_group_reward_is_the_mean_reward_and_each_agent_also_gets_its_difference_from_the_mean(
    module,
):
    name = module(parallel_env=bridge_toys.Dying)
    simulator = PettingZooSimulator(id=name, n_agents=2, groups="behavior")
    steps = choose(simulator, simulator.reset(), 0)
    bugs, birds = steps["bug?team=0"][0], steps["bird?team=0"][0]
    assert (bugs.group_id.tolist(), birds.group_id.tolist()) == ([1, 1, 3, 3], [2, 4])
    assert bugs.group_reward.tolist() == [1.5] * 4  # of 1 and 2
    assert bugs.reward.tolist() == [-0.5, 0.5] * 2
    assert (birds.group_reward.tolist(), birds.reward.tolist()) == ([3.0] * 2, [0.0] * 2)


def test_actions_and_rewards_of_agents_in_teams_and_groups_are_kept_apart(module):
    teams, name = {"bug": 1, "bug_1": 2, "bird": 0}, module(parallel_env=bridge_toys.Dying)
    simulator = PettingZooSimulator(id=name, n_agents=2, groups="all", teams=teams)
    agents = {"bug?team=1": [0, 3], "bug?team=2": [1, 4], "bird?team=0": [2, 5]}
    steps = simulator.reset()
    assert {behavior: list(decisions) for behavior, (decisions, _) in steps.items()} == agents
    choices = dict(zip(agents, ([0, 1], [2, 0], [1, 2]), strict=True))
    for mean, n_ended in ((2.0, 0), (3.0, 2)):  # of the rewards 1, 2 and 3, then 2, 3 and 4
        steps = simulator.step(
            {name: ActionTuple(discrete=np.array(rows)[:, None]) for name, rows in choices.items()}
        )
        for own, (behavior, (decisions, terminals)) in zip((-1, 0, 1), steps.items(), strict=True):
            assert len(terminals) == (n_ended if behavior == "bug?team=1" else 0)
            batch = terminals if len(terminals) else decisions
            assert batch.agent_id.tolist() == agents[behavior]
            assert batch.group_id.tolist() == [1, 2]
            assert batch.reward.tolist() == [own] * 2, "the difference from the mean"
            assert batch.group_reward.tolist() == [mean] * 2
    taken = [copy.env.taken[0] for copy in simulator._copies]
    assert taken == [
        {"bug_0": 5, "bug_1": 7, "bird_0": 6},
        {"bug_0": 6, "bug_1": 5, "bird_0": 7},
    ]


def test_agent_that_disappears_without_the_end_of_its_episode_is_an_error(module):
    class Vanishing(bridge_toys.Dying):
        def step(self, actions):
            observed, *rest = super().step(actions)
            observed.pop("bug_0")
            self.agents.remove("bug_0")
            return observed, *rest

    simulator = PettingZooSimulator(id=module(parallel_env=Vanishing))
    steps = simulator.reset()
    with pytest.raises(UnityEnvironmentException, match="'bug_0' has left without a last obs"):
        choose(simulator, steps, 0)


class NoAgents(bridge_toys.Dying):
    possible_agents = ()


class Texts(bridge_toys.Dying):
    def observation_space(self, agent):  # noqa: ARG002  # the interface has it
        return spaces.Text(3)


@pytest.mark.parametrize(
    ("creators", "options", "said"),
    [
        ({}, {}, "the environment has neither env nor parallel_env, but api is auto"),
        (
            {"env": bridge_toys.Turns},
            {"api": "parallel"},
            "the environment has aec, but api is parallel",
        ),
        ({"env": bridge_toys.Turns}, {"api": "both"}, "api is 'both'; choose one of auto"),
        ({"env": bridge_toys.Turns}, {"groups": "all"}, "its agents act in turns"),
        ({"parallel_env": bridge_toys.Dying}, {"groups": "some"}, "choose one of none, all"),
        ({"parallel_env": bridge_toys.Dying}, {"teams": {"cat": 1}}, "for each of bug_0, bug_1"),
        ({"parallel_env": bridge_toys.Dying}, {"teams": {"bug": -1}}, "teams.bug_0 is -1"),
        ({"parallel_env": bridge_toys.Dying}, {"kwargs": {"x": 1}}, "correct kwargs"),
        ({"parallel_env": NoAgents}, {}, "has no possible_agents"),
        ({"parallel_env": Texts}, {}, "agent bug_0: the observation 'observation' is a Text space"),
    ],
)
def test_environment_that_cannot_be_made_is_refused_in_one_line(module, creators, options, said):
    with pytest.raises(SettingsError, match=said) as refused:
        PettingZooSimulator(id=module(**creators), **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("pettingzoo.classic.tictactoe_v3", "pettingzoo.classic.tictactoe_v3"),
        ("classic.tictactoe_v3", "pettingzoo.classic.tictactoe_v3"),
        ("classic/tictactoe-v3", "pettingzoo.classic.tictactoe_v3"),
        ("pettingzoo.mpe.simple_tag_v3", "mpe2.simple_tag_v3"),  # moved to another package
    ],
)
def test_pettingzoo_id_may_be_shortened_or_written_as_in_the_pettingzoo_registry(written, name):
    assert naming.full_name(written) == name


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("classic.tictacto_v3", "did you mean 'pettingzoo.classic.tictactoe_v3'"),
        ("tictactoe_v2", "did you mean 'pettingzoo.classic.tictactoe_v3'"),
        ("simple_tags_v3", "did you mean 'mpe2.simple_tag_v3'"),
        ("..", r"no environment '\.\.'\. An id is the path of a module"),
    ],
)
def test_error_for_an_unknown_pettingzoo_id_proposes_the_most_similar_id(written, said):
    with pytest.raises(SettingsError, match=said):
        naming.full_name(written)


def test_environment_that_a_module_registers_is_found_and_errors_name_missing_packages():
    pettingzoo.register("aec", "test/broken-v0", entry_point="no_such_module:env")
    pettingzoo.register("parallel", "test/dying-v0", entry_point=bridge_toys.Dying)
    try:
        simulator = PettingZooSimulator(id="bridge_toys:test/dying-v0")
        assert len(asking(simulator.reset())) == 3
        with pytest.raises(SettingsError, match=r"not installed .*no_such_module.*constraints.txt"):
            PettingZooSimulator(id="bridge_toys:test/broken-v0")
    finally:
        del pettingzoo.aec_registry["test/broken-v0"]
        del pettingzoo.parallel_registry["test/dying-v0"]


class Changing(bridge_toys.Dying):
    """Only `bug_1` is in the second episode; the bird observes nothing in the first step."""

    def __init__(self):
        self.n_episodes, self.seeds = 0, []

    def reset(self, seed=None, options=None):
        observed, infos = super().reset(seed, options)
        self.n_episodes += 1
        self.seeds.append(seed)
        if self.n_episodes == 2:
            self.agents = ["bug_1"]
            observed = {"bug_1": observed["bug_1"]}
        return observed, infos

    def step(self, actions):
        observed, rewards, *rest, infos = super().step(actions)
        if self.n == 1:
            observed.pop("bird_0", None)
            infos["bug_1"] = {"action_mask": np.array([1, 0, 1])}
        return observed, rewards, *rest, infos

    def render(self):
        return np.full((2, 2, 3), self.n_episodes, np.uint8)


def test_episodes_and_copies_of_a_pettingzoo_environment_do_not_affect_each_other(module):
    simulator = PettingZooSimulator(id=module(parallel_env=Changing), n_agents=2, seed=5)
    choose(simulator, simulator.reset(), 0)  # rewards of 3 are pending for both birds
    simulator._envs[1].n_episodes = 3
    steps = simulator.reset()
    assert asking(steps) == [*(("bug?team=0", k) for k in (1, 3, 4)), ("bird?team=0", 5)]
    steps = choose(simulator, steps, 0)  # bug_0 is not part of the first copy's episode
    assert asking(steps) == [("bug?team=0", k) for k in (1, 3, 4)]
    masks = [mask.tolist() for mask in steps["bug?team=0"][0].action_mask]
    assert masks == [[[False, True, False], [False] * 3, [False, True, False]]]
    assert [int(simulator.render(agent)[0, 0, 0]) for agent in (2, 3)] == [2, 4]
    steps = choose(simulator, steps, 0)
    assert ended(steps) == {3: ("bug?team=0", False, 2.0)}
    assert steps["bird?team=0"][0][5].reward == 3.0 + 4.0
    assert steps["bird?team=0"][0].action_mask is None
    steps = choose(simulator, choose(simulator, steps, 0), 0)
    # the only agent of the first copy has ended, and a new episode begins with all agents
    assert ended(steps) == dict.fromkeys((1, 4), ("bug?team=0", False, 5.0))
    assert asking(steps) == [
        ("bug?team=0", 0),
        ("bug?team=0", 1),
        *(("bird?team=0", k) for k in (2, 5)),
    ]
    steps = choose(simulator, choose(simulator, steps, 0), 0)
    assert {0: ("bug?team=0", False, 2.0)}.items() <= ended(steps).items(), (
        "as in its first episode"
    )
    streams = [stream(5, "pettingzoo", k) for k in range(2)]
    drawn = [[int(rng.integers(2**31)) for _ in range(3)] for rng in streams]
    assert [env.seeds for env in simulator._envs] == drawn
