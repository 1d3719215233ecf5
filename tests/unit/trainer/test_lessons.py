"""The loop keeps its environments at the present lessons, and records what they report."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
from toys import Toy

import pipeline
from pipeline.envs.workers import WorkerSet
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.trainer.learner import Learner
from pipeline.trainer.stopping import StopRequest

SHORT = {"measure": "progress", "behavior": "Toy", "threshold": 0.3}
LATER = {"measure": "progress", "behavior": "Toy", "threshold": 0.6, "require_reset": True}


class Told(Toy):
    """Pays `pay` at an episode's end, observes its number of resets, and logs every call."""

    spec = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec.create_discrete([2]))

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.n_resets = 0
        self.calls: list[tuple] = []

    def reset(self):
        self.n_resets += 1
        self.calls.append(("reset",))
        return super().reset()

    def step(self, actions):
        self.calls.append(("step",))
        return super().step(actions)

    def set_parameter(self, name, value):
        super().set_parameter(name, value)
        self.calls.append((name, value))

    def begin(self, rows):
        pass

    def observe(self):
        return [np.full((self.n, 1), self.n_resets, dtype=np.float32)]

    def advance(self, action):  # noqa: ARG002  # nothing depends on it
        last = self.age + 1 >= self.length
        return np.where(last, self.parameters.get("pay", 0.0), 0.0), np.zeros(self.n, np.bool_)


@pytest.fixture
def configured(quick):
    """Quick settings with environment parameters."""

    def make(*names, **parameters):
        written = {
            name: value if not isinstance(value, list) else {"curriculum": curriculum(*value)}
            for name, value in parameters.items()
        }
        return quick(*names, parameters=written, max_steps=1000)

    return make


def curriculum(*items):
    """Lessons `a`, `b`, ... from values and the criteria between them."""
    criteria = [*items[1::2], None]
    return [
        {"name": name, "value": value} | ({"completion_criteria": criterion} if criterion else {})
        for name, value, criterion in zip("abcd", items[::2], criteria, strict=False)
    ]


def told(toy):
    """Parameters and resets of a toy, each with the number of steps before it."""
    events, n_steps = [], 0
    for call in toy.calls:
        if call == ("step",):
            n_steps += 1
        else:
            events.append((n_steps, *call))
    return events


def test_a_lesson_tells_its_parameter_at_once_and_a_reset_tells_all(configured, train_in):
    toy = Told(n_agents=4)
    settings = configured(pay=[1.0, SHORT, 2.0, LATER, 3.0], wind=5.0)
    train_in(toy, settings)
    # four agents close four rows each in four steps: after 76 steps 304 of 1000 agent steps, more
    # than 0.3, are made; that is noticed while step 77 is under way, and told after it
    assert told(toy) == [
        (0, "pay", 1.0),
        (0, "wind", 5.0),
        (0, "reset"),
        (77, "pay", 2.0),
        (153, "pay", 3.0),
        (153, "wind", 5.0),
        (153, "reset"),
    ]


def test_no_trajectory_spans_a_reset(configured, monkeypatch, train_in):
    seen, learn = [], Learner.learn

    def spy(self):
        rollout = self.trajectories.rollout()
        for start, length in zip(rollout.starts, rollout.lengths, strict=True):
            seen.append(set(rollout.obs[0][start : start + length, 0].tolist()))
        return learn(self)

    monkeypatch.setattr(Learner, "learn", spy)
    toy = Told(n_agents=4)
    toy.length = 50  # longer than a trajectory: they are closed by the horizon
    settings = configured(pay=[1.0, SHORT | {"require_reset": True}, 2.0, LATER, 3.0])
    train_in(toy, settings)
    assert toy.n_resets == 3
    assert {tuple(numbers) for numbers in seen} == {(1.0,), (2.0,), (3.0,)}


def test_returns_move_lessons(configured, train_in):
    reward = {"behavior": "Toy", "threshold": 1.5, "min_lesson_length": 8}
    toy = Told(n_agents=4)
    settings = configured(pay=[2.0, reward, 1.0, reward, 4.0])
    train_in(toy, settings)
    # eight episodes of four agents end with step 8; that is noticed while step 9 is under way.
    # A return of 1 moves no lesson
    assert told(toy) == [(0, "pay", 2.0), (0, "reset"), (9, "pay", 1.0)]


def test_lessons_are_logged_and_charted(configured, caplog, recorder, train_in):
    settings = configured(pay=[1.0, SHORT, 2.5], wind=5.0)
    with caplog.at_level(logging.INFO):
        train_in(Told(n_agents=4), settings, sinks=[recorder])
    assert [r.getMessage() for r in caplog.records if "is in lesson" in r.getMessage()] == [
        "Parameter 'pay' is in lesson 'a' and has value 'Float: value=1.0'.",
        "Parameter 'wind' is in lesson 'wind' and has value 'Float: value=5.0'.",
        "Parameter 'pay' is in lesson 'b' and has value 'Float: value=2.5'.",
    ]
    charted = {
        step: (values["Environment/Lesson Number/pay"], values["Environment/Lesson Number/wind"])
        for _, step, values in recorder.rows
    }
    assert charted[200] == (0.0, 0.0)
    assert charted[400] == charted[1000] == (1.0, 0.0)


def test_starting_lesson_is_where_a_run_begins(configured, train_in):
    toy = Told(n_agents=4)
    settings = configured(pay=[1.0, LATER, 2.0, LATER, 3.0], wind=5.0)
    train_in(toy, settings, starting_lesson=2)
    assert told(toy) == [(0, "pay", 3.0), (0, "wind", 5.0), (0, "reset")]


def test_same_seed_changes_lessons_at_the_same_steps(configured, tmp_path, train_in):
    reward = {"behavior": "Toy", "threshold": 0.5, "min_lesson_length": 20}
    settings = configured(pay=[2.0, reward, 3.0, LATER, 4.0])
    runs = []
    for label in ("one", "two"):
        toys = [Told(n_agents=3, seed=seed) for seed in (1, 2)]
        train_in(toys, settings, run_dir=tmp_path / label)
        runs.append([toy.calls for toy in toys])
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[0][1]
    assert ("pay", 4.0) in runs[0][0]


@pytest.mark.parametrize(("behavior", "n_warnings"), [("Toy", 0), ("Tory", 1)])
def test_a_behavior_that_is_never_shown_is_named(
    behavior, n_warnings, configured, caplog, train_in
):
    settings = configured("Toy", "Tory", pay=[1.0, LATER | {"behavior": behavior}, 2])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train_in(Told(n_agents=4), settings)
    warnings = [r.getMessage() for r in caplog.records if "has not shown" in r.getMessage()]
    assert len(warnings) == n_warnings
    assert all(f"lessons of pay wait for the behavior '{behavior}'" in text for text in warnings)
    assert all("it shows Toy)" in text for text in warnings)


def test_an_environment_that_takes_no_parameters_is_named_once(
    configured, in_process, tmp_path, caplog, monkeypatch
):
    environment = in_process(Told(n_agents=4))
    monkeypatch.setattr(environment, "set_parameter", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        settings = configured(pay=[1.0, SHORT, 2.0, LATER, 3.0])
        pipeline.train(environment, settings, seed=1, run_dir=tmp_path)
    assert [r.getMessage() for r in caplog.records if "is not sent" in r.getMessage()] == [
        "environment_parameters.pay is not sent to an environment that was opened before "
        "training without an EnvironmentParametersChannel; open it with one."
    ]


def test_lessons_in_the_middle_go_on_in_another_loop(configured, in_process, make_loop, tmp_path):
    """A resumed run needs the curriculum's state and nothing else."""
    reward = {"behavior": "Toy", "threshold": 1.5, "min_lesson_length": 400}
    settings = configured(pay=[2.0, SHORT, 3.0, reward, 4.0])
    loops, toys = [], []
    for label in ("one", "two"):
        toys.append(Told(n_agents=4))
        with WorkerSet([in_process(toys[-1])]) as workers:
            loop = make_loop(workers, settings, run_dir=tmp_path / label)
            if loops:
                loop.lessons.restore({"lessons": loops[0].lessons.state_dict()}, exact=False)
            loop.run(StopRequest())
        loops.append(loop)
    # the first run has seen part of the 400 episodes that the second lesson needs
    assert 0 < len(loops[0].lessons.curriculum.state_dict()["returns"]["Toy"]) < 400
    assert told(toys[1])[:2] == [(0, "pay", 3.0), (0, "reset")]
    assert told(toys[1])[2][1:] == ("pay", 4.0)
    # after the last lesson nobody asks for returns, and they are not kept
    assert loops[1].lessons.curriculum.is_over
    assert loops[1].learners["Toy"].statistics.take_ended() == []


class Reporting(Told):
    """Reports a statistic of every kind at each step; `offset` tells workers apart."""

    def __init__(self, *, offset=0.0, **options):
        super().__init__(**options)
        self.offset = offset
        self.n_reports = 0

    def stats(self):
        self.n_reports += 1
        return [
            ("Game/Average", self.offset + self.n_reports, 0),
            ("Game/Latest", self.offset + self.n_reports, 1),
            ("Game/Sum", 1.0, 2),
            ("Game/Spread", self.offset, 3),
        ]


class Twin(Reporting):
    """The same agents a second time, under another name or team."""

    other = "Second?team=0"

    @property
    def behavior_specs(self):
        return dict.fromkeys(("Toy?team=0", self.other), self.spec)

    def _double(self, steps):
        copies = tuple(copy.copy(part) for part in steps["Toy?team=0"])
        for part in copies:
            part.agent_id = part.agent_id + 100
        return steps | {self.other: copies}

    def reset(self):
        return self._double(super().reset())

    def step(self, actions):
        return self._double(super().step(actions))


class TwoTeams(Twin):
    other = "Toy?team=1"


def test_statistics_of_workers_are_aggregated_as_they_ask(configured, recorder, train_in):
    toys = [Reporting(n_agents=4, offset=offset) for offset in (0.0, 1000.0)]
    train_in(toys, configured(), sinks=[recorder])
    (_, _, first), (_, _, second) = recorder.rows[:2]
    # eight agents close four rows each in four steps: the first multiple of 100 is passed at 128
    # rows, with the message of step 16 and that of the reset
    n = 17
    assert first["Game/Average"] == pytest.approx(500.0 + (n + 1) / 2)
    assert first["Game/Latest"] == n
    assert first["Game/Sum"] == 2 * n
    assert first["Game/Spread"] == 500.0
    assert second["Game/Latest"] > n
    assert second["Game/Sum"] < 2 * n


@pytest.mark.parametrize("kind", [Twin, TwoTeams])
def test_statistics_go_once_to_each_behavior_that_has_agents(kind, configured, recorder, train_in):
    toy = kind(n_agents=4)
    train_in(toy, configured("Toy", "Second"), sinks=[recorder])
    firsts = {}
    for behavior, _, values in recorder.rows:
        firsts.setdefault(behavior, values)
    assert len(firsts) == len({name.partition("?")[0] for name in toy.behavior_specs})
    for values in firsts.values():
        assert values["Game/Sum"] == values["Game/Latest"]  # one of each per message
