"""`environment_parameters`: constants, samplers and curricula that the environment is sent."""

import itertools
import logging
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import (
    Bounds,
    ContradictionError,
    CountOrZero,
    choice,
    display,
    read,
    read_dataclass,
    to_map,
    unknown_key,
)

_log = logging.getLogger(__name__)

SamplerSeed = Annotated[int, Bounds(at_least=-1)]
"""Seed of a sampler; -1 to have one derived from the run's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSettings:
    """How the environment draws a parameter's value; one subclass for each `sampler_type`."""

    sampler_type: ClassVar[str] = ""
    seed: SamplerSeed = -1
    """Seed of the environment's generator; -1 to have one derived from the run's."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> "SamplerSettings":
        """Read a number (a constant), or a map of `sampler_type` and `sampler_parameters`."""
        # True is an int to Python.
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return ConstantSampler(value=read(float, node, path))
        if not isinstance(node.value, dict):
            expected = "a number, a sampler or a curriculum"
            raise fail(node, path, f"needs {expected}, got {display(node)}")
        keys = ("sampler_type", "sampler_parameters")
        for key, item in node.value.items():
            if key not in keys:
                raise unknown_key(item, path, key, dict.fromkeys(keys))
        for key in keys:
            if key not in node.value:
                raise fail(node, path, f"does not contain {key}; a sampler needs both of {keys}")
        kind = _sampler_class(node.value["sampler_type"], join(path, "sampler_type"))
        sampler: SamplerSettings = read_dataclass(
            kind, node.value["sampler_parameters"], join(path, "sampler_parameters")
        )
        return sampler

    def to_plain(self) -> dict[str, Any]:
        """The map that `from_node` reads."""
        parameters = {item.name: to_map(getattr(self, item.name)) for item in fields(self)}
        return {"sampler_type": self.sampler_type, "sampler_parameters": parameters}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantSampler(SamplerSettings):
    """Always the same value."""

    sampler_type: ClassVar[str] = "constant"
    value: float = 0.0
    """The value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformSampler(SamplerSettings):
    """Any value of an interval, all equally likely."""

    sampler_type: ClassVar[str] = "uniform"
    min_value: float = 0.0
    """Lower end."""
    max_value: float = 1.0
    """Upper end, at least min_value."""

    def __post_init__(self) -> None:
        if self.min_value > self.max_value:
            text = f"must not exceed max_value ({self.max_value}), got {self.min_value}"
            raise ContradictionError("min_value", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianSampler(SamplerSettings):
    """A normal distribution."""

    sampler_type: ClassVar[str] = "gaussian"
    mean: float = 1.0
    """Middle of the distribution."""
    st_dev: float = 1.0
    """Standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiRangeUniformSampler(SamplerSettings):
    """Any value of several intervals, longer ones proportionally more often."""

    sampler_type: ClassVar[str] = "multirangeuniform"
    intervals: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """The intervals, each with its lower and its upper end."""

    def __post_init__(self) -> None:
        if not self.intervals:
            raise ContradictionError("intervals", "needs at least one interval [min, max]")
        for low, high in self.intervals:
            if low > high:
                text = f"the minimum of [{low}, {high}] exceeds its maximum"
                raise ContradictionError("intervals", text)


SAMPLERS: dict[str, type[SamplerSettings]] = {
    kind.sampler_type: kind
    for kind in (UniformSampler, GaussianSampler, MultiRangeUniformSampler, ConstantSampler)
}
"""The samplers by `sampler_type`."""


def _sampler_class(node: Node, path: str) -> type[SamplerSettings]:
    # ML-Agents' manual spells it so, and its code refuses that.
    if node.value == "multirange_uniform":
        _log.warning(
            "%s: %s: 'multirange_uniform' is called 'multirangeuniform'; taken as that.",
            node.where,
            path,
        )
        return MultiRangeUniformSampler
    return SAMPLERS[choice(node, path, SAMPLERS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionCriteria:
    """`completion_criteria`: when a lesson is over."""

    measure: Literal["reward", "progress", "elo", "Elo"] = "reward"
    """Mean return of recent episodes, the share of max_steps that is over, or the rating in
    self-play, which ML-Agents' manual writes `Elo`."""
    behavior: str
    """The behavior that is measured, without `?team=`."""
    min_lesson_length: CountOrZero = 0
    """Episodes that must have ended before the lesson can be over."""
    signal_smoothing: bool = True
    """Whether a reward is averaged with its last value (0.75 new, 0.25 old)."""
    threshold: float = 0.0
    """The lesson is over when the measure exceeds this; in [0, 1] for progress."""
    require_reset: bool = False
    """Whether the environment is reset for the next lesson."""

    def __post_init__(self) -> None:
        if self.measure == "Elo":
            # The class is frozen; it may be changed here only, before anyone has it.
            object.__setattr__(self, "measure", "elo")
        if self.measure == "progress" and not 0.0 <= self.threshold <= 1.0:
            text = f"must be in [0, 1] for the measure progress, got {self.threshold}"
            raise ContradictionError("threshold", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """One lesson of a curriculum: a value or a sampler, until the criteria are met."""

    name: str
    """Shown in logs."""
    completion_criteria: CompletionCriteria | None = None
    """When the next lesson begins; null for the last one."""
    value: SamplerSettings
    """What the environment gets during the lesson."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentParameter:
    """One entry of `environment_parameters`; a plain value is a curriculum of one lesson."""

    curriculum: tuple[Lesson, ...]
    """The lessons in order."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read a number, a sampler, or a map with `curriculum`."""
        name = path.removeprefix("environment_parameters.")
        if not (isinstance(node.value, dict) and "curriculum" in node.value):
            # ML-Agents names such a lesson after its parameter.
            return cls(curriculum=(Lesson(name=name, value=SamplerSettings.from_node(node, path)),))
        parameter: Self = read_dataclass(cls, node, path)
        lessons, at = node.value["curriculum"], join(path, "curriculum")
        if not parameter.curriculum:
            raise fail(lessons, at, "needs at least one lesson")
        for index, lesson in enumerate(parameter.curriculum[:-1]):
            if lesson.completion_criteria is None:
                text = f"A non-terminal lesson does not have a completion_criteria for {name}."
                raise fail(lessons.value[index], join(at, index), f"{text} Say when it is over")
        # A warning and no error: ML-Agents takes such files.
        if parameter.curriculum[-1].completion_criteria is not None:
            _log.warning(
                "%s: %s: the last lesson never ends, its completion_criteria is ignored.",
                lessons.value[-1].where,
                join(at, len(lessons.value) - 1),
            )
        return parameter


def seeded(
    parameters: dict[str, EnvironmentParameter], run_seed: int
) -> dict[str, EnvironmentParameter]:
    """The parameters with a seed for every sampler.

    The samplers without one (seed -1) get run_seed, run_seed + 1, and so on, in the order of
    parameters and lessons.
    """
    # ML-Agents' rule, so that a file with the same seed draws the same values there.
    free = itertools.count(run_seed)

    def with_seed(lesson: Lesson) -> Lesson:
        if lesson.value.seed != -1:
            return lesson
        return replace(lesson, value=replace(lesson.value, seed=next(free)))

    return {
        name: EnvironmentParameter(curriculum=tuple(map(with_seed, parameter.curriculum)))
        for name, parameter in parameters.items()
    }
