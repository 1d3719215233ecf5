"""The curriculum and the environments together: these are told what the present lessons say."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pipeline.tracking import names
from pipeline.trainer.curriculum import Change, Curriculum, in_words
from pipeline.trainer.environment import send_parameters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pipeline.envs.workers import WorkerSet
    from pipeline.settings.schema.parameters import EnvironmentParameter
    from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

# Steps of the environments after which a behavior that a lesson measures should have shown up.
_STEPS_TO_SHOW_UP = 20


class Lessons:
    """Keeps the workers at the present lessons of a curriculum.

    Within the training loop: `heed` after a step has been absorbed, `apply` when no step is under
    way. A reset goes through `reset`, because environments are told every parameter with it.

    Args:
        workers: the environments.
        parameters: the run's `environment_parameters`, with a seed for each sampler.
        starting_lesson: where every parameter begins.

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
            learner.environment_was_reset()

    def heed(self, learners: Collection[Learner]) -> None:
        """Measure what the last step of the environments came to."""
        self._n_steps += 1
        if self.curriculum.is_over:
            for learner in learners:
                learner.statistics.take_ended()
            return
        returns = {learner.name: learner.statistics.take_ended() for learner in learners}
        for learner in learners:
            self.curriculum.observe(
                learner.name,
                returns=returns[learner.name],
                step=learner.step,
                max_steps=learner.settings.max_steps,
            )
        self._pending = self.curriculum.advance()
        if self._n_steps == _STEPS_TO_SHOW_UP:
            self._warn_of_missing(returns)

    def apply(self, learners: Collection[Learner]) -> bool:
        """Tell the workers which lessons have begun, now that no step is under way.

        Returns:
            Whether any has.
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
        """What continues the lessons, the change that the workers do not know yet included."""
        pending = {
            "parameters": list(self._pending.parameters),
            "must_reset": self._pending.must_reset,
        }
        return {"curriculum": self.curriculum.state_dict(), "pending": pending}

    def restore(self, run: Mapping[str, Any], *, exact: bool) -> None:
        """Take up the lessons of a saved run.

        Args:
            run: what its behaviors shared; may have no lessons.
            exact: whether the workers go on too, and have yet to be told of a pending change.
        """
        saved = run.get("lessons")
        if saved is None:
            return
        self.curriculum.load_state_dict(saved["curriculum"])
        if exact:
            pending = saved["pending"]
            self._pending = Change(
                parameters=tuple(pending["parameters"]), must_reset=pending["must_reset"]
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

    def _warn_of_missing(self, shown: Collection[str]) -> None:
        for behavior, parameters in self.curriculum.measured().items():
            if behavior not in shown:
                _log.warning(
                    "environment_parameters: the lessons of %s wait for the behavior '%s', which "
                    "the environment has not shown in %d steps (it shows %s); until it does they "
                    "do not end. A completion_criteria names a behavior without '?team='.",
                    ", ".join(parameters),
                    behavior,
                    self._n_steps,
                    ", ".join(shown) or "none",
                )
