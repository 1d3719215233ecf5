from __future__ import annotations

import csv
from dataclasses import asdict, replace

import numpy as np
import pytest
from steps import decision_steps, terminal_steps

from pipeline.errors import StageError
from pipeline.evaluation.episodes import evaluate, write_episodes
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ()))


class Script:
    """Agents whose episodes have scripted lengths; each step is worth `reward`.

    `lengths` gives each agent's episode lengths, then repeats the last. With `new_ids` an agent has
    another id in each episode, as in Unity.
    """

    def __init__(self, lengths, *, reward=1.0, group_reward=0.0, first_reward=0.0, new_ids=False):
        self.lengths, self.reward, self.group_reward = lengths, reward, group_reward
        self.first_reward, self.new_ids = first_reward, new_ids
        self.next_id = 0
        self.actions = []

    def reset(self):
        self.episode = [0] * len(self.lengths)
        self.ids = [self._new_id(k) for k in range(len(self.lengths))]
        self.age = [0] * len(self.lengths)
        self.ended = []

    def _new_id(self, k):
        self.next_id += 1
        return 100 + self.next_id if self.new_ids else k

    def step(self, action=None):
        self.actions.append(action)
        self.ended = []
        for k, lengths in enumerate(self.lengths):
            self.age[k] += 1
            if self.age[k] == lengths[min(self.episode[k], len(lengths) - 1)]:
                self.ended.append((self.ids[k], k))
                self.episode[k] += 1
                self.ids[k], self.age[k] = self._new_id(k), 0

    def steps(self):
        is_first = np.array(self.age) == 0
        asking = decision_steps(
            [np.array(self.age)[:, None]],
            self.ids,
            reward=np.where(is_first, self.first_reward, self.reward),
            group_reward=np.where(is_first, 0, self.group_reward),
        )
        ended = terminal_steps(
            [np.zeros((len(self.ended), 1))],
            [agent for agent, _ in self.ended],
            interrupted=[k % 2 == 1 for _, k in self.ended],
            reward=self.reward,
            group_reward=self.group_reward,
        )
        return asking, ended


class ScriptedEnv:
    def __init__(self, **scripts):
        self.scripts = {name.replace("__", "?team="): s for name, s in scripts.items()}
        self.pending = {}

    @property
    def behavior_specs(self):
        return dict.fromkeys(self.scripts, SPEC)

    def reset(self):
        for script in self.scripts.values():
            script.reset()

    def step(self):
        for name, script in self.scripts.items():
            script.step(self.pending.pop(name))

    def get_steps(self, name):
        return self.scripts[name].steps()

    def set_actions(self, name, action):
        assert len(action.continuous) == len(self.scripts[name].ids)
        self.pending[name] = action


class Player:
    """Remembers what it was told."""

    def __init__(self):
        self.seeds, self.ended, self.deterministic = [], [], set()

    def reset(self, seed):
        self.seeds.append(seed)

    def act(self, steps, deterministic=False):
        self.deterministic.add(deterministic)
        return ActionTuple(np.zeros((len(steps), 1), dtype=np.float32))

    def end(self, agent_ids):
        self.ended.extend(agent_ids)


def play(env, episodes, policies=None, **options):
    policies = policies or {name: Player() for name in env.scripts}
    return evaluate(env, policies, episodes=episodes, seed=0, **options)


def test_returns_and_lengths_are_the_scripted_ones():
    result = play(ScriptedEnv(Ball=Script([[3, 2]], reward=0.5)), 2)
    assert [(e.index, e.behavior, e.agent) for e in result] == [(0, "Ball", 0), (1, "Ball", 0)]
    assert [(e.episode_return, e.length) for e in result] == [(1.5, 3), (1.0, 2)]
    assert [e.interrupted for e in result] == [False, False]


def test_long_episodes_that_started_first_are_waited_for():
    # Counting the first four to finish would give 1, 1, 1, 1 and never see the long one.
    result = play(ScriptedEnv(Ball=Script([[1], [50]])), 4)
    assert [e.length for e in result] == [1, 50, 1, 1]


@pytest.mark.parametrize("new_ids", [False, True])
def test_estimate_is_unbiased_when_lengths_vary(new_ids):
    # Half of all episodes are 2 long, half 40: 21 on average. The first 30 of 20 agents to finish
    # would be nearly all short.
    rng = np.random.default_rng(0)
    returns = []
    for _ in range(100):
        lengths = rng.choice([2, 40], size=(20, 40)).tolist()
        env = ScriptedEnv(Ball=Script(lengths, new_ids=new_ids))
        returns += [episode.episode_return for episode in play(env, 30)]
    assert len(returns) == 3000
    assert np.mean(returns) == pytest.approx(21.0, abs=1.05)  # three standard errors


def test_exactly_the_wanted_number_is_counted_with_more_agents_than_episodes():
    result = play(ScriptedEnv(Ball=Script([[5], [4], [3]])), 2)
    assert [(e.agent, e.length) for e in result] == [(0, 5), (1, 4)]


def test_group_rewards_are_part_of_the_return():
    result = play(ScriptedEnv(Ball=Script([[4]], reward=1.0, group_reward=0.25)), 1)
    assert result[0].episode_return == 5.0


def test_reward_before_the_first_action_is_left_out():
    result = play(ScriptedEnv(Ball=Script([[4]], first_reward=100.0)), 3)
    assert [e.episode_return for e in result] == [4.0, 4.0, 4.0]


def test_interrupted_episodes_are_marked():
    result = play(ScriptedEnv(Ball=Script([[2], [2]])), 2)
    assert [e.interrupted for e in result] == [False, True]


def test_every_behavior_gets_its_episodes_and_team_names_fall_back():
    env = ScriptedEnv(Soccer__0=Script([[3]]), Soccer__1=Script([[4]]), Goalie=Script([[9]]))
    policies = {"Soccer": Player(), "Goalie": Player()}
    result = play(env, 2, policies)
    assert [(e.behavior, e.length) for e in result] == [
        ("Goalie", 9),
        ("Goalie", 9),
        ("Soccer?team=0", 3),
        ("Soccer?team=0", 3),
        ("Soccer?team=1", 4),
        ("Soccer?team=1", 4),
    ]


def test_policy_is_told_who_ended_and_how_to_act():
    player = Player()
    play(ScriptedEnv(Ball=Script([[2], [3]])), 2, {"Ball": player}, deterministic=False)
    assert player.ended == [0, 1]
    assert player.deterministic == {False}
    assert len(player.seeds) == 1


def test_seed_reaches_the_policy():
    seeds = []
    for seed in (1, 1, 2):
        player = Player()
        evaluate(ScriptedEnv(Ball=Script([[1]])), {"Ball": player}, episodes=1, seed=seed)
        seeds += player.seeds
    assert seeds[0] == seeds[1] != seeds[2]


def test_environment_without_ends_is_given_up_with_a_message(monkeypatch):
    monkeypatch.setattr("pipeline.evaluation.episodes.STEP_LIMIT", 20)
    with pytest.raises(StageError, match=r"within 20 steps .*0 of 1 ended.*\['Ball'\]"):
        play(ScriptedEnv(Ball=Script([[10**9]])), 1)


def test_behavior_without_a_policy_is_named():
    with pytest.raises(StageError, match=r"'Ball'.*only for \['Cube'\];.* Ball\.onnx\)"):
        play(ScriptedEnv(Ball=Script([[1]]), Cube=Script([[1]])), 1, {"Cube": Player()})


def test_reward_that_is_not_finite_stops_the_evaluation():
    with pytest.raises(StageError, match="Ball, agent 0: reward nan"):
        play(ScriptedEnv(Ball=Script([[3]], reward=float("nan"))), 1)


def test_episodes_are_written_as_csv(tmp_path):
    episodes = play(ScriptedEnv(Ball=Script([[3], [7]], reward=0.1)), 5)
    episodes[1] = replace(episodes[1], behavior='odd, "name"')
    path = tmp_path / "episodes.csv"
    write_episodes(path, episodes)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [{key: str(value) for key, value in asdict(episode).items()} for episode in episodes]
    assert rows == texts
    first = path.read_bytes()
    write_episodes(path, episodes)
    assert path.read_bytes() == first
    assert first.splitlines()[0] == b"index,behavior,agent,episode_return,length,interrupted"


class Doomed(Script):
    """Agent 1 never decides: an end of it comes with each end of agent 0, and twice."""

    def steps(self):
        asking, _ = super().steps()
        ids = [0, 1, 1] if self.ended else []
        ended = terminal_steps(
            [np.zeros((len(ids), 1))],
            ids,
            interrupted=[False] * len(ids),
            reward=self.reward,
            group_reward=self.group_reward,
        )
        return asking, ended


def test_an_agent_that_ends_before_its_first_decision_has_an_episode_of_length_0():
    episodes = play(ScriptedEnv(B=Doomed([[3]], group_reward=0.5)), 6)
    assert [(e.agent, e.length, e.episode_return) for e in episodes] == [
        *((0, 3, 4.5), (1, 0, 1.5)),
        *((0, 3, 4.5), (1, 0, 1.5)),
        *((0, 3, 4.5), (1, 0, 1.5)),
    ]


def test_of_two_ends_of_an_agent_in_one_message_the_first_counts():
    class Twice(Doomed):
        def steps(self):
            asking, ended = Script.steps(self)
            n = len(ended)
            both = terminal_steps(
                [np.zeros((2 * n, 1))],
                [*ended.agent_id] * 2,
                reward=[1.0] * n + [7.0] * n,
                interrupted=[False] * n + [True] * n,
            )
            return asking, both

    episodes = play(ScriptedEnv(B=Twice([[2], [5]])), 4)
    assert sorted(e.length for e in episodes) == [2, 2, 2, 5]
    assert all(e.episode_return == e.length for e in episodes)
    assert not any(e.interrupted for e in episodes)
