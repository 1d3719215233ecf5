"""Reward for observations that have been seen seldom, counted by hash.

Source: Tang et al. 2017, arXiv 1611.04717 (SimHash): the signs of random projections are a cell's
number, and an observation is rewarded by one over the square root of its cell's count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.algos.policy import seeded_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from example_plugin.settings import NoveltySettings
    from pipeline.algos.rows import Rows
    from pipeline.core.specs import BehaviorSpec


class Novelty:
    """Counts cells of observations; nothing in it is trained.

    Args:
        spec: what the behavior observes and does.
        settings: `reward_signals.novelty`.
        seed: of the run.
        device: where the counts live.
    """

    ignores_done = True
    needs_next_obs = False
    optimizer = None

    def __init__(
        self, spec: BehaviorSpec, settings: NoveltySettings, *, seed: int, device: torch.device
    ) -> None:
        size = sum(torch.Size(one.shape).numel() for one in spec.observation_specs)
        self.cells = nn.Module()
        with seeded_weights(seed, "novelty"):
            self.cells.register_buffer("projection", torch.randn(size, settings.bits))
        self.cells.register_buffer("counts", torch.zeros(2**settings.bits, dtype=torch.int64))
        self.cells.to(device)
        self._powers = 2 ** torch.arange(settings.bits, device=device)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is saved with the networks."""
        return {"Module:Novelty": self.cells}

    def observe(self, obs: Sequence[Tensor]) -> None:
        """Count rows [B, *shape] of new experience."""
        cells = self._cells_of(obs)
        self.cells.counts += torch.bincount(cells, minlength=len(self.cells.counts))

    def rewards(self, rows: Rows) -> Tensor:
        """[B] one over the square root of how often the observation's cell was seen."""
        return self.cells.counts[self._cells_of(rows.obs)].clamp_min(1).float().rsqrt()

    def update(self, rows: Rows) -> dict[str, Tensor]:  # noqa: ARG002  # nothing is trained
        """How many cells have been seen."""
        return {"Policy/Novelty Cells": self.cells.counts.count_nonzero().float()}

    def state_dict(self) -> dict[str, Any]:
        """Projection and counts."""
        return self.cells.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.cells.load_state_dict(state)

    def _cells_of(self, obs: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([values.flatten(1) for values in obs], dim=1)
        return ((flat @ self.cells.projection > 0) * self._powers).sum(1)
