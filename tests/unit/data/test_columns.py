"""Cutting trajectories into sequences, compared with loops over rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.columns import cut, followed, rows_of

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def slow_cut(lengths, sequence_length):
    """Return (trajectory, number, rows) of each sequence."""
    sequences, row = [], 0
    for trajectory, length in enumerate(lengths):
        rows = list(range(row, row + length))
        row += length
        number = 0
        while rows:
            sequences.append((trajectory, number, rows[:sequence_length]))
            rows, number = rows[sequence_length:], number + 1
    return sequences


@given(lengths=LENGTHS, sequence_length=st.integers(1, 6))
def test_function_cut_gives_the_same_sequences_as_a_loop(lengths, sequence_length):
    sequences = cut(np.array(lengths), sequence_length)
    triples = [
        (int(trajectory), int(number), list(range(start, start + length)))
        for trajectory, number, start, length in zip(
            sequences.trajectory, sequences.number, sequences.starts, sequences.lengths, strict=True
        )
    ]
    assert triples == slow_cut(lengths, sequence_length)
    assert len(sequences) == len(triples)


@given(pieces=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=6))
def test_function_rows_of_concatenates_the_row_numbers_of_all_ranges(pieces):
    starts = np.array([start for start, _ in pieces], dtype=np.int64)
    lengths = np.array([length for _, length in pieces], dtype=np.int64)
    expected = [row for start, length in pieces for row in range(start, start + length)]
    assert rows_of(starts, lengths).tolist() == expected


@given(lengths=LENGTHS, sequence_length=st.integers(1, 6))
def test_function_followed_adds_a_bootstrap_row_after_the_last_sequence_of_each_trajectory(
    lengths, sequence_length
):
    expected = []
    slow = slow_cut(lengths, sequence_length)
    for trajectory, number, rows in slow:
        expected += rows
        if (trajectory, number + 1) not in [(t, n) for t, n, _ in slow]:
            expected.append(sum(lengths) + trajectory)
    sequences = cut(np.array(lengths), sequence_length)
    is_last = np.append(sequences.number[1:] == 0, True)
    assert followed(lengths=sequences.lengths, is_last=is_last).tolist() == expected
