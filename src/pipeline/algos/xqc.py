"""XQC and CrossQ: soft actor-critics with batch normalisation, for few environment steps.

Sources: XQC, Palenicek et al. 2025, arXiv 2509.25174; CrossQ, Bhatt et al. 2024, arXiv 1902.05605;
distributions of returns: Bellemare et al. 2017, arXiv 1707.06887 (C51); no entropy of choices in
the critics' target: arXiv 2509.09838. docs/explanation/xqc.md lists every detail with its
reason.

Shapes: B rows of a minibatch, A continuous actions, b branches with K choices in all (K = 1 without
branches), Z atoms; tensors of both critics have a leading axis of 2.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.algos.off_policy import OffPolicy, SampledActions
from pipeline.algos.policy import Policy, seeded_weights
from pipeline.algos.replay_sampler import ReturnSampler
from pipeline.algos.reward_scale import LARGEST_RETURN
from pipeline.algos.rows import Rows
from pipeline.core.specs import BehaviorSpec, ObservationType
from pipeline.data.columns import Field
from pipeline.errors import SettingsError
from pipeline.nets.batch_norm import (
    MOMENTUM,
    AnyDense,
    NormalizedActor,
    NormalizedCritic,
    set_unit_norms,
)
from pipeline.nets.fast.adam import FlatAdam, Inputs
from pipeline.settings.trainer.schema import TrainerSettings, XQCSettings

LEARNING_RATE_END = 0.1
"""Learning rate at the end of a linear schedule, as a share of the rate at its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The options in which XQC and CrossQ differ."""

    has_target: bool
    """Whether a slowly moving copy of the critics estimates the next state's value, as in SAC."""
    is_before: bool
    """Whether features are normalised before the activation function instead of after it."""
    has_unit_norms: bool
    """Whether each unit's weights are divided by their norm after each gradient step."""
    n_atoms: int
    """Number of atoms of the return's distribution; 1 if a critic gives only the mean return."""


RECIPES = {
    "xqc": Recipe(has_target=True, is_before=True, has_unit_norms=True, n_atoms=101),
    "crossq": Recipe(has_target=False, is_before=False, has_unit_norms=False, n_atoms=1),
}


def least_distribution(logits: Tensor, sampled: SampledActions, atoms: Tensor) -> Tensor:
    """Return for each row the distribution [B, Z] of the critic with the smaller mean.

    For each branch the distributions of its choices are averaged by the choices' probabilities;
    then the branches are averaged. `logits` [2, B, K, Z] come from both critics, `sampled` the
    policy's actions at the same observations, `atoms` [Z] the return of each atom.
    """
    of_choices = logits.softmax(-1)
    if sampled.probability is None:
        both = of_choices.squeeze(2)
    else:
        weights = sampled.probability / sampled.n_branches
        both = (of_choices * weights.unsqueeze(-1)).sum(2)
    means = both @ atoms
    return torch.where((means[0] <= means[1]).unsqueeze(1), both[0], both[1])


def shifted_distribution(
    probability: Tensor, *, reward: Tensor, discount: Tensor, cost: Tensor, atoms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the distribution of r + discount (G - cost), and the share of mass that is clipped.

    G is the return after the next state. The mass of each shifted atom is divided between its two
    neighbours among `atoms`; mass beyond the outermost atoms is moved to them, which is called
    clipped (arXiv 1707.06887, equation 7).

    Args:
        probability: [B, Z] of the returns after the next state.
        reward: [B] reward before the next state.
        discount: [B] discount of the next state; 0 where the task has ended.
        cost: [B] temperature times log density of the next action.
        atoms: [Z] returns, evenly spaced.

    Returns:
        [B, Z] probabilities, and a scalar.
    """
    n_atoms = len(atoms)
    spacing = (atoms[-1] - atoms[0]) / (n_atoms - 1)
    # Places are distances from the first atom, in spacings between atoms. Shifted atoms are evenly
    # spaced, so the first place and the discount give all places.
    first = (reward + discount * (atoms[0] - cost) - atoms[0]) / spacing
    steps = torch.arange(n_atoms, dtype=atoms.dtype, device=atoms.device)
    shifted = torch.addcmul(first.unsqueeze(1), discount.unsqueeze(1), steps)
    place = shifted.clamp(0.0, n_atoms - 1.0)
    # `lower` is not the last place, so that mass at the last place has an upper neighbour.
    lower = place.floor().clamp(max=n_atoms - 2.0)
    upper_mass = probability * (place - lower)
    mass, index = torch.cat((probability - upper_mass, upper_mass), dim=1), lower.long()
    index = torch.cat((index, index + 1), dim=1)
    result = torch.zeros_like(probability).scatter_add(1, index, mass)
    return result, (probability * (shifted != place)).sum(1).mean()


def least_value(values: Tensor, sampled: SampledActions) -> Tensor:
    """Return the smaller of both critics' values [B] of the policy's actions.

    `values` [2, B, K] are the values Q of both critics; see arXiv 1802.09477, equation 10.
    """
    return sampled.expected(values.unsqueeze(2)).squeeze(-1).amin(0)


def taken_outputs(outputs: Tensor, discrete: Tensor, columns: Tensor) -> Tensor:
    """Return the outputs [2, B, b, Z] of the taken choices; b = 1 without branches.

    `outputs` are [2, B, K, Z], the choices int64 [B, b] (b may be 0), and `columns` int64 [b] the
    first output of each branch.
    """
    if not len(columns):
        return outputs
    # `index` numbers each branch's choice among the K choices of all branches.
    index = (discrete + columns).unsqueeze(-1).expand(*discrete.shape, outputs.shape[-1])
    return outputs.gather(2, index.expand(2, *index.shape))


def cross_entropies(logits: Tensor, target: Tensor) -> Tensor:
    """Return cross-entropies [2] of the critics, -sum target log p, means over rows and branches.

    `logits` [2, B, b, Z] belong to the taken choices; `target` [B, Z] has no gradient.
    """
    n_critics, *shape = logits.shape
    log_p = logits.log_softmax(-1).view(n_critics, -1)
    return log_p @ target.unsqueeze(1).expand(shape).flatten() / (-shape[0] * shape[1])


class TwinCritics(nn.Module):
    """Two critics with different initial weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.critics = [NormalizedCritic(*args, **kwargs) for _ in range(2)]
        self.both = nn.ModuleList(self.critics)

    def forward(
        self, obs: list[Tensor], continuous: Tensor
    ) -> tuple[list[tuple[Tensor, AnyDense]], Tensor]:
        """Return the argument `of_each` of `values`, and the minibatch's statistics [2, 2, n].

        The statistics are those of `NormalizedLayers.in_training` for each critic.
        """
        results = [critic(obs, continuous) for critic in self.critics]
        hidden, heads, statistics = zip(*results, strict=True)
        return list(zip(hidden, heads, strict=True)), torch.stack(statistics)

    def values(self, of_each: list[tuple[Tensor, AnyDense]], rows: slice) -> Tensor:
        """Return outputs [2, R, K, Z] for `rows`; `of_each` is the first result of `forward`."""
        pairs = zip(self.critics, of_each, strict=True)
        return torch.stack([critic.values(hidden[rows], head) for critic, (hidden, head) in pairs])

    def evaluate(self, obs: list[Tensor], continuous: Tensor) -> Tensor:
        """Return outputs [2, B, K, Z] with running statistics; see `NormalizedCritic.evaluate`."""
        return torch.stack([critic.evaluate(obs, continuous) for critic in self.critics])


class TrainedPolicy(Policy):
    """The policy that learns, with batch normalisation; `after_step` updates the acting policy."""

    def __init__(
        self, acting: Policy, actor: NormalizedActor, unit_weights: Sequence[Tensor]
    ) -> None:
        # `Policy.__init__` is not called, because it would make a second actor.
        nn.Module.__init__(self)
        self.spec, self.settings = acting.spec, acting.settings
        self.normalizers = acting.normalizers
        self.actor = actor  # type: ignore[assignment]  # it has the methods that losses call
        self.numpy_actor = None
        self._acting = (acting,)  # a tuple keeps the policy from becoming a submodule
        self._unit_weights = unit_weights

    def after_step(self) -> None:
        """Set the norms of the unit weights to 1, and fold the actor into the acting policy."""
        set_unit_norms(self._unit_weights)
        cast("NormalizedActor", self.actor).fold_into(self._acting[0].actor)


class XQC(OffPolicy):
    """Twin critics and an actor with batch normalisation.

    Attributes:
        policy: the acting policy: dense layers, into which the weights of `actor` are folded.
        actor: the actor that learns.
        critics: the critics that learn.
        target: slowly moving copy of the critics; None in CrossQ.
    """

    settings_class = XQCSettings
    hyperparameters: XQCSettings

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        refuse_unsupported(spec, settings)
        super().__init__(spec, settings, seed=seed, device=device)
        h, network = self.hyperparameters, settings.network_settings
        self.learning_rate_floor = h.learning_rate * LEARNING_RATE_END
        recipe = self.recipe = RECIPES[h.critic]
        with seeded_weights(seed, "xqc"):
            self.policy = Policy(spec, network, squash=True).to(device)
            actor = NormalizedActor(spec, network, is_before=recipe.is_before).to(device)
            self.critics = TwinCritics(
                spec, network, n_atoms=recipe.n_atoms, is_before=recipe.is_before
            ).to(device)
        self.actor = actor
        has_norms, critics = recipe.has_unit_norms, self.critics.critics
        self._trained = TrainedPolicy(self.policy, actor, actor.unit_weights if has_norms else [])
        self._unit_weights = [w for critic in critics for w in critic.unit_weights if has_norms]
        self.own_networks = {"policy": self.policy, "actor": actor, "critics": self.critics}
        self.target: TwinCritics | None = None
        set_unit_norms(self._unit_weights)
        if recipe.has_target:
            self.target = copy.deepcopy(self.critics).requires_grad_(requires_grad=False)
            self.own_networks["target"] = self.target
            self._soft_update = self.follow(self.critics, self.target)
        self.optimizer = FlatAdam(_learned(self.critics), learning_rate=h.learning_rate)
        self.actor_optimizer = FlatAdam(
            [*_learned(actor), self.log_alpha], learning_rate=h.learning_rate
        )
        self._trained.after_step()
        _act_at_random(self.policy)
        self.atoms = torch.linspace(-LARGEST_RETURN, LARGEST_RETURN, recipe.n_atoms, device=device)
        branches = spec.action_spec.discrete_branches
        self.columns_of_branches = torch.tensor(
            [sum(branches[:i]) for i in range(len(branches))], dtype=torch.int64, device=device
        )
        sampler = partial(ReturnSampler, n_steps=h.n_steps, gamma=self.gammas[:1])
        self.make_replay(seed=seed, cloned=self._trained, sampler=sampler)

    @property
    def own_optimizers(self) -> list[FlatAdam]:
        """Optimizers of the critics, and of the actor with the temperatures."""
        return [self.optimizer, self.actor_optimizer]

    @property
    def trained_policy(self) -> Policy:
        """The policy that learns, with batch normalisation; `policy` acts."""
        return self._trained

    @property
    def fields(self) -> dict[str, Field]:
        """Shape and dtype of each stored column, with `next_allowed` at each trajectory's end."""
        fields = super().fields
        if "allowed" in fields:
            fields["next_allowed"] = replace(fields["allowed"], at_end=True)
        return fields

    def learn_minibatch(self, batch: Rows) -> Tensor:
        """Make a gradient step of the critics and, every `policy_delay` calls, one of the actor."""
        delay, max_norm = self.hyperparameters.policy_delay, self.hyperparameters.max_grad_norm
        losses, moments = self.optimizer.descend(
            self.critic_losses, self._with_noise(batch), max_norm=max_norm
        )
        for critic, statistics in zip(self.critics.critics, moments, strict=True):
            critic.layers.observe(statistics, MOMENTUM)
        # Unit norms keep the effective learning rate constant: arXiv 2509.25174.
        set_unit_norms(self._unit_weights)
        if self.target is not None:
            self._soft_update()
        # NaN marks a step without the actor; `_means` leaves it out.
        loss_pi = losses.new_full((1,), math.nan)
        # The actor learns at every `delay`-th update: arXiv 1802.09477, section 5.2.
        if (self.n_updates - 1) % delay == 0:  # this includes the first update
            loss_pi, moments = self.actor_optimizer.descend(
                self.actor_losses, self._with_noise(batch), max_norm=max_norm
            )
            # The actor's running statistics are updated only at every `delay`-th update, so they
            # move as far as in `delay` single updates.
            self.actor.layers.observe(moments, 1.0 - (1.0 - MOMENTUM) ** delay)
            self._trained.after_step()
        return torch.cat((loss_pi, losses))

    def critic_losses(self, inputs: Inputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the sum of the critics' losses, statistics [4], and the moments of features.

        The statistics are both losses, the mean value, and the share of clipped mass. `inputs` has
        the tensors of a minibatch of `ReturnSampler`, and `noise` [B, A] for drawing next actions.
        """
        batch, branches = Rows.of(inputs, None), self.columns_of_branches
        fields, n_rows = batch.fields, len(inputs["rewards"])
        with torch.no_grad():
            actor = self.policy.actor  # it normalises by the running statistics
            sampled = self._sampled(
                actor.heads, actor(batch.next_obs), fields.get("noise"), fields.get("next_allowed")
            )
            reward, cost = batch.rewards.squeeze(1), self._critic_cost(sampled)
            # A discount of 0 leaves only the reward where the task has ended.
            discount = fields["discount"].squeeze(1).masked_fill(batch.done, 0.0)
            # States and next states are one minibatch, so that batch statistics are those of their
            # mixture: the joint forward pass of arXiv 1902.05605.
            obs = [torch.cat(pair) for pair in zip(batch.obs, batch.next_obs, strict=True)]
            actions = torch.cat((batch.continuous, sampled.continuous))
        hidden, statistics = self.critics(obs, actions)
        outputs = self.critics.values(hidden, slice(n_rows))
        taken = taken_outputs(outputs, batch.discrete, branches)
        with torch.no_grad():
            followed = hidden if self.target is None else self.target(obs, actions)[0]
            later = self.critics.values(followed, slice(n_rows, None))
            if self.recipe.n_atoms == 1:
                target = reward + discount * (least_value(later.squeeze(-1), sampled) - cost)
                value, clipped = taken.mean(), torch.zeros((), device=self.device)
            else:
                target, clipped = shifted_distribution(
                    least_distribution(later, sampled, self.atoms),
                    reward=reward,
                    discount=discount,
                    cost=cost,
                    atoms=self.atoms,
                )
                value = (taken.softmax(-1) @ self.atoms).mean()
        if self.recipe.n_atoms == 1:
            # The losses [2] are the errors (y - Q)^2 / 2, as means over rows and branches.
            losses = 0.5 * (target.unsqueeze(1) - taken.squeeze(-1)).square().mean((1, 2))
        else:
            losses = cross_entropies(taken, target)
        shown = torch.cat((losses, torch.stack((value, clipped))))
        return losses.sum(), (shown, statistics)

    def actor_losses(self, inputs: Inputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the loss of actor and temperatures, the policy loss [1], and feature moments."""
        batch = Rows.of(inputs, None)
        hidden, statistics = self.actor.in_training(batch.obs)
        noise = batch.fields.get("noise")
        sampled = self._sampled(self.actor.heads, hidden, noise, batch.allowed)
        outputs = self.critics.evaluate(batch.obs, sampled.continuous)
        # XQC's critics give distributions of returns, CrossQ's critics their means.
        values = (
            outputs.squeeze(-1) if self.recipe.n_atoms == 1 else outputs.softmax(-1) @ self.atoms
        )
        # This is equation 9 of arXiv 1812.05905: the mean of alpha log pi - min Q.
        loss_pi = (sampled.entropy_cost - least_value(values, sampled)).mean()
        with torch.no_grad():
            gap = -sampled.log_prob.mean(0) - self._targets(batch.allowed)
        # This is equation 18 of arXiv 1812.05905: it lowers alpha while the entropy is above its
        # target. The gap has no gradient, so neither loss changes the gradients of the other.
        loss_alpha = (self.log_alpha.exp() * gap * self.alpha_weight).sum()
        return loss_pi + loss_alpha, (loss_pi.view(1), statistics)

    def _scaled(self, rewards: Tensor) -> Tensor:
        """Return the rewards [R, 1] as a sum over signals, because all signals share the critics.

        With `reward_normalization` the signals' rewards are scaled before the sum.
        """
        if self.reward_scale is None:
            return rewards.sum(1, keepdim=True)
        return (rewards @ self._reward_factors(self.reward_scale)).unsqueeze(1)

    def _means(self, learned: Tensor) -> Tensor:
        """Return means [k] over gradient steps; the policy loss is NaN if it was not computed."""
        means = learned.mean(0)
        means[0] = learned[:, 0].nanmean()
        return means

    def statistics(self, means: Tensor, step: int) -> dict[str, float]:
        """Return statistics by tag, from the mean results of `learn_minibatch`."""
        loss_pi, loss_1, loss_2, value, clipped = means.tolist()
        losses = {"Q1": loss_1, "Q2": loss_2}
        stats = {
            "Losses/Q1 Loss": loss_1,
            "Losses/Q2 Loss": loss_2,
            "Policy/Extrinsic Value": value,
            "Policy/Clipped Return Share": clipped,
        }
        if not math.isnan(loss_pi):
            losses["policy"] = stats["Losses/Policy Loss"] = loss_pi
        self.refuse_divergence(losses, step=step)
        return stats | self._temperatures()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training, without the replay, as tensors and plain values."""
        return {**super().state_dict(), "actor_optimizer": self.actor_optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state)
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])

    def load_weights(self, state: dict[str, Any]) -> tuple[list[str], int]:
        """Load the weights of another run; see `Algorithm`."""
        if state.get("actor") is None:
            return ["policy (it has no batch normalisation, which trainer_type xqc learns with)"], 0
        # The acting policy's weights are not loaded; `after_step` makes them from the loaded actor.
        loaded = super().load_weights(state)
        self._trained.after_step()
        return loaded


def _learned(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def _act_at_random(policy: Policy) -> None:
    """Set the weights of action heads to 0, so that actions are random before the first update.

    Continuous actions are then tanh of N(0, 1), and choices are equally likely.
    """
    for layer in policy.actor.heads.modules():
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)


def refuse_unsupported(spec: BehaviorSpec, settings: TrainerSettings) -> None:
    """Refuse settings that batch normalisation, or one critic for all signals, does not allow.

    Raises:
        SettingsError: The network has a memory, hyper weights, layer normalisation or another
            activation than Swish, or the reward signals have different values of gamma.
    """
    network = settings.network_settings
    if network.memory is not None:
        raise SettingsError(
            "network_settings.memory: trainer_type xqc has no memory (batch statistics over "
            "sequences of several lengths would be wrong); leave memory out, or use sac or ppo"
        )
    if network.layer_norm or network.activation != "swish":
        key = "layer_norm" if network.layer_norm else "activation"
        raise SettingsError(
            f"network_settings.{key}: trainer_type xqc has batch normalisation and activations of "
            "its own; leave this setting out, or use sac"
        )
    has_goal = any(
        obs.observation_type == ObservationType.GOAL_SIGNAL and len(obs.shape) != 2
        for obs in spec.observation_specs
    )
    if has_goal and network.goal_conditioning_type == "hyper":
        raise SettingsError(
            "network_settings.goal_conditioning_type: trainer_type xqc cannot fold batch "
            "normalisation into weights that are computed from a goal (hyper); set it to none, "
            "which reads the goal as an input"
        )
    gammas = {name: signal.gamma for name, signal in settings.reward_signals.items()}
    if len(set(gammas.values())) > 1:
        values = ", ".join(f"{name} {gamma}" for name, gamma in gammas.items())
        raise SettingsError(
            "reward_signals: trainer_type xqc has one critic for all signals, with one gamma "
            f"({values}); give all reward signals the same gamma"
        )
