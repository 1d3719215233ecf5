"""Who was in a group at one moment, and what each of its members saw and did.

A group's critic looks at all members at once. What a member saw and did is stored once, as an
*entity*, however many mates refer to it; a *moment* lists the entities of one group. Rows of
experience then hold one number, that of their moment. Entities stay until no row needs them: a
mate's own trajectory may have been learned from long before, or may still go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.rollout import Field, Grown
from pipeline.data.sequences import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.arrays import AnyArray, BoolArray

_NUMBER = Field(shape=(), dtype=np.int64)
_CAPACITY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """M moments with their members, of at most N each, and the E entities that these are."""

    entities: Mapping[str, AnyArray]
    """[E, ...] of each field."""
    ids: AnyArray
    """int64 [E] numbers of the entities."""
    index: AnyArray
    """int64 [M, N] which of the entities each member is; 0 where there is none."""
    present: BoolArray
    """[M, N] where there is a member; those of a moment come first."""


class Moments:
    """Entities and moments, both numbered in the order in which they were added.

    Args:
        fields: what an entity has.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._entities = Grown({**fields, "id": _NUMBER}, _CAPACITY)
        self._moments = Grown({"id": _NUMBER, "count": _NUMBER}, _CAPACITY)
        self._members = Grown({"entity": _NUMBER}, _CAPACITY)
        self._next_entity = self._next_moment = 0

    @property
    def n_entities(self) -> int:
        """Entities that are kept."""
        return self._entities.used

    def add_entities(self, n: int, rows: Mapping[str, AnyArray]) -> AnyArray:
        """Numbers int64 [n] of new entities with these fields [n, ...], zeros in the others."""
        ids = self._next_entity + np.arange(n)
        others = {
            name: np.zeros(1, np.bool_) for name in self._entities.arrays.keys() - rows.keys()
        }
        self._entities.append(n, {**others, **rows, "id": ids})
        self._next_entity += n
        return ids

    def describe(self, ids: AnyArray, rows: Mapping[str, AnyArray]) -> None:
        """Write fields [n, ...] of entities [n]."""
        at = self._places(ids)
        for name, values in rows.items():
            self._entities.arrays[name][at] = values

    def add_moments(self, members: AnyArray, counts: AnyArray) -> AnyArray:
        """Numbers int64 [M] of new moments.

        Args:
            members: int64 [sum of counts] entities, moment after moment.
            counts: int64 [M] how many each has.
        """
        ids = self._next_moment + np.arange(len(counts))
        self._moments.append(len(ids), {"id": ids, "count": counts})
        self._members.append(len(members), {"entity": members})
        self._next_moment += len(ids)
        return ids

    def members(self, ids: AnyArray) -> Members:
        """The members of moments [M]."""
        entity, counts = self._members_of(ids)
        used, which = np.unique(entity, return_inverse=True)
        present = np.arange(int(counts.max(initial=1))) < counts[:, None]
        index = np.zeros(present.shape, dtype=np.int64)
        index[present] = which
        at = self._places(used)
        entities = {
            name: values[at] for name, values in self._entities.arrays.items() if name != "id"
        }
        return Members(entities=entities, ids=used, index=index, present=present)

    def keep(self, moments: AnyArray, entities: AnyArray) -> None:
        """Forget all but these moments, their members, and these entities."""
        moments = np.unique(moments)
        members, counts = self._members_of(moments)
        at = self._places(np.union1d(members, entities))
        kept = {name: values[at] for name, values in self._entities.arrays.items()}
        for grown, n, rows in (
            (self._entities, len(at), kept),
            (self._moments, len(moments), {"id": moments, "count": counts}),
            (self._members, len(members), {"entity": members}),
        ):
            grown.used = 0
            grown.append(n, rows)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything."""
        grown = {"entities": self._entities, "moments": self._moments, "members": self._members}
        return {
            "next": [self._next_entity, self._next_moment],
            **{
                name: {key: values.copy() for key, values in one.filled().items()}
                for name, one in grown.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._next_entity, self._next_moment = state["next"]
        for name, key, grown in (
            ("entities", "id", self._entities),
            ("moments", "id", self._moments),
            ("members", "entity", self._members),
        ):
            grown.used = 0
            grown.append(len(state[name][key]), state[name])

    def _places(self, ids: AnyArray) -> AnyArray:
        return np.searchsorted(self._entities.filled()["id"], ids)

    def _members_of(self, ids: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Entities [sum of counts] of moments [M], moment after moment, and counts [M]."""
        table = self._moments.filled()
        at = np.searchsorted(table["id"], ids)
        starts = np.cumsum(table["count"]) - table["count"]
        counts = table["count"][at]
        return self._members.arrays["entity"][rows_of(starts[at], counts)], counts
