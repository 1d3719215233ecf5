"""The acting policy and the form of its decisions, which all algorithms share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import seeding
from pipeline.algos.finite_checks import refuse_non_finite_decision
from pipeline.algos.rows import tensors
from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.data.columns import Field
from pipeline.nets.actor_critic import ActionHeads, Actor, Sample
from pipeline.nets.encoder import Normalizers
from pipeline.nets.fast.numpy_actor import MOST_AGENTS, NumpyActor
from pipeline.nets.squashed import SquashedHeads
from pipeline.settings.trainer.schema import NetworkSettings

_STATE_BYTES = {16, 5056}
"""Sizes in bytes of the state of a CUDA generator, and of a CPU generator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decisions for N agents."""

    action: ActionTuple
    """Action for the environment; continuous actions are in -1..1."""
    rows: Mapping[str, AnyArray]
    """[N, ...] columns that are stored for learning besides the observations, by field name."""
    entropy: float
    """Mean entropy of the policy's distributions at the agents' observations."""
    memory: FloatArray | None = None
    """[N, M] memory of the agents after the decision; None without memory."""


class Policy(nn.Module):
    """Normalisers and actor: the networks that acting and exporting need.

    With `squash` a tanh squashes continuous actions, as in SAC. `heads` is a function that returns
    the action heads for a hidden size and an action specification; by default they are Gaussian and
    categorical.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: NetworkSettings,
        *,
        squash: bool = False,
        heads: Callable[[int, ActionSpec], ActionHeads] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.settings = settings
        self.normalizers = Normalizers(spec.observation_specs, enabled=settings.normalize)
        self.actor = Actor(spec, settings, heads or (SquashedHeads if squash else ActionHeads))
        self.numpy_actor = None
        # For few agents NumPy is faster, because most of torch's time is spent on function calls.
        if NumpyActor.fits(self.actor):
            self.numpy_actor = NumpyActor(self.normalizers, self.actor)

    @property
    def memory_size(self) -> int:
        """Size of an agent's memory; 0 without a recurrent layer."""
        return 0 if self.actor.memory is None else self.actor.memory.memory_size

    def after_step(self) -> None:
        """Called after each optimizer step; most policies do nothing."""

    def act(
        self,
        obs: Sequence[FloatArray],
        action_mask: Sequence[BoolArray] | None,
        generator: torch.Generator,
        memory: FloatArray | None = None,
        noise: FloatArray | None = None,
    ) -> Decision:
        """Choose actions for N agents, and compute their new memory.

        Args:
            obs: [N, *shape] per observation.
            action_mask: bool [N, branch size] per branch, True where a choice is forbidden; None if
                every choice is allowed.
            generator: random stream that actions are drawn from.
            memory: [N, M] memory of the agents, zeros at the start of an episode; None without a
                recurrent layer.
            noise: [N, A] standard normal numbers for continuous actions; None draws new numbers.

        Raises:
            UnityPolicyException: An observation or the network's output is not finite.
        """
        n, device, in_numpy = len(obs[0]), generator.device, self.numpy_actor
        # Networks and losses have True where a choice is allowed, but `action_mask` has True where
        # a choice is forbidden.
        allowed = None if action_mask is None else ~np.concatenate(action_mask, axis=1)
        drawing = None if self.settings.deterministic else generator
        remembered: FloatArray | None = None
        if in_numpy is not None and n <= MOST_AGENTS and device.type == "cpu":
            sample = in_numpy(obs, allowed, drawing, noise)
        else:
            sample, remembered = self._in_torch(obs, allowed, drawing, memory, noise)
        _, _, discrete, log_prob, entropy = sample
        refuse_non_finite_decision(obs=obs, continuous=sample.continuous, log_prob=log_prob)
        rows: dict[str, AnyArray] = {"log_prob": log_prob}
        # Actions are stored as they were drawn, before clipping, because `log_prob` is the log
        # probability of the drawn numbers.
        rows["continuous"] = sample.continuous
        rows["discrete"] = discrete
        if self.spec.action_spec.discrete_branches:
            rows["allowed"] = True if allowed is None else allowed  # type: ignore[assignment]  # a scalar fills the field
        return Decision(
            action=ActionTuple(sample.in_range, discrete),
            rows=rows,
            entropy=float(entropy.item() if entropy.size == 1 else entropy.mean()),
            memory=remembered,
        )

    @torch.inference_mode()
    def _in_torch(
        self,
        obs: Sequence[FloatArray],
        allowed: BoolArray | None,
        generator: torch.Generator | None,
        memory: FloatArray | None,
        held: FloatArray | None,
    ) -> tuple[Sample[AnyArray], FloatArray | None]:
        heads, device = self.actor.heads, next(self.parameters()).device
        noise = None if generator is None else heads.noise(len(obs[0]), generator)
        if noise is not None and held is not None:
            # The first tensor of `noise` is for continuous actions; see `ActionHeads.noise`.
            noise[0] = torch.from_numpy(held).to(device)
        inputs = self.normalizers(tensors(obs, device))
        if memory is None:
            hidden, remembered = self.actor(inputs), None
        else:
            hidden, later = self.actor.step(inputs, tensors([memory], device)[0])
            remembered = later.cpu().numpy()
        mask = None if allowed is None else torch.from_numpy(allowed).to(device)
        sample = heads.choose(hidden, mask, noise)
        return Sample(*(tensor.cpu().numpy() for tensor in sample)), remembered


def rollout_fields(spec: BehaviorSpec) -> dict[str, Field]:
    """Return the fields of `Decision.rows`, with their shapes and dtypes."""
    actions = spec.action_spec
    fields = {"log_prob": Field(shape=(actions.continuous_size + actions.discrete_size,))}
    fields["continuous"] = Field(shape=(actions.continuous_size,))
    fields["discrete"] = Field(shape=(actions.discrete_size,), dtype=np.int64)
    if actions.discrete_size:
        fields["allowed"] = Field(shape=(sum(actions.discrete_branches),), dtype=np.bool_)
    return fields


@contextmanager
def seeded_weights(seed: int, *names: str) -> Iterator[None]:
    """Draw the initial weights of layers that are made in this context from a stream of their own.

    `seed` and `names` determine the stream.
    """
    # Layers draw from torch's global generator, so its earlier state is restored afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.derive(seed, "weights", *names))
        yield


def generator_for(seed: int, device: torch.device, *names: str) -> torch.Generator:
    """Return a torch generator whose seed is derived from `seed` and the stream's `names`."""
    return torch.Generator(device=device).manual_seed(seeding.derive(seed, *names))


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Continue a random stream from its saved state, [bytes] uint8 on any device.

    A generator on a GPU cannot load the state of a generator on a CPU, nor the other way round. The
    stream then begins at a seed that is derived from the state.

    Raises:
        RuntimeError: The state is not a generator's state.
    """
    state = state.cpu()
    # If the two states have the sizes in _STATE_BYTES, one is of a CPU and the other of a GPU, and
    # the generator gets a seed derived from the state. torch refuses every other state of a wrong
    # size.
    n_bytes = {len(state), len(generator.get_state())}
    if n_bytes != _STATE_BYTES:
        generator.set_state(state)
    else:
        generator.manual_seed(seeding.derive(0, state.numpy().tobytes().hex()))
