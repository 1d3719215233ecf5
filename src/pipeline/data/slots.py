"""Which row of the preallocated arrays each live agent has, found without a loop over agents."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.arrays import AnyArray, BoolArray, IntArray
from pipeline.data.columns import enlarged
from pipeline.errors import UnityEnvironmentException

STALE_AFTER_MESSAGES = 1000
"""An agent that this many messages did not name counts as gone."""
MIN_SLOTS_TO_SWEEP = 64
"""A sweep needs at least twice as many taken slots."""

_NONE: AnyArray = np.zeros(0, dtype=np.intp)


class Slots:
    """Which slot each live (source, agent) has; a source's unchanged agents are not looked up.

    A source is where agents come from: a worker, and the team they play for. Its agents are kept as
    a sorted array of ids beside the array of their slots.

    Agents may vanish without the end of an episode. So each slot notes when its agent was last
    heard of, and `sweep` frees the slots of agents that no message has named for long. It looks for
    them only when the number of taken slots has doubled since the last time. Time is the number of
    messages of the source that has sent most, however many workers and teams take turns.
    """

    def __init__(self) -> None:
        self._by_source: dict[Hashable, tuple[IntArray, AnyArray]] = {}
        self._free: list[int] = []
        self._last: dict[Hashable, tuple[bytes, AnyArray]] = {}  # ids as bytes compare fastest
        self._sent: dict[Hashable, int] = {}  # messages with decisions, by source
        self._clock = 0  # messages of the source that has sent most
        self._heard = np.zeros(0, dtype=np.int64)  # by slot: the clock when its agent last sent
        self._n_swept = 0  # slots that were taken after the last sweep
        self.n_slots = 0

    @property
    def n_taken(self) -> int:
        """Number of slots that belong to an agent."""
        return self.n_slots - len(self._free)

    def deciding(self, source: Hashable, agent_ids: IntArray) -> AnyArray:
        """Slots [N] of agents [N] that ask for a decision, new ones where an agent has none.

        It is called once per message of a source: each call counts as a message.

        Raises:
            UnityEnvironmentException: An agent asks twice.
        """
        last, ids = self._last.get(source), agent_ids.tobytes()
        # The same agents as in the source's last message, which looked them up and checked them.
        # The length counts too, because ids of another dtype may have the same bytes.
        if last is not None and last[0] == ids and len(last[1]) == len(agent_ids):
            slots = last[1]
        else:
            slots = self._look_up(source, agent_ids)
            _refuse_duplicates(source, agent_ids)
            self._last[source] = (ids, slots)
        # A source that joins late begins at the clock: from 0 it would not move the clock.
        sent = self._sent[source] = self._sent.get(source, self._clock - 1) + 1
        self._clock = max(self._clock, sent)
        self._heard[slots] = self._clock
        return slots

    def ended(self, source: Hashable, agent_ids: IntArray) -> AnyArray:
        """Slots [N] of agents [N] whose episode has ended."""
        slots = self._look_up(source, agent_ids)
        self._heard[slots] = self._clock
        return slots

    def release(self, source: Hashable, agent_ids: AnyArray | Sequence[int]) -> None:
        """Give back the slots of agents that are gone for good."""
        ids, _ = self._ids_and_slots(source)
        gone = np.isin(ids, np.asarray(agent_ids, dtype=np.int64))
        self._keep(source, ~gone)
        self._last.pop(source, None)

    def forget(self, gone: Callable[[Hashable], bool]) -> AnyArray:
        """Free the slots of all agents whose source is `gone`, and return them [K]."""
        freed = []
        for source in [source for source in self._by_source if gone(source)]:
            freed.append(
                self._keep(source, np.zeros(len(self._ids_and_slots(source)[0]), dtype=np.bool_))
            )
            del self._by_source[source]
            self._sent.pop(source, None)
        self._last = {source: last for source, last in self._last.items() if not gone(source)}
        return _joined(freed)

    def sweep(self) -> AnyArray:
        """Free the slots of agents that no message has named for long, and return them [K]."""
        if self.n_taken < 2 * max(self._n_swept, MIN_SLOTS_TO_SWEEP):
            return _NONE
        since = self._clock - STALE_AFTER_MESSAGES
        freed = [
            self._keep(source, self._heard[slots] > since)
            for source, (_, slots) in self._by_source.items()
        ]
        self._n_swept = self.n_taken
        # These may name slots that were given back just now.
        self._last.clear()
        return _joined(freed)

    def state_dict(self) -> dict[str, Any]:
        """Who has which slot, as plain values and arrays."""
        return {
            "taken": [
                {
                    "source": source,
                    "ids": ids,  # replaced when agents come or go, never written to
                    "slots": slots.copy(),
                    "sent": self._sent.get(source, self._clock),
                }
                for source, (ids, slots) in self._by_source.items()
            ],
            "free": list(self._free),
            "n_slots": self.n_slots,
            "heard": self._heard[: self.n_slots].copy(),
            "clock": self._clock,
            "n_swept": self._n_swept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: Slots are missing, or have several owners.
        """
        owned = [*state["free"], *(slot for e in state["taken"] for slot in e["slots"].tolist())]
        if sorted(owned) != list(range(len(state["heard"]))) or state["n_slots"] != len(owned):
            raise ValueError(f"{len(owned)} slots of {state['n_slots']} have an owner or are free")
        self._by_source = {
            entry["source"]: (entry["ids"], entry["slots"]) for entry in state["taken"]
        }
        self._free = list(state["free"])
        self._last = {}
        self._heard = state["heard"].copy()
        self._clock = int(state["clock"])
        # Checkpoints written before sources were counted do not have "sent".
        self._sent = {entry["source"]: entry.get("sent", self._clock) for entry in state["taken"]}
        self._n_swept = int(state["n_swept"])
        self.n_slots = int(state["n_slots"])

    def _ids_and_slots(self, source: Hashable) -> tuple[IntArray, AnyArray]:
        """Sorted ids [K] of the source's agents, and their slots [K]."""
        pair = self._by_source.get(source)
        if pair is None:
            pair = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.intp)
            self._by_source[source] = pair
        return pair

    def _keep(self, source: Hashable, is_kept: BoolArray) -> AnyArray:
        """Free the slots of a source's agents [K] that are not `is_kept`, and return them."""
        ids, slots = self._ids_and_slots(source)
        freed: AnyArray = slots[~is_kept]
        if len(freed):
            self._by_source[source] = ids[is_kept], slots[is_kept]
            self._free.extend(freed.tolist())
        return freed

    def _look_up(self, source: Hashable, agent_ids: IntArray) -> AnyArray:
        ids, slots = self._ids_and_slots(source)
        new = agent_ids
        if len(ids):
            at = np.minimum(np.searchsorted(ids, agent_ids), len(ids) - 1)
            # `searchsorted` also gives a place to ids that are not there.
            is_known = ids[at] == agent_ids
            if is_known.all():
                return slots[at]
            new = agent_ids[~is_known]
        self._add(source, new)
        ids, slots = self._ids_and_slots(source)
        return slots[np.searchsorted(ids, agent_ids)]

    def _add(self, source: Hashable, agent_ids: IntArray) -> None:
        """Give each of these agents a slot; none has one yet, and an id may come several times."""
        ids, slots = self._ids_and_slots(source)
        new, first = np.unique(agent_ids, return_index=True)
        added = np.empty(len(new), dtype=np.intp)
        # In the order in which they were named, not of their ids: slots follow the message.
        added[np.argsort(first)] = self._take(len(new))
        at = np.searchsorted(ids, new)
        self._by_source[source] = np.insert(ids, at, new), np.insert(slots, at, added)

    def _take(self, n: int) -> list[int]:
        """Return `n` slots: those that were freed last, then new ones."""
        n_old = min(n, len(self._free))
        slots = self._free[len(self._free) - n_old :][::-1]
        del self._free[len(self._free) - n_old :]
        slots += range(self.n_slots, self.n_slots + n - n_old)
        self.n_slots += n - n_old
        if self.n_slots > len(self._heard):
            self._heard = enlarged(self._heard, 2 * self.n_slots)
        return slots


def _refuse_duplicates(source: Hashable, agent_ids: IntArray) -> None:
    ids = np.sort(agent_ids)
    duplicates = np.flatnonzero(ids[1:] == ids[:-1])
    if len(duplicates):
        raise UnityEnvironmentException(
            f"agent {ids[duplicates[0]]} of {source} asks for two decisions in one message; an "
            "environment must give each of its agents an id of its own"
        )


def _joined(parts: Sequence[AnyArray]) -> AnyArray:
    return np.concatenate(parts) if parts else _NONE
