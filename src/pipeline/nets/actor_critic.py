"""The actor with its action heads, and the critic that estimates the values of states."""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.core.specs import ActionSpec, BehaviorSpec
from pipeline.nets.distributions import (
    ACTION_RANGE,
    FORBIDDEN,
    HALF_LOG_TAU,
    categorical_entropy,
    gaussian_entropy,
    gaussian_log_prob,
    gumbel_scores,
    masked_log_softmax,
    split_branches,
    to_environment,
)
from pipeline.nets.encoder import ObservationEncoder
from pipeline.nets.layers import linear, signal_heads
from pipeline.nets.memory import Memory, SequenceState, memory_for
from pipeline.nets.onnx_graph import FLOAT, INT64, OnnxGraph
from pipeline.settings.trainer.schema import NetworkSettings

AnyTensor = TypeVar("AnyTensor")

# These are ML-Agents' gains of initial weights. With these gains the means of actions are near 0
# before training, and all choices are nearly equally likely.
MU_GAIN = 0.2
LOGITS_GAIN = 0.1


class Sample(NamedTuple, Generic[AnyTensor]):
    """Actions drawn for B agents, as tensors or as arrays."""

    continuous: AnyTensor
    """[B, A] continuous actions as drawn, before clipping to the environment's range."""
    in_range: AnyTensor
    """[B, A] the same actions in the environment's range -1..1."""
    discrete: AnyTensor
    """int64 [B, branches] choice of each discrete branch."""
    log_prob: AnyTensor
    """[B, A + branches] log probability of each continuous action and of each choice."""
    entropy: AnyTensor
    """[B] entropy of the distributions, or [1] if it is the same for all agents."""


class ActionHeads(nn.Module):
    """Dense layers from hidden vectors to distributions over a behavior's actions.

    Continuous actions are Gaussian, with the same sigma for all observations; `nets.squashed` has
    the heads of SAC.
    """

    def __init__(self, n_in: int, spec: ActionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.mu = linear(n_in, spec.continuous_size, gain=MU_GAIN) if spec.continuous_size else None
        # Sigma is 1 at first. The shape [1, A] broadcasts over rows.
        self.log_sigma = nn.Parameter(torch.zeros(1, spec.continuous_size)) if self.mu else None
        self.branches = nn.ModuleList(
            linear(n_in, size, gain=LOGITS_GAIN) for size in spec.discrete_branches
        )

    def to_environment(self, continuous: Tensor) -> Tensor:
        """Return drawn continuous actions [B, A] in the environment's range -1..1."""
        return to_environment(continuous)

    def mean_action(self, hidden: Tensor) -> Tensor | None:
        """Return the most likely actions [B, A] in the environment's scale, but not clipped.

        None if the behavior has no continuous actions.
        """
        if self.mu is None:
            return None
        # The mean is not clipped: behavioral cloning needs a gradient where it is out of range.
        mean: Tensor = self.mu(hidden)
        return mean / ACTION_RANGE

    def branch_log_probs(self, hidden: Tensor, allowed: Tensor | None) -> list[Tensor]:
        """Return the log probabilities [B, L] of each discrete branch's L choices."""
        masks = split_branches(allowed, self.spec.discrete_branches)
        return [
            masked_log_softmax(branch(hidden), mask)
            for branch, mask in zip(self.branches, masks, strict=True)
        ]

    def noise(self, n: int, generator: torch.Generator) -> list[Tensor]:
        """Draw the random numbers with which `choose` draws actions for B = n agents.

        Continuous actions have standard normal numbers [B, A], which come first, and each branch of
        L choices has exponential numbers [B, L].
        """
        sizes = [] if self.mu is None else [self.spec.continuous_size]
        sizes += self.spec.discrete_branches
        noise = [torch.empty(n, size, device=generator.device) for size in sizes]
        self.draw(noise, generator)
        return noise

    def draw(self, noise: Sequence[Tensor], generator: torch.Generator) -> None:
        """Replace the numbers in the tensors that `noise` returned by new random numbers."""
        exponential = iter(noise)
        if self.mu is not None:
            # The first tensor of `noise` is for continuous actions, if there are any.
            next(exponential).normal_(generator=generator)
        for branch_noise in exponential:
            branch_noise.exponential_(generator=generator)

    def choose(
        self, hidden: Tensor, allowed: Tensor | None, noise: Sequence[Tensor] | None
    ) -> Sample[Tensor]:
        """Choose actions by the random numbers `noise`; None chooses the most likely actions."""
        numbers = None if noise is None else list(noise)
        log_probs, entropies = [], []
        # Without continuous actions this stays [B, 0], with the hidden vectors' device and dtype.
        continuous = hidden[:, :0]
        if self.mu is not None:
            drawn = self._draw(hidden, None if numbers is None else numbers.pop(0))
            continuous, log_prob, entropy = drawn
            log_probs.append(log_prob)
            entropies.append(entropy)
        chosen = []
        branches = self.branch_log_probs(hidden, allowed) if self.branches else []
        for number, branch in enumerate(branches):
            scores = branch if numbers is None else gumbel_scores(branch, numbers[number])
            index = scores.argmax(-1)
            chosen.append(index)
            # Each branch gives a column [B, 1]; the columns are joined below.
            log_probs.append(branch.gather(1, index.unsqueeze(1)))
            entropies.append(categorical_entropy(branch))
        none = hidden.new_zeros((hidden.shape[0], 0), dtype=torch.int64)
        return Sample(
            continuous=continuous,
            in_range=self.to_environment(continuous),
            discrete=torch.stack(chosen, dim=1) if chosen else none,
            log_prob=log_probs[0] if len(log_probs) == 1 else torch.cat(log_probs, dim=1),
            entropy=sum(entropies[1:], entropies[0]),
        )

    def gaussian(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [B, A] and log sigma [1, A] of continuous actions."""
        if self.mu is None or self.log_sigma is None:
            raise ValueError("the behavior has no continuous actions")
        return self.mu(hidden), self.log_sigma

    def _draw(self, hidden: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return drawn actions and their log probabilities, both [B, A], and the entropy [1]."""
        mu, log_sigma = self.gaussian(hidden)
        noise = torch.zeros_like(mu) if noise is None else noise
        drawn = torch.addcmul(mu, log_sigma.exp(), noise)
        # (action - mu) / sigma is the noise, so that no division is needed.
        log_prob = (noise.square() * -0.5).sub_(log_sigma + HALF_LOG_TAU)
        return drawn, log_prob, gaussian_entropy(log_sigma)

    def evaluate(
        self, hidden: Tensor, continuous: Tensor, discrete: Tensor, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log probabilities [B, A + branches] of given actions, and the mean entropy."""
        log_probs, entropies = [], []
        if self.mu is not None:
            mu, log_sigma = self.gaussian(hidden)
            log_probs.append(gaussian_log_prob(action=continuous, mu=mu, log_sigma=log_sigma))
            entropies.append(gaussian_entropy(log_sigma))
        for number, branch in enumerate(self.branch_log_probs(hidden, allowed)):
            log_probs.append(branch.gather(1, discrete[:, number : number + 1]))
            entropies.append(categorical_entropy(branch))
        joined = log_probs[0] if len(log_probs) == 1 else torch.cat(log_probs, dim=1)
        entropy = sum(entropies[1:], entropies[0])
        # A Gaussian's entropy is one number for all rows, but a branch's entropy differs by row.
        return joined, entropy if entropy.numel() == 1 else entropy.mean()

    def to_onnx(self, graph: OnnxGraph, hidden: str) -> None:
        """Add outputs of sampled and of most likely actions, named as Unity's loader expects."""
        if self.mu is not None:
            self._continuous_to_onnx(graph, hidden, self.mu)
        if self.branches:
            self._discrete_to_onnx(graph, hidden)

    def _continuous_to_onnx(self, graph: OnnxGraph, hidden: str, mu_layer: nn.Linear) -> None:
        n = self.spec.continuous_size
        mu = graph.linear(mu_layer, hidden, "mu")
        # The model draws its own noise, because it has no input for random numbers.
        noise = graph.node("RandomNormalLike", [mu], dtype=FLOAT, mean=0.0, scale=1.0)
        spread = graph.node("Mul", [noise, self._sigma_to_onnx(graph, hidden)])
        self._range_to_onnx(graph, graph.node("Add", [mu, spread]), "continuous_actions")
        graph.output("continuous_actions", np.float32, (n,))
        graph.constant_output("continuous_action_output_shape", [n])
        self._range_to_onnx(graph, mu, "deterministic_continuous_actions")
        graph.output("deterministic_continuous_actions", np.float32, (n,))

    def _sigma_to_onnx(self, graph: OnnxGraph, hidden: str) -> str:  # noqa: ARG002  # squashed heads need it
        if self.log_sigma is None:
            raise ValueError("the behavior has no continuous actions")
        log_sigma = self.log_sigma.detach().cpu().numpy()
        # Sigma is a constant of the model, because it does not depend on the observation.
        return graph.constant(np.exp(log_sigma.reshape(-1)), "sigma")

    def _range_to_onnx(self, graph: OnnxGraph, action: str, output: str) -> None:
        clipped = graph.node("Clip", [action], min=-ACTION_RANGE, max=ACTION_RANGE)
        graph.node("Div", [clipped, graph.scalar(ACTION_RANGE)], output)

    def _discrete_to_onnx(self, graph: OnnxGraph, hidden: str) -> None:
        sizes = self.spec.discrete_branches
        # In Unity's masks 1 means allowed; in Python's `action_mask` True means forbidden.
        masks = graph.input("action_masks", (sum(sizes),))
        sampled, best = [], []
        start = 0
        for index, (branch, size) in enumerate(zip(self.branches, sizes, strict=True)):
            logits = graph.linear(branch, hidden, f"branch.{index}")
            mask = graph.node("Slice", [masks], axes=[1], starts=[start], ends=[start + size])
            start += size
            p = graph.node("Softmax", [masked_to_onnx(graph, logits, mask)], axis=1)
            # Multinomial takes logarithms of probabilities, which may be unnormalised:
            # https://onnx.ai/onnx/operators/onnx__Multinomial.html.
            log_p = graph.node("Log", [p])
            sampled.append(graph.node("Multinomial", [log_p], dtype=INT64, sample_size=1))
            best.append(graph.node("ArgMax", [p], axis=1, keepdims=1))
        graph.concat(sampled, "discrete_actions")
        graph.output("discrete_actions", np.int64, (len(sizes),))
        graph.constant_output("discrete_action_output_shape", [sizes])
        graph.concat(best, "deterministic_discrete_actions")
        graph.output("deterministic_discrete_actions", np.int64, (len(sizes),))


def masked_to_onnx(graph: OnnxGraph, logits: str, mask: str) -> str:
    """Add operators to the graph that lower the logits of forbidden choices.

    The result is logits · m - 1e8 · (1 - m), where the mask m is 0 for a forbidden choice.
    """
    # Arithmetic replaces the operator Where, because Unity is only sure to import the operators of
    # ML-Agents' own models.
    minus = graph.node("Mul", [mask, graph.scalar(-1.0)])
    forbidden = graph.node("Add", [minus, graph.scalar(1.0)])
    allowed = graph.node("Mul", [logits, mask])
    penalty = graph.node("Mul", [forbidden, graph.scalar(-FORBIDDEN)])
    return graph.node("Sub", [allowed, penalty])


class Actor(nn.Module):
    """The policy: a body, a recurrent layer if the settings have a memory, and action heads.

    It reads observations that are already normalised.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: NetworkSettings,
        heads: Callable[[int, ActionSpec], ActionHeads] = ActionHeads,
    ) -> None:
        super().__init__()
        self.body = ObservationEncoder(spec.observation_specs, settings)
        self.memory = memory_for(settings, self.body.output_size)
        self.output_size = (self.memory or self.body).output_size
        self.heads = heads(self.output_size, spec.action_spec)

    def forward(self, obs: Sequence[Tensor], sequences: SequenceState | None = None) -> Tensor:
        """Return hidden vectors [B, H]; a recurrent actor needs the `sequences` of the rows."""
        features: Tensor = self.body(obs)
        return features if self.memory is None else apply_memory(features, self.memory, sequences)

    def to_onnx(self, graph: OnnxGraph, obs: Iterable[str]) -> str:
        """Add the hidden vectors of one step to the ONNX graph; return the name of their tensor."""
        features = self.body.to_onnx(graph, obs)
        return features if self.memory is None else self.memory.to_onnx(graph, features)

    def step(self, obs: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden vectors [N, H] and new memory [N, M] for N agents with memory [N, M]."""
        return _recurrent(self.memory).step(self.body(obs), memory)


class Critic(nn.Module):
    """Estimates the state's value for each reward signal.

    The critic has its own body, or reads the actor's output if it shares the actor's body.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: NetworkSettings,
        signals: Sequence[str],
        *,
        shared: Actor | None = None,
    ) -> None:
        super().__init__()
        self.signals = tuple(signals)
        # With a shared body, `body` and `memory` are None, so that checkpoints do not have the
        # actor's weights twice.
        self.body = self.memory = None
        if shared is not None:
            width = shared.output_size
        else:
            self.body = ObservationEncoder(spec.observation_specs, settings)
            self.memory = memory_for(settings, self.body.output_size)
            width = (self.memory or self.body).output_size
        self.heads = signal_heads(width, len(self.signals))

    def forward(
        self, obs: Sequence[Tensor], hidden: Tensor, sequences: SequenceState | None = None
    ) -> Tensor:
        """Return values [B, signals].

        They are computed from `obs`, or from the actor's vectors `hidden` if the body is shared.
        """
        # A critic with a body encodes the observations itself, and ignores the actor's `hidden`.
        if self.body is not None:
            hidden = apply_memory(self.body(obs), self.memory, sequences)
        values: Tensor = self.heads(hidden)
        return values

    def step(self, obs: Sequence[Tensor], memory: Tensor) -> Tensor:
        """Return the new memory [N, M] of N agents; only for a critic with a recurrent layer."""
        body = self.body
        if body is None:
            raise ValueError("a critic that shares the actor's body has no memory of its own")
        return _recurrent(self.memory).step(body(obs), memory)[1]


def apply_memory(
    features: Tensor, memory: Memory | None, sequences: SequenceState | None
) -> Tensor:
    """Return features [B, F] after the recurrent layer, or unchanged if there is no such layer."""
    if memory is None:
        return features
    if sequences is None:
        raise ValueError("a recurrent network needs its sequences and their memories")
    remembered: Tensor = memory(features, sequences)
    return remembered


def _recurrent(memory: Memory | None) -> Memory:
    if memory is None:
        raise ValueError("the network has no recurrent layer")
    return memory
