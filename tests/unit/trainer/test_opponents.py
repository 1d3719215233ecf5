"""Self-play without training: snapshots, opponents, games, ratings, and the learning team."""

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from histories import plain
from steps import decision_steps, terminal_steps

from pipeline.settings.trainer.schema import SelfPlaySettings
from pipeline.trainer.checkpoints.file import digest
from pipeline.trainer.opponents import (
    LATEST,
    Opponent,
    SnapshotPool,
    UnfinishedGames,
    expected_score,
    results,
)
from pipeline.trainer.self_play import SelfPlay, team_of

CPU = torch.device("cpu")
TEAM = "Duel?team=1"


def player(name="A", **settings):
    """A stand-in for a learner with self-play, and with a policy of one weight."""
    past, policy = made(**settings)
    settings = SimpleNamespace(self_play=past.settings, max_steps=10**6)
    player = SimpleNamespace(name=name, policy=policy, snapshot_pool=past, settings=settings)
    player.step, player.learns, player.finished = 0, True, False
    return player


def joined(*names, learners=None, **settings):
    """Self-play of behaviors that have these qualified names, and their learners in order."""
    self_play, players = SelfPlay(), {}
    for qualified in names or ("A?team=0", "A?team=1"):
        name = qualified.partition("?")[0]
        players.setdefault(name, player(name, **settings))
        self_play.join(qualified, players[name])
    return self_play, *players.values()


def end_games(self_play, qualified, learner, *rewards, interrupted=False):
    """Report ended games to `self_play`, each with its reward."""
    ended = terminal_steps([], range(len(rewards)), reward=rewards, interrupted=interrupted)
    self_play.on_step(qualified, learner, [(decision_steps([], []), ended)])


SNAPSHOTS = {"play_against_latest_model_ratio": 0.0}


def made(seed=1, **settings):
    policy = torch.nn.Linear(1, 1, bias=False)
    set_weight(policy, 0.0)
    past = SnapshotPool(lambda: policy, SelfPlaySettings(**settings), seed=seed, device=CPU)
    return past, policy


def set_weight(policy, value):
    with torch.no_grad():
        policy.weight.fill_(value)


def fill(past, policy, n):
    """Take `n` snapshots whose weights and ratings show their number."""
    for number in range(n):
        set_weight(policy, float(number))
        past.ratings[LATEST] = 1000.0 + number
        past.save_if_due(2 * number)


def stored(past):
    return [snapshot["weight"].item() for snapshot in past.snapshots]


def test_first_snapshot_is_taken_at_the_start_and_the_next_after_more_than_save_steps():
    past, policy = made(save_steps=100)
    counts = []
    for step in (7, 50, 107, 108, 208, 209):
        set_weight(policy, float(step))
        past.save_if_due(step)
        counts.append(len(past.snapshots))
    assert counts == [1, 1, 1, 2, 2, 3]
    assert stored(past) == [7.0, 108.0, 209.0]


def test_snapshot_pool_keeps_the_newest_snapshots_with_their_ratings():
    past, policy = made(save_steps=1, window=3)
    fill(past, policy, 5)
    assert stored(past) == [3.0, 4.0, 2.0]
    assert past.ratings == [1003.0, 1004.0, 1002.0, 1004.0]
    assert past.rating == 1004.0


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_opponent_is_the_newest_policy_with_the_configured_probability_or_else_any_snapshot(ratio):
    past, policy = made(save_steps=1, window=4, play_against_latest_model_ratio=ratio)
    fill(past, policy, 4)
    set_weight(policy, 9.0)
    drawn = Counter()
    for _ in range(2000):
        past.swap([TEAM])
        opponent = past.opponents[TEAM]
        weight = opponent.policy.weight.item()
        assert weight == (9.0 if opponent.rating_index == LATEST else float(opponent.rating_index))
        drawn[opponent.rating_index] += 1
    assert drawn[LATEST] / 2000 == pytest.approx(ratio, abs=0.04)
    for place in range(4):
        assert drawn[place] / 2000 == pytest.approx((1 - ratio) / 4, abs=0.04)


def test_opponents_of_teams_are_drawn_independently_and_depend_on_the_seed():
    def draws(seed):
        past, policy = made(seed=seed, save_steps=1, window=3, **SNAPSHOTS)
        fill(past, policy, 3)
        teams, pairs = [TEAM, "Duel?team=2"], []
        for _ in range(60):
            past.swap(teams)
            drawn = [past.opponents[team].rating_index for team in teams]
            assert [past.opponents[team].policy.weight.item() for team in teams] == drawn
            pairs.append(tuple(drawn))
        assert len(set(pairs)) == 9
        return pairs

    assert draws(1) == draws(1) != draws(2)


def played(window=3, n=5):
    past, policy = made(save_steps=1, window=window, **SNAPSHOTS)
    fill(past, policy, n)
    past.swap([TEAM, "Duel?team=2"])
    past.swap([TEAM])
    past.ghost_steps = 17
    past.last_change = 5
    return past


@pytest.mark.parametrize(
    ("n", "window", "weights", "ratings"),
    [
        (5, 2, [3.0, 4.0], [1003.0, 1004.0, 1004.0]),
        (5, 5, [2.0, 3.0, 4.0], [1002.0, 1003.0, 1004.0, 1200.0, 1200.0, 1004.0]),
        (2, 1, [1.0], [1001.0, 1001.0]),
    ],
)
def test_snapshot_pool_restored_with_another_window_keeps_the_newest_snapshots(
    n, window, weights, ratings
):
    restored, policy = made(window=window, save_steps=1)
    restored.load_state_dict(played(n=n).state_dict())
    assert stored(restored) == weights
    assert restored.ratings == ratings
    assert all(opponent.rating_index < len(weights) for opponent in restored.opponents.values())
    set_weight(policy, 9.0)
    restored.save_if_due(100)
    assert 9.0 in stored(restored)
    assert len(restored.snapshots) == min(len(weights) + 1, window)


@pytest.mark.parametrize("drawn", range(3))
def test_opponent_keeps_the_rating_of_its_snapshot_after_the_window_became_smaller(drawn):
    past = played(n=5)
    past.opponents[TEAM].play(past.snapshots[drawn], drawn)
    restored, _ = made(window=2, save_steps=1)
    restored.load_state_dict(past.state_dict())
    opponent = restored.opponents[TEAM]
    weight = opponent.policy.weight.item()
    assert weight == stored(past)[drawn]
    expected = stored(restored).index(weight) if weight in stored(restored) else 0
    assert opponent.rating_index == expected


def test_saved_state_of_a_snapshot_pool_does_not_change_later():
    past = played()
    for opponent in past._opponent_by_team.values():
        torch.rand(3, generator=opponent._stream)
    state = past.state_dict()
    kept = copy.deepcopy(state)
    restored, policy = made(seed=8, save_steps=1, window=3)
    restored.load_state_dict(state)
    for pool in (past, restored):
        streams = [opponent._stream.get_state() for opponent in pool._opponent_by_team.values()]
        for stream, team in zip(streams, (TEAM, "Duel?team=2"), strict=True):
            assert torch.equal(stream, kept["opponents"][team]["stream"])
    for pool in (restored, past):
        set_weight(policy, 77.0)
        pool.save_if_due(10**6)
        pool.ratings[0] = 5.0
        pool.opponents[TEAM].policy.weight.data.fill_(88.0)
        pool.swap(["Duel?team=2"])
    assert 77.0 in stored(restored)
    assert 77.0 not in stored(past)
    assert digest(state) == digest(kept)


def test_opponents_have_separate_random_streams_and_get_the_memory_of_the_policy():
    class Acts(torch.nn.Module):
        memory_size = 2

        def act(self, _obs, _mask, stream, memory):
            return torch.rand(3, generator=stream).tolist(), memory

    device = torch.device("cpu")
    memory = np.arange(6.0).reshape(2, 3)
    first, second = (
        Opponent(Acts(), seed=1, device=device, team=team).act([], None, memory) for team in "ab"
    )
    assert first[0] != second[0]
    assert first[1].tolist() == [[0.0, 1.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("rating", "opponent", "expected"),
    [(1200, 1200, 0.5), (1600, 1200, 10 / 11), (1200, 1600, 1 / 11), (1400, 1300, 0.6400649998)],
)
def test_expected_score_follows_the_elo_formula(rating, opponent, expected):
    ours, theirs = 10 ** (rating / 400), 10 ** (opponent / 400)
    assert expected_score(rating, opponent) == pytest.approx(ours / (ours + theirs))
    assert expected_score(rating, opponent) == pytest.approx(expected)
    assert expected_score(rating, opponent) + expected_score(opponent, rating) == pytest.approx(1)


def test_result_of_a_game_is_the_sign_of_the_last_reward_plus_the_last_group_reward():
    terminal = terminal_steps(
        [], range(5), reward=[0.3, -2, 0, 1, 1], group_reward=[0, 0, 0, -1, -3]
    )
    assert results(terminal).tolist() == [1.0, 0.0, 0.5, 0.5, 0.0]


def over(groups, source, ids, group_id):
    ended = terminal_steps([], ids, group_id=group_id)
    return groups.is_game_over(source, ended).tolist()


def test_game_of_a_group_is_over_when_its_last_agent_ends():
    groups = UnfinishedGames()
    groups.record("alone", decision_steps([], [1, 2]))
    assert over(groups, "alone", [1], [0]) == [True]
    groups.record("left", decision_steps([], [1, 2, 3, 4], group_id=[7, 7, 8, 8]))
    assert over(groups, "left", [1, 3, 4], [7, 8, 8]) == [False, True, True]
    groups.record("left", decision_steps([], [2], group_id=[7]))
    assert over(groups, "left", [2], [7]) == [True]


def test_group_member_that_is_missing_in_a_message_still_plays():
    groups = UnfinishedGames()
    for ids, group in (([1, 2], 7), ([1], 7), ([5], 9)):
        groups.record("left", decision_steps([], ids, group_id=group))
    assert over(groups, "left", [1], [7]) == [False]
    assert over(groups, "right", [1], [7]) == [True]


@pytest.mark.parametrize(("later", "ended"), [([7, 7], [False, True]), ([7, 8], [True, True])])
def test_agent_that_changes_its_group_plays_for_the_new_group(later, ended):
    groups = UnfinishedGames()
    for now in ([7, 7], later):
        groups.record("left", decision_steps([], [1, 2], group_id=now))
    assert over(groups, "left", [1], later[:1]) == ended[:1]
    assert over(groups, "left", [2], later[1:]) == ended[1:]


@pytest.mark.parametrize(
    ("qualified", "team"),
    [
        ("A?team=0", 0),
        ("A?team=12", 12),
        ("A", 0),
        ("A?x=1&team=3", 3),
        ("A?team=-1", -1),
        ("A?team=b", 0),
    ],
)
def test_team_number_is_read_from_the_qualified_behavior_name(qualified, team):
    assert team_of(qualified) == team


def test_game_of_each_ended_agent_changes_the_ratings_of_the_policy_and_its_opponent():
    self_play, learner = joined(window=2, **SNAPSHOTS)
    assert self_play.learning == 0
    past = learner.snapshot_pool
    assert past.opponents["A?team=1"].rating_index == 0
    past.ratings[:] = [1300.0, 1100.0, 1200.0]
    end_games(self_play, "A?team=0", learner, 2.0, -1.0, 0.0)
    rating, other = 1200.0, 1300.0
    for result in (1.0, 0.0, 0.5):
        change = result - expected_score(rating, other)
        rating, other = rating + change, other - change
    assert past.ratings == pytest.approx([other, 1100.0, rating])


def test_interrupted_games_and_games_of_opponents_are_not_rated():
    self_play, learner = joined(**SNAPSHOTS)
    before = list(learner.snapshot_pool.ratings)
    end_games(self_play, "A?team=0", learner, 1.0, interrupted=True)
    end_games(self_play, "A?team=1", learner, 1.0)
    assert learner.snapshot_pool.ratings == before
    end_games(self_play, "A?team=0", learner, 1.0)
    assert learner.snapshot_pool.ratings != before
    self_play, learner = joined(play_against_latest_model_ratio=1.0)
    end_games(self_play, "A?team=0", learner, 1.0)
    assert learner.snapshot_pool.ratings == pytest.approx([1200.0] * 11)


def test_game_is_rated_even_if_a_new_game_with_its_group_id_begins_in_the_same_message():
    """In Unity the agents of the next game have other ids, and often the same group id."""
    self_play, learner = joined(**SNAPSHOTS)
    asking = decision_steps([], [1, 2], group_id=[7, 7])
    self_play.on_step("A?team=0", learner, [(asking, terminal_steps([], []))])
    ended = terminal_steps([], [1, 2], group_id=[7, 7], group_reward=1.0)
    again = decision_steps([], [3, 4], group_id=[7, 7])
    self_play.on_step("A?team=0", learner, [(again, ended)])
    assert learner.snapshot_pool.rating > 1200.0


def test_game_of_two_behaviors_changes_the_rating_of_the_played_snapshot():
    self_play, pick, aim = joined("Pick?team=0", "Aim?team=1", window=2, initial_elo=1300.0)
    assert pick.snapshot_pool.rating == 1300.0
    aim.snapshot_pool.save_if_due(10**6)
    aim.snapshot_pool.opponents["Aim?team=1"].play(aim.snapshot_pool.snapshots[1], 1)
    aim.snapshot_pool.ratings[:] = [1400.0, 1500.0, 1600.0]
    end_games(self_play, "Pick?team=0", pick, 1.0)
    gain = 1 - expected_score(1300.0, 1500.0)
    assert pick.snapshot_pool.ratings == [1300.0, 1300.0, pytest.approx(1300.0 + gain)]
    assert aim.snapshot_pool.ratings == [1400.0, pytest.approx(1500.0 - gain), 1600.0]


def test_three_teams_learn_in_turn_and_opponents_share_the_rating_change():
    names = [f"A?team={team}" for team in (2, 0, 1)]
    self_play, learner = joined(*names, team_change=10, **SNAPSHOTS)
    assert self_play.learning == 2
    assert set(learner.snapshot_pool.opponents) == {"A?team=0", "A?team=1"}
    end_games(self_play, "A?team=2", learner, 1.0)
    assert learner.snapshot_pool.rating == pytest.approx(1200.5)
    assert learner.snapshot_pool.ratings[0] == pytest.approx(1199.5)
    learning = []
    for step in (10, 11, 21, 22, 33):
        learner.step = step
        changed = self_play.advance()
        learning.append((changed, self_play.learning))
        assert f"A?team={self_play.learning}" not in learner.snapshot_pool.opponents
        assert len(learner.snapshot_pool.opponents) == 2
    assert learning == [(False, 2), (True, 0), (False, 0), (True, 1), (True, 2)]


def test_due_snapshot_is_taken_before_opponents_are_drawn():
    self_play, learner = joined(window=1, save_steps=10, team_change=10, **SNAPSHOTS)
    learner.policy.weight.data.fill_(5.0)
    learner.step = 11
    assert self_play.advance()
    assert learner.snapshot_pool.opponents["A?team=0"].policy.weight.item() == 5.0


def test_team_change_counts_steps_of_the_learning_team_since_its_turn_began():
    self_play, pick, aim = joined("Pick?team=0", "Aim?team=1", team_change=10)
    turns = []
    for pick.step, aim.step in ((11, 0), (11, 10), (11, 11), (11, 11), (21, 11), (22, 11)):
        turns.append((self_play.advance(), self_play.learning))
    assert turns == [(True, 1), (False, 1), (True, 0), (False, 0), (False, 0), (True, 1)]
    # It is sufficient that one of a team's two behaviors has made enough steps.
    self_play, _, mate = joined("Pick?team=0", "Mate?team=0", "Pick?team=1", team_change=10)
    mate.step = 11
    assert self_play.advance()


def test_behaviors_of_a_team_learn_together_until_all_have_finished():
    names = [f"{name}?team={team}" for team in (0, 1) for name in "SK"]
    self_play, striker, keeper = joined(*names, team_change=10)

    def opponents():
        return [[*learner.snapshot_pool.opponents] for learner in (striker, keeper)]

    assert opponents() == [["S?team=1"], ["K?team=1"]]
    striker.step = keeper.step = 11
    assert self_play.advance()
    assert opponents() == [["S?team=0"], ["K?team=0"]]
    assert not self_play.advance()
    self_play, striker, keeper = joined("S?team=0", "K?team=0", "K?team=1")
    striker.finished = True
    assert not self_play.advance()
    assert self_play.learning == 0
    keeper.finished = True  # the other team has only this behavior
    assert not self_play.advance()
    assert self_play.learning == 0


def test_opponents_are_drawn_at_a_team_change_and_after_swap_steps():
    self_play, learner = joined(team_change=100, swap_steps=14)
    asking = decision_steps([], range(7)), terminal_steps([], [])
    swaps = []
    for _ in range(6):
        self_play.on_step("A?team=1", learner, [asking])
        self_play.advance()
        swaps.append(learner.snapshot_pool.last_swap)
    assert learner.snapshot_pool.ghost_steps == 42
    assert swaps == [0, 0, 21, 21, 21, 42]
    learner.step = 101
    self_play.on_step("A?team=1", learner, [asking])
    assert self_play.advance()
    assert learner.snapshot_pool.last_swap == 49


def test_decisions_of_an_opponent_in_all_workers_count_as_ghost_steps_of_its_own_behavior():
    self_play, pick, aim = joined("Pick?team=0", "Aim?team=1", swap_steps=5, **SNAPSHOTS)
    assert [[*learner.snapshot_pool.opponents] for learner in (pick, aim)] == [[], ["Aim?team=1"]]
    ends = terminal_steps([], [9], reward=1.0)
    steps = [(decision_steps([], [0, 1]), ends), (decision_steps([], [0, 1, 2]), ends)]
    self_play.on_step("Aim?team=1", aim, steps)
    assert (pick.snapshot_pool.ghost_steps, aim.snapshot_pool.ghost_steps) == (0, 5)
    assert (pick.snapshot_pool.rating, aim.snapshot_pool.rating) == (1200.0, 1200.0), (
        "a ghost's games do not change ratings"
    )
    self_play.on_step("Pick?team=0", pick, steps)
    assert (pick.snapshot_pool.ghost_steps, aim.snapshot_pool.ghost_steps) == (0, 5)
    assert pick.snapshot_pool.rating > 1200.0 > aim.snapshot_pool.ratings[0]


def test_each_behavior_draws_opponents_after_enough_ghost_steps_of_its_own():
    names = [f"{name}?team={team}" for team in (0, 1) for name in ("One", "Two")]
    self_play, one, two = joined(*names, swap_steps=5)
    for steps, swapped in (((5, 6), (0, 6)), ((6, 11), (6, 6))):
        one.snapshot_pool.ghost_steps, two.snapshot_pool.ghost_steps = steps
        assert not self_play.advance()
        assert (one.snapshot_pool.last_swap, two.snapshot_pool.last_swap) == swapped


def test_games_of_different_workers_end_separately():
    self_play, learner = joined(**SNAPSHOTS)
    nobody = terminal_steps([], [])
    left, right = (decision_steps([], ids, group_id=ids[0]) for ids in ([1, 2], [3, 4]))
    self_play.on_step("A?team=0", learner, [(left, nobody), (right, nobody)])
    rating = learner.snapshot_pool.rating
    one = terminal_steps([], [3], group_id=3, reward=1.0)
    still = decision_steps([], [4], group_id=3)
    self_play.on_step("A?team=0", learner, [(left, nobody), (still, one)])
    assert learner.snapshot_pool.rating == rating, "the ended agent's mate plays on"
    both = terminal_steps([], [1, 2], group_id=1, reward=1.0)
    self_play.on_step("A?team=0", learner, [(left, both), (still, nobody)])
    assert learner.snapshot_pool.rating > rating


@pytest.mark.parametrize("learning", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_teams_that_join_a_resumed_run_do_not_change_its_opponents(learning, order):
    changing = {"team_change": 10, "window": 4, "save_steps": 5}
    self_play, learner = joined("A?team=0", "A?team=1", "A?team=2", **changing)
    while self_play.learning != learning or learner.step < 40:
        learner.step += 7
        self_play.advance()
    for opponent in learner.snapshot_pool.opponents.values():
        opponent.policy.weight.data.fill_(0.25)  # of a snapshot that has left the ring
    resumed, resumed_learner = SelfPlay(), player(**changing)
    resumed_learner.step = learner.step
    resumed_learner.snapshot_pool.load_state_dict(learner.snapshot_pool.state_dict())
    resumed.restore({"self_play": self_play.state_dict()})
    for team in order:
        resumed.join(f"A?team={team}", resumed_learner)
    resumed.advance()
    self_play.advance()
    assert resumed.state_dict() == self_play.state_dict()
    assert plain(resumed_learner.snapshot_pool.state_dict()) == plain(
        learner.snapshot_pool.state_dict()
    )


def test_resumed_run_draws_opponents_again_if_an_opponent_plays_for_the_learning_team():
    """The older of two resume files may have the other team as the learning team."""
    _, learner = joined()
    resumed, resumed_learner = SelfPlay(), player()
    resumed_learner.snapshot_pool.load_state_dict(learner.snapshot_pool.state_dict())
    resumed.restore({"self_play": {"learning": 1, "order": [0, 1]}})
    for team in (0, 1):
        resumed.join(f"A?team={team}", resumed_learner)
    assert list(resumed_learner.snapshot_pool.opponents) == ["A?team=0"]
