"""The critic of a group: values of what all its members see, and of what some of them do.

Every member is an entity. It is embedded from what it observes, or from what it observes and does;
the entities look at each other, and their mean passes dense layers (Cohen et al. 2021, arXiv
2111.05992, section 4). The same member stands in several sets: once in the group's value, and in
every mate's baseline. So its observation is encoded, embedded, and projected once, and the sets
only pick from the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.nets.attention import WEIGHT_VARIANCE, ResidualSelfAttention, normal_linear
from pipeline.nets.body import Body
from pipeline.nets.layers import DenseSwish, xavier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import NetworkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Sets:
    """K sets of at most N members each, out of V members."""

    index: Tensor
    """int64 [K, N]: v for what member v observes, V + v for what it observes and does; anything
    where nobody is."""
    absent: Tensor | None = None
    """bool [K, N] where nobody is; None when all sets are full."""


class GroupCritic(nn.Module):
    """Values [K, signals] of sets of members.

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
        plain = replace(settings, num_layers=0, goal_conditioning_type="none", memory=None)
        self.encoder = Body(spec.observation_specs, plain)
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
        self.heads = xavier(H + 1, len(self.signals))
        for row in range(len(self.signals)):
            nn.init.xavier_uniform_(self.heads.weight.data[row : row + 1])
        self.register_buffer("largest", torch.ones(()))

    def notice(self, n_members: int) -> None:
        """There are groups of this size: the largest one is the measure of the others."""
        self.largest.clamp_(min=float(n_members))

    def flat_actions(self, continuous: Tensor, discrete: Tensor) -> Tensor:
        """Actions [V, A] and int64 [V, branches] as one vector each, the choices one-hot."""
        choices = [
            nn.functional.one_hot(discrete[:, i], size).to(continuous.dtype)
            for i, size in enumerate(self.branches)
        ]
        return torch.cat([continuous, *choices], dim=1)

    def forward(
        self, obs: Sequence[Tensor], memory: Tensor | None, actions: Tensor | None, sets: Sets
    ) -> Tensor:
        """Values [K, signals].

        Args:
            obs: [V, *shape] per observation, normalised.
            memory: [V, M] what the members remember; None without memory.
            actions: [V, flat] of the members; None when no set needs them.
            sets: K sets of the members.
        """
        code = self.encoder(obs)
        if memory is not None:
            code = torch.cat((code, memory), dim=1)
        x = nn.functional.silu(self.seen(code))
        if actions is not None:
            acted = nn.functional.silu(self.done(torch.cat((code, actions), dim=1)))
            x = torch.cat((x, acted))
        projected = torch.cat(self.attention.project(x), dim=1)
        picked = projected.index_select(0, sets.index.flatten()).view(*sets.index.shape, -1)
        x, query, key, value = torch.split(picked, self.size, dim=2)
        pooled = self.attention.mix(x, query, key, value, sets.absent)
        hidden = self.dense(pooled)
        values: Tensor = self.heads(torch.cat((hidden, self._how_many(sets)), dim=1))
        return values

    def _how_many(self, sets: Sets) -> Tensor:
        """[K, 1] number of members: 1 for the largest group that was ever seen, near -1 for few."""
        n_sets, n_members = sets.index.shape
        if sets.absent is None:
            present = torch.full((n_sets, 1), float(n_members), device=sets.index.device)
        else:
            present = (~sets.absent).sum(1, keepdim=True).to(self.largest.dtype)
        return 2.0 * present / self.largest - 1.0
