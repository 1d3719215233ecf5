"""The critic of a group: the group's value, and a counterfactual baseline for each member.

The value reads the observations of all members; a member's baseline also reads the actions of all
others, its mates. Every member is an entity, embedded from its observation, or from its observation
and action. The entities attend to each other, and their mean passes dense layers (Cohen et al.
2021, arXiv 2111.05992). A member is in several sets: in the set of the group's value, and in the
set of every member's baseline. So its observation is encoded, embedded, and projected once.
Attention scores between all members are computed once per group, and each set uses the scores of
its own embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.core.arrays import AnyArray, BoolArray
from pipeline.core.specs import BehaviorSpec
from pipeline.nets.attention import FORBIDDEN, WEIGHT_VARIANCE, ResidualSelfAttention, normal_linear
from pipeline.nets.encoder import ObservationEncoder
from pipeline.nets.layers import DenseLayers, dense, signal_heads
from pipeline.settings.trainer.schema import NetworkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """M groups of at most N members each, V members in all, one group after another.

    A *set* has the embeddings from which one estimate is computed. The set of a group's value has
    the observations of all members. The set of a member's baseline has that member's observation,
    and the observations and actions of its mates.
    """

    size: int
    """N, the largest number of members of a group."""
    wanted: Tensor | None = None
    """int64 [K] numbers of the estimates to compute; None for the value of each group only.

    Number m (1 + N) is the value of group m, and m (1 + N) + 1 + n is the baseline of its member n.
    """
    partial: PartialGroups | None = None
    """Which members are present; None if all groups have N members."""

    @staticmethod
    def of(
        present: BoolArray, wanted: AnyArray | None, device: torch.device | None = None
    ) -> GroupLayout:
        """Return the layout of M groups; `present` [M, N] says whether a group has an n-th member.

        `wanted` has the indices of the value estimates to compute; see the attribute `wanted`.
        """
        return GroupLayout(
            size=present.shape[1],
            wanted=None if wanted is None else torch.from_numpy(wanted).to(device),
            partial=None if present.all() else PartialGroups.of(present, wanted, device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialGroups:
    """The present members of groups, and the E entries of the K sets whose estimates are wanted.

    A set (see `GroupLayout`) has one entry for each present member of its group.
    """

    present: Tensor
    """bool [M, N] whether the group has an n-th member."""
    place: Tensor
    """int64 [V, kinds] index of each member's embedding of each kind in a list [M kinds N].

    For each group the list has N places for embeddings of observations, and if baselines are
    wanted, N places for embeddings of observations and actions.
    """
    count: Tensor
    """int64 [K, 1] number of entries of each set."""
    owner: Tensor
    """int64 [E] index of each entry's set among the K sets."""
    row: Tensor
    """int64 [E] index of each entry's attention result in a list [M sets N]."""
    embedding: Tensor
    """int64 [E] index of each entry's embedding in the list [M kinds N]; see `place`."""

    @staticmethod
    def of(
        present: BoolArray, wanted: AnyArray | None, device: torch.device | None
    ) -> PartialGroups:
        """Return the members and entries of groups; the arguments are as for `GroupLayout.of`."""
        n_groups, N = present.shape
        # With baselines a group has 2 N embeddings, of two kinds, and 1 + N sets of embeddings.
        embedding_of_place = np.arange(N) if wanted is None else _sets(N).flatten().numpy()
        n_sets, n_kinds = (1, 1) if wanted is None else (1 + N, 2)
        wanted_sets = np.arange(n_groups) if wanted is None else wanted
        group = wanted_sets // n_sets
        present_in_set = present[group]
        # `nonzero` lists entries by set, then by member: the entries of a set are contiguous.
        owner, member = present_in_set.nonzero()
        row = wanted_sets[owner] * N + member
        embedding = group[owner] * (n_kinds * N) + embedding_of_place[row % len(embedding_of_place)]
        group_of, member_of = present.nonzero()
        # `first` is the place of a member's first embedding; the second is N places later.
        first = group_of * (n_kinds * N) + member_of
        place = first[:, None] + N * np.arange(n_kinds)
        count = present_in_set.sum(axis=1, keepdims=True)
        arrays = (present, place, count, owner, row, embedding)
        return PartialGroups(
            **{
                attribute.name: torch.from_numpy(np.ascontiguousarray(values)).to(device)
                for attribute, values in zip(fields(PartialGroups), arrays, strict=True)
            }
        )


class GroupCritic(nn.Module):
    """Values of groups, and baselines of their members, for each reward signal.

    With `memory` in the settings, a member's memory is appended to its encoded observation.
    """

    largest: Tensor

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, signals: Sequence[str]
    ) -> None:
        super().__init__()
        self.signals = tuple(signals)
        H = self.size = settings.encoded_size
        # Dense layers, goal conditioning and memory are switched off in this encoder: the dense
        # layers come after the attention, and memories are an argument of `forward`.
        plain = replace(settings.without_layers(), goal_conditioning_type="none", memory=None)
        self.encoder = ObservationEncoder(spec.observation_specs, plain)
        n = self.encoder.output_size
        if settings.memory is not None:
            n += settings.memory.memory_size
        actions = spec.action_spec
        self.branches = tuple(actions.discrete_branches)
        self.seen = normal_linear(n, H, H)
        """Layer that embeds a member from its observation."""
        self.done = normal_linear(n + actions.continuous_size + sum(self.branches), H, H)
        """Layer that embeds a member from its observation and its action."""
        self.attention = ResidualSelfAttention(H)
        gain = math.sqrt(WEIGHT_VARIANCE / H)
        norm = settings.layer_norm
        self.dense = DenseLayers(
            H, settings.widths, activation=settings.activation, layer_norm=norm, gain=gain
        )
        # The heads also read the number of members, which the mean over members does not show.
        self.heads = signal_heads((H, *settings.widths)[-1] + 1, len(self.signals))
        # `largest` is a buffer, so that checkpoints have it: every value depends on it.
        self.register_buffer("largest", torch.ones(()))

    def update_largest_group(self, n_members: int) -> None:
        """Raise `largest` to `n_members`; the critic reads a group's size relative to `largest`."""
        self.largest.clamp_(min=float(n_members))

    def forward(
        self,
        obs: Sequence[Tensor],
        memory: Tensor | None,
        actions: Tensor | None,
        groups: GroupLayout,
    ) -> Tensor:
        """Return the estimates [K, signals] that `groups.wanted` lists: values and baselines.

        A value is computed from the observations of all members; a member's baseline from its
        observation, and the observations and actions of its mates. Observations [V, *shape] are
        normalised, memories are [V, M], and actions [V, flat], or None if no baselines are wanted.
        """
        # `code` [V, n] has each member once, for all sets that the member is in.
        code = self.encoder(obs)
        if memory is not None:
            code = torch.cat((code, memory), dim=1)
        x = nn.functional.silu(dense(code, self.seen.weight, self.seen.bias))
        if groups.wanted is None:
            pooled = self._pool(x.unsqueeze(0), groups)
        elif actions is not None:
            acted = torch.cat((code, actions), dim=1)
            acted = nn.functional.silu(dense(acted, self.done.weight, self.done.bias))
            pooled = self._pool(torch.stack((x, acted)), groups)
        else:
            raise ValueError("baselines are wanted, but `actions` is None")
        values: Tensor = self.heads(
            torch.cat((self.dense(pooled), self._how_many(pooled, groups)), dim=1)
        )
        return values

    def _pool(self, x: Tensor, groups: GroupLayout) -> Tensor:
        """Return the mean attention result [K, H] of each set for which an estimate is wanted.

        `x` [1, V, H] are embeddings of observations, or [2, V, H] also of observations and actions.
        """
        N, attention, partial = groups.size, self.attention, groups.partial
        if partial is None:
            x, query, key, value = attention.project(_side_by_side(x, groups))
        else:  # members are placed after the projection, so that absent members are not projected
            x, query, key, value = (_side_by_side(y, groups) for y in attention.project(x))
        scores = attention.scores(query, key)
        embedding_of_place = None
        if groups.wanted is not None:
            embedding_of_place, forbidden = _queries_and_mask(N, x)
            # The scores were computed once; each set takes the rows of its queries, which gives
            # [M, heads, (1 + N) N, 2 N]. `forbidden` lowers the scores of keys outside the set.
            scores = scores.index_select(2, embedding_of_place) + forbidden
        if partial is not None:
            absent = (~partial.present).to(x.dtype) * FORBIDDEN
            scores = scores + absent.repeat(1, key.shape[1] // N)[:, None, None]
        seen = attention.mix(scores, value)
        if partial is not None:
            # Results are computed only for present members of the sets that are wanted.
            y = attention.residual(
                x.flatten(0, 1).index_select(0, partial.embedding),
                seen.flatten(0, 1).index_select(0, partial.row),
            )
            # Entries are added up by set, because sets differ in their number of entries.
            total = y.new_zeros(partial.count.shape[0], self.size).index_add(0, partial.owner, y)
            return total / partial.count
        y = attention.residual(
            x if embedding_of_place is None else x.index_select(1, embedding_of_place), seen
        )
        # All members are present, so the mean over places is the mean over members.
        pooled = y.view(-1, N, self.size).mean(1)
        return pooled if groups.wanted is None else pooled.index_select(0, groups.wanted)

    def _how_many(self, pooled: Tensor, groups: GroupLayout) -> Tensor:
        """Return 2 n / N - 1 [K, 1] for each estimate's group of n, with N in the largest group."""
        if groups.partial is None:
            n_members = pooled.new_full((pooled.shape[0], 1), float(groups.size))
        else:
            n_members = groups.partial.count.to(self.largest.dtype)
        # The size of a group is divided by the size of the largest group, because sizes differ
        # between tasks, and inputs of a network should be in -1..1.
        return 2.0 * n_members / self.largest - 1.0


def _side_by_side(x: Tensor, groups: GroupLayout) -> Tensor:
    """Return embeddings `x` [kinds, V, H] as [M, kinds N, H].

    Each of the M groups has the N embeddings of the first kind, then the N embeddings of the second
    kind. The places of absent members are 0.
    """
    n_kinds, _, H = x.shape
    if groups.partial is None:
        return x.view(n_kinds, -1, groups.size, H).transpose(0, 1).flatten(1, 2)
    places = x.new_zeros(n_kinds * groups.partial.present.numel(), H)
    places.index_copy_(0, groups.partial.place.t().flatten(), x.flatten(0, 1))
    return places.view(-1, n_kinds * groups.size, H)


def _sets(N: int, device: torch.device | None = None) -> Tensor:
    """Return, for each set of a group, the indices of the set's N embeddings, int64 [1 + N, N].

    A group has 2 N embeddings: those of its N members from the layer `seen`, then from `done`. The
    value's set has all members' from `seen`; a baseline's set the member's own from `seen`, and its
    mates' from `done`.
    """
    member = torch.arange(N, device=device)
    of_baselines = torch.where(torch.eye(N, dtype=torch.bool, device=device), 0, N) + member
    return torch.cat((member.unsqueeze(0), of_baselines))


def _queries_and_mask(N: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of all sets' queries, int64 [(1 + N) N], and the mask of forbidden keys.

    The mask [(1 + N) N, 2 N] is added to scores; it is 0 for a key in the query's set.
    """
    embedding_of_place = _sets(N, like.device)
    # Each set's row is repeated for its N members, because they attend to the same keys.
    forbidden = like.new_full((1 + N, 2 * N), FORBIDDEN).scatter_(1, embedding_of_place, 0.0)
    return embedding_of_place.flatten(), forbidden.repeat_interleave(N, dim=0)
