"""Random network distillation: reward for observations that have not been seen often.

A fixed network with random weights gives features; a second one learns to predict them. Where the
prediction is wrong the observation is new. Source: Burda et al. 2018, arXiv 1810.12894, section 2.
The reward is not divided by a running deviation as it is there: published configurations set
`strength` for the plain error. docs/explanation/rnd.md lists every detail with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.algos.policy import seeded_weights
from pipeline.algos.reward_signals import RewardSignal
from pipeline.algos.rows import Rows
from pipeline.core.specs import BehaviorSpec
from pipeline.nets.encoder import Normalizers, ObservationEncoder
from pipeline.nets.fast.adam import FlatAdam
from pipeline.settings.trainer.schema import RNDSettings


class RND(RewardSignal):
    """The error of a network that imitates a random one."""

    # As curiosity: what is new may lie beyond the end.
    ignores_done = True
    optimizer: FlatAdam

    def __init__(
        self, spec: BehaviorSpec, settings: RNDSettings, *, seed: int, device: torch.device
    ) -> None:
        network = settings.network_settings
        specs = spec.observation_specs
        self.normalizers = Normalizers(specs, enabled=network.normalize).to(device)
        with seeded_weights(seed, "rnd"):
            # Never trained, but saved: another random target would make everything new again.
            self.target = (
                ObservationEncoder(specs, network).to(device).requires_grad_(requires_grad=False)
            )
            self.predictor = ObservationEncoder(specs, network).to(device)
        self.optimizer = FlatAdam(self.predictor.parameters(), learning_rate=settings.learning_rate)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Networks by the names that checkpoints use."""
        return {
            "Module:RND-pred": self.predictor,
            "Module:RND-target": self.target,
            "Module:RND-normalizers": self.normalizers,
        }

    def observe(self, obs: Sequence[Tensor]) -> None:
        """Take rows [B, *shape] of new experience into the normaliser."""
        self.normalizers.update(obs)

    @torch.no_grad()
    def rewards(self, rows: Rows) -> Tensor:
        """[B] squared error of the prediction, summed over features."""
        return self._error(rows)

    def update(self, rows: Rows) -> dict[str, Tensor]:
        """One step of the predictor towards the target."""
        loss = self._error(rows).mean()
        self.optimizer.minimize(loss)
        return {"Losses/RND Loss": loss.detach()}

    def _error(self, rows: Rows) -> Tensor:
        """[B] how far the prediction is from the target."""
        obs = self.normalizers(rows.obs)
        error: Tensor = (self.predictor(obs) - self.target(obs)).square().sum(1)
        return error

    def state_dict(self) -> dict[str, Any]:
        """Both networks, the normaliser and Adam's moments."""
        networks = {name: module.state_dict() for name, module in self.modules.items()}
        return {**networks, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name, module in self.modules.items():
            module.load_state_dict(state[name])
        self.optimizer.load_state_dict(state["optimizer"])
