"""Messages laid out like an earlier one are read by the places of its numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import SPECS, assert_same_steps, other_name, sample, unknown_field
from wire_messages import decode_steps

from pipeline.protocol import layout_cache
from pipeline.protocol.decoding import NonFiniteError
from pipeline.protocol.encoding import encode_steps
from pipeline.protocol.layout_cache import Decoder
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(
    [ObservationSpec.vector(3, "an eye"), ObservationSpec.entities(2, 2)], ActionSpec(1, (2, 130))
)


def again(steps, seed):
    """The same agents and masks, with other numbers where there were any."""
    decision, terminal = steps
    rng = np.random.default_rng(seed)

    def other(values):
        new = rng.normal(size=values.shape).astype(np.float32)
        return np.where(values == 0, values, new)

    new = replace(
        decision,
        obs=[rng.normal(size=array.shape).astype(np.float32) for array in decision.obs],
        reward=other(decision.reward),
        group_reward=other(decision.group_reward),
    )
    return new, terminal


def assert_read_as_in_full(decoder, message, spec=SPEC):
    decoded = decoder.decode(message.SerializeToString())
    assert_same_steps(decoded, decode_steps(message.value, spec))


@settings(max_examples=100)
@given(SPECS, st.integers(1, 5), st.integers(0, 99))
def test_recurring_messages_are_read_as_in_full(spec, n, seed):
    steps = sample(spec, n, 0, seed)
    decoder = Decoder(spec, "b")
    for number in range(4):
        message = encode_steps(*steps, spec)
        assert_read_as_in_full(decoder, message, spec)
        assert decoder.n_cached == number
        steps = again(steps, seed + number)


def used(steps=None):
    """Return a decoder that remembers a message's layout, and steps with the same layout."""
    steps = steps or sample(SPEC, 4, 0, seed=1)
    decoder = Decoder(SPEC, "b")
    decoder.decode(encode_steps(*steps, SPEC).SerializeToString())
    return decoder, again(steps, seed=2)


def ended(info):
    info.done = True


def cut_short(info):
    info.max_step_reached = True


def other_agent(info):
    info.id ^= 1


def reward_comes_or_goes(info):
    info.reward = 0.25 if info.reward == 0.0 else 0.0


def group_reward_comes_or_goes(info):
    info.group_reward = 0.25 if info.group_reward == 0.0 else 0.0


def other_mask(info):
    info.action_mask[1] = not info.action_mask[1]


@pytest.mark.parametrize(
    "spoil",
    [
        ended,
        cut_short,
        other_agent,
        reward_comes_or_goes,
        group_reward_comes_or_goes,
        other_mask,
        other_name,
        unknown_field,
    ],
)
@pytest.mark.parametrize("row", [0, 3])
def test_message_that_is_not_quite_the_same_is_read_in_full(spoil, row):
    decoder, steps = used()
    message = encode_steps(*steps, SPEC)
    spoil(message.value[row])
    assert_read_as_in_full(decoder, message)
    assert decoder.n_cached == 0
    # and what was remembered still holds
    assert_read_as_in_full(decoder, encode_steps(*steps, SPEC))


@pytest.mark.parametrize("spoil", [ended, cut_short, unknown_field, other_name])
def test_unusual_message_is_not_remembered(spoil):
    steps = sample(SPEC, 4, 0, seed=1)
    decoder = Decoder(SPEC, "b")
    for _ in range(8):
        message = encode_steps(*steps, SPEC)
        spoil(message.value[1])
        assert_read_as_in_full(decoder, message)
    assert decoder.n_cached == 0


@pytest.mark.parametrize("field", ["reward", "observation"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused_in_a_recurring_message_too(field, value):
    steps = sample(SPEC, 4, 0, seed=1)
    steps[0].reward[:] = 1.0
    decoder, steps = used(steps)
    if field == "reward":
        steps[0].reward[2] = value
    else:
        steps[0].obs[0][2, 1] = value
    kind = "NaN" if np.isnan(value) else "Infinite"
    with pytest.raises(NonFiniteError, match=rf"had {kind} values\. \(behavior b"):
        decoder.decode(encode_steps(*steps, SPEC).SerializeToString())


def test_large_numbers_are_not_taken_for_infinite_ones():
    decoder, steps = used()
    steps[0].obs[0][1, 1] = 3e38
    message = encode_steps(*steps, SPEC)
    assert decoder.decode(message.SerializeToString())[0].obs[0][1, 1] == np.float32(3e38)


def test_what_is_given_out_may_be_changed():
    decoder, steps = used()
    message = encode_steps(*steps, SPEC)
    first, _ = decoder.decode(message.SerializeToString())
    assert decoder.n_cached == 1
    arrays = (*first.obs, first.reward, first.agent_id, first.group_id, first.group_reward)
    for values in arrays:
        values[:] = 7
    for mask in first.action_mask:
        mask[:] = ~mask
    assert_read_as_in_full(decoder, message)


@pytest.fixture
def remembered(monkeypatch):
    """One entry for each message that a layout was made of."""
    calls = []
    original = layout_cache._layout_of
    monkeypatch.setattr(
        layout_cache, "_layout_of", lambda *args: calls.append(1) or original(*args)
    )
    return calls


def test_where_nothing_recurs_little_is_remembered(remembered):
    decoder = Decoder(SPEC, "b")
    for seed in range(600):
        decoder.decode(encode_steps(*sample(SPEC, 2, 0, seed), SPEC).SerializeToString())
    assert decoder.n_cached == 0
    assert len(remembered) <= 10
    assert len(decoder._layouts) <= layout_cache._MAX_LAYOUTS


def test_once_something_recurs_more_is_remembered_again(remembered):
    decoder = Decoder(SPEC, "b")

    def nothing_recurs(seeds):
        for seed in seeds:
            decoder.decode(encode_steps(*sample(SPEC, 2, 0, seed), SPEC).SerializeToString())

    nothing_recurs(range(40))
    steps = sample(SPEC, 3, 0, seed=1)
    while not decoder.n_cached:
        decoder.decode(encode_steps(*steps, SPEC).SerializeToString())
    before = len(remembered)
    nothing_recurs(range(100, 200))
    assert len(remembered) - before >= 4


def test_message_with_an_end_is_not_tried_to_remember(remembered):
    decoder = Decoder(SPEC, "b")
    for seed in range(8):
        decoder.decode(encode_steps(*sample(SPEC, 2, 1, seed), SPEC).SerializeToString())
    assert not remembered


def test_two_kinds_of_messages_in_turn_are_both_remembered(remembered):
    kinds = [sample(SPEC, n, 0, seed=n) for n in (2, 3)]
    decoder = Decoder(SPEC, "b")
    for number in range(40):
        message = encode_steps(*again(kinds[number % 2], number), SPEC)
        assert_read_as_in_full(decoder, message)
    assert len(remembered) == 2
    assert decoder.n_cached >= 35


def test_very_long_messages_are_not_remembered(remembered, monkeypatch):
    monkeypatch.setattr(layout_cache, "_MAX_CACHED_BYTES", 100)
    decoder, steps = used()
    assert_read_as_in_full(decoder, encode_steps(*steps, SPEC))
    assert not remembered


def test_the_layout_that_is_dropped_is_the_one_that_was_made_first(monkeypatch):
    """A layout in place of another of the same length counts as new."""
    monkeypatch.setattr(layout_cache, "_MAX_LAYOUTS", 2)
    monkeypatch.setattr(Decoder, "_is_layout_due", lambda _: True)
    first, second, third = (
        encode_steps(*sample(SPEC, n, 0, seed=n), SPEC).SerializeToString() for n in (2, 3, 4)
    )
    decision, terminal = sample(SPEC, 2, 0, seed=2)
    others = replace(decision, agent_id=decision.agent_id + 1)
    instead = encode_steps(others, terminal, SPEC).SerializeToString()
    assert len(instead) == len(first)
    decoder = Decoder(SPEC, "b")
    for data in (first, second, instead, third, third, instead):
        decoder.decode(data)
    assert decoder.n_cached == 2
