"""A slow, obvious evaluation of policies, and random policies and observations for it."""

import numpy as np
import torch

from pipeline.algos.policy import Policy
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.nets.vision import ConvolutionEncoder
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

VISUAL_SIDES = {
    "simple": (20, 23),
    "nature_cnn": (36, 37),
    "match3": (5, 6),
    "resnet": (15, 17),
    "fully_connected": (3, 4),
}
N_HEADS = 4


def evaluate(policy: Policy, obs: list, masks=None, memories=None) -> dict:
    """Return means, deviations, probabilities and best choices in float64, computed row by row.

    With `memories` [N, M] of a recurrent policy, the result also has the new memories.
    """
    rows = [
        _evaluate_row(
            policy,
            [o[i].astype(np.float64) for o in obs],
            None if masks is None else masks[i],
            None if memories is None else memories[i].astype(np.float64),
        )
        for i in range(len(obs[0]))
    ]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _evaluate_row(policy, obs, mask, memory):
    body, heads = policy.actor.body, policy.actor.heads
    features = [_observation(policy, i, x) for i, x in enumerate(obs)]
    x = np.concatenate([*(f for f in features if f.ndim == 1), np.zeros(0)])
    if body.attention is not None:
        x = np.concatenate((x, attention(body.attention, x, [f for f in features if f.ndim > 1])))
    for layer in body.dense.layers:
        x = _swish(_dense(layer, x))
    if body.hyper is not None:
        x = _hyper(body.hyper, x, np.concatenate([features[i] for i in body.goals]))
    result = {}
    if policy.actor.memory is not None:
        x, result["memory"] = lstm(policy.actor.memory.lstm, x, memory)
    if heads.mu is not None:
        result |= _continuous(heads, x)
    start = 0
    best, probabilities = [], []
    for branch in heads.branches:
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


def _continuous(heads, x):
    mu = _dense(heads.mu, x)
    if heads.log_sigma is None:
        sigma = np.exp(np.clip(_dense(heads.spread, x), -20, 2))
        return {"mu": mu, "sigma": sigma, "continuous": np.tanh(mu)}
    sigma = np.exp(_array(heads.log_sigma)[0])
    return {"mu": mu, "sigma": sigma, "continuous": np.clip(mu, -3, 3) / 3}


def _array(parameter):
    return parameter.detach().numpy().astype(np.float64)


def _swish(x):
    return x * _sigmoid(x)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _dense(layer, x):
    return _array(layer.weight) @ x + _array(layer.bias)


def lstm(layer, x, memory):
    """Return output and new memory of an LSTM, computed unit by unit."""
    n = len(memory) // 2
    h, c = memory[:n], memory[n:]
    new_h, new_c = np.zeros(n), np.zeros(n)
    parts = [(layer.weight_ih_l0, layer.bias_ih_l0), (layer.weight_hh_l0, layer.bias_hh_l0)]
    (of_x, bias_x), (of_h, bias_h) = [(_array(w), _array(b)) for w, b in parts]

    def gate(number, unit):
        row = number * n + unit
        return of_x[row] @ x + bias_x[row] + of_h[row] @ h + bias_h[row]

    for unit in range(n):
        enter, keep, value, leave = (gate(number, unit) for number in range(4))
        new_c[unit] = _sigmoid(keep) * c[unit] + _sigmoid(enter) * np.tanh(value)
        new_h[unit] = _sigmoid(leave) * np.tanh(new_c[unit])
    return new_h, np.concatenate((new_h, new_c))


def attention(encoder, vector_obs, lists):
    """Return the attention layer's output, computed entity by entity without padding."""
    layers = encoder.attention
    size = len(layers.out.weight)
    code = np.zeros(0) if encoder.own is None else _swish(_dense(encoder.own, vector_obs))
    embedded = [
        _norm(_swish(_dense(layer, np.concatenate((code, entity)))))
        for entities, layer in zip(lists, encoder.embeddings, strict=True)
        for entity in entities
        if (entity**2).sum() >= 0.01
    ]
    if not embedded:
        return np.zeros(size)
    queries, keys, values = (
        [_dense(layer, x) for x in embedded] for layer in (layers.query, layers.key, layers.value)
    )
    total = np.zeros(size)
    for x, query in zip(embedded, queries, strict=True):
        head_outputs = []
        for part in np.split(np.arange(size), N_HEADS):
            p = np.exp([query[part] @ key[part] / np.sqrt(size) for key in keys])
            head_outputs.append(sum(s * v[part] for s, v in zip(p / p.sum(), values, strict=True)))
        total += _norm(_dense(layers.out, np.concatenate(head_outputs)) + x)
    return total / (len(embedded) + 1e-7)


def _norm(x):
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)


def _hyper(layer, x, goal):
    for dense in layer.goal.layers:
        goal = _swish(_dense(dense, goal))
    flat = _dense(layer.weights, _norm(goal))
    n, m = len(x), len(layer.bias)
    y = np.zeros(m)
    for i in range(n):
        for j in range(m):
            y[j] += x[i] * flat[i * m + j]
    return _swish(y + _array(layer.bias))


def _observation(policy, index, x):
    if str(index) in policy.actor.body.encoders:
        return _image(policy.actor.body.encoders[str(index)], x)
    if str(index) not in policy.normalizers.by_observation:
        return x
    normalizer = policy.normalizers.by_observation[str(index)]
    std = np.sqrt(_array(normalizer.squared) / float(normalizer.count))
    return np.clip((x - _array(normalizer.mean)) / std, -5, 5)


def _image(encoder, x):
    if isinstance(encoder, ConvolutionEncoder):
        for convolution in encoder.convolutions:
            x = _leaky(_conv(x, convolution))
        return _leaky(_dense(encoder.dense, x.reshape(-1)))
    for stage, convolution in enumerate(encoder.convolutions):
        x = _windows(_conv(x, convolution), 3, 2, lambda w: w.max(axis=(1, 2)))
        for block in encoder.blocks[2 * stage : 2 * stage + 2]:
            x = x + _conv(_swish(_conv(_swish(x), block.first)), block.second)
    return np.maximum(_dense(encoder.dense, _swish(x).reshape(-1)), 0)


def _leaky(x):
    return np.where(x > 0, x, 0.01 * x)


def _conv(x, layer):
    p, weight, bias = layer.padding[0], _array(layer.weight), _array(layer.bias)
    padded = np.pad(x, ((0, 0), (p, p), (p, p)))
    side, stride = layer.kernel_size[0], layer.stride[0]
    return _windows(padded, side, stride, lambda w: (weight * w).sum(axis=(1, 2, 3)) + bias)


def _windows(x, side, stride, function):
    rows = range(0, x.shape[1] - side + 1, stride)
    columns = range(0, x.shape[2] - side + 1, stride)
    pixels = [[function(x[:, r : r + side, c : c + side]) for c in columns] for r in rows]
    return np.moveaxis(np.array(pixels), -1, 0)


def policy(
    seed=0,
    *,
    continuous=0,
    branches=(),
    squash=False,
    visual=None,
    goal=False,
    normalize=True,
    hidden=16,
    memory=0,
    entities=(),
) -> Policy:
    """Return a random policy for two vectors, and optionally an image, a goal and memory.

    `entities` are the shapes of variable-length observations, in the order of the observations.
    """
    specs = [ObservationSpec.vector(5), ObservationSpec.vector(3)]
    if visual is not None:
        specs.insert(1, ObservationSpec.visual(2, *VISUAL_SIDES[visual]))
    if goal:
        specs.append(ObservationSpec.vector(2, observation_type=ObservationType.GOAL_SIGNAL))
    for index, shape in enumerate(entities):
        specs.insert(2 * index, ObservationSpec.entities(*shape))
    settings = NetworkSettings(
        hidden_units=hidden,
        normalize=normalize,
        vis_encode_type=visual or "simple",
        memory=MemorySettings(memory_size=memory) if memory else None,
    )
    spec = BehaviorSpec(specs, ActionSpec(continuous, tuple(branches)))
    random_policy = Policy(spec, settings, squash=squash)
    rng = np.random.default_rng(seed)
    state = {name: _random(rng, name, like) for name, like in random_policy.state_dict().items()}
    random_policy.load_state_dict(state)
    return random_policy


def _random(rng, name, like):
    shape = tuple(like.shape)
    if name.endswith("count"):
        values = np.ones(())
    elif name.endswith("mean"):
        values = rng.normal(0, 2, shape)
    elif name.endswith("squared"):
        values = rng.uniform(0.2, 3, shape) ** 2
    elif name.endswith("log_sigma"):
        values = rng.normal(-0.5, 0.3, shape)
    elif len(shape) == 1:
        values = rng.normal(0, 0.3, shape)
    else:
        gain = 2.0 if "attention" in name else 0.5 if "hyper.weights" in name else 1.0
        values = rng.normal(0, gain / np.sqrt(np.prod(shape[1:])), shape)
    return torch.from_numpy(np.asarray(values)).to(like.dtype)


def fill(layer, weight, bias):
    """Set all weights to `weight`, and the biases to `bias`: one value, or one for each."""
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.copy_(torch.as_tensor(bias))


def observations(policy, n_rows, seed=1):
    """Return random observations; each row has one entity less than the row before."""
    rng = np.random.default_rng(seed)
    values = [
        rng.random((n_rows, *o.shape))
        if len(o.shape) == 3
        else rng.normal(0, 3, (n_rows, *o.shape))
        for o in policy.spec.observation_specs
    ]
    for entities in (value for value in values if value.ndim == 3):
        most = entities.shape[1]
        used = (most - np.arange(n_rows)) % (most + 1)
        entities[np.arange(most) >= used[:, None]] = 0.0
    return [array.astype(np.float32) for array in values]


def memories(policy, n_rows, seed=2):
    """Return random memories [N, M] of a recurrent policy; None for other policies."""
    rng = np.random.default_rng(seed)
    shape = (n_rows, policy.memory_size)
    return rng.uniform(-1, 1, shape).astype(np.float32) if policy.memory_size else None


def run(model, outputs, obs, masks=None, seed=0, memory=None):
    from pipeline.export.policy import create_session

    feeds = {f"obs_{i}": o for i, o in enumerate(obs)}
    if masks is not None:
        feeds["action_masks"] = masks
    if memory is not None:
        feeds["recurrent_in"] = memory[:, None]
    return dict(zip(outputs, create_session(model, seed).run(outputs, feeds), strict=True))
