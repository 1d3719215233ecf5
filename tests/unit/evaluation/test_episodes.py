import csv
import itertools
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
    """An environment that sends given messages, by the name of the behavior; then empty ones."""

    def __init__(self, **messages) -> None:
        nothing = itertools.repeat((asking([], []), ended()))
        self.messages = {
            name.replace("__", "?team="): itertools.chain(rows, nothing)
            for name, rows in messages.items()
        }
        self.behavior_specs = dict.fromkeys(self.messages, SPEC)
        self.at = -1
        self.actions: dict[str, list[float]] = {}

    def step(self):
        self.at += 1
        self.now = {name: next(rows) for name, rows in self.messages.items()}

    reset = step

    def get_steps(self, name):
        return self.now[name]

    def set_actions(self, name, action):
        assert len(action.continuous) == len(self.now[name][0])
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


def script(lengths, *, new_ids=False, reward=1.0):
    """Yield messages of agents with scripted lengths of episodes; each step has a reward.

    `lengths` has the lengths of each agent's episodes; the last length is repeated. With `new_ids`
    an agent has another id in each episode, as in Unity.
    """
    n_agents = len(lengths)
    ids, later, over = list(range(n_agents)), itertools.count(n_agents), []
    episode, age = [0] * n_agents, [0] * n_agents
    while True:
        yield asking(ids, reward), ended(over, reward)
        over = []
        for k, of_agent in enumerate(lengths):
            age[k] += 1
            if age[k] == of_agent[min(episode[k], len(of_agent) - 1)]:
                over.append(ids[k])
                episode[k], age[k] = episode[k] + 1, 0
                ids[k] = next(later) if new_ids else k


def play(env, episodes, policies=None):
    policies = policies or {name: Policy() for name in env.messages}
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
    env = Played(Soccer__0=script([[3]]), Soccer__1=script([[4]]), Goalie=script([[9]]))
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
        ({"Ball": script([[10**9]])}, r"within 20 steps .*0 of 1 ended.*\['Ball'\]"),
        (
            {"Ball": script([[1]]), "Cube": script([[1]])},
            r"'Ball'.*only for \['Cube'\];.* Ball\.onnx\)",
        ),
        ({"Ball": script([[3]], reward=float("nan"))}, "Ball, agent 0: reward nan"),
    ],
    ids=["no end", "no policy", "a reward that is no number"],
)
def test_evaluation_that_cannot_continue_is_stopped_with_an_error_that_names_the_cause(
    scripts, told, monkeypatch
):
    monkeypatch.setattr("pipeline.evaluation.episodes.STEP_LIMIT", 20)
    with pytest.raises(StageError, match=told):
        play(Played(**scripts), 1, {"Cube": Policy()} if "Cube" in scripts else None)


def test_episodes_that_start_first_are_counted_and_played_to_their_end():
    # The first four episodes that end have length 1: the long episode would not be counted.
    result = play(Played(Ball=script([[1], [50]])), 4)
    assert [e.length for e in result] == [1, 50, 1, 1]


@pytest.mark.parametrize("new_ids", [False, True])
def test_mean_return_is_unbiased_when_episode_lengths_vary(new_ids):
    # Half of all episodes have 2 steps, half have 40: 21 on average. Nearly all of the first 30
    # episodes that end would be short.
    rng = np.random.default_rng(0)
    returns = []
    for _ in range(100):
        lengths = rng.choice([2, 40], size=(20, 40)).tolist()
        env = Played(Ball=script(lengths, new_ids=new_ids))
        returns += [episode.episode_return for episode in play(env, 30)]
    assert len(returns) == 3000
    assert np.mean(returns) == pytest.approx(21.0, abs=1.05)  # three standard errors


def test_episodes_are_written_as_csv(tmp_path):
    episodes = play(Played(Ball=script([[3], [7]], reward=0.1)), 5)
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


def test_an_agent_that_ends_before_its_first_decision_has_an_episode_of_length_0():
    # Agent 1 never decides: each end of agent 0 comes with two terminal steps of agent 1.
    messages = (
        (asking([0], 1.0, 0.5), ended([0, 1, 1] if len(over) else [], 1.0, 0.5))
        for _, over in script([[3]])
    )
    told = [(e.agent, e.length, e.episode_return) for e in play(Played(B=messages), 6)]
    assert told == [(0, 3, 4.5), (1, 0, 1.5)] * 3


def test_only_the_first_of_two_ends_of_an_agent_in_one_message_counts():
    def twice():
        for deciding, over in script([[2], [5]]):
            n, ids = len(over), over.agent_id.tolist()
            interrupted = [False] * n + [True] * n
            yield deciding, ended(ids * 2, [1.0] * n + [7.0] * n, interrupted=interrupted)

    episodes = play(Played(B=twice()), 4)
    assert sorted(e.length for e in episodes) == [2, 2, 2, 5]
    assert all(e.episode_return == e.length for e in episodes)
    assert not any(e.interrupted for e in episodes)
