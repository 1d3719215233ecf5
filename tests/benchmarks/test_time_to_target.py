"""The pure parts of `benchmarks/time_to_target.py`."""

import json

import pytest
import time_to_target as ttt


def summaries(*means, every=100, first=100):
    return [(first + every * k, float(k), float(mean)) for k, mean in enumerate(means)]


@pytest.mark.parametrize(
    ("means", "steps"),
    [
        ([90] * 4, None),
        ([90] * 5, 100),
        ([95, 95, 95, 95, 89, 90, 91, 92, 93, 94], 600),
        ([1, 90, 90, 90, 90, 90, 1], 200),
    ],
)
def test_target_is_reached_at_the_first_of_five_successive_summaries_at_or_above_the_target(
    means, steps
):
    found = ttt.reached(summaries(*means), 90.0)
    assert (found and found[0]) == steps


def test_summaries_of_an_easier_lesson_do_not_count_as_reaching_the_target():
    found = ttt.reached(summaries(*[95] * 10), 90.0, first_step=300)
    assert found is not None
    assert found[0] == 400


def test_curve_of_a_resumed_run_continues_the_time_of_the_first_part_and_repeats_no_summary():
    earlier = summaries(1, 2, 3)  # at 100, 200, 300 steps and 0, 1, 2 s
    later = [(300, 5.0, 3.5), (400, 6.0, 4.0)]  # resumed from a checkpoint at 250 steps
    assert ttt.joined(earlier, later) == [*earlier[:2], (300, 6.0, 3.5), (400, 7.0, 4.0)]
    assert ttt.joined(earlier, []) == earlier
    assert ttt.joined([], later) == later


def result(trainer, seconds, *, reached=True, steps=1000):
    row = {"task": "balance_ball", "ms": 6.0, "trainer": trainer, "seconds": seconds}
    return row | {"steps": steps, "reached": reached}


def test_time_to_target_table_compares_our_trainers_with_the_faster_trainer_of_mlagents():
    results = [
        *(result("xqc", seconds) for seconds in (20.0, 30.0)),
        *(result("sac", seconds) for seconds in (50.0, 900.0)),
        *(result("peer-ppo", seconds) for seconds in (200.0, 300.0)),
        *(result("peer-sac", seconds) for seconds in (400.0, 300.0)),
    ]
    results[3]["reached"] = False
    ours, sac, ppo, _ = ttt.lines_of(results)
    assert ours == ["balance_ball", "6", "XQC", "2", "25", "1,000", "10.0"]
    assert sac == ["balance_ball", "6", "SAC", "2", "> 475", "> 1,000", "< 0.5"]
    assert ppo == ["balance_ball", "6", "mlagents-learn, PPO", "2", "250", "1,000", ""]


def test_time_ratio_is_a_lower_bound_if_mlagents_did_not_reach_the_target():
    results = [result("xqc", 30.0), result("peer-ppo", 900.0, reached=False)]
    ours, peer = ttt.lines_of(results)
    assert ours[-1] == "> 30.0"
    assert peer[4] == "> 900"


def test_time_to_target_measures_our_trainers_and_the_trainers_of_mlagents_alternately():
    turns = ["xqc", "peer-ppo", "ppo", "peer-sac", "sac"]
    assert ttt.TASKS["balance_ball"].trainers == turns


@pytest.mark.parametrize("task", ttt.TASKS)
def test_every_trainer_of_a_task_has_settings_with_the_same_summary_frequency(task, tmp_path):
    for trainer in ttt.TASKS[task].trainers:
        row = ttt.Row(task, 6.0, trainer, 4, tmp_path)
        (behavior,) = row.settings()["behaviors"].values()
        assert behavior["summary_freq"] == ttt.TASKS[task].summary_freq
        assert behavior["threaded"] is not trainer.startswith("peer-")


def test_finished_measurement_is_kept_unless_its_settings_have_changed(tmp_path):
    row = ttt.Row("balance_ball", 6.0, "ppo", 4, tmp_path)
    assert row.kept(row.file) is None
    row.file.write_text(json.dumps({"settings": row.digest(), "seconds": 5.0}))
    assert row.kept(row.file)["seconds"] == 5.0
    row.file.write_text(json.dumps({"settings": "other", "seconds": 5.0}))
    assert row.kept(row.file) is None
