"""Describe a torch policy as the plain arrays that the exporter writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ExportError
from pipeline.export.description import (
    ContinuousHead,
    Conv,
    Dense,
    HyperLayer,
    Normalizer,
    PolicyGraph,
    VisualEncoder,
    convolutional_encoder,
    resnet_encoder,
)
from pipeline.export.publish import Recording
from pipeline.nets.distributions import to_environment
from pipeline.nets.vision import ConvolutionEncoder, ResnetEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.algos.policy import Policy
    from pipeline.arrays import FloatArray
    from pipeline.export.description import ObservationEncoder
    from pipeline.nets.body import Body
    from pipeline.nets.layers import RunningNormalizer


def policy_graph(policy: Policy) -> PolicyGraph:
    """The policy's networks and statistics as arrays.

    Raises:
        ExportError: A part of the policy has no ONNX form.
    """
    body, heads = policy.actor.body, policy.actor.heads
    normalizers: Mapping[str, RunningNormalizer] = dict(
        policy.normalizers.by_observation.items()  # type: ignore[arg-type]  # ModuleDict loses the type
    )
    encoders = tuple(
        _visual(body.encoders[str(i)])
        if str(i) in body.encoders
        else _normalizer(normalizers.get(str(i)))
        for i in range(len(policy.spec.observation_specs))
    )
    continuous = None
    if heads.mu is not None and heads.log_sigma is not None:
        continuous = ContinuousHead(
            mu=_dense(heads.mu), log_sigma=_array(heads.log_sigma).reshape(-1), squash=False
        )
    return PolicyGraph(
        spec=policy.spec,
        encoders=encoders,
        layers=tuple(_dense(layer) for layer in body.dense.layers),
        hyper=_hyper(body),
        continuous=continuous,
        branches=tuple(_dense(branch) for branch in heads.branches),
    )


@torch.no_grad()
def recording(policy: Policy, obs: Sequence[Tensor], allowed: Tensor | None) -> Recording:
    """What the policy would do, deterministically, at observations [R, *shape] that it has met."""
    heads = policy.actor.heads
    hidden = policy.actor(policy.normalizers(obs))
    branches = heads.branch_log_probs(hidden, allowed)
    chosen = torch.stack([branch.argmax(-1) for branch in branches], 1) if branches else None
    return Recording(
        obs=[_array(values) for values in obs],
        continuous=None if heads.mu is None else _array(to_environment(heads.mu(hidden))),
        discrete=None if chosen is None else chosen.to(torch.int32).numpy(),
        action_masks=None if allowed is None else _array(allowed.to(torch.float32)),
    )


def _normalizer(normalizer: RunningNormalizer | None) -> ObservationEncoder:
    if normalizer is None:
        return None
    mean, deviation = normalizer.statistics()
    return Normalizer(mean=_array(mean), std=_array(deviation))


def _visual(encoder: Any) -> VisualEncoder:
    if isinstance(encoder, ConvolutionEncoder):
        return convolutional_encoder(
            tuple(_conv(layer) for layer in encoder.convolutions), _dense(encoder.dense)
        )
    if isinstance(encoder, ResnetEncoder):
        return _resnet(encoder)
    raise ExportError(f"export: a visual encoder of kind {type(encoder).__name__} has no ONNX form")


def _resnet(encoder: ResnetEncoder) -> VisualEncoder:
    blocks = [(_conv(block.first), _conv(block.second)) for block in encoder.blocks]
    stacks = tuple(
        (_conv(first), (blocks[2 * stage], blocks[2 * stage + 1]))
        for stage, first in enumerate(encoder.convolutions)
    )
    return resnet_encoder(stacks, _dense(encoder.dense))


def _hyper(body: Body) -> HyperLayer | None:
    if body.hyper is None:
        return None
    return HyperLayer(
        encoder=tuple(_dense(layer) for layer in body.hyper.goal.layers),
        generator=_dense(body.hyper.weights),
        bias=_array(body.hyper.bias),
        layout="in_out",
    )


def _dense(layer: Any) -> Dense:
    return Dense(weight=_array(layer.weight), bias=_array(layer.bias))


def _conv(layer: Any) -> Conv:
    return Conv(
        weight=_array(layer.weight),
        bias=_array(layer.bias),
        stride=layer.stride[0],
        padding=layer.padding[0],
    )


def _array(tensor: Tensor | nn.Parameter) -> FloatArray:
    array: FloatArray = tensor.detach().cpu().numpy()
    return array
