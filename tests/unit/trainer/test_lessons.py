"""Present lessons are sent to environments, and reported statistics are recorded."""

import itertools
import logging
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
from duels import Duel
from pairs import Pair
from toys import Corridor, Toy

import pipeline
from pipeline import trainer
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.tracking.sinks import TrackedRun
from pipeline.tracking.sinks.tensorboard import TensorBoardSink
from pipeline.trainer import JobSpec
from pipeline.trainer.curriculum import Lessons
from pipeline.trainer.learner import Learner
from pipeline.trainer.statistics import Statistics
from pipeline.trainer.stopping import StopRequest

SHORT = {"measure": "progress", "behavior": "Toy", "threshold": 0.3}
LATER = {"measure": "progress", "behavior": "Toy", "threshold": 0.6, "require_reset": True}


class Told(Toy):
    """Gives the reward `pay` at an episode's end, shows its number of resets, and logs calls."""

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

    def advance(self, action):  # noqa: ARG002  # the action has no effect
        last = self.age + 1 >= self.length
        return np.where(last, self.parameters.get("pay", 0.0), 0.0), np.zeros(self.n, np.bool_)


@pytest.fixture
def configured(quick):
    """Return settings for a short training, with environment parameters."""

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
    """Return the parameters and resets of a toy, each with the number of steps before it."""
    events, n_steps = [], 0
    for event in toy.calls:
        if event == ("step",):
            n_steps += 1
        else:
            events.append((n_steps, *event))
    return events


def test_new_lesson_sends_its_parameter_and_a_reset_sends_all_parameters(configured, train_in):
    toy = Told(n_agents=4)
    settings = configured(pay=[1.0, SHORT, 2.0, LATER, 3.0], wind=5.0)
    train_in(toy, settings)
    # Four agents close four rows each in four steps: after 76 steps 304 of 1000 agent steps, more
    # than 0.3, are made. The loop sees this during step 77 and sends the new value after this step.
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
    toy.length = 50  # longer than `time_horizon`, which closes the trajectories
    settings = configured(pay=[1.0, SHORT | {"require_reset": True}, 2.0, LATER, 3.0])
    train_in(toy, settings)
    assert toy.n_resets == 3
    assert {tuple(numbers) for numbers in seen} == {(1.0,), (2.0,), (3.0,)}


def test_lessons_change_at_the_first_step_after_enough_episodes_in_all_workers(
    configured, tmp_path, train_in
):
    reward = {"behavior": "Toy", "threshold": 1.5, "min_lesson_length": 8}
    toy = Told(n_agents=4)
    settings = configured(pay=[2.0, reward, 1.0, reward, 4.0])
    train_in(toy, settings)
    # Eight episodes of four agents end with step 8; the loop sees them during step 9.
    # A return of 1 is below the threshold of the next lesson.
    assert told(toy) == [(0, "pay", 2.0), (0, "reset"), (9, "pay", 1.0)]
    toys = [Told(n_agents=3, seed=seed) for seed in (1, 2)]
    train_in(toys, configured(pay=[2.0, reward, 3.0, LATER, 4.0]), run_dir=tmp_path / "two")
    assert toys[0].calls == toys[1].calls
    assert ("pay", 4.0) in toys[0].calls


def test_lessons_are_logged_and_their_numbers_are_in_the_summaries(
    configured, caplog, recorder, train_in
):
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


def test_a_run_starts_in_the_given_lesson(configured, in_process, tmp_path):
    toy = Told(n_agents=4)
    settings = configured(pay=[1.0, LATER, 2.0, LATER, 3.0], wind=5.0)
    job = JobSpec(in_process(toy), settings, seed=1, run_dir=tmp_path, starting_lesson=2)
    trainer.train(job)
    assert told(toy) == [(0, "pay", 3.0), (0, "wind", 5.0), (0, "reset")]


@pytest.mark.parametrize(("behavior", "n_warnings"), [("Toy", 0), ("Tory", 1)])
def test_lesson_that_measures_a_missing_behavior_causes_one_warning(
    behavior, n_warnings, configured, caplog, train_in
):
    settings = configured("Toy", "Tory", pay=[1.0, LATER | {"behavior": behavior}, 2])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train_in(Told(n_agents=4), settings)
    warnings = [r.getMessage() for r in caplog.records if "has not shown" in r.getMessage()]
    assert len(warnings) == n_warnings
    assert all(f"lessons of pay measure the behavior '{behavior}'" in text for text in warnings)
    assert all("it shows Toy)" in text for text in warnings)


def test_parameter_that_cannot_be_sent_to_the_environment_causes_one_warning(
    configured, in_process, tmp_path, caplog, monkeypatch
):
    environment = in_process(Told(n_agents=4))
    monkeypatch.setattr(environment, "set_parameter", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        settings = configured(pay=[1.0, SHORT, 2.0, LATER, 3.0])
        pipeline.train(environment, settings, seed=1, run_dir=tmp_path)
    assert [r.getMessage() for r in caplog.records if "cannot be sent" in r.getMessage()] == [
        "environment_parameters.pay cannot be sent to an environment that was opened without an "
        "EnvironmentParametersChannel; open the environment with this channel."
    ]


def test_no_returns_are_kept_after_the_last_lesson(configured, in_process, make_loop):
    with WorkerSet([in_process(Told(n_agents=4))]) as workers:
        loop = make_loop(workers, configured(pay=[2.0, SHORT, 3.0]))
        loop.run(StopRequest())
    assert loop.lessons.curriculum.is_over
    assert loop.learners["Toy"].statistics.take_ended() == []


def lessons(settings, workers):
    return Lessons(workers, settings.environment_parameters)


@pytest.mark.parametrize("exact", [True, False])
def test_lesson_that_began_before_a_kill_is_sent_to_the_environments_after_the_resume(
    exact, configured, make_learner
):
    settings = configured(pay=[1.0, SHORT | {"require_reset": True}, 2.0], wind=3.0)
    learner = make_learner(Corridor.spec)
    before = lessons(settings, Mock())
    learner.step = 400
    before.on_step([learner])  # killed before `apply` has sent the value
    workers = Mock()
    after = lessons(settings, workers)
    after.restore({"lessons": before.state_dict()}, exact=exact)
    if not exact:
        after.begin()
    after.apply([learner])
    sent = [call.set_parameter("pay", 2.0), call.set_parameter("wind", 3.0), call.reset()]
    assert workers.mock_calls == sent
    assert not after.apply([learner])


def test_lesson_measures_the_behavior_in_its_completion_criteria(quick):
    parameters = {
        name: {
            "curriculum": curriculum(
                1.0, {"behavior": behavior, "measure": measure, "threshold": threshold}, 2.0
            )
        }
        for name, behavior, measure, threshold in (
            ("p1", "One", "progress", 0.5),
            ("p2", "Two", "progress", 0.5),
            ("r1", "One", "reward", 3.0),
            ("e2", "Two", "elo", 1300.0),
        )
    }
    limits = {"One": 100, "Two": 1000}
    settings = quick(limits=limits, self_play={"window": 1}, parameters=parameters)
    told = lessons(settings, Mock())
    one, two = (
        SimpleNamespace(
            name=name,
            step=0,
            settings=settings.behaviors[name],
            statistics=Statistics(),
            snapshot_pool=SimpleNamespace(rating=1200.0),
        )
        for name in ("One", "Two")
    )

    def begun():
        told.on_step([one, two])
        told.apply([])
        return sorted(name for name, number in told.curriculum.numbers.items() if number)

    two.statistics.add_episodes([9.0], [1])
    one.step = two.step = 50
    assert begun() == []
    one.step = two.step = 51
    assert begun() == ["p1"]
    one.statistics.add_episodes([9.0], [1])
    assert begun() == ["p1", "r1"]
    two.snapshot_pool.rating = 1301.0
    assert begun() == ["e2", "p1", "r1"]


def test_resumed_run_starts_in_the_saved_lessons_and_sends_their_parameters_again(
    configured, make_loop
):
    settings, toy = (
        configured(pay=[1.0, SHORT | {"require_reset": True}, 2.0], wind=3.0),
        Told(n_agents=2),
    )
    saved = lessons(settings, Mock())
    saved.curriculum.load_state_dict({"lessons": {"pay": 1, "wind": 0}})
    with WorkerSet([InProcessEnvironment(toy)]) as workers:
        loop = make_loop(workers, settings)
        run = {"lessons": saved.state_dict(), "steps": {"Gone": 70}}
        loop._saved = {"Gone": {"run": run, "learner": {"step": 70}}}
        loop._begin()
        for _ in range(3):
            loop._step()
            loop._receive()
        assert loop._shared_state()["steps"] == {"Gone": 70, "Toy": 0}
        learner = loop.learners["Toy"]
        assert learner.trajectories.n_held == 4
        loop.self_play = SimpleNamespace(learning=0, advance=lambda: True)
        loop._apply_lessons()
        assert learner.trajectories.n_held == 0
    again = [("pay", 2.0), ("wind", 3.0), ("reset",)]
    assert told(toy) == [(n, *event) for n in (0, 3) for event in again]


class Reporting(Told):
    """Reports a statistic of every kind at each step; `offset` distinguishes workers."""

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


def test_statistics_of_environments_are_aggregated_by_their_aggregation_method(
    configured, recorder, train_in
):
    toys = [Reporting(n_agents=4, offset=offset) for offset in (0.0, 1000.0)]
    train_in(toys, configured(), sinks=[recorder])
    (_, _, first), (_, _, second) = recorder.rows[:2]
    # Eight agents close four rows each in four steps: the first multiple of 100 is passed at 128
    # rows, after the message of the reset and the messages of 16 steps.
    n = 17
    assert first["Game/Average"] == pytest.approx(500.0 + (n + 1) / 2)
    assert first["Game/Latest"] == n
    assert first["Game/Sum"] == 2 * n
    assert first["Game/Spread"] == 500.0
    assert second["Game/Latest"] > n
    assert second["Game/Sum"] < 2 * n


@pytest.mark.parametrize("toy", [Pair(Told(), Told()), Duel()], ids=["behaviors", "teams"])
def test_each_behavior_counts_every_statistic_of_the_environment_once(
    toy, configured, recorder, train_in
):
    numbers = itertools.count(1)
    toy.stats = lambda: [("Game/Latest", float(next(numbers)), 1), ("Game/Sum", 1.0, 2)]
    train_in(toy, configured("One", "Two", "Duel"), sinks=[recorder])
    firsts = {}
    for behavior, _, values in recorder.rows:
        firsts.setdefault(behavior, values)
    assert len(firsts) == len({name.partition("?")[0] for name in toy.behavior_specs})
    for values in firsts.values():
        assert values["Game/Sum"] == values["Game/Latest"]  # `Game/Sum` adds 1 per message


BALL = "3DBall"
REWARD = {"behavior": BALL, "threshold": 0.5, "min_lesson_length": 30}
PROGRESS = {"behavior": BALL, "measure": "progress", "threshold": 0.6, "require_reset": True}
CHANGES = {
    "hyperparameters": {"batch_size": 64, "buffer_size": 512, "num_epoch": 1},
    "max_steps": 6000,
    "time_horizon": 64,
    "summary_freq": 500,
    "parameters": {
        "gravity": {
            "curriculum": [
                {"name": "moon", "completion_criteria": REWARD, "value": 1.625},
                {"name": "earth", "completion_criteria": PROGRESS, "value": 9.8125},
                {"name": "jupiter", "value": 24.75},
            ]
        },
        "mass": {
            "sampler_type": "uniform",
            "sampler_parameters": {"min_value": 0.5, "max_value": 2.0},
        },
    },
}
VALUES = [1.625, 9.8125, 24.75]


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        value.simple_value
        for path in folder.glob("events.out.tfevents.*")
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == tag
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_the_log_the_charts_and_the_environment_show_the_same_lessons(
    quick, packed, tmp_path, caplog, recorder
):
    run_dir = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        pipeline.train(
            packed("balance_ball", tmp_path / "balance_ball"),
            quick(BALL, **CHANGES),
            seed=1,
            run_dir=run_dir,
            num_envs=2,
            sinks=[recorder, TensorBoardSink(TrackedRun(folder=run_dir, max_steps={}))],
        )
    lines = [r.getMessage() for r in caplog.records if "Parameter 'gravity'" in r.getMessage()]
    assert lines == [
        f"Parameter 'gravity' is in lesson '{name}' and has value 'Float: value={value}'."
        for name, value in zip(("moon", "earth", "jupiter"), VALUES, strict=True)
    ]
    charted = recorder.values("Environment/Lesson Number/gravity")
    assert charted == sorted(charted)
    assert set(charted) == {0.0, 1.0, 2.0}
    assert scalars(run_dir / BALL, "Environment/Lesson Number/gravity") == charted
    read = recorder.spreads["Environment/Parameter/gravity"]
    assert len(read) == len(charted) >= 10
    # In the period up to each summary, both executables read the value of the summary's lesson,
    # and the value of the previous lesson if a lesson began in the period.
    for values, (before, now) in zip(read, itertools.pairwise([0.0, *charted]), strict=True):
        assert set(values) <= {VALUES[int(before)], VALUES[int(now)]}
    assert set(read[0]) == {VALUES[0]}
    assert set(read[-1]) == {VALUES[2]}
    masses = [m for values in recorder.spreads["Environment/Parameter/mass"] for m in values]
    assert 0.5 <= min(masses) < 0.6 < 1.9 < max(masses) <= 2.0
