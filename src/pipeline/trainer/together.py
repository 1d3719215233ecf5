"""One behavior's learner as one of several that learn the same, each in a process of its own.

The mathematics is that of one learner which has everybody's environments: an update comes when all
together have enough rows, minibatches are made of parts from all, gradients are means over their
rows, advantages are normalised over the experience of all, and so are observations.
`trainer.meeting` says when the learners come together.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pipeline import seeding
from pipeline.errors import SettingsError, TrainingError
from pipeline.nets.layers import RunningNormalizer
from pipeline.nets.optimizer import FlatAdam
from pipeline.settings.schema import SACSettings
from pipeline.trainer.ranks import ProcessRanks, merged
from pipeline.trainer.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.settings.schema import TrainerSettings
    from pipeline.trainer.learner import Learner

# Most rows by which an update may come late so that there are fewer meetings, of `buffer_size`.
_LATE = 0.01
# Updates between two comparisons of the weights, for algorithms that update all the time.
_COMPARE_EVERY = 100


def refuse_alone_only(name: str, settings: TrainerSettings, n_learners: int) -> None:
    """Refuse what several processes cannot learn together.

    Args:
        name: of the behavior.
        settings: of the behavior.
        n_learners: how many processes there shall be.

    Raises:
        SettingsError: There is something of that kind.
    """
    if n_learners == 1:
        return
    at = f"behaviors.{name}"
    several = f"with {n_learners} learners"
    h = settings.hyperparameters
    gail = settings.reward_signals.get("gail")
    if settings.self_play is not None:
        raise SettingsError(f"{at}.self_play: games are played in one process; use one learner")
    if getattr(gail, "use_vail", False):
        raise SettingsError(
            f"{at}.reward_signals.gail.use_vail: its bottleneck is adjusted in one process; set it "
            "to false, or use one learner"
        )
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
    own = replace(h, batch_size=h.batch_size // n_learners, buffer_size=h.buffer_size // n_learners)
    return replace(settings, hyperparameters=own, behavioral_cloning=cloning)


class Together:
    """What a learner does with its equals in other processes.

    Args:
        learner: with the weights that all begin with, or resume with.
        ranks: all processes.
        seed: of the learner.

    Raises:
        SettingsError: The learner is set to something that cannot be done together.
    """

    def __init__(self, learner: Learner, ranks: ProcessRanks, *, seed: int) -> None:
        refuse_alone_only(learner.name, learner.settings, ranks.size)
        self.steps = 0
        """Steps of this process's agents since the last meeting."""
        self._learner = learner
        self._ranks = ranks
        self._turn = False
        self._held = 0
        self._digest = (-1, 0)
        learner.heard = Statistics()
        algorithm: Any = learner.algorithm
        algorithm.ranks = ranks
        for optimizer in _optimizers(algorithm):
            optimizer.average = ranks.average_gradients_
        if ranks.rank > 0:
            _draw_differently(algorithm, seed, ranks.rank, learner.n_updates)
        self._optimizer: FlatAdam = algorithm.optimizer
        networks = {"policy": algorithm.policy, **algorithm.signals.modules}
        self._normalizers = SharedNormalizers(networks)

    def is_due(self, next_summary: int) -> bool:
        """Whether this learner waits for the others.

        Args:
            next_summary: step at which the next summary is made.
        """
        learner = self._learner
        if learner.finished:
            return False
        if learner.replay is not None:  # which takes rows in at any time
            return True
        missing = min(learner.settings.max_steps, next_summary) - learner.step
        if self.steps * self._ranks.size >= missing:
            return True
        held = learner.trajectories.n_held
        if not learner.algorithm.ready(held * self._ranks.size):
            return False  # not even all rows of all would be enough, were they closed
        late = _LATE * learner.settings.hyperparameters.buffer_size
        return (held - self._held) * self._ranks.size >= late

    def takes_turn(self) -> bool:
        """Whether all together have enough for an update; once per meeting."""
        turn, self._turn = self._turn, False
        if turn:
            self._held = 0
        return turn or self._learner.finished

    def note(self) -> dict[str, Any]:
        """What the others need to know of this learner, as plain values."""
        learner = self._learner
        return {
            "step": learner.step,
            "updates": learner.n_updates,
            "weights": self._weights(),
            "steps": self.steps,
            "rows": learner.trajectories.n_closed,
            "statistics": learner.heard.new(),
        }

    def take(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Bring this learner to where all are together.

        Args:
            notes: of all learners, in the order of ranks.

        Raises:
            TrainingError: Somebody has other weights.
        """
        learner = self._learner
        refuse_other_weights(learner.name, notes)
        n_steps = sum(one["steps"] for one in notes)
        learner.step += n_steps
        learner.statistics.add_from([Statistics.of(one["statistics"]) for one in notes])
        learner.heard = Statistics()
        self.steps = 0
        rows = [one["rows"] for one in notes]
        self._held = learner.trajectories.n_held
        self._turn = all(rows) and learner.algorithm.ready(sum(rows)) and not learner.finished
        if n_steps:
            self._normalizers.merge(self._ranks)

    def mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Means over the processes of what an update has found, tag by tag."""
        found: dict[str, list[float]] = {}
        for one in self._ranks.exchanged(stats):
            for tag, value in one.items():
                found.setdefault(tag, []).append(value)
        return {tag: sum(values) / len(values) for tag, values in found.items()}

    def _weights(self) -> int:
        """Digest of the weights, after the last update that it is taken for."""
        learner = self._learner
        update = learner.n_updates
        if learner.replay is not None:
            update = update // _COMPARE_EVERY * _COMPARE_EVERY
        if update != self._digest[0]:
            self._digest = update, digest([self._optimizer.flat, *self._normalizers.agreed()])
        return self._digest[1]


def refuse_other_weights(name: str, notes: Sequence[Mapping[str, Any]]) -> None:
    """Make sure that all have the same weights.

    Args:
        name: of the behavior.
        notes: of all learners, in the order of ranks.

    Raises:
        TrainingError: Somebody has others.
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
    found = 0
    for one in parts:
        found = zlib.crc32(one.detach().cpu().contiguous().numpy().data, found)
    return found


class SharedNormalizers:
    """The running means of a behavior's networks, kept the same in all processes.

    Between meetings each process adds what it sees to the state that all had after the last one;
    at the next the additions of all are added to that state.

    Args:
        networks: those that may have normalisers, in one order everywhere.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        found = [
            module
            for network in networks.values()
            for module in network.modules()
            if isinstance(module, RunningNormalizer)
        ]
        self._normalizers = list(dict.fromkeys(found))
        self._before = [_state(one) for one in self._normalizers]

    def agreed(self) -> list[Tensor]:
        """The state that all have had since the last time."""
        return [part for state in self._before for part in state]

    @torch.no_grad()
    def merge(self, ranks: ProcessRanks) -> None:
        """Add what all have seen since the last time."""
        for one, before in zip(self._normalizers, self._before, strict=True):
            device = one.mean.device
            own = torch.stack(_without(_state(one), before))
            seen = [part.unbind() for part in ranks.gathered(own)]
            n, mean, squared = merged([before, *seen])
            one.count.copy_(n[0])
            one.mean.copy_(mean.to(device))
            one.squared.copy_(squared.to(device))
            one.forget_scale()
        self._before = [_state(one) for one in self._normalizers]


def _optimizers(algorithm: Any) -> Iterator[FlatAdam]:
    """All that learn from what the agents do; cloning takes the same steps everywhere by itself."""
    signals = algorithm.signals.by_name.values()
    for owner in (algorithm, *signals):
        optimizer = getattr(owner, "optimizer", None)
        if isinstance(optimizer, FlatAdam):
            yield optimizer


def _draw_differently(algorithm: Any, seed: int, rank: int, n_updates: int) -> None:
    """Give a process beyond the first its own actions and minibatches; weights are not drawn here.

    A run that is resumed draws others than it did when it began.
    """
    names = ("rank", rank, "update", n_updates)
    for name in ("action_stream", "noise_stream"):
        stream = getattr(algorithm, name, None)
        if stream is not None:
            stream.manual_seed(seeding.derive(seed, name, *names))
    own = seeding.stream(seed, "minibatches", *names)
    algorithm.minibatch_stream.bit_generator.state = own.bit_generator.state


def _state(one: RunningNormalizer) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and squared deviations [size] on the CPU, copied."""
    count, mean, squared = (part.detach().cpu() for part in (one.count, one.mean, one.squared))
    return count.expand_as(mean).clone(), mean.clone(), squared.clone()


def _without(
    state: tuple[Tensor, Tensor, Tensor], before: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The sample that, merged with `before`, gives `state`."""
    n, mean, squared = state
    n_before, mean_before, squared_before = before
    n_new = n - n_before
    apart = torch.where(n_new > 0, (mean - mean_before) * n / n_new.clamp_min(1.0), 0.0)
    rest = squared - squared_before - apart.square() * n_before * n_new / n
    return n_new, mean_before + apart, rest.clamp_min(0.0)
