"""Sizes in messages and files are checked before arrays of these sizes are allocated."""

import re
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from refusals import refusal
from test_codec import BRAIN
from test_demo import recording

from pipeline.core import specs
from pipeline.core.specs import (
    ActionSpec,
    BehaviorSpec,
    DimensionProperty,
    ObservationSpec,
    check_spec,
)
from pipeline.demos.demo_file import read_demo
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import DemonstrationError, UnitySpecificationException, brief
from pipeline.wire.codec.decoding import behavior_spec_from
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.layout_cache import Decoder

BIG = 2**31 - 1
ONE = ActionSpec(1, ())
FREE_BYTES = 210e6
"""Most bytes of memory that a short input may take."""


@contextmanager
def little_memory():
    """Fail if the block takes FREE_BYTES of memory or more."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < FREE_BYTES


def agent(*shapes, properties=(), name="eye") -> m.AgentInfoProto:
    info = m.AgentInfoProto()
    for shape in shapes:
        info.observations.add(shape=shape, dimension_properties=properties, name=name)
    return info


def announced(**fields) -> m.BrainParametersProto:
    return m.BrainParametersProto(brain_name="Walker", action_spec=fields)


def discrete(*sizes) -> m.BrainParametersProto:
    return announced(num_discrete_actions=len(sizes), discrete_branch_sizes=sizes)


IMPOSSIBLE_ACTIONS = [
    (announced(), "it announces no actions; give"),
    (announced(num_continuous_actions=-1), "announces -1 continuous actions"),
    (discrete(3, 0), r"branches of the sizes \(3, 0\); a number of actions is at least 0"),
    (discrete(-3), r"branches of the sizes \(-3,\)"),
    (discrete(BIG), f"{BIG} choices in all; at most 65536"),
    (announced(num_continuous_actions=BIG), f"announces {BIG} continuous actions"),
    (announced(num_continuous_actions=65_537), "announces 65537 continuous actions"),
    (
        announced(
            num_continuous_actions=1, num_discrete_actions=2, discrete_branch_sizes=[65_535, 1]
        ),
        "announces 1 continuous actions and 2 discrete branches with 65536 choices",
    ),
    (discrete(*[2] * 1025), "1025 discrete branches with 2050 choices"),
    (discrete(*[1] * 2_000_000), "at most 65536 actions and choices, in 1024 branches"),
    (m.BrainParametersProto(brain_name="Walker"), "announces no actions"),
    (
        m.BrainParametersProto(brain_name="Walker", vector_action_size_deprecated=[4, -2]),
        r"branches of the sizes \(4, -2\)",
    ),
]
IMPOSSIBLE_OBSERVATIONS = [
    (agent([-1]), r"observation 0 \(eye\) has the shape \(-1,\); it must have at most 8"),
    (agent([2], [3, -4, 5]), r"observation 1 \(eye\) has the shape \(3, -4, 5\)"),
    (agent([0, 3]), r"has the shape \(0, 3\)"),
    (agent([1, 0]), r"has the shape \(1, 0\)"),
    (agent([3, 0, 5]), r"has the shape \(3, 0, 5\)"),
    (agent([1] * 9), "it must have at most 8 dimensions"),
    (agent([1] * 3_000_000), "it must have at most 8 dimensions"),
    (agent([BIG]), f"observes {BIG} numbers"),
    (agent([BIG, BIG, BIG]), f"observes {BIG**3} numbers"),
    (agent([4, 2048, 2048], [1]), r"observes 16777217 numbers, in the shapes .* 16777216 are"),
    (agent([4097, 2], properties=[4, 1]), "at most 4096 entries"),
    (agent(*[[1]] * 1025), "more than 1024 observations"),
    (agent([-1], name="x" * 10_000), r"observation 0 \(x{200}\.\.\.\) has"),
]


WALKER = "(?=behavior Walker: it announces)"


@pytest.mark.parametrize(
    ("brain", "info", "text"),
    [
        *((brain, agent([1]), f"^{WALKER}.*{text}") for brain, text in IMPOSSIBLE_ACTIONS),
        *((BRAIN, info, text) for info, text in IMPOSSIBLE_OBSERVATIONS),
    ],
)
def test_error_about_an_impossible_specification_names_the_behavior_and_the_observation_index(
    brain, info, text
):
    with little_memory():
        message = refusal(UnitySpecificationException, behavior_spec_from, brain, info)
    assert re.search(text, message)
    assert len(message) < 600


@pytest.mark.parametrize(
    "spec",
    [
        BehaviorSpec([ObservationSpec.vector(0)], ActionSpec(1, ())),
        BehaviorSpec([ObservationSpec((), ())], ActionSpec(0, (1,))),
        BehaviorSpec([ObservationSpec.visual(4, 2048, 2048)], ActionSpec(65536, ())),
        BehaviorSpec([ObservationSpec.vector(1)] * 1024, ActionSpec(0, (64,) * 1024)),
        BehaviorSpec([ObservationSpec.entities(4096, 4096)], ActionSpec(1, (65535,))),
        BehaviorSpec([ObservationSpec((1,) * 8, (DimensionProperty.NONE,) * 8)], ActionSpec(1, ())),
    ],
)
def test_largest_possible_specifications_are_accepted(spec):
    check_spec("b", spec)


def test_simulator_with_an_impossible_specification_is_refused():
    class Simulator:
        behavior_specs = {"b": BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(0, ()))}  # noqa: RUF012

        def reset(self):
            return {"b": (range(1), ())}

    with pytest.raises(UnitySpecificationException, match="behavior b: it announces no actions"):
        InProcessEnvironment(Simulator()).reset()


def of_agents(n: int, info: m.AgentInfoProto) -> m.UnityRLOutputProto.ListAgentInfoProto:
    entry = info.SerializeToString()
    data = (b"\x0a" + bytes([len(entry)]) + entry) * n
    return m.UnityRLOutputProto.ListAgentInfoProto.FromString(data)


@pytest.mark.parametrize(
    ("spec", "n"),
    [
        (BehaviorSpec([], ActionSpec(0, (60_000,))), 5_000),
        (BehaviorSpec([], ActionSpec(60_000, ())), 500),
        (BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ())), 40_000),
        (BehaviorSpec([ObservationSpec.visual(3, 1000, 1000)], ActionSpec(1, ())), 20),
    ],
)
def test_message_with_agents_that_need_far_more_memory_than_the_message_is_refused(spec, n):
    message = of_agents(n, m.AgentInfoProto())
    decoder = Decoder(spec, "Walker?team=0")
    text = rf"behavior Walker\?team=0 would take [\d,]+ MB .* only {message.ByteSize():,} bytes"
    with little_memory(), pytest.raises(UnitySpecificationException, match=text):
        decoder.decode(message.SerializeToString())


def test_many_small_agents_are_accepted():
    spec = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(0, (3,)))
    info = m.AgentInfoProto()
    info.observations.add(shape=[1]).float_data.data.append(1.0)
    decision, _ = Decoder(spec, "b").decode(of_agents(50_000, info).SerializeToString())
    assert len(decision) == 50_000


def pair(*numbers, **action) -> m.AgentInfoActionPairProto:
    out = m.AgentInfoActionPairProto(action_info=action)
    out.agent_info.observations.add(shape=[len(numbers)]).float_data.data.extend(numbers)
    return out


@pytest.mark.parametrize(
    ("brain", "pairs", "text"),
    [
        (discrete(60_000), [pair(1.0)] * 5_000, "a recording of 5000 steps .* 3[0-9][0-9] MB"),
        (announced(num_continuous_actions=60_000), [pair(1.0)] * 500, "a recording of 500 steps"),
        (discrete(3), [m.AgentInfoActionPairProto()] * 40_000, "a recording of 40000 steps"),
        (announced(), [pair(1.0)], "behavior Walker: it announces no actions"),
        (discrete(3), [pair(1.0, discrete_actions=[1]), pair(1.0, discrete_actions=[3])],
         r"the action of step 2, \[\] and \[3\], is not possible in the behavior \(.*\(3,\)\)"),
        (discrete(3), [pair(1.0, discrete_actions=[-1])], "the action of step 1"),
        (announced(num_continuous_actions=2), [pair(1.0, continuous_actions=[0, np.inf])],
         r"the action of step 1, \[ 0. inf\]"),
    ],
)  # fmt: skip
def test_demonstration_with_impossible_sizes_or_actions_is_refused(tmp_path, brain, pairs, text):
    path = recording(tmp_path / "a.demo", brain, pairs)
    with little_memory(), pytest.raises(DemonstrationError, match=text) as caught:
        read_demo(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_old_recording_with_a_damaged_behavior_announcement_is_refused(tmp_path):
    brain = discrete(3)
    brain.MergeFromString(b"\x22\x02\xff\xff")  # camera resolutions of old packages
    old = m.OldAgentInfoProto(stacked_vector_observation=[1.0], id=1)
    with pytest.raises(DemonstrationError, match="No BrainParameters found"):
        read_demo(recording(tmp_path / "a.demo", brain, [old]))


def test_memory_that_a_decoded_message_may_use_is_bounded_by_the_bytes_of_the_message():
    specs.refuse_excess((1 << 27) + 256 * 1000, 1000, "a message")
    text = "^a message would take 134 MB of memory, although only 1,000 bytes were sent; send it in"
    with pytest.raises(UnitySpecificationException, match=text):
        specs.refuse_excess((1 << 27) + 256 * 1000 + 1, 1000, "a message")
    observations = [ObservationSpec.visual(3, 4, 5), ObservationSpec.vector(2)]
    spec = BehaviorSpec(observations, ActionSpec(5, (7, 11)))
    assert specs.row_bytes(spec) == 4096 + 4 * (60 + 2) + (7 + 11) + 8 * (5 + 2)
    cut = [brief(text) for text in ("x" * 200, "x" * 201, (1, 2))]
    assert cut == ["x" * 200, "x" * 200 + "...", "(1, 2)"]
