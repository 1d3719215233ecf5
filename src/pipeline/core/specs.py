"""Specifications of observations and actions, with the names of ML-Agents' low-level API."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.arrays import AnyArray, FloatArray, IntArray
from pipeline.errors import UnityObservationException, UnitySpecificationException, brief

_log = logging.getLogger(__name__)

# The limits below bound memory: sizes come from another process, which may be faulty or hostile.
MAX_NUMBERS = 1 << 24
"""Maximum number of values in all observations of an agent: enough for two color cameras of 1080 x
1920 pixels."""
MAX_PARTS = 1024
"""Maximum number of an agent's observations, and of the branches of an agent's actions."""
SPACES, MAX_SPACES = "spaces: ", 1 << 16
"""Prefix of the text that describes an environment's spaces, and the text's maximum length."""
MAX_BEHAVIORS = 1024
"""Maximum number of behaviors in an environment; each behavior has its own networks."""
MAX_AGENTS = 1 << 17
"""Maximum number of a behavior's agents in one message; reading an agent may take 50 us."""
MAX_DIMENSIONS = 8
"""Maximum number of dimensions of an observation."""
MAX_ENTITIES = 4096
"""Maximum number of entities in a list of variable length; attention compares every pair."""
MAX_ACTIONS = 1 << 16
"""Maximum number of continuous actions plus choices of all branches; networks have an output for
each."""
FREE_BYTES = 1 << 27
"""Bytes of memory that any message or file may take, even if it is short."""
# Each byte that was sent allows this many more bytes of memory; a simple image takes 100 times as
# much memory as its PNG file.
_BYTES_PER_SENT_BYTE = 256
AGENT_BYTES = 4096
"""Maximum bytes of memory that an agent or a recorded step takes in addition to the numbers in its
arrays."""


# ML-Agents' messages contain the values of these flags as integers, so the values must not change.
class DimensionProperty(IntFlag):
    """Meaning of the positions along one dimension of an observation; the flags can be combined."""

    UNSPECIFIED = 0
    NONE = 1
    TRANSLATIONAL_EQUIVARIANCE = 2
    VARIABLE_SIZE = 4


# ML-Agents' messages contain the values of this enumeration, so the values must not change.
class ObservationType(IntEnum):
    """Purpose of an observation: an ordinary input, or the goal that an agent is to reach."""

    DEFAULT = 0
    GOAL_SIGNAL = 1


class ObservationSpec(NamedTuple):
    """Shape and meaning of one observation."""

    shape: tuple[int, ...]
    dimension_property: tuple[DimensionProperty, ...]
    observation_type: ObservationType = ObservationType.DEFAULT
    name: str = ""

    @staticmethod
    def vector(
        size: int, name: str = "", observation_type: ObservationType = ObservationType.DEFAULT
    ) -> ObservationSpec:
        """Return the specification of a vector of `size` numbers without spatial meaning."""
        return ObservationSpec((size,), (DimensionProperty.NONE,), observation_type, name)

    @staticmethod
    def visual(channels: int, height: int, width: int, name: str = "") -> ObservationSpec:
        """Return the specification of an image, channels first, with values in 0..1."""
        # A convolution may be used over height and width.
        spatial = DimensionProperty.TRANSLATIONAL_EQUIVARIANCE
        return ObservationSpec(
            (channels, height, width),
            (DimensionProperty.NONE, spatial, spatial),
            ObservationType.DEFAULT,
            name,
        )

    @staticmethod
    def entities(maximum: int, size: int, name: str = "") -> ObservationSpec:
        """Return the specification of a list of up to `maximum` entities of `size` numbers each.

        Rows of the list that no entity uses are zero.
        """
        return ObservationSpec(
            (maximum, size),
            # The first dimension counts entities, so their order carries no meaning for the
            # network.
            (DimensionProperty.VARIABLE_SIZE, DimensionProperty.NONE),
            ObservationType.DEFAULT,
            name,
        )


@dataclass(slots=True)
class ActionTuple:
    """Actions of N agents: `continuous` float32 [N, n] and `discrete` int32 [N, branches].

    If only one kind of actions is set, the other kind has the width 0, as in ML-Agents.
    """

    _continuous: FloatArray | None
    _discrete: IntArray | None

    def __init__(self, continuous: AnyArray | None = None, discrete: AnyArray | None = None):
        self._continuous = None if continuous is None else np.asarray(continuous, np.float32)
        # `add_discrete` and `add_continuous` also give the other kind of actions the width 0, if it
        # is not set.
        self._discrete = None
        if discrete is not None:
            self.add_discrete(discrete)
        elif continuous is not None:
            self.add_continuous(continuous)

    @property
    def continuous(self) -> FloatArray:
        """Return the continuous actions: float32 [N, n], with n actions for each of N agents."""
        return self._continuous  # type: ignore[return-value]  # it is None until actions are set

    @property
    def discrete(self) -> IntArray:
        """Return the discrete actions: int32 [N, branches], the index of each branch's choice."""
        return self._discrete  # type: ignore[return-value]  # it is None until actions are set

    def add_continuous(self, continuous: AnyArray) -> None:
        """Set the continuous actions [N, n], converted to float32."""
        self._continuous = np.asarray(continuous, dtype=np.float32)
        if self._discrete is None:
            self._discrete = np.zeros((len(self._continuous), 0), dtype=np.int32)

    def add_discrete(self, discrete: AnyArray) -> None:
        """Set the discrete actions [N, branches], converted to int32."""
        self._discrete = np.asarray(discrete, dtype=np.int32)
        if self._continuous is None:
            self._continuous = np.zeros((len(self._discrete), 0), dtype=np.float32)


class ActionSpec(NamedTuple):
    """Number of continuous actions, and number of choices of each discrete branch."""

    continuous_size: int
    discrete_branches: tuple[int, ...]

    @property
    def discrete_size(self) -> int:
        """Number of discrete branches."""
        return len(self.discrete_branches)

    def is_discrete(self) -> bool:
        """Return whether all actions are discrete."""
        return self.discrete_size > 0 and self.continuous_size == 0

    def is_continuous(self) -> bool:
        """Return whether all actions are continuous."""
        return self.discrete_size == 0 and self.continuous_size > 0

    def empty_action(self, n_agents: int) -> ActionTuple:
        """Return actions that are all zero, for `n_agents`."""
        return ActionTuple(
            np.zeros((n_agents, self.continuous_size), dtype=np.float32),
            np.zeros((n_agents, self.discrete_size), dtype=np.int32),
        )

    def random_action(self, n_agents: int, rng: np.random.Generator | None = None) -> ActionTuple:
        """Return uniformly distributed actions for `n_agents`; masks are not used.

        Continuous actions are in [-1, 1); each discrete action is any choice of its branch.
        """
        # ML-Agents' method has no argument `rng`, so it may be left out; the code of this project
        # passes a generator with a seed.
        rng = rng or np.random.default_rng()
        continuous = rng.uniform(-1.0, 1.0, (n_agents, self.continuous_size))
        # NumPy needs an upper bound even if there are no discrete branches.
        discrete = rng.integers(0, self.discrete_branches or 1, (n_agents, self.discrete_size))
        return ActionTuple(continuous.astype(np.float32), discrete.astype(np.int32))

    @staticmethod
    def create_continuous(continuous_size: int) -> ActionSpec:
        """Return a specification with continuous actions only."""
        return ActionSpec(continuous_size, ())

    @staticmethod
    def create_discrete(discrete_branches: Sequence[int]) -> ActionSpec:
        """Return a specification with discrete actions only."""
        return ActionSpec(0, tuple(discrete_branches))

    @staticmethod
    def create_hybrid(continuous_size: int, discrete_branches: Sequence[int]) -> ActionSpec:
        """Return a specification with continuous actions and discrete branches."""
        return ActionSpec(continuous_size, tuple(discrete_branches))

    def __str__(self) -> str:
        # This is the text of ML-Agents, which scripts may print or compare.
        return f"Continuous: {self.continuous_size}, Discrete: {self.discrete_branches}"


class BehaviorSpec(NamedTuple):
    """Specifications of the observations and actions of a behavior."""

    observation_specs: list[ObservationSpec]
    action_spec: ActionSpec


# `scales` is in a subclass, because BehaviorSpec is ML-Agents' public tuple and must keep its two
# fields.
class ScaledSpec(BehaviorSpec):
    """A behavior's specification with texts that explain the numbers in its tensors.

    `scales` has a text `TENSOR: MEANING` for each scaled tensor of the exported policy, and a text
    that describes the spaces of an environment with spaces. Comparisons of specifications ignore
    `scales`, because the networks do not depend on them.
    """

    scales: tuple[str, ...] = ()

    @staticmethod
    def of(spec: BehaviorSpec, scales: Sequence[str]) -> BehaviorSpec:
        """Return `spec` with the texts `scales`, or `spec` itself if there are no texts."""
        if not scales:
            return spec
        scaled = ScaledSpec(*spec)
        # Texts come from the environment and go into ONNX files, so they are shortened. A part of
        # a description of spaces would be useless, so a description that is too long is left out.
        is_whole = (t.startswith(SPACES) and t.isprintable() for t in scales[:MAX_PARTS])
        scaled.scales = tuple(
            text if whole else brief(text)
            for text, whole in zip(scales, is_whole, strict=False)
            if len(text) <= MAX_SPACES or not whole
        )
        return scaled


def scales_of(spec: BehaviorSpec) -> tuple[str, ...]:
    """Return the texts that explain a behavior's tensors (`ScaledSpec`); () if there are none."""
    return spec.scales if isinstance(spec, ScaledSpec) else ()


def check_spec(name: str, spec: BehaviorSpec) -> None:
    """Raise UnitySpecificationException if a size of observations or actions is not possible."""
    if (fault := _fault(spec)) is not None:
        raise UnitySpecificationException(f"behavior {brief(name)}: {fault}")


def _fault(spec: BehaviorSpec) -> str | None:
    return _fault_of_actions(spec.action_spec) or _fault_of_observations(spec.observation_specs)


def _fault_of_actions(actions: ActionSpec) -> str | None:
    n, branches = actions.continuous_size, actions.discrete_branches
    # Sizes are checked before any array is allocated, because a negative size would cause an
    # unclear error later.
    if n < 0 or min(branches, default=1) < 1:
        return (
            f"it announces {n} continuous actions and discrete branches of the sizes "
            f"{brief(branches)}; a number of actions is at least 0, and a branch has at least 1 "
            "choice: correct the action specification"
        )
    if not n and not branches:
        return "it announces no actions; give its agents a continuous or a discrete action"
    if len(branches) > MAX_PARTS or n + sum(branches) > MAX_ACTIONS:
        return (
            f"it announces {n} continuous actions and {len(branches)} discrete branches with "
            f"{sum(branches)} choices in all; at most {MAX_ACTIONS} actions and choices, in "
            f"{MAX_PARTS} branches, can be learned: divide large branches into several"
        )
    return None


def _fault_of_observations(specs: Sequence[ObservationSpec]) -> str | None:
    # The number of observations is checked first, because a message below lists all their shapes.
    if len(specs) > MAX_PARTS:
        return f"it has more than {MAX_PARTS} observations: join some of them"
    for index, obs in enumerate(specs):
        shape = brief(obs.shape)
        subject = f"observation {index} ({brief(obs.name) or 'no name'}) has the shape {shape}"
        smallest = 0 if len(obs.shape) == 1 else 1  # a vector may be empty
        if len(obs.shape) > MAX_DIMENSIONS or min(obs.shape, default=1) < smallest:
            return (
                f"{subject}; it must have at most {MAX_DIMENSIONS} dimensions, each of at least 1: "
                "correct the sensor"
            )
        # Attention over n entities has n * n scores, so the number of entities has its own limit.
        is_list = DimensionProperty.VARIABLE_SIZE in obs.dimension_property
        if is_list and max(obs.shape[:1], default=0) > MAX_ENTITIES:
            return (
                f"{subject}, a list of variable length; at most {MAX_ENTITIES} entries are "
                "possible, because every pair is compared: send fewer entries"
            )
    # Memory depends on the sum over all observations, not on the largest observation.
    total = sum(math.prod(obs.shape) for obs in specs)
    if total > MAX_NUMBERS:
        return (
            f"an agent observes {total} numbers, in the shapes "
            f"{brief([obs.shape for obs in specs])}; at most {MAX_NUMBERS} are possible: send "
            "smaller images"
        )
    return None


def row_bytes(spec: BehaviorSpec) -> int:
    """Return the maximum bytes of memory that an agent's observations, masks and actions take."""
    actions = spec.action_spec
    numbers = sum(math.prod(obs.shape) for obs in spec.observation_specs)
    masks, parts = sum(actions.discrete_branches), actions.continuous_size + actions.discrete_size
    # A float32 takes 4 bytes and a bool 1; 8 bytes for an action are an upper bound.
    return AGENT_BYTES + 4 * numbers + masks + 8 * parts


def refuse_excess(n_bytes: int, sent: int, what: str) -> None:
    """Raise UnitySpecificationException if `what` would take `n_bytes`, far more than `sent`."""
    # The limit is a ratio, because a short message may announce huge arrays, as an archive bomb
    # does.
    if n_bytes > FREE_BYTES + _BYTES_PER_SENT_BYTE * sent:
        raise UnitySpecificationException(
            f"{what} would take {n_bytes / 1e6:,.0f} MB of memory, although only "
            f"{sent:,} bytes were sent; send it in parts, or make images, masks and actions smaller"
        )


def check_behaviors(known: int, name: str) -> None:
    """Raise UnitySpecificationException if the behavior `name` is one behavior too many.

    `known` is the number of behaviors that were announced before.
    """
    if known >= MAX_BEHAVIORS:
        raise UnitySpecificationException(
            f"the environment announces more than {MAX_BEHAVIORS} behaviors, the last is "
            f"{brief(name)!r}: agents with the same task need the same behavior name"
        )


def refuse_other_spec(name: str, ours: BehaviorSpec, theirs: BehaviorSpec, where: str) -> None:
    """Raise UnityObservationException unless the specification `theirs` agrees with `ours`.

    `ours` is the known specification of the behavior `name`. Names of sensors may differ. `where`
    names the sender of `theirs`, for the error.
    """
    if ours == theirs:
        return
    difference = _difference(ours, theirs)
    # Names of sensors may differ, because two scenes may name equal sensors differently.
    if difference is not None:
        raise UnityObservationException(
            f"behavior {name}: {where} {difference}; all agents of a behavior must observe and do "
            "the same, so give the other agents another behavior name"
        )
    names, other = ([obs.name for obs in spec.observation_specs] for spec in (ours, theirs))
    note_other_names(name, str(names), str(other))


def _difference(ours: BehaviorSpec, theirs: BehaviorSpec) -> str | None:
    if ours.action_spec != theirs.action_spec:
        return f"takes the actions ({theirs.action_spec}), the others ({ours.action_spec})"
    first, second = ours.observation_specs, theirs.observation_specs
    names, other_names = [obs.name for obs in first], [obs.name for obs in second]
    # Swapped observations may have equal shapes; training would then exchange the inputs without
    # an error.
    if other_order(names, other_names):
        return f"sends the observations in the order {other_names}, the others {names}"
    if len(first) != len(second):
        return f"sends {len(second)} observations {other_names}, the others {len(first)} {names}"
    for index, (left, right) in enumerate(zip(first, second, strict=True)):
        # Observations are compared without their names, which may differ.
        if left._replace(name="") != right._replace(name=""):
            return (
                f"sends observation {index} {right.name!r} as {_described(right)}, the others "
                f"{left.name!r} as {_described(left)}"
            )
    return None


def _described(obs: ObservationSpec) -> str:
    properties = [int(flag) for flag in obs.dimension_property]
    return f"shape {obs.shape}, properties {properties}, {obs.observation_type.name}"


def other_order(names: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two lists have equal lengths, and share a name at different positions."""
    shared = {*names} & {*other}
    pairs = zip(names, other, strict=False)
    return len(names) == len(other) and any(
        a != b and (a in shared or b in shared) for a, b in pairs
    )


def other_names(one: BehaviorSpec, two: BehaviorSpec) -> tuple[list[str], list[str]] | None:
    """Return both lists of observation names; None if the lists are equal or a name is missing."""
    names, other = ([obs.name for obs in spec.observation_specs] for spec in (one, two))
    return (names, other) if all(names) and all(other) and names != other else None


# The cache prevents a second warning: a call with equal arguments does not run the body again.
@lru_cache(maxsize=256)
def note_other_names(behavior: str, names: str, other: str) -> None:
    """Warn once that agents of a behavior have sensors with different names."""
    _log.warning(
        "Behavior %s: an agent calls its observations %s, the first agent %s. They are taken to "
        "mean the same, because their shapes agree; check that the names mean the same.",
        behavior,
        other,
        names,
    )


def spec_to_mapping(spec: BehaviorSpec) -> dict[str, Any]:
    """Return a behavior's specification as plain values."""
    # Empty `scales` are left out, so that the file of a specification without scales has the same
    # bytes as in earlier versions, which did not have `scales`.
    scales = {"scales": list(scales_of(spec))} if scales_of(spec) else {}
    return {
        "observations": [
            {
                "shape": [int(size) for size in obs.shape],
                "dimension_property": [int(flag) for flag in obs.dimension_property],
                "observation_type": int(obs.observation_type),
                "name": obs.name,
            }
            for obs in spec.observation_specs
        ],
        "continuous_size": int(spec.action_spec.continuous_size),
        "discrete_branches": [int(size) for size in spec.action_spec.discrete_branches],
        **scales,
    }


def spec_from_mapping(values: Mapping[str, Any]) -> BehaviorSpec:
    """Return the specification in a mapping of `spec_to_mapping`; ValueError for a wrong size."""
    spec = BehaviorSpec(
        [
            ObservationSpec(
                tuple(int(size) for size in obs["shape"]),
                tuple(DimensionProperty(flag) for flag in obs["dimension_property"]),
                ObservationType(obs["observation_type"]),
                obs["name"],
            )
            for obs in values["observations"]
        ],
        ActionSpec(
            int(values["continuous_size"]), tuple(int(n) for n in values["discrete_branches"])
        ),
    )
    if (fault := _fault(spec)) is not None:
        raise ValueError(fault)
    return ScaledSpec.of(spec, [str(text) for text in values.get("scales", ())])
