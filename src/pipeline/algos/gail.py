"""Generative adversarial imitation: reward for steps that look like steps of a demonstration.

A discriminator learns to tell the expert's steps from the policy's steps; the more probably a step
is an expert's step, the larger is its reward. Sources: Ho and Ermon 2016, arXiv 1606.03476,
algorithm 1; gradient penalty: Gulrajani et al. 2017, arXiv 1704.00028; variational bottleneck of
`use_vail`: Peng et al. 2018, arXiv 1810.00821. docs/explanation/gail.md lists every detail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.algos.policy import generator_for, restore_generator, seeded_weights
from pipeline.algos.reward_signals import RewardSignal
from pipeline.algos.rows import Rows, tensors
from pipeline.core.specs import BehaviorSpec, ObservationSpec
from pipeline.demos.demonstrations import load_expert_rows
from pipeline.nets.distributions import flat_actions
from pipeline.nets.encoder import Normalizers, ObservationEncoder
from pipeline.nets.fast.adam import FlatAdam
from pipeline.nets.layers import linear, square_root, xavier
from pipeline.settings.trainer.schema import GAILSettings, NetworkSettings

# This number keeps logarithms finite where the discriminator's probability is 0 or 1, and the
# derivative of the square root in the gradient penalty finite where the gradient is 0.
EPSILON = 1e-7
# These are ML-Agents' values. GRADIENT_WEIGHT is lambda of arXiv 1704.00028.
ESTIMATE_GAIN = 0.2
GRADIENT_WEIGHT = 10.0
CODE_SIZE = 128
CODE_GAIN = 0.1
# These are I_c and alpha_beta of VAIL (arXiv 1810.00821).
KL_TARGET = 0.5
BETA_STEP = 0.0005


class Discriminator(nn.Module):
    """Network that estimates the probability D that a step is an expert's step.

    Its inputs are the step's observations and, with `use_actions`, a vector of the action and of
    whether the task ended. With `use_vail` D is computed from a noisy code of the features.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, *, use_actions: bool, use_vail: bool
    ) -> None:
        super().__init__()
        self.actions = spec.action_spec
        self.use_actions = use_actions
        specs = list(spec.observation_specs)
        self.normalizers = Normalizers(specs, enabled=settings.normalize)
        if use_actions:
            n_actions = self.actions.continuous_size + sum(self.actions.discrete_branches)
            # The additional number says whether the task ended with the step.
            specs.append(ObservationSpec.vector(n_actions + 1))
        # The discriminator takes goals as ordinary inputs and generates no weights from them.
        self.body = ObservationEncoder(specs, replace(settings, goal_conditioning_type="none"))
        width = self.body.output_size
        self.code = self.log_deviation = None
        if use_vail:
            self.code = linear(width, CODE_SIZE, gain=CODE_GAIN)
            self.log_deviation = nn.Parameter(torch.zeros(CODE_SIZE))
            width = CODE_SIZE
        self.estimate = xavier(width, 1)
        with torch.no_grad():
            self.estimate.weight *= ESTIMATE_GAIN

    def inputs(self, rows: Rows) -> list[Tensor]:
        """Return the network's inputs for rows of raw observations and of actions in -1..1."""
        inputs: list[Tensor] = self.normalizers(rows.obs)
        if self.use_actions:
            action = flat_actions(rows.continuous, rows.discrete, self.actions.discrete_branches)
            inputs.append(torch.cat((action, rows.done.to(torch.float32).unsqueeze(1)), dim=1))
        return inputs

    def features(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return features [B, H] of B steps; with `use_vail` the means [B, 128] of their codes."""
        hidden: Tensor = self.body(inputs)
        return hidden if self.code is None else self.code(hidden)

    def estimates(self, features: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the probabilities D [B] from the results of `features`.

        With `use_vail`, `features` are the means of codes, and `noise` [B, 128] times the codes'
        standard deviation is added to them.
        """
        if noise is not None and self.log_deviation is not None:
            # The codes are mean + deviation * noise: Kingma and Welling 2013, arXiv 1312.6114.
            features = torch.addcmul(features, self.log_deviation.exp(), noise)
        logit: Tensor = self.estimate(features).squeeze(1)
        return logit.sigmoid()

    def divergence(self, mean: Tensor) -> Tensor:
        """Return the KL divergence [B] of codes with means `mean` [B, 128] from N(0, 1)."""
        if self.log_deviation is None:
            raise ValueError("the discriminator has no codes; set use_vail")
        # This closed form holds for two normal distributions; the sum is over a code's numbers.
        log_variance = 2.0 * self.log_deviation
        return 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(1)


class GAIL(RewardSignal):
    """Reward for steps that resemble the steps of the demonstrations.

    Raises:
        DemonstrationError: The demonstrations cannot be used.
    """

    optimizer: FlatAdam

    def __init__(
        self, spec: BehaviorSpec, settings: GAILSettings, *, seed: int, device: torch.device
    ) -> None:
        expert = load_expert_rows(settings.demo_path.sources, spec)
        with seeded_weights(seed, "gail"):
            self.network = Discriminator(
                spec,
                settings.network_settings,
                use_actions=settings.use_actions,
                use_vail=settings.use_vail,
            ).to(device)
        self.optimizer = FlatAdam(self.network.parameters(), learning_rate=settings.learning_rate)
        self.generator = generator_for(seed, device, "gail")
        self.use_vail = settings.use_vail
        self.beta = torch.zeros((), device=device)
        """Weight of the bottleneck's divergence; grows while the divergence exceeds its target."""
        continuous, discrete = tensors([expert.continuous, expert.discrete], device)
        # If the demonstrations do not record ends of tasks, no step counts as the end of a task.
        done = np.zeros(len(expert), dtype=np.bool_) if expert.done is None else expert.done
        self.expert = Rows(
            obs=tensors(expert.obs, device),
            fields={
                "continuous": continuous,
                "discrete": discrete.long(),
                "done": tensors([done], device)[0],
            },
        )
        # The normalisers' statistics come from the expert's rows only, not from the policy's
        # experience, as in ML-Agents.
        self.network.normalizers.update(self.expert.obs)
        self.weights = None
        """[R] weights with which the rows of demonstrations are drawn; None if all are equal."""
        if expert.weights is not None:
            self.weights = tensors([expert.weights], device)[0]

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The network by the name that checkpoints use."""
        return {"Module:GAIL": self.network}

    @torch.no_grad()
    def rewards(self, rows: Rows) -> Tensor:
        """Return rewards -ln(1 - D) [B], at least 0."""
        # D is computed from the mean codes, without noise, so that equal steps get equal rewards.
        estimate = self.network.estimates(self.network.features(self.network.inputs(rows)))
        # Rewards are never negative, because with negative rewards an agent would gain by ending an
        # episode early: Kostrikov et al. 2018, arXiv 1809.02925, section 4.
        return -torch.log(1.0 - estimate * (1.0 - EPSILON))

    def update(self, rows: Rows) -> dict[str, Tensor]:
        """Make one gradient step on the policy's rows and as many rows of the expert."""
        n = len(rows)
        pairs = list(zip(self.network.inputs(rows), self._draw(n), strict=True))
        # One call of the network computes the features of the policy's and the expert's steps.
        features = self.network.features([torch.cat(pair) for pair in pairs])
        noise = None
        if self.use_vail:
            noise = torch.empty_like(features).normal_(generator=self.generator)
        by_policy, by_expert = torch.split(self.network.estimates(features, noise), n)
        # This is equation 17 of arXiv 1606.03476 with D and 1 - D exchanged, and with the opposite
        # sign.
        loss = -(torch.log(by_expert + EPSILON) + torch.log(1.0 - by_policy + EPSILON)).mean()
        stats = {
            "Losses/GAIL Loss": loss.detach(),
            "Policy/GAIL Policy Estimate": by_policy.detach().mean(),
            "Policy/GAIL Expert Estimate": by_expert.detach().mean(),
        }
        if self.use_vail:
            # `mean` is over the steps of the policy and of the expert together. The factor 2 makes
            # it the mean over the policy's steps plus the mean over the expert's steps.
            kl = 2.0 * self.network.divergence(features).mean()
            loss = loss + self.beta * (kl - KL_TARGET)
            # This is the dual gradient step of arXiv 1810.00821: beta grows while the code carries
            # more information than KL_TARGET.
            self.beta = (self.beta + BETA_STEP * (kl.detach() - KL_TARGET)).clamp_min(0.0)
            stats |= {"Losses/GAIL KL Loss": kl.detach(), "Policy/GAIL Beta": self.beta}
        penalty = self.gradient_penalty(pairs)
        stats["Policy/GAIL Grad Mag Loss"] = penalty.detach()
        self.optimizer.minimize(loss + GRADIENT_WEIGHT * penalty)
        return stats

    def gradient_penalty(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the gradient penalty, the mean of (|gradient| - 1)^2 (arXiv 1704.00028).

        The gradient is that of D with respect to all its inputs (observations and actions), at
        random elementwise mixtures of the inputs in `pairs`: for each input, the policy's and the
        expert's values [B, *shape].
        """
        mixed = []
        for ours, theirs in pairs:
            share = torch.rand(ours.shape, generator=self.generator, device=ours.device)
            mixed.append(torch.lerp(theirs, ours, share).requires_grad_())
        estimates = self.network.estimates(self.network.features(mixed))
        # The gradient of the sum consists of the gradients of the rows, because an estimate depends
        # only on its own row.
        # With `create_graph`, the penalty can be differentiated with respect to the weights.
        gradients = torch.autograd.grad(estimates.sum(), mixed, create_graph=True)
        squared = [gradient.flatten(1).square().sum(1) for gradient in gradients]
        # EPSILON is added, because the square root has no finite derivative at 0.
        norms = square_root(torch.stack(squared).sum(0) + EPSILON)
        return (norms - 1.0).square().mean()

    def _draw(self, n: int) -> list[Tensor]:
        """Draw the inputs of `n` expert steps, with probabilities in proportion to `weights`."""
        if self.weights is None:
            device = self.generator.device
            # Rows are drawn with replacement, because a minibatch may have more rows than all
            # demonstrations together.
            index = torch.randint(len(self.expert), (n,), generator=self.generator, device=device)
        else:
            index = torch.multinomial(self.weights, n, replacement=True, generator=self.generator)
        return self.network.inputs(self.expert.take(index))

    def state_dict(self) -> dict[str, Any]:
        """Return the network, Adam's moments, `beta` and the state of the random stream."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "beta": self.beta,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.beta = state["beta"].to(self.beta.device)
        restore_generator(self.generator, state["generator"])
