"""Agents of small behaviors, and what may be wrong with what one of them sends."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipeline.protocol.encoding import compressed_steps_bytes, steps_bytes
from pipeline.protocol.generated import messages as m
from pipeline.protocol.png import encode_png
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

from .mutations import NAMES, messages, mutated

_OBSERVATIONS = st.sampled_from(
    (
        ObservationSpec.vector(1),
        ObservationSpec.vector(5, "eye"),
        ObservationSpec.visual(3, 2, 2, "camera"),
        ObservationSpec.visual(1, 3, 2),
        ObservationSpec.entities(3, 2, "others"),
        ObservationSpec.vector(0, "none"),
    )
)
ACTIONS = st.sampled_from(
    (ActionSpec(2, ()), ActionSpec(0, (2, 130)), ActionSpec(1, (3,)), ActionSpec(0, (1,)))
)
SPECS = st.builds(BehaviorSpec, st.lists(_OBSERVATIONS, max_size=3), ACTIONS)
TRAINABLE_SPECS = st.builds(
    BehaviorSpec,
    st.lists(
        st.sampled_from(
            (
                ObservationSpec.vector(5, "eye"),
                ObservationSpec.entities(3, 2, "others"),
                ObservationSpec.visual(3, 5, 6, "camera"),
                ObservationSpec.vector(2, "goal", ObservationType.GOAL_SIGNAL),
            )
        ),
        min_size=1,
        max_size=3,
    ),
    ACTIONS,
)
_NUMBERS = st.sampled_from((0.0, -0.0, 1.5, 3e38, 1e-45, np.nan, np.inf))


def agents_of(spec: BehaviorSpec, n: int, n_ended: int, seed: int) -> tuple[Any, Any]:
    """Agents with ids and masks that `seed // 4` chooses, and numbers that all of it chooses."""
    fixed, numbers = np.random.default_rng(seed // 4), np.random.default_rng(seed)

    def floats(*shape: int) -> Any:
        return numbers.normal(size=shape).astype(np.float32)

    def ids(count: int) -> Any:
        edges = [0, 1, 127, 128, -1, 2**31 - 1, -(2**31)]
        return fixed.choice(edges, count, replace=False).astype(np.int32)

    def parts(count: int) -> tuple[Any, ...]:
        obs = [floats(count, *obs_spec.shape) for obs_spec in spec.observation_specs]
        return obs, floats(count) * (fixed.random(count) < 0.7), ids(count)

    branches = spec.action_spec.discrete_branches
    mask = [fixed.random((n, size)) < 0.5 for size in branches] if branches and n else None
    obs, reward, agent_id = parts(n)
    decision = DecisionSteps(obs, reward, agent_id, mask, ids(n), floats(n))
    obs, reward, agent_id = parts(n_ended)
    interrupted = fixed.random(n_ended) < 0.5
    return decision, TerminalSteps(
        obs, reward, interrupted, agent_id, ids(n_ended), floats(n_ended)
    )


def message_of(draw: Any, spec: BehaviorSpec, n: int, n_ended: int, seed: int) -> Any:
    """A list of agent infos, some of them with images as PNGs."""
    steps = agents_of(spec, n, n_ended, seed)
    written = compressed_steps_bytes(*steps, spec, 4) if draw(st.booleans()) else b""
    return m.UnityRLOutputProto.ListAgentInfoProto.FromString(written or steps_bytes(*steps, spec))


def _spoil_agent(draw: Any, info: Any) -> None:
    """Change something about one agent."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        info.reward = draw(_NUMBERS)
    elif kind == 1:
        info.group_reward = draw(_NUMBERS)
    elif kind == 2:
        info.done = not info.done
    elif kind == 3:
        info.max_step_reached = not info.max_step_reached
    elif kind == 4:
        info.id = draw(st.integers(-(2**31), 2**31 - 1))
    elif kind == 5:
        del info.action_mask[:]
        info.action_mask.extend(draw(st.lists(st.booleans(), max_size=140)))
    elif kind == 6:
        info.MergeFromString(draw(st.sampled_from((b"\xc0\x3e\x01", b"\x0a\x00", b"\x5a\x01\x02"))))
    else:
        info.MergeFrom(draw(messages(m.AgentInfoProto, likely=0.3)))


def _spoil_description(draw: Any, info: Any) -> None:
    """Change how one observation is described, or the number of observations."""
    obs = _any_observation(draw, info)
    kind = draw(st.integers(0, 5))
    if kind == 0:
        obs.name = draw(st.sampled_from(("", "eye", "another", "é" * 40)))
    elif kind == 1:
        del obs.shape[draw(st.integers(0, len(obs.shape))) :]
        obs.shape.extend(draw(st.lists(st.sampled_from((0, 1, 2, 5, -1, 2**31 - 1)), max_size=3)))
    elif kind == 2:
        del obs.dimension_properties[:]
        obs.dimension_properties.extend(draw(st.lists(st.integers(-1, 9), max_size=4)))
    elif kind == 3:
        obs.observation_type = draw(st.integers(0, 3))
    elif kind == 4:
        del info.observations[-1]
    else:
        info.observations.add().CopyFrom(obs)


def _spoil_content(draw: Any, info: Any) -> None:
    """Change the numbers or the image of one observation."""
    obs = _any_observation(draw, info)
    kind = draw(st.integers(0, 3))
    if kind == 0 and obs.float_data.data:
        at = draw(st.integers(0, len(obs.float_data.data) - 1))
        obs.float_data.data[at] = draw(_NUMBERS)
    elif kind == 1:
        obs.float_data.data.append(1.0)
    elif kind == 2:
        obs.compression_type = m.PNG
        shape = tuple(draw(st.sampled_from(((3, 2, 2), (1, 3, 2), (4, 2, 2)))))
        obs.compressed_data = draw(mutated(st.just(encode_png(np.ones(shape, np.float32)))))
    else:
        obs.compressed_channel_mapping.extend(draw(st.lists(st.integers(-2, 4), max_size=4)))


def _any_observation(draw: Any, info: Any) -> Any:
    if not info.observations:
        info.observations.add(shape=[1])
    return info.observations[draw(st.integers(0, len(info.observations) - 1))]


SPOILS = (_spoil_agent, _spoil_agent, _spoil_description, _spoil_content)


def spoil_announcement(draw: Any, brain: Any) -> None:
    """Change something about what a behavior is said to do."""
    sizes = st.sampled_from((-1, 0, 1, 3, 10**6, 2**31 - 1))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        brain.action_spec.num_continuous_actions = draw(sizes)
    elif kind == 1:
        brain.action_spec.num_discrete_actions = draw(sizes)
    elif kind == 2:
        brain.action_spec.discrete_branch_sizes.extend(draw(st.lists(sizes, max_size=3)))
        brain.action_spec.num_discrete_actions = len(brain.action_spec.discrete_branch_sizes)
    elif kind == 3:
        brain.ClearField("action_spec")
        brain.vector_action_size_deprecated.extend(draw(st.lists(sizes, max_size=3)))
        brain.vector_action_space_type_deprecated = draw(st.sampled_from((0, 1)))
    elif kind == 4:
        brain.brain_name = draw(NAMES)
    else:
        brain.MergeFrom(draw(messages(m.BrainParametersProto, likely=0.4)))
