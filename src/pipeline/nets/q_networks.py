"""Action-value networks of SAC."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.core.specs import BehaviorSpec
from pipeline.nets.actor_critic import apply_memory
from pipeline.nets.encoder import ObservationEncoder
from pipeline.nets.fast.pairs import DensePair, dense_pairs, paired_linear
from pipeline.nets.layers import signal_heads
from pipeline.nets.memory import SequenceState, memory_for
from pipeline.settings.trainer.schema import NetworkSettings


class QNetwork(nn.Module):
    """Action values Q(s, a) of each reward signal; with branches, a value for each choice."""

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, n_signals: int) -> None:
        super().__init__()
        actions = spec.action_spec
        self.n_signals = n_signals
        self.body = ObservationEncoder(
            spec.observation_specs, settings, n_actions=actions.continuous_size
        )
        self.memory = memory_for(settings, self.body.output_size)
        width = (self.memory or self.body).output_size
        self.n_outputs = sum(actions.discrete_branches) or 1
        self.heads = signal_heads(width, n_signals, self.n_outputs)

    def forward(
        self,
        encoded: tuple[Tensor, Tensor | None],
        continuous: Tensor,
        sequences: SequenceState | None,
    ) -> Tensor:
        """Return values [B, S, outputs] of each signal and choice.

        `encoded` are the results of `body.features`; `continuous` [B, A] are actions in -1..1.
        """
        joined, goal = encoded
        # Actions are joined after the encoders, so that images are encoded only once.
        hidden = self.body.head(torch.cat((joined, continuous), dim=1), goal)
        if self.memory is not None and sequences is not None:
            # Networks of action values begin each sequence with a memory of zeros.
            nothing = joined.new_zeros(len(sequences.lengths), self.memory.memory_size)
            sequences = SequenceState(memory=nothing, lengths=sequences.lengths)
        values: Tensor = self.heads(apply_memory(hidden, self.memory, sequences))
        return values.view(len(joined), self.n_signals, self.n_outputs)


class TwinQNetworks(nn.Module):
    """Two action-value networks with different initial weights; a target takes the smaller value.

    Source: Fujimoto et al. 2018, arXiv 1802.09477, section 4.2.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, n_signals: int) -> None:
        super().__init__()
        self.first = QNetwork(spec, settings, n_signals)
        self.second = QNetwork(spec, settings, n_signals)
        # The tuple hides the copy from torch, because its weights are the first network's weights
        # and would be listed twice.
        self._frozen = (copy.deepcopy(self.first).requires_grad_(False),)
        self._shared: tuple[DensePair, nn.Parameter, nn.Parameter] | None = None

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of both networks' parameters for `share_weights`; empty if none can be joined."""
        bodies = dense_pairs(self.first.body, self.second.body)
        if not bodies or self.first.memory is not None:
            return []
        heads = self.first.heads.parameters(), self.second.heads.parameters()
        return bodies + list(zip(*heads, strict=True))

    def share_weights(self, paired: Sequence[nn.Parameter]) -> None:
        """From now on use the parameters `paired`; call this after `FlatAdam` moved the weights.

        `paired` has each of `pairs` as one parameter [2, ...]. The frozen copy, which computes the
        values of fresh actions, then shares the weights of the first network.
        """
        if paired:
            *bodies, weight, bias = paired
            self._shared = DensePair(bodies, self.first.body.dense.activation), weight, bias
        pairs = zip(self._frozen[0].parameters(), self.first.parameters(), strict=True)
        for frozen, trained in pairs:
            # The copy's weights share the storage of the first network's weights, but get no
            # gradients.
            frozen.data = trained.data

    def forward(
        self,
        obs: Sequence[Tensor],
        *,
        taken: Tensor,
        fresh: Tensor | None,
        sequences: SequenceState | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return both networks' values of taken actions, and of fresh actions.

        Args:
            obs: [B, *shape] per observation, normalised.
            taken: [B, A] actions in -1..1, in training the actions that the replay buffer has.
            fresh: [B, A] other actions at the same observations; None for `taken`. Only the first
                network's values of fresh actions have a derivative, which is with respect to the
                actions.
            sequences: the sequences that the rows form; None without memory.
        """
        # Observations are encoded once for both actions, because encoding images is slow.
        first, second = self.first.body.features(obs), self.second.body.features(obs)
        if self._shared is None:
            pair = self.first(first, taken, sequences), self.second(second, taken, sequences)
            values = torch.stack(pair)
        else:
            bodies, weight, bias = self._shared
            hidden = bodies(torch.cat((first[0], taken), dim=1))
            flat = paired_linear(hidden, weight, bias)
            values = flat.view(2, -1, self.first.n_signals, self.first.n_outputs)
        if fresh is None:
            constant = values.detach()
            return values, (constant[0], constant[1])
        joined, goal = first
        # Features are detached: the policy's loss must not train an action value's encoder.
        goal = None if goal is None else goal.detach()
        fresh_values = self._frozen[0]((joined.detach(), goal), fresh, sequences)
        with torch.no_grad():
            return values, (fresh_values, self.second(second, fresh, sequences))


def taken_value(values: Tensor, discrete: Tensor, branches: Sequence[int]) -> Tensor:
    """Return the values [..., B, S] of the taken actions, means over branches.

    `values` [..., B, S, outputs] have one output, or one for each choice of each branch, and
    `discrete` are int64 [B, branches] choices.
    """
    if not branches:
        return values.squeeze(-1)
    # `first` has the number of each branch's first output in the row of all outputs.
    first = np.cumsum(branches) - np.asarray(branches)
    columns = discrete + torch.from_numpy(first).to(discrete.device)
    shape = (*values.shape[:-1], len(branches))
    return values.gather(-1, columns.unsqueeze(1).expand(shape)).mean(-1)
