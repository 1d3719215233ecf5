"""The interface between trainer and algorithms, and the code that all algorithms share."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import seeding
from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.policy import Decision, Policy, generator_for, restore_generator, rollout_fields
from pipeline.algos.process_group import SINGLE_PROCESS, ProcessGroup
from pipeline.algos.reward_signals import IntrinsicRewards, RewardSignals
from pipeline.algos.rows import tensors
from pipeline.algos.schedules import completed
from pipeline.core.arrays import BoolArray, FloatArray
from pipeline.core.specs import BehaviorSpec
from pipeline.data.columns import Columns, Field
from pipeline.data.replay import Replay
from pipeline.data.rollout import Rollout
from pipeline.errors import TrainingError
from pipeline.nets.actor_critic import Critic
from pipeline.nets.fast.adam import FlatAdam
from pipeline.settings.trainer.schema import (
    HyperparameterSettings,
    NetworkSettings,
    TrainerSettings,
)


class Algorithm(ABC):
    """Chooses actions, decides when there is enough experience for an update, and learns.

    The losses, networks and optimizer are in each algorithm's own file. Initial weights, actions,
    noise and minibatches are drawn from four separate random streams.
    """

    settings_class: ClassVar[type[HyperparameterSettings]] = HyperparameterSettings
    """Class of the hyperparameters of an algorithm that `trainer_type: module:Class` names."""
    squashed: ClassVar[bool] = False
    """Whether a tanh squashes the policy's continuous actions."""
    schedules: ClassVar[tuple[str, ...]] = ()
    """Names of settings for which `set_values` may have a value; each update reads `set_values`."""
    policy: Policy
    own_networks: Mapping[str, nn.Module]
    """All networks except the networks of reward signals, by the names that checkpoints use.

    Updates change the weights in place and never replace a tensor: the setting `threaded` relies on
    this.
    """
    optimizer: FlatAdam
    bc: BehavioralCloning | None
    """The auxiliary loss of the `behavioral_cloning` settings; None without these settings."""
    recurrent_critic: Critic | None = None
    """A critic with a memory, which `act` updates at every observation; otherwise None."""
    intrinsic: IntrinsicRewards | None = None
    """Reward signals that learn from rollouts; None if no signal does, or with a replay buffer."""
    replay: Replay | None = None
    """The replay buffer of an off-policy algorithm; None for other algorithms."""

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.device = device
        self.processes: ProcessGroup = SINGLE_PROCESS
        """The processes that learn together; see `learn_with`."""
        self.set_values: Mapping[str, float] = {}
        """Values for the present update, by setting; they replace the scheduled values."""
        self.signals = RewardSignals(spec, settings, seed=seed, device=device)
        # Actions and minibatches have separate random streams, so that drawing a minibatch does not
        # change later actions.
        self.action_stream = generator_for(seed, device, "actions")
        self.minibatch_stream = seeding.stream(seed, "minibatches")
        memory = settings.network_settings.memory
        # Without memory every row is a sequence of its own.
        self.sequence_length = 1 if memory is None else memory.sequence_length

    @classmethod
    def policy_for(cls, spec: BehaviorSpec, network: NetworkSettings) -> Policy:
        """Return a new policy of this algorithm, into which weights can be loaded."""
        return Policy(spec, network, squash=cls.squashed)

    @property
    def trained_policy(self) -> Policy:
        """The policy that updates change; in most algorithms it is also the acting policy."""
        return self.policy

    @abstractmethod
    def ready(self, n_rows: int) -> bool:
        """Return whether `n_rows` rows of closed trajectories are enough to call `update`."""

    def update(self, rollout: Rollout, *, step: int) -> dict[str, float]:
        """Learn from a rollout; an algorithm overrides this method, `update_in_parts`, or both.

        Args:
            rollout: closed trajectories.
            step: number of agent steps so far, for the schedules.

        Returns:
            Statistics by their TensorBoard tag; empty if no gradient step was made.

        Raises:
            TrainingError: A loss, a gradient or a weight is not finite.
        """
        return completed(self.update_in_parts(rollout, step=step))

    def update_in_parts(
        self, rollout: Rollout, *, step: int
    ) -> Generator[int, None, dict[str, float]]:
        """Learn as `update` does, but pause before each gradient step, or at least once.

        During each pause the agents act with a copy of the policy. The arrays of `rollout` must not
        change until the generator ends.

        Yields:
            The approximate number of remaining gradient steps.
        """
        yield 1
        return self.update(rollout, step=step)

    def refuse_divergence(self, losses: Mapping[str, float], *, step: int) -> None:
        """Check once per update that the mean losses, gradients and weights are finite.

        The weights also show a gradient that was not finite in an earlier minibatch.

        Raises:
            TrainingError: A number is not finite.
        """
        at = f"step {step}: the {type(self).__name__}"
        # If a loss is not finite, neither is the sum of all losses.
        if not math.isfinite(sum(losses.values())):
            values = ", ".join(f"{name} {value}" for name, value in losses.items())
            raise TrainingError(
                f"{at} loss is not finite ({values}); lower learning_rate or the reward's scale"
            )
        for optimizer in self.own_optimizers:
            # The gradients have no entry for parameters that this optimizer does not train.
            checked = {"gradient": optimizer.gradient, "weight": optimizer.flat}
            for kind, flat in checked.items():
                # A number that is not finite makes the sum not finite, and adding up is faster than
                # `isfinite`, which only has to look again because a sum may overflow.
                if math.isfinite(flat.detach().sum()) or flat.isfinite().all():
                    continue
                gradients = dict(optimizer.gradients)
                tensors_by_name = (
                    (f"{name}.{part}", gradients.get(weight) if kind == "gradient" else weight)
                    for name, network in self.own_networks.items()
                    for part, weight in network.named_parameters()
                )
                broken = (n for n, x in tensors_by_name if x is not None and not x.isfinite().all())
                raise TrainingError(
                    f"{at} {kind} of {next(broken, 'an unnamed tensor')} is not finite; lower "
                    "learning_rate, or set max_grad_norm"
                )

    @property
    def memory_size(self) -> int:
        """Size of an agent's memory vector: the policy's part and the recurrent critic's part."""
        memory = None if self.recurrent_critic is None else self.recurrent_critic.memory
        return self.policy.memory_size + (0 if memory is None else memory.memory_size)

    @property
    def columns(self) -> Columns[Field]:
        """Columns that store experience: one for each field, and one for each observation."""
        obs = [Field(shape=tuple(obs.shape)) for obs in self.spec.observation_specs]
        return Columns(self.fields, obs)

    @property
    def fields(self) -> dict[str, Field]:
        """Shape and dtype of each stored column by name, except the observations and the reward."""
        fields = rollout_fields(self.spec)
        if self.memory_size:
            # The memory is stored once per sequence instead of once per row: training begins each
            # sequence with its stored memory and computes the memories of later rows.
            fields["memory"] = Field(shape=(self.memory_size,), every=self.sequence_length)
        return fields

    @property
    def member_fields(self) -> dict[str, Field]:
        """Fields that are stored for each group member; empty if the algorithm ignores groups.

        A member's observations are stored as well.
        """
        return {}

    def act(
        self,
        obs: Sequence[FloatArray],
        mask: Sequence[BoolArray] | None,
        memory: FloatArray | None = None,
    ) -> Decision:
        """Choose actions for N agents by `Policy.act`, and advance a recurrent critic's memory."""
        if memory is None:
            return self.policy.act(obs, mask, self.action_stream)
        # The memory [N, M] has the policy's part, then the critic's part; see `memory_size`.
        n = self.policy.memory_size
        decision = self.policy.act(obs, mask, self.action_stream, memory[:, :n])
        later = decision.memory
        critic = self.recurrent_critic
        if critic is not None and critic.memory is not None and later is not None:
            with torch.inference_mode():
                inputs = self.policy.normalizers(tensors(obs, self.device))
                critic_memory = critic.step(inputs, tensors([memory[:, n:]], self.device)[0])
            # The caller stores one array [N, M]: the policy's memory, then the critic's memory.
            later = np.concatenate((later, critic_memory.cpu().numpy()), axis=1)
        return replace(decision, rows={**decision.rows, "memory": memory}, memory=later)

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Update the normalisers of the policy and of the reward signals.

        `obs` are the observations [B, *shape] of closed trajectories.
        """
        # Observations are copied to the device only if normalisers read them, or reward signals
        # other than the environment's reward.
        if self.policy.normalizers or self.signals.learning:
            rows = tensors(obs, self.device)
            self.policy.normalizers.update(rows)
            self.signals.observe(rows)

    @property
    def own_optimizers(self) -> list[FlatAdam]:
        """Optimizers of the algorithm's own networks."""
        return [self.optimizer]

    @property
    def optimizers(self) -> list[FlatAdam]:
        """Optimizers of the algorithm and its reward signals, but not of behavioral cloning."""
        of_signals = (signal.optimizer for signal in self.signals.by_name.values())
        return [*self.own_optimizers, *filter(None, of_signals)]

    def learn_with(self, processes: ProcessGroup) -> None:
        """Average gradients over the processes of `processes` in all later gradient steps."""
        self.processes = processes
        for optimizer in self.optimizers:
            optimizer.average = processes.average_gradients_

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """The algorithm's own torch generators, by name."""
        return {"action_stream": self.action_stream}

    def compile(self) -> None:
        """Compile the gradient steps of all later updates, if a compiler is installed."""
        # The import is here and not at the top of the module, because it takes a second.
        from pipeline.nets.fast.compiled import compile_steps

        compile_steps(self.own_optimizers, self.own_networks.values())

    def copy_for_acting(self) -> Algorithm:
        """Return a copy with its own acting networks, which acts while this algorithm learns."""
        # A shallow copy shares the random streams, so that the actions after an update continue the
        # streams of the actions during the update.
        acting = copy.copy(self)
        needed = (self.policy, self.recurrent_critic)
        names = [name for name, network in self.own_networks.items() if network in needed]
        # All networks are copied by one call of `deepcopy`, so that a critic which shares the
        # policy's encoder also shares it in the copy.
        acting.policy, acting.recurrent_critic, acting.own_networks = copy.deepcopy(
            (*needed, {name: self.own_networks[name] for name in names})
        )
        return acting

    @property
    def networks(self) -> dict[str, nn.Module]:
        """All networks, by the names that checkpoints use."""
        return {**self.own_networks, **self.signals.modules}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training, without experience, as tensors and plain values."""
        return {
            **{name: network.state_dict() for name, network in self.own_networks.items()},
            "optimizer": self.optimizer.state_dict(),
            "action_stream": self.action_stream.get_state(),
            # A resumed run must draw the same minibatches as an uninterrupted run.
            "minibatch_stream": self.minibatch_stream.bit_generator.state,
            "cloning": None if self.bc is None else self.bc.state_dict(),
            "signals": self.signals.state_dict(),
            "learned": None if self.intrinsic is None else self.intrinsic.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for name, network in self.own_networks.items():
            # Loading is strict: a run must not resume from a checkpoint with missing or unknown
            # weights.
            network.load_state_dict(state[name])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_generator(self.action_stream, state["action_stream"])
        self.minibatch_stream.bit_generator.state = state["minibatch_stream"]
        if self.bc is not None and state["cloning"] is not None:
            self.bc.load_state_dict(state["cloning"])
        # Checkpoints of early versions have no key `signals`: the environment's reward was the only
        # reward signal.
        if self.signals.learning:
            self.signals.load_state_dict(state["signals"])
        if self.intrinsic is not None:
            self.intrinsic.load_state_dict(state["learned"])

    def weights(self) -> dict[str, Any]:
        """Return copies of the networks' weights, for `load_weights`."""
        return {
            name: {key: value.clone() for key, value in network.state_dict().items()}
            for name, network in self.networks.items()
        }

    def load_weights(self, state: dict[str, Any]) -> tuple[list[str], int]:
        """Load the weights of another run into all networks, where names and shapes are equal.

        The result has the names of the tensors that were not loaded, with reasons, and the number
        of loaded tensors.
        """
        return load_matching(self.networks, state)


def load_matching(
    networks: Mapping[str, nn.Module], saved: Mapping[str, Mapping[str, Tensor] | None]
) -> tuple[list[str], int]:
    """Copy saved tensors into the networks' tensors that have the same name and shape.

    `saved` has the `state_dict` of each network of another run; a network that is missing or None
    in `saved` is not changed. The result is that of `Algorithm.load_weights`.
    """
    skipped: list[str] = []
    n_loaded = 0
    for network_name, network in networks.items():
        saved_weights = saved.get(network_name)
        if saved_weights is None:
            continue
        weights = network.state_dict()
        fitting = {}
        for name, tensor in weights.items():
            if name not in saved_weights:
                skipped.append(f"{network_name}.{name} (not in the checkpoint)")
            elif saved_weights[name].shape != tensor.shape:
                shapes = f"{_shape(saved_weights[name])} saved, {_shape(tensor)} in this run"
                skipped.append(f"{network_name}.{name} ({shapes})")
            else:
                fitting[name] = saved_weights[name]
        skipped += [
            f"{network_name}.{name} (not in this run)"
            for name in saved_weights
            if name not in weights
        ]
        # Loading is not strict, because `fitting` lacks the tensors that do not fit; `skipped`
        # names these to the user.
        network.load_state_dict(fitting, strict=False)
        n_loaded += len(fitting)
    return skipped, n_loaded


def _shape(tensor: Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape) or "a number"
