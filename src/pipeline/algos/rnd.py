"""Random network distillation: reward for observations that have not been seen often.

A fixed network with random weights gives features; a second network learns to predict them. The
prediction is wrong for observations that are new, and the error is the reward. Source: Burda et al.
2018, arXiv 1810.12894, section 2. Unlike in the paper, the reward is not divided by a running
deviation: published configurations set `strength` for the plain error. docs/explanation/rnd.md
lists every detail with its reason.
"""

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
    """Reward signal: the error of a network that predicts the outputs of a random network."""

    # New observations may come after the end of an episode, so returns of this reward continue
    # across the end: arXiv 1810.12894, section 2.3.
    ignores_done = True
    optimizer: FlatAdam

    def __init__(
        self, spec: BehaviorSpec, settings: RNDSettings, *, seed: int, device: torch.device
    ) -> None:
        network = settings.network_settings
        specs = spec.observation_specs
        self.normalizers = Normalizers(specs, enabled=network.normalize).to(device)
        with seeded_weights(seed, "rnd"):
            # The target network is never trained, but checkpoints have it: with another random
            # target all observations would be new.
            self.target = (
                ObservationEncoder(specs, network).to(device).requires_grad_(requires_grad=False)
            )
            # The predictor draws its weights after the target from the same random stream, so that
            # they differ from the target's weights.
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
        """Update the normaliser with observations [B, *shape] of new rows."""
        self.normalizers.update(obs)

    @torch.no_grad()
    def rewards(self, rows: Rows) -> Tensor:
        """Return the squared errors of the predictions, summed over features, [B]."""
        return self._error(rows)

    def update(self, rows: Rows) -> dict[str, Tensor]:
        """Make one gradient step of the predictor towards the fixed network's features."""
        loss = self._error(rows).mean()
        self.optimizer.minimize(loss)
        return {"Losses/RND Loss": loss.detach()}

    def _error(self, rows: Rows) -> Tensor:
        """Return squared distances [B] between predictions and the fixed network's features."""
        obs = self.normalizers(rows.obs)
        error: Tensor = (self.predictor(obs) - self.target(obs)).square().sum(1)
        return error

    def state_dict(self) -> dict[str, Any]:
        """Return both networks, the normaliser and Adam's moments."""
        networks = {name: module.state_dict() for name, module in self.modules.items()}
        return {**networks, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for name, module in self.modules.items():
            module.load_state_dict(state[name])
        self.optimizer.load_state_dict(state["optimizer"])
