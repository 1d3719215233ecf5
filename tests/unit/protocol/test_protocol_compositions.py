"""Agents that end and agents that go on, in any order of a message or of a recording."""

from __future__ import annotations

import numpy as np
import pytest
from wire_messages import decode_list, decode_steps

from pipeline.protocol import vectorized
from pipeline.protocol.demo import read_demo, writing_demo
from pipeline.protocol.demo_file import parse_demo
from pipeline.protocol.encoding import encode_steps
from pipeline.protocol.generated.messages import UnityRLOutputProto
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

SPEC = BehaviorSpec([ObservationSpec.vector(2)] * 2, ActionSpec(1, (3, 2)))
ENDED = {5: True, 2: False, 9: True, 4: False}
"""Whether each of them was cut short."""
ORDER = [7, 5, 2, 1, 9, 3, 4, 8]


def numbers(ids, factor: float):
    return np.array(ids, np.float32) * factor


def masks(ids):
    flat = np.array([[agent >> bit & 1 for bit in range(5)] for agent in ids], np.bool_)
    return [flat[:, :3], flat[:, 3:]]


def message():
    """Every number of an agent follows from its id."""
    goes_on = [agent for agent in ORDER if agent not in ENDED]
    columns = [
        (
            [np.repeat(numbers(ids, factor)[:, None], 2, axis=1) for factor in (10, 20)],
            numbers(ids, 0.5),
            np.array(ids, np.int32),
            np.array(ids, np.int32) + 100,
            numbers(ids, 0.25),
        )
        for ids in (goes_on, list(ENDED))
    ]
    (obs, reward, ids, group, shared), last = columns
    decisions = DecisionSteps(obs, reward, ids, masks(goes_on), group, shared)
    cut = np.array(list(ENDED.values()))
    ended = TerminalSteps(last[0], last[1], cut, last[2], last[3], last[4])
    infos = {info.id: info for info in encode_steps(decisions, ended, SPEC).value}
    return UnityRLOutputProto.ListAgentInfoProto(value=[infos[agent] for agent in ORDER])


@pytest.mark.parametrize("many", [False, True])
def test_each_agent_of_a_message_has_its_own_numbers_whichever_order_it_has(many, monkeypatch):
    monkeypatch.setattr(vectorized, "MANY", 1)
    decisions, ended = decode_list(message(), SPEC) if many else decode_steps(message().value, SPEC)
    assert decisions.agent_id.tolist() == [agent for agent in ORDER if agent not in ENDED]
    assert ended.agent_id.tolist() == [agent for agent in ORDER if agent in ENDED]
    for steps in (decisions, ended):
        for agent in steps:
            step = steps[agent]
            assert [values.tolist() for values in step.obs] == [[agent * 10] * 2, [agent * 20] * 2]
            assert (step.reward, step.group_reward) == (agent / 2, agent / 4)
            assert (step.agent_id, step.group_id) == (agent, agent + 100)
    assert {agent: ended[agent].interrupted for agent in ended} == ENDED
    for agent in decisions:
        expected = [mask[0].tolist() for mask in masks([agent])]
        assert [mask.tolist() for mask in decisions[agent].action_mask] == expected


def test_a_recording_counts_what_has_ended_in_each_part_of_it(tmp_path):
    """A recorder may leave the mark of a cut at a step that goes on."""

    def append(writer, first: float, done) -> None:
        n = len(done)
        writer.append(
            obs=[np.full((n, 2), first, np.float32)] * 2,
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
