"""The ring of snapshots: when one is taken, which are kept, who is drawn, with which rating."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from pipeline.settings.schema import SelfPlaySettings
from pipeline.trainer.checkpoints.file import digest
from pipeline.trainer.opponents import LATEST, SnapshotPool

CPU = torch.device("cpu")
TEAM = "Duel?team=1"


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
        past.save_due(2 * number)


def stored(past):
    return [snapshot["weight"].item() for snapshot in past.snapshots]


def test_first_snapshot_is_taken_at_the_start_and_the_next_after_more_than_save_steps():
    past, policy = made(save_steps=100)
    counts = []
    for step in (7, 50, 107, 108, 208, 209):
        set_weight(policy, float(step))
        past.save_due(step)
        counts.append(len(past.snapshots))
    assert counts == [1, 1, 1, 2, 2, 3]
    assert stored(past) == [7.0, 108.0, 209.0]


def test_ring_keeps_the_newest_and_each_with_the_rating_it_had():
    past, policy = made(save_steps=1, window=3)
    fill(past, policy, 5)
    assert stored(past) == [3.0, 4.0, 2.0]
    assert past.ratings == [1003.0, 1004.0, 1002.0, 1004.0]
    assert past.rating == 1004.0


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_latest_is_drawn_with_its_ratio_and_else_each_snapshot_alike(ratio):
    past, policy = made(save_steps=1, window=4, play_against_latest_model_ratio=ratio)
    fill(past, policy, 4)
    set_weight(policy, 9.0)
    drawn = Counter()
    for _ in range(2000):
        past.swap([TEAM])
        opponent = past.opponents[TEAM]
        weight = opponent.policy.weight.item()
        assert weight == (9.0 if opponent.drawn == LATEST else float(opponent.drawn))
        drawn[opponent.drawn] += 1
    assert drawn[LATEST] / 2000 == pytest.approx(ratio, abs=0.04)
    for place in range(4):
        assert drawn[place] / 2000 == pytest.approx((1 - ratio) / 4, abs=0.04)


def test_draws_depend_on_the_seed_only():
    def draws(seed):
        past, policy = made(seed=seed, save_steps=1, window=9)
        fill(past, policy, 9)
        numbers = []
        for _ in range(20):
            past.swap([TEAM])
            numbers.append(past.opponents[TEAM].drawn)
        return numbers

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def played(window=3, n=5):
    past, policy = made(save_steps=1, window=window, play_against_latest_model_ratio=0.0)
    fill(past, policy, n)
    past.swap([TEAM, "Duel?team=2"])
    past.swap([TEAM])
    past.ghost_steps = 17
    past.last_change = 5
    return past


def test_restored_past_goes_on_as_the_other():
    past = played()
    restored, policy = made(seed=8, save_steps=1, window=3, play_against_latest_model_ratio=0.0)
    set_weight(policy, 4.0)
    restored.load_state_dict(past.state_dict())
    assert list(restored.opponents) == [TEAM]
    for pool in (past, restored):
        assert pool.ghost_steps == 17
        assert pool.last_change == 5
        assert pool.last_save == 8
    for step in (9, 11, 13, 15):
        trace = []
        for pool in (past, restored):
            pool.save_due(step)
            pool.swap([TEAM, "Duel?team=2"])
            drawn = {team: playing.drawn for team, playing in pool.opponents.items()}
            weights = [playing.policy.weight.item() for playing in pool.opponents.values()]
            trace.append((pool.ratings, len(pool.snapshots), drawn, weights))
        assert trace[0] == trace[1]


@pytest.mark.parametrize(
    ("n", "window", "weights", "ratings"),
    [
        (5, 2, [3.0, 4.0], [1003.0, 1004.0, 1004.0]),
        (5, 5, [2.0, 3.0, 4.0], [1002.0, 1003.0, 1004.0, 1200.0, 1200.0, 1004.0]),
        (2, 1, [1.0], [1001.0, 1001.0]),
    ],
)
def test_another_window_keeps_the_newest_snapshots(n, window, weights, ratings):
    restored, policy = made(window=window, save_steps=1)
    restored.load_state_dict(played(n=n).state_dict())
    assert stored(restored) == weights
    assert restored.ratings == ratings
    assert all(opponent.drawn < len(weights) for opponent in restored.opponents.values())
    set_weight(policy, 9.0)
    restored.save_due(100)
    assert 9.0 in stored(restored)
    assert len(restored.snapshots) == min(len(weights) + 1, window)


@pytest.mark.parametrize("drawn", range(3))
def test_in_another_window_an_opponent_keeps_the_rating_of_its_snapshot_where_that_is_kept(drawn):
    past = played(n=5)
    past.opponents[TEAM].play(past.snapshots[drawn], drawn)
    restored, _ = made(window=2, save_steps=1)
    restored.load_state_dict(past.state_dict())
    opponent = restored.opponents[TEAM]
    weight = opponent.policy.weight.item()
    assert weight == stored(past)[drawn]
    expected = stored(restored).index(weight) if weight in stored(restored) else 0
    assert opponent.drawn == expected


def test_each_team_s_opponent_is_drawn_and_plays_by_itself():
    past, policy = made(save_steps=1, window=3, play_against_latest_model_ratio=0.0)
    fill(past, policy, 3)
    teams, pairs = [TEAM, "Duel?team=2"], set()
    for _ in range(60):
        past.swap(teams)
        drawn = [past.opponents[team].drawn for team in teams]
        assert [past.opponents[team].policy.weight.item() for team in teams] == drawn
        pairs.add(tuple(drawn))
    assert len(pairs) == 9


def test_a_state_stays_as_it_is_and_has_the_streams_of_teams_that_learn_now():
    past = played()
    for opponent in past._players.values():
        torch.rand(3, generator=opponent._stream)
    state = past.state_dict()
    kept = copy.deepcopy(state)
    restored, policy = made(seed=8, save_steps=1, window=3)
    restored.load_state_dict(state)
    for pool in (past, restored):
        streams = [opponent._stream.get_state() for opponent in pool._players.values()]
        for stream, team in zip(streams, (TEAM, "Duel?team=2"), strict=True):
            assert torch.equal(stream, kept["opponents"][team]["stream"])
    for pool in (restored, past):
        set_weight(policy, 77.0)
        pool.save_due(10**6)
        pool.ratings[0] = 5.0
        pool.opponents[TEAM].policy.weight.data.fill_(88.0)
        pool.swap(["Duel?team=2"])
    assert 77.0 in stored(restored)
    assert 77.0 not in stored(past)
    assert digest(state) == digest(kept)
