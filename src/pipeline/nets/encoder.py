"""Encoders of observations into one hidden vector per agent, for actors and critics."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.core.specs import DimensionProperty, ObservationSpec, ObservationType
from pipeline.errors import SettingsError
from pipeline.nets.attention import EntityEncoder
from pipeline.nets.layers import ACTIVATIONS, DenseLayers, RunningNormalizer
from pipeline.nets.onnx_graph import OnnxGraph
from pipeline.nets.vision import observation_encoder
from pipeline.settings.trainer.schema import NetworkSettings

# Largest number of distinct goals in a batch for which generated weights are shared by rows.
FEW_GOALS = 8
# These are the dimension properties of a variable-length observation [entities, numbers].
ENTITIES = (DimensionProperty.VARIABLE_SIZE, DimensionProperty.NONE)


class Normalizers(nn.Module):
    """One running normaliser for each vector observation, shared by all networks of a policy."""

    def __init__(self, specs: Sequence[ObservationSpec], *, enabled: bool) -> None:
        super().__init__()
        self.by_observation = nn.ModuleDict(
            {
                str(i): RunningNormalizer(spec.shape[0])
                for i, spec in enumerate(specs)
                # Only vectors are normalised, as in ML-Agents: no images and no lists of entities.
                if enabled and len(spec.shape) == 1
            }
        )

    def __bool__(self) -> bool:
        return len(self.by_observation) > 0

    def update(self, obs: Sequence[Tensor]) -> None:
        """Update the statistics with rows [B, ...] of every observation."""
        for index, normalizer in self.by_observation.items():
            normalizer.update(obs[int(index)])  # type: ignore[operator]  # ModuleDict loses the type

    def forward(self, obs: Sequence[Tensor]) -> list[Tensor]:
        """Return the observations; vector observations are normalised if the settings say so."""
        result = list(obs)
        for index, normalizer in self.by_observation.items():
            result[int(index)] = normalizer(result[int(index)])
        return result

    def to_onnx(self, graph: OnnxGraph, obs: Iterable[str]) -> Iterator[str]:
        """Add `forward` to the ONNX graph; yield the name of each observation's tensor."""
        for index, x in enumerate(obs):
            key = str(index)
            if key in self.by_observation:
                yield cast("RunningNormalizer", self.by_observation[key]).to_onnx(graph, x)
            else:
                yield x


class HyperLayer(nn.Module):
    """A dense layer with weights computed from the goal (Ha et al. 2017, arXiv 1609.09106).

    The goal passes two dense layers with Swish, and a layer normalisation; from the result a last
    dense layer computes the weights [n_in, n_out] for each row of the minibatch.
    """

    def __init__(
        self, goal_size: int, n_in: int, n_out: int, hidden_units: int, activation: str = "swish"
    ) -> None:
        super().__init__()
        self.n_in, self.n_out, self.activation = n_in, n_out, activation
        self.goal = DenseLayers(goal_size, [hidden_units] * 2)
        self.weights = nn.Linear(hidden_units, n_in * n_out)
        # This is ML-Agents' bound, which also counts the inputs of the generated layer.
        bound = 1.0 / math.sqrt(hidden_units * n_in)
        nn.init.uniform_(self.weights.weight, -bound, bound)
        nn.init.zeros_(self.weights.bias)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor, goal: Tensor) -> Tensor:
        """Map x [B, n_in] and goal [B, goal_size] to [B, n_out].

        Weights are computed only once for each distinct goal, because most tasks have few goals. If
        the goal is a trained encoding of an image, every row needs its own derivative, so weights
        are computed for each row.
        """
        y = None if goal.requires_grad else self._per_distinct(x, goal)
        if y is None:
            y = torch.bmm(x.unsqueeze(1), self._weights(goal)).squeeze(1)
        return ACTIVATIONS[self.activation](y + self.bias)

    def _per_distinct(self, x: Tensor, goal: Tensor) -> Tensor | None:
        """Multiply x [B, n_in] by the weights of each distinct goal; None if there are many."""
        # `goal_of_row` [B] is the index of each row's goal among the distinct goals.
        distinct, goal_of_row = torch.unique(goal, dim=0, return_inverse=True)
        if len(distinct) > FEW_GOALS:
            return None
        # `side_by_side` [n_in, goals * n_out] has all goals' weights: one product serves all rows.
        side_by_side = self._weights(distinct).transpose(0, 1).flatten(1)
        y = (x @ side_by_side).view(len(x), len(distinct), self.n_out)
        # Each row takes the product with the weights of its own goal, which gives [B, n_out].
        return y[torch.arange(len(x), device=x.device), goal_of_row]

    def _weights(self, goal: Tensor) -> Tensor:
        encoded = nn.functional.layer_norm(self.goal(goal), (self.weights.in_features,))
        weights: Tensor = self.weights(encoded)
        return weights.view(-1, self.n_in, self.n_out)

    def to_onnx(self, graph: OnnxGraph, x: str, goal: str) -> str:
        """Add the operators of `forward` to `graph`; return the name of their result."""
        encoded = graph.layer_norm(self.goal.to_onnx(graph, goal, "goal"), axis=1)
        weights = graph.linear(self.weights, encoded, "goal.generator")
        weights = graph.reshape(weights, (-1, self.n_in, self.n_out), "goal.shape")
        row = graph.node("Unsqueeze", [x], axes=[1])
        product = graph.node("MatMul", [row, weights])
        bias = graph.weight(self.bias, "goal.bias")
        y = graph.node("Add", [graph.node("Squeeze", [product], axes=[1]), bias])
        return graph.activation(self.activation, y)


class ObservationEncoder(nn.Module):
    """Encodes normalised observations into hidden vectors [B, hidden_units].

    Visual observations pass their encoders, and so do vector observations if the settings have
    `encoder`. Attention turns all lists of entities into one vector. Vector observations, encodings
    and the attention vector are concatenated and pass the dense layers. With a goal signal and
    `goal_conditioning_type: hyper` the last dense layer is a `HyperLayer`; no weights are computed
    from a list of entities, which is an ordinary input even if it is a goal signal. The recurrent
    layer is in `nets.memory`.

    Args:
        specs: specifications of the observations.
        settings: settings of the network.
        n_actions: size of the action vector that the dense layers also read (see `head`); 0 if they
            read no actions.

    Raises:
        SettingsError: An observation or a setting cannot be used.
    """

    def __init__(
        self, specs: Sequence[ObservationSpec], settings: NetworkSettings, *, n_actions: int = 0
    ) -> None:
        super().__init__()
        layers, encoded = settings.widths, settings.encoded_size
        self.encoders = nn.ModuleDict()
        self.entities: list[int] = []
        widths: dict[int, int] = {}
        for index, spec in enumerate(specs):
            if len(spec.shape) == 3 or (settings.encoder and len(spec.shape) == 1):
                kind = settings.encoder or settings.vis_encode_type
                self.encoders[str(index)] = observation_encoder(kind, spec.shape, encoded)
                widths[index] = encoded
            elif len(spec.shape) == 1:
                widths[index] = spec.shape[0]
            else:
                _refuse_unless_entities(index, spec)
                self.entities.append(index)
        kinds = {index: specs[index].observation_type for index in widths}
        self.goals = [i for i, kind in kinds.items() if kind == ObservationType.GOAL_SIGNAL]
        # With goal_conditioning_type `none`, a goal is an ordinary input.
        hyper = bool(self.goals) and str(settings.goal_conditioning_type) == "hyper"
        n_in = sum(widths.values())
        self.attention = None
        if self.entities:
            self.attention = EntityEncoder(n_in, [specs[i].shape[1] for i in self.entities])
            n_in += self.attention.output_size
        if n_in == 0:
            raise SettingsError(
                "the behavior has no observations, or only empty observations, so its networks "
                "have no input; give its agents an observation with at least one number"
            )
        # Actions are added after `EntityEncoder` was made, because attention must not read actions.
        n_in += n_actions
        goal_size = sum(widths[i] for i in self.goals) if hyper else 0
        if hyper and settings.layer_norm:
            raise SettingsError(
                "network_settings.layer_norm: a layer with weights that are computed from a goal "
                "cannot be normalised; set goal_conditioning_type to none, or layer_norm to false"
            )
        # The `HyperLayer` is the last of the `num_layers` layers.
        plain = layers[:-1] if hyper else layers
        self.dense = DenseLayers(
            n_in, plain, activation=settings.activation, layer_norm=settings.layer_norm
        )
        self.hyper = None
        if hyper:
            last = layers[-1]
            n_before = plain[-1] if plain else n_in
            self.hyper = HyperLayer(goal_size, n_before, last, last, settings.activation)
        # Without layers the joined observations are the result.
        self.output_size = layers[-1] if layers else n_in

    def forward(self, obs: Sequence[Tensor]) -> Tensor:
        """Return hidden vectors [B, hidden_units] for observations [B, *shape]."""
        return self.head(*self.features(obs))

    def features(self, obs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the input [B, n] of the dense layers, without the actions, and the goal.

        The goal observations [B, goal_size] are those from which the HyperLayer computes its
        weights; None without HyperLayer.
        """
        parts = list(obs)
        for index, encoder in self.encoders.items():
            parts[int(index)] = encoder(obs[int(index)])
        if self.attention is None:
            # A single part is not concatenated, because `torch.cat` would copy it.
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        else:
            joined = self._with_entities(parts, self.attention)
        if self.hyper is None:
            return joined, None
        return joined, torch.cat([parts[i] for i in self.goals], dim=1)

    def head(self, joined: Tensor, goal: Tensor | None) -> Tensor:
        """Return hidden vectors [B, hidden_units] from `joined` [B, n + n_actions] and the goal.

        `joined` are the features, then the actions; both are results of `features`.
        """
        hidden: Tensor = self.dense(joined)
        if self.hyper is not None:
            hidden = self.hyper(hidden, goal)
        return hidden

    def to_onnx(self, graph: OnnxGraph, obs: Iterable[str]) -> str:
        """Add the operators of `forward` to `graph`; return the name of their result."""
        # `obs` is a generator, so that an observation's normaliser and encoder are adjacent in the
        # graph.
        encoders: dict[str, Any] = dict(self.encoders.items())
        parts = [
            encoders[str(i)].to_onnx(graph, x) if str(i) in encoders else x
            for i, x in enumerate(obs)
        ]
        joined = [x for i, x in enumerate(parts) if i not in self.entities]
        if self.attention is not None:
            attended = self.attention.to_onnx(graph, joined, [parts[i] for i in self.entities])
            joined = [*joined, attended]
        hidden = self.dense.to_onnx(graph, graph.concat(joined), "body")
        if self.hyper is None:
            return hidden
        return self.hyper.to_onnx(graph, hidden, graph.concat([parts[i] for i in self.goals]))

    def _with_entities(self, parts: Sequence[Tensor], attention: EntityEncoder) -> Tensor:
        """Return [B, n]: all encodings of fixed size, then the attention vector of all entities."""
        # Every entity is embedded together with the agent's other observations.
        fixed = [values for i, values in enumerate(parts) if i not in self.entities]
        flat = torch.cat(fixed, dim=1) if fixed else None
        attended: Tensor = attention(flat, [parts[i] for i in self.entities])
        return attended if flat is None else torch.cat((flat, attended), dim=1)


def _refuse_unless_entities(index: int, spec: ObservationSpec) -> None:
    if len(spec.shape) == 2 and tuple(spec.dimension_property) == ENTITIES:
        return
    flags = [DimensionProperty(flag).name for flag in spec.dimension_property]
    raise SettingsError(
        f"observation {index} ({spec.name or 'unnamed'}): Unsupported Sensor with specs shape "
        f"{tuple(spec.shape)} and dimension properties {flags}; send a vector (rank 1), an image "
        "(rank 3), or a list of entities (rank 2: number of entities, numbers of each entity) with "
        "the dimension properties VARIABLE_SIZE and NONE"
    )
