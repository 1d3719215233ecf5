"""The critic of a group: values of what all its members see, and of what some of them do.

Every member is an entity. It is embedded from what it observes, or from what it observes and does;
the entities look at each other, and their mean passes dense layers (Cohen et al. 2021, arXiv
2111.05992, section 4). The same member stands in several sets: once in the group's value, and in
every mate's baseline. So its observation is encoded, embedded, and projected once; what any member
could ask any other is computed once per group, and the sets only pick from that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.nets.attention import (
    FORBIDDEN,
    WEIGHT_VARIANCE,
    ResidualSelfAttention,
    normal_linear,
)
from pipeline.nets.encoder import ObservationEncoder
from pipeline.nets.layers import DenseSwish, dense, xavier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import NetworkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """M groups of at most N members each, V members in all, one group after another."""

    shape: tuple[int, int]
    """M and N."""
    present: Tensor | None = None
    """bool [M, N] where there is a member; None where all groups are full."""
    wanted: Tensor | None = None
    """int64 [K] which values are asked for: m (1 + N) is that of group m, and n + 1 more the
    baseline of its member n. None for the value of each group, and no baselines."""


class GroupCritic(nn.Module):
    """Values of groups, and baselines of their members.

    Args:
        spec: what the members observe and do.
        settings: of the network; `memory` adds what a member remembers to what it observes.
        signals: names of the reward signals.
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
        self.done = normal_linear(n + actions.continuous_size + sum(self.branches), H, H)
        self.attention = ResidualSelfAttention(H)
        gain = math.sqrt(WEIGHT_VARIANCE / H)
        self.dense = DenseSwish(H, H, settings.num_layers, gain=gain)
        # One more input for the number of members: the mean over members does not tell how many
        # there are.
        self.heads = xavier(H + 1, len(self.signals))
        # As in `Critic`: Xavier's bound depends on the number of outputs.
        for row in range(len(self.signals)):
            nn.init.xavier_uniform_(self.heads.weight.data[row : row + 1])
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
        values: Tensor = self.heads(torch.cat((self.dense(pooled), self._how_many(groups)), dim=1))
        return values

    def _looks(self, x: Tensor, groups: GroupLayout) -> Tensor:
        """What the wanted sets of members add up to, [K, H].

        Args:
            x: [1, V, H] embeddings of what members observe, or [2, V, H] with those of what they
                observe and do.
            groups: which of them belong together.
        """
        N, attention = groups.shape[1], self.attention
        if groups.present is None:
            x, query, key, value = attention.project(_side_by_side(x, groups))
        else:  # afterwards, so that nothing is projected for those who are absent
            x, query, key, value = (_side_by_side(one, groups) for one in attention.project(x))
        scores = attention.scores(query, key)
        who = torch.arange(N, device=x.device)
        if groups.wanted is not None:
            who, forbidden = _sets(N, x)
            # [M, heads, (1 + N) N, 2 N]: the rows of a set are picked from scores that were
            # computed once.
            scores = scores.index_select(2, who) + forbidden
        if groups.present is not None:
            absent = (~groups.present).to(x.dtype) * FORBIDDEN
            scores = scores + absent.repeat(1, key.shape[1] // N)[:, None, None]
        seen = attention.mix(scores, value)
        if groups.present is not None:
            return self._of_present(x, seen, who, groups, groups.present)
        y = attention.residual(x.index_select(1, who), seen)
        # All are present, so a mean needs no count.
        pooled = y.view(-1, N, self.size).mean(1)
        return pooled if groups.wanted is None else pooled.index_select(0, groups.wanted)

    def _of_present(
        self, x: Tensor, seen: Tensor, who: Tensor, groups: GroupLayout, present: Tensor
    ) -> Tensor:
        """Return the end of `_looks` for groups with absent members.

        Args:
            x: [M, kinds N, H] normalised embeddings.
            seen: [M, sets N, H] what each member of each set saw.
            who: int64 [sets N] which embedding that is of.
            groups: which of them belong together.
            present: bool [M, N] as in `groups`.
        """
        n_groups, N = groups.shape
        n_sets = len(who) // N
        kept = torch.arange(n_groups, device=x.device) if groups.wanted is None else groups.wanted
        group = kept // n_sets
        # One entry for each member that is there, of each wanted set.
        which, member = present[group].nonzero(as_tuple=True)
        row = kept[which] * N + member
        embedding = group[which] * x.shape[1] + who[row % len(who)]
        y = self.attention.residual(
            x.flatten(0, 1).index_select(0, embedding), seen.flatten(0, 1).index_select(0, row)
        )
        total = y.new_zeros(len(kept), self.size).index_add(0, which, y)
        return total / present.sum(1, keepdim=True).index_select(0, group)

    def _how_many(self, groups: GroupLayout) -> Tensor:
        """[K, 1] number of members: 1 for the largest group that was ever seen, near -1 for few."""
        n_groups, N = groups.shape
        if groups.present is None:
            n_members = torch.full((n_groups, 1), float(N), device=self.largest.device)
        else:
            n_members = groups.present.sum(1, keepdim=True).to(self.largest.dtype)
        if groups.wanted is not None:
            n_members = n_members.index_select(0, groups.wanted // (1 + N))
        return 2.0 * n_members / self.largest - 1.0


def _side_by_side(x: Tensor, groups: GroupLayout) -> Tensor:
    """Rows [kinds, V, H] as [M, kinds N, H]: of each group the first kind, then the second."""
    n_groups, N = groups.shape
    if groups.present is not None:
        places = groups.present.flatten().nonzero().squeeze(1)
        x = x.new_zeros(len(x), n_groups * N, x.shape[2]).index_copy(1, places, x)
    return x.view(len(x), n_groups, N, -1).transpose(0, 1).flatten(1, 2)


def _sets(N: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Who stands in the sets of a group of N, out of N seen and the same N seen and done.

    Returns:
        int64 [(1 + N) N] who looks: for the value the N seen, then for each member's baseline
        itself as seen and the others as seen and done. And whom they cannot see, as additions to
        scores [(1 + N) N, 2 N].
    """
    member = torch.arange(N, device=like.device)
    of_baselines = torch.where(torch.eye(N, dtype=torch.bool, device=like.device), 0, N) + member
    who = torch.cat((member.unsqueeze(0), of_baselines))
    # A row for each set, repeated for its N members: they all see the same.
    forbidden = like.new_full((1 + N, 2 * N), FORBIDDEN).scatter_(1, who, 0.0)
    return who.flatten(), forbidden.repeat_interleave(N, dim=0)
