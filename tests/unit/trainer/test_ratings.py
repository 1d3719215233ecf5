"""ELO's formulas, what a game's result is, and when a group's game is over."""

from __future__ import annotations

import pytest
from steps import decision_steps, terminal_steps

from pipeline.trainer.opponents import UnfinishedGames, expected_score, results


@pytest.mark.parametrize(
    ("rating", "opponent", "expected"),
    [(1200, 1200, 0.5), (1600, 1200, 10 / 11), (1200, 1600, 1 / 11), (1400, 1300, 0.6400649998)],
)
def test_expected_score_is_the_one_of_elo(rating, opponent, expected):
    ours, theirs = 10 ** (rating / 400), 10 ** (opponent / 400)
    assert expected_score(rating, opponent) == pytest.approx(ours / (ours + theirs))
    assert expected_score(rating, opponent) == pytest.approx(expected)
    assert expected_score(rating, opponent) + expected_score(opponent, rating) == pytest.approx(1)


def test_result_is_the_sign_of_the_last_reward_with_that_of_the_group():
    terminal = terminal_steps(
        [], range(5), reward=[0.3, -2, 0, 1, 1], group_reward=[0, 0, 0, -1, -3]
    )
    assert results(terminal).tolist() == [1.0, 0.0, 0.5, 0.5, 0.0]


def test_agents_without_a_group_have_games_of_their_own():
    groups = UnfinishedGames()
    groups.plays("left", decision_steps([], [1, 2]))
    assert groups.whole("left", terminal_steps([], [1])).tolist() == [True]


def test_a_group_has_ended_with_its_last_agent():
    groups = UnfinishedGames()
    groups.plays("left", decision_steps([], [1, 2, 3, 4], group_id=[7, 7, 8, 8]))
    assert groups.whole("left", terminal_steps([], [1, 3, 4], group_id=[7, 8, 8])).tolist() == [
        False,
        True,
        True,
    ]
    groups.plays("left", decision_steps([], [2], group_id=[7]))
    assert groups.whole("left", terminal_steps([], [2], group_id=[7])).tolist() == [True]


def test_a_mate_that_does_not_ask_in_a_message_still_plays():
    groups = UnfinishedGames()
    groups.plays("left", decision_steps([], [1, 2], group_id=[7, 7]))
    groups.plays("left", decision_steps([], [1], group_id=[7]))
    groups.plays("left", decision_steps([], [5], group_id=[9]))
    assert groups.whole("left", terminal_steps([], [1], group_id=[7])).tolist() == [False]
    assert groups.whole("right", terminal_steps([], [1], group_id=[7])).tolist() == [True]


def test_groups_that_are_taken_up_know_who_plays():
    groups, restored = UnfinishedGames(), UnfinishedGames()
    groups.plays(("Team", 0), decision_steps([], [1, 2], group_id=[7, 7]))
    restored.load_state_dict(groups.state_dict())
    assert restored.whole(("Team", 0), terminal_steps([], [1], group_id=[7])).tolist() == [False]
    groups.forget(lambda source: source[1] == 0)
    assert groups.whole(("Team", 0), terminal_steps([], [1], group_id=[7])).tolist() == [True]


@pytest.mark.parametrize(("later", "over"), [([7, 7], [False, True]), ([7, 8], [True, True])])
def test_agents_that_ask_again_play_for_the_group_that_they_are_in_now(later, over):
    groups = UnfinishedGames()
    for now in ([7, 7], later):
        groups.plays("left", decision_steps([], [1, 2], group_id=now))
    assert groups.whole("left", terminal_steps([], [1], group_id=later[:1])).tolist() == over[:1]
    assert groups.whole("left", terminal_steps([], [2], group_id=later[1:])).tolist() == over[1:]
