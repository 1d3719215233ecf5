"""Trajectory storage against a slow bookkeeping with one Python list per agent."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.rollout import Field, Trajectories
from pipeline.data.slots import Slots

HORIZON = 4


def _storage() -> Trajectories:
    return Trajectories({"obs_0": Field(shape=(2,))}, n_obs=1, horizon=HORIZON, capacity=8)


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


@settings(deadline=None, max_examples=50)
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
            fast.outcome(at, reward, [obs], ended=over, interrupted=interrupted)
            for i, agent in enumerate(group):
                cut = over and bool(interrupted[i])
                slow.outcome(int(agent), float(reward[i]), obs[i].tolist(), over, cut)
        if len(agents):
            at = slots.deciding("w", agents)
            obs = np.array([_obs(a, time) for a in agents], dtype=np.float32)
            fast.decide(at, {"obs_0": obs})
            for i, agent in enumerate(agents):
                slow.open.setdefault(int(agent), []).append([obs[i].tolist(), None])

    rollout = fast.rollout()
    found = []
    for k, (start, length) in enumerate(zip(rollout.starts, rollout.lengths, strict=True)):
        rows = slice(start, start + length)
        pairs = zip(
            rollout.fields["obs_0"][rows].tolist(),
            rollout.fields["reward"][rows].tolist(),
            strict=True,
        )
        found.append(
            (
                [list(pair) for pair in pairs],
                bool(rollout.terminated[k]),
                rollout.next_obs[0][k].tolist(),
            )
        )
    key = str
    assert sorted(found, key=key) == sorted(slow.closed, key=key)


def test_rows_after_clearing_are_new_and_open_trajectories_go_on():
    storage, slots = _storage(), np.array([0])
    storage.reserve(1)
    for time in range(HORIZON + 2):
        obs = np.array([[0.0, time]], dtype=np.float32)
        storage.outcome(slots, np.array([1.0], np.float32), [obs], ended=False)
        if time == HORIZON:
            assert storage.n_closed == HORIZON
            storage.clear_closed()
        storage.decide(slots, {"obs_0": obs})
    storage.outcome(
        slots,
        np.array([5.0], np.float32),
        [np.zeros((1, 2), np.float32)],
        ended=True,
        interrupted=np.array([False]),
    )
    rollout = storage.rollout()
    assert rollout.lengths.tolist() == [2]
    assert rollout.fields["reward"].tolist() == [1.0, 5.0]
    assert rollout.fields["obs_0"][:, 1].tolist() == [4.0, 5.0]
    assert rollout.terminated.tolist() == [True]


def test_agents_that_left_give_their_slots_to_new_ones():
    slots = Slots()
    first = slots.deciding("w", np.array([10, 11], dtype=np.int32))
    slots.release("w", [10])
    later = slots.deciding("w", np.array([11, 12], dtype=np.int32))
    assert later.tolist() == [first[1], first[0]]
    assert slots.n_slots == 2


def test_equal_agent_ids_of_two_workers_have_different_slots():
    slots = Slots()
    ids = np.array([0, 1], dtype=np.int32)
    assert not set(slots.deciding("a", ids)) & set(slots.deciding("b", ids))


def test_dropping_open_trajectories_leaves_closed_ones():
    storage, slots = _storage(), np.array([0, 1])
    storage.reserve(2)
    obs = np.zeros((2, 2), np.float32)
    storage.decide(slots, {"obs_0": obs})
    storage.outcome(
        slots[:1], np.ones(1, np.float32), [obs[:1]], ended=True, interrupted=np.array([True])
    )
    storage.drop_open()
    assert storage.outcome(slots, np.ones(2, np.float32), [obs], ended=False) is None
    assert storage.n_closed == 1


def test_field_of_every_third_row_is_kept_at_rows_0_3_6_of_each_trajectory():
    fields = {"obs_0": Field(shape=(1,)), "memory": Field(shape=(2,), every=3)}
    storage = Trajectories(fields, n_obs=1, horizon=8, capacity=4)
    storage.reserve(2)
    lengths = {0: 8, 1: 5}
    for time in range(8):
        slots = np.array([slot for slot, length in lengths.items() if time < length])
        obs = np.full((len(slots), 1), time, np.float32)
        memory = np.stack([[slot, time] for slot in slots]).astype(np.float32)
        storage.decide(slots, {"obs_0": obs, "memory": memory})
        ended = np.array([lengths[slot] == time + 1 and slot == 1 for slot in slots])
        for over in (True, False):
            some = ended == over
            interrupted = np.zeros(int(some.sum()), np.bool_) if over else None
            zeros = np.zeros(int(some.sum()), np.float32)
            storage.outcome(slots[some], zeros, [obs[some]], ended=over, interrupted=interrupted)
    rollout = storage.rollout()
    assert rollout.lengths.tolist() == [5, 8]
    assert "memory" not in rollout.fields
    short, full = rollout.memory
    assert full.tolist() == [[0, 0], [0, 3], [0, 6]]
    assert short[:2].tolist() == [[1, 0], [1, 3]]


def test_storage_without_such_a_field_has_no_memory():
    assert _storage().rollout().memory is None


def test_sequences_that_are_not_full_count_as_full_ones_towards_an_update():
    fields = {"obs_0": Field(shape=(2,)), "memory": Field(shape=(1,), every=2)}
    storage, slots = Trajectories(fields, n_obs=1, horizon=8, capacity=16), np.array([0])
    storage.reserve(1)
    obs, memory = np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32)
    reward = np.array([1.0], np.float32)
    for n_decisions, waiting in ((3, 4), (4, 8), (1, 10)):
        for left in reversed(range(n_decisions)):
            storage.decide(slots, {"obs_0": obs, "memory": memory})
            interrupted = np.array([False]) if left == 0 else None
            storage.outcome(slots, reward, [obs], ended=left == 0, interrupted=interrupted)
        assert storage.n_closed == waiting
    storage.clear_closed()
    assert storage.n_closed == 0
