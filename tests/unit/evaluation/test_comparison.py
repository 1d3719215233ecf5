import csv
import io

import numpy as np
import pytest

from pipeline.evaluation import tables
from pipeline.evaluation.comparison import Curve, Outcome, compare, median_steps, scale_of


def curve(returns, every=10.0):
    returns = np.array(returns, dtype=np.float64)
    return Curve(steps=every * np.arange(1, len(returns) + 1), returns=returns)


def outcome(experiment, seed, evaluated=None, returns=None, **changes):
    values = {"environment": "env", "behavior": "Walker", "seconds": None} | changes
    learned = None if returns is None else curve(returns)
    return Outcome(experiment=experiment, seed=seed, evaluated=evaluated, curve=learned, **values)


def compared(scores, **options):
    """Return the task of experiments with these scores; seeds count from 0."""
    runs = [outcome(name, k, float(v)) for name in scores for k, v in enumerate(scores[name])]
    (task,) = compare(runs, **options)
    return task


def test_final_return_steps_to_a_target_and_area_of_a_learning_curve():
    assert curve([0.0] * 18 + [4.0, 6.0, 8.0]).final == 6.0  # the mean of the last tenth
    assert curve([3.0]).final == 3.0
    falling = curve([0.0, 5.0, 2.0, 9.0])
    assert [falling.steps_to(target) for target in (5.0, 5.1, 9.5)] == [20.0, 40.0, None]
    rising = curve([0.0, 10.0, 10.0])
    assert rising.area(10.0, 30.0) == pytest.approx((50 + 100) / 20)
    assert rising.area(15.0, 20.0) == pytest.approx(7.5)
    assert rising.area(20.0, 20.0) == 10.0


def test_scale_of_negative_returns_goes_from_the_lowest_start_to_the_best_end():
    groups = [[curve([-200.0, -100.0])], [curve([-180.0, -120.0])]]
    assert scale_of(groups) == (-200.0, -100.0)
    assert scale_of([]) is None


def test_a_seed_that_never_reached_the_target_counts_as_slowest():
    assert median_steps([10.0, None, 30.0]) == 30.0
    assert median_steps([10.0, None, None]) is None
    assert median_steps([10.0, None]) is None


@pytest.mark.parametrize(("steps", "returns"), [([], []), ([1, 2], [0]), ([2, 2], [0, 0])])
def test_curves_without_points_or_with_steps_that_do_not_ascend_are_refused(steps, returns):
    with pytest.raises(ValueError, match="curve"):
        Curve(steps=np.array(steps, dtype=float), returns=np.array(returns, dtype=float))


def runs():
    """Return outcomes with seeds out of order; each value identifies its run."""
    return [
        outcome("old", 3, 30.0, [0.0, 4.0, 8.0], seconds=5.0),
        outcome("old", 1, 10.0, [2.0, 4.0, 4.0, 4.0], seconds=7.0, exact=False),
        outcome("old", 2, 20.0, seconds=None),
        outcome("new", 9, 35.0, [1.0, 10.0, 12.0], seconds=20.0),
        outcome("new", 8, 25.0, [5.0, 10.0, 12.0], seconds=30.0),
        outcome("new", 7, 15.0, [3.0, 8.0, 12.0], seconds=40.0),
        outcome("new", 6, 45.0, [3.0, 8.0, 12.0], seconds=50.0),
    ]


def test_each_number_of_a_comparison_belongs_to_its_experiment_and_seed():
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
    # Half of the way from the mean start of `old`, 1, to the end of `new`, 12.
    assert task.target == 6.5
    assert (old.reached, old.steps_to_target) == (1, None)  # one seed at step 30, the other never
    assert (new.reached, new.steps_to_target) == (4, 20.0)
    # All curves have the steps from 10 to 30.
    assert old.area == pytest.approx(((2 + 6) / 2 + (3 + 4) / 2) / 2)
    areas = [(5.5 + 11) / 2, (7.5 + 11) / 2, (5.5 + 10) / 2, (5.5 + 10) / 2]
    assert new.area == pytest.approx(np.mean(areas))
    assert (old.seconds, new.seconds) == (None, 35.0)
    (pair,) = task.improvements
    assert (pair.better, pair.than) == ("new", "old")
    assert pair.probability == (3 + 3 + 2 + 1) / 12
    assert pair.interval is None
    for either in (task, *compare(runs()[::-1])):  # in either order of the experiments
        assert tables.notes(either)[-1].startswith("With 3 seeds, a difference of means below")


def test_comparison_records_have_each_number_in_the_right_column():
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


@pytest.mark.parametrize("order", [("low", "high"), ("high", "low")])
def test_interval_contains_the_probability_of_improvement_in_each_order_of_experiments(order):
    scores = {"low": (1, 2, 3, 4, 5), "high": (3, 4, 5, 6, 7)}
    (pair,) = compared({name: scores[name] for name in order}).improvements
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
        # the smaller group has fewer than five seeds
        ((1, 2, 3, 4), (5, 6, 7, 8, 9), "20 of 20 pairs"),
        ((1, 2, 3, 4, 5), (3, 4, 5, 6, 7), "0.82"),
    ],
)
def test_number_of_won_pairs_is_shown_in_tables_and_their_share_in_records_if_seeds_are_few(
    low, high, text
):
    task = compared({"low": low, "high": high})
    assert tables.pairs(task)[0][:3] == ("high", "low", text)
    won = sum((x > y) + (x == y) / 2 for x in high for y in low) / len(low) / len(high)
    assert tables.pair_records([task])[0]["probability"] == pytest.approx(won)
    assert bool(task.estimates) == (text == "0.82")


NOISY = (1, 4, 4.5, 7, 11, 12, 20)


def test_interval_depends_only_on_the_scores_the_seed_and_the_name_of_the_experiment():
    first, other, second = (
        [row.interval for row in compared(dict.fromkeys(names, NOISY), seed=seed).standings]
        for names, seed in (("a", 0), ("a", 1), ("ab", 0))
    )
    assert first == [row.interval for row in compared({"a": NOISY}).standings] != other
    assert second[0] == first[0] != second[1]
    assert second[1] == pytest.approx(first[0], abs=1.5)


def test_experiments_without_overlapping_scores_have_a_chance_of_separation_but_no_interval():
    task = compared({"slow": range(4, 9), "fast": range(9, 14)})
    slow, fast = task.standings
    assert (slow.iqm, fast.iqm, task.name) == (6.0, 11.0, "env: Walker")
    assert slow.interval[0] < slow.iqm < slow.interval[1]
    assert tables.cautions(task) == []
    (pair,) = task.improvements
    assert (pair.better, pair.than, pair.probability) == ("fast", "slow", 1.0)
    assert (pair.interval, pair.chance) == (None, pytest.approx(2 / 252))


def test_two_seeds_have_no_interval_and_three_seeds_have_an_interval_with_a_warning():
    two, three = compared({"a": range(2), "b": range(2)}), compared({"a": range(3)})
    one, four = (tables.cautions(compared({"a": range(n)}))[0] for n in (1, 4))
    assert one == "a: 1 seed is too few for an interval; run 5 or more."
    assert four.startswith("a: 4 seeds are few: ")
    assert [row.interval for row in (*two.standings, *two.improvements)] == [None] * 3
    assert tables.cautions(two) == ["a, b: 2 seeds are too few for an interval; run 5 or more."]
    assert tables.rows(two)[0][3] == "too few seeds"
    assert three.standings[0].interval is not None
    assert "3 seeds are few: in more than 5 % of cases" in tables.cautions(three)[0]


def test_final_training_returns_are_compared_if_one_run_was_not_evaluated():
    (task,) = compare([outcome("a", 1, 50.0, [1, 2]), outcome("b", 1, returns=[3, 4])])
    assert task.score == "training"
    assert [standing.scores for standing in task.standings] == [(2.0,), (4.0,)]


def test_each_environment_and_behavior_is_a_separate_task():
    others = [outcome("a", 1, 2.0, behavior="Goalie"), outcome("b", 1, 3.0, environment="other")]
    tasks = compare([outcome("a", 1, 1.0), *others])
    assert [task.name for task in tasks] == ["env: Walker", "env: Goalie", "other: Walker"]
    assert [len(task.improvements) for task in tasks] == [0, 0, 0]


@pytest.mark.parametrize("fraction", [0.0, 1.1])
def test_comparison_with_a_target_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(ValueError, match="fraction"):
        compare([], fraction=fraction)


def test_csv_has_empty_cells_for_unknown_values():
    records = tables.standing_records(compare([outcome("a", 1, 1.23456789)]))
    text = tables.csv_text(records, tables.STANDING_COLUMNS)
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["iqm"], row["iqm_low"], row["target"], row["seeds"]) == ("1.23457", "", "", "1")


def test_durations_are_shown_in_seconds_minutes_or_hours():
    texts = [tables.duration(value) for value in (None, 12.34, 754.0, 7384.0)]
    assert texts == ["-", "12.3 s", "12 min 34 s", "2 h 03 min"]


def test_notes_of_a_comparison_state_the_smallest_detectable_difference():
    task = compared(dict.fromkeys("ab", (0, 2, 4)))
    assert task.detectable == pytest.approx(6.13, abs=0.05)
    assert tables.notes(task)[-1].startswith(
        f"With 3 seeds, a difference of means below {task.detectable:.4g} would not be seen"
    )
