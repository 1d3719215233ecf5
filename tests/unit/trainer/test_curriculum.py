"""The rules by which one lesson follows another."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.settings import load_run_settings
from pipeline.trainer.curriculum import Change, Curriculum, in_words


def parameters(**curricula):
    """`environment_parameters`; a list is a curriculum of values and the criteria between them."""
    written = {
        name: {"curriculum": lessons(*value)} if isinstance(value, list) else value
        for name, value in curricula.items()
    }
    played = {"default_settings": {"trainer_type": "ppo", "self_play": {"save_steps": 100}}}
    return (
        load_run_settings(None, overrides=played | {"environment_parameters": written})
        .with_seed(7)
        .environment_parameters
    )


def lessons(*items):
    """Return lessons as in a file, from values and the criteria between them."""
    result = []
    for index, value in enumerate(items[::2]):
        lesson = {"name": f"lesson{index}", "value": value}
        if 2 * index + 1 < len(items):
            lesson["completion_criteria"] = {"behavior": "B"} | items[2 * index + 1]
        result.append(lesson)
    return result


def played(curriculum, *steps):
    """Return for each new lesson (step, parameters, must_reset); steps count from 1.

    A step is the returns of the episodes that ended at this step, or (returns, progress) of
    behavior B, or (returns, progress, rating).
    """
    changes = []
    for number, step in enumerate(steps, start=1):
        returns, progress, *rated = step if isinstance(step, tuple) else (step, 0.0)
        elo = rated[0] if rated else None
        curriculum.observe("B", returns=returns, step=round(100 * progress), max_steps=100, elo=elo)
        change = curriculum.advance()
        if change.parameters:
            changes.append((number, *change.parameters, change.must_reset))
    return changes


PLAIN = {"threshold": 1.0, "signal_smoothing": False}
SMOOTH = {"threshold": 1.0, "signal_smoothing": True}
HAND_WORKED = {
    "a reward equal to the threshold is not above it": (PLAIN, [[1.0], [1.0], [1.5]], 3),
    "no episode, no reward, even with a negative threshold": (
        PLAIN | {"threshold": -5.0},
        [[], [float("nan")], [-1.0]],
        3,
    ),
    # 0, .25 * 0 + .75 * 1.2 = .9, .25 * .9 + .75 * 1.2 = 1.125; a step without an ended episode
    # does not count
    "a smoothed reward lags": (SMOOTH, [[0.0], [1.2], [], [1.2]], 4),
    "a quarter of it is the last one": (SMOOTH | {"threshold": 0.89}, [[0.0], [1.2]], 2),
    # if smoothing began at 0, the first measure would be -0.9
    "smoothing begins at the first mean": (SMOOTH | {"threshold": -1.0}, [[-1.2], [-1.2]], None),
    # the first measure is the mean 1.1 of both returns
    "or with min_lesson_length episodes": (SMOOTH | {"min_lesson_length": 2}, [[0.0], [2.2]], 2),
}


@pytest.mark.parametrize("name", HAND_WORKED)
def test_lesson_ends_at_the_step_that_was_computed_by_hand(name):
    criteria, steps, expected = HAND_WORKED[name]
    assert_lesson_is_over_at(expected, criteria, [(returns, 0.0, None) for returns in steps])
    assert over_at(criteria, [(returns, 0.0, None) for returns in steps]) == expected


def assert_lesson_is_over_at(number, criteria, steps):
    curriculum = Curriculum(parameters(p=[0.0, criteria, 1.0]))
    assert [step for step, *_ in played(curriculum, *steps)] == ([number] if number else [])
    assert curriculum.numbers == {"p": int(number is not None)}
    assert curriculum.is_over == (number is not None)


def measures(criteria, steps):
    """Yield the number and the measure of each step at which a lesson may end."""
    n_wanted, measure = criteria.get("min_lesson_length", 0), criteria.get("measure", "reward")
    all_returns, smoothed, latest = [], None, None
    for number, (ended, progress, rating) in enumerate(steps, start=1):
        returns = [value for value in ended if not math.isnan(value)]
        all_returns += returns
        latest = latest if rating is None else rating
        if len(all_returns) < n_wanted:
            continue
        value = progress if measure == "progress" else latest
        if measure == "reward":
            if not returns:  # without a new episode, the measure is not updated
                continue
            last = all_returns[-max(n_wanted, 1) :]
            value = sum(last) / len(last)
            if criteria["signal_smoothing"]:
                smoothed = value = value if smoothed is None else 0.25 * smoothed + 0.75 * value
        if value is not None:
            yield number, value


def over_at(criteria, steps):
    """Return the number of the step at which the lesson ends; None if it does not end."""
    above = (n for n, value in measures(criteria, steps) if value > criteria["threshold"])
    return next(above, None)


QUARTERS = st.integers(-4, 8).map(lambda n: n / 4)


@given(
    measure=st.sampled_from([{}, {"measure": "progress"}, {"measure": "elo"}]),
    is_smoothed=st.booleans(),
    length=st.sampled_from([{}, *({"min_lesson_length": n} for n in (1, 2, 4))]),
    returns=st.lists(st.lists(QUARTERS | st.just(math.nan), max_size=3), min_size=1, max_size=8),
    rest=st.lists(st.tuples(st.integers(0, 4), st.none() | QUARTERS), min_size=8, max_size=8),
    which=st.integers(0, 7),
    below=st.sampled_from([0.0, 1e-6]),
)
def test_lesson_ends_at_the_step_that_a_slow_reference_implementation_computes(
    measure, is_smoothed, length, returns, rest, which, below
):
    """The measure of a step (reward, progress or rating) is at the threshold or just above it."""
    criteria = {"threshold": 0.5, "signal_smoothing": is_smoothed, **measure, **length}
    steps = [
        (ended, progress / 4, rating)
        for ended, (progress, rating) in zip(returns, rest, strict=False)
    ]
    if values := [value for _, value in measures(criteria, steps)]:
        threshold = values[which % len(values)] - below
        criteria["threshold"] = max(threshold, 0.0) if "progress" in measure.values() else threshold
    assert_lesson_is_over_at(over_at(criteria, steps), criteria, steps)


def test_each_step_ends_at_most_one_lesson_of_a_parameter_and_the_last_lesson_never_ends():
    curriculum = Curriculum(parameters(p=[1.0, PLAIN, 2.0, PLAIN, 3.0]))
    assert played(curriculum, [5.0], [5.0], [5.0], [5.0]) == [(1, "p", False), (2, "p", False)]
    assert curriculum.values()["p"].value == 3.0
    assert curriculum.is_over


def test_new_lesson_clears_the_stored_returns_and_smoothed_measures_of_all_behaviors():
    quick = PLAIN | {"min_lesson_length": 2}
    slow = SMOOTH | {"threshold": 1.5, "min_lesson_length": 3}
    curriculum = Curriculum(parameters(p=[1.0, quick, 2.0], q=[1.0, slow, 2.0]))
    steps = [[1.2, 1.2, 1.2], [9.0], [9.0], [9.0]]
    # p begins a lesson at step 1; then q needs three new episodes, without the returns of 1.2
    assert played(curriculum, *steps) == [(1, "p", False), (4, "q", False)]
    other = {"behavior": "Other", "threshold": 0.0, "min_lesson_length": 2}
    curriculum = Curriculum(parameters(p=[1.0, PLAIN, 2.0], q=[1.0, other, 2.0]))
    begun = []
    for steps in (("Other", "B"), ("Other",), ("Other",)):
        for name in steps:
            curriculum.observe(name, returns=[5.0], step=0, max_steps=1)
        begun.append(curriculum.advance())
    assert begun == [Change(parameters=("p",)), Change(), Change(parameters=("q",))]


def test_two_lessons_that_measure_the_same_behavior_smooth_its_reward_separately():
    """Means 0 and 4 are smoothed to 0 and 3; smoothing twice in a step would give 3.75."""
    low, high = (SMOOTH | {"threshold": threshold} for threshold in (3.5, 2.5))
    curriculum = Curriculum(parameters(p=[1.0, low, 2.0], q=[1.0, low, 2.0]))
    assert played(curriculum, [0.0], [4.0]) == []
    later = Curriculum(parameters(p=[1.0, low, 2.0], q=[1.0, low, 2.0]))
    later.load_state_dict(curriculum.state_dict())
    for resumed in (curriculum, later):  # 0.25 * 3 + 0.75 * 4 = 3.75
        assert played(resumed, [4.0]) == [(1, "p", "q", False)]
    curriculum = Curriculum(parameters(p=[1.0, low, 2.0], q=[1.0, high, 2.0]))
    assert played(curriculum, [0.0], [4.0]) == [(2, "q", False)]
    other = {"behavior": "Other", "threshold": 9.0}
    curriculum = Curriculum(parameters(p=[1.0, low, 2.0], q=[1.0, other, 2.0]))
    assert played(curriculum, [0.0], [4.0]) == []
    curriculum.observe("Other", returns=[1.0], step=0, max_steps=1)
    assert curriculum.advance() == Change(), "B has no new episode"


def test_lessons_of_a_behavior_average_its_returns_over_the_largest_min_lesson_length():
    short = PLAIN | {"min_lesson_length": 1}
    long = PLAIN | {"min_lesson_length": 4, "threshold": 2.0}
    curriculum = Curriculum(parameters(p=[1.0, short, 2.0], q=[1.0, long, 2.0]))
    # p is measured by the mean over four episodes, though its min_lesson_length is 1
    steps = [[0.0], [0.0], [0.0], [3.0], [3.0]]
    assert played(curriculum, *steps) == [(5, "p", False)]
    other = long | {"behavior": "Other"}  # does not make B's mean one over four episodes
    curriculum = Curriculum(parameters(p=[1.0, short, 2.0], q=[1.0, other, 2.0]))
    assert played(curriculum, [0.0], [1.5]) == [(2, "p", False)]


def test_several_parameters_can_begin_lessons_in_the_same_step():
    criteria = {"measure": "progress", "threshold": 0.2}
    later = {"measure": "progress", "threshold": 0.6}
    curriculum = Curriculum(
        parameters(p=[1.0, criteria, 2.0, later, 3.0], q=[1.0, later, 2.0], r=4.5)
    )
    assert played(curriculum, ([], 0.1), ([], 0.3), ([], 0.5), ([], 0.7)) == [
        (2, "p", False),
        (4, "p", "q", False),
    ]
    assert curriculum.numbers == {"p": 2, "q": 1, "r": 0}


@pytest.mark.parametrize("asks_first", [True, False])
def test_environments_are_reset_if_any_ended_lesson_requires_a_reset(asks_first):
    with_reset = PLAIN | {"require_reset": True}
    curriculum = Curriculum(parameters(p=[1.0, with_reset, 2.0, PLAIN, 3.0]))
    assert played(curriculum, [5.0], [5.0]) == [(1, "p", True), (2, "p", False)]
    first, second = (with_reset, PLAIN) if asks_first else (PLAIN, with_reset)
    curriculum = Curriculum(parameters(p=[1.0, first, 2.0], q=[1.0, second, 2.0]))
    assert played(curriculum, [5.0]) == [(1, "p", "q", True)]


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [(0, [0, 0]), (1, [1, 0]), (2, [2, 0]), (9, [2, 0]), (-3, [0, 0])],
)
def test_starting_lesson_is_limited_to_the_existing_lessons_of_each_parameter(asked, numbers):
    curriculum = Curriculum(
        parameters(p=[1.0, PLAIN, 2.0, PLAIN, 3.0], q=0.5), starting_lesson=asked
    )
    assert list(curriculum.numbers.values()) == numbers


def test_method_measured_returns_only_the_behaviors_that_unfinished_lessons_measure():
    other = PLAIN | {"behavior": "Other"}
    curriculum = Curriculum(parameters(p=[1.0, PLAIN, 2.0, other, 3.0], q=[1.0, other, 2.0], r=1.0))
    assert curriculum.measured() == {"B": ["p"], "Other": ["p", "q"]}
    curriculum.observe("Else", returns=[9.0], step=1, max_steps=1)
    assert curriculum.advance() == Change()
    assert Curriculum(parameters(p=[1.0, PLAIN, 2.0]), starting_lesson=1).measured() == {}


MIDDLE = {
    "plain": [1.0, PLAIN | {"min_lesson_length": 3}, 2.0, PLAIN | {"min_lesson_length": 2}, 3.0],
    "smoothed": [1.0, SMOOTH | {"min_lesson_length": 2}, 2.0, SMOOTH, 3.0],
    "progress": [1.0, {"measure": "progress", "threshold": 0.3, "min_lesson_length": 2}, 2.0],
}
STEPS = [
    ([0.4], 0.1),
    ([], 0.2),
    ([0.8, 0.9], 0.3),
    ([1.15], 0.4),
    ([1.2], 0.5),
    ([1.3, 1.1], 0.6),
    ([1.3], 0.7),
    ([1.2], 0.8),
]


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("cut", range(len(STEPS)))
def test_curriculum_resumed_within_a_lesson_equals_an_uninterrupted_curriculum(name, cut):
    described = parameters(p=MIDDLE[name])
    uninterrupted = Curriculum(described)
    expected = played(uninterrupted, *STEPS)
    assert expected
    first, second = Curriculum(described), Curriculum(described)
    before = played(first, *STEPS[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = [(step + cut, *rest) for step, *rest in played(second, *STEPS[cut:])]
    assert before + after == expected
    assert second.state_dict() == uninterrupted.state_dict()


def test_restored_lesson_numbers_are_clamped_to_the_configured_lessons():
    longer = parameters(p=MIDDLE["plain"], gone=1.0)
    shorter = parameters(p=[1.0, PLAIN | {"min_lesson_length": 3}, 2.0], new=[1.0, PLAIN, 2.0])
    before, after = Curriculum(longer, starting_lesson=2), Curriculum(shorter)
    state = before.state_dict()
    kept = json.dumps(state)
    played(before, [5.0], [5.0], [5.0])
    assert json.dumps(state) == kept
    after.load_state_dict(state)
    assert after.numbers == {"p": 1, "new": 0}
    assert after.state_dict()["returns"] == {"B": []}, "no returns are restored"
    alone = Curriculum(parameters(p=MIDDLE["plain"], q=1.0))
    alone.load_state_dict({"lessons": {"p": 1}})
    assert alone.numbers == {"p": 1, "q": 0}
    assert played(alone, [5.0], [5.0]) == [(2, "p", False)]


def sampler(kind, **numbers):
    return {"sampler_type": kind, "sampler_parameters": numbers}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.5, "Float: value=1.5"),
        (sampler("uniform", min_value=0.5, max_value=10), "Uniform sampler: min=0.5, max=10.0"),
        (sampler("gaussian", mean=2, st_dev=0.3), "Gaussian sampler: mean=2.0, stddev=0.3"),
        (
            sampler("multirangeuniform", intervals=[[7, 10], [15, 20]]),
            "MultiRangeUniform sampler: intervals=[(7.0, 10.0), (15.0, 20.0)]",
        ),
    ],
)
def test_parameter_values_are_logged_in_the_words_of_mlagents(value, words):
    assert in_words(Curriculum(parameters(p=value)).values()["p"]) == words


def test_min_lesson_length_of_one_behavior_does_not_affect_another_behavior(quick):
    def lessons(behavior, length):
        criteria = {"measure": "reward", "behavior": behavior, "threshold": 2.0}
        criteria |= {"min_lesson_length": length, "signal_smoothing": False}
        first = {"name": "first", "value": 1.0, "completion_criteria": criteria}
        return {"curriculum": [first, {"name": "second", "value": 2.0}]}

    settings = quick("One", "Two", parameters={"p": lessons("One", 1), "q": lessons("Two", 3)})
    curriculum, begun = Curriculum(settings.environment_parameters), []
    for one, two in ((0.0, 9.0), (0.0, 9.0), (3.0, None), (None, 9.0)):
        for name, value in (("One", one), ("Two", two)):
            returns = [] if value is None else [value]
            curriculum.observe(name, returns=returns, step=0, max_steps=1)
        begun.append(curriculum.advance().parameters)
    # The last return of One is above 2, so p begins a lesson and all buffers are cleared. Then Two
    # has one of the three episodes that q needs.
    assert begun == [(), (), ("p",), ()]
