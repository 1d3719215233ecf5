"""The critic of a group: values of what all its members see, and of what some of them do.

Every member is an entity. It is embedded from what it observes, or from what it observes and does;
the entities look at each other, and their mean passes dense layers (Cohen et al. 2021, arXiv
2111.05992, section 4). The same member stands in several sets: once in the group's value, and in
every mate's baseline. So its observation is encoded, embedded, and projected once; what any member
could ask any other is computed once per group, and the sets only pick from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.nets.attention import (
    FORBIDDEN,
    WEIGHT_VARIANCE,
    ResidualSelfAttention,
    normal_linear,
)
from pipeline.nets.encoder import ObservationEncoder
from pipeline.nets.layers import DenseSwish, dense, signal_heads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.arrays import AnyArray, BoolArray
    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import NetworkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """M groups of at most N members each, V members in all, one group after another.

    A *set* of a group is what one estimate looks at: for the value all its members as they see, and
    for the baseline of a member itself as it sees and the others as they see and do.
    """

    size: int
    """N."""
    wanted: Tensor | None = None
    """int64 [K] which values are asked for: m (1 + N) is that of group m, and n + 1 more the
    baseline of its member n. None for the value of each group, and no baselines."""
    partial: PartialGroups | None = None
    """Who is there; None where all groups are full."""

    @staticmethod
    def of(
        present: BoolArray, wanted: AnyArray | None, device: torch.device | None = None
    ) -> GroupLayout:
        """The layout of groups whose members are `present` [M, N], with `wanted` as above."""
        return GroupLayout(
            size=present.shape[1],
            wanted=None if wanted is None else torch.from_numpy(wanted).to(device),
            partial=None if present.all() else PartialGroups.of(present, wanted, device),
        )

    @property
    def columns(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        columns = {} if self.wanted is None else {"wanted": self.wanted}
        return columns if self.partial is None else {**columns, **self.partial.columns}

    def over(self, columns: Mapping[str, Tensor]) -> GroupLayout:
        """The same with the tensors that `columns` gives by name."""
        names = [] if self.partial is None else [one.name for one in fields(self.partial)]
        return GroupLayout(
            size=self.size,
            wanted=columns.get("wanted"),
            partial=PartialGroups(**{name: columns[name] for name in names}) if names else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialGroups:
    """Who is there in groups with absent members, and the E entries that they are in K wanted sets.

    A member that is there has an entry in each wanted set of its group.
    """

    present: Tensor
    """bool [M, N] where there is a member."""
    place: Tensor
    """int64 [V, kinds] where in [M kinds N] the embeddings of each member stand."""
    count: Tensor
    """int64 [K, 1] entries of each set."""
    owner: Tensor
    """int64 [E] which of the K sets each entry is of."""
    row: Tensor
    """int64 [E] where it stands in [M sets N], what the members of all sets see."""
    embedding: Tensor
    """int64 [E] where its embedding stands in [M kinds N]."""

    @property
    def columns(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @staticmethod
    def of(
        present: BoolArray, wanted: AnyArray | None, device: torch.device | None
    ) -> PartialGroups:
        """As for `GroupLayout.of`."""
        n_groups, N = present.shape
        who = np.arange(N) if wanted is None else _sets(N).flatten().numpy()
        n_sets, n_kinds = (1, 1) if wanted is None else (1 + N, 2)
        kept = np.arange(n_groups) if wanted is None else wanted
        group = kept // n_sets
        there = present[group]
        owner, member = there.nonzero()
        row = kept[owner] * N + member
        embedding = group[owner] * (n_kinds * N) + who[row % len(who)]
        group_of, member_of = present.nonzero()
        first = group_of * (n_kinds * N) + member_of
        place = first[:, None] + N * np.arange(n_kinds)
        count = there.sum(axis=1, keepdims=True)
        arrays = (present, place, count, owner, row, embedding)
        return PartialGroups(
            **{
                one.name: torch.from_numpy(np.ascontiguousarray(values)).to(device)
                for one, values in zip(fields(PartialGroups), arrays, strict=True)
            }
        )


class GroupCritic(nn.Module):
    """Values of groups, and baselines of their members, for each reward signal.

    With `memory` in the settings, what a member remembers is added to what it observes.
    """

    largest: Tensor

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, signals: Sequence[str]
    ) -> None:
        super().__init__()
        self.signals = tuple(signals)
        H = self.size = settings.hidden_units
        # The encoders of single observations only: the dense layers come after the attention.
        plain = replace(settings, num_layers=0, goal_conditioning_type="none", memory=None)
        self.encoder = ObservationEncoder(spec.observation_specs, plain)
        n = self.encoder.output_size
        if settings.memory is not None:
            n += settings.memory.memory_size
        actions = spec.action_spec
        self.branches = tuple(actions.discrete_branches)
        self.seen = normal_linear(n, H, H)
        """Embeds a member from its observation."""
        self.done = normal_linear(n + actions.continuous_size + sum(self.branches), H, H)
        """Embeds a member from its observation and its action."""
        self.attention = ResidualSelfAttention(H)
        gain = math.sqrt(WEIGHT_VARIANCE / H)
        self.dense = DenseSwish(H, H, settings.num_layers, gain=gain)
        # One more input for the number of members, which the mean over members does not tell.
        self.heads = signal_heads(H + 1, len(self.signals))
        # A buffer, so that checkpoints have it: every value depends on it.
        self.register_buffer("largest", torch.ones(()))

    def notice(self, n_members: int) -> None:
        """There are groups of this size: the largest one is the measure of the others."""
        self.largest.clamp_(min=float(n_members))

    def forward(
        self,
        obs: Sequence[Tensor],
        memory: Tensor | None,
        actions: Tensor | None,
        groups: GroupLayout,
    ) -> Tensor:
        """Values [K, signals], of what all members observe, and baselines among them.

        A member's baseline is of what it observes, and of what its mates observe and do.

        Args:
            obs: [V, *shape] per observation, normalised.
            memory: [V, M] what the members remember; None without memory.
            actions: [V, flat] of the members; None when no baselines are wanted.
            groups: which members belong together.
        """
        code = self.encoder(obs)
        if memory is not None:
            code = torch.cat((code, memory), dim=1)
        x = nn.functional.silu(dense(code, self.seen.weight, self.seen.bias))
        if groups.wanted is None:
            pooled = self._looks(x.unsqueeze(0), groups)
        elif actions is not None:
            acted = torch.cat((code, actions), dim=1)
            acted = nn.functional.silu(dense(acted, self.done.weight, self.done.bias))
            pooled = self._looks(torch.stack((x, acted)), groups)
        else:
            raise ValueError("baselines need the actions of mates")
        values: Tensor = self.heads(
            torch.cat((self.dense(pooled), self._how_many(pooled, groups)), dim=1)
        )
        return values

    def _looks(self, x: Tensor, groups: GroupLayout) -> Tensor:
        """What the wanted sets of members add up to, [K, H].

        Args:
            x: [1, V, H] embeddings of what members observe, or [2, V, H] with those of what they
                observe and do.
            groups: which of them belong together.
        """
        N, attention, partial = groups.size, self.attention, groups.partial
        if partial is None:
            x, query, key, value = attention.project(_side_by_side(x, groups))
        else:  # afterwards, so that nothing is projected for those who are absent
            x, query, key, value = (_side_by_side(one, groups) for one in attention.project(x))
        scores = attention.scores(query, key)
        who = None
        if groups.wanted is not None:
            who, forbidden = _looking(N, x)
            # [M, heads, (1 + N) N, 2 N]: the rows of each set, out of scores computed once.
            scores = scores.index_select(2, who) + forbidden
        if partial is not None:
            absent = (~partial.present).to(x.dtype) * FORBIDDEN
            scores = scores + absent.repeat(1, key.shape[1] // N)[:, None, None]
        seen = attention.mix(scores, value)
        if partial is not None:
            # Entries only: nothing is computed for sets that nobody wants, or for who is absent.
            y = attention.residual(
                x.flatten(0, 1).index_select(0, partial.embedding),
                seen.flatten(0, 1).index_select(0, partial.row),
            )
            total = y.new_zeros(partial.count.shape[0], self.size).index_add(0, partial.owner, y)
            return total / partial.count
        y = attention.residual(x if who is None else x.index_select(1, who), seen)
        # All are present, so a mean needs no count.
        pooled = y.view(-1, N, self.size).mean(1)
        return pooled if groups.wanted is None else pooled.index_select(0, groups.wanted)

    def _how_many(self, pooled: Tensor, groups: GroupLayout) -> Tensor:
        """[K, 1] number of members: 1 for the largest group that was ever seen, near -1 for few."""
        if groups.partial is None:
            n_members = pooled.new_full((pooled.shape[0], 1), float(groups.size))
        else:
            n_members = groups.partial.count.to(self.largest.dtype)
        return 2.0 * n_members / self.largest - 1.0


def _side_by_side(x: Tensor, groups: GroupLayout) -> Tensor:
    """Rows [kinds, V, H] as [M, kinds N, H]: of each group the first kind, then the second."""
    n_kinds, _, H = x.shape
    if groups.partial is None:
        return x.view(n_kinds, -1, groups.size, H).transpose(0, 1).flatten(1, 2)
    places = x.new_zeros(n_kinds * groups.partial.present.numel(), H)
    places.index_copy_(0, groups.partial.place.t().flatten(), x.flatten(0, 1))
    return places.view(-1, n_kinds * groups.size, H)


def _sets(N: int, device: torch.device | None = None) -> Tensor:
    """Which of a group's 2 N embeddings stand in its sets: N by `seen`, and the same N by `done`.

    Returns:
        int64 [1 + N, N]: for the value all by `seen`, then for each member's baseline itself by
        `seen` and the others by `done`.
    """
    member = torch.arange(N, device=device)
    of_baselines = torch.where(torch.eye(N, dtype=torch.bool, device=device), 0, N) + member
    return torch.cat((member.unsqueeze(0), of_baselines))


def _looking(N: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Who looks in all sets of a group of N, and whom they cannot see.

    Returns:
        int64 [(1 + N) N], and additions to scores [(1 + N) N, 2 N].
    """
    who = _sets(N, like.device)
    # A row for each set, repeated for its N members: they all see the same.
    forbidden = like.new_full((1 + N, 2 * N), FORBIDDEN).scatter_(1, who, 0.0)
    return who.flatten(), forbidden.repeat_interleave(N, dim=0)
