"""A rollout's groups as tensors: the members in the sets that a group critic evaluates."""

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
    """The E members of groups at M moments, and the moment of each of R rows of experience."""

    obs: list[Tensor]
    """[E, *shape] per observation, normalised."""
    memory: Tensor | None
    """[E, memory] what the members remember; None without memory."""
    actions: Tensor
    """[E, flat] what the members do, choices one-hot."""
    index: AnyArray
    """int64 [M, N] index among the E members."""
    present: BoolArray
    """[M, N] where there is a member."""
    over: BoolArray
    """[M, N] members whose task has ended, so that they do not count for what follows."""
    moment: AnyArray
    """int64 [R] moment of each row."""
    column: AnyArray
    """int64 [R] place of the row's agent among the moment's members."""
    following: AnyArray
    """int64 [K] moment that follows each trajectory."""

    @staticmethod
    def of(
        rollout: Rollout,
        normalizers: Normalizers,
        branches: Sequence[int],
        device: torch.device,
    ) -> GroupBatch:
        """The groups of all rows of a rollout, and of what follows its trajectories."""
        if rollout.moments is None:
            raise ValueError("this rollout does not say which agents form a group")
        n_rows = rollout.n_rows
        moments = np.concatenate((rollout.fields["moment"], rollout.at_end["next_moment"]))
        # Mates share a moment, so each is looked up and encoded once.
        ids, moment_of = np.unique(moments, return_inverse=True)
        members = rollout.moments.members(ids)
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
            over=entities["over"][members.index] & members.present,
            moment=moment_of[:n_rows],
            column=is_self.argmax(1),
            following=moment_of[n_rows:],
        )

    @property
    def largest(self) -> int:
        """Members of the largest group."""
        return int((self.present & ~self.over).sum(1).max(initial=1))

    def minibatches(
        self, rows: Rows, stream: np.random.Generator, size: int, group: ProcessGroup
    ) -> Iterator[Rows]:
        """Yield minibatches of about `size` rows: all rows of some moments, in a random order.

        So what mates have in common is computed once. A rest that fills no minibatch is left out.
        Several processes have a part of each minibatch.

        Args:
            rows: the rows [R] of this batch.
            stream: that the order is drawn from.
            size: rows of a minibatch of all processes.
            group: the processes.
        """
        # Rows of one moment side by side, so that a minibatch of moments is a few runs of rows.
        by_moment = np.argsort(self.moment, kind="stable")
        counts = np.bincount(self.moment)
        starts = np.cumsum(counts) - counts
        order = stream.permutation(np.flatnonzero(counts))
        index = by_moment[rows_of(starts[order], counts[order])]
        ends = np.cumsum(counts[order])
        ends_of_minibatches = np.cumsum(group.minibatch_sizes(len(index), size))
        # Rounded up to whole moments, so minibatches differ a little in size.
        cuts = np.unique(ends[np.searchsorted(ends, ends_of_minibatches)])
        # All processes make as many steps, because each step waits for the gradients of all.
        cuts = cuts[: group.least(len(cuts))]
        sizes = np.diff(cuts, prepend=0).tolist()
        return rows.in_order(index[: sum(sizes)], sizes, group)

    def pick(
        self,
        moments: AnyArray,
        present: BoolArray,
        rows: AnyArray | None = None,
        *,
        size: int = 1,
    ) -> CriticInput:
        """Return the members of P moments, as input of the critic.

        Args:
            moments: int64 [P].
            present: bool [P, N] which members count.
            rows: int64 [B] rows of these moments, for their baselines; None for values only.
            size: least number of places for members in each moment.

        Returns:
            The members of these moments, laid out for P values, and with `rows` also for the B
            baselines of the rows' agents.
        """
        n_used = int(np.flatnonzero(present.any(axis=0)).max(initial=0)) + 1
        present = present[:, :n_used]
        chosen = self.index[moments, :n_used][present]
        if size > n_used:
            present = np.pad(present, ((0, 0), (0, size - n_used)))
            n_used = size
        moment_of_row, columns = None, None
        device = self.actions.device
        if rows is not None:
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
    """int64 [B] which of the groups each row is of."""
    groups: GroupLayout

    def lengths(self, name: str, row_names: Iterable[str], n_rows: int) -> dict[str, Length] | None:
        """Lengths as `FlatAdam.descend` takes them, of this input and of the inputs of rows.

        Where members are absent, nearly every minibatch of about `n_rows` rows has another number
        of rows, and of moments.
        """
        N = self.groups.size
        if self.groups.partial is None:
            # Where rows of some members are still to come, minibatches differ in their number.
            is_full = self.moment is not None and len(self.moment) == len(self.obs[0])
            return {} if is_full else None
        rows, groups = Length("rows", n_rows), Length("groups", -(-n_rows // N))
        sets = Length("sets", rows.usual + groups.usual)
        members, entries = Length("members", n_rows), Length("entries", N * sets.usual)
        by_name = {"moment": rows, "present": groups, "wanted": sets, "count": sets}
        by_name |= dict.fromkeys(("owner", "row", "embedding"), entries)
        names = [full_name for full_name, _ in flat_inputs({name: self})]
        own = {full_name: by_name.get(full_name.split(".")[-1], members) for full_name in names}
        return dict.fromkeys(row_names, rows) | own
