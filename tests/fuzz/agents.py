"""Random agents of small behaviors, and random faults in their messages."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.wire.codec.encoding import compressed_steps_bytes, steps_bytes
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.png import encode_png

from .mutations import mutated, spoil

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
    """Return steps of random agents; ids and masks depend on `seed // 4`, numbers on `seed`."""
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
    """Return a message of agent infos; in some messages images are PNGs."""
    steps = agents_of(spec, n, n_ended, seed)
    written = compressed_steps_bytes(*steps, spec, 4) if draw(st.booleans()) else b""
    return m.UnityRLOutputProto.ListAgentInfoProto.FromString(written or steps_bytes(*steps, spec))


_SIZES = st.sampled_from((-1, 0, 1, 2, 3, 5, 10**6, 2**31 - 1))
_VALUES = {
    **dict.fromkeys(("reward", "group_reward", "data"), _NUMBERS),
    "name": st.sampled_from(("", "eye", "another", "é" * 40)),
    "shape": _SIZES,
    "dimension_properties": st.integers(-1, 9),
    "observation_type": st.integers(0, 3),
    "compression_type": st.sampled_from((m.NONE, m.PNG)),
    "compressed_data": mutated(
        st.sampled_from(((3, 2, 2), (1, 3, 2), (4, 2, 2))).map(
            lambda shape: encode_png(np.ones(shape, np.float32))
        )
    ),
    "compressed_channel_mapping": st.integers(-2, 4),
    **dict.fromkeys(("num_continuous_actions", "num_discrete_actions"), _SIZES),
    **dict.fromkeys(("discrete_branch_sizes", "vector_action_size_deprecated"), _SIZES),
    "vector_action_space_type_deprecated": st.sampled_from((0, 1)),
}


def spoil_agent(draw: Any, info: Any) -> None:
    """Change a field of one agent's info, most often of an observation."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        info.MergeFromString(draw(st.sampled_from((b"\xc0\x3e\x01", b"\x0a\x00", b"\x5a\x01\x02"))))
    elif kind <= 4 and info.observations:
        spoil(draw, draw(st.sampled_from(list(info.observations))), _VALUES)
    else:
        spoil(draw, info, _VALUES)


def spoil_announcement(draw: Any, brain: Any) -> None:
    """Change a field of a behavior's announcement."""
    spoil(draw, draw(st.sampled_from((brain, brain.action_spec))), _VALUES)
