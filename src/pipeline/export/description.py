"""A policy as plain arrays: what the exporter needs to know, without torch.

`nets` describes its actor as a `PolicyGraph`; `export.graph` turns that into an ONNX model. Weights
keep the layout that torch gives them: `[out, in]` for dense layers, `[out, in, height, width]` for
convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.protocol.specs import ObservationType

if TYPE_CHECKING:
    from pipeline.arrays import FloatArray
    from pipeline.protocol.specs import BehaviorSpec

ActivationName = Literal["leaky_relu", "relu", "sigmoid", "swish", "tanh"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dense:
    """x · weightᵀ + bias."""

    weight: FloatArray
    """[out, in]."""
    bias: FloatArray
    """[out]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conv:
    """A two-dimensional convolution with the same stride and zero padding on both axes."""

    weight: FloatArray
    """[out, in, height, width]."""
    bias: FloatArray
    """[out]."""
    stride: int = 1
    """In pixels, at least 1."""
    padding: int = 0
    """Pixels added on each side, at least 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxPool:
    """The largest value of each square window; windows that do not fit are left out."""

    size: int
    """Side of the window in pixels."""
    stride: int
    """In pixels, at least 1."""
    padding: int = 0
    """Pixels added on each side, at least 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """An element-wise function; leaky_relu has slope 0.01 below zero."""

    name: ActivationName


@dataclass(frozen=True, kw_only=True, slots=True)
class Flatten:
    """[batch, channels, height, width] to [batch, channels · height · width]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Residual:
    """x + layers(x)."""

    layers: tuple[VisualLayer, ...]
    """Layers that keep the shape of x."""


VisualLayer = Conv | MaxPool | Activation | Flatten | Residual | Dense


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Normalizer:
    """clip((x - mean) / std, -clip, clip) for an observation of rank 1."""

    mean: FloatArray
    """[n]."""
    std: FloatArray
    """[n] square root of the running variance, above 0."""
    clip: float = 5.0
    """Bound of the normalised values."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualEncoder:
    """The network that turns an image [batch, C, H, W] into features [batch, n]."""

    layers: tuple[VisualLayer, ...]
    """Applied in order; the result must have rank 2."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntityEmbedding:
    """How each entity of a variable-length observation [entities, numbers] enters `Attention`."""

    dense: Dense
    """On the agent's own code, if it has one, followed by the entity's numbers; then Swish."""


ObservationEncoder = Normalizer | VisualEncoder | EntityEmbedding | None
"""How one observation enters the body; None passes a rank-1 observation through."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attention:
    """From the embedded entities of all variable-length observations to one vector.

    embeddings → layer normalisation → x; every entity takes from all by queries, keys and values
    in heads, scores divided by √size; `out` of that + x → layer normalisation → mean over entities.
    """

    own: Dense | None
    """On the encoded observations of fixed size, then Swish: the agent's own code; None without."""
    query: Dense
    """[size, size], as the next three."""
    key: Dense
    value: Dense
    out: Dense
    n_heads: int = 4
    """Equal parts of the embedding that attend separately."""
    epsilon: float = 1e-5
    """Added to the variance in the layer normalisations."""

    @property
    def size(self) -> int:
        """Numbers of an embedding, and of the result."""
        return len(self.out.weight)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HyperLayer:
    """A dense layer whose weights a network makes from the goal, for each row of the batch.

    goal → encoder layers, each followed by Swish → layer normalisation without scale → generator →
    W; output = x · W + bias, followed by Swish.
    """

    encoder: tuple[Dense, ...]
    """Layers on the concatenated encodings of the goal signals."""
    generator: Dense
    """To in · out numbers, the weights of one row."""
    bias: FloatArray
    """[out], the same for every goal."""
    layout: Literal["in_out", "out_in"] = "in_out"
    """Order in which the generated numbers fill the matrix."""
    epsilon: float = 1e-5
    """Added to the variance in the layer normalisation."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lstm:
    """A recurrent layer; gates in the order input, forget, cell, output, H rows each."""

    input_weight: FloatArray
    """[4 H, in]."""
    recurrent_weight: FloatArray
    """[4 H, H]."""
    input_bias: FloatArray
    """[4 H]."""
    recurrent_bias: FloatArray
    """[4 H]."""

    @property
    def memory_size(self) -> int:
        """Numbers of memory: H of hidden state, then H of cell state."""
        return 2 * int(self.recurrent_weight.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContinuousHead:
    """A Gaussian over the continuous actions."""

    mu: Dense
    """Body features to the mean [n]."""
    log_sigma: FloatArray | Dense
    """[n] learned constants, or a layer on the body features, clamped to [-20, 2]."""
    squash: bool
    """tanh of the sample (SAC); otherwise the sample is clipped to ±3 and divided by 3."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyGraph:
    """Everything that an exported policy computes."""

    spec: BehaviorSpec
    """Observations in wire order, and the actions."""
    encoders: tuple[ObservationEncoder, ...]
    """One per observation."""
    layers: tuple[Dense, ...]
    """The body, each layer followed by Swish."""
    attention: Attention | None = None
    """Present when there are variable-length observations; follows the others' features."""
    hyper: HyperLayer | None = None
    """Goal-conditioned last layer of the body, after `layers`."""
    memory: Lstm | None = None
    """Recurrent layer after the body, or None."""
    continuous: ContinuousHead | None = None
    """Present when the behavior has continuous actions."""
    branches: tuple[Dense, ...] = ()
    """Body features to logits, one per discrete branch."""

    @property
    def memory_size(self) -> int:
        """Numbers of recurrent memory; 0 without."""
        return 0 if self.memory is None else self.memory.memory_size

    @property
    def goals(self) -> tuple[int, ...]:
        """Indices of the observations that are goal signals."""
        return tuple(
            index
            for index, obs in enumerate(self.spec.observation_specs)
            if obs.observation_type == ObservationType.GOAL_SIGNAL
        )


def convolutional_encoder(convolutions: tuple[Conv, ...], dense: Dense) -> VisualEncoder:
    """The `simple`, `nature_cnn`, `match3` and (no convolutions) `fully_connected` encoders."""
    leaky = Activation(name="leaky_relu")
    layers: list[VisualLayer] = []
    for convolution in convolutions:
        layers += [convolution, leaky]
    return VisualEncoder(layers=(*layers, Flatten(), dense, leaky))


def resnet_encoder(
    stacks: tuple[tuple[Conv, tuple[tuple[Conv, Conv], ...]], ...], dense: Dense
) -> VisualEncoder:
    """The `resnet` encoder.

    Args:
        stacks: per stack the first convolution and the pairs of its residual blocks.
        dense: flattened features to hidden units.
    """
    swish = Activation(name="swish")
    layers: list[VisualLayer] = []
    for first, blocks in stacks:
        layers += [first, MaxPool(size=3, stride=2)]
        layers += [Residual(layers=(swish, one, swish, two)) for one, two in blocks]
    return VisualEncoder(layers=(*layers, swish, Flatten(), dense, Activation(name="relu")))
