"""Describe a trained torch policy for the exporter, and record what it would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algos.policy import tensors
from pipeline.export.description import (
    Attention,
    ContinuousHead,
    Conv,
    Dense,
    EntityEmbedding,
    HyperLayer,
    Lstm,
    Normalizer,
    PolicyGraph,
    convolutional_encoder,
    resnet_encoder,
)
from pipeline.export.publish import Recording
from pipeline.nets.attention import N_HEADS
from pipeline.nets.layers import RunningNormalizer
from pipeline.nets.squashed import SquashedHeads
from pipeline.nets.vision import ConvolutionEncoder, ResidualBlock, ResnetEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from pipeline.algos.policy import Policy
    from pipeline.arrays import FloatArray
    from pipeline.export.description import ObservationEncoder, VisualEncoder
    from pipeline.nets import body
    from pipeline.nets.attention import EntityEncoder
    from pipeline.nets.memory import Memory


def describe_policy(policy: Policy) -> PolicyGraph:
    """The policy's weights and normalisers as plain arrays, copied."""
    actor = policy.actor
    hyper, attention = actor.body.hyper, actor.body.attention
    heads = actor.heads
    continuous = None
    if heads.mu is not None and isinstance(heads, SquashedHeads) and heads.spread is not None:
        continuous = ContinuousHead(
            mu=_dense(heads.mu), log_sigma=_dense(heads.spread), squash=True
        )
    elif heads.mu is not None and heads.log_sigma is not None:
        log_sigma = _array(heads.log_sigma).reshape(-1)
        continuous = ContinuousHead(mu=_dense(heads.mu), log_sigma=log_sigma, squash=False)
    return PolicyGraph(
        spec=policy.spec,
        encoders=tuple(_encoder(policy, i) for i in range(len(policy.spec.observation_specs))),
        layers=tuple(_dense(layer) for layer in actor.body.dense.layers),
        attention=None if attention is None else _attention(attention),
        hyper=None if hyper is None else _hyper(hyper),
        memory=None if actor.memory is None else _lstm(actor.memory),
        continuous=continuous,
        branches=tuple(_dense(branch) for branch in heads.branches),
    )


@torch.no_grad()
def record(
    policy: Policy, obs: Sequence[FloatArray], action_masks: FloatArray | None = None
) -> Recording:
    """What the policy does, deterministically, on given observations.

    With memory the observations are taken as the successive ones of one agent that begins anew.

    Args:
        policy: on the CPU.
        obs: [N, *shape] per observation.
        action_masks: [N, sum of branch sizes], 1 = allowed; None allows everything.
    """
    inputs = policy.normalizers(tensors(obs, torch.device("cpu")))
    memory = None
    if policy.memory_size:
        hidden, memory = _carried(policy, inputs)
    else:
        hidden = policy.actor(inputs)
    allowed = None if action_masks is None else torch.from_numpy(action_masks > 0)
    sample = policy.actor.heads.sample(hidden, allowed, torch.Generator(), deterministic=True)
    actions = policy.spec.action_spec
    continuous = policy.actor.heads.to_environment(sample.continuous)
    return Recording(
        obs=obs,
        continuous=continuous.numpy() if actions.continuous_size else None,
        discrete=sample.discrete.numpy().astype(np.int32) if actions.discrete_size else None,
        action_masks=action_masks,
        memory=None if memory is None else memory.numpy(),
    )


def _carried(policy: Policy, obs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden vectors [N, H] and memories [N + 1, M] of one agent's N steps, taken one by one."""
    memory = torch.zeros(1, policy.memory_size)
    outputs, memories = [], [memory]
    for row in range(len(obs[0])):
        hidden, memory = policy.actor.step([values[row : row + 1] for values in obs], memory)
        outputs.append(hidden)
        memories.append(memory)
    return torch.cat(outputs), torch.cat(memories)


def _encoder(policy: Policy, index: int) -> ObservationEncoder:
    key = str(index)
    body = policy.actor.body
    if body.attention is not None and index in body.entities:
        layer = body.attention.embeddings[body.entities.index(index)]
        return EntityEmbedding(dense=_dense(layer))
    if key in body.encoders:
        return _visual(body.encoders[key])
    if key not in policy.normalizers.by_observation:
        return None
    normalizer = policy.normalizers.by_observation[key]
    if not isinstance(normalizer, RunningNormalizer):
        raise TypeError(f"obs_{index} has a normaliser of type {type(normalizer).__name__}")
    mean, std = normalizer.statistics()
    return Normalizer(mean=_array(mean), std=_array(std))


def _visual(encoder: nn.Module) -> VisualEncoder:
    if isinstance(encoder, ConvolutionEncoder):
        convolutions = tuple(_conv(layer) for layer in encoder.convolutions)
        return convolutional_encoder(convolutions, _dense(encoder.dense))
    if not isinstance(encoder, ResnetEncoder):
        raise TypeError(f"visual encoder of type {type(encoder).__name__} has no description")
    blocks = [
        (_conv(block.first), _conv(block.second))
        for block in encoder.blocks
        if isinstance(block, ResidualBlock)
    ]
    stacks = tuple(
        (_conv(convolution), tuple(blocks[2 * stage : 2 * stage + 2]))
        for stage, convolution in enumerate(encoder.convolutions)
    )
    return resnet_encoder(stacks, _dense(encoder.dense))


def _attention(encoder: EntityEncoder) -> Attention:
    attention = encoder.attention
    return Attention(
        own=None if encoder.own is None else _dense(encoder.own),
        query=_dense(attention.query),
        key=_dense(attention.key),
        value=_dense(attention.value),
        out=_dense(attention.out),
        n_heads=N_HEADS,
    )


def _hyper(layer: body.HyperLayer) -> HyperLayer:
    return HyperLayer(
        encoder=tuple(_dense(dense) for dense in layer.goal.layers),
        generator=_dense(layer.weights),
        bias=_array(layer.bias),
        layout="in_out",
    )


def _lstm(memory: Memory) -> Lstm:
    lstm = memory.lstm.state_dict()
    return Lstm(
        input_weight=_array(lstm["weight_ih_l0"]),
        recurrent_weight=_array(lstm["weight_hh_l0"]),
        input_bias=_array(lstm["bias_ih_l0"]),
        recurrent_bias=_array(lstm["bias_hh_l0"]),
    )


def _dense(layer: nn.Module) -> Dense:
    if not isinstance(layer, torch.nn.Linear):
        raise TypeError(f"expected a dense layer, found {type(layer).__name__}")
    return Dense(weight=_array(layer.weight), bias=_array(layer.bias))


def _conv(layer: nn.Module) -> Conv:
    if not isinstance(layer, torch.nn.Conv2d):
        raise TypeError(f"expected a convolution, found {type(layer).__name__}")
    bias = torch.zeros(layer.out_channels) if layer.bias is None else layer.bias
    return Conv(
        weight=_array(layer.weight),
        bias=_array(bias),
        stride=layer.stride[0],
        padding=int(layer.padding[0]),
    )


def _array(tensor: Tensor) -> FloatArray:
    """A float32 copy on the CPU."""
    return tensor.detach().cpu().to(torch.float32).numpy().copy()
