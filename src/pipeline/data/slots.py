"""Slots: each live agent has a row in preallocated arrays; the row is found without a loop."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, IntArray
from pipeline.data.columns import enlarged
from pipeline.errors import UnityEnvironmentException

STALE_AFTER_MESSAGES = 1000
"""An agent counts as gone after this number of messages without the agent."""
MIN_SLOTS_TO_SWEEP = 64
"""A sweep needs at least twice this number of taken slots."""

_NONE: AnyArray = np.zeros(0, dtype=np.intp)


class Slots:
    """Gives each live agent of a source a slot.

    A source is a pair of a team and a worker. Its agents are stored as a sorted array of ids and an
    array of slots. If a message has the same agents as the source's previous message, the slots of
    the previous message are used again without a look-up.

    Agents may disappear without the end of an episode. So the time of the agent's last message is
    stored for each slot, and `sweep` frees the slots of agents that were in no message for a long
    time, but only if the number of taken slots has doubled since the last sweep. Time is counted in
    messages of the source that has sent the most messages, so it does not depend on the number of
    workers and teams.
    """

    def __init__(self) -> None:
        self._by_source: dict[Hashable, tuple[IntArray, AnyArray]] = {}
        self._free: list[int] = []
        # For each source: the ids of its last message as bytes (fast to compare), and their slots.
        self._last: dict[Hashable, tuple[bytes, AnyArray]] = {}
        self._sent: dict[Hashable, int] = {}  # number of messages with decisions, by source
        self._clock = 0  # number of messages of the source with the most messages
        self._heard = np.zeros(0, dtype=np.int64)  # by slot: the clock at the agent's last message
        self._n_swept = 0  # number of taken slots after the last sweep
        self.n_slots = 0

    @property
    def n_taken(self) -> int:
        """Number of slots with an agent."""
        return self.n_slots - len(self._free)

    def deciding(self, source: Hashable, agent_ids: IntArray) -> AnyArray:
        """Return the slots [N] of agents [N] that ask for a decision; new agents get new slots.

        Must be called once per message of a source, because each call counts as a message.

        Raises:
            UnityEnvironmentException: An agent asks for two decisions.
        """
        last, ids = self._last.get(source), agent_ids.tobytes()
        # If the agents are the same as in the source's last message, their slots are known. The
        # length is compared, too, because ids of another dtype may have the same bytes.
        if last is not None and last[0] == ids and len(last[1]) == len(agent_ids):
            slots = last[1]
        else:
            slots = self._look_up(source, agent_ids)
            sorted_ids = np.sort(agent_ids)
            duplicates = np.flatnonzero(sorted_ids[1:] == sorted_ids[:-1])
            if len(duplicates):
                raise UnityEnvironmentException(
                    f"agent {sorted_ids[duplicates[0]]} of {source} asks for two decisions in one "
                    "message; an environment must give each of its agents a different id"
                )
            self._last[source] = (ids, slots)
        # A new source begins at the clock's value: if it began at 0, its messages would not advance
        # the clock for a long time.
        sent = self._sent[source] = self._sent.get(source, self._clock - 1) + 1
        self._clock = max(self._clock, sent)
        self._heard[slots] = self._clock
        return slots

    def ended(self, source: Hashable, agent_ids: IntArray) -> AnyArray:
        """Return the slots [N] of agents [N] with an ended episode."""
        slots = self._look_up(source, agent_ids)
        self._heard[slots] = self._clock
        return slots

    def release(self, source: Hashable, agent_ids: AnyArray | Sequence[int]) -> None:
        """Free the slots of agents that will not come back."""
        ids, _ = self._ids_and_slots(source)
        gone = np.isin(ids, np.asarray(agent_ids, dtype=np.int64))
        self._keep(source, ~gone)
        # The last message's slots may have been freed.
        self._last.pop(source, None)

    def forget(self, gone: Callable[[Hashable], bool]) -> AnyArray:
        """Free all slots of the sources for which `gone` returns True; return these slots [K]."""
        freed = []
        for source in [source for source in self._by_source if gone(source)]:
            ids, _ = self._by_source[source]
            freed.append(self._keep(source, np.zeros(len(ids), dtype=np.bool_)))
            del self._by_source[source]
            self._sent.pop(source, None)
        self._last = {source: last for source, last in self._last.items() if not gone(source)}
        return _concatenated(freed)

    def sweep(self) -> AnyArray:
        """Free and return the slots [K] of agents that were in none of the last 1,000 messages.

        A sweep is due when the number of taken slots has doubled since the last sweep.
        """
        if self.n_taken < 2 * max(self._n_swept, MIN_SLOTS_TO_SWEEP):
            return _NONE
        since = self._clock - STALE_AFTER_MESSAGES
        freed = [
            self._keep(source, self._heard[slots] > since)
            for source, (_, slots) in self._by_source.items()
        ]
        self._n_swept = self.n_taken
        # The last messages may refer to slots that were freed just now.
        self._last.clear()
        return _concatenated(freed)

    def state_dict(self) -> dict[str, Any]:
        """Return the slots of all agents, as plain values and arrays."""
        return {
            "taken": [
                {
                    "source": source,
                    "ids": ids,  # not copied, because the array is replaced and never changed
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
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: Slots are missing, or belong to several agents.
        """
        owned = [*state["free"], *(slot for e in state["taken"] for slot in e["slots"].tolist())]
        # Two agents with one slot would write to the same rows without an error.
        if sorted(owned) != list(range(len(state["heard"]))) or state["n_slots"] != len(owned):
            raise ValueError(
                f"the saved agents and free slots name {len(owned)} slots, but each of the "
                f"{state['n_slots']} slots must be named once; the checkpoint is damaged"
            )
        self._by_source = {
            entry["source"]: (entry["ids"], entry["slots"]) for entry in state["taken"]
        }
        self._free = list(state["free"])
        self._last = {}
        self._heard = state["heard"].copy()
        self._clock = int(state["clock"])
        # Checkpoints of versions that did not count messages by source do not have "sent".
        self._sent = {entry["source"]: entry.get("sent", self._clock) for entry in state["taken"]}
        self._n_swept = int(state["n_swept"])
        self.n_slots = int(state["n_slots"])

    def _ids_and_slots(self, source: Hashable) -> tuple[IntArray, AnyArray]:
        """Return the sorted ids [K] of a source's agents, and their slots [K]."""
        pair = self._by_source.get(source)
        if pair is None:
            pair = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.intp)
            self._by_source[source] = pair
        return pair

    def _keep(self, source: Hashable, is_kept: BoolArray) -> AnyArray:
        """Free and return the slots of the agents of a source for which `is_kept` [K] is False."""
        ids, slots = self._ids_and_slots(source)
        freed: AnyArray = slots[~is_kept]
        if len(freed):
            self._by_source[source] = ids[is_kept], slots[is_kept]
            # Freed slots are used again, so that the arrays by slot stay small.
            self._free.extend(freed.tolist())
        return freed

    def _look_up(self, source: Hashable, agent_ids: IntArray) -> AnyArray:
        ids, slots = self._ids_and_slots(source)
        new = agent_ids
        if len(ids):
            at = np.minimum(np.searchsorted(ids, agent_ids), len(ids) - 1)
            # `searchsorted` also returns an index for ids that are not in the array.
            is_known = ids[at] == agent_ids
            if is_known.all():
                return slots[at]
            new = agent_ids[~is_known]
        self._add(source, new)
        ids, slots = self._ids_and_slots(source)
        return slots[np.searchsorted(ids, agent_ids)]

    def _add(self, source: Hashable, agent_ids: IntArray) -> None:
        """Give each of the agents a slot; no agent has a slot yet, but ids may be repeated."""
        ids, slots = self._ids_and_slots(source)
        new, first = np.unique(agent_ids, return_index=True)
        added = np.empty(len(new), dtype=np.intp)
        # Slots are given in the order of the message, not in the order of ids.
        added[np.argsort(first)] = self._take(len(new))
        at = np.searchsorted(ids, new)
        self._by_source[source] = np.insert(ids, at, new), np.insert(slots, at, added)

    def _take(self, n: int) -> list[int]:
        """Return `n` slots: first the slots that were freed last, then new slots."""
        n_old = min(n, len(self._free))
        slots = self._free[len(self._free) - n_old :][::-1]
        del self._free[len(self._free) - n_old :]
        slots += range(self.n_slots, self.n_slots + n - n_old)
        self.n_slots += n - n_old
        if self.n_slots > len(self._heard):
            self._heard = enlarged(self._heard, 2 * self.n_slots)
        return slots


def _concatenated(parts: Sequence[AnyArray]) -> AnyArray:
    return np.concatenate(parts) if parts else _NONE
