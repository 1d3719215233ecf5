"""Statistics of a summary period: means, sums and spreads over workers and processes."""

import copy
import pickle
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from steps import decision_steps, terminal_steps

from pipeline.data.columns import Columns, Field
from pipeline.envs.side_channels import StatsAggregationMethod as Method
from pipeline.tracking import names
from pipeline.trainer.grouping import GroupTracker
from pipeline.trainer.statistics import EXTRINSIC, Statistics
from pipeline.trainer.timing import Stopwatch, add_reports


def test_method_period_returns_means_and_begins_a_new_period():
    numbers = Statistics()
    numbers.add("Losses/Value Loss", 1.0)
    numbers.add_all({"Losses/Value Loss": 2.0, "Policy/Beta": 5.0})
    assert numbers.period() == {"Losses/Value Loss": 1.5, "Policy/Beta": 5.0}
    assert numbers.period() == {}


def test_reward_spread_is_the_population_standard_deviation_of_the_period():
    numbers = Statistics()
    returns = [1.0, 4.0, 4.5, -2.0]
    numbers.add_episodes(returns, [1] * 4)
    assert numbers.reward_spread() == pytest.approx(statistics.pstdev(returns))
    numbers.period()
    assert numbers.reward_spread() == 0.0
    numbers.add_episodes([7.0], [1])
    assert numbers.reward_spread() == 0.0
    numbers.add_episodes([9.0], [1])
    assert numbers.reward_spread() == 1.0


def test_only_the_last_100_returns_are_kept_and_returns_of_ended_episodes_are_taken_once():
    numbers = Statistics()
    numbers.add_episodes(map(float, range(150)), [1] * 150)
    numbers.period()
    assert list(numbers.recent) == list(map(float, range(50, 150)))
    assert numbers.n_episodes == 150
    assert numbers.take_ended() == list(map(float, range(150)))
    assert numbers.take_ended() == []


REPORTED = {
    "Game/Average": [(1.0, Method.AVERAGE), (4.0, Method.AVERAGE)],
    "Game/Latest": [(7.0, Method.MOST_RECENT), (5.0, Method.MOST_RECENT)],
    "Game/Sum": [(1.5, Method.SUM), (2.5, Method.SUM)],
    "Game/Spread": [(1.0, Method.HISTOGRAM), (2.0, Method.HISTOGRAM), (6.0, Method.HISTOGRAM)],
}


def test_restored_statistics_continue_within_a_period():
    original, restored = Statistics(), Statistics()
    original.add_episodes([1.0, 2.0], [3, 4])
    original.add_environment(REPORTED)
    state = original.state_dict()
    kept = copy.deepcopy(state)
    restored.load_state_dict(copy.deepcopy(state))
    for numbers in (original, restored):
        numbers.add_episodes([6.0], [5])
        numbers.add_environment(REPORTED | {"Game/Latest": [(1.0, Method.MOST_RECENT)]})
    assert (state["returns"], state["recent"]) == ([1.0, 2.0], [1.0, 2.0])
    assert state == kept
    assert restored.reward_spread() == original.reward_spread()
    assert restored.distributions() == original.distributions()
    assert restored.state_dict() == original.state_dict()
    assert restored.period() == original.period()


def test_statistics_of_processes_add_up_but_latest_values_are_of_the_first_process():
    processes = []
    for rank in range(2):
        numbers = Statistics()
        numbers.add("mean", 1.0 + rank)
        numbers.add_episodes([10.0 * (rank + 1)], [4], own=[float(rank)], learned=[100.0])
        numbers.add_environment(
            {
                "sum": [(3.0, Method.SUM)],
                "latest": [(5.0 + rank, Method.MOST_RECENT)],
                f"only {rank}": [(7.0, Method.MOST_RECENT)],
                "spread": [(float(rank), Method.HISTOGRAM)],
            }
        )
        processes.append(pickle.loads(pickle.dumps(numbers)))  # noqa: S301  # our own bytes
    together = Statistics()
    together.add("mean", 6.0)
    together.add_from(processes)
    assert together.take_ended() == list(together.recent) == [10.0, 20.0]
    assert together.returns == [0.0, 1.0], "each agent's own return"
    assert together.n_episodes == 2
    assert together.distributions() == {"spread": [0.0, 1.0]}
    expected = {"mean": 3.0, "sum": 6.0, "latest": 5.0, "only 0": 7.0, "only 1": 7.0}
    expected |= {names.REWARD: 0.5, EXTRINSIC: 100.0}
    assert together.samples() == {
        "mean": (Method.AVERAGE, [6.0, 1.0, 2.0]),
        names.REWARD: (Method.HISTOGRAM, [0.0, 1.0]),
        EXTRINSIC: (Method.AVERAGE, [100.0, 100.0]),
        names.EPISODE_LENGTH: (Method.AVERAGE, [3, 3]),
        "sum": (Method.SUM, [3.0, 3.0]),
        "spread": (Method.HISTOGRAM, [0.0, 1.0]),
        **{tag: (Method.MOST_RECENT, [expected[tag]]) for tag in ("latest", "only 0", "only 1")},
    }
    assert set(together.samples()) == set(values := together.period())
    assert {name: values[name] for name in expected} == expected
    assert together.samples() == together.distributions() == {}


def test_return_of_a_group_is_added_to_the_statistics_once():
    both, tracker = Statistics(), GroupTracker(Columns({}, [Field(shape=(1,))]))
    tracker.finished.append(3.0)
    for _ in range(2):
        tracker.report(None, np.zeros(0, np.intp), both)
    assert len(both.samples()[names.GROUP_REWARD][1]) == 1


def test_statistics_from_a_worker_are_added_only_to_behaviors_with_agents_in_this_worker():
    empty, one = (decision_steps([], ids) for ids in ([], [0]))
    nobody = terminal_steps([], [])
    behaviors = [
        SimpleNamespace(name=name, pending_stats=Statistics()) for name in ("left", "right")
    ]
    sums = Method.SUM
    add_reports(
        [
            ("left?team=0", behaviors[0], [(one, nobody), (empty, nobody)]),
            ("right?team=0", behaviors[1], [(empty, nobody), (one, nobody)]),
        ],
        [{"of the first": [(1.0, sums)]}, {"of the second": [(2.0, sums)]}],
    )
    assert [behavior.pending_stats.period() for behavior in behaviors] == [
        {"of the first": 1.0},
        {"of the second": 2.0},
    ]


def test_seconds_of_updates_storage_and_compiling_are_summed_over_the_learners_of_a_run():
    stopwatch = Stopwatch(SimpleNamespace(codec_seconds=0.25))
    stopwatch.timed(lambda _: None, None)
    learners = [
        SimpleNamespace(name=name, seconds={"update": update, "storage": 1.0, **more})
        for name, update, more in (("One", 2.0, {"compile": 7.0}), ("Two", 5.0, {}))
    ]
    seconds = stopwatch.seconds(learners)
    assert [seconds[part] for part in ("update", "storage", "compile", "wire")] == [7, 2, 7, 0.25]
