"""What all algorithms do alike: decide, take observations in, and hand their state over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.algos.policy import rollout_fields, tensors
from pipeline.data.rollout import Field
from pipeline.nets.weights import load_matching

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipeline.algos.bc import BehavioralCloning
    from pipeline.algos.experience import LearnedRewards
    from pipeline.algos.policy import Decision, Policy
    from pipeline.algos.signals import RewardSignals
    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.nets.actor_critic import Critic
    from pipeline.nets.optimizer import FlatAdam
    from pipeline.protocol.specs import BehaviorSpec


class AlgorithmBase:
    """Holds no mathematics: what is learned, and how, stands in each algorithm's own file."""

    spec: BehaviorSpec
    device: torch.device
    policy: Policy
    signals: RewardSignals
    own_networks: Mapping[str, nn.Module]
    """All networks but those of reward signals, by the names that checkpoints use."""
    reader: Critic | None = None
    """A critic that has a memory of its own, and so sees whatever the policy decides on."""
    optimizer: FlatAdam
    action_stream: torch.Generator
    minibatch_stream: np.random.Generator
    sequence_length: int
    learned: LearnedRewards | None = None
    cloning: BehavioralCloning | None

    @property
    def memory_size(self) -> int:
        """Numbers that an agent remembers: the policy's, then those of a critic with its own."""
        own = None if self.reader is None else self.reader.memory
        return self.policy.memory_size + (0 if own is None else own.memory_size)

    @property
    def fields(self) -> dict[str, Field]:
        """What each row of experience holds."""
        fields = rollout_fields(self.spec)
        if self.memory_size:
            fields["memory"] = Field(shape=(self.memory_size,), every=self.sequence_length)
        return fields

    def act(
        self,
        obs: Sequence[FloatArray],
        mask: Sequence[BoolArray] | None,
        memory: FloatArray | None = None,
    ) -> Decision:
        """Decide for N agents, see `Policy.act`; a critic with memory of its own reads on."""
        if memory is None:
            return self.policy.act(obs, mask, self.action_stream)
        n = self.policy.memory_size
        decision = self.policy.act(obs, mask, self.action_stream, memory[:, :n])
        later = decision.memory
        if self.reader is not None and self.reader.memory is not None and later is not None:
            with torch.inference_mode():
                inputs = self.policy.normalizers(tensors(obs, self.device))
                own = self.reader.step(inputs, tensors([memory[:, n:]], self.device)[0])
            later = np.concatenate((later, own.cpu().numpy()), axis=1)
        return replace(decision, rows={**decision.rows, "memory": memory}, memory=later)

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Take the observations [B, *shape] of closed trajectories into the normalisers."""
        if self.policy.normalizers or self.signals.learning:
            rows = tensors(obs, self.device)
            self.policy.normalizers.update(rows)
            self.signals.observe(rows)

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues training but for experience, as tensors and plain values."""
        return {
            **{name: network.state_dict() for name, network in self.own_networks.items()},
            "optimizer": self.optimizer.state_dict(),
            "action_stream": self.action_stream.get_state(),
            "minibatch_stream": self.minibatch_stream.bit_generator.state,
            "cloning": None if self.cloning is None else self.cloning.state_dict(),
            "signals": self.signals.state_dict(),
            "learned": None if self.learned is None else self.learned.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        for name, network in self.own_networks.items():
            network.load_state_dict(state[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.action_stream.set_state(state["action_stream"])
        self.minibatch_stream.bit_generator.state = state["minibatch_stream"]
        if self.cloning is not None and state["cloning"] is not None:
            self.cloning.load_state_dict(state["cloning"])
        if self.signals.learning:  # files of before there were such signals have none
            self.signals.load_state_dict(state["signals"])
        if self.learned is not None:
            self.learned.load_state_dict(state["learned"])

    @property
    def networks(self) -> dict[str, nn.Module]:
        """All networks, by the names that checkpoints use."""
        return {**self.own_networks, **self.signals.modules}

    def weights(self) -> dict[str, Any]:
        """Copies of the networks' weights, for `load_weights`."""
        return {
            name: {key: value.clone() for key, value in network.state_dict().items()}
            for name, network in self.networks.items()
        }

    def load_weights(self, state: dict[str, Any]) -> tuple[list[str], int]:
        """Take over what fits of another run's policy and, where it has them, other networks.

        Returns:
            What was not loaded, with reasons, and how many tensors were.
        """
        return load_matching(self.networks, state)
