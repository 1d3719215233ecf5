"""The acting policy and the form of its decisions, which all algorithms share."""

from __future__ import annotations

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
"""Sizes of a CUDA generator's state and of a CPU generator's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decisions for N agents."""

    action: ActionTuple
    """For the environment, continuous parts in -1..1."""
    rows: Mapping[str, AnyArray]
    """[N, ...] what learning needs to remember beside the observations, by field name."""
    entropy: float
    """Mean entropy of the policy at these observations."""
    memory: FloatArray | None = None
    """[N, M] what the agents remember from now on; None without memory."""


class Policy(nn.Module):
    """Normalisers and actor: everything that acting, and exporting, needs.

    With `squash` continuous actions are squashed, as SAC's are. `heads` makes other action heads
    than the usual ones, of hidden size and action specification.
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
        if NumpyActor.fits(self.actor):
            self.numpy_actor = NumpyActor(self.normalizers, self.actor)

    @property
    def memory_size(self) -> int:
        """Numbers that an agent remembers; 0 without a recurrent layer."""
        return 0 if self.actor.memory is None else self.actor.memory.memory_size

    def after_step(self) -> None:
        """Do what is due when an optimizer has moved the weights: nothing in most policies."""

    def act(
        self,
        obs: Sequence[FloatArray],
        action_mask: Sequence[BoolArray] | None,
        generator: torch.Generator,
        memory: FloatArray | None = None,
        noise: FloatArray | None = None,
    ) -> Decision:
        """Decide for N agents.

        Args:
            obs: [N, *shape] per observation.
            action_mask: bool [N, branch] per branch, True where forbidden; None allows everything.
            generator: the stream that actions are drawn from.
            memory: [N, M] what the agents remember, zeros at the start of an episode; None without
                a recurrent layer.
            noise: [N, A] standard normal numbers for continuous actions, in place of new ones.

        Raises:
            UnityPolicyException: An observation or the network's output is not finite.
        """
        n, device, in_numpy = len(obs[0]), generator.device, self.numpy_actor
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
        # As drawn, before clipping: the log probability is of this number.
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
        """Return the chosen actions, and the agents' new memory."""
        heads, device = self.actor.heads, next(self.parameters()).device
        noise = None if generator is None else heads.noise(len(obs[0]), generator)
        if noise is not None and held is not None:
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
    """The fields of `Decision.rows`, with their shapes and types."""
    actions = spec.action_spec
    fields = {"log_prob": Field(shape=(actions.continuous_size + actions.discrete_size,))}
    fields["continuous"] = Field(shape=(actions.continuous_size,))
    fields["discrete"] = Field(shape=(actions.discrete_size,), dtype=np.int64)
    if actions.discrete_size:
        fields["allowed"] = Field(shape=(sum(actions.discrete_branches),), dtype=np.bool_)
    return fields


@contextmanager
def seeded_weights(seed: int, *names: str) -> Iterator[None]:
    """Context in which new layers draw their weights from the stream called `names`."""
    # Layers draw from torch's global generator; the fork puts it back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.derive(seed, "weights", *names))
        yield


def generator_for(seed: int, device: torch.device, *names: str) -> torch.Generator:
    """A torch generator for the stream called `names`."""
    return torch.Generator(device=device).manual_seed(seeding.derive(seed, *names))


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Let a stream go on from its saved state.

    A GPU's generator cannot take the state of a CPU's, nor a CPU's that of a GPU. There the stream
    begins at a seed that the state decides.

    Args:
        generator: of the stream.
        state: [bytes] uint8, on any device, from a generator's `get_state`.

    Raises:
        RuntimeError: It is no generator's state.
    """
    state = state.cpu()
    n_bytes = {len(state), len(generator.get_state())}
    if n_bytes != _STATE_BYTES:
        generator.set_state(state)
    else:
        generator.manual_seed(seeding.derive(0, state.numpy().tobytes().hex()))
