"""A rollout's groups as tensors: which members stand in the sets that a group critic looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algos.policy import tensors
from pipeline.nets.group_critic import Sets

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipeline.arrays import AnyArray, BoolArray
    from pipeline.data.rollout import Rollout
    from pipeline.nets.body import Normalizers


@dataclass(frozen=True, kw_only=True, slots=True)
class Teams:
    """The members, E in all, of M groups' moments, and which R rows of experience are of those."""

    obs: list[Tensor]
    """[E, *shape] per observation, normalised."""
    memory: Tensor | None
    """[E, memory] what the members remember; None without memory."""
    actions: Tensor
    """[E, flat] what the members do, choices one-hot."""
    index: AnyArray
    """int64 [M, N] which of the E each member is."""
    present: BoolArray
    """[M, N] where there is a member."""
    over: BoolArray
    """[M, N] whose task has ended, so that it is no part of what follows."""
    moment: AnyArray
    """int64 [R] which of the M each row is of."""
    column: AnyArray
    """int64 [R] which of the moment's members the row's own agent is."""
    following: AnyArray
    """int64 [K] which of the M follows each trajectory."""

    @staticmethod
    def of(
        rollout: Rollout,
        normalizers: Normalizers,
        flat_actions: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
    ) -> Teams:
        """The groups of all rows of a rollout, and of what follows its trajectories."""
        if rollout.moments is None:
            raise ValueError("this rollout does not say which agents form a group")
        n_rows = rollout.n_rows
        wanted = np.concatenate((rollout.fields["moment"], rollout.at_end["next_moment"]))
        ids, which = np.unique(wanted, return_inverse=True)
        members = rollout.moments.members(ids)
        own = members.ids[members.index[which[:n_rows]]] == rollout.fields["entity"][:, None]
        own &= members.present[which[:n_rows]]
        entities = members.entities
        n_obs = sum(name.startswith("obs_") for name in entities)
        continuous, discrete = tensors([entities["continuous"], entities["discrete"]], device)
        memory = tensors([entities["memory"]], device)[0] if "memory" in entities else None
        return Teams(
            obs=normalizers(tensors([entities[f"obs_{i}"] for i in range(n_obs)], device)),
            memory=memory,
            actions=flat_actions(continuous, discrete),
            index=members.index,
            present=members.present,
            over=entities["over"][members.index] & members.present,
            moment=which[:n_rows],
            column=own.argmax(1),
            following=which[n_rows:],
        )

    @property
    def largest(self) -> int:
        """Members of the largest group."""
        return int((self.present & ~self.over).sum(1).max(initial=1))

    def pick(self, moments: AnyArray, present: BoolArray, rows: AnyArray | None = None) -> Picked:
        """Members of P moments, of which the critic is to see sets.

        Args:
            moments: int64 [P].
            present: bool [P, N] who of them counts.
            rows: int64 [B] rows of those moments, for their baselines; None for values only.

        Returns:
            P sets of what members observe, and with `rows` B sets more, of what the row's own agent
            observes and its mates observe and do.
        """
        used = self.index[moments][present]
        n = len(used)
        index = np.zeros(present.shape, dtype=np.int64)
        index[present] = np.arange(n)
        here = None
        if rows is not None:
            here = np.searchsorted(moments, self.moment[rows])
            mates = index[here] + n
            mates[np.arange(len(rows)), self.column[rows]] -= n
            index = np.concatenate((index, mates))
            present = np.concatenate((present, present[here]))
        device = self.actions.device
        chosen = torch.from_numpy(used).to(device)
        return Picked(
            obs=[values[chosen] for values in self.obs],
            memory=None if self.memory is None else self.memory[chosen],
            actions=None if rows is None else self.actions[chosen],
            sets=Sets(
                index=torch.from_numpy(index).to(device),
                absent=None if present.all() else torch.from_numpy(~present).to(device),
            ),
            moment=None if here is None else torch.from_numpy(here).to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Picked:
    """What a group critic is to look at: see `Teams.pick`."""

    obs: list[Tensor]
    memory: Tensor | None
    actions: Tensor | None
    sets: Sets
    moment: Tensor | None
    """int64 [B] which of the first sets is that of each row's group."""
