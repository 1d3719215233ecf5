"""Data-parallel learning: when the processes of a run synchronise, and what they exchange.

The mathematics is that of one learner with the environments of all processes: an update begins when
all processes together have enough rows, each minibatch has rows of every process, and gradients and
the statistics that normalise advantages and observations are means over the rows of all processes.

A process steps its environments alone until all processes together may have enough rows for an
update, or enough steps for the next summary or the end of training, or until it is asked to stop.
Then it waits for the others to synchronise (the statistic `Time/meeting`). A synchronisation adds
up the counts of all processes since the last one, in the order of ranks, so that all processes have
the same steps, episodes and lesson measures, and all make the same decisions: to update, to write a
summary, to begin a lesson, or to end.
"""

import logging
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipeline import seeding
from pipeline.algos.algorithm import Algorithm
from pipeline.algos.process_group import ProcessGroup
from pipeline.errors import SettingsError, TrainingError
from pipeline.settings.trainer.schema import OffPolicySettings, TrainerSettings
from pipeline.trainer.checkpoints.resume_points import JointResumePoints
from pipeline.trainer.distributed.group import DistributedGroup, SharedNormalizers
from pipeline.trainer.learner import Learner
from pipeline.trainer.stopping import StopRequest

_log = logging.getLogger(__name__)

# To have fewer synchronisations, an update may be late by this share of `buffer_size` rows.
_MAX_DELAY_SHARE = 0.01
# Number of updates between two comparisons of the weights, for algorithms with a replay.
_COMPARE_EVERY = 100


def refuse_unshareable(name: str, settings: TrainerSettings, n_learners: int) -> None:
    """Raise SettingsError, which names the setting, if several processes cannot learn together."""
    if n_learners == 1:
        return
    section = f"behaviors.{name}"
    several = f"among {n_learners} learners"
    h = settings.hyperparameters
    if h.why_alone:
        raise SettingsError(f"{section}.trainer_type: {h.why_alone}")
    if settings.self_play is not None:
        raise SettingsError(f"{section}.self_play: self-play runs in one process; use one learner")
    for signal, chosen in settings.reward_signals.items():
        if chosen.why_alone:
            location = f"{section}.reward_signals.{signal}"
            raise SettingsError(f"{location}: {chosen.why_alone}, or use one learner")
    if isinstance(h, OffPolicySettings) and h.batch_size % n_learners:
        raise SettingsError(
            f"{section}.hyperparameters.batch_size: {h.batch_size} cannot be split evenly "
            f"{several}; use a multiple of {n_learners}"
        )


def settings_per_learner(settings: TrainerSettings, n_learners: int) -> TrainerSettings:
    """Return the settings with a process's share of the replay and its batch.

    Algorithms without a replay split their minibatches with `ProcessGroup.minibatch_sizes`.
    """
    h = settings.hyperparameters
    if n_learners == 1 or not isinstance(h, OffPolicySettings):
        return settings
    cloning = settings.behavioral_cloning
    if cloning is not None:  # cloning does not divide the batch among processes
        cloning = replace(cloning, batch_size=cloning.batch_size or h.batch_size)
    part = replace(
        h, batch_size=h.batch_size // n_learners, buffer_size=h.buffer_size // n_learners
    )
    return replace(settings, hyperparameters=part, behavioral_cloning=cloning)


class LearnerSync:
    """Keeps a learner equal to the learners of the same behavior in other processes.

    Attributes:
        held: number of this process's rows that waited for an update at the last synchronisation.
            It decides when the next synchronisation is due, so it is part of a resume point.
    """

    def __init__(
        self, learner: Learner, group: DistributedGroup, *, seed: int, held: int | None = None
    ) -> None:
        refuse_unshareable(learner.name, learner.settings, group.size)
        self.steps = 0
        """Steps of this process's agents since the last synchronisation."""
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
        """Return whether this learner needs a synchronisation now."""
        learner = self._learner
        if learner.finished:
            return False
        if learner.algorithm.replay is not None:  # an off-policy learner may update in every step
            return True
        # The other processes are assumed to have made as many steps as this process.
        missing = min(learner.settings.max_steps, next_summary) - learner.step
        if self.steps * self._group.size >= missing:
            return True
        n_held = learner.trajectories.n_held
        if not learner.algorithm.ready(n_held * self._group.size):
            # All processes together have too few rows, even with their open trajectories.
            return False
        late = _MAX_DELAY_SHARE * learner.settings.hyperparameters.buffer_size
        return (n_held - self.held) * self._group.size >= late

    def should_update(self) -> bool:
        """Return whether all processes together have enough rows for an update.

        After a synchronisation only the first call may return True, unless the learner is finished.
        """
        can_update, self._can_update = self._can_update, False
        if can_update:
            self.held = 0
        # True is also returned for a finished learner: its `learn` then drops the closed rows.
        return can_update or self._learner.finished

    def local_state(self) -> dict[str, Any]:
        """Return this process's counts and the digest of its weights, for the other processes."""
        learner = self._learner
        return {
            "step": learner.step,
            "updates": learner.n_updates,
            "weights": self._weights(),
            "steps": self.steps,
            "rows": learner.trajectories.n_closed,
            "statistics": learner.pending_stats,
        }

    def apply(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Add the counts of all processes in `notes`; TrainingError if weights differ."""
        learner = self._learner
        refuse_other_weights(learner.name, notes)
        # Every process adds the same numbers in the same order, so all get the same sums, bit for
        # bit.
        n_steps = sum(note["steps"] for note in notes)
        learner.step += n_steps
        learner.statistics.add_from([note["statistics"] for note in notes])
        learner.restart_pending_stats()
        self.steps = 0
        rows = [note["rows"] for note in notes]
        self.held = learner.trajectories.n_held
        # Each process needs rows, because each minibatch has rows of every process.
        self._can_update = all(rows) and learner.algorithm.ready(sum(rows)) and not learner.finished
        if n_steps:
            self._normalizers.merge(self._group)

    def mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each statistic of an update over the processes, by tag."""
        values_by_tag: dict[str, list[float]] = {}
        for rank_stats in self._group.all_gather_object(stats):
            for tag, value in rank_stats.items():
                values_by_tag.setdefault(tag, []).append(value)
        return {tag: sum(values) / len(values) for tag, values in values_by_tag.items()}

    def _weights(self) -> int:
        """Return the digest of the weights; with a replay not after every update."""
        learner = self._learner
        update = learner.n_updates
        if learner.algorithm.replay is not None:
            update = update // _COMPARE_EVERY * _COMPARE_EVERY
        # The digest is computed once per update, because weights change only in updates.
        if update != self._digest[0]:
            self._digest = update, digest([self._optimizer.flat, *self._normalizers.agreed()])
        return self._digest[1]


def refuse_other_weights(name: str, notes: Sequence[Mapping[str, Any]]) -> None:
    """Raise TrainingError if weights, updates or steps differ in `notes`, by rank."""
    for rank, note in enumerate(notes):
        if any(note[key] != notes[0][key] for key in ("weights", "updates", "step")):
            raise TrainingError(
                f"behavior {name}, step {note['step']}: after {note['updates']} updates the "
                f"learner of rank {rank} has other weights (digest {note['weights']:08x}) than "
                f"the learner of rank 0 ({notes[0]['weights']:08x} after {notes[0]['updates']}); "
                "use the same program, packages and type of machine for all learners, and resume"
            )


def digest(parts: Collection[Tensor]) -> int:
    """Return the CRC-32 of the bytes of the tensors, one after another."""
    checksum = 0
    for tensor in parts:
        checksum = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data, checksum)
    return checksum


def _draw_differently(algorithm: Algorithm, seed: int, rank: int, n_updates: int) -> None:
    """Seed the random streams of actions and minibatches by rank; initial weights stay equal."""
    # With the number of updates, a resumed run does not repeat the first numbers.
    names = ("rank", rank, "update", n_updates)
    for name, generator in algorithm.generators.items():
        generator.manual_seed(seeding.derive(seed, name, *names))
    stream = seeding.stream(seed, "minibatches", *names)
    algorithm.minibatch_stream.bit_generator.state = stream.bit_generator.state


class Synchronizer:
    """Decides when the processes synchronise, and gives their learners the same state."""

    def __init__(self, group: ProcessGroup, resume_points: JointResumePoints | None) -> None:
        self.group = group if isinstance(group, DistributedGroup) else None
        self._stop_request = StopRequest()
        self._agreed = StopRequest()
        self._members: dict[str, LearnerSync] = {}
        self._missed: set[str] = set()
        self._resume_points = resume_points

    def listen(self, asked: StopRequest) -> StopRequest:
        """Use `asked` as this process's request to stop; return the request that all agree on."""
        self._stop_request = asked
        if self.group is None:
            return asked
        return self._agreed

    @property
    def request(self) -> StopRequest:
        """This process's request to stop, which the other processes may not know yet."""
        return StopRequest(self._agreed.signal_number or self._stop_signal() or None)

    def sync_if_due(self, learners: Mapping[str, Learner], next_summary: Mapping[str, int]) -> None:
        """Synchronise if a learner of this process needs it, or the process was asked to stop."""
        if self.group is None:
            return
        stop = self._stop_signal()
        if stop or any(sync.is_due(next_summary[name]) for name, sync in self._members.items()):
            began = time.perf_counter()
            self._sync(self.group)
            # All learners wait together, so only one of them counts the time.
            for learner in [*learners.values()][:1]:
                seconds = learner.seconds.get("meeting", 0.0) + time.perf_counter() - began
                learner.seconds["meeting"] = seconds

    def register(self, learner: Learner, *, seed: int, held: int | None = None) -> None:
        """Add a new or restored learner; SettingsError if its settings allow one process only."""
        if self.group is not None:
            self._members[learner.name] = LearnerSync(learner, self.group, seed=seed, held=held)

    def _stop_signal(self) -> int:
        """Return the number of the signal that asks this process to stop; 0 for none."""
        other = None if self.group is None else self.group.stop.signal_number
        return self._stop_request.signal_number or other or 0

    def _sync(self, group: DistributedGroup) -> None:
        local_note: dict[str, Any] = {
            "stop": self._stop_signal(),
            "behaviors": {name: sync.local_state() for name, sync in self._members.items()},
            "resume point": self._resume_points and self._resume_points.local_state(),
        }
        # A single exchange has the values of all behaviors and the request to stop, so that all
        # processes decide from the same values.
        notes = group.all_gather_object(local_note, look=self._forward_stop)
        self._agreed.signal_number = next((note["stop"] for note in notes if note["stop"]), None)
        if self._agreed():
            self._forward_stop()
        self._warn_of_missing(notes)
        # All processes must make the collective calls of `apply` in the same order.
        for name in sorted(self._members):
            parts = [note["behaviors"].get(name) for note in notes]
            if None not in parts:
                self._members[name].apply(parts)
        if self._resume_points is not None:
            parts = [note["resume point"] for note in notes]
            self._resume_points.merge(parts, group.gather_object)

    def _forward_stop(self) -> None:
        stop = self._stop_signal() or self._agreed.signal_number
        if stop and self.group is not None and self.group.others is not None:
            self.group.others.forward_stop(stop)

    def _warn_of_missing(self, notes: Sequence[Mapping[str, Any]]) -> None:
        for name in self._members:
            missing = [r for r, note in enumerate(notes) if name not in note["behaviors"]]
            if missing and name not in self._missed:
                self._missed.add(name)
                _log.warning(
                    "%s has not appeared in the environments of rank %s yet; it begins to learn "
                    "when it has appeared in all processes.",
                    name,
                    ", ".join(map(str, missing)),
                )
