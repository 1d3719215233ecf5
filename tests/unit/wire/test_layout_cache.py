"""Storage of message layouts: for which messages a layout is stored, and for how long."""

from dataclasses import replace

import pytest
from test_codec import SPEC, assert_same_steps, other_numbers, sample

from pipeline.core.steps import same_steps
from pipeline.wire.codec import layout_cache
from pipeline.wire.codec.encoding import steps_bytes
from pipeline.wire.codec.layout_cache import Decoder


def written(n: int, seed: int, n_ended: int = 0) -> bytes:
    return steps_bytes(*sample(SPEC, n, n_ended, seed), SPEC)


@pytest.fixture
def remembered(monkeypatch):
    """A list with an entry for each layout that is made."""
    calls = []
    original = layout_cache._Layout
    monkeypatch.setattr(layout_cache, "_Layout", lambda *args: calls.append(1) or original(*args))
    return calls


def test_layouts_are_stored_rarely_while_no_layout_recurs(remembered):
    decoder = Decoder(SPEC, "b")

    def nothing_recurs(seeds):
        for seed in seeds:
            decoder.decode(written(2, seed))

    nothing_recurs(range(40))
    while not decoder.n_cached:
        decoder.decode(written(3, seed=1))
    before = len(remembered)
    nothing_recurs(range(100, 200))
    assert len(remembered) - before >= 4
    remembered.clear()
    decoder = Decoder(SPEC, "b")
    nothing_recurs(range(600))
    assert decoder.n_cached == 0
    assert len(remembered) <= 10
    assert len(decoder._layouts) <= layout_cache._MAX_LAYOUTS


def test_layouts_of_two_alternating_kinds_of_messages_are_both_stored(remembered):
    kinds = [written(n, seed=n) for n in (2, 3)]
    decoder = Decoder(SPEC, "b")
    for number in range(40):
        decoder.decode(kinds[number % 2])
        kinds[number % 2] = other_numbers(kinds[number % 2])
    assert len(remembered) == 2
    assert decoder.n_cached >= 35


def test_layouts_of_very_long_messages_and_of_ended_episodes_are_not_stored(
    remembered, monkeypatch
):
    decoder = Decoder(SPEC, "b")
    for seed in range(8):
        decoder.decode(written(2, seed, n_ended=1))
    monkeypatch.setattr(layout_cache, "_MAX_CACHED_BYTES", 100)
    for _ in range(2):
        assert_same_steps(decoder.decode(written(4, seed=1)), sample(SPEC, 4, 0, seed=1))
    assert not remembered


def test_oldest_layout_is_dropped_first(monkeypatch):
    """A layout that replaces a layout of the same length becomes the newest layout."""
    monkeypatch.setattr(layout_cache, "_MAX_LAYOUTS", 2)
    monkeypatch.setattr(Decoder, "_is_layout_due", lambda _: True)
    first, second, third = (written(n, seed=n) for n in (2, 3, 4))
    decision, terminal = sample(SPEC, 2, 0, seed=2)
    others = replace(decision, agent_id=decision.agent_id + 1)
    instead = steps_bytes(others, terminal, SPEC)
    assert len(instead) == len(first)
    decoder = Decoder(SPEC, "b")
    for data in (first, second, instead, third, third, instead):
        decoder.decode(data)
    assert decoder.n_cached == 2


@pytest.mark.parametrize("many", [1, 256])
def test_changing_returned_arrays_does_not_change_later_messages(many, monkeypatch):
    """All messages after the first are read with the first message's layout."""
    monkeypatch.setattr(layout_cache, "MANY", many)
    expected = sample(SPEC, 2, 0, seed=1)
    data = steps_bytes(*expected, SPEC)
    decoder = Decoder(SPEC, "b")
    for n_cached in range(4):
        seen, _ = decoder.decode(data)
        assert decoder.n_cached == n_cached
        assert same_steps((seen, expected[1]), expected)
        first, second = seen.action_mask
        first[:] = True
        assert (second == expected[0].action_mask[1]).all(), "each branch has memory of its own"
        second[:] = True
        for values in (*seen.obs, seen.reward, seen.agent_id, seen.group_id, seen.group_reward):
            values[:] = 7
