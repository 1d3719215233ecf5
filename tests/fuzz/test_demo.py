"""Demonstration files of every format: valid, changed and damaged files."""

from pathlib import Path
from typing import Any

import numpy as np
from fuzzing.frame import command, fuzz
from hypothesis import strategies as st
from wire_messages import encode_actions

from pipeline.demos.demo_file import BRAIN_OFFSET, delimited_message, read_demo
from pipeline.demos.demonstrations import load_expert_rows
from pipeline.wire.codec.encoding import brain_parameters
from pipeline.wire.codec.generated import messages as m

from .agents import SPECS, message_of, spoil_agent, spoil_announcement
from .mutations import messages, mutated, seldom, usually

_COUNTS = st.sampled_from((0, 1, 2, 7, -1, 2**31 - 1))


def _head(draw: Any, n: int, brain: Any) -> bytes:
    meta = m.DemonstrationMetaProto(
        api_version=draw(st.sampled_from((*(1,) * 16, 0, 2, -1))),
        demonstration_name=draw(st.sampled_from(("demo", "", "éé"))),
        number_steps=draw(_COUNTS) if seldom(draw, 5) else n,
        number_episodes=draw(_COUNTS),
        mean_reward=draw(st.sampled_from((0.0, 1.5, float("nan"), 3e38))),
    )
    padded = delimited_message(meta).ljust(BRAIN_OFFSET, b"\0")
    return (padded if seldom(draw, 5) else padded[:BRAIN_OFFSET]) + delimited_message(brain)


@st.composite
def _demos(draw: Any) -> bytes:
    """Return a file of pairs of infos and actions, some with faults."""
    spec = draw(SPECS)
    n, n_ended = draw(st.integers(1, 6)), draw(st.integers(0, 2))
    infos = message_of(draw, spec, n, n_ended, draw(st.integers(0, 99))).value
    brain = brain_parameters("Ball", spec, old_fields=draw(st.booleans()))
    if seldom(draw, 5):
        spoil_announcement(draw, brain)
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    actions = encode_actions(spec.action_spec.random_action(len(infos), rng), spec).value
    if seldom(draw, 5) and infos:
        spoil_agent(draw, draw(st.sampled_from(list(infos))))
    if seldom(draw, 5) and infos:
        action = draw(st.sampled_from(list(actions)))
        action.Clear() if draw(st.booleans()) else None
        action.MergeFrom(draw(messages(m.AgentActionProto, likely=0.4)))
    pairs = zip(infos, actions, strict=True)
    return _head(draw, len(infos), brain) + b"".join(
        delimited_message(m.AgentInfoActionPairProto(agent_info=info, action_info=action))
        for info, action in pairs
    )


@st.composite
def _old_demos(draw: Any) -> bytes:
    """Return a file of agent infos without actions, as packages before 0.12 recorded them."""
    brain = draw(messages(m.OldBrainParametersProto, likely=0.3))
    announced = m.BrainParametersProto(brain_name="Old", vector_action_size_deprecated=[2])
    if seldom(draw, 5):
        spoil_announcement(draw, announced)
    infos = []
    for _ in range(draw(st.integers(1, 4))):
        info = m.OldAgentInfoProto(
            stacked_vector_observation=[0.5, 1.0],
            stored_vector_actions=[1.0, 0.0],
            reward=0.5,
            id=3,
        )
        if seldom(draw, 5):
            info.MergeFrom(draw(messages(m.OldAgentInfoProto, likely=0.4)))
        infos.append(info)
    brain_data = announced.SerializeToString() + brain.SerializeToString()
    merged = m.BrainParametersProto.FromString(brain_data)
    return _head(draw, len(infos), merged) + b"".join(map(delimited_message, infos))


_FILES = usually(
    mutated(_demos()), st.one_of(mutated(_demos(), begin=BRAIN_OFFSET), mutated(_old_demos())), 4
)


@fuzz(_FILES, examples=150)
def test_changed_demonstration_files_are_read_or_refused(data: bytes, folder: Path) -> object:
    path = folder / "a.demo"
    path.write_bytes(data)
    if not command("demo", "info", path):
        return False
    demo = read_demo(path)
    for values, obs in zip(demo.obs, demo.spec.observation_specs, strict=True):
        assert values.shape == (len(demo), *obs.shape)
    load_expert_rows([path], demo.spec)
    return True
