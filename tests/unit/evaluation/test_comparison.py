from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from pipeline.evaluation import tables
from pipeline.evaluation.comparison import Curve, Outcome, compare, median_steps, scale_of


def curve(returns, every=10.0):
    returns = np.array(returns, dtype=np.float64)
    return Curve(steps=every * np.arange(1, len(returns) + 1), returns=returns)


def outcome(experiment, seed, *, evaluated=None, returns=None, **changes):
    values = {"environment": "env", "behavior": "Walker", "seconds": None}
    return Outcome(
        experiment=experiment,
        seed=seed,
        evaluated=evaluated,
        curve=None if returns is None else curve(returns),
        **(values | changes),
    )


def test_end_of_a_curve_is_the_mean_of_its_last_tenth():
    assert curve([0.0] * 18 + [4.0, 6.0, 8.0]).final == 6.0
    assert curve([3.0]).final == 3.0


def test_steps_to_a_target_are_those_of_the_first_point_at_it():
    learning_curve = curve([0.0, 5.0, 2.0, 9.0])
    assert learning_curve.steps_to(5.0) == 20.0
    assert learning_curve.steps_to(5.1) == 40.0
    assert learning_curve.steps_to(9.5) is None


def test_area_is_the_mean_height_between_two_steps():
    learning_curve = curve([0.0, 10.0, 10.0])
    assert learning_curve.area(10.0, 30.0) == pytest.approx((50 + 100) / 20)
    assert learning_curve.area(15.0, 20.0) == pytest.approx(7.5)
    assert learning_curve.area(20.0, 20.0) == 10.0


def test_target_lies_between_the_lowest_start_and_the_best_end_also_below_zero():
    groups = [[curve([-200.0, -100.0])], [curve([-180.0, -120.0])]]
    assert scale_of(groups) == (-200.0, -100.0)
    assert scale_of([]) is None


def test_a_seed_that_never_got_there_took_longer_than_any():
    assert median_steps([10.0, None, 30.0]) == 30.0
    assert median_steps([10.0, None, None]) is None
    assert median_steps([10.0, None]) is None


@pytest.mark.parametrize(("steps", "returns"), [([], []), ([1, 2], [0]), ([2, 2], [0, 0])])
def test_what_is_no_curve_is_refused(steps, returns):
    with pytest.raises(ValueError, match="curve"):
        Curve(steps=np.array(steps, dtype=float), returns=np.array(returns, dtype=float))


def experiments():
    slow, fast = ("slow", 4.0, [0, 1, 2, 10], 8.0), ("fast", 9.0, [0, 9, 9, 10], 6.0)
    return [
        outcome(name, k, evaluated=score + k, returns=returns, seconds=seconds)
        for name, score, returns, seconds in (slow, fast)
        for k in range(5)
    ]


def test_experiments_on_one_task_stand_beside_each_other():
    (task,) = compare(experiments())
    slow, fast = task.standings
    assert (task.score, task.target, task.name) == ("evaluated", 9.0, "env: Walker")
    assert (slow.iqm, fast.iqm) == (6.0, 11.0)
    assert slow.interval[0] < slow.iqm < slow.interval[1]
    assert (slow.steps_to_target, fast.steps_to_target) == (40.0, 20.0)
    assert (slow.area, fast.area) == pytest.approx(((0.5 + 1.5 + 6) / 3, (4.5 + 9 + 9.5) / 3))
    assert slow.seconds == 8.0
    assert tables.cautions(task) == []
    (pair,) = task.improvements
    assert (pair.better, pair.than, pair.probability) == ("fast", "slow", 1.0)
    assert pair.interval is None
    assert pair.chance == pytest.approx(2 / 252)


@pytest.mark.parametrize("order", [("low", "high"), ("high", "low")])
def test_an_interval_is_of_the_probability_that_it_stands_with(order):
    scores = {"low": (1, 2, 3, 4, 5), "high": (3, 4, 5, 6, 7)}
    runs = [outcome(n, k, evaluated=float(v)) for n in order for k, v in enumerate(scores[n])]
    (pair,) = compare(runs)[0].improvements
    # Of 25 pairs 19 are higher and 3 equal, which count half.
    assert (pair.better, pair.than, pair.probability) == ("high", "low", pytest.approx(20.5 / 25))
    assert pair.interval[0] < pair.probability < pair.interval[1]
    assert pair.interval[0] > 0.4


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        # 3 > 1, 3 > 2, 2 > 1, and 2 = 2, which counts half
        ((1, 2), (2, 3), "3.5 of 4 pairs"),
        ((1,), (2,), "1 of 1 pair"),
        # the smaller of the two has fewer than five
        ((1, 2, 3, 4), (5, 6, 7, 8, 9), "20 of 20 pairs"),
        ((1, 2, 3, 4, 5), (3, 4, 5, 6, 7), "0.82"),
    ],
)
def test_a_probability_of_few_seeds_is_a_count_of_pairs_for_people_alone(low, high, text):
    scores = {"low": low, "high": high}
    runs = [outcome(n, k, evaluated=float(v)) for n in scores for k, v in enumerate(scores[n])]
    tasks = compare(runs)
    assert tables.pairs(tasks[0])[0][:3] == ("high", "low", text)
    won = sum((x > y) + (x == y) / 2 for x in high for y in low) / len(low) / len(high)
    assert tables.pair_records(tasks)[0]["probability"] == pytest.approx(won)
    assert bool(tasks[0].estimates) == (text == "0.82")


def test_equal_runs_give_equal_comparisons_and_the_seed_matters():
    def ends(**changes):
        (task,) = compare(experiments(), **changes)
        return [standing.interval for standing in task.standings]

    assert ends() == ends()
    noisy = [outcome("a", k, evaluated=float(v)) for k, v in enumerate((1, 4, 4.5, 7, 11, 12, 20))]
    first, repeated, other = (compare(noisy, seed=s)[0].standings[0] for s in (0, 0, 1))
    assert first.interval == repeated.interval != other.interval


def test_an_interval_does_not_depend_on_the_other_experiments():
    single = compare([run for run in experiments() if run.experiment == "fast"])[0].standings[0]
    with_others = compare(experiments())[0].standings[1]
    assert single.interval == with_others.interval


def test_fewer_than_three_seeds_have_no_interval():
    (task,) = compare(
        [outcome(name, k, evaluated=float(k)) for name in ("a", "b") for k in range(2)]
    )
    assert [row.interval for row in (*task.standings, *task.improvements)] == [None] * 3
    assert tables.cautions(task) == ["a, b: 2 seeds are too few for an interval; run 5 or more."]
    assert tables.rows(task)[0][3] == "too few seeds"


def test_three_seeds_have_an_interval_with_a_warning():
    (task,) = compare([outcome("a", k, evaluated=float(k)) for k in range(3)])
    assert task.standings[0].interval is not None
    assert "3 seeds are few: the 95 % interval misses" in tables.cautions(task)[0]


def test_ends_of_training_are_compared_when_one_run_was_not_evaluated():
    runs = [outcome("a", 1, evaluated=50.0, returns=[1, 2]), outcome("b", 1, returns=[3, 4])]
    (task,) = compare(runs)
    assert task.score == "training"
    assert [standing.scores for standing in task.standings] == [(2.0,), (4.0,)]


def test_other_environments_and_behaviors_are_other_tasks():
    runs = [
        outcome("a", 1, evaluated=1.0),
        outcome("a", 1, evaluated=2.0, behavior="Goalie"),
        outcome("b", 1, evaluated=3.0, environment="other"),
    ]
    tasks = compare(runs)
    assert [task.name for task in tasks] == ["env: Walker", "env: Goalie", "other: Walker"]
    assert [len(task.improvements) for task in tasks] == [0, 0, 0]


@pytest.mark.parametrize("fraction", [0.0, 1.1])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match="fraction"):
        compare([], fraction=fraction)


def test_csv_has_an_empty_cell_for_what_is_not_known():
    records = tables.standing_records(compare([outcome("a", 1, evaluated=1.23456789)]))
    text = tables.csv_text(records, tables.STANDING_COLUMNS)
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["iqm"], row["iqm_low"], row["target"], row["seeds"]) == ("1.23457", "", "", "1")


def test_durations_are_said_as_a_person_would():
    texts = [tables.duration(value) for value in (None, 12.34, 754.0, 7384.0)]
    assert texts == ["-", "12.3 s", "12 min 34 s", "2 h 03 min"]


def test_the_notes_say_which_difference_would_not_be_seen():
    runs = [outcome(name, k, evaluated=float(2 * k)) for name in ("a", "b") for k in range(3)]
    (task,) = compare(runs)
    assert task.detectable == pytest.approx(6.13, abs=0.05)
    assert tables.notes(task)[-1].startswith(
        f"With 3 seeds, a difference of means below {task.detectable:.4g} would not be seen"
    )
