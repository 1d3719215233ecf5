"""Curiosity: reward for the prediction errors of a model of the environment.

A network turns observations into features. An inverse model learns to tell from the features of two
successive observations which action was taken, so that features describe what the agent influences.
A forward model predicts the next features from the features and the action; its error is the
reward. Source: Pathak et al. 2017, arXiv 1705.05363, equations 2 to 6.
docs/explanation/reward-signals.md lists every detail with its reason.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.algos.policy import seeded_weights
from pipeline.algos.reward_signals import RewardSignal
from pipeline.algos.rows import Rows
from pipeline.core.specs import BehaviorSpec
from pipeline.nets.distributions import flat_actions
from pipeline.nets.encoder import Normalizers, ObservationEncoder
from pipeline.nets.fast.adam import FlatAdam
from pipeline.nets.layers import DenseLayers, linear
from pipeline.settings.trainer.schema import CuriositySettings, NetworkSettings

# These are ML-Agents' size and weights; published values of `strength` are tuned to the rewards
# that result from them. FORWARD_WEIGHT and INVERSE_WEIGHT are beta = 0.2 and 1 - beta of arXiv
# 1705.05363, equation 7.
MODEL_UNITS = 256
FORWARD_WEIGHT = 0.2
INVERSE_WEIGHT = 0.8
LOSS_WEIGHT = 10.0


class CuriosityNetwork(nn.Module):
    """Network that encodes observations as features, with the inverse and the forward model."""

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings) -> None:
        super().__init__()
        self.actions = spec.action_spec
        self.normalizers = Normalizers(spec.observation_specs, enabled=settings.normalize)
        self.body = ObservationEncoder(spec.observation_specs, settings)
        H = self.body.output_size
        n_actions = self.actions.continuous_size + sum(self.actions.discrete_branches)
        self.inverse = DenseLayers(2 * H, [MODEL_UNITS])
        self.action = linear(MODEL_UNITS, n_actions)
        self.forward_model = DenseLayers(H + n_actions, [MODEL_UNITS])
        self.next_features = linear(MODEL_UNITS, H)

    def features(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the features [B, H] of the observations and of the next observations."""
        now: Tensor = self.body(self.normalizers(rows.obs))
        later: Tensor = self.body(self.normalizers(rows.next_obs))
        return now, later

    def forward_error(self, rows: Rows, now: Tensor, later: Tensor) -> Tensor:
        """Return half the squared error [B] of the predicted next features (equation 6).

        The forward model predicts `later` from `now` and the actions; `now` and `later` are the
        results of `features`.
        """
        action = flat_actions(rows.continuous, rows.discrete, self.actions.discrete_branches)
        hidden = self.forward_model(torch.cat((now, action), dim=1))
        error: Tensor = 0.5 * (later - self.next_features(hidden)).square().sum(1)
        return error

    def inverse_error(self, rows: Rows, now: Tensor, later: Tensor) -> Tensor:
        """Return the error [B] of the actions that the inverse model predicts from features.

        `now` and `later` are the results of `features`. The error is the squared error of
        continuous actions plus the cross-entropy of each branch.
        """
        guess = self.action(self.inverse(torch.cat((now, later), dim=1)))
        sizes = [self.actions.continuous_size, *self.actions.discrete_branches]
        continuous, *branches = torch.split(guess, sizes, dim=1)
        # The error is the negative log likelihood of the action, without constants, if continuous
        # actions are Gaussian and choices are categorical.
        error = (continuous - rows.continuous).square().sum(1)
        for i, logits in enumerate(branches):
            error = error + nn.functional.cross_entropy(
                logits, rows.discrete[:, i], reduction="none"
            )
        return error


class Curiosity(RewardSignal):
    """Reward signal: the error of a forward model, which predicts the next features."""

    # New observations may come after the end of an episode, so returns of this reward continue
    # across the end: Burda et al. 2018, arXiv 1808.04355.
    ignores_done = True
    needs_next_obs = True
    optimizer: FlatAdam

    def __init__(
        self, spec: BehaviorSpec, settings: CuriositySettings, *, seed: int, device: torch.device
    ) -> None:
        with seeded_weights(seed, "curiosity"):
            self.network = CuriosityNetwork(spec, settings.network_settings).to(device)
        self.optimizer = FlatAdam(self.network.parameters(), learning_rate=settings.learning_rate)
        # Errors are limited to this number, so that a step's reward times `strength` is at most 1.
        self.most = 1.0 / settings.strength if settings.strength > 0 else float("inf")
        self.has_learned = False

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The network by the name that checkpoints use."""
        return {"Module:Curiosity": self.network}

    def observe(self, obs: Sequence[Tensor]) -> None:
        """Update the normaliser with observations [B, *shape] of new rows."""
        self.network.normalizers.update(obs)

    @torch.no_grad()
    def rewards(self, rows: Rows) -> Tensor:
        """Return the forward model's errors [B], limited to `most`.

        They are 0 before the first gradient step.
        """
        # Before the first gradient step, the networks are random, and their error does not depend
        # on how new an observation is.
        if not self.has_learned:
            return torch.zeros_like(rows.reward)
        network = self.network
        return network.forward_error(rows, *network.features(rows)).clamp_max(self.most)

    def update(self, rows: Rows) -> dict[str, Tensor]:
        """Make one gradient step of the encoder and both models (arXiv 1705.05363, equation 7)."""
        network, features = self.network, self.network.features(rows)
        # No tensor is detached, so that both errors also train the encoder of the features.
        errors = network.forward_error(rows, *features), network.inverse_error(rows, *features)
        forward, inverse = (error.mean() for error in errors)
        loss = LOSS_WEIGHT * (FORWARD_WEIGHT * forward + INVERSE_WEIGHT * inverse)
        self.optimizer.minimize(loss)
        self.has_learned = True
        return {
            "Losses/Curiosity Forward Loss": forward.detach(),
            "Losses/Curiosity Inverse Loss": inverse.detach(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the network, Adam's moments, and whether a gradient step was made."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "has_learned": self.has_learned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.has_learned = bool(state["has_learned"])
