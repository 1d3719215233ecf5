"""Reports of users who load, share and check ONNX files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import onnx
import pytest
import reference
import torch
from field_environments import Steering
from onnx import ModelProto, TensorProto, helper, numpy_helper

from pipeline.cli import main as cli
from pipeline.cli.onnx import check
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ScaledSpec
from pipeline.dag.stages import export
from pipeline.demos.behavior_spec import spec_of
from pipeline.demos.demo_file import writing_demo
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import DemonstrationError, ExportError
from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import build_model, meanings, publish, record
from pipeline.settings import load_run_settings
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator
from pipeline.simulators.bridges.space_text import from_text
from pipeline.tracking import names
from pipeline.tracking.curve_csv import CsvSink
from pipeline.trainer import JobSpec, train
from pipeline.wire.codec.decoding import behavior_spec_from
from pipeline.wire.codec.encoding import brain_parameters, encode_steps
from pipeline.wire.codec.generated.messages import BrainParametersProto

SPACES = {
    "continuous": {"continuous": 2, "branches": ()},
    "discrete": {"continuous": 0, "branches": (3, 2)},
    "hybrid": {"continuous": 2, "branches": (3,)},
}


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("space", SPACES)
def test_onnx_inputs_and_outputs_are_in_the_order_of_mlagents(space, memory):
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
    """Write a weight as a list of floats, ONNX's other form of numbers."""
    weight = damaged.graph.initializer[0]
    numbers = numpy_helper.to_array(weight).ravel().tolist()
    tensor = helper.make_tensor(weight.name, TensorProto.FLOAT, weight.dims, [*numbers[:-1], value])
    weight.CopyFrom(tensor)


def as_constant(damaged: ModelProto, value: float) -> None:
    """Write a weight as a Constant node, as some exporters do."""
    as_bytes(damaged, value)
    weight = damaged.graph.initializer.pop(0)
    node = helper.make_node("Constant", [], [weight.name], value=weight)
    damaged.graph.node.insert(0, node)


def as_attribute(damaged: ModelProto, value: float) -> None:
    """Set the attribute `alpha`, a factor of a dense layer."""
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
        CsvSink(path.parent / "progress.csv").on_summary("Guess", {names.REWARD: 1.0}, 100)
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
def test_onnx_file_with_non_finite_weights_is_refused(damage, value, refused):
    damaged = model()
    damage(damaged, value)
    # A card only describes the file; commands that run the file also check its nodes.
    commands = COMMANDS[:2] if damage is as_attribute else COMMANDS
    for error in refused(damaged, *commands)[0]:
        assert len(error.splitlines()) == 1, error
        assert "Guess.onnx: " in error
        assert str(value) in error if damage is as_attribute else "not finite" in error


@pytest.mark.parametrize("is_chain", [False, True])
def test_onnx_file_with_thousands_of_unused_nodes_is_refused_quickly(is_chain, refused):
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


def test_onnx_file_with_too_many_parts_is_refused_quickly(refused):
    damaged = model()
    axes = damaged.graph.input[0].type.tensor_type.shape.dim
    axes.extend([axes[0]] * 300_000)
    (error,), slowest = refused(damaged, COMMANDS[0])
    assert "Guess.onnx: it has more than 100000 parts" in error
    assert slowest < 3.0


def test_onnx_file_with_few_unused_nodes_and_infinite_bounds_is_accepted(tmp_path):
    """Other exporters leave some unused nodes in their files."""
    harmless = model()
    for i in range(10):
        harmless.graph.node.append(helper.make_node("Identity", ["obs_0"], [f"useless_{i}"]))
    spare = helper.make_node("Clip", ["obs_0"], ["spare"], max=np.inf, min=-np.inf)
    harmless.graph.node.append(spare)
    OnnxPolicy(harmless)


@pytest.mark.parametrize("place", ["weight", "mean"])
def test_export_of_non_finite_weights_is_refused(place, tmp_path):
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


MEANINGS = {
    "obs_0": "camera; 0 to 1 stand for 0 to 255",
    "obs_1": "depth; 0 to 1 stand for -1 to 1",
    "obs_2": "speed",
    "continuous_actions": "numbers 0 to 1: -1 to 1 stand for -0.4 to 0.4; "
    "number 2: -1 to 1 stand for 0 to 10",
    "discrete_actions": "branch 0: choice 0 stands for -1",
}


def meanings_in(path: Path) -> dict[str, str]:
    """Return the descriptions of tensors in a file's metadata, which Netron shows."""
    properties = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
    prefix = "pipeline.meaning."
    return {k.removeprefix(prefix): v for k, v in properties.items() if k.startswith(prefix)}


def test_exported_onnx_file_describes_the_scale_of_its_inputs_and_outputs(tmp_path):
    """The environment's bounds reach the file through the checkpoint, as in both engines."""
    settings = {
        "trainer_type": "ppo",
        "max_steps": 8,
        "network_settings": {"hidden_units": 4},
        "hyperparameters": {"batch_size": 4, "buffer_size": 8},
    }
    job = JobSpec(
        InProcessEnvironment(GymnasiumSimulator(id=[Steering()], visual="always")),
        load_run_settings(None, overrides={"behaviors": {"Steering": settings}}),
        seed=1,
        run_dir=tmp_path / "run",
    )
    result = train(job)
    export.publish(result.behaviors["Steering"].checkpoint, tmp_path)
    path = tmp_path / "Steering.onnx"
    assert meanings_in(path) == MEANINGS
    assert "obs_1, image of 1 x 20 x 20: depth; 0 to 1 stand for -1 to 1" in check(path)


def test_descriptions_of_scales_reach_the_trainer_and_do_not_affect_equality_of_behaviors():
    """In the field that ML-Agents' announcement has for descriptions of actions."""
    simulator = GymnasiumSimulator(id=[Steering()], visual="always")
    ((name, spec),) = simulator.behavior_specs.items()
    brain = brain_parameters(name, spec)
    first = encode_steps(*simulator.reset()[name], spec).value[0]
    heard = behavior_spec_from(BrainParametersProto.FromString(brain.SerializeToString()), first)
    assert heard == spec == BehaviorSpec(*spec)
    described = meanings(heard)
    assert from_text(described.pop("pipeline.spaces"))["action"] == Steering.action_space
    assert described == {f"pipeline.meaning.{key}": text for key, text in MEANINGS.items()}


def test_exported_onnx_file_for_a_unity_player_describes_the_default_scales():
    spec = BehaviorSpec([ObservationSpec.visual(3, 20, 20, "eye")], ActionSpec(2, (3,)))
    texts = {
        "obs_0": "eye; 0 to 1; bytes were divided by 255",
        "continuous_actions": "-1 to 1, not scaled",
    }
    assert meanings(spec) == {f"pipeline.meaning.{key}": text for key, text in texts.items()}
    # Descriptions that another program has sent are ignored, because their form is unknown.
    assert meanings(ScaledSpec.of(spec, ["jump", "turn: left or right"])) == meanings(spec)


@pytest.fixture
def hybrid(tmp_path):
    """A published policy, and the behavior that it was trained for."""
    policy = reference.policy(**SPACES["hybrid"])
    path = tmp_path / "Guess.onnx"
    publish(policy, path, recording=record(policy, reference.observations(policy, 3)))
    return path, policy.spec


def test_onnx_check_lists_unity_packages_and_only_its_option_full_prints_format_versions(
    hybrid, fixtures
):
    path, _ = hybrid
    text = check(path)
    assert text.startswith(
        f"{path}: Unity can load this file with package 2.0 and newer; an older package needs "
        "a file of its own release's trainer.\n"
    )
    assert "opset" not in text
    assert "version_number 3, opset 9, IR version 6" in check(path, full=True)
    old = check(fixtures / "onnx/SoccerTwos.onnx")
    assert "SoccerTwos.onnx: Unity can load this file with package 1.x and newer." in old
    assert "acts      discrete actions, 9 choices over all branches" in old
    assert "acts      1 branch of 3 choices" in text


def test_onnx_check_reports_each_wrong_file_of_several(hybrid, fixtures, tmp_path, capsys):
    (tmp_path / "wrong.onnx").write_bytes(b"text")
    paths = [hybrid[0], tmp_path / "wrong.onnx", fixtures / "onnx/SoccerTwos.onnx"]
    assert cli.main(["onnx", "check", *map(str, paths)]) == 2
    out, err = capsys.readouterr()
    said = [line.partition(": Unity can load")[0] for line in out.splitlines() if line[0] != " "]
    assert said == [str(paths[0]), str(paths[2])]
    assert err.startswith(f"error: {paths[1]}: is not an ONNX model")
    assert cli.main(["onnx", "check", str(paths[0]), str(paths[2])]) == 0
    assert capsys.readouterr().out == out


def test_onnx_check_compares_a_model_with_a_demonstration_or_an_environment(
    hybrid, tmp_path, capsys
):
    path, spec = hybrid
    other = spec._replace(action_spec=ActionSpec(2, (4,)))
    for name, recorded in (("same", spec), ("other", other)):
        with writing_demo(tmp_path / f"{name}.demo", "Guess", recorded) as writer:
            actions = recorded.action_spec
            writer.append(
                obs=[np.zeros((1, *obs.shape), np.float32) for obs in recorded.observation_specs],
                actions=actions.empty_action(1),
                reward=np.zeros(1, np.float32),
                done=np.ones(1, bool),
                interrupted=np.zeros(1, bool),
                action_mask=[np.zeros((1, n), bool) for n in actions.discrete_branches],
            )
    assert cli.main(["onnx", "check", str(path), "--demo", str(tmp_path / "same.demo")]) == 0
    assert f"  fits      Guess of {tmp_path}/same.demo\n" in capsys.readouterr().out
    assert cli.main(["onnx", "check", str(path), "--demo", str(tmp_path / "other.demo")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Guess.onnx: does not fit the behavior Guess of {tmp_path}/other.demo: " in line
    assert "discrete_action_output_shape is [3], the behavior has [4]; train in" in line
    assert cli.main(["onnx", "check", str(path), "--env", "balance_ball"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "does not fit the behavior 3DBall of balance_ball: " in line


def test_onnx_check_compares_a_model_with_the_behavior_that_has_the_name_of_the_file():
    class Two:
        behavior_specs: ClassVar = {"A?team=0": "first", "Guess?team=1": "second"}

        def reset(self):
            pass

        close = reset

    assert spec_of("two", lambda _: Two(), default="Guess")[:2] == ("Guess", "second")
    assert spec_of("two", lambda _: Two(), "A", default="Guess")[:2] == ("A", "first")
    with pytest.raises(DemonstrationError, match="has the behaviors A, Guess; name one of them"):
        spec_of("two", lambda _: Two(), default="Guess-500")
    with pytest.raises(
        DemonstrationError, match="--behavior: two has no behavior 'B'; name one of A, Guess"
    ):
        spec_of("two", lambda _: Two(), "B", default="Guess")


def test_onnx_check_refuses_an_unknown_behavior(here, monkeypatch, capsys):
    """Regression: the output was `fits Foo of balance_ball`."""
    env = SimpleNamespace(reset=lambda: None, close=lambda: None, behavior_specs={"B?team=0": None})
    monkeypatch.setattr("pipeline.api.make_env", lambda _: env)
    monkeypatch.setattr("pipeline.cli.onnx.check", lambda *_, **__: "checked")
    (here / "B.onnx").touch()
    for options, said in {
        ("--env", "ball"): "--behavior: ball has no behavior 'Foo'; name one of B",
        (): "--behavior: needs --env or --demo, which has the",
    }.items():
        assert cli.main(["onnx", "check", "B.onnx", "--behavior", "Foo", *options]) == 2
        assert f"error: {said}" in capsys.readouterr().err
