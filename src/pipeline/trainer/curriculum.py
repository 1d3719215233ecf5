"""Curricula: the present lesson of each environment parameter, and the lesson's values."""

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.envs.workers import WorkerSet
from pipeline.settings.trainer import schema
from pipeline.tracking import names
from pipeline.trainer.environment import send_parameters
from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

# After this many steps, a warning names the behaviors that lessons measure but that the environment
# has not shown.
_STEPS_TO_SHOW_UP = 20
# Weight of the old value in a smoothed measure, as in ML-Agents' EnvironmentParameterManager.
_OLD_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What changes when lessons begin: the parameters with a new lesson, and whether to reset."""

    parameters: tuple[str, ...] = ()
    """Environment parameters that have begun a new lesson."""
    must_reset: bool = False
    """Whether a completed lesson has `require_reset`, so that environments must be reset."""


class Curriculum:
    """The lesson of every environment parameter, which changes with the behaviors' progress.

    A parameter without a curriculum has one lesson that never ends. All lessons that measure a
    behavior's reward share one buffer of its last episode returns; when any lesson begins, all
    buffers and smoothed measures are cleared.
    """

    def __init__(
        self, parameters: Mapping[str, schema.EnvironmentParameter], *, starting_lesson: int = 0
    ) -> None:
        self._curricula = {name: parameter.curriculum for name, parameter in parameters.items()}
        self._numbers = {name: self._clamped(name, starting_lesson) for name in self._curricula}
        self._returns = _buffers(self._curricula.values())
        self._smoothed: dict[str, float] = {}
        self._progress: dict[str, float] = {}
        self._ratings: dict[str, float] = {}
        self._has_new_returns: set[str] = set()

    @property
    def numbers(self) -> dict[str, int]:
        """The lesson number of each parameter, from 0."""
        return dict(self._numbers)

    @property
    def is_over(self) -> bool:
        """Whether every parameter is in its last lesson."""
        return not self._curricula or all(self._criteria(name) is None for name in self._curricula)

    def lesson(self, parameter: str) -> schema.Lesson:
        """The present lesson of a parameter."""
        return self._curricula[parameter][self._numbers[parameter]]

    def values(self) -> dict[str, schema.SamplerSettings]:
        """Return the value of each parameter in its present lesson."""
        return {name: self.lesson(name).value for name in self._curricula}

    def measured(self) -> dict[str, list[str]]:
        """Return the parameters in unfinished lessons, by the behavior that the lessons measure."""
        behaviors: dict[str, list[str]] = {}
        for name, lessons in self._curricula.items():
            # The last lesson is left out, because it never ends.
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
        """Record a behavior's progress: returns of the episodes that ended since the last call.

        `step` of `max_steps` agent steps have been made; `elo` is the rating in self-play.
        """
        self._progress[behavior] = step / max_steps
        if elo is not None:
            self._ratings[behavior] = elo
        buffer = self._returns.get(behavior)
        if buffer is None:
            return
        # After one infinite return, the smoothed measure would stay infinite.
        finite = [value for value in returns if math.isfinite(value)]
        if finite:
            buffer.extend(finite)
            self._has_new_returns.add(behavior)

    def advance(self) -> Change:
        """Begin the next lesson of every parameter that meets its criteria, and return the change.

        Called once per environment step, after `observe` was called for every behavior.
        """
        moved, must_reset = [], False
        for name in self._curricula:
            criteria = self._criteria(name)
            # Lessons that share a measure end together, so all criteria are checked before any
            # lesson ends.
            if criteria is not None and self._is_met(name, criteria):
                moved.append(name)
                must_reset = must_reset or criteria.require_reset
        self._has_new_returns.clear()
        for name in moved:
            self._numbers[name] += 1
        # All measures are cleared, because earlier returns belong to other parameter values.
        if moved:
            self._clear_measures()
        return Change(parameters=tuple(moved), must_reset=must_reset)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values; called after `advance` has used the new returns."""
        return {
            "lessons": dict(self._numbers),
            "returns": {behavior: list(values) for behavior, values in self._returns.items()},
            "smoothed": dict(self._smoothed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, or a map with the key `lessons` only.

        A parameter that is missing in the state keeps its lesson; a lesson that no longer exists
        becomes the last lesson. Measures are cleared if any lesson differs from the saved lesson.
        """
        saved = {name: int(number) for name, number in state["lessons"].items()}
        for name in self._numbers.keys() & saved.keys():
            self._numbers[name] = self._clamped(name, saved[name])
        self._clear_measures()
        # Returns of another lesson do not measure the present lesson.
        if self._numbers != saved:
            return
        for behavior, returns in state.get("returns", {}).items():
            if behavior in self._returns:
                self._returns[behavior].extend(float(value) for value in returns)
        smoothed = state.get("smoothed", {})
        self._smoothed = {name: float(smoothed[name]) for name in self._numbers if name in smoothed}

    def _criteria(self, name: str) -> schema.CompletionCriteria | None:
        """Return the criteria that end a parameter's present lesson; None for its last lesson."""
        if self._numbers[name] >= len(self._curricula[name]) - 1:
            return None
        return self.lesson(name).completion_criteria

    def _is_met(self, name: str, criteria: schema.CompletionCriteria) -> bool:
        returns = self._returns[criteria.behavior]
        # As in ML-Agents, even `progress` and `elo` need `min_lesson_length` episodes.
        if len(returns) < criteria.min_lesson_length:
            return False
        if criteria.measure == "progress":
            return self._progress.get(criteria.behavior, 0.0) > criteria.threshold
        if criteria.measure == "elo":
            return self._ratings.get(criteria.behavior, -math.inf) > criteria.threshold
        # Without a new episode the same mean would be smoothed again in each step.
        if criteria.behavior not in self._has_new_returns:
            return False
        measure = sum(returns) / len(returns)
        if criteria.signal_smoothing:
            # The first measure of a lesson has no previous value, and is taken unsmoothed.
            old = self._smoothed.get(name, measure)
            measure = self._smoothed[name] = _OLD_SHARE * old + (1.0 - _OLD_SHARE) * measure
        return measure > criteria.threshold

    def _clear_measures(self) -> None:
        for buffer in self._returns.values():
            buffer.clear()
        self._smoothed.clear()
        self._has_new_returns.clear()

    def _clamped(self, name: str, number: int) -> int:
        return min(max(number, 0), len(self._curricula[name]) - 1)


class Lessons:
    """Sends the present lessons of a curriculum to the workers.

    In the training loop, `on_step` follows each step and `apply` is called between two steps.
    Resets go through `reset`, because environments must get every parameter again with a reset.
    """

    def __init__(
        self,
        workers: WorkerSet,
        parameters: Mapping[str, schema.EnvironmentParameter],
        *,
        starting_lesson: int = 0,
    ) -> None:
        self.curriculum = Curriculum(parameters, starting_lesson=starting_lesson)
        self._workers = workers
        self._pending = Change()
        self._n_steps = 0
        self._unsent: set[str] = set()

    def begin(self) -> None:
        """Reset the workers for the first time, and log their lessons."""
        self._log_lessons(self.curriculum.numbers)
        self.reset(())

    def reset(self, learners: Iterable[Learner]) -> None:
        """Reset the workers with all parameters; the learners drop unfinished trajectories."""
        self._send(self.curriculum.numbers)
        self._workers.reset()
        for learner in learners:
            # A reset does not end an episode, so open trajectories have no last observation.
            learner.drop_unfinished()

    def on_step(self, learners: Collection[Learner]) -> None:
        """Measure the progress that the behaviors made in the latest environment step."""
        self._n_steps += 1
        if self.curriculum.is_over:
            for learner in learners:
                # This clears the list of returns, which would grow for the rest of the run.
                learner.statistics.take_ended()
            return
        returns = {learner.name: learner.statistics.take_ended() for learner in learners}
        for learner in learners:
            self.curriculum.observe(
                learner.name,
                returns=returns[learner.name],
                step=learner.step,
                max_steps=learner.settings.max_steps,
                elo=None if learner.snapshot_pool is None else learner.snapshot_pool.rating,
            )
        # `apply` sends new parameters later, because workers must not get them during a step.
        self._pending = self.curriculum.advance()
        # The check waits some steps, because an environment may spawn agents late.
        if self._n_steps == _STEPS_TO_SHOW_UP:
            self._warn_of_missing(returns)

    def apply(self, learners: Collection[Learner]) -> bool:
        """Between two steps, send the values of new lessons; return whether one has begun."""
        change, self._pending = self._pending, Change()
        if not change.parameters:
            return False
        self._log_lessons(change.parameters)
        if change.must_reset:
            # The reset sends all parameters, the new values included.
            self.reset(learners)
        else:
            self._send(change.parameters)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the lessons, and the changes that have not been sent to workers."""
        pending = {
            "parameters": list(self._pending.parameters),
            "must_reset": self._pending.must_reset,
        }
        return {"curriculum": self.curriculum.state_dict(), "pending": pending}

    def restore(self, run: Mapping[str, Any], *, exact: bool) -> None:
        """Restore the lessons of a saved run; `exact` means that the environments continue, too.

        Values of lessons that began but were not sent to these environments are then sent later.
        """
        saved = run.get("lessons")
        if saved is None:
            return
        self.curriculum.load_state_dict(saved["curriculum"])
        if exact:
            pending = saved["pending"]
            known = self.curriculum.numbers  # a saved parameter may not be in the settings any more
            self._pending = Change(
                parameters=tuple(name for name in pending["parameters"] if name in known),
                must_reset=bool(pending["must_reset"]),
            )

    def metrics(self) -> dict[str, float]:
        """Return the present lesson number of each parameter, by its tag in the summaries."""
        return {
            names.LESSON_NUMBER + name: float(number)
            for name, number in self.curriculum.numbers.items()
        }

    def _send(self, parameters: Iterable[str]) -> None:
        values = self.curriculum.values()
        unsent = send_parameters(self._workers, {name: values[name] for name in parameters})
        for name in sorted(unsent - self._unsent):
            _log.warning(
                "environment_parameters.%s cannot be sent to an environment that was opened "
                "without an EnvironmentParametersChannel; open the environment with this channel.",
                name,
            )
        # The names are kept, so that the warning comes only once for each parameter.
        self._unsent |= unsent

    def _log_lessons(self, parameters: Iterable[str]) -> None:
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
                    "environment_parameters: the lessons of %s measure the behavior '%s', which "
                    "the environment has not shown in %d steps (it shows %s); these lessons cannot "
                    "end before the behavior appears. A completion_criteria names a behavior "
                    "without '?team='.",
                    ", ".join(parameters),
                    behavior,
                    self._n_steps,
                    ", ".join(present) or "none",
                )


def _buffers(curricula: Iterable[tuple[schema.Lesson, ...]]) -> dict[str, deque[float]]:
    """Return an empty buffer of returns for each behavior, as long as its longest lesson needs."""
    sizes: dict[str, int] = {}
    for lessons in curricula:
        for lesson in lessons:
            criteria = lesson.completion_criteria
            if criteria is not None:
                # A buffer needs at least one place, because a measure is the mean of its returns.
                size = sizes.get(criteria.behavior, 1)
                sizes[criteria.behavior] = max(size, criteria.min_lesson_length)
    return {behavior: deque(maxlen=size) for behavior, size in sizes.items()}


def in_words(value: schema.SamplerSettings) -> str:
    """Return a parameter's value as a text in the form of ML-Agents' log lines."""
    match value:
        case schema.ConstantSampler():
            return f"Float: value={value.value}"
        case schema.UniformSampler():
            return f"Uniform sampler: min={value.min_value}, max={value.max_value}"
        case schema.GaussianSampler():
            return f"Gaussian sampler: mean={value.mean}, stddev={value.st_dev}"
        case schema.MultiRangeUniformSampler():
            return f"MultiRangeUniform sampler: intervals={list(value.intervals)}"
    return str(value)
