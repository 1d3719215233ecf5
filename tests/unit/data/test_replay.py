"""The replay compared with a slow, obvious version."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from pipeline.data.columns import Columns, Field
from pipeline.data.replay import Replay
from pipeline.data.rollout import Rollout

OBS = [Field(shape=(2,)), Field(shape=(1, 2, 2))]
FIELDS = {"continuous": Field(shape=(1,)), "discrete": Field(shape=(2,), dtype=np.int64)}
PLAIN = Columns(FIELDS, OBS)
L = 3
RECURRENT = Columns({**FIELDS, "memory": Field(shape=(4,), every=L)}, OBS)


def twenty(*, memory: bool = False) -> Replay:
    """An empty replay of 20 rows."""
    if memory:
        return Replay(RECURRENT, capacity=20, sequence_length=L)
    return Replay(PLAIN, capacity=20)


def assert_alike(first: Replay, second: Replay) -> None:
    """Assert that both replays hold and draw equal rows."""
    drawn = [as_rows(replay.sample(np.random.default_rng(5), 90)) for replay in (first, second)]
    assert [key(row) for row in drawn[0]] == [key(row) for row in drawn[1]]
    for name, values in first.state_dict().items():
        np.testing.assert_array_equal(values, second.state_dict()[name])


def rollout(lengths, rng, *, memory=False) -> Rollout:
    """Return a rollout of trajectories with random rows."""
    lengths = np.asarray(lengths)
    n, k = int(lengths.sum()), len(lengths)

    def numbers(*shape):
        return rng.random(shape).astype(np.float32)

    pieces = -(-max(lengths.max(), L) // L)
    obs = [numbers(n, 2), numbers(n, 1, 2, 2)]
    fields = {"continuous": numbers(n, 1), "discrete": rng.integers(0, 1000, (n, 2))}
    return Rollout(
        obs=obs,
        fields={**fields, "reward": numbers(n)},
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        terminated=rng.random(k) < 0.5,
        next_obs=[numbers(k, 2), numbers(k, 1, 2, 2)],
        memory=numbers(k, pieces, 4) if memory else None,
    )


class Slow:
    """A replay in which every row has its own copy of the next observation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[tuple] = []

    def add(self, new: Rollout) -> None:
        for k, (start, length) in enumerate(zip(new.starts, new.lengths, strict=True)):
            for r in range(start, start + length):
                last = r == start + length - 1
                next_obs = [new.next_obs[i][k] if last else new.obs[i][r + 1] for i in (0, 1)]
                fields = [new.fields[name][r] for name in ("continuous", "discrete", "reward")]
                obs = [new.obs[i][r] for i in (0, 1)]
                self.rows.append((*obs, *next_obs, *fields, last and new.terminated[k]))
        self.rows = self.rows[-self.capacity :]


def as_rows(sampled) -> list[tuple]:
    f = sampled.fields
    columns = [*sampled.obs, *sampled.next_obs]
    columns += [f[name] for name in ("continuous", "discrete", "reward", "done")]
    return list(zip(*columns, strict=True))


def key(row) -> bytes:
    return b"".join(np.asarray(part).tobytes() for part in row)


def contents(replay: Replay, n: int = 4000) -> set[bytes]:
    """Return the distinct rows among `n` draws."""
    return {key(row) for row in as_rows(replay.sample(np.random.default_rng(9), n))}


@pytest.mark.parametrize("episodes", [[5, 2, 7], [1, 1, 1, 1, 1, 1, 1, 1, 1], [40]])
def test_replay_holds_the_newest_rows_with_their_next_observations(episodes):
    """With long and short episodes, and rollouts larger than the replay."""
    rng = np.random.default_rng(1)
    replay = Replay(PLAIN, capacity=25)
    slow = Slow(25)
    for number in range(30):
        lengths = rng.permutation(episodes)[: 1 + number % len(episodes)]
        new = rollout(lengths, rng)
        replay.add(new)
        slow.add(new)
        assert len(replay) == len(slow.rows)
        assert contents(replay, 600) == {key(row) for row in slow.rows}


def test_replay_allocates_memory_for_only_one_copy_of_the_observations():
    replay = Replay(Columns({}, [Field(shape=(1000,))]), capacity=1000)
    stored = sum(array.nbytes for array in replay._obs)
    assert stored < 1.1 * 1000 * 1000 * 4


def test_field_with_the_prefix_next_is_stored_for_each_row():
    """The field `next_allowed` is read from an overwritten ring, and from a restored replay."""
    allowed = Field(shape=(3,), dtype=np.bool_)
    columns = Columns({"allowed": allowed, "next_allowed": replace(allowed, at_end=True)}, OBS)
    rng, stored, expected = np.random.default_rng(1), Replay(columns, capacity=20), []
    for lengths in ([5, 1], [7], [1, 1, 4], [30, 2]):
        new = rollout(lengths, rng)
        n, k = new.n_rows, len(lengths)
        new = replace(
            new,
            fields={**new.fields, "allowed": rng.random((n, 3)) < 0.5},
            at_end={"next_allowed": rng.random((k, 3)) < 0.5},
        )
        stored.add(new)
        for start, length, end in zip(new.starts, lengths, new.at_end["next_allowed"], strict=True):
            expected += [*new.fields["allowed"][start + 1 : start + length], end]
        restored = Replay(columns, capacity=20)
        restored.load_state_dict(stored.state_dict())
        for each in (stored, restored):
            rows = each.read(np.arange(each.n_added - len(each), each.n_added))
            np.testing.assert_array_equal(rows.fields["next_allowed"], expected[-20:])


def test_rows_are_drawn_uniformly():
    replay = twenty()
    rng = np.random.default_rng(1)
    for _ in range(3):
        replay.add(rollout([9, 4], rng))
    drawn = [key(row) for row in as_rows(replay.sample(rng, 20_000))]
    counts = np.unique(drawn, return_counts=True)[1]
    assert len(counts) == 20
    assert np.abs(counts - 1000).max() < 150  # five standard deviations


def sequences_of(new: Rollout) -> dict[bytes, tuple[int, bytes]]:
    """Return length and memory of each sequence, by its first row's reward."""
    sequences = {}
    for k, (start, length) in enumerate(zip(new.starts, new.lengths, strict=True)):
        for piece, first in enumerate(range(0, length, L)):
            reward = new.fields["reward"][start + first].tobytes()
            sequences[reward] = (min(L, length - first), new.memory[k, piece].tobytes())
    return sequences


def test_whole_sequences_are_drawn_with_the_memory_before_each_sequence():
    rng = np.random.default_rng(1)
    replay = twenty(memory=True)
    all_sequences, order, sizes = {}, [], []
    rollouts = [[4, 7, 1, 2][: 1 + number % 4] for number in range(25)]
    for lengths in (*rollouts, *[[1]] * 25, [2], [7]):  # also with few rows at a time
        new = rollout(lengths, rng, memory=True)
        replay.add(new)
        new_sequences = sequences_of(new)
        all_sequences |= new_sequences
        order += list(new_sequences)
        sizes += [size for size, _ in new_sequences.values()]
        # Only sequences with all rows among the newest 20 can be drawn.
        fits = np.cumsum(sizes[::-1]) <= 20
        expected = set(order[len(order) - int(fits.sum()) :])
        sampled = replay.sample(rng, 600)
        firsts = np.cumsum(sampled.lengths) - sampled.lengths
        assert len(sampled.lengths) == 200
        drawn = set()
        for first, length, memory in zip(firsts, sampled.lengths, sampled.memory, strict=True):
            name = sampled.fields["reward"][first].tobytes()
            assert all_sequences[name] == (length, memory.tobytes())
            drawn.add(name)
        assert drawn == expected


@pytest.mark.parametrize("memory", [False, True])
def test_replay_restored_from_files_or_state_continues_as_the_original(memory):
    """With overwritten rows, a rollout larger than the replay, and saves without new rows."""
    rng, original = np.random.default_rng(3), twenty(memory=memory)
    parts = {}
    for number, lengths in enumerate([[4], [1, 1, 1, 1, 1], [], [9], [7, 3], [30, 2], [5, 1], [6]]):
        original.add(rollout(lengths, rng, memory=memory)) if lengths else None
        if new := original.new_rows():
            parts[str(number)] = new
            original.note_kept(str(number), "digest", len(new["place"]))
        of_files, of_state = twenty(memory=memory), twenty(memory=memory)
        for name, _, n_rows in original.kept:
            assert len(parts[name]["place"]) == n_rows
            of_files.extend(parts[name])
        assert sum(n for _, _, n in original.kept[1:]) < 20, "overwritten rows need no file"
        of_state.load_state_dict(original.state_dict())
        went_on = copy.deepcopy(original)
        for later in ([2], [1, 1, 4]):
            for replay in (of_files, of_state):
                assert_alike(went_on, replay)
            new = rollout(later, rng, memory=memory)
            for replay in (went_on, of_files, of_state):
                replay.add(new)


@pytest.mark.parametrize("memory", [False, True])
def test_method_new_rows_returns_all_rows_after_a_state_was_loaded(memory):
    rng, source, target = np.random.default_rng(4), twenty(memory=memory), twenty(memory=memory)
    source.add(rollout([7, 2], rng, memory=memory))
    target.add(rollout([5, 3, 1], rng, memory=memory))
    target.note_kept("a", "digest", 9)
    target.load_state_dict(source.state_dict())
    for replay in (source, target):
        new, everything = replay.new_rows(), replay.state_dict()
        assert len(new["place"]) == 9
        assert new.keys() == everything.keys()
        for name, rows in everything.items():
            np.testing.assert_array_equal(new[name], rows)


def test_method_clear_deletes_all_rows_and_the_list_of_their_files():
    rng, replay = np.random.default_rng(4), twenty(memory=False)
    replay.add(rollout([4], rng))
    replay.note_kept("before", "digest", 4)
    replay.clear()
    assert (len(replay), replay.kept) == (0, [])
    replay.add(rollout([3], rng))
    replay.note_kept("after", "digest", 3)
    assert replay.kept == [("after", "digest", 3)]


def test_saved_replay_with_more_rows_than_the_capacity_is_refused():
    big, small = (Replay(PLAIN, capacity=n) for n in (20, 10))
    big.add(rollout([15], np.random.default_rng(1)))
    with pytest.raises(ValueError, match="15 rows, and buffer_size is 10"):
        small.load_state_dict(big.state_dict())


def test_method_sample_draws_at_most_n_rows_in_whole_sequences_but_at_least_one_sequence():
    replay, rng = twenty(memory=True), np.random.default_rng(1)
    replay.add(rollout([7, 5], rng, memory=True))
    for n_rows, n_sequences in ((1, 1), (L, 1), (2 * L - 1, 1), (2 * L, 2)):
        assert len(replay.sample(rng, n_rows).lengths) == n_sequences
