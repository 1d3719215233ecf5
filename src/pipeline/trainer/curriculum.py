"""Curricula: the lesson of each environment parameter, and the values that environments get."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.envs.workers import WorkerSet
from pipeline.settings.schema import (
    CompletionCriteria,
    ConstantSampler,
    EnvironmentParameter,
    GaussianSampler,
    Lesson,
    MultiRangeUniformSampler,
    SamplerSettings,
    UniformSampler,
)
from pipeline.tracking import names
from pipeline.trainer.environment import send_parameters
from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

# Steps of the environments after which a behavior that a lesson measures should have shown up.
_STEPS_TO_SHOW_UP = 20
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
    """

    def __init__(
        self, parameters: Mapping[str, EnvironmentParameter], *, starting_lesson: int = 0
    ) -> None:
        self._curricula = {name: parameter.curriculum for name, parameter in parameters.items()}
        self._numbers = {name: self._clamped(name, starting_lesson) for name in self._curricula}
        self._returns = _buffers(self._curricula.values())
        self._smoothed: dict[str, float] = {}
        self._progress: dict[str, float] = {}
        self._ratings: dict[str, float] = {}
        self._with_news: set[str] = set()

    @property
    def numbers(self) -> dict[str, int]:
        """The lesson number of each parameter, from 0."""
        return dict(self._numbers)

    @property
    def is_over(self) -> bool:
        """Whether every parameter is in its last lesson."""
        return not self._curricula or all(self._criteria(name) is None for name in self._curricula)

    def lesson(self, parameter: str) -> Lesson:
        """The present lesson of a parameter."""
        return self._curricula[parameter][self._numbers[parameter]]

    def values(self) -> dict[str, SamplerSettings]:
        """Return the value of each parameter in its present lesson."""
        return {name: self.lesson(name).value for name in self._curricula}

    def measured(self) -> dict[str, list[str]]:
        """Return the behaviors that lessons still measure, each with those lessons' parameters."""
        behaviors: dict[str, list[str]] = {}
        for name, lessons in self._curricula.items():
            for lesson in lessons[self._numbers[name] : -1]:
                if lesson.completion_criteria is not None:
                    waiting = behaviors.setdefault(lesson.completion_criteria.behavior, [])
                    if name not in waiting:
                        waiting.append(name)
        return behaviors

    def observe(
        self,
        behavior: str,
        *,
        returns: Iterable[float],
        step: int,
        max_steps: int,
        elo: float | None = None,
    ) -> None:
        """Record the progress of a behavior.

        Returns are those of the episodes that ended since last time; steps are agent steps, and
        `max_steps` is above 0.
        """
        self._progress[behavior] = step / max_steps
        if elo is not None:
            self._ratings[behavior] = elo
        buffer = self._returns.get(behavior)
        if buffer is None:
            return
        # Smoothing would keep an infinite return for good.
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
            # All are looked at before any moves on: lessons that share a measure begin together.
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
        """Restore what `state_dict` gave, or the `lessons` of it alone.

        A parameter that the state does not have stays where it is. One with fewer lessons than it
        had goes to its last; measures begin anew when any lesson is not the one they belong to.
        """
        saved = {name: int(number) for name, number in state["lessons"].items()}
        for name in self._numbers.keys() & saved.keys():
            self._numbers[name] = self._clamped(name, saved[name])
        self._begin_anew()
        # Returns of another lesson say nothing about this one.
        if self._numbers != saved:
            return
        for behavior, returns in state.get("returns", {}).items():
            if behavior in self._returns:
                self._returns[behavior].extend(float(value) for value in returns)
        smoothed = state.get("smoothed", {})
        self._smoothed = {name: float(smoothed[name]) for name in self._numbers if name in smoothed}

    def _criteria(self, name: str) -> CompletionCriteria | None:
        """Return what ends the present lesson; None if it is the last."""
        if self._numbers[name] >= len(self._curricula[name]) - 1:
            return None
        return self.lesson(name).completion_criteria

    def _is_met(self, name: str, criteria: CompletionCriteria) -> bool:
        returns = self._returns[criteria.behavior]
        if len(returns) < criteria.min_lesson_length:
            return False
        if criteria.measure == "progress":
            return self._progress.get(criteria.behavior, 0.0) > criteria.threshold
        if criteria.measure == "elo":
            return self._ratings.get(criteria.behavior, -math.inf) > criteria.threshold
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


class Lessons:
    """Keeps the workers at the present lessons of a curriculum.

    Within the training loop: `on_step` after a step has been absorbed, `apply` when no step is
    under way. A reset goes through `reset`, because environments are told every parameter with it.

    Attributes:
        curriculum: what is saved and taken up when a run is resumed.
    """

    def __init__(
        self,
        workers: WorkerSet,
        parameters: Mapping[str, EnvironmentParameter],
        *,
        starting_lesson: int = 0,
    ) -> None:
        self.curriculum = Curriculum(parameters, starting_lesson=starting_lesson)
        self._workers = workers
        self._pending = Change()
        self._n_steps = 0
        self._unsent: set[str] = set()

    def begin(self) -> None:
        """Reset the workers for the first time, and say which lessons they are in."""
        self._tell(self.curriculum.numbers)
        self.reset(())

    def reset(self, learners: Iterable[Learner]) -> None:
        """Reset the workers with all parameters; unfinished trajectories are dropped."""
        self._send(self.curriculum.numbers)
        self._workers.reset()
        for learner in learners:
            # A reset ends no episode, so open trajectories have no last observation.
            learner.drop_unfinished()

    def on_step(self, learners: Collection[Learner]) -> None:
        """Measure the results of the environments' last step."""
        self._n_steps += 1
        if self.curriculum.is_over:
            for learner in learners:
                # Nobody else takes them, and the list would grow for the rest of the run.
                learner.statistics.take_ended()
            return
        returns = {learner.name: learner.statistics.take_ended() for learner in learners}
        for learner in learners:
            self.curriculum.observe(
                learner.name,
                returns=returns[learner.name],
                step=learner.step,
                max_steps=learner.settings.max_steps,
                elo=None if learner.past is None else learner.past.rating,
            )
        # Kept until no step is under way: workers must not get new parameters during one.
        self._pending = self.curriculum.advance()
        if self._n_steps == _STEPS_TO_SHOW_UP:
            self._warn_of_missing(returns)

    def apply(self, learners: Collection[Learner]) -> bool:
        """Tell the workers which lessons have begun; to be called between two steps.

        Returns:
            Whether any lesson has begun.
        """
        change, self._pending = self._pending, Change()
        if not change.parameters:
            return False
        self._tell(change.parameters)
        if change.must_reset:
            self.reset(learners)
        else:
            self._send(change.parameters)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the lessons, with a change that the workers do not know yet."""
        pending = {
            "parameters": list(self._pending.parameters),
            "must_reset": self._pending.must_reset,
        }
        return {"curriculum": self.curriculum.state_dict(), "pending": pending}

    def restore(self, run: Mapping[str, Any], *, exact: bool) -> None:
        """Restore the lessons of a saved run, if it has any.

        With `exact` the workers go on too, and have yet to be told of a pending change.
        """
        saved = run.get("lessons")
        if saved is None:
            return
        self.curriculum.load_state_dict(saved["curriculum"])
        if exact:
            pending = saved["pending"]
            known = self.curriculum.numbers  # the configuration may have lost a parameter
            self._pending = Change(
                parameters=tuple(name for name in pending["parameters"] if name in known),
                must_reset=bool(pending["must_reset"]),
            )

    def metrics(self) -> dict[str, float]:
        """The present lesson numbers, by tag."""
        return {
            names.LESSON_NUMBER + name: float(number)
            for name, number in self.curriculum.numbers.items()
        }

    def _send(self, parameters: Iterable[str]) -> None:
        values = self.curriculum.values()
        unsent = send_parameters(self._workers, {name: values[name] for name in parameters})
        for name in sorted(unsent - self._unsent):
            _log.warning(
                "environment_parameters.%s is not sent to an environment that was opened before "
                "training without an EnvironmentParametersChannel; open it with one.",
                name,
            )
        self._unsent |= unsent

    def _tell(self, parameters: Iterable[str]) -> None:
        for name in parameters:
            lesson = self.curriculum.lesson(name)
            _log.info(
                "Parameter '%s' is in lesson '%s' and has value '%s'.",
                name,
                lesson.name,
                in_words(lesson.value),
            )

    def _warn_of_missing(self, present: Collection[str]) -> None:
        for behavior, parameters in self.curriculum.measured().items():
            if behavior not in present:
                _log.warning(
                    "environment_parameters: the lessons of %s wait for the behavior '%s', which "
                    "the environment has not shown in %d steps (it shows %s); until it does they "
                    "do not end. A completion_criteria names a behavior without '?team='.",
                    ", ".join(parameters),
                    behavior,
                    self._n_steps,
                    ", ".join(present) or "none",
                )


def _buffers(curricula: Iterable[tuple[Lesson, ...]]) -> dict[str, deque[float]]:
    """Return an empty buffer of returns for each behavior in criteria, of the longest length."""
    sizes: dict[str, int] = {}
    for lessons in curricula:
        for lesson in lessons:
            criteria = lesson.completion_criteria
            if criteria is not None:
                # One at least, because a mean of no returns is none.
                size = sizes.get(criteria.behavior, 1)
                sizes[criteria.behavior] = max(size, criteria.min_lesson_length)
    return {behavior: deque(maxlen=size) for behavior, size in sizes.items()}


def in_words(value: SamplerSettings) -> str:
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
