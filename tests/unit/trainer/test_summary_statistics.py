import copy
import statistics

import pytest

from pipeline.envs.side_channels import StatsAggregationMethod as Method
from pipeline.tracking import names
from pipeline.trainer.statistics import Statistics


def test_period_gives_means_and_begins_anew():
    numbers = Statistics()
    numbers.add("Losses/Value Loss", 1.0)
    numbers.add_all({"Losses/Value Loss": 2.0, "Policy/Beta": 5.0})
    assert numbers.period() == {"Losses/Value Loss": 1.5, "Policy/Beta": 5.0}
    assert numbers.period() == {}


def test_length_of_an_episode_counts_decisions_less_one():
    numbers = Statistics()
    numbers.add_episodes([3.0, 5.0], [10, 20])
    values = numbers.period()
    assert values[names.EPISODE_LENGTH] == 14.0
    assert values[names.REWARD] == 4.0


def test_spread_is_the_population_standard_deviation_of_this_period():
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


def test_recent_returns_are_the_last_hundred_and_outlive_a_period():
    numbers = Statistics()
    numbers.add_episodes(map(float, range(150)), [1] * 150)
    numbers.period()
    assert list(numbers.recent) == list(map(float, range(50, 150)))
    assert numbers.n_episodes == 150


def test_state_continues_in_the_middle_of_a_period():
    original, restored = Statistics(), Statistics()
    original.add_episodes([1.0, 2.0], [3, 4])
    original.add_environment(REPORTED)
    restored.load_state_dict(original.state_dict())
    for numbers in (original, restored):
        numbers.add_episodes([6.0], [5])
        numbers.add_environment(REPORTED)
    assert restored.reward_spread() == original.reward_spread()
    assert restored.distributions() == original.distributions()
    assert restored.state_dict() == original.state_dict()
    assert restored.period() == original.period()


def test_state_is_not_changed_by_what_comes_later():
    numbers = Statistics()
    numbers.add_episodes([1.0], [3])
    numbers.add_environment(REPORTED)
    state = numbers.state_dict()
    kept = copy.deepcopy(state)
    numbers.add_episodes([9.0], [3])
    numbers.add_environment(REPORTED | {"Game/Latest": [(1.0, Method.MOST_RECENT)]})
    assert (state["returns"], state["recent"]) == ([1.0], [1.0])
    assert state == kept


REPORTED = {
    "Game/Average": [(1.0, Method.AVERAGE), (4.0, Method.AVERAGE)],
    "Game/Latest": [(7.0, Method.MOST_RECENT), (5.0, Method.MOST_RECENT)],
    "Game/Sum": [(1.5, Method.SUM), (2.5, Method.SUM)],
    "Game/Spread": [(1.0, Method.HISTOGRAM), (2.0, Method.HISTOGRAM), (6.0, Method.HISTOGRAM)],
}


def test_what_environments_report_is_aggregated_as_they_ask():
    numbers = Statistics()
    numbers.add_environment(REPORTED)
    assert numbers.distributions() == {"Game/Spread": [1.0, 2.0, 6.0]}
    expected = {"Game/Average": 2.5, "Game/Latest": 5.0, "Game/Sum": 4.0, "Game/Spread": 3.0}
    assert numbers.period() == expected
    assert numbers.period() == numbers.distributions() == {}


def test_ended_episodes_are_taken_once():
    numbers = Statistics()
    numbers.add_episodes([1.0, 2.0], [1, 1])
    numbers.period()
    assert numbers.take_ended() == [1.0, 2.0]
    assert numbers.take_ended() == []


def test_the_values_behind_each_number_are_told_once_with_how_they_become_one():
    mine, other = Statistics(), Statistics()
    mine.add("Losses/Value Loss", 1.0)
    mine.add_episodes([3.0], [5])
    other.add("Losses/Value Loss", 2.0)
    other.add_environment(
        {
            "Goals": [(1.0, Method.SUM), (2.0, Method.SUM)],
            "Level": [(4.0, Method.MOST_RECENT), (5.0, Method.MOST_RECENT)],
            "Speed": [(6.0, Method.HISTOGRAM)],
        }
    )
    mine.add_from([Statistics.of(other.new())])
    assert mine.samples() == {
        "Losses/Value Loss": (Method.AVERAGE, [1.0, 2.0]),
        "Environment/Cumulative Reward": (Method.HISTOGRAM, [3.0]),
        "Policy/Extrinsic Reward": (Method.AVERAGE, [3.0]),
        "Environment/Episode Length": (Method.AVERAGE, [4]),
        "Goals": (Method.SUM, [1.0, 2.0]),
        "Level": (Method.MOST_RECENT, [5.0]),
        "Speed": (Method.HISTOGRAM, [6.0]),
    }
    assert set(mine.samples()) == set(mine.period())
    assert mine.samples() == {}
