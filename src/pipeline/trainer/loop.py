"""The loop: step all environments, let every behavior learn, and keep what was learned safe."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import (
    CheckpointError,
    Interrupted,
    PipelineError,
    TrainingError,
    UnityPolicyException,
)
from pipeline.protocol.codec import NonFiniteError
from pipeline.tracking import names
from pipeline.trainer.checkpoints import load_checkpoint, numbered, reason_of, save_checkpoint
from pipeline.trainer.learner import Learner
from pipeline.trainer.lessons import Lessons
from pipeline.trainer.saved import description
from pipeline.trainer.statistics import REWARD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from pipeline.envs.workers import WorkerSet
    from pipeline.protocol.steps import Steps
    from pipeline.settings.schema import RunSettings
    from pipeline.tracking.base import Tracker
    from pipeline.trainer.learner import Decided
    from pipeline.trainer.stopping import StopRequest

_log = logging.getLogger(__name__)

# After these the networks, or the disk, are not fit to be saved: the last good checkpoint stays.
_STATE_IS_BAD = (CheckpointError, TrainingError, UnityPolicyException)

RESUME_FILE = "checkpoint.pt"
# Seconds between refreshes of the file that a killed run resumes from.
RESUME_INTERVAL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorResult:
    """What training one behavior came to."""

    steps: int
    n_updates: int
    n_episodes: int
    mean_reward: float | None
    """Mean return of the last episodes (100 at most), None when no episode ended."""
    checkpoint: Path
    """Everything needed to continue, evaluate or export."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run came to."""

    behaviors: Mapping[str, BehaviorResult]
    seconds: Mapping[str, float]
    """Wall time by part: environment, wire, inference, storage, update, total."""


@dataclass(kw_only=True, slots=True)
class _Progress:
    """What one behavior has due next."""

    next_summary: int
    next_checkpoint: int
    saved_at: float = field(default_factory=time.monotonic)


class TrainingLoop:
    """Trains every behavior that the workers show.

    Args:
        workers: environments, not yet reset.
        settings: of the run.
        seed: of the run.
        run_dir: gets a folder for each behavior.
        device: where networks live.
        tracker: where summaries go.
        init_from: weights to begin with, by behavior; a checkpoint file each.
        resume: continue from the checkpoints in `run_dir`.
        resume_interval_s: how often the resume file is refreshed at most.
        on_start: called once, when there is something to train and all of it can be trained.
        starting_lesson: where the curriculum of every environment parameter begins.
    """

    def __init__(
        self,
        workers: WorkerSet,
        settings: RunSettings,
        *,
        seed: int,
        run_dir: Path,
        device: torch.device,
        tracker: Tracker,
        init_from: Mapping[str, Path] | None = None,
        resume: bool = False,
        resume_interval_s: float = RESUME_INTERVAL_S,
        on_start: Callable[[], None] | None = None,
        starting_lesson: int = 0,
    ) -> None:
        self.workers = workers
        self.lessons = Lessons(
            workers, settings.environment_parameters or {}, starting_lesson=starting_lesson
        )
        self.settings = settings
        self.seed = seed
        self.run_dir = run_dir
        self.device = device
        self.tracker = tracker
        self.init_from = init_from or {}
        self.resume = resume
        self.resume_interval_s = resume_interval_s
        self._on_start = on_start
        self._started = False
        self.learners: dict[str, Learner] = {}
        self._progress: dict[str, _Progress] = {}
        self._stepping_s = 0.0
        self._reported: dict[str, dict[str, float]] = {}

    def run(self, should_stop: StopRequest) -> TrainResult:
        """Train until every behavior has its `max_steps`.

        Args:
            should_stop: asked after every step; True saves and ends the run.

        Raises:
            Interrupted: `should_stop` said so; the state is saved.
            PipelineError: The environment, a setting or the training failed; what was learned is
                saved, unless it is what failed.
        """
        began = time.perf_counter()
        try:
            self.lessons.begin()
            while True:
                self._step()
                self._note_start()
                if self._finished():
                    break
                self._stop_if(should_stop)
                self._timed(self.workers.step_wait)
                self.lessons.apply(self.learners.values())
        except NonFiniteError as error:
            self._save_learned()
            raise NonFiniteError(f"{error} It came {self._at()}; repair the environment") from error
        except _STATE_IS_BAD:
            raise
        except Interrupted:
            self._save_all()
            raise
        except PipelineError:
            self._save_learned()
            raise
        self._save_all(final=True)
        return self._result(time.perf_counter() - began)

    def _note_start(self) -> None:
        """Once there is something to train: say so, and which weights to begin with are unused."""
        if self._started or not self.learners:
            return
        self._started = True
        if self._on_start is not None:
            self._on_start()
        unused = sorted(self.init_from.keys() - self.learners.keys())
        if unused:
            _log.warning(
                "There are weights to begin with for %s, but the environment shows %s; only "
                "behaviors of the same name begin with them.",
                ", ".join(unused),
                ", ".join(self.learners),
            )

    def _step(self) -> None:
        """Act on what the workers sent; while they work on that, store it and learn from it."""
        taken: list[tuple[str, Learner, list[Steps], Decided]] = []
        for qualified in self.workers.behavior_specs:
            learner, steps = self._learner(qualified), self.workers.get_steps(qualified)
            decided = learner.decide(steps)
            self.workers.set_actions(qualified, decided.actions)
            taken.append((qualified, learner, steps, decided))
        self._take_stats(taken)
        self._timed(self.workers.step_send)
        for qualified, learner, steps, decided in taken:
            learner.absorb(steps, team=qualified)
            learner.remember(steps, decided, team=qualified)
        self.lessons.heed(self.learners.values())
        for _, learner, _, _ in taken:
            while learner.learn():
                self._after_update(learner)
            self._summarize(learner)

    def _take_stats(self, taken: Sequence[tuple[str, Learner, list[Steps], Decided]]) -> None:
        """Add what each worker has reported to every behavior that has agents in its step."""
        for worker, stats in enumerate(self.workers.take_stats()):
            if not stats:
                continue
            seen = {one.name: one for _, one, steps, _ in taken if any(map(len, steps[worker]))}
            for learner in seen.values():
                learner.statistics.add_environment(stats, with_most_recent=worker == 0)

    def _timed(self, stepping: Callable[[], None]) -> None:
        began = time.perf_counter()
        stepping()
        self._stepping_s += time.perf_counter() - began

    def _finished(self) -> bool:
        return bool(self.learners) and all(one.finished for one in self.learners.values())

    def _learner(self, qualified: str) -> Learner:
        name = qualified.partition("?")[0]
        learner = self.learners.get(name)
        if learner is None:
            learner = self.learners[name] = self._new_learner(name, qualified)
        return learner

    def _new_learner(self, name: str, qualified: str) -> Learner:
        settings = self.settings.for_behavior(name)
        spec = self.workers.behavior_specs[qualified]
        learner = Learner(name, spec, settings, seed=self.seed, device=self.device)
        path = self.run_dir / name / RESUME_FILE
        if self.resume and path.exists():
            self._restore(learner, path, whole=True)
            _log.info("Resuming training of %s from step %d.", name, learner.step)
        elif name in self.init_from:
            self._restore(learner, self.init_from[name], whole=False)
            _log.info("%s begins with the weights of %s.", name, self.init_from[name])
        self._progress[name] = _Progress(
            next_summary=_next_multiple(learner.step, settings.summary_freq),
            next_checkpoint=_next_multiple(learner.step, settings.checkpoint_interval),
        )
        return learner

    def _restore(self, learner: Learner, path: Path, *, whole: bool) -> None:
        """Take up a checkpoint: its `whole` state, or its weights."""
        state = load_checkpoint(path, device=str(self.device))
        try:
            if whole:
                learner.load_state_dict(state["learner"])
            else:
                learner.algorithm.load_weights(state["learner"]["algorithm"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: this checkpoint does not fit the behavior {learner.name} as it is now "
                f"({reason_of(error)}); use the settings and the environment that it was made "
                "with, or begin a new run without it"
            ) from error

    def _after_update(self, learner: Learner) -> None:
        progress = self._progress[learner.name]
        if learner.step >= progress.next_checkpoint:
            interval = learner.settings.checkpoint_interval
            progress.next_checkpoint = _next_multiple(learner.step, interval)
            self._save(learner, number=True)
        elif time.monotonic() - progress.saved_at >= self.resume_interval_s:
            self._save(learner)

    def _summarize(self, learner: Learner) -> None:
        progress = self._progress[learner.name]
        if learner.step < progress.next_summary:
            return
        frequency = learner.settings.summary_freq
        at = learner.step // frequency * frequency
        progress.next_summary = at + frequency
        spread = learner.statistics.reward_spread()
        distributions = learner.statistics.distributions()
        values = learner.statistics.period()
        if REWARD in values:
            values[names.REWARD_STD] = spread
        values.update(self.lessons.metrics())
        values.update(self._time_split(learner))
        self.tracker.metrics(learner.name, values, at)
        self.tracker.distributions(learner.name, distributions, at)

    def _time_split(self, learner: Learner) -> dict[str, float]:
        """Seconds of each part since the last summary."""
        now = self._seconds(learner)
        before = self._reported.get(learner.name, {})
        self._reported[learner.name] = now
        return {f"Time/{part}": value - before.get(part, 0.0) for part, value in now.items()}

    def _seconds(self, learner: Learner) -> dict[str, float]:
        wire = self.workers.codec_seconds
        return {
            "environment": max(self._stepping_s - wire, 0.0),
            "wire": wire,
            **learner.seconds,
        }

    def _save_all(self, *, final: bool = False) -> None:
        for learner in self.learners.values():
            self._save(learner, number=final)

    def _save_learned(self) -> None:
        """Save those that have learned something since they began."""
        for learner in self.learners.values():
            if learner.step > 0:
                self._save(learner)

    def _save(self, learner: Learner, *, number: bool = False) -> None:
        folder = self.run_dir / learner.name
        state = {
            **description(learner.name, learner.spec, self.settings),
            "learner": learner.state_dict(),
        }
        if number:
            path, surplus = numbered(
                folder, learner.name, learner.settings.keep_checkpoints, learner.step
            )
            save_checkpoint(path, state)
            for old in surplus:
                old.unlink(missing_ok=True)
        save_checkpoint(folder / RESUME_FILE, state)
        self._progress[learner.name].saved_at = time.monotonic()

    def _stop_if(self, should_stop: StopRequest) -> None:
        if not should_stop():
            return
        saved = f"the state is saved in {self.run_dir}" if self.learners else "nothing to save yet"
        message = f"stopped by a signal {self._at()}; {saved}"
        raise Interrupted(message, exit_code=should_stop.exit_code)

    def _at(self) -> str:
        """At which step of each behavior training is, for messages."""
        steps = ", ".join(f"at step {one.step} of {name}" for name, one in self.learners.items())
        return steps or "before the first step"

    def _result(self, total_s: float) -> TrainResult:
        seconds: dict[str, float] = {"total": total_s}
        behaviors = {}
        for name, learner in self.learners.items():
            for part, value in learner.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + value
            recent = learner.statistics.recent
            behaviors[name] = BehaviorResult(
                steps=learner.step,
                n_updates=learner.n_updates,
                n_episodes=learner.statistics.n_episodes,
                mean_reward=sum(recent) / len(recent) if recent else None,
                checkpoint=self.run_dir / name / RESUME_FILE,
            )
        seconds["wire"] = self.workers.codec_seconds
        seconds["environment"] = max(self._stepping_s - seconds["wire"], 0.0)
        return TrainResult(behaviors=behaviors, seconds=seconds)


def _next_multiple(step: int, interval: int) -> int:
    return (step // interval + 1) * interval


def outcome(result: TrainResult) -> dict[str, Any]:
    """A run's outcome without timings, for files that are compared byte by byte."""
    return {
        name: {
            "steps": one.steps,
            "n_updates": one.n_updates,
            "n_episodes": one.n_episodes,
            "mean_reward": one.mean_reward,
        }
        for name, one in result.behaviors.items()
    }
