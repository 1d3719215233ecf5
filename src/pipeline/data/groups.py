"""Groups of agents, the rewards that their members share, and snapshots of their members.

Each message of the environments is processed in one vectorized pass over the agents of all workers,
without a loop over agents. An agent without a group is a group of one. A member that did not ask
for a decision in this message takes part in its group with its latest decision, which is still in
effect.

A group's critic gets all members at once (MA-POCA, Cohen et al. 2021, arXiv:2111.05992). The
observation and the action of a member are stored once, as an *entity*, even if several members'
rows refer to it; a *moment* is the list of one group's entities at one time. A row of experience
stores the number of its moment only. Entities are kept until no row needs them, because the
trajectory of another member may close earlier or later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.data.columns import Columns, Field, GrowableRows, enlarged, rows_of

# Distance between the keys of two sources (a source is one team of one worker). Ids of groups are
# int32, so groups of two sources never have equal keys.
_SOURCE = 1 << 32
_NO_GROUP = -1
_PER_SLOT = {
    "present": np.bool_,  # the agent has made a decision, and its episode has not ended
    "group": np.int64,
    "entity": np.int64,  # number of the agent's last stored observation and action
    "moment": np.int64,  # number of the group's snapshot at the agent's last decision
    "end_moment": np.int64,  # number of the group's snapshot after the agent's end
    "pending_reward": np.float64,  # sum of members' own rewards since the agent's last message
    "step_reward": np.float64,  # `pending_reward` at this message, plus the group reward
    "step_reward_at_end": np.float64,
    "own_return": np.float64,  # sum of individual rewards in the episode so far
    "group_return": np.float64,
    "acted": np.bool_,  # the agent had made a decision before its episode ended
    "own_at_end": np.float64,
    "group_at_end": np.float64,
}
# Checkpoints have the names of an earlier version, so that old and new versions can read each
# other's files.
_SAVED_AS = {
    "pending_reward": "owed",
    "step_reward": "gained",
    "step_reward_at_end": "gained_at_end",
}
_NUMBER = Field(shape=(), dtype=np.int64)
_CAPACITY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMessage:
    """Data of N agents of a team, in the messages of all workers: ended or deciding agents."""

    slots: AnyArray
    """[N] slot of each agent."""
    group: AnyArray
    """int64 [N] key of each agent's group; `Groups.key` returns it."""
    reward: FloatArray
    """[N] individual reward of each agent."""
    group_reward: FloatArray
    """[N] group reward of each agent."""
    obs: Sequence[FloatArray]
    """One array [N, *shape] for each observation of the behavior."""
    interrupted: BoolArray | None = None
    """[N] whether each ended episode was cut short; None for deciding agents."""
    memory: FloatArray | None = None
    """[N, M] recurrent memory of each ended agent; None for deciding agents or without memory."""


class Groups:
    """Members, rewards and snapshots of one behavior's groups, by slot (see `data.slots`).

    Args:
        columns: columns to store for each member: observations, actions, and the flag `over`, which
            this class sets if the member's episode has ended and was not cut short.
    """

    def __init__(self, columns: Columns[Field]) -> None:
        self.moments = GroupSnapshots(columns)
        self.by_slot: dict[str, AnyArray] = {
            name: np.zeros(0, dtype=dtype) for name, dtype in _PER_SLOT.items()
        }
        self._sources: dict[Any, int] = {}
        self.finished: list[float] = []
        """Group returns of groups in which all members have ended; the caller clears this list."""

    def key(self, source: Any, group_id: AnyArray, slots: AnyArray) -> AnyArray:
        """Return the keys of the groups of N agents, int64 [N].

        An agent without a group gets a key that no other agent has. `source` is the team and the
        worker of the agents, because each worker numbers its groups independently.
        """
        number = self._sources.setdefault(source, len(self._sources))
        named = number * _SOURCE + group_id.astype(np.int64)
        # Agents without a group get negative keys, a different one for each agent.
        return np.where(group_id > 0, named, _NO_GROUP - slots)

    def on_message(self, ended: GroupMessage, deciding: GroupMessage, n_slots: int) -> None:
        """Process a message: write rewards, and the numbers of group snapshots, to `by_slot`.

        Args:
            ended: agents with an ended episode, each once.
            deciding: agents that ask for a decision; some may have ended in the same message.
            n_slots: number of slots in use.
        """
        self._reserve(n_slots)
        s = self.by_slot
        acted = s["present"][ended.slots]
        # An agent that has changed its group does not continue the old group's trajectory.
        goes_on = s["present"][deciding.slots] & (s["group"][deciding.slots] == deciding.group)
        if len(ended.slots):
            # An agent that ended in this message and decides again begins another episode.
            goes_on &= ~np.isin(deciding.slots, ended.slots)
        # Rewards belong to the groups that earned them, so they are shared before groups change.
        self._share(ended, acted, deciding, goes_on)
        # New entities are added first, so that the moment after a member's end has the newest
        # observations of the other members.
        ids = self._observe(deciding, np.zeros(len(deciding.slots), dtype=np.bool_))
        s["entity"][deciding.slots[goes_on]] = ids[goes_on]
        s["acted"][ended.slots] = acted
        if acted.any():
            self._end(ended, acted)
        changed = deciding.slots[~goes_on]
        s["present"][deciding.slots] = True
        s["group"][changed] = deciding.group[~goes_on]
        s["pending_reward"][changed] = 0.0
        s["own_return"][changed] = s["group_return"][changed] = 0.0
        s["entity"][deciding.slots] = ids
        if len(deciding.slots):
            s["moment"][deciding.slots] = self._moment_of(deciding.group)

    def decided(self, slots: AnyArray, rows: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Store agents' actions; return the fields `entity` and `moment` for rows of experience.

        `entity` is the number of the agent's stored data, `moment` the number of its group's
        snapshot.
        """
        self.moments.describe(self.by_slot["entity"][slots], rows)
        return {name: self.by_slot[name][slots] for name in ("entity", "moment")}

    def drop(self, slots: AnyArray | slice) -> None:
        """Remove agents that have disappeared without the end of an episode."""
        self.by_slot["present"][slots] = False

    def forget(self, needed: AnyArray) -> None:
        """Drop the snapshots that are not needed any more.

        The snapshots with the numbers `needed` stay, and the latest snapshot of each present agent.
        """
        s = self.by_slot
        present = s["present"]
        self.moments.keep(np.union1d(needed, s["moment"][present]), s["entity"][present])

    def state_dict(self, *, n_slots: int) -> dict[str, Any]:
        """Return the state of all groups and of the slots 0 to `n_slots` - 1."""
        return {
            "moments": self.moments.state_dict(),
            "sources": [*self._sources],
            "by_slot": {
                _SAVED_AS.get(name, name): values[:n_slots].copy()
                for name, values in self.by_slot.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, with_open: bool) -> None:
        """Restore a state that `state_dict` returned.

        Without `with_open`, only the snapshots are restored, and no data of open trajectories.
        """
        self.moments.load_state_dict(state["moments"])
        if with_open:
            self._sources = {
                tuple(source) if isinstance(source, list) else source: number
                for number, source in enumerate(state["sources"])
            }
            saved = state["by_slot"]
            self.by_slot = {name: saved[_SAVED_AS.get(name, name)].copy() for name in _PER_SLOT}

    def _share(
        self, ended: GroupMessage, acted: BoolArray, deciding: GroupMessage, goes_on: BoolArray
    ) -> None:
        """Give each agent the sum of its group's individual rewards, and the group reward."""
        s = self.by_slot
        parts = ((ended, acted, "step_reward_at_end"), (deciding, goes_on, "step_reward"))
        keys = np.concatenate([s["group"][message.slots[real]] for message, real, _ in parts])
        groups, agent_group = np.unique(keys, return_inverse=True)
        rewards = np.concatenate([message.reward[real] for message, real, _ in parts])
        sums = np.bincount(agent_group, weights=rewards, minlength=len(groups))
        members, group_index = self._members(groups)
        # Members without a step in this message get the sum with their next message.
        s["pending_reward"][members] += sums[group_index]
        for message, real, name in parts:
            slots = message.slots[real]
            s[name][slots] = s["pending_reward"][slots] + message.group_reward[real]
            s["pending_reward"][slots] = 0.0
            s["own_return"][slots] += message.reward[real]
            s["group_return"][slots] += message.group_reward[real]

    def _end(self, ended: GroupMessage, acted: BoolArray) -> None:
        """Add a snapshot of the group of each ended episode, with the ended and remaining members.

        The stored data of an ended member have `over` set, unless its episode was cut short.
        """
        s = self.by_slot
        over = ~ended.interrupted if ended.interrupted is not None else np.ones_like(acted)
        s["entity"][ended.slots] = self._observe(ended, over)
        slots = ended.slots[acted]
        for name in ("own", "group"):
            s[f"{name}_at_end"][slots] = s[f"{name}_return"][slots]
        keys = s["group"][slots]
        s["end_moment"][slots] = self._moment_of(keys)
        # Ended agents are removed last, because they are members of the added moment.
        s["present"][slots] = False
        groups = np.unique(keys[keys >= 0])
        # A group has finished when none of its members is present any more.
        left = np.isin(groups, s["group"][s["present"]])
        for group in groups[~left].tolist():  # a short loop: few groups end in the same message
            self.finished.append(float(s["group_return"][slots[keys == group]].mean()))

    def _observe(self, message: GroupMessage, over: BoolArray) -> AnyArray:
        fields: dict[str, AnyArray] = {"over": over}
        if message.memory is not None:
            fields["memory"] = message.memory
        return self.moments.add_entities(len(message.slots), message.obs, fields)

    def _moment_of(self, keys: AnyArray) -> AnyArray:
        """Add snapshots of N agents' groups; return each agent's snapshot number, int64 [N]."""
        groups, agent_group = np.unique(keys, return_inverse=True)
        slots, group_index = self._members(groups)
        # The sort is stable, so that members are in the order of their slots.
        order = np.argsort(group_index, kind="stable")
        entities = self.by_slot["entity"][slots[order]]
        ids = self.moments.add_moments(entities, np.bincount(group_index, minlength=len(groups)))
        return ids[agent_group]

    def _members(self, groups: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the slots of the groups' present members, and the index of each member's group.

        `groups` has sorted keys, and the indices are positions in `groups`.
        """
        slots = np.flatnonzero(self.by_slot["present"])
        if not len(groups):
            return slots[:0], slots[:0]
        key = self.by_slot["group"][slots]
        # `searchsorted` returns `len(groups)`, which is not an index, for keys above all groups.
        group_index = np.minimum(np.searchsorted(groups, key), len(groups) - 1)
        is_member = groups[group_index] == key
        return slots[is_member], group_index[is_member]

    def _reserve(self, n_slots: int) -> None:
        n_old = len(self.by_slot["present"])
        if n_slots > n_old:
            for name, values in self.by_slot.items():
                self.by_slot[name] = enlarged(values, max(n_slots, 2 * n_old))


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """M snapshots of groups (moments) with at most N members each, and the members' E entities.

    An entity is the stored observation and action of a member.
    """

    entities: Columns[AnyArray]
    """Columns of the entities, as arrays [E, ...]."""
    ids: AnyArray
    """int64 [E] numbers of the entities."""
    index: AnyArray
    """int64 [M, N] index into `entities` of each member of a moment; 0 in an empty place."""
    present: BoolArray
    """bool [M, N] whether a place has a member; the members of a moment are in its first places."""


class GroupSnapshots:
    """Stores the data of members (entities), and the members of groups at one time (moments).

    Entities and moments are numbered in the order in which they are added. An entity is stored in
    `columns`.
    """

    def __init__(self, columns: Columns[Field]) -> None:
        entity = Columns({**columns.fields, "id": _NUMBER}, columns.obs)
        self._entities = GrowableRows(entity, _CAPACITY)
        self._moments = GrowableRows(Columns({"id": _NUMBER, "count": _NUMBER}), _CAPACITY)
        self._members = GrowableRows(Columns({"entity": _NUMBER}), _CAPACITY)
        self._next_entity = self._next_moment = 0

    def add_entities(
        self, n: int, obs: Sequence[FloatArray], fields: Mapping[str, AnyArray]
    ) -> AnyArray:
        """Add `n` entities, with zeros in fields that are not given; return their numbers, [n]."""
        ids = self._next_entity + np.arange(n)
        # An array with a single zero is broadcast to every field that is not given.
        zeros = dict.fromkeys(self._entities.arrays.fields, np.zeros(1, np.bool_))
        self._entities.append(n, Columns({**zeros, **fields, "id": ids}, list(obs)))
        self._next_entity += n
        return ids

    def describe(self, ids: AnyArray, rows: Mapping[str, AnyArray]) -> None:
        """Set the fields in `rows`, [n, ...], of the entities with the numbers `ids`, int64 [n]."""
        at = self._places(ids)
        for name, values in rows.items():
            self._entities.arrays.fields[name][at] = values

    def add_moments(self, members: AnyArray, counts: AnyArray) -> AnyArray:
        """Add M moments with `counts` [M] members each, and return their numbers, int64 [M].

        `members`, int64 [sum of counts], numbers the members' entities, sorted by moment.
        """
        ids = self._next_moment + np.arange(len(counts))
        self._moments.append(len(ids), Columns({"id": ids, "count": counts}))
        self._members.append(len(members), Columns({"entity": members}))
        self._next_moment += len(ids)
        return ids

    def members(self, ids: AnyArray) -> Members:
        """Return the members of the moments with the numbers `ids`, int64 [M]."""
        entity, counts = self._members_of(ids)
        # An entity that is a member of several moments is copied and encoded only once.
        used, member_index = np.unique(entity, return_inverse=True)
        present = np.arange(int(counts.max(initial=1))) < counts[:, None]
        index = np.zeros(present.shape, dtype=np.int64)
        index[present] = member_index
        at = self._places(used)
        entities = self._entities.arrays.map(lambda values: values[at])
        return Members(entities=entities, ids=used, index=index, present=present)

    def keep(self, moments: AnyArray, entities: AnyArray) -> None:
        """Forget all moments and entities except `moments`, their members, and `entities`."""
        moments = np.unique(moments)
        members, counts = self._members_of(moments)
        # Entities of present agents are kept, because later moments will contain them.
        at = self._places(np.union1d(members, entities))
        self._entities.replace(len(at), self._entities.arrays.map(lambda values: values[at]))
        self._moments.replace(len(moments), Columns({"id": moments, "count": counts}))
        self._members.replace(len(members), Columns({"entity": members}))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all entities and moments."""
        return {
            "next": [self._next_entity, self._next_moment],
            "entities": self._entities.state_dict(),
            "moments": self._moments.state_dict(),
            "members": self._members.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._next_entity, self._next_moment = state["next"]
        self._entities.load_state_dict(state["entities"])
        self._moments.load_state_dict(state["moments"])
        self._members.load_state_dict(state["members"])

    def _places(self, ids: AnyArray) -> AnyArray:
        # The stored ids are sorted: each new id is larger, and forgetting keeps the order.
        stored = self._entities.arrays.fields["id"][: self._entities.used]
        return np.searchsorted(stored, ids)

    def _members_of(self, ids: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the numbers of the members' entities of M moments, and the member counts [M]."""
        table = self._moments.filled().fields
        at = np.searchsorted(table["id"], ids)
        starts = np.cumsum(table["count"]) - table["count"]
        counts = table["count"][at]
        return self._members.arrays.fields["entity"][rows_of(starts[at], counts)], counts
