"""Data-parallel learning: when the processes of a run synchronise, and what they exchange.

The mathematics is that of one learner with the environments of all processes: an update is made
when all together have enough rows, each minibatch has a part from every process, gradients are
means over the rows of all, and so are the statistics that normalise advantages and observations.

A process steps its environments alone until all processes together may have enough rows for an
update, or enough steps for the next summary or the end of training, or until it is told to stop.
Then it waits for the others to synchronise. Such a *meeting* adds up what all have counted since
the last one, in the order of ranks, so that all processes have the same steps, episodes and lesson
measures, and decide alike: to update, to summarise, to begin a lesson, or to end.
"""

from __future__ import annotations

import logging
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from pipeline import seeding
from pipeline.errors import SettingsError, TrainingError
from pipeline.settings.schema import SACSettings
from pipeline.trainer.distributed.group import DistributedGroup, SharedNormalizers
from pipeline.trainer.statistics import Statistics
from pipeline.trainer.stopping import StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from pipeline.algos.algorithm import Algorithm
    from pipeline.algos.process_group import ProcessGroup
    from pipeline.settings.schema import TrainerSettings
    from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

# Most rows by which an update may come late so that there are fewer meetings, of `buffer_size`.
_LATE = 0.01
# Updates between two comparisons of the weights, for algorithms that update all the time.
_COMPARE_EVERY = 100


def refuse_alone_only(name: str, settings: TrainerSettings, n_learners: int) -> None:
    """Refuse what several processes cannot learn together.

    Raises:
        SettingsError: There is something of that kind.
    """
    if n_learners == 1:
        return
    at = f"behaviors.{name}"
    several = f"with {n_learners} learners"
    h = settings.hyperparameters
    if settings.self_play is not None:
        raise SettingsError(f"{at}.self_play: games are played in one process; use one learner")
    for signal, chosen in settings.reward_signals.items():
        if chosen.why_alone:
            where = f"{at}.reward_signals.{signal}"
            raise SettingsError(f"{where}: {chosen.why_alone}, or use one learner")
    if isinstance(h, SACSettings) and h.batch_size % n_learners:
        raise SettingsError(
            f"{at}.hyperparameters.batch_size: {h.batch_size} cannot be shared equally "
            f"{several}; use a multiple of {n_learners}"
        )


def share_of(settings: TrainerSettings, n_learners: int) -> TrainerSettings:
    """What one of `n_learners` is set to: with a replay it keeps, and draws, its part of the rows.

    Algorithms without a replay ask for their share themselves.
    """
    h = settings.hyperparameters
    if n_learners == 1 or not isinstance(h, SACSettings):
        return settings
    cloning = settings.behavioral_cloning
    if cloning is not None:  # which is not shared
        cloning = replace(cloning, batch_size=cloning.batch_size or h.batch_size)
    part = replace(
        h, batch_size=h.batch_size // n_learners, buffer_size=h.buffer_size // n_learners
    )
    return replace(settings, hyperparameters=part, behavioral_cloning=cloning)


class LearnerSync:
    """Keeps a learner the same as the learners of its behavior in other processes.

    Attributes:
        held: rows here that were still to be learned from at the last meeting. It decides when the
            next one is, so a run that resumes exactly gives it.

    Raises:
        SettingsError: The learner is set to something that cannot be done together.
    """

    def __init__(
        self, learner: Learner, group: DistributedGroup, *, seed: int, held: int | None = None
    ) -> None:
        refuse_alone_only(learner.name, learner.settings, group.size)
        self.steps = 0
        """Steps of this process's agents since the last meeting."""
        self._learner = learner
        self._group = group
        self._turn = False
        self.held = held or 0
        self._digest = (-1, 0)
        learner.pending_stats = Statistics()
        algorithm = learner.algorithm
        algorithm.processes = group
        for optimizer in algorithm.optimizers:
            optimizer.average = group.average_gradients_
        if group.rank > 0 and held is None:
            _draw_differently(algorithm, seed, group.rank, learner.n_updates)
        self._optimizer = algorithm.optimizer
        networks = {"policy": algorithm.policy, **algorithm.signals.modules}
        self._normalizers = SharedNormalizers(networks)

    def is_due(self, next_summary: int) -> bool:
        """Whether this learner waits for the others."""
        learner = self._learner
        if learner.finished:
            return False
        if learner.algorithm.replay is not None:  # which takes rows in at any time
            return True
        missing = min(learner.settings.max_steps, next_summary) - learner.step
        if self.steps * self._group.size >= missing:
            return True
        held = learner.trajectories.n_held
        if not learner.algorithm.ready(held * self._group.size):
            return False  # not even all rows of all would be enough, were they closed
        late = _LATE * learner.settings.hyperparameters.buffer_size
        return (held - self.held) * self._group.size >= late

    def should_update(self) -> bool:
        """Whether all together have enough for an update; once per meeting."""
        turn, self._turn = self._turn, False
        if turn:
            self.held = 0
        return turn or self._learner.finished

    def local_state(self) -> dict[str, Any]:
        """What the others need to know of this learner, as plain values."""
        learner = self._learner
        return {
            "step": learner.step,
            "updates": learner.n_updates,
            "weights": self._weights(),
            "steps": self.steps,
            "rows": learner.trajectories.n_closed,
            "statistics": learner.pending_stats.new(),
        }

    def apply(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Bring this learner to where all are together, by the notes of all in the order of ranks.

        Raises:
            TrainingError: The weights of two processes differ.
        """
        learner = self._learner
        refuse_other_weights(learner.name, notes)
        n_steps = sum(one["steps"] for one in notes)
        learner.step += n_steps
        learner.statistics.add_from([Statistics.of(one["statistics"]) for one in notes])
        learner.pending_stats = Statistics()
        self.steps = 0
        rows = [one["rows"] for one in notes]
        self.held = learner.trajectories.n_held
        self._turn = all(rows) and learner.algorithm.ready(sum(rows)) and not learner.finished
        if n_steps:
            self._normalizers.merge(self._group)

    def mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Means over the processes of what an update has found, tag by tag."""
        found: dict[str, list[float]] = {}
        for one in self._group.all_gather_object(stats):
            for tag, value in one.items():
                found.setdefault(tag, []).append(value)
        return {tag: sum(values) / len(values) for tag, values in found.items()}

    def _weights(self) -> int:
        """Digest of the weights, after the last update that it is taken for."""
        learner = self._learner
        update = learner.n_updates
        if learner.algorithm.replay is not None:
            update = update // _COMPARE_EVERY * _COMPARE_EVERY
        if update != self._digest[0]:
            self._digest = update, digest([self._optimizer.flat, *self._normalizers.agreed()])
        return self._digest[1]


def refuse_other_weights(name: str, notes: Sequence[Mapping[str, Any]]) -> None:
    """Make sure that all have the same weights, by the notes of all in the order of ranks.

    Raises:
        TrainingError: The weights of two processes differ.
    """
    for rank, note in enumerate(notes):
        if any(note[key] != notes[0][key] for key in ("weights", "updates", "step")):
            raise TrainingError(
                f"behavior {name}, step {note['step']}: after {note['updates']} updates the "
                f"learner of rank {rank} has other weights (digest {note['weights']:08x}) than "
                f"that of rank 0 ({notes[0]['weights']:08x} after {notes[0]['updates']}); use the "
                "same program, packages and kind of machine for all learners, and resume"
            )


def digest(parts: Collection[Tensor]) -> int:
    """A number that differs when one of the tensors does, with near certainty."""
    checksum = 0
    for one in parts:
        checksum = zlib.crc32(one.detach().cpu().contiguous().numpy().data, checksum)
    return checksum


def _draw_differently(algorithm: Algorithm, seed: int, rank: int, n_updates: int) -> None:
    """Give a process beyond the first its own actions and minibatches; weights are not drawn here.

    A run that is resumed draws others than it did when it began.
    """
    names = ("rank", rank, "update", n_updates)
    for name, generator in algorithm.generators.items():
        generator.manual_seed(seeding.derive(seed, name, *names))
    stream = seeding.stream(seed, "minibatches", *names)
    algorithm.minibatch_stream.bit_generator.state = stream.bit_generator.state


class JointMoments(Protocol):
    """Keeps resume points whose parts all processes take between the same two synchronisations."""

    def note(self) -> dict[str, Any]:
        """What the others need to know, as plain values."""

    def meet(self, notes: Sequence[Mapping[str, Any]], group: DistributedGroup) -> None:
        """Take in the notes of all processes, in the order of ranks, at a synchronisation."""


class Synchronizer:
    """Decides when the processes meet, and brings the learners of all to one state there."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group if isinstance(group, DistributedGroup) else None
        self._asked = StopRequest()
        self._agreed = StopRequest()
        self._members: dict[str, LearnerSync] = {}
        self._missed: set[str] = set()
        self.resume_points: JointMoments | None = None
        """Takes part in each synchronisation; None for a process alone."""

    @property
    def held(self) -> dict[str, int]:
        """Of each learner that meets others; see `LearnerSync`."""
        return {name: one.held for name, one in self._members.items()}

    def listen(self, asked: StopRequest) -> StopRequest:
        """Take this process's request to stop; return the request all agreed on."""
        self._asked = asked
        if self.group is None:
            return asked
        return self._agreed

    @property
    def request(self) -> StopRequest:
        """What this process has been asked, also where not all have agreed on it yet."""
        return StopRequest(self._agreed.signal_number or self._stop_asked() or None)

    def sync_if_due(
        self, learners: Mapping[str, Learner], next_summary: Callable[[str], int]
    ) -> None:
        """Meet the others if something here waits for it."""
        if self.group is None:
            return
        stop = self._stop_asked()
        if stop or any(one.is_due(next_summary(name)) for name, one in self._members.items()):
            began = time.perf_counter()
            self._sync(self.group)
            for one in [*learners.values()][:1]:  # of the run, so counted once
                seconds = one.seconds.get("meeting", 0.0) + time.perf_counter() - began
                one.seconds["meeting"] = seconds

    def register(self, learner: Learner, *, seed: int, held: int | None = None) -> None:
        """Let a behavior's new or restored learner do as those of the other processes.

        Raises:
            SettingsError: It is set to something that several processes cannot do together.
        """
        if self.group is not None:
            learner.sync = LearnerSync(learner, self.group, seed=seed, held=held)
            self._members[learner.name] = learner.sync

    def _stop_asked(self) -> int:
        """The signal that asks this process to stop, 0 for none."""
        other = None if self.group is None else self.group.stop.signal_number
        return self._asked.signal_number or other or 0

    def _sync(self, group: DistributedGroup) -> None:
        note: dict[str, Any] = {
            "stop": self._stop_asked(),
            "behaviors": {name: one.local_state() for name, one in self._members.items()},
            "resume point": self.resume_points and self.resume_points.note(),
        }
        # One exchange for all behaviors and the request to stop, so that all decide from the same.
        notes = group.all_gather_object(note, look=self._pass_on)
        self._agreed.signal_number = next((one["stop"] for one in notes if one["stop"]), None)
        if self._agreed():
            self._pass_on()
        self._tell_missing(notes)
        # Sorted: normalisers are merged by collective calls, which need one order everywhere.
        for name in sorted(self._members):
            parts = [one["behaviors"].get(name) for one in notes]
            if None not in parts:
                self._members[name].apply(parts)
        if self.resume_points is not None:
            self.resume_points.meet([one["resume point"] for one in notes], group)

    def _pass_on(self) -> None:
        """Tell the processes that this one has started what it has been asked."""
        stop = self._stop_asked() or self._agreed.signal_number
        if stop and self.group is not None and self.group.others is not None:
            self.group.others.pass_on(stop)

    def _tell_missing(self, notes: Sequence[Mapping[str, Any]]) -> None:
        for name in self._members:
            without = [r for r, one in enumerate(notes) if name not in one["behaviors"]]
            if without and name not in self._missed:
                self._missed.add(name)
                _log.warning(
                    "%s has shown up here, but not yet in the environments of rank %s; it learns "
                    "when all have it.",
                    name,
                    ", ".join(map(str, without)),
                )
