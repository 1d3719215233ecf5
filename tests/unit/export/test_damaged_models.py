"""Models with a little damage: check and evaluate accept each, or refuse it in one line."""

from __future__ import annotations

import resource
from functools import cache

import numpy as np
import onnx
import pytest
from steps import decision_steps

from pipeline.commands.onnx import check
from pipeline.errors import PipelineError
from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import build_model, model_bytes

from . import reference

KINDS = (
    {"continuous": 2, "hidden": 4},
    {"branches": (2, 3), "hidden": 4},
    {"continuous": 1, "branches": (2,), "hidden": 4, "memory": 4},
    {"continuous": 1, "hidden": 4, "entities": ((3, 2),)},
)
N_MUTATIONS = 500
MOST_MEMORY = 200e6
NUMBERS = (-1, 0, 1, 2, 3, 7, 9, 10, 99, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1)
FLOATS = (-1.0, 0.0, 0.5, 2.0, 4.0, 3e38, float("inf"), float("nan"))
TEXTS = (
    *("", "obs_0", "obs_9", "obs_x", "obs_\u0663", "x" * 99, "two\nlines", "\ud7ff", "batch"),
    *("action_masks", "recurrent_in", "discrete_actions", "continuous_actions", "memory_size"),
    *("version_number", "Identity", "Reshape", "Concat", "Loop", "ConstantOfShape", "Erf"),
)


@cache
def policy_of(kind):
    graph = reference.policy(**KINDS[kind])
    return graph, reference.observations(graph, 3), model_bytes(build_model(graph))


def damaged_bytes(data, rng):
    """Up to three changes of single bytes, runs, or the length."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at, n = int(rng.integers(len(data))), int(rng.integers(1, 9))
        change = rng.integers(5)
        if change == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif change == 1:
            data[at : at + n] = rng.bytes(n)
        elif change == 2:
            del data[at : at + n]
        elif change == 3:
            data[at:at] = data[at : at + n]
        else:
            del data[max(at, 1) :]
    return bytes(data)


def parts_of(message):
    """A message and all messages inside of it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                yield from parts_of(one)


def damaged_structure(data, rng):
    """Up to two fields of the model's messages with another value, or none, or twice."""
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.integers(1, 3)):
        parts = [part for part in parts_of(model) if part.ListFields()]
        part = parts[rng.integers(len(parts))]
        fields = part.DESCRIPTOR.fields if rng.random() < 0.3 else [f for f, _ in part.ListFields()]
        damage_field(part, fields[rng.integers(len(fields))], rng)
    return model.SerializeToString()


def damage_field(part, field, rng):
    if rng.random() < 0.2:
        part.ClearField(field.name)
        return
    value = getattr(part, field.name)
    if field.message_type is not None:
        if field.is_repeated and len(value) and rng.random() < 0.5:
            del value[int(rng.integers(len(value)))]
        elif field.is_repeated:
            one = value.add()
            if len(value) > 1:
                one.CopyFrom(value[0])
        else:
            value.SetInParent()
        return
    new = new_value(field, rng)
    if not field.is_repeated:
        setattr(part, field.name, new)
    elif len(value) and rng.random() < 0.7:
        value[int(rng.integers(len(value)))] = new
    else:
        value.append(new)


def new_value(field, rng):
    if field.type == field.TYPE_BYTES:
        return rng.bytes(int(rng.integers(9)))
    if field.type == field.TYPE_STRING:
        return TEXTS[rng.integers(len(TEXTS))]
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return FLOATS[rng.integers(len(FLOATS))]
    if field.type == field.TYPE_ENUM:
        return int(rng.choice([value.number for value in field.enum_type.values]))
    new = NUMBERS[rng.integers(len(NUMBERS))]
    return {field.TYPE_UINT64: max(new, 0), field.TYPE_INT32: min(new, (1 << 31) - 1)}.get(
        field.type, new
    )


def act(path, graph, obs):
    policy = OnnxPolicy(path, seed=1)
    n, branches = len(obs[0]), graph.spec.action_spec.discrete_branches
    masks = [np.zeros((n, size), np.bool_) for size in branches]
    steps = decision_steps(obs, masks=masks or None)
    for deterministic in (False, True, False):
        action = policy.act(steps, deterministic)
        assert len(action.continuous) == len(action.discrete) == n


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("damage", [damaged_bytes, damaged_structure])
def test_damage_is_refused_in_one_line_or_does_no_harm(damage, part, tmp_path):
    path = tmp_path / "a.onnx"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(N_MUTATIONS // 10):
        rng = np.random.default_rng([part, number])
        graph, obs, data = policy_of(number % len(KINDS))
        path.write_bytes(damage(data, rng))
        said = []
        for use in (check, lambda path, graph=graph, obs=obs: act(path, graph, obs)):
            try:
                use(path)
            except PipelineError as error:
                said.append(str(error))
            except Exception as error:
                error.add_note(f"{damage.__name__}, part {part}, number {number}")
                raise
        assert all("\n" not in one and len(one) < 2000 for one in said), said
        refused += len(said) == 2
    assert refused > N_MUTATIONS // 20
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MOST_MEMORY
