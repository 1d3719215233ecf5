"""The groups of a rollout as tensors, from which a group critic's inputs are taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.algos.process_group import ProcessGroup
from pipeline.algos.rows import Rows, tensors
from pipeline.core.arrays import AnyArray, BoolArray
from pipeline.data.columns import rows_of
from pipeline.data.rollout import Rollout
from pipeline.nets.distributions import flat_actions
from pipeline.nets.encoder import Normalizers
from pipeline.nets.fast.adam import Length, flat_inputs
from pipeline.nets.group_critic import GroupLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBatch:
    """The groups of a rollout at M moments, and the moment of each of the rollout's R rows.

    A moment is the state of one group at one time: the observations and actions of its members.
    All moments together have E members; N is the size of the largest group.
    """

    obs: list[Tensor]
    """Normalised observations of the members, a tensor [E, *shape] for each observation."""
    memory: Tensor | None
    """[E, memory] memories of the members; None without memory."""
    actions: Tensor
    """[E, flat] actions of the members, choices as one-hot vectors."""
    index: AnyArray
    """int64 [M, N] index of each moment's members among the E members."""
    present: BoolArray
    """[M, N] whether the moment's group has an n-th member."""
    over: BoolArray
    """[M, N] whether the n-th member's task has ended; bootstrap values may leave this member out.
    """
    moment: AnyArray
    """int64 [R] index of each row's moment."""
    column: AnyArray
    """int64 [R] place of the row's agent among the members of its moment."""
    following: AnyArray
    """int64 [K] index of the moment that follows the last row of each of K trajectories."""

    @staticmethod
    def of(
        rollout: Rollout, normalizers: Normalizers, branches: Sequence[int], device: torch.device
    ) -> GroupBatch:
        """Return the groups at all rows of a rollout, and at the moments after its trajectories."""
        if rollout.moments is None:
            raise ValueError("this rollout has no moments of groups")
        n_rows = rollout.n_rows
        moments = np.concatenate((rollout.fields["moment"], rollout.at_end["next_moment"]))
        # Several rows may have the same moment; after `unique`, each moment is looked up and
        # encoded only once.
        ids, moment_of = np.unique(moments, return_inverse=True)
        members = rollout.moments.members(ids)
        # `is_self` marks the row's own agent: the member with the row's entity number.
        is_self = (
            members.ids[members.index[moment_of[:n_rows]]] == rollout.fields["entity"][:, None]
        )
        is_self &= members.present[moment_of[:n_rows]]
        entities = members.entities.fields
        continuous, discrete = tensors([entities["continuous"], entities["discrete"]], device)
        memory = tensors([entities["memory"]], device)[0] if "memory" in entities else None
        return GroupBatch(
            obs=normalizers(tensors(members.entities.obs, device)),
            memory=memory,
            actions=flat_actions(continuous, discrete, branches),
            index=members.index,
            present=members.present,
            # Where no member is present, `index` has the index of some other member, whose `over`
            # must not be taken.
            over=entities["over"][members.index] & members.present,
            moment=moment_of[:n_rows],
            column=is_self.argmax(1),
            following=moment_of[n_rows:],
        )

    @property
    def largest(self) -> int:
        """Largest number of members with an unfinished task at any moment; at least 1."""
        return int((self.present & ~self.over).sum(1).max(initial=1))

    def minibatches(
        self, rows: Rows, stream: np.random.Generator, size: int, group: ProcessGroup
    ) -> Iterator[Rows]:
        """Yield minibatches of about `size` rows; each has all rows of some moments.

        The order of moments is random. All rows of a moment are in one minibatch, so that an
        estimate that members share is computed only once. A remainder of too few rows for a
        minibatch is left out. Each process has a part of each minibatch; `size` counts the rows in
        all processes together.
        """
        # `by_moment` has the rows sorted by moment, so that the rows of each moment are contiguous.
        by_moment = np.argsort(self.moment, kind="stable")
        counts = np.bincount(self.moment)
        starts = np.cumsum(counts) - counts
        order = stream.permutation(np.flatnonzero(counts))
        index = by_moment[rows_of(starts[order], counts[order])]
        ends = np.cumsum(counts[order])
        ends_of_minibatches = np.cumsum(group.minibatch_sizes(len(index), size))
        # Each minibatch is rounded up to whole moments, so minibatches differ a little in size.
        cuts = np.unique(ends[np.searchsorted(ends, ends_of_minibatches)])
        # All processes make the same number of steps, because each step waits for all of them.
        cuts = cuts[: group.least(len(cuts))]
        sizes = np.diff(cuts, prepend=0).tolist()
        return rows.in_order(index[: sum(sizes)], sizes, group)

    def pick(
        self, moments: AnyArray, present: BoolArray, rows: AnyArray | None = None, *, size: int = 1
    ) -> CriticInput:
        """Return members of P of the M moments as input for values and, with `rows`, for baselines.

        Args:
            moments: int64 [P] indices among the M moments.
            present: bool [P, N] whether each member is part of the input.
            rows: int64 [B] indices of rows that get a baseline; None for values only.
            size: smallest number of places for members in each moment.
        """
        # Places after the last present member are cut off, because they need no computation.
        n_used = int(np.flatnonzero(present.any(axis=0)).max(initial=0)) + 1
        present = present[:, :n_used]
        chosen = self.index[moments, :n_used][present]
        if size > n_used:
            # Only `present` is padded, because there is no member at the added places.
            present = np.pad(present, ((0, 0), (0, size - n_used)))
            n_used = size
        moment_of_row, columns = None, None
        device = self.actions.device
        if rows is not None:
            # `columns` numbers the estimates as `GroupLayout.wanted` does: first the values of the
            # moments, then the baselines of the rows.
            moment_of_row = np.searchsorted(moments, self.moment[rows])
            first = np.arange(len(moments)) * (1 + n_used)
            columns = np.concatenate((first, first[moment_of_row] + 1 + self.column[rows]))
        members = torch.from_numpy(chosen).to(device)
        return CriticInput(
            obs=[values[members] for values in self.obs],
            memory=None if self.memory is None else self.memory[members],
            actions=None if rows is None else self.actions[members],
            groups=GroupLayout.of(present, columns, device),
            moment=None if moment_of_row is None else torch.from_numpy(moment_of_row).to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticInput:
    """Input of a group critic: see `GroupBatch.pick`."""

    obs: list[Tensor]
    memory: Tensor | None
    actions: Tensor | None
    moment: Tensor | None
    """int64 [B] index of each row's moment among the P moments; None without rows."""
    groups: GroupLayout

    def lengths(self, name: str, row_names: Iterable[str], n_rows: int) -> dict[str, Length] | None:
        """Return the argument `lengths` of `FlatAdam.descend` for a minibatch with this input.

        The result is an empty map if all minibatches have the same shapes, and None if their shapes
        rarely recur. If members are absent, the result has a `Length` for each input, because the
        numbers of rows and moments differ between nearly all minibatches of about `n_rows` rows. In
        the loss this input is called `name`, and the inputs `row_names` have one entry per row.
        """
        N = self.groups.size
        if self.groups.partial is None:
            # Even if all groups have the same size, the number of rows differs between minibatches
            # if a member with an open trajectory has no row yet.
            is_full = self.moment is not None and len(self.moment) == len(self.obs[0])
            return {} if is_full else None
        # These are the usual lengths if all groups are full: n_rows / N groups, rounded up.
        rows, groups = Length("rows", n_rows), Length("groups", -(-n_rows // N))
        # One set of members is for the value of each group, and one for the baseline of each row.
        sets = Length("sets", rows.usual + groups.usual)
        members, entries = Length("members", n_rows), Length("entries", N * sets.usual)
        by_name = {"moment": rows, "present": groups, "wanted": sets, "count": sets}
        by_name |= dict.fromkeys(("owner", "row", "embedding"), entries)
        names = [full_name for full_name, _ in flat_inputs({name: self})]
        own = {full_name: by_name.get(full_name.split(".")[-1], members) for full_name in names}
        return dict.fromkeys(row_names, rows) | own
