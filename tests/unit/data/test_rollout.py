"""Trajectory storage against a slow bookkeeping with one Python list per agent."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.columns import Columns, Field
from pipeline.data.rollout import Trajectories
from pipeline.data.slots import Slots

HORIZON = 4


def _storage() -> Trajectories:
    return Trajectories(Columns({}, [Field(shape=(2,))]), horizon=HORIZON, capacity=8)


def complete(storage, slots, reward, obs, *, ended, interrupted=None, at_end=None) -> list:
    """Complete rows [N], first of episodes that have `ended`; return what each call closes."""
    closed = []
    for over in (True, False):
        mask = np.asarray(ended) == over
        cut = np.zeros(len(slots), np.bool_) if interrupted is None else interrupted
        closed.append(
            storage.complete_transition(
                slots[mask],
                reward[mask],
                [obs[mask]],
                ended=over,
                interrupted=cut[mask] if over else None,
                at_end={name: values[mask] for name, values in (at_end or {}).items()},
            )
        )
    return [result for result in closed if result is not None]


def assert_equal_contents(*storages) -> None:
    """All hold the same closed trajectories."""
    for first, *rest in zip(*map(everything, storages), strict=True):
        for other in rest:
            np.testing.assert_array_equal(first, other)


def _obs(agent: int, time: int) -> list[float]:
    return [float(agent), float(time)]


class Slow:
    """What each agent did, in lists."""

    def __init__(self) -> None:
        self.open: dict[int, list] = {}
        self.closed: list[tuple[list, bool, list[float]]] = []

    def outcome(self, agent, reward, obs, ended, interrupted):
        rows = self.open.get(agent)
        if not rows or rows[-1][1] is not None:
            return
        rows[-1][1] = reward
        if ended or len(rows) == HORIZON:
            self.closed.append((rows, ended and not interrupted, obs))
            self.open[agent] = []


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), n_agents=st.integers(1, 5))
def test_closed_trajectories_equal_those_of_separate_lists(seed, n_agents):
    rng = np.random.default_rng(seed)
    fast, slots, slow = _storage(), Slots(), Slow()
    for time in range(20):
        agents = np.arange(n_agents, dtype=np.int32)[rng.random(n_agents) < 0.8]
        ended = agents[rng.random(len(agents)) < 0.2]
        for group, over in ((ended, True), (agents, False)):
            if not len(group):
                continue
            at = slots.ended("w", group) if over else slots.deciding("w", group)
            fast.reserve(slots.n_slots)
            reward = (group + time / 100).astype(np.float32)
            obs = np.array([_obs(a, time) for a in group], dtype=np.float32)
            interrupted = rng.random(len(group)) < 0.5 if over else None
            fast.complete_transition(at, reward, [obs], ended=over, interrupted=interrupted)
            for i, agent in enumerate(group):
                cut = over and bool(interrupted[i])
                slow.outcome(int(agent), float(reward[i]), obs[i].tolist(), over, cut)
        if len(agents):
            at = slots.deciding("w", agents)
            obs = np.array([_obs(a, time) for a in agents], dtype=np.float32)
            fast.begin_transition(at, [obs], {})
            for i, agent in enumerate(agents):
                slow.open.setdefault(int(agent), []).append([obs[i].tolist(), None])

    rollout = fast.rollout()
    trajectories = []
    for k, (start, length) in enumerate(zip(rollout.starts, rollout.lengths, strict=True)):
        rows = slice(start, start + length)
        pairs = zip(
            rollout.obs[0][rows].tolist(),
            rollout.fields["reward"][rows].tolist(),
            strict=True,
        )
        trajectories.append(
            (
                [list(pair) for pair in pairs],
                bool(rollout.terminated[k]),
                rollout.next_obs[0][k].tolist(),
            )
        )
    key = str
    assert sorted(trajectories, key=key) == sorted(slow.closed, key=key)


def test_rows_after_clearing_are_new_and_open_trajectories_go_on():
    storage, slots = _storage(), np.array([0])
    storage.reserve(1)
    for time in range(HORIZON + 2):
        obs = np.array([[0.0, time]], dtype=np.float32)
        storage.complete_transition(slots, np.array([1.0], np.float32), [obs], ended=False)
        if time == HORIZON:
            assert storage.n_closed == HORIZON
            storage.clear_closed()
        storage.begin_transition(slots, [obs], {})
    last = np.zeros((1, 2), np.float32)
    complete(storage, slots, np.array([5.0], np.float32), last, ended=[True])
    rollout = storage.rollout()
    assert rollout.lengths.tolist() == [2]
    assert rollout.fields["reward"].tolist() == [1.0, 5.0]
    assert rollout.obs[0][:, 1].tolist() == [4.0, 5.0]
    assert rollout.terminated.tolist() == [True]


def test_a_field_without_rows_is_refused_and_rows_without_a_field_are_not_kept():
    storage, slots = _storage(), np.array([0])
    storage.reserve(1)
    obs = np.ones((1, 2), np.float32)
    storage.begin_transition(slots, [obs], {"log_prob": obs})
    sparse = recurrent()
    with pytest.raises(KeyError, match="choice"):
        sparse.begin_transition(slots, [obs], {"memory": np.zeros((1, 3))})
    storage.complete_transition(slots, np.ones(1, np.float32), [obs], ended=True)
    assert set(storage.rollout().fields) == {"reward"}


def test_field_of_every_third_row_is_kept_at_rows_0_3_6_of_each_trajectory():
    columns = Columns({"memory": Field(shape=(2,), every=3)}, [Field(shape=(1,))])
    storage = Trajectories(columns, horizon=8, capacity=4)
    storage.reserve(2)
    lengths = {0: 8, 1: 5}
    for time in range(8):
        slots = np.array([slot for slot, length in lengths.items() if time < length])
        obs = np.full((len(slots), 1), time, np.float32)
        memory = np.stack([[slot, time] for slot in slots]).astype(np.float32)
        storage.begin_transition(slots, [obs], {"memory": memory})
        ended = [lengths[slot] == time + 1 and slot == 1 for slot in slots]
        complete(storage, slots, np.zeros(len(slots), np.float32), obs, ended=ended)
    rollout = storage.rollout()
    assert rollout.lengths.tolist() == [5, 8]
    assert "memory" not in rollout.fields
    short, full = rollout.memory
    assert full.tolist() == [[0, 0], [0, 3], [0, 6]]
    assert short[:2].tolist() == [[1, 0], [1, 3]]


def test_sequences_that_are_not_full_count_as_full_ones_towards_an_update():
    columns = Columns({"memory": Field(shape=(1,), every=2)}, [Field(shape=(2,))])
    storage, slots = Trajectories(columns, horizon=8, capacity=16), np.array([0])
    storage.reserve(1)
    obs, memory = np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32)
    reward = np.array([1.0], np.float32)
    for n_decisions, waiting in ((3, 4), (4, 8), (1, 10)):
        for left in reversed(range(n_decisions)):
            storage.begin_transition(slots, [obs], {"memory": memory})
            complete(storage, slots, reward, obs, ended=[left == 0])
        assert storage.n_closed == waiting
    storage.clear_closed()
    assert storage.n_closed == 0


RECURRENT = Columns(
    {
        "choice": Field(shape=(1,), dtype=np.int64),
        "memory": Field(shape=(3,), every=2),
        "next": Field(shape=(), dtype=np.int64, at_end=True),
    },
    [Field(shape=(2,))],
)


def play(storage: Trajectories, n_steps: int, *, seed: int, n_slots: int = 3) -> list:
    """Play random steps of some agents; return what each step closed. All numbers differ."""
    rng, closed = np.random.default_rng(seed), []
    for _ in range(n_steps):
        slots = np.flatnonzero(rng.random(n_slots) < 0.8)
        n = len(slots)
        storage.begin_transition(
            slots,
            [rng.random((n, 2))],
            {
                "choice": rng.integers(1000, size=(n, 1)),
                "memory": rng.random((n, 3)),
            },
        )
        closed += complete(
            storage,
            slots,
            rng.random(n).astype(np.float32),
            rng.random((n, 2)).astype(np.float32),
            ended=rng.random(n) < 0.2,
            interrupted=rng.random(n) < 0.5,
            at_end={"next": rng.integers(1000, size=n)},
        )
    return closed


def everything(storage: Trajectories) -> list:
    rollout = storage.rollout()
    arrays = [*rollout.obs, *(rollout.fields[name] for name in ("choice", "reward"))]
    arrays += [rollout.starts, rollout.lengths, rollout.terminated, *rollout.next_obs]
    arrays += [rollout.slots, rollout.begins, rollout.ended, rollout.at_end["next"]]
    sequences = -(-rollout.lengths // 2)
    arrays += [memory[:n] for memory, n in zip(rollout.memory, sequences, strict=True)]
    return [array.copy() for array in arrays]


def recurrent(capacity: int = 4) -> Trajectories:
    storage = Trajectories(RECURRENT, horizon=5, capacity=capacity)
    storage.reserve(3)
    return storage


def test_open_trajectories_are_saved_of_the_slots_asked_for_alone():
    storage = recurrent()
    play(storage, 7, seed=1)
    full_state = storage.open_state(3)
    storage.reserve(64)
    for n_slots in (3, 2):
        state = storage.open_state(n_slots)
        for part in ("rows", "slots"):
            for name, values in state[part].items():
                np.testing.assert_array_equal(values, full_state[part][name][:n_slots])


def test_rows_of_a_closed_trajectory_are_not_saved_with_the_open_one_that_follows():
    storage, slots = _storage(), np.array([0])
    storage.reserve(1)
    for time in range(1, HORIZON + 2):
        obs = np.full((1, 2), time, dtype=np.float32)
        storage.begin_transition(slots, [obs], {})
        storage.complete_transition(slots, np.ones(1, np.float32), [obs], ended=False)
    (rows,) = storage.open_state(1)["rows"]["obs_0"]
    assert rows[:, 0].tolist() == [HORIZON + 1, *[0] * (len(rows) - 1)]


def test_storage_taken_up_again_goes_on_as_it_would_have():
    original, dirty = recurrent(), recurrent()
    fresh = Trajectories(RECURRENT, horizon=5, capacity=1)
    play(original, 23, seed=1)
    play(dirty, 9, seed=2)
    closed, opened = original.closed_state(), original.open_state(3)
    went_on = copy.deepcopy(original)
    original.drop_open()  # the copies are copies
    original.clear_closed()
    play(original, 5, seed=6)
    for storage in (fresh, dirty):
        storage.load_closed_state(closed)
        storage.load_open_state(opened)
        assert storage.n_closed == went_on.n_closed > 23
        assert storage.n_held == went_on.n_held
        for name, values in storage.open_state(3)["rows"].items():
            np.testing.assert_array_equal(values, opened["rows"][name])
    returns = [
        [(c.episode_returns, c.episode_lengths) for c in play(storage, 30, seed=3)]
        for storage in (went_on, fresh, dirty)
    ]
    assert returns[0] == returns[1] == returns[2]
    assert_equal_contents(went_on, fresh, dirty)


def test_who_waits_for_a_reward_waits_for_it_in_a_storage_taken_up_again():
    original, fresh, dirty = _storage(), _storage(), _storage()
    obs, reward = np.full((1, 2), 3, np.float32), np.array([0.5, 0.25], np.float32)
    for storage, slot in ((original, 1), (dirty, 0)):
        storage.reserve(2)
        storage.begin_transition(np.array([slot]), [obs], {})
    for storage in (fresh, dirty):
        storage.load_open_state(original.open_state(2))
        assert storage.are_waiting(np.array([1, 0])).tolist() == [True, False]
        ends = {"ended": True, "interrupted": np.array([False, False])}
        storage.complete_transition(
            np.array([0, 1]), reward, [np.zeros((2, 2), np.float32)], **ends
        )
        assert storage.rollout().slots.tolist() == [1]
        assert storage.rollout().fields["reward"].tolist() == [0.25]
        assert storage.rollout().obs[0].tolist() == [[3, 3]]


def test_storage_that_had_room_from_the_start_keeps_the_same_rows():
    grown, roomy = recurrent(capacity=1), recurrent(capacity=1000)
    late = Trajectories(RECURRENT, horizon=5, capacity=7)
    late.reserve(1)
    for storage in (grown, roomy):
        play(storage, 8, seed=7, n_slots=1)
        play(storage, 60, seed=4)
    play(late, 8, seed=7, n_slots=1)
    late.reserve(2)  # with an open trajectory
    late.reserve(3)
    late.reserve(1)
    play(late, 60, seed=4)
    assert_equal_contents(grown, roomy, late)


def test_what_closes_says_how_long_episodes_were_and_what_they_gained():
    storage = _storage()
    storage.reserve(2)
    closed = []
    for time in range(6):
        slots = np.array([0, 1]) if time < 3 else np.array([0])
        obs = np.full((len(slots), 2), time, np.float32)
        storage.begin_transition(slots, [obs], {})
        ended = slots == 1 if time == 2 else np.full(len(slots), time == 5)
        closed += complete(storage, slots, (slots + 1.0).astype(np.float32), obs, ended=ended)
    first, full, last = closed
    assert (first.n_rows, first.episode_returns, first.episode_lengths) == (3, [6.0], [3])
    assert (full.n_rows, full.episode_returns, full.episode_lengths) == (HORIZON, [], [])
    assert (last.n_rows, last.episode_returns, last.episode_lengths) == (2, [6.0], [6])
    assert type(last.episode_lengths[0]) is int
    assert [part.obs[0][:, 0].tolist() for part in (first, full, last)] == [
        [0, 1, 2], [0, 1, 2, 3], [4, 5],
    ]  # fmt: skip
    rollout = storage.rollout()
    assert rollout.slots.tolist() == [1, 0, 0]
    assert rollout.begins.tolist() == [True, True, False]
    assert rollout.ended.tolist() == [True, False, True]
    assert rollout.starts.tolist() == [0, 3, 7]
    assert rollout.n_rows == storage.n_closed == 9


def test_rows_of_open_trajectories_are_counted_and_listed_with_those_that_wait():
    storage = recurrent()
    for number in range(3):
        slots = np.array([0, 2]) if number < 2 else np.array([2])
        values = np.arange(len(slots))[:, None] + 10 * number
        fields = {"memory": np.zeros((len(slots), 3)), "choice": values}
        storage.begin_transition(slots, [np.zeros((len(slots), 2))], fields)
        if number < 2:
            zeros = np.zeros(len(slots), np.float32)
            storage.complete_transition(slots, zeros, [np.zeros((len(slots), 2))], ended=False)
    assert storage.open_values("choice")[:, 0].tolist() == [0, 10, 1, 11, 20]
    assert storage.n_closed == 0
    assert storage.n_held == 2 + 2  # rows that wait for what follows count when they have it
    storage.drop_open(np.array([0]))
    assert storage.open_values("choice")[:, 0].tolist() == [1, 11, 20]
    assert storage.n_held == 2
    storage.drop_open()
    assert storage.n_held == len(storage.open_values("choice")) == 0


def test_an_episode_after_one_that_was_dropped_begins_anew():
    storage, slots = _storage(), np.array([0])
    storage.reserve(1)
    obs = np.zeros((1, 2), np.float32)
    for _ in range(2):
        storage.begin_transition(slots, [obs], {})
        storage.complete_transition(slots, np.ones(1, np.float32), [obs], ended=False)
    storage.drop_open(slots)
    storage.begin_transition(slots, [obs], {})
    closed = storage.complete_transition(
        slots, np.full(1, 5.0, np.float32), [obs], ended=True, interrupted=np.array([True])
    )
    assert (closed.episode_returns, closed.episode_lengths) == ([5.0], [1])
    rollout = storage.rollout()
    assert rollout.begins.tolist() == [True]
    assert rollout.terminated.tolist() == [False]
    assert rollout.lengths.tolist() == [1]
