"""Which agent's, seed's or experiment's number goes where, with values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from steps import decision_steps, terminal_steps

from pipeline.evaluation import tables, video
from pipeline.evaluation.comparison import Curve, Outcome, compare
from pipeline.evaluation.episodes import evaluate
from pipeline.evaluation.statistics import detectable_difference, improvement_interval, iqm_band
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec

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
    # agent 3 ends and begins again in one message; neither ids nor rows are in order
    (asking([3, 7], [500.0, 2.0], [0.0, 20.0]), ended([3], 1.0, 10.0)),
    # agent 9 begins after the three episodes that count
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
    """Sends messages, of each behavior those under its name."""

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
    """Answers with its own number, and notes what it is told in that order."""

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


def test_each_episode_has_the_rewards_of_its_own_agent_and_time():
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
    # the memory of agent 3 is forgotten before it acts in its next episode
    assert policy.log[1:] == [
        ("act", [7, 3], True),
        ("end", [3]),
        ("act", [3, 7], True),
        ("act", [9, 7, 3], True),
        ("end", [9, 7, 3]),
    ]


def test_a_team_is_played_by_its_own_policy_before_that_of_its_behavior():
    env = Played(Ball__0=MESSAGES, Ball__1=MESSAGES)
    policies = {"Ball": Policy(1.0), "Ball?team=1": Policy(2.0)}
    evaluate(env, policies, episodes=3, seed=1)
    assert {name: set(actions) for name, actions in env.actions.items()} == {
        "Ball?team=0": {1.0},
        "Ball?team=1": {2.0},
    }


def test_a_policy_draws_from_a_stream_of_its_behavior():
    def seeds(*names):
        policies = {name: Policy() for name in names}
        evaluate(Played(**dict.fromkeys(names, MESSAGES)), policies, episodes=1, seed=4)
        return {name: policy.log[0] for name, policy in policies.items()}

    both = seeds("A", "B")
    assert both["A"] != both["B"]
    assert both == seeds("A") | seeds("B")


def test_films_show_their_own_episode_of_agents_that_play_several(tmp_path, monkeypatch):
    shown: dict[str, list[tuple[int, int]]] = {}

    class Stage:
        """Draws nothing but the number of the step and the agent."""

        def __init__(self):
            self.env = Played(Ball__0=MESSAGES)

        def render(self, agent):
            return np.array([[[self.env.at, agent]]])

    stage = Stage()
    stage.env.close = lambda: None
    monkeypatch.setattr(video, "_opened", lambda *_: stage)
    monkeypatch.setattr(video, "InProcessEnvironment", lambda simulator: simulator.env)
    monkeypatch.setattr(video, "_reduced", lambda image: image)
    monkeypatch.setattr(
        video,
        "write",
        lambda path, frames, *_: shown.update({path.name: [tuple(f[0, 0]) for f in frames]}),
    )
    played = evaluate(Played(Ball__0=MESSAGES), {"Ball": Policy()}, episodes=3, seed=1)
    wanted = {tmp_path / f"{number}.gif": played[number] for number in (1, 2)}
    video.film(tmp_path, (), {"Ball": Policy()}, played, wanted, seed=1)
    assert shown == {"1.gif": [(0, 3)], "2.gif": [(1, 3), (2, 3)]}


def curve(*returns, every=10.0):
    steps = every * np.arange(1, len(returns) + 1)
    return Curve(steps=steps, returns=np.array(returns, dtype=np.float64))


def outcome(experiment, seed, evaluated, returns=None, **values):
    return Outcome(
        experiment=experiment,
        environment="env",
        behavior="Walker",
        seed=seed,
        evaluated=evaluated,
        curve=None if returns is None else curve(*returns),
        **values,
    )


def runs():
    """Seeds out of order; each value shows which run it is of."""
    return [
        outcome("old", 3, 30.0, [0.0, 4.0, 8.0], seconds=5.0),
        outcome("old", 1, 10.0, [2.0, 4.0, 4.0, 4.0], seconds=7.0, exact=False),
        outcome("old", 2, 20.0, seconds=None),
        outcome("new", 9, 35.0, [1.0, 10.0, 12.0], seconds=20.0),
        outcome("new", 8, 25.0, [5.0, 10.0, 12.0], seconds=30.0),
        outcome("new", 7, 15.0, [3.0, 8.0, 12.0], seconds=40.0),
        outcome("new", 6, 45.0, [3.0, 8.0, 12.0], seconds=50.0),
    ]


def test_each_number_of_a_comparison_is_of_its_own_experiment_and_seed():
    (task,) = compare(runs(), fraction=0.5)
    old, new = task.standings
    assert (old.experiment, old.seeds, old.scores) == ("old", (1, 2, 3), (10.0, 20.0, 30.0))
    assert (new.experiment, new.seeds, new.scores) == (
        "new",
        (6, 7, 8, 9),
        (45.0, 15.0, 25.0, 35.0),
    )
    assert (old.trained, old.not_exact) == ((1, 3), (1,))
    assert (new.trained, new.not_exact) == ((6, 7, 8, 9), ())
    assert [c.final for c in old.curves] == [4.0, 8.0]
    # half of the way from the mean start of `old`, 1, to the end of `new`, 12
    assert task.target == 6.5
    assert (old.reached, old.steps_to_target) == (1, None)  # 30 and never
    assert (new.reached, new.steps_to_target) == (4, 20.0)
    # all curves have the steps from 10 to 30
    assert old.area == pytest.approx(((2 + 6) / 2 + (3 + 4) / 2) / 2)
    areas = [(5.5 + 11) / 2, (7.5 + 11) / 2, (5.5 + 10) / 2, (5.5 + 10) / 2]
    assert new.area == pytest.approx(np.mean(areas))
    assert (old.seconds, new.seconds) == (None, 35.0)
    (pair,) = task.improvements
    assert (pair.better, pair.than) == ("new", "old")
    assert pair.probability == (3 + 3 + 2 + 1) / 12
    assert pair.interval is None
    for either in (task, *compare(runs()[::-1])):  # whichever comes first
        assert tables.notes(either)[-1].startswith("With 3 seeds, a difference of means below")


def test_records_have_each_number_in_its_column():
    (task,) = compare(runs(), fraction=0.5)
    old, new = tables.standing_records([task])
    low, high = task.standings[1].interval
    assert new == {
        "environment": "env",
        "behavior": "Walker",
        "experiment": "new",
        "seeds": 4,
        "score": "evaluated",
        "iqm": 30.0,
        "iqm_low": low,
        "iqm_high": high,
        "tolerance_low": None,
        "tolerance_high": None,
        "mean": 30.0,
        "trained_steps": 30.0,
        "target": 6.5,
        "seeds_at_target": 4,
        "steps_to_target": 20.0,
        "mean_height": task.standings[1].area,
        "training_s": 35.0,
    }
    assert (old["seeds_at_target"], old["steps_to_target"]) == (1, None)
    (pair,) = tables.pair_records([task])
    assert (pair["better"], pair["than"]) == ("new", "old")
    assert (pair["low"], pair["chance"]) == (None, task.improvements[0].chance)
    row = dict(
        zip((*tables.HEADER, tables.WALL_CLOCK), tables.rows(task, wall_clock=True)[0], strict=True)
    )
    assert row["Steps to target"] == "reached by 1 of 2 seeds"
    assert (row["Mean"], row["Training time"]) == ("20", "-")


def test_each_experiment_is_drawn_from_a_stream_of_its_own():
    scores = (1.0, 4.0, 4.5, 7.0, 11.0, 12.0, 20.0)
    (task,) = compare([outcome(name, k, v) for name in "ab" for k, v in enumerate(scores)])
    first, second = (standing.interval for standing in task.standings)
    assert first != second
    assert first == pytest.approx(second, abs=1.5)


def test_both_groups_are_drawn_for_an_interval():
    rng = np.random.default_rng(0)
    spread, level = np.array([0.0, 0.0, 10.0, 10.0]), np.full(4, 5.0)
    for pair in ((spread, level), (level, spread)):
        low, high = improvement_interval(*pair, rng)
        assert low < 0.3
        assert high > 0.7


def test_a_detectable_difference_is_that_of_the_smallest_group_with_the_common_spread():
    few, many = np.array([-1.0, 0.0, 1.0]), np.tile([-1.0, 0.0, 1.0], 3)
    spread = np.sqrt((2 + 6) / (2 + 8))  # pooled over 2 and 8 degrees of freedom
    alike = np.array([-spread, 0.0, spread])
    assert detectable_difference([many, few]) == pytest.approx(
        detectable_difference([alike, alike])
    )


def test_a_band_has_the_points_of_its_curves_in_their_order():
    low, high = iqm_band(np.array([[0.0, 100.0], [1.0, 101.0]]), np.random.default_rng(0))
    assert low.tolist() == [0.0, 100.0]
    assert high.tolist() == [1.0, 101.0]
