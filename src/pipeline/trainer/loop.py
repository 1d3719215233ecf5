"""The training loop: step all environments, update every behavior, save checkpoints."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline import errors, files, seeding
from pipeline.algos.process_group import SINGLE_PROCESS, ProcessGroup
from pipeline.core.specs import BehaviorSpec, refuse_other_spec
from pipeline.core.steps import Steps
from pipeline.envs.workers import WorkerSet
from pipeline.settings.pace import AUTO
from pipeline.settings.trainer.schema import TrainerSettings
from pipeline.tracking import names
from pipeline.tracking.base import Tracker, Update
from pipeline.tracking.result import BehaviorResult, TrainResult
from pipeline.trainer.batching import Message
from pipeline.trainer.checkpoints.file import (
    RESUME_FILE,
    description,
    states_by_rank,
    warn_of_unused,
    weights_of,
)
from pipeline.trainer.checkpoints.manager import CheckpointManager, Exporter, NullCheckpointManager
from pipeline.trainer.checkpoints.restore import (
    latest_run,
    load_initial_weights,
    restore,
    restore_workers,
    usable,
)
from pipeline.trainer.checkpoints.resume_points import (
    RESUME_INTERVAL_S,
    JointResumePoints,
    ResumePoints,
)
from pipeline.trainer.curriculum import Lessons
from pipeline.trainer.device_choice import fastest_device, fastest_threads
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.distributed.sync import Synchronizer, settings_per_learner
from pipeline.trainer.environment import JobSpec
from pipeline.trainer.learner import Decided, Learner
from pipeline.trainer.pace import PaceMeter
from pipeline.trainer.self_play import SelfPlay
from pipeline.trainer.stopping import StopRequest
from pipeline.trainer.timing import Stopwatch, add_reports
from pipeline.wire.codec.decoding import NonFiniteError

_log = logging.getLogger(__name__)

# After these errors the networks or the disk cannot be used, so nothing more is saved.
_STATE_IS_BAD = (errors.CheckpointError, errors.TrainingError, errors.UnityPolicyException)


class TrainingLoop:
    """Trains every behavior of the workers' environments; `trainer.api.train` describes more.

    Args:
        workers: connected environments, before their first reset.
        job: settings and folders of the run.
        device: device of the networks; None measures which is the fastest for each behavior.
        tracker: calls the callbacks, which may end the run unless it has several learners.
        inference: act, and count steps and episodes, but neither learn nor save.
        resume_interval_s: least seconds between two writes of the resume files.
        group: the processes of the run, each with its own training loop; only the first one saves.
    """

    def __init__(
        self,
        workers: WorkerSet,
        job: JobSpec,
        *,
        device: torch.device | None,
        tracker: Tracker,
        inference: bool = False,
        exporter: Exporter | None = None,
        resume_interval_s: float = RESUME_INTERVAL_S,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.workers = workers
        self._in_turn = len(workers.groups) > 1
        parameters = job.settings.environment_parameters or {}
        self.lessons = Lessons(workers, parameters, starting_lesson=job.starting_lesson)
        self.self_play = SelfPlay()
        self.job = job
        self.settings = job.settings
        self.device = device
        self._devices: dict[str, str] = {}  # the fastest device of each behavior
        self._threads: int | None = None  # the number measured for the first behavior
        self.tracker = tracker
        self.inference = inference
        kind = CheckpointManager if group.rank == 0 else NullCheckpointManager
        self.checkpoints = kind(
            job.run_dir,
            job.settings,
            exporter=None if inference else exporter,
            on_checkpoint=partial(tracker.tell, "on_checkpoint"),
        )
        self.group = group
        self._may_end = tracker.callbacks if group.size == 1 else ()
        self._is_ended = False
        saving = (self.checkpoints, workers, resume_interval_s)
        joint = JointResumePoints(*saving) if isinstance(group, DistributedGroup) else None
        self.resume_points = joint or ResumePoints(*saving)
        self.synchronizer = Synchronizer(group, joint)
        # Only the first process reads the files; each process gets its own part of the state.
        saved = self.checkpoints.saved() if job.resume else {}
        self._saved = group.scatter_object(states_by_rank(saved, group.size))
        self._exact = False
        self._updated: set[str] = set()
        self._meters: dict[Learner, PaceMeter] = {}
        """Meters of behaviors with `steps_per_update: auto`, until the number is chosen."""
        self._started = False
        self.learners: dict[str, Learner] = {}
        tracker.learners = self.learners
        self._learner_of: dict[str, Learner] = {}
        # Steps at which the next summary and checkpoint of each behavior are due.
        self._next_summary: dict[str, int] = {}
        self._next_checkpoint: dict[str, int] = {}
        self.stopwatch = Stopwatch(workers)

    def run(self, should_stop: StopRequest) -> TrainResult:
        """Train until all behaviors reach `max_steps`; with `inference`, until `should_stop`.

        Raises:
            Interrupted: `should_stop`, which is read after every step, ended the run; it is saved.
            PipelineError: The environment, a setting or the training failed; the learners are
                saved, unless their values are not finite or the disk failed.
        """
        should_stop = self.synchronizer.listen(should_stop)
        try:
            self._begin()
            self._note_start()
            finished_before = self._finished()
            if not finished_before:
                self._step_until_finished(should_stop)
        except NonFiniteError as error:
            self._save_learned()
            # The networks can be saved: the non-finite numbers were refused before any update.
            raise NonFiniteError(
                f"{error} This happened {self._at()}; fix the environment"
            ) from error
        except _STATE_IS_BAD:
            raise
        except errors.Interrupted:
            learners = list(self.learners.values())
            self.resume_points.stop(learners, self._shared_state())
            self._export(learners)
            raise self._interrupted(should_stop) from None
        except errors.PipelineError as error:
            request = self.synchronizer.request
            self._save_learned(is_stopping=request())
            if request():  # Ctrl-C goes to the whole process group, so environments end too
                raise self._interrupted(request) from error
            raise
        # The seconds are read here, so that they do not include the final export.
        seconds = self.stopwatch.seconds(self.learners.values())
        if finished_before:  # no step was taken, so the checkpoints stay as they are
            _log.info("The run was finished %s; set a larger max_steps to continue.", self._at())
            self.checkpoints.export_final(list(self.learners.values()))
        elif not self.inference:
            self.checkpoints.finish(list(self.learners.values()), self._shared_state())
        return result_of(
            self.learners,
            self.job.run_dir,
            seconds,
            interrupted=self.resume_points.interrupted,
            n_exchanges=self.stopwatch.n_exchanges,
        )

    def _step_until_finished(self, should_stop: StopRequest) -> None:
        while True:
            self._step()
            if self._is_ended or self._finished() or (self.inference and should_stop()):
                return
            if self._updated:
                self._save_due()
            stopping, points = should_stop(), self.resume_points
            # If the environments do not send states, there is no reason to wait for their answers.
            if stopping and not points.is_exact:
                raise self._interrupted(should_stop)
            # Groups of workers take turns; a resume point needs all groups between two steps.
            if stopping or points.is_pending or points.is_due or not self._in_turn:
                self._receive()
            # The environments' states came with the answers that were just received.
            if points.is_pending:
                points.complete()
            self._apply_lessons()
            if stopping:
                raise self._interrupted(should_stop)
            if points.is_due:
                points.begin(list(self.learners.values()), self._shared_state())

    def _begin(self) -> None:
        """Restore the environments from the resume files, or else reset them."""
        self._exact = bool(self.group.least(int(restore_workers(self.workers, self._saved))))
        run = latest_run(self._saved)
        self.resume_points.resumed(run, is_exact=self._exact)
        with usable(self.job.run_dir):
            self.lessons.restore(run, exact=self._exact)
            self.self_play.restore(run)
        # The first reset sends all environment parameters; restored environments have them already.
        if not self._exact:
            self.lessons.begin()
        self.tracker.is_resuming = bool(self._saved)
        for qualified in self.workers.behavior_specs if self._saved else ():
            self._learner(qualified)
        self.tracker.load_state_dict(run)

    def _apply_lessons(self) -> None:
        """Between two steps, begin due lessons, and change the learning team if that is due."""
        if self.lessons.apply(self.learners.values()):
            self.checkpoints.begin_lessons(self.lessons.curriculum.numbers)
        if self.self_play.learning is not None and self.self_play.advance():
            # As in ML-Agents, the environments are reset when another team begins to learn.
            self.lessons.reset(self.learners.values())

    def _note_start(self) -> None:
        """When the first behavior has appeared, call `on_settings`; warn of unused weights."""
        if self._started or not self.learners:
            return
        self._started = True
        self.resume_points.note_start(self.learners.values())
        if not self._finished():  # the files of a finished run must not change
            self.tracker.tell("on_settings", self.settings)
            if self.tracker.error is not None:
                raise self.tracker.error  # nothing has been learned that must be saved first
        self.checkpoints.list_lessons(self.lessons.curriculum.numbers)
        warn_of_unused(self.job.init_from, self.learners, self.settings)

    def _step(self) -> None:
        """Send actions to the workers; store steps and learn while the environments compute."""
        turns: list[tuple[str, Learner, list[Steps]]] = []
        for group in self.workers.groups:
            if self._in_turn:
                self._receive(group)
            # While this group's environments compute, the loop turns to the next group.
            turns += self._turn(group)
        if not self._started:
            self._note_start()
        self.stopwatch.n_exchanges += 1
        for learner, meter in list(self._meters.items()):
            if meter.exchanged(self.stopwatch.seconds(())["environment"]):
                self._choose_pace(learner, meter)
        add_reports(turns, self.workers.take_stats())
        # Processes synchronise first, so that lessons and updates see equal counts in each process.
        self.synchronizer.sync_if_due(self.learners, self._next_summary)
        self.lessons.on_step(self.learners.values())
        # `dict.fromkeys` lists each learner once, even if several teams or groups of workers share
        # the learner, because spread updates count the calls of `learn`.
        for learner in dict.fromkeys(learner for _, learner, _ in turns):
            while learner.learn():
                self._note_update(learner)
            self._summarize(learner)
        if self.tracker.hears_exchanges:
            self.tracker.on_exchange()
        for callback in self._may_end:
            self._is_ended |= callback.stop or self.tracker.error is not None

    def _receive(self, group: Sequence[int] | None = None) -> None:
        self.stopwatch.timed(self.workers.step_wait, group)
        # A worker that was started again begins new episodes, so the run is not exact any more.
        for worker in self.workers.take_restarted():
            self.resume_points.interrupt(self.learners.values())
            for learner in self.learners.values():
                learner.drop_unfinished(worker)

    def _turn(self, group: Sequence[int]) -> list[tuple[str, Learner, list[Steps]]]:
        """Send actions to a group of workers, and store the workers' last steps afterwards."""
        turns: list[tuple[str, Learner, list[Steps]]] = []
        decisions: list[tuple[Message, Decided]] = []
        for qualified in self.workers.behavior_specs:
            learner = self._learner_of.get(qualified) or self._learner(qualified)
            steps = self.workers.get_steps(qualified, group)
            # The environments wait for their actions, so all other work is done later.
            message = learner.receive(steps, team=qualified)
            decided = learner.decide(message)
            self.workers.set_actions(qualified, decided.actions, group)
            turns.append((qualified, learner, steps))
            decisions.append((message, decided))
        # From here the environments compute, and storing overlaps with their work.
        self.stopwatch.timed(self.workers.step_send, group)
        for (qualified, learner, steps), (message, decided) in zip(turns, decisions, strict=True):
            learner.complete_transitions(message)
            learner.begin_transitions(message, decided)
            if learner.snapshot_pool is not None:
                self.self_play.on_step(qualified, learner, steps)
        return turns

    def _finished(self) -> bool:
        return bool(self.learners) and all(learner.finished for learner in self.learners.values())

    def _learner(self, qualified: str) -> Learner:
        """Return the learner for a qualified name that has appeared for the first time."""
        name = qualified.partition("?")[0]
        if name not in self.learners:
            self.learners[name] = new = self._new_learner(name, qualified)
            if not new.finished:
                described = description(name, new.spec, self.settings)["settings"]
                self.tracker.tell("on_start", name, described)
            if new.settings.is_undecided and new.learns:
                self._meters[new] = PaceMeter(new, n_envs=len(self.workers))
        learner = self._learner_of[qualified] = self.learners[name]
        spec = self.workers.behavior_specs[qualified]
        # All teams of a behavior share one network, so they need equal observations and actions.
        refuse_other_spec(name, learner.spec, spec, f"the team of {qualified}")
        self.self_play.join(qualified, learner)
        return learner

    def _new_learner(self, name: str, qualified: str) -> Learner:
        # `_saved` keeps only behaviors that have not appeared since the resume.
        saved = self._saved.pop(name, None)
        self._keep_pace(name, saved)
        settings = self.settings.for_behavior(name)
        if name not in self.settings.behaviors and self.settings.default_settings is None:
            _log.warning("%s: no settings are given for it, so it has the built-in ones.", name)
        files.refuse_shared_folder(self.job.run_dir, name, self.learners)
        spec = self.workers.behavior_specs[qualified]
        # Each behavior has a seed, so that its random numbers do not depend on other behaviors.
        seed = seeding.of_behavior(self.job.seed, name, self.settings.behaviors)
        share = settings_per_learner(settings, self.group.size)
        run = (saved or {}).get("run", {})
        device = self._measured(name, spec, share, qualified, saved)
        learner = Learner(name, spec, share, seed=seed, device=device, learns=not self.inference)
        # Updates in a thread are not compiled, because torch.compile may not trace while another
        # thread calls compiled code.
        compiles = self.settings.torch_settings.compile and not learner.updates.in_thread
        if compiles and learner.learns:
            learner.algorithm.compile()
        if saved is not None:
            path = files.named(self.job.run_dir, name) / RESUME_FILE
            if not restore(learner, saved, path, exact=self._exact):
                self.resume_points.moved(run)
            self.checkpoints.restore(name, saved, exact=self._exact)
            _log.info("Resuming training of %s from step %d.", name, learner.step)
        elif (first := weights_of(name, self.job.init_from, self.settings)) is not None:
            load_initial_weights(learner, first, whole=self.job.whole_weights)
        elif self.job.resume:
            _log.warning(
                "%s starts at step 0: %s has no checkpoint of this behavior.",
                name,
                self.job.run_dir,
            )
        if learner.learns and saved is None:
            for text in settings.contrary_sizes():
                _log.warning("%s: %s.", name, text)
        # `n_held` is the number of rows that waited for an update at the last synchronisation. None
        # means that the run is new or does not continue exactly; processes of rank 1 and above then
        # seed their random streams by their rank.
        n_held = (saved or {}).get("held", 0) if self._exact else None
        self.synchronizer.register(learner, seed=seed, held=n_held)
        self._schedule(learner, run)
        return learner

    def _schedule(self, learner: Learner, run: Mapping[str, Any]) -> None:
        name, settings = learner.name, learner.settings
        self._next_summary[name] = _next_multiple(learner.step, settings.summary_freq)
        following = _next_multiple(learner.step, settings.checkpoint_interval)
        # If the resume file names an earlier step, that checkpoint was due, and waited for an
        # update, when the file was written.
        saved = run.get("next_checkpoint", {}).get(name, following)
        self._next_checkpoint[name] = min(following, saved)

    def _measured(
        self,
        name: str,
        spec: BehaviorSpec,
        settings: TrainerSettings,
        qualified: str,
        saved: Mapping[str, Any] | None,
    ) -> torch.device:
        """Return a new behavior's device; also set the number of threads if none is chosen yet."""
        run, device = (saved or {}).get("run", {}), self.device
        n_agents = sum(len(decision) for decision, _ in self.workers.get_steps(qualified))
        if device is None:
            kept = run.get("devices", {}).get(name)
            device = fastest_device(name, spec, settings, n_agents=n_agents, kept=kept)
            self._devices[name] = str(device)
        if self.job.torch_threads is None and self._threads is None:
            if saved is not None:
                # The run goes on with as many threads as before, because the rounding of sums
                # depends on their number.
                self._threads = run.get("threads", 1)
            else:
                # A simulator in this process works only while this process does not compute.
                n_each = int(isinstance(self.job.env, str | Path))
                envs = self.workers.envs
                n_busy = sum(getattr(env, "n_other_processes", n_each) for env in envs)
                self._threads = fastest_threads(
                    name, spec, settings, device, n_agents=n_agents, n_busy=n_busy
                )
            # The thread for updates starts later, and takes over the number that is set here.
            torch.set_num_threads(self._threads)
        return device

    def _choose_pace(self, learner: Learner, meter: PaceMeter) -> None:
        """Replace `steps_per_update: auto`; behaviors of default_settings get the same number."""
        del self._meters[learner]
        # Another behavior without an entry of its own may have chosen the number already.
        if self.settings.for_behavior(learner.name).is_undecided:
            compiles = bool(self.settings.torch_settings.compile)
            number = meter.chosen(compiles=compiles, n_learners=len(self.learners))
            self._set_pace(learner.name, number)
            self.resume_points.want()  # a resumed run then continues with this number
        learner.take_pace(self.settings.for_behavior(learner.name))

    def _keep_pace(self, name: str, saved: Mapping[str, Any] | None) -> None:
        """Replace `steps_per_update: auto` by the number in the checkpoint, if there is one."""
        # `for_behavior` may log a warning, so it is called only if a behavior has `auto`.
        auto = self.settings.undecided()
        if saved is not None and auto and self.settings.for_behavior(name).is_undecided:
            pace = saved["settings"]["hyperparameters"].get("steps_per_update", AUTO)
            if pace != AUTO:
                self._set_pace(name, pace)

    def _set_pace(self, name: str, number: float) -> None:
        self.settings = self.checkpoints.settings = self.settings.with_pace(name, number)
        if self._started:
            self.tracker.tell("on_settings", self.settings)

    def _note_update(self, learner: Learner) -> None:
        self._updated.add(learner.name)
        update = Update(
            step=learner.step,
            update_s=learner.seconds["update"],
            n_episodes=learner.statistics.n_episodes,
            recent_returns=learner.statistics.recent,
            statistics=learner.last_update,
        )
        self.tracker.tell("on_update", learner.name, update)

    def _save_due(self) -> None:
        """After an update, save due checkpoints, and request a resume point if one is due."""
        # Behaviors without an update get no checkpoint, because their networks have not changed.
        late = self.resume_points.is_interval_over()
        for name in sorted(self._updated):
            learner = self.learners[name]
            if learner.step >= self._next_checkpoint[name]:
                interval = learner.settings.checkpoint_interval
                self._next_checkpoint[name] = _next_multiple(learner.step, interval)
                self.checkpoints.milestone(learner, self._shared_state())
                late = True
        self._updated.clear()
        if late:
            self.resume_points.want()

    def _shared_state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that all behaviors of the run share."""
        # A behavior that has not appeared since the run was resumed is at its saved step.
        steps = {name: int(state["learner"]["step"]) for name, state in self._saved.items()}
        steps |= {name: learner.step for name, learner in self.learners.items()}
        shared: dict[str, Any] = {"steps": steps, "next_checkpoint": dict(self._next_checkpoint)}
        shared["lessons"] = self.lessons.state_dict()
        if self._devices:
            shared["devices"] = dict(self._devices)
        if self._threads is not None:
            shared["threads"] = self._threads
        if self.self_play.learning is not None:
            shared["self_play"] = self.self_play.state_dict()
        return shared | self.tracker.state_dict() | self.resume_points.state_dict()

    def _summarize(self, learner: Learner) -> None:
        if learner.step < self._next_summary[learner.name]:
            return
        frequency = learner.settings.summary_freq
        # `step` may have passed a multiple of summary_freq, because many agents step together.
        at = learner.step // frequency * frequency
        self._next_summary[learner.name] = at + frequency
        # The spread is read before `period`, which begins a new period and clears the values.
        spread = learner.statistics.reward_spread()
        # ML-Agents' TensorBoard has a histogram of the cumulative reward, too.
        distributions = {names.REWARD: list(learner.statistics.returns)}
        distributions |= learner.statistics.distributions()
        self.tracker.tell("on_samples", learner.name, learner.statistics.samples())
        values = learner.statistics.period()
        values[names.IS_TRAINING] = float(learner.learns and at <= learner.settings.max_steps)
        if names.REWARD in values:
            values[names.REWARD_STD] = spread
            # Without an ended episode the recent returns, and so the best policy, have not changed.
            self.checkpoints.consider(learner)
        values.update(self.lessons.metrics())
        if learner.snapshot_pool is not None:
            values[names.ELO] = learner.snapshot_pool.rating
        values.update(self.stopwatch.since_last(learner))
        self.tracker.on_summary(learner.name, values, at)
        for tag, behind in distributions.items():
            self.tracker.on_distribution(learner.name, tag, behind, at)

    def _save_learned(self, *, is_stopping: bool = False) -> None:
        """After a failure, save the learners that have taken at least one step."""
        learned = [learner for learner in self.learners.values() if learner.step > 0]
        if self.inference or not learned:
            return
        # After Ctrl-C the exact resume point is worth more than a later state without environments.
        if not (is_stopping and self.resume_points.is_kept):
            self.checkpoints.refresh(learned, self._shared_state())
        self._export(learned)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Save the state after an exception in the user's code, and raise it as a TrainingError."""
        try:
            yield
        except Exception as error:
            # Without a line of the user's code, the exception is a fault in this program.
            if isinstance(error, errors.PipelineError) or not errors.line_of_user(error):
                raise
            try:
                self._save_learned(is_stopping=True)
                is_saved = any(self.job.run_dir.glob(f"*/{RESUME_FILE}")) and not self.inference
                kept = f"; resume continues from {self.job.run_dir}" if is_saved else ""
            except Exception as other:  # noqa: BLE001  # the user's exception is more important
                kept = f"; the state could not be saved ({errors.one_line(other)})"
            message = f"{errors.where(error)}; it came {self._at()}{kept}"
            raise errors.TrainingError(message) from error

    def _export(self, learners: list[Learner]) -> None:
        """Export each policy that has recorded observations, if there is an exporter."""
        # An export is checked against recorded observations, so a learner without recorded
        # observations is left out.
        exportable = [
            x for x in learners if self.checkpoints.exporter and len(x.recorded["obs"][0])
        ]
        for learner in exportable:
            if not self.checkpoints.has_numbered(learner):
                self.checkpoints.milestone(learner, self._shared_state())
        self.checkpoints.export_final(exportable)

    def _interrupted(self, request: StopRequest) -> errors.Interrupted:
        folder = self.job.run_dir
        saved = f"the state is saved in {folder}" if self.learners else "nothing to save yet"
        message = f"stopped by a signal {self._at()}; {saved}"
        kept = {
            name: self.checkpoints.saved_steps.get(name, x.step)
            for name, x in self.learners.items()
        }
        # If environments have ended, the last resume point is older than the present step.
        if self._at(kept) != self._at():
            message = f"stopped by a signal; the state {self._at(kept)} is saved in {folder}"
        return errors.Interrupted(message, exit_code=request.exit_code)

    def _at(self, steps: Mapping[str, int] | None = None) -> str:
        """Return text on each behavior's step: the step in `steps`, or else the present step."""
        steps = steps or {name: learner.step for name, learner in self.learners.items()}
        text = ", ".join(f"at step {step} of {name}" for name, step in steps.items())
        return text or "before the first step"


def _next_multiple(step: int, interval: int) -> int:
    return (step // interval + 1) * interval


def result_of(
    learners: Mapping[str, Learner],
    run_dir: Path,
    seconds: Mapping[str, float],
    *,
    interrupted: Sequence[int],
    n_exchanges: int,
) -> TrainResult:
    """Return the results of a run; `seconds`, `interrupted`, `n_exchanges` as in `TrainResult`."""
    behaviors = {}
    for name, learner in learners.items():
        recent = learner.statistics.recent
        behaviors[name] = BehaviorResult(
            steps=learner.step,
            n_updates=learner.n_updates,
            n_episodes=learner.statistics.n_episodes,
            mean_reward=sum(recent) / len(recent) if recent else None,
            n_recent=len(recent),
            checkpoint=files.named(run_dir, name) / RESUME_FILE,
            elo=None if learner.snapshot_pool is None else learner.snapshot_pool.rating,
            interrupted_at=interrupted[-1] if interrupted else None,
        )
    return TrainResult(
        behaviors=behaviors,
        seconds=seconds,
        n_exchanges=n_exchanges,
        counts=sum((learner.counts for learner in learners.values()), Counter()),
        interrupted=tuple(interrupted),
    )
