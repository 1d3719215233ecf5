"""A slow, obvious evaluation of a described policy, and random policies to try it on."""

from __future__ import annotations

import numpy as np

from pipeline.export.description import (
    Activation,
    Attention,
    ContinuousHead,
    Conv,
    Dense,
    EntityEmbedding,
    Flatten,
    HyperLayer,
    Lstm,
    MaxPool,
    Normalizer,
    PolicyGraph,
    Residual,
    VisualEncoder,
    convolutional_encoder,
    resnet_encoder,
)
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType

FUNCTIONS = {
    "swish": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.where(x > 0, x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
VISUAL_SIDES = {
    "simple": (20, 23),
    "nature_cnn": (36, 37),
    "match3": (5, 6),
    "resnet": (15, 17),
    "fully_connected": (3, 4),
}


def evaluate(graph: PolicyGraph, obs: list, masks=None, memories=None) -> dict:
    """Means, spreads, probabilities and best choices in float64, one row at a time.

    With `memories` [N, M] of a recurrent policy also its new ones.
    """
    rows = [
        _evaluate_row(
            graph,
            [o[i].astype(np.float64) for o in obs],
            None if masks is None else masks[i],
            None if memories is None else memories[i].astype(np.float64),
        )
        for i in range(len(obs[0]))
    ]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _evaluate_row(graph, obs, mask, memory):
    features = [_observation(x, e) for x, e in zip(obs, graph.encoders, strict=True)]
    fixed = [f for f, e in zip(features, graph.encoders, strict=True) if not is_list(e)]
    x = np.concatenate([*fixed, np.zeros(0)])
    if graph.attention is not None:
        x = np.concatenate((x, _attention(graph, x, obs)))
    for layer in graph.layers:
        x = FUNCTIONS["swish"](_dense(layer, x))
    if graph.hyper is not None:
        goals = [
            f
            for f, spec in zip(features, graph.spec.observation_specs, strict=True)
            if spec.observation_type == ObservationType.GOAL_SIGNAL
        ]
        x = _hyper(graph.hyper, x, np.concatenate(goals))
    result = {}
    if graph.memory is not None:
        x, result["memory"] = _lstm(graph.memory, x, memory)
    if graph.continuous is not None:
        result |= _continuous(graph.continuous, x)
    start = 0
    best, probabilities = [], []
    for branch in graph.branches:
        logits = _dense(branch, x)
        allowed = np.ones(len(logits)) if mask is None else mask[start : start + len(logits)]
        start += len(logits)
        p = np.where(allowed > 0, np.exp(logits - logits.max()), 0.0)
        probabilities.append(p / p.sum())
        best.append(int(np.argmax(p)))
    if best:
        result["discrete"] = np.array(best)
        result["probabilities"] = np.concatenate(probabilities)
    return result


def _continuous(head, x):
    mu = _dense(head.mu, x)
    if isinstance(head.log_sigma, Dense):
        log_sigma = np.clip(_dense(head.log_sigma, x), -20, 2)
    else:
        log_sigma = np.ravel(head.log_sigma)
    action = np.tanh(mu) if head.squash else np.clip(mu, -3, 3) / 3
    return {"mu": mu, "sigma": np.exp(log_sigma), "continuous": action}


def _dense(layer, x):
    return (
        np.array(
            [
                sum(w * v for w, v in zip(row, x, strict=True))
                for row in layer.weight.astype(np.float64)
            ]
        )
        + layer.bias
    )


def _lstm(layer, x, memory):
    """Output and new memory, one unit at a time."""
    n = len(memory) // 2
    h, c = memory[:n], memory[n:]
    new_h, new_c = np.zeros(n), np.zeros(n)

    def gate(number, unit):
        row = number * n + unit
        from_x = layer.input_weight[row].astype(np.float64) @ x + layer.input_bias[row]
        return (
            from_x + layer.recurrent_weight[row].astype(np.float64) @ h + layer.recurrent_bias[row]
        )

    for unit in range(n):
        enter, keep, value, leave = (gate(number, unit) for number in range(4))
        new_c[unit] = FUNCTIONS["sigmoid"](keep) * c[unit]
        new_c[unit] += FUNCTIONS["sigmoid"](enter) * np.tanh(value)
        new_h[unit] = FUNCTIONS["sigmoid"](leave) * np.tanh(new_c[unit])
    return new_h, np.concatenate((new_h, new_c))


def _attention(graph, own, obs):
    """One entity at a time, those that are padding left out."""
    attention = graph.attention
    code = np.zeros(0) if attention.own is None else FUNCTIONS["swish"](_dense(attention.own, own))
    embedded = []
    for entities, embedding in zip(obs, graph.encoders, strict=True):
        for entity in entities if is_list(embedding) else ():
            if (entity**2).sum() >= 0.01:
                joined = np.concatenate((code, entity))
                embedded.append(_norm(FUNCTIONS["swish"](_dense(embedding.dense, joined))))
    if not embedded:
        return np.zeros(attention.size)
    queries, keys, values = (
        [_dense(layer, x) for x in embedded]
        for layer in (attention.query, attention.key, attention.value)
    )
    total = np.zeros(attention.size)
    for x, query in zip(embedded, queries, strict=True):
        taken = []
        for part in np.split(np.arange(attention.size), attention.n_heads):
            p = np.exp([query[part] @ key[part] / np.sqrt(attention.size) for key in keys])
            taken.append(sum(s * v[part] for s, v in zip(p / p.sum(), values, strict=True)))
        total += _norm(_dense(attention.out, np.concatenate(taken)) + x)
    return total / (len(embedded) + 1e-7)


def is_list(encoder):
    return isinstance(encoder, EntityEmbedding)


def _norm(x):
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)


def _hyper(layer, x, goal):
    for dense in layer.encoder:
        goal = FUNCTIONS["swish"](_dense(dense, goal))
    flat = _dense(layer.generator, _norm(goal))
    n, m = len(x), len(layer.bias)
    y = np.zeros(m)
    for i in range(n):
        for j in range(m):
            y[j] += x[i] * (flat[i * m + j] if layer.layout == "in_out" else flat[j * n + i])
    return FUNCTIONS["swish"](y + layer.bias)


def _observation(x, encoder):
    if encoder is None or is_list(encoder):
        return x
    if isinstance(encoder, Normalizer):
        return np.clip((x - encoder.mean) / encoder.std, -5, 5)
    return _layers(x, encoder.layers)


def _layers(x, layers):
    for layer in layers:
        if isinstance(layer, Activation):
            x = FUNCTIONS[layer.name](x)
        elif isinstance(layer, Residual):
            x = x + _layers(x, layer.layers)
        elif isinstance(layer, Flatten):
            x = x.reshape(-1)
        elif isinstance(layer, Dense):
            x = _dense(layer, x)
        elif isinstance(layer, MaxPool):
            x = _windows(x, layer.size, layer.size, layer.stride, lambda w: w.max(axis=(1, 2)))
        else:
            x = _conv(x, layer)
    return x


def _conv(x, layer):
    p = layer.padding
    padded = np.pad(x, ((0, 0), (p, p), (p, p)))
    height, width = layer.weight.shape[2:]
    return _windows(
        padded,
        height,
        width,
        layer.stride,
        lambda w: (layer.weight * w).sum(axis=(1, 2, 3)) + layer.bias,
    )


def _windows(x, height, width, stride, function):
    rows = range(0, x.shape[1] - height + 1, stride)
    columns = range(0, x.shape[2] - width + 1, stride)
    pixels = [[function(x[:, r : r + height, c : c + width]) for c in columns] for r in rows]
    return np.moveaxis(np.array(pixels), -1, 0)


def dense(rng, n_in, n_out, gain=1.0):
    weight = rng.normal(0, gain / np.sqrt(n_in), (n_out, n_in))
    return Dense(
        weight=weight.astype(np.float32), bias=rng.normal(0, 0.3, n_out).astype(np.float32)
    )


def conv(rng, n_in, n_out, side, stride=1, padding=0):
    weight = rng.normal(0, 1 / np.sqrt(n_in * side * side), (n_out, n_in, side, side))
    bias = rng.normal(0, 0.3, n_out).astype(np.float32)
    return Conv(weight=weight.astype(np.float32), bias=bias, stride=stride, padding=padding)


def normalizer(rng, size):
    mean = rng.normal(0, 2, size).astype(np.float32)
    return Normalizer(mean=mean, std=rng.uniform(0.2, 3, size).astype(np.float32))


def visual_encoder(rng, kind, shape, hidden) -> VisualEncoder:
    """Each type of the table of visual encoders, with random weights."""
    channels = shape[0]
    tables = {
        "simple": [(16, 8, 4), (32, 4, 2)],
        "nature_cnn": [(32, 8, 4), (64, 4, 2), (64, 3, 1)],
        "match3": [(35, 3, 1), (144, 3, 1)],
        "fully_connected": [],
    }
    if kind == "resnet":
        return _resnet(rng, shape, hidden)
    height, width = shape[1:]
    layers = []
    for out, side, stride in tables[kind]:
        layers.append(conv(rng, channels, out, side, stride))
        channels, height, width = out, (height - side) // stride + 1, (width - side) // stride + 1
    return convolutional_encoder(
        tuple(layers), dense(rng, channels * height * width, hidden, gain=1.41)
    )


def _resnet(rng, shape, hidden):
    channels, height, width = shape
    stacks = []
    for out in (16, 32, 32):
        blocks = tuple(
            (conv(rng, out, out, 3, padding=1), conv(rng, out, out, 3, padding=1)) for _ in range(2)
        )
        stacks.append((conv(rng, channels, out, 3, padding=1), blocks))
        channels, height, width = out, (height - 3) // 2 + 1, (width - 3) // 2 + 1
    return resnet_encoder(tuple(stacks), dense(rng, channels * height * width, hidden, gain=1.41))


def lstm(rng, n_in, n):
    """A recurrent layer of n units with random weights and biases."""
    shapes = ((4 * n, n_in), (4 * n, n), (4 * n,), (4 * n,))
    parts = [rng.normal(0, 0.6, shape).astype(np.float32) for shape in shapes]
    names = ("input_weight", "recurrent_weight", "input_bias", "recurrent_bias")
    return Lstm(**dict(zip(names, parts, strict=True)))


def policy(
    seed=0,
    *,
    continuous=0,
    branches=(),
    squash=False,
    conditional=False,
    visual=None,
    hyper=None,
    normalize=True,
    hidden=16,
    memory=0,
    entities=(),
) -> PolicyGraph:
    """A random policy on two vectors, perhaps an image, a goal when `hyper` is a layout, memory.

    `entities` are the shapes of variable-length observations, the first of which comes first.
    """
    rng = np.random.default_rng(seed)
    specs = [ObservationSpec.vector(5), ObservationSpec.vector(3)]
    encoders = [
        normalizer(rng, 5) if normalize else None,
        normalizer(rng, 3) if normalize else None,
    ]
    size = 8
    if visual is not None:
        shape = (2, *VISUAL_SIDES[visual])
        specs.insert(1, ObservationSpec.visual(*shape))
        encoders.insert(1, visual_encoder(rng, visual, shape, hidden))
        size += hidden
    goal = None
    if hyper is not None:
        specs.append(ObservationSpec.vector(2, observation_type=ObservationType.GOAL_SIGNAL))
        encoders.append(None)
        size += 2
        goal = HyperLayer(
            encoder=(dense(rng, 2, hidden), dense(rng, hidden, hidden)),
            generator=dense(rng, hidden, hidden * 7, gain=0.3),
            bias=rng.normal(0, 0.3, 7).astype(np.float32),
            layout=hyper,
        )
    attention = None
    if entities:
        attention = _random_attention(rng, size)
        for index, shape in enumerate(entities):
            specs.insert(2 * index, ObservationSpec.entities(*shape))
            embedding = EntityEmbedding(dense=dense(rng, 12 + shape[1], 12, gain=2.0))
            encoders.insert(2 * index, embedding)
        size += 12
    width = 7 if hyper else hidden
    recurrent = lstm(rng, width, memory // 2) if memory else None
    width = memory // 2 or width
    spread = rng.normal(-0.5, 0.3, (1, continuous)).astype(np.float32)
    head = ContinuousHead(
        mu=dense(rng, width, continuous),
        log_sigma=dense(rng, width, continuous) if conditional else spread,
        squash=squash,
    )
    return PolicyGraph(
        spec=BehaviorSpec(specs, ActionSpec(continuous, tuple(branches))),
        encoders=tuple(encoders),
        layers=(dense(rng, size, hidden), dense(rng, hidden, hidden)),
        attention=attention,
        hyper=goal,
        memory=recurrent,
        continuous=head if continuous else None,
        branches=tuple(dense(rng, width, n) for n in branches),
    )


def _random_attention(rng, own_size, size=12):
    layers = {name: dense(rng, size, size, gain=2.0) for name in ("query", "key", "value", "out")}
    return Attention(own=dense(rng, own_size, size), n_heads=3, **layers)


def observations(graph, n_rows, seed=1):
    """Random ones; of entities there is one less in each row than in the row before."""
    rng = np.random.default_rng(seed)
    values = [
        rng.random((n_rows, *o.shape))
        if len(o.shape) == 3
        else rng.normal(0, 3, (n_rows, *o.shape))
        for o in graph.spec.observation_specs
    ]
    for entities in (values for values in values if values.ndim == 3):
        most = entities.shape[1]
        used = (most - np.arange(n_rows)) % (most + 1)
        entities[np.arange(most) >= used[:, None]] = 0.0
    return [one.astype(np.float32) for one in values]


def memories(graph, n_rows, seed=2):
    """Random memories [N, M] of a recurrent policy, else None."""
    rng = np.random.default_rng(seed)
    shape = (n_rows, graph.memory_size)
    return rng.uniform(-1, 1, shape).astype(np.float32) if graph.memory_size else None


def run(model, outputs, obs, masks=None, seed=0, memory=None):
    from pipeline.export.policy import create_session

    feeds = {f"obs_{i}": o for i, o in enumerate(obs)}
    if masks is not None:
        feeds["action_masks"] = masks
    if memory is not None:
        feeds["recurrent_in"] = memory[:, None]
    return dict(zip(outputs, create_session(model, seed).run(outputs, feeds), strict=True))
