"""What people met who load, share and check ONNX files, their own and those of others."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from pipeline import cli
from pipeline.errors import ExportError
from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import build_model, publish
from pipeline.export.recording import record
from pipeline.tracking import names
from pipeline.tracking.curve_csv import CsvSink

SPACES = {
    "continuous": {"continuous": 2, "branches": ()},
    "discrete": {"continuous": 0, "branches": (3, 2)},
    "hybrid": {"continuous": 2, "branches": (3,)},
}


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("space", SPACES)
def test_inputs_and_outputs_have_the_order_of_ml_agents_exports(space, memory):
    size = {"memory": 8} if memory else {}
    policy = reference.policy(**SPACES[space], **size)
    graph = build_model(policy).graph
    n_obs = len(policy.spec.observation_specs)
    masks = ["action_masks"] if SPACES[space]["branches"] else []
    inputs = [f"obs_{i}" for i in range(n_obs)] + masks + ["recurrent_in"] * memory
    assert [value.name for value in graph.input] == inputs
    outputs = ["version_number", "memory_size"]
    for kind, size in (("continuous", "continuous"), ("discrete", "branches")):
        if SPACES[space][size]:
            outputs += [f"{kind}_actions", f"{kind}_action_output_shape"]
            outputs += [f"deterministic_{kind}_actions"]
    assert [value.name for value in graph.output] == outputs + ["recurrent_out"] * memory


def model() -> ModelProto:
    return build_model(reference.policy(**SPACES["hybrid"]))


def as_bytes(damaged: ModelProto, value: float) -> None:
    weight = damaged.graph.initializer[0]
    numbers = numpy_helper.to_array(weight).copy()
    numbers.flat[-1] = value
    weight.CopyFrom(numpy_helper.from_array(numbers, weight.name))


def as_list(damaged: ModelProto, value: float) -> None:
    """ONNX's other form of numbers."""
    weight = damaged.graph.initializer[0]
    numbers = numpy_helper.to_array(weight).ravel().tolist()
    tensor = helper.make_tensor(weight.name, TensorProto.FLOAT, weight.dims, [*numbers[:-1], value])
    weight.CopyFrom(tensor)


def as_constant(damaged: ModelProto, value: float) -> None:
    """Some exporters write weights as nodes."""
    as_bytes(damaged, value)
    weight = damaged.graph.initializer.pop(0)
    node = helper.make_node("Constant", [], [weight.name], value=weight)
    damaged.graph.node.insert(0, node)


def as_attribute(damaged: ModelProto, value: float) -> None:
    """A factor of a dense layer."""
    dense = next(node for node in damaged.graph.node if node.op_type == "Gemm")
    dense.attribute.append(helper.make_attribute("alpha", value))


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Return the one line with which commands refuse a model, and how long the slowest took."""
    monkeypatch.chdir(tmp_path)

    def lines(damaged: ModelProto, *commands: list[str]) -> tuple[list[str], float]:
        path = Path("results/mine/Guess.onnx")
        path.parent.mkdir(parents=True)
        path.write_bytes(damaged.SerializeToString())
        (path.parent / "configuration.yaml").write_text("behaviors: {Guess: {}}\n")
        CsvSink(path.parent / "progress.csv").metrics("Guess", {names.REWARD: 1.0}, 100)
        # A folder as `pipeline card` writes it.
        shutil.copytree(path.parent, "carded")
        Path("carded/README.md").write_text("# Guess\n")
        errors, slowest = [], 0.0
        for command in commands:
            began = time.process_time()
            assert cli.main(command) == 2, command
            slowest = max(slowest, time.process_time() - began)
            errors.append(capsys.readouterr().err)
        return errors, slowest

    return lines


COMMANDS = (
    ["onnx", "check", "results/mine/Guess.onnx"],
    ["evaluate", "results/mine/Guess.onnx", "--env", "balance_ball"],
    ["card", "results/mine", "-o", "card"],
    ["push", "results/mine", "--repo-id", "me/mine"],
    ["push", "carded", "--repo-id", "me/mine"],
)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("damage", [as_bytes, as_list, as_constant, as_attribute])
def test_weights_that_are_not_finite_are_refused(damage, value, refused):
    damaged = model()
    damage(damaged, value)
    # A card describes a file; commands that would run it look at its nodes, too.
    commands = COMMANDS[:2] if damage is as_attribute else COMMANDS
    for error in refused(damaged, *commands)[0]:
        assert len(error.splitlines()) == 1, error
        assert "Guess.onnx: " in error
        assert str(value) in error if damage is as_attribute else "not finite" in error


@pytest.mark.parametrize("is_chain", [False, True])
def test_thousands_of_useless_nodes_are_refused_at_once(is_chain, refused):
    damaged = model()
    for i in range(20_000):
        source = f"useless_{i - 1}" if is_chain and i else "obs_0"
        damaged.graph.node.append(helper.make_node("Identity", [source], [f"useless_{i}"]))
    errors, slowest = refused(damaged, *COMMANDS)
    n_nodes = len(damaged.graph.node)
    for error in errors:
        assert len(error.splitlines()) == 1, error
        assert f"Guess.onnx: no output needs 20000 of its {n_nodes} nodes" in error
    assert slowest < 2.0


def test_a_file_of_very_many_parts_is_refused_at_once(refused):
    damaged = model()
    axes = damaged.graph.input[0].type.tensor_type.shape.dim
    axes.extend([axes[0]] * 300_000)
    (error,), slowest = refused(damaged, COMMANDS[0])
    assert "Guess.onnx: it has more than 100000 parts" in error
    assert slowest < 3.0


def test_a_few_useless_nodes_and_infinite_bounds_are_allowed(tmp_path):
    """Other exporters leave some."""
    harmless = model()
    for i in range(10):
        harmless.graph.node.append(helper.make_node("Identity", ["obs_0"], [f"useless_{i}"]))
    spare = helper.make_node("Clip", ["obs_0"], ["spare"], max=np.inf, min=-np.inf)
    harmless.graph.node.append(spare)
    OnnxPolicy(harmless)


@pytest.mark.parametrize("place", ["weight", "mean"])
def test_our_own_export_of_weights_that_are_not_finite_is_refused(place, tmp_path):
    policy = reference.policy(**SPACES["hybrid"])
    recording = record(policy, reference.observations(policy, 3))
    with torch.no_grad():
        if place == "weight":
            next(policy.actor.parameters()).view(-1)[0] = np.nan
        else:
            normalizer = next(iter(policy.normalizers.by_observation.values()))
            normalizer.mean[0] = np.inf
            normalizer.forget_scale()
    with pytest.raises(ExportError, match="1 values that are not finite"):
        publish(policy, tmp_path / "a.onnx", recording=recording)
    assert not list(tmp_path.iterdir())
