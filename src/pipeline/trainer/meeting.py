"""Where learners of several processes come together: between two steps of their environments.

Each process steps its environments on its own until it cannot rule out any more that all together
have the rows of an update, or the steps to the next summary or to the end of training; or until it
is told to stop. From then on it meets the others again and again. What they have seen since the
last meeting is added up in the order of ranks, so that steps, episodes and measures of lessons are
those of all, and the same everywhere; and what is decided from them (to update, to summarise, to
begin a lesson, to end) is decided everywhere at the same moment.
"""

from __future__ import annotations

import io
import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from pipeline.trainer.ranks import ProcessRanks
from pipeline.trainer.stopping import StopRequest
from pipeline.trainer.together import Together, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.algos.ranks import Ranks
    from pipeline.settings.schema import TrainerSettings
    from pipeline.trainer.learner import Learner
    from pipeline.trainer.saving import Keeper

_log = logging.getLogger(__name__)

# Parts of a saved state that only the process that wrote it could go on with.
_OF_ONE_PROCESS = ("experience", "environments", "replay")


class Meeting:
    """Decides when the processes meet, and brings the learners of all to one state there.

    Args:
        ranks: the processes; one alone never meets anybody.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks if isinstance(ranks, ProcessRanks) else None
        self._asked = StopRequest()
        self._agreed = StopRequest()
        self._missed: set[str] = set()

    def resumed(self, keeper: Keeper) -> dict[str, dict[str, Any]]:
        """What the run's resume files hold, by behavior, in all processes as in the first.

        Experience is not taken up by several: that of the others has not been saved.
        """
        states = keeper.saved()
        if self.ranks is None:
            return states
        kept = {
            name: {key: one for key, one in state.items() if key not in _OF_ONE_PROCESS}
            for name, state in states.items()
        }
        buffer = io.BytesIO()
        torch.save(kept, buffer)
        sent = self.ranks.from_first(buffer.getvalue())
        found: dict[str, dict[str, Any]] = torch.load(io.BytesIO(sent), weights_only=True)
        return found

    def listen(self, asked: StopRequest) -> StopRequest:
        """Take this process's request to stop, and give the one that all have agreed on."""
        self._asked = asked
        if self.ranks is None:
            return asked
        return self._agreed

    def hold_if_due(
        self, learners: Mapping[str, Learner], next_summary: Callable[[str], int]
    ) -> None:
        """Meet the others if something here waits for it.

        Args:
            learners: by name of their behavior.
            next_summary: step of a behavior's next summary.
        """
        if self.ranks is None:
            return
        stop = self._stop_asked()
        if stop or any(
            one.together is not None and one.together.is_due(next_summary(name))
            for name, one in learners.items()
        ):
            began = time.perf_counter()
            self._hold(self.ranks, learners)
            for one in [*learners.values()][:1]:  # of the run, so counted once
                seconds = one.seconds.get("meeting", 0.0) + time.perf_counter() - began
                one.seconds["meeting"] = seconds

    def share_of(self, settings: TrainerSettings) -> TrainerSettings:
        """What this process's learner is set to."""
        return settings if self.ranks is None else share_of(settings, self.ranks.size)

    def admit(self, learner: Learner, *, seed: int) -> None:
        """Let a behavior's new or restored learner do as those of the other processes.

        Raises:
            SettingsError: It is set to something that several processes cannot do together.
        """
        if self.ranks is not None:
            learner.together = Together(learner, self.ranks, seed=seed)

    def _stop_asked(self) -> int:
        """The signal that asks this process to stop, 0 for none."""
        other = None if self.ranks is None else self.ranks.stop.signal_number
        return self._asked.signal_number or other or 0

    def _hold(self, ranks: ProcessRanks, learners: Mapping[str, Learner]) -> None:
        members = {name: one.together for name, one in learners.items() if one.together is not None}
        note = {
            "stop": self._stop_asked(),
            "behaviors": {name: one.note() for name, one in members.items()},
        }
        notes = ranks.exchanged(note, look=self._pass_on)
        self._agreed.signal_number = next((one["stop"] for one in notes if one["stop"]), None)
        if self._agreed():
            self._pass_on()
        self._tell_missing(members, notes)
        for name in sorted(members):
            parts = [one["behaviors"].get(name) for one in notes]
            if None not in parts:
                members[name].take(parts)

    def _pass_on(self) -> None:
        """Tell the processes that this one has started what it has been asked."""
        stop = self._stop_asked() or self._agreed.signal_number
        if stop and self.ranks is not None and self.ranks.others is not None:
            self.ranks.others.pass_on(stop)

    def _tell_missing(
        self, learners: Mapping[str, Together], notes: Sequence[Mapping[str, Any]]
    ) -> None:
        for name in learners:
            without = [r for r, one in enumerate(notes) if name not in one["behaviors"]]
            if without and name not in self._missed:
                self._missed.add(name)
                _log.warning(
                    "%s has shown up here, but not yet in the environments of rank %s; it learns "
                    "when all have it.",
                    name,
                    ", ".join(map(str, without)),
                )
