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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from pipeline import seeding
from pipeline.algos.algorithm import Algorithm
from pipeline.algos.process_group import ProcessGroup
from pipeline.errors import SettingsError, TrainingError
from pipeline.settings.schema import OffPolicySettings, TrainerSettings
from pipeline.trainer.distributed.group import DistributedGroup, SharedNormalizers
from pipeline.trainer.learner import Learner
from pipeline.trainer.statistics import Statistics
from pipeline.trainer.stopping import StopRequest

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
    section = f"behaviors.{name}"
    several = f"with {n_learners} learners"
    h = settings.hyperparameters
    if h.why_alone:
        raise SettingsError(f"{section}.trainer_type: {h.why_alone}")
    if settings.self_play is not None:
        raise SettingsError(
            f"{section}.self_play: games are played in one process; use one learner"
        )
    for signal, chosen in settings.reward_signals.items():
        if chosen.why_alone:
            location = f"{section}.reward_signals.{signal}"
            raise SettingsError(f"{location}: {chosen.why_alone}, or use one learner")
    if isinstance(h, OffPolicySettings) and h.batch_size % n_learners:
        raise SettingsError(
            f"{section}.hyperparameters.batch_size: {h.batch_size} cannot be shared equally "
            f"{several}; use a multiple of {n_learners}"
        )


def share_of(settings: TrainerSettings, n_learners: int) -> TrainerSettings:
    """Return the settings of one of `n_learners`; of a replay's rows it keeps and draws its part.

    Algorithms without a replay ask for their share themselves.
    """
    h = settings.hyperparameters
    if n_learners == 1 or not isinstance(h, OffPolicySettings):
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
        held: rows here that were still to be learned from at the last meeting. They decide when
            the next meeting is, so a run that resumes exactly passes their number.

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
        self._can_update = False
        self.held = held or 0
        self._digest = (-1, 0)
        algorithm = learner.algorithm
        algorithm.learn_with(group)
        learner.learn_with(self)
        if group.rank > 0 and held is None:
            _draw_differently(algorithm, seed, group.rank, learner.n_updates)
        self._optimizer = algorithm.optimizer
        networks = {"policy": algorithm.policy, **algorithm.signals.modules}
        self._normalizers = SharedNormalizers(networks)

    def is_due(self, next_summary: int) -> bool:
        """Return whether this learner waits for the others."""
        learner = self._learner
        if learner.finished:
            return False
        if learner.algorithm.replay is not None:  # which takes rows in at any time
            return True
        missing = min(learner.settings.max_steps, next_summary) - learner.step
        if self.steps * self._group.size >= missing:
            return True
        n_held = learner.trajectories.n_held
        if not learner.algorithm.ready(n_held * self._group.size):
            return False  # too few rows of all, even if all open trajectories closed
        late = _LATE * learner.settings.hyperparameters.buffer_size
        return (n_held - self.held) * self._group.size >= late

    def should_update(self) -> bool:
        """Return whether all together have enough for an update; True once per meeting."""
        can_update, self._can_update = self._can_update, False
        if can_update:
            self.held = 0
        return can_update or self._learner.finished

    def local_state(self) -> dict[str, Any]:
        """Return what the others need to know of this learner, as plain values."""
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
        """Bring this learner to the common state, by the notes of all in the order of ranks.

        Raises:
            TrainingError: The weights of two processes differ.
        """
        learner = self._learner
        refuse_other_weights(learner.name, notes)
        n_steps = sum(note["steps"] for note in notes)
        learner.step += n_steps
        learner.statistics.add_from([Statistics.of(note["statistics"]) for note in notes])
        learner.take_pending()
        self.steps = 0
        rows = [note["rows"] for note in notes]
        self.held = learner.trajectories.n_held
        self._can_update = all(rows) and learner.algorithm.ready(sum(rows)) and not learner.finished
        if n_steps:
            self._normalizers.merge(self._group)

    def mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return the means of an update's statistics over the processes, tag by tag."""
        values_by_tag: dict[str, list[float]] = {}
        for rank_stats in self._group.all_gather_object(stats):
            for tag, value in rank_stats.items():
                values_by_tag.setdefault(tag, []).append(value)
        return {tag: sum(values) / len(values) for tag, values in values_by_tag.items()}

    def _weights(self) -> int:
        """Return the digest of the weights, after the last update that is compared."""
        learner = self._learner
        update = learner.n_updates
        if learner.algorithm.replay is not None:
            update = update // _COMPARE_EVERY * _COMPARE_EVERY
        if update != self._digest[0]:
            self._digest = update, digest([self._optimizer.flat, *self._normalizers.agreed()])
        return self._digest[1]


def refuse_other_weights(name: str, notes: Sequence[Mapping[str, Any]]) -> None:
    """Compare the weights of all processes, by their notes in the order of ranks.

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
    """Return a number that, almost certainly, differs when one of the tensors does."""
    checksum = 0
    for tensor in parts:
        checksum = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data, checksum)
    return checksum


def _draw_differently(algorithm: Algorithm, seed: int, rank: int, n_updates: int) -> None:
    """Give a process beyond the first its own actions and minibatches; weights are not drawn here.

    A resumed run draws other numbers than it did when it began.
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

    def __init__(self, group: ProcessGroup, resume_points: JointMoments | None = None) -> None:
        self.group = group if isinstance(group, DistributedGroup) else None
        self._stop_request = StopRequest()
        self._agreed = StopRequest()
        self._members: dict[str, LearnerSync] = {}
        self._missed: set[str] = set()
        self._resume_points = resume_points

    def listen(self, asked: StopRequest) -> StopRequest:
        """Take this process's request to stop; return the request all agreed on."""
        self._stop_request = asked
        if self.group is None:
            return asked
        return self._agreed

    @property
    def request(self) -> StopRequest:
        """Return this process's request to stop, also if not all have agreed on it yet."""
        return StopRequest(self._agreed.signal_number or self._stop_signal() or None)

    def sync_if_due(
        self, learners: Mapping[str, Learner], next_summary: Callable[[str], int]
    ) -> None:
        """Meet the others if a learner here, or a request to stop, waits for it."""
        if self.group is None:
            return
        stop = self._stop_signal()
        if stop or any(sync.is_due(next_summary(name)) for name, sync in self._members.items()):
            began = time.perf_counter()
            self._sync(self.group)
            for learner in [*learners.values()][:1]:  # of the run, so counted once
                seconds = learner.seconds.get("meeting", 0.0) + time.perf_counter() - began
                learner.seconds["meeting"] = seconds

    def register(self, learner: Learner, *, seed: int, held: int | None = None) -> None:
        """Keep a behavior's new or restored learner the same as those of the other processes.

        Raises:
            SettingsError: It is set to something that several processes cannot do together.
        """
        if self.group is not None:
            self._members[learner.name] = LearnerSync(learner, self.group, seed=seed, held=held)

    def _stop_signal(self) -> int:
        """Return the signal that asks this process to stop, 0 for none."""
        other = None if self.group is None else self.group.stop.signal_number
        return self._stop_request.signal_number or other or 0

    def _sync(self, group: DistributedGroup) -> None:
        local_note: dict[str, Any] = {
            "stop": self._stop_signal(),
            "behaviors": {name: sync.local_state() for name, sync in self._members.items()},
            "resume point": self._resume_points and self._resume_points.note(),
        }
        # One exchange for all behaviors and the request to stop, so that all decide from the same.
        notes = group.all_gather_object(local_note, look=self._pass_on)
        self._agreed.signal_number = next((note["stop"] for note in notes if note["stop"]), None)
        if self._agreed():
            self._pass_on()
        self._warn_of_missing(notes)
        # Sorted: normalisers are merged by collective calls, which need one order everywhere.
        for name in sorted(self._members):
            parts = [note["behaviors"].get(name) for note in notes]
            if None not in parts:
                self._members[name].apply(parts)
        if self._resume_points is not None:
            self._resume_points.meet([note["resume point"] for note in notes], group)

    def _pass_on(self) -> None:
        """Pass a request to stop on to the processes that this one has started."""
        stop = self._stop_signal() or self._agreed.signal_number
        if stop and self.group is not None and self.group.others is not None:
            self.group.others.pass_on(stop)

    def _warn_of_missing(self, notes: Sequence[Mapping[str, Any]]) -> None:
        for name in self._members:
            missing = [r for r, note in enumerate(notes) if name not in note["behaviors"]]
            if missing and name not in self._missed:
                self._missed.add(name)
                _log.warning(
                    "%s has shown up here, but not yet in the environments of rank %s; it learns "
                    "when all have it.",
                    name,
                    ", ".join(map(str, missing)),
                )
