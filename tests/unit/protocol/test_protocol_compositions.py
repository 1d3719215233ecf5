"""Agents that end and agents that go on, in any order of a message or of a recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_codec import SPEC, sample
from wire_messages import decode_steps

from pipeline.errors import UnityObservationException
from pipeline.protocol import vectorized
from pipeline.protocol.demo import read_demo, writing_demo
from pipeline.protocol.demo_file import parse_demo
from pipeline.protocol.encoding import encode_steps, steps_bytes
from pipeline.protocol.layout_cache import Decoder
from pipeline.protocol.simulator import restore, state_of
from pipeline.protocol.specs import ActionTuple
from pipeline.protocol.steps import (
    Steps,
    TerminalSteps,
    refuse_other_shapes,
    same_steps,
)


def steps() -> Steps:
    return sample(SPEC, 4, 3, seed=1)


def test_a_recording_counts_what_has_ended_in_each_part_of_it(tmp_path):
    """A recorder may leave the mark of a cut at a step that goes on."""

    def append(writer, first: float, done) -> None:
        n = len(done)
        writer.append(
            obs=[np.full((n, 3), first, np.float32), np.full((n, 2, 2), first, np.float32)],
            actions=ActionTuple(np.zeros((n, 1)), np.zeros((n, 2))),
            reward=first + np.arange(n, dtype=np.float32),
            done=np.array(done),
        )

    with writing_demo(tmp_path / "a.demo", "B", SPEC) as writer:
        append(writer, 1, [False, True, True])
        append(writer, 10, [True, False])
    content = parse_demo(tmp_path / "a.demo")
    for row in (2, 4):
        content.infos[row].max_step_reached = True
    with writing_demo(tmp_path / "b.demo", "B", SPEC) as writer:
        writer.append_messages(content.infos[:3], content.actions[:3])
        writer.append_messages(content.infos[3:], content.actions[3:])
    demo = read_demo(tmp_path / "b.demo")
    # The first reward of an episode is of no action in it, as in the stage and in evaluation.
    assert demo.returns() == [2, 0, 0]
    assert demo.interrupted.tolist() == [False, False, True, False, False]
    meta = demo.metadata
    assert (meta.number_steps, meta.number_episodes, meta.mean_reward) == (5, 4, 27 / 4)


@pytest.mark.parametrize("many", [1, 256])
def test_what_is_given_out_first_may_be_changed_before_messages_that_recur(many, monkeypatch):
    """The first message gives the layout that later ones are read by."""
    monkeypatch.setattr(vectorized, "MANY", many)
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


def test_steps_with_and_without_masks_or_agents_are_not_the_same():
    one, (decision, terminal) = steps(), steps()
    assert same_steps(one, (decision, terminal))
    assert not same_steps(one, (replace(decision, action_mask=None), terminal))
    assert not same_steps(one, (decision, TerminalSteps.empty(SPEC)))
    cut = replace(terminal, interrupted=~terminal.interrupted)
    assert not same_steps(one, (decision, cut))


def test_saved_steps_of_ended_agents_have_to_fit_as_those_of_the_others_do():
    decision, terminal = steps()
    refuse_other_shapes("B", SPEC, (decision, terminal))
    for part in ("obs", "reward", "group_id", "group_reward", "interrupted"):
        values = getattr(terminal, part)
        shorter = [value[1:] for value in values] if part == "obs" else values[1:]
        other = replace(terminal, **{part: shorter})
        with pytest.raises(ValueError, match="the steps of B have other shapes"):
            refuse_other_shapes("B", SPEC, (decision, other))


def test_the_agent_that_lacks_an_observation_is_named_and_not_the_first():
    infos = list(encode_steps(*steps(), SPEC).value)
    del infos[2].observations[1]
    with pytest.raises(
        UnityObservationException, match=rf"Agent with id={infos[2].id} of .* sent 1 "
    ):
        decode_steps(infos, SPEC)


def test_a_simulator_with_both_pairs_of_methods_is_restored_by_ours():
    class Both:
        count = 3

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

        def get_state(self):
            raise AssertionError

        set_state = get_state

    source, target = Both(), Both()
    source.count = 5
    restore(target, state_of(source))
    assert target.count == 5
