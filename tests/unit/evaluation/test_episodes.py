from __future__ import annotations

import csv
from dataclasses import asdict, replace

import numpy as np
import pytest
from steps import decision_steps, terminal_steps

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.errors import StageError
from pipeline.evaluation.episodes import evaluate, write_episodes

SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ()))


NAME = "Ball?team=0"


def asking(ids, reward, group_reward=0.0):
    obs = [np.zeros((len(ids), 1))]
    return decision_steps(obs, ids, reward=reward, group_reward=group_reward)


def ended(ids=(), reward=0.0, group_reward=0.0, interrupted=False):
    values = {"reward": reward, "group_reward": group_reward, "interrupted": interrupted}
    return terminal_steps([np.zeros((len(ids), 1))], list(ids), **values)


MESSAGES = [
    (asking([7, 3], [100.0, 200.0]), ended()),
    # Agent 3 ends and begins again in one message; neither ids nor rows are sorted.
    (asking([3, 7], [500.0, 2.0], [0.0, 20.0]), ended([3], 1.0, 10.0)),
    # Agent 9 begins after the three counted episodes.
    (asking([9, 7, 3], [300.0, 4.0, 8.0], [0.0, 40.0, 80.0]), ended()),
    (
        asking([9], [900.0]),
        ended(
            [9, 7, 3], [16.0, 32.0, 64.0], [160.0, 320.0, 640.0], interrupted=[True, False, True]
        ),
    ),
]


COUNTED = [
    # index, agent, return, decisions, interrupted
    (0, 7, 2 + 20 + 4 + 40 + 32 + 320, 3, False),
    (1, 3, 1 + 10, 1, False),
    (2, 3, 8 + 80 + 64 + 640, 2, True),
]


class Played:
    """An environment that sends given messages, by the name of the behavior."""

    def __init__(self, **messages) -> None:
        self.messages = {name.replace("__", "?team="): rows for name, rows in messages.items()}
        self.behavior_specs = dict.fromkeys(self.messages, SPEC)
        self.at = 0
        self.actions: dict[str, list[float]] = {}

    def reset(self):
        self.at = 0

    def step(self):
        self.at += 1

    def get_steps(self, name):
        rows = self.messages[name]
        return rows[self.at] if self.at < len(rows) else (asking([], []), ended())

    def set_actions(self, name, action):
        self.actions.setdefault(name, []).append(float(action.continuous[0, 0]))


class Policy:
    """A policy that always returns its number as action, and records its calls in order."""

    def __init__(self, number=0.0) -> None:
        self.number, self.log = number, []

    def reset(self, seed):
        self.log.append(("seed", seed))

    def act(self, steps, deterministic=False):
        self.log.append(("act", steps.agent_id.tolist(), deterministic))
        return ActionTuple(np.full((len(steps), 1), self.number, dtype=np.float32))

    def end(self, agent_ids):
        if agent_ids:
            self.log.append(("end", agent_ids))


class Script:
    """Agents with scripted lengths of episodes; each step has a reward of 1.

    `lengths` has the lengths of each agent's episodes; the last length is repeated. With `new_ids`
    an agent has another id in each episode, as in Unity.
    """

    def __init__(self, lengths, *, new_ids=False, reward=1.0):
        self.lengths, self.new_ids, self.reward = lengths, new_ids, reward
        self.next_id = 0

    def reset(self):
        self.episode = [0] * len(self.lengths)
        self.ids = [self._new_id(k) for k in range(len(self.lengths))]
        self.age = [0] * len(self.lengths)
        self.ended = []

    def _new_id(self, k):
        self.next_id += 1
        return 100 + self.next_id if self.new_ids else k

    def step(self):
        self.ended = []
        for k, lengths in enumerate(self.lengths):
            self.age[k] += 1
            if self.age[k] == lengths[min(self.episode[k], len(lengths) - 1)]:
                self.ended.append(self.ids[k])
                self.episode[k] += 1
                self.ids[k], self.age[k] = self._new_id(k), 0

    def steps(self):
        return asking(self.ids, self.reward), ended(self.ended, self.reward)


class ScriptedEnv:
    def __init__(self, **scripts):
        self.scripts = {name.replace("__", "?team="): s for name, s in scripts.items()}
        self.behavior_specs = dict.fromkeys(self.scripts, SPEC)

    def reset(self):
        for script in self.scripts.values():
            script.reset()

    def step(self):
        for script in self.scripts.values():
            script.step()

    def get_steps(self, name):
        return self.scripts[name].steps()

    def set_actions(self, name, action):
        assert len(action.continuous) == len(self.scripts[name].ids)


def play(env, episodes, policies=None):
    policies = policies or {name: Policy() for name in env.scripts}
    return evaluate(env, policies, episodes=episodes, seed=0)


def test_each_episode_sums_the_rewards_of_its_own_agent_from_start_to_end():
    policy, running = Policy(), []
    episodes = evaluate(
        Played(Ball__0=MESSAGES),
        {"Ball": policy},
        episodes=3,
        seed=1,
        on_running=lambda counted: running.append(dict(counted[NAME])),
    )
    assert [
        (e.index, e.agent, e.episode_return, e.length, e.interrupted) for e in episodes
    ] == COUNTED
    assert running == [{7: 0, 3: 1}, {7: 0, 3: 2}, {7: 0, 3: 2}]
    # The memory of agent 3 is dropped before the agent acts in its next episode.
    assert policy.log[1:] == [
        ("act", [7, 3], True),
        ("end", [3]),
        ("act", [3, 7], True),
        ("act", [9, 7, 3], True),
        ("end", [9, 7, 3]),
    ]


def test_policy_of_a_team_has_precedence_over_the_policy_of_the_behavior():
    env = Played(Ball__0=MESSAGES, Ball__1=MESSAGES)
    policies = {"Ball": Policy(1.0), "Ball?team=1": Policy(2.0)}
    evaluate(env, policies, episodes=3, seed=1)
    assert {name: set(actions) for name, actions in env.actions.items()} == {
        "Ball?team=0": {1.0},
        "Ball?team=1": {2.0},
    }


def test_every_behavior_plays_all_episodes_and_teams_use_the_policy_of_their_behavior():
    env = ScriptedEnv(Soccer__0=Script([[3]]), Soccer__1=Script([[4]]), Goalie=Script([[9]]))
    result = play(env, 2, {"Soccer": Policy(), "Goalie": Policy()})
    lengths = {"Goalie": 9, "Soccer?team=0": 3, "Soccer?team=1": 4}
    told = [(e.behavior, e.length) for e in result]
    assert told == [pair for pair in lengths.items() for _ in range(2)]


def test_seed_of_a_policy_depends_only_on_the_seed_of_the_run_and_the_behavior():
    def logs(*names, seed=4, **options):
        policies = {name: Policy() for name in names}
        env = Played(**dict.fromkeys(names, MESSAGES))
        evaluate(env, policies, episodes=1, seed=seed, **options)
        return {name: policy.log for name, policy in policies.items()}

    both = {name: log[0] for name, log in logs("A", "B").items()}
    assert both["A"] != both["B"]
    assert both == {name: logs(name)[name][0] for name in "AB"}
    assert logs("A", seed=5)["A"][0] != both["A"]
    assert logs("A", deterministic=False)["A"][1] == ("act", [7, 3], False)


@pytest.mark.parametrize(
    ("scripts", "told"),
    [
        ({"Ball": Script([[10**9]])}, r"within 20 steps .*0 of 1 ended.*\['Ball'\]"),
        (
            {"Ball": Script([[1]]), "Cube": Script([[1]])},
            r"'Ball'.*only for \['Cube'\];.* Ball\.onnx\)",
        ),
        ({"Ball": Script([[3]], reward=float("nan"))}, "Ball, agent 0: reward nan"),
    ],
    ids=["no end", "no policy", "a reward that is no number"],
)
def test_evaluation_that_cannot_continue_is_stopped_with_an_error_that_names_the_cause(
    scripts, told, monkeypatch
):
    monkeypatch.setattr("pipeline.evaluation.episodes.STEP_LIMIT", 20)
    with pytest.raises(StageError, match=told):
        play(ScriptedEnv(**scripts), 1, {"Cube": Policy()} if "Cube" in scripts else None)


def test_episodes_that_start_first_are_counted_and_played_to_their_end():
    # The first four episodes that end have length 1: the long episode would not be counted.
    result = play(ScriptedEnv(Ball=Script([[1], [50]])), 4)
    assert [e.length for e in result] == [1, 50, 1, 1]


@pytest.mark.parametrize("new_ids", [False, True])
def test_mean_return_is_unbiased_when_episode_lengths_vary(new_ids):
    # Half of all episodes have 2 steps, half have 40: 21 on average. Nearly all of the first 30
    # episodes that end would be short.
    rng = np.random.default_rng(0)
    returns = []
    for _ in range(100):
        lengths = rng.choice([2, 40], size=(20, 40)).tolist()
        env = ScriptedEnv(Ball=Script(lengths, new_ids=new_ids))
        returns += [episode.episode_return for episode in play(env, 30)]
    assert len(returns) == 3000
    assert np.mean(returns) == pytest.approx(21.0, abs=1.05)  # three standard errors


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
    """Agent 1 never decides: each end of agent 0 comes with two terminal steps of agent 1."""

    def steps(self):
        return asking(self.ids, 1.0, 0.5), ended([0, 1, 1] if self.ended else [], 1.0, 0.5)


def test_an_agent_that_ends_before_its_first_decision_has_an_episode_of_length_0():
    episodes = play(ScriptedEnv(B=Doomed([[3]])), 6)
    told = [(e.agent, e.length, e.episode_return) for e in episodes]
    assert told == [(0, 3, 4.5), (1, 0, 1.5)] * 3


def test_only_the_first_of_two_ends_of_an_agent_in_one_message_counts():
    class Twice(Script):
        def steps(self):
            n = len(self.ended)
            rewards, interrupted = [1.0] * n + [7.0] * n, [False] * n + [True] * n
            return asking(self.ids, 1.0), ended(self.ended * 2, rewards, interrupted=interrupted)

    episodes = play(ScriptedEnv(B=Twice([[2], [5]])), 4)
    assert sorted(e.length for e in episodes) == [2, 2, 2, 5]
    assert all(e.episode_return == e.length for e in episodes)
    assert not any(e.interrupted for e in episodes)
