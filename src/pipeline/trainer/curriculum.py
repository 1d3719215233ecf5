"""Curricula: which lesson each environment parameter is in, and when the next one begins.

No environment is touched here: `trainer.lessons` tells the environments.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.settings.schema.parameters import (
    ConstantSampler,
    GaussianSampler,
    MultiRangeUniformSampler,
    UniformSampler,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeline.settings.schema.parameters import (
        CompletionCriteria,
        EnvironmentParameter,
        Lesson,
        Sampler,
    )

# Share of the last measure in a smoothed one, as in ML-Agents.
_OLD_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Lessons that began."""

    parameters: tuple[str, ...] = ()
    """Parameters that are in a new lesson."""
    must_reset: bool = False
    """Whether a lesson that is over asked for a reset of the environment."""


class Curriculum:
    """The lesson of every environment parameter, moved on by what the behaviors achieve.

    A parameter without a curriculum is one lesson that never ends. All lessons that measure a
    behavior's reward look at one buffer of its last episode returns; when any lesson begins, all
    buffers and smoothed measures begin anew.

    Args:
        parameters: by name.
        starting_lesson: where every parameter begins, or at its last lesson if it has fewer.
    """

    def __init__(
        self, parameters: Mapping[str, EnvironmentParameter], *, starting_lesson: int = 0
    ) -> None:
        self._curricula = {name: one.curriculum for name, one in parameters.items()}
        self._numbers = {name: self._clamped(name, starting_lesson) for name in self._curricula}
        self._returns = _buffers(self._curricula.values())
        self._smoothed: dict[str, float] = {}
        self._progress: dict[str, float] = {}
        self._with_news: set[str] = set()

    @property
    def numbers(self) -> dict[str, int]:
        """The lesson number of each parameter, from 0."""
        return dict(self._numbers)

    @property
    def is_over(self) -> bool:
        """Whether every parameter is in its last lesson."""
        return all(self._criteria(name) is None for name in self._curricula)

    def lesson(self, parameter: str) -> Lesson:
        """The present lesson of a parameter."""
        return self._curricula[parameter][self._numbers[parameter]]

    def values(self) -> dict[str, Sampler]:
        """What each parameter is in its present lesson."""
        return {name: self.lesson(name).value for name in self._curricula}

    def measured(self) -> dict[str, list[str]]:
        """The behaviors that lessons still wait for, each with the parameters that do."""
        found: dict[str, list[str]] = {}
        for name, lessons in self._curricula.items():
            for lesson in lessons[self._numbers[name] : -1]:
                if lesson.completion_criteria is not None:
                    waiting = found.setdefault(lesson.completion_criteria.behavior, [])
                    if name not in waiting:
                        waiting.append(name)
        return found

    def observe(
        self, behavior: str, *, returns: Iterable[float], step: int, max_steps: int
    ) -> None:
        """Take note of how far a behavior is.

        Args:
            behavior: its name, without `?team=`.
            returns: sums of the environment's reward, of the episodes that ended since last time.
            step: agent steps that it has made.
            max_steps: agent steps that it shall make, above 0.
        """
        self._progress[behavior] = step / max_steps
        buffer = self._returns.get(behavior)
        if buffer is None:
            return
        finite = [value for value in returns if math.isfinite(value)]
        if finite:
            buffer.extend(finite)
            self._with_news.add(behavior)

    def advance(self) -> Change:
        """Begin the next lesson of every parameter whose criteria are met, and say which.

        To be called once for all that was observed at one step of the environment: a measure is
        smoothed once per call that follows the end of an episode.
        """
        moved, must_reset = [], False
        for name in self._curricula:
            criteria = self._criteria(name)
            if criteria is not None and self._is_met(name, criteria):
                moved.append(name)
                must_reset = must_reset or criteria.require_reset
        self._with_news.clear()
        for name in moved:
            self._numbers[name] += 1
        if moved:
            self._begin_anew()
        return Change(parameters=tuple(moved), must_reset=must_reset)

    def state_dict(self) -> dict[str, Any]:
        """Plain values that continue from here, to be taken after `advance`."""
        return {
            "lessons": dict(self._numbers),
            "returns": {behavior: list(values) for behavior, values in self._returns.items()},
            "smoothed": dict(self._smoothed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, or the `lessons` of it alone.

        A parameter that the state does not have stays where it is. One with fewer lessons than it
        had goes to its last; measures begin anew when any lesson is not the one they belong to.
        """
        saved = {name: int(number) for name, number in state["lessons"].items()}
        for name in self._numbers.keys() & saved.keys():
            self._numbers[name] = self._clamped(name, saved[name])
        self._begin_anew()
        if self._numbers != saved:
            return
        for behavior, returns in state.get("returns", {}).items():
            if behavior in self._returns:
                self._returns[behavior].extend(float(value) for value in returns)
        smoothed = state.get("smoothed", {})
        self._smoothed = {name: float(smoothed[name]) for name in self._numbers if name in smoothed}

    def _criteria(self, name: str) -> CompletionCriteria | None:
        """When the present lesson is over; None if it is the last."""
        if self._numbers[name] >= len(self._curricula[name]) - 1:
            return None
        return self.lesson(name).completion_criteria

    def _is_met(self, name: str, criteria: CompletionCriteria) -> bool:
        returns = self._returns[criteria.behavior]
        if len(returns) < criteria.min_lesson_length:
            return False
        if criteria.measure == "progress":
            return self._progress.get(criteria.behavior, 0.0) > criteria.threshold
        if criteria.behavior not in self._with_news:
            return False
        measure = sum(returns) / len(returns)
        if criteria.signal_smoothing:
            old = self._smoothed.get(name, measure)
            measure = self._smoothed[name] = _OLD_SHARE * old + (1.0 - _OLD_SHARE) * measure
        return measure > criteria.threshold

    def _begin_anew(self) -> None:
        for buffer in self._returns.values():
            buffer.clear()
        self._smoothed.clear()
        self._with_news.clear()

    def _clamped(self, name: str, number: int) -> int:
        return min(max(number, 0), len(self._curricula[name]) - 1)


def _buffers(curricula: Iterable[tuple[Lesson, ...]]) -> dict[str, deque[float]]:
    """An empty buffer of returns for each behavior that criteria name, as long as any asks for."""
    sizes: dict[str, int] = {}
    for lessons in curricula:
        for lesson in lessons:
            criteria = lesson.completion_criteria
            if criteria is not None:
                size = sizes.get(criteria.behavior, 1)
                sizes[criteria.behavior] = max(size, criteria.min_lesson_length)
    return {behavior: deque(maxlen=size) for behavior, size in sizes.items()}


def in_words(value: Sampler) -> str:
    """A parameter's value as log lines show it."""
    match value:
        case ConstantSampler():
            return f"Float: value={value.value}"
        case UniformSampler():
            return f"Uniform sampler: min={value.min_value}, max={value.max_value}"
        case GaussianSampler():
            return f"Gaussian sampler: mean={value.mean}, stddev={value.st_dev}"
        case MultiRangeUniformSampler():
            return f"MultiRangeUniform sampler: intervals={list(value.intervals)}"
    return str(value)
