import numpy as np
import pytest
import reference
from onnx import TensorProto, helper, numpy_helper

from pipeline.cli.onnx import check
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import ExportError
from pipeline.export.contract import check_model, model_findings, publishing_findings
from pipeline.export.layout import describe, read_constants
from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import build_model

SPEC = BehaviorSpec(
    [ObservationSpec.vector(4), ObservationSpec.visual(3, 20, 30), ObservationSpec.entities(6, 2)],
    ActionSpec(2, (3, 2)),
)
INPUTS = {
    "obs_0": ("batch", 4),
    "obs_1": ("batch", 3, 20, 30),
    "obs_2": ("batch", 6, 2),
    "action_masks": ("batch", 5),
    "recurrent_in": ("batch", 1, 8),
}
OUTPUTS = {
    "continuous_actions": ("batch", 2),
    "deterministic_continuous_actions": ("batch", 2),
    "discrete_actions": ("batch", 2),
    "deterministic_discrete_actions": ("batch", 2),
    "recurrent_out": ("batch", 1, 8),
}
CONSTANTS = {
    "version_number": [3.0],
    "memory_size": [8.0],
    "continuous_action_output_shape": [2.0],
    "discrete_action_output_shape": [[3.0, 2.0]],
}
VECTOR, IMAGE, LIST = SPEC.observation_specs
V2_SPEC = SPEC._replace(observation_specs=[VECTOR, IMAGE, ObservationSpec.vector(5), LIST])
V2 = {
    "inputs": {
        "vector_observation": ("batch", 9),
        "visual_observation_0": ("batch", 3, 20, 30),
        "obs_3": ("batch", 6, 2),
        "action_masks": ("batch", 5),
    },
    "outputs": {"continuous_actions": ("batch", 2), "discrete_actions": ("batch", 5)},
    "constants": {
        "version_number": [2.0],
        "memory_size": [0.0],
        "continuous_action_output_shape": [2.0],
        "discrete_action_output_shape": [5.0],
    },
}


def model(inputs=INPUTS, outputs=OUTPUTS, constants=CONSTANTS):
    """Return a model with these declarations; its nodes compute nothing useful."""
    declared = [helper.make_tensor_value_info(n, 1, list(s)) for n, s in inputs.items()]
    arrays = {n: np.array(v, dtype=np.float32) for n, v in constants.items()}
    results = [helper.make_tensor_value_info(n, 1, list(s)) for n, s in outputs.items()]
    results += [helper.make_tensor_value_info(n, 1, v.shape) for n, v in arrays.items()]
    nodes = [helper.make_node("Identity", [next(iter(inputs))], [name]) for name in outputs]
    weights = [numpy_helper.from_array(v, n) for n, v in arrays.items()]
    graph = helper.make_graph(nodes, "g", declared, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=6)


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


def rules(findings):
    return [(finding.rule, finding.severity) for finding in findings]


V2_IMAGES = V2_SPEC._replace(
    observation_specs=[IMAGE, ObservationSpec.vector(9), ObservationSpec.visual(1, 8, 8)]
)
LEGACY = {"prev_action": ("batch", 2), "epsilon": ("batch", 2), "sequence_length": (1,)}
IMAGES = {"visual_observation_0": ("n", 3, 20, 30), "visual_observation_1": ("n", 1, 8, 8)}


@pytest.mark.parametrize(
    ("parts", "spec", "options"),
    [
        ({}, SPEC, {}),
        ({}, SPEC, {"deterministic": True}),
        ({}, None, {}),
        ({"inputs": INPUTS | LEGACY}, SPEC, {}),
        (V2, V2_SPEC, {}),
        # Images in the order of the visual sensors.
        (V2 | {"inputs": without(V2["inputs"], "obs_3") | IMAGES}, V2_IMAGES, {}),
    ],
)
def test_model_that_fits_the_behavior_gives_no_finding(parts, spec, options):
    assert check_model(model(**parts), spec, **options) == []


def test_discrete_actions_of_a_v2_model_may_be_declared_as_floats_with_a_variable_batch_size():
    outputs = V2["outputs"] | {"discrete_actions": ("n", 5)}
    findings = model_findings(model(**V2 | {"outputs": outputs}), V2_SPEC)
    assert not any("discrete_actions" in finding.message for finding in findings)


def test_branches_of_a_v2_model_are_compared_by_their_sum():
    constants = V2["constants"] | {"discrete_action_output_shape": [4.0, 2.0]}
    (finding,) = check_model(model(**V2 | {"constants": constants}), V2_SPEC)
    assert finding.message == "discrete_action_output_shape is 6, the behavior has 5"


@pytest.mark.parametrize(
    ("absent", "actions", "zero"),
    [("discrete", ActionSpec(2, ()), [[0.0]]), ("continuous", ActionSpec(0, (3, 2)), [0.0])],
)
def test_zero_in_a_shape_constant_means_that_the_model_has_no_actions_of_this_kind(
    absent, actions, zero
):
    names = [f"{prefix}{absent}_actions" for prefix in ("", "deterministic_")]
    candidate = model(
        outputs=without(OUTPUTS, *names),
        constants=CONSTANTS | {f"{absent}_action_output_shape": zero},
    )
    assert check_model(candidate, SPEC._replace(action_spec=actions)) == []
    described = describe(candidate)
    assert ActionSpec(described.continuous_size, described.discrete_branches) == actions


@pytest.mark.parametrize(
    ("rule", "absent"),
    [("7", "deterministic_continuous_actions"), ("8", "deterministic_discrete_actions")],
)
def test_deterministic_outputs_are_required_only_for_deterministic_inference(rule, absent):
    candidate = model(outputs=without(OUTPUTS, absent))
    assert check_model(candidate, SPEC) == []
    assert rules(check_model(candidate, SPEC, deterministic=True)) == [(rule, "warning")]


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("2", {"constants": without(CONSTANTS, "version_number", "memory_size")}),
        ("3", {"constants": without(CONSTANTS, "memory_size")}),
        ("4", {"outputs": {"recurrent_out": ("batch", 1, 8)}}),
        ("5", {"outputs": {"action": ("batch", 2)}, "inputs": {"obs_0": ("batch", 4)}}),
        ("6", {"constants": without(CONSTANTS, "continuous_action_output_shape")}),
        ("7", {"constants": CONSTANTS | {"continuous_action_output_shape": [0.0]}}),
        ("8", {"constants": without(CONSTANTS, "discrete_action_output_shape")}),
        ("8", {"constants": CONSTANTS | {"discrete_action_output_shape": [[0.0]]}}),
        ("11", {"constants": CONSTANTS | {"memory_size": [-1.0]}, "inputs": {"x": ("batch", 1)}}),
        ("12", {"inputs": without(INPUTS, "obs_2")}),
        ("13", {"inputs": without(INPUTS, "recurrent_in")}),
        ("14", {"inputs": without(INPUTS, "action_masks")}),
        ("15", {"inputs": INPUTS | {"obs_3": ("batch", 1)}}),
        ("15", {"inputs": INPUTS | {"batch_size": (1,)}}),
        ("16", {"inputs": INPUTS | {"obs_0": ("batch", 5)}}),
        ("16", {"inputs": INPUTS | {"obs_1": ("batch", 20, 30, 3)}}),
        ("16", {"inputs": INPUTS | {"obs_2": ("batch", 6, 3)}}),
        ("17", {"inputs": INPUTS | {"prev_action": ("batch", 3)}}),
        ("18", {"constants": CONSTANTS | {"continuous_action_output_shape": [3.0]}}),
        ("19", {"constants": CONSTANTS | {"discrete_action_output_shape": [[2.0, 3.0]]}}),
        ("19", {"constants": CONSTANTS | {"discrete_action_output_shape": [[5.0]]}}),
        ("19", {"constants": without(CONSTANTS, "discrete_action_output_shape")
                | {"memory_size": [0.0]}, "outputs": {"continuous_actions": ("batch", 2)},
                "inputs": without(INPUTS, "action_masks", "recurrent_in")}),
        ("20", {"outputs": without(OUTPUTS, "recurrent_out")}),
        ("v2-a", {"inputs": without(V2["inputs"], "vector_observation")}),
        ("v2-a", {"inputs": V2["inputs"] | {"vector_observation": ("batch", 4)}}),
        ("v2-b", {"inputs": without(V2["inputs"], "visual_observation_0")}),
        ("v2-b", {"inputs": V2["inputs"] | {"visual_observation_0": ("batch", 3, 30, 20)}}),
        ("v2-b", {"inputs": V2["inputs"] | {"visual_observation_1": ("batch", 3, 30, 20)}}),
        ("v2-c", {"inputs": without(V2["inputs"], "obs_3")}),
        ("v2-d", {"constants": V2["constants"] | {"discrete_action_output_shape": [6.0]}}),
        ("v2-18", {"constants": V2["constants"] | {"continuous_action_output_shape": [1.0]}}),
    ],
)  # fmt: skip
def test_model_that_breaks_one_rule_gets_only_the_finding_of_this_rule(rule, changes):
    parts, spec = (V2 | changes, V2_SPEC) if rule.startswith("v2") else (changes, SPEC)
    assert rules(check_model(model(**parts), spec)) == [(rule.replace("v2-18", "18"), "warning")]


def test_a_description_has_the_opset_and_the_memory_size_of_its_model():
    described = describe(model())
    assert (described.opset, described.ir_version, described.memory_size) == (9, 6, 8)
    candidate = model(constants=without(CONSTANTS, "memory_size"))
    foreign = helper.make_opsetid("ai.onnx.ml", 3)
    candidate.opset_import.insert(0, foreign)
    assert (describe(candidate).opset, describe(candidate).memory_size) == (9, 0)
    del candidate.opset_import[1]
    assert describe(candidate).opset == 0


@pytest.mark.parametrize(("version", "is_refused"), [(1.0, True), (3.0, False), (4.0, True)])
def test_version_number_of_a_model_decides_whether_the_model_can_be_loaded(version, is_refused):
    findings = check_model(model(constants=CONSTANTS | {"version_number": [version]}))
    assert rules(findings) == ([("9", "error")] if is_refused else [])


def test_v2_model_with_memory_is_an_error():
    parts = V2 | {"constants": V2["constants"] | {"memory_size": [8.0]}}
    assert ("10", "error") in rules(check_model(model(**parts), V2_SPEC))


def test_model_in_the_deprecated_layout_is_compared_by_the_constants_of_this_layout():
    constants = {"version_number": [2.0], "memory_size": [0.0]}
    constants |= {"action_output_shape": [2.0], "is_continuous_control": [1.0]}
    inputs = {"vector_observation": ("batch", 4)}
    candidate = model(inputs, {"action": ("batch", 2)}, constants)
    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec(2, ()))
    assert check_model(candidate, spec) == []
    assert rules(check_model(candidate, BehaviorSpec(spec[0], ActionSpec(3, ())))) == [
        ("18", "warning")
    ]
    assert describe(candidate).continuous_size == 2


@pytest.mark.parametrize("told", [{"is_continuous_control": [0.0]}, {}])
def test_discrete_branches_of_a_model_in_the_deprecated_layout_are_described_by_their_sum(told):
    constants = {"version_number": [2.0], "memory_size": [0.0], "action_output_shape": [5.0]}
    inputs = {"vector_observation": ("batch", 4), "action_masks": ("batch", 5)}
    described = describe(model(inputs, {"action": ("batch", 5)}, constants | told))
    assert (described.continuous_size, described.discrete_branches) == (0, (5,))


def test_constants_are_read_from_initializers_constant_nodes_and_identity_nodes():
    tensors = {name: np.full(1, index, dtype=np.float32) for index, name in enumerate("abcd")}
    nodes = [
        helper.make_node("Constant", [], ["b"], value=numpy_helper.from_array(tensors["b"])),
        helper.make_node("Identity", ["weight"], ["c"]),
        helper.make_node("Constant", [], ["inner"], value=numpy_helper.from_array(tensors["d"])),
        helper.make_node("Identity", ["inner"], ["d"]),
        helper.make_node("Identity", ["x"], ["e"]),
        helper.make_node("Constant", [], ["f"], value_float=1.0),
    ]
    weights = [
        numpy_helper.from_array(tensors[k], name) for k, name in (("a", "a"), ("c", "weight"))
    ]
    x, *results = (helper.make_tensor_value_info(name, 1, [1]) for name in "xabcdef")
    graph = helper.make_graph(nodes, "g", [x], results, weights)
    constants = read_constants(helper.make_model(graph))
    read, expected = (
        {name: value.tolist() for name, value in each.items()} for each in (constants, tensors)
    )
    assert read == expected


def built(**parts):
    graph = reference.policy(continuous=2, **parts or {"branches": (3,)})
    return build_model(graph), graph.spec


def one(parts, **fields):
    """Return the first node, attribute or tensor with these values."""
    return next(p for p in parts if all(getattr(p, key) == fields[key] for key in fields))


def declared(candidate, name):
    """Return the declaration of an input or output."""
    return one([*candidate.graph.input, *candidate.graph.output], name=name).type.tensor_type


def declare(name, element_type):
    def damage(candidate):
        declared(candidate, name).elem_type = element_type

    return damage


def resize(name, axis, size):
    def damage(candidate):
        dim = declared(candidate, name).shape.dim[axis]
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size

    return damage


def operator(kind, **changes):
    """Change fields or attributes of the first node of a kind."""

    def damage(candidate):
        node = one(candidate.graph.node, op_type=kind)
        for name, value in changes.items():
            if name in ("op_type", "domain"):
                setattr(node, name, value)
            elif name == "input":
                node.input[0] = value
            else:
                attribute = one(node.attribute, name=name)
                setattr(attribute, "f" if isinstance(value, float) else "i", value)

    return damage


def deny(name):
    def damage(candidate):
        for parts in (candidate.graph.initializer, candidate.graph.output):
            parts.remove(one(parts, name=name))

    return damage


def constant(name, *values):
    def damage(candidate):
        weight = one(candidate.graph.initializer, name=name)
        weight.raw_data = np.array(values, np.float32).tobytes()

    return damage


def with_tensor(change):
    """Return a function that changes the first tensor of a model."""
    return lambda candidate: change(candidate.graph.initializer[0])


def memory_size(candidate):
    return one(candidate.graph.initializer, name="memory_size")


def compute_too_much(candidate):
    """Multiply two small tensors that have a large product."""
    column = numpy_helper.from_array(np.zeros((1 << 13, 1), np.float32), "column")
    row = numpy_helper.from_array(np.zeros((1, 1 << 13), np.float32), "row")
    candidate.graph.initializer.extend((column, row))
    candidate.graph.node.append(helper.make_node("MatMul", ["column", "row"], ["square"]))


ENDLESS = TensorProto(name="odd", data_type=1, dims=[0, 1 << 62])


@pytest.mark.parametrize(
    ("rule", "damage"),
    [
        ("2", deny("version_number")),
        ("3", deny("memory_size")),
        ("publish-opset", lambda c: setattr(c.opset_import[0], "version", 99)),
        ("publish-operators", operator("Sigmoid", domain="com.other")),
        ("publish-masks", resize("action_masks", 1, 4)),
        ("publish-actions", resize("continuous_actions", 1, 3)),
        ("publish-actions", resize("deterministic_discrete_actions", 1, 2)),
        ("publish-actions", constant("continuous_action_output_shape", 3.0)),
        ("publish-masks", constant("discrete_action_output_shape", 4.0)),
        ("publish-constant", constant("discrete_action_output_shape", 2.5)),
        ("publish-constant", constant("continuous_action_output_shape", -2.0)),
        ("publish-type", declare("obs_0", TensorProto.DOUBLE)),
        ("publish-operators", operator("RandomNormalLike", scale=0.0)),
        ("publish-operators", operator("Multinomial", sample_size=2)),
        ("publish-size", compute_too_much),
        ("publish-data", with_tensor(lambda t: setattr(t, "raw_data", t.raw_data[:-4]))),
        ("publish-data", lambda c: setattr(memory_size(c), "raw_data", bytes(5))),
        ("publish-data", with_tensor(lambda t: t.ClearField("raw_data"))),
        ("publish-data", lambda c: c.graph.initializer.append(ENDLESS)),
        ("publish-data", with_tensor(lambda t: t.dims.__delitem__(slice(None)))),
        ("publish-data", lambda c: setattr(memory_size(c), "data_type", 99)),
        ("publish-data", with_tensor(lambda t: t.dims.insert(0, 1 << 40))),
        ("publish-data", with_tensor(lambda t: setattr(t, "name", "a\nb"))),
    ],
)
def test_damaged_model_is_found_by_model_findings_and_refused_by_check_and_onnx_policy(
    rule, damage, tmp_path
):
    candidate, _ = built()
    damage(candidate)
    assert rule in {finding.rule for finding in model_findings(candidate)}
    path = tmp_path / "a.onnx"
    path.write_bytes(candidate.SerializeToString())
    for use in (check, OnnxPolicy):
        with pytest.raises(ExportError, match=r"a\.onnx: ") as caught:
            use(path)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("values", [[np.nan], [np.inf], [-np.inf], [1.0, np.inf]], ids=str)
@pytest.mark.parametrize("name", ["version_number", "memory_size"])
def test_constants_that_are_not_finite_are_found_and_refused(name, values):
    candidate, _ = built()
    tensor = one(candidate.graph.initializer, name=name)
    tensor.CopyFrom(numpy_helper.from_array(np.array(values, np.float32), name))
    declared(candidate, name).shape.dim[0].dim_value = len(values)
    found = {finding.rule for finding in model_findings(candidate)}
    assert found == {"publish-data"} or (len(values) > 1 and "publish-data" in found)
    with pytest.raises(ExportError, match=f"{name} of the model has values that are not finite"):
        check_model(candidate)


def test_faults_that_are_common_in_models_of_older_packages_are_reported_only_as_notes(tmp_path):
    candidate, spec = built(memory=6)
    resize("recurrent_out", 0, 1)(candidate)
    outputs = candidate.graph.output
    outputs.remove(one(outputs, name="deterministic_continuous_actions"))
    assert model_findings(candidate, spec) == []
    assert len(publishing_findings(candidate, spec)) == 2
    path = tmp_path / "a.onnx"
    path.write_bytes(candidate.SerializeToString())
    notes = [line for line in check(path).splitlines() if line.startswith("  note ")]
    assert "deterministic" in notes[0]
    assert "recurrent_out has shape [1, 1, 6]" in notes[1]


def test_a_model_without_deterministic_actions_is_still_compared_with_the_behavior():
    """The check for deterministic inference ends before it compares anything."""
    candidate, spec = built()
    outputs = candidate.graph.output
    for name in ("deterministic_continuous_actions", "deterministic_discrete_actions"):
        outputs.remove(one(outputs, name=name))
    assert rules(publishing_findings(candidate, spec)) == [("7", "warning")]
    other = BehaviorSpec(spec.observation_specs, ActionSpec(3, (3,)))
    assert ("18", "warning") in rules(publishing_findings(candidate, other))


def use_doubles(candidate):
    memory_size(candidate).CopyFrom(numpy_helper.from_array(np.zeros(1), "memory_size"))
    declare("memory_size", TensorProto.DOUBLE)(candidate)


def use_external_data(weight):
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="weights.bin")


def add_numbers_of_two_types(candidate):
    number = numpy_helper.from_array(np.ones(1, np.float32), "number")
    integer = numpy_helper.from_array(np.ones(1, np.int64), "whole")
    candidate.graph.initializer.extend((number, integer))
    candidate.graph.node.append(helper.make_node("Add", ["number", "whole"], ["sum"]))


EPSILON = helper.make_tensor_value_info("epsilon", 1, ["batch", 2])
OTHER_DOMAIN = helper.make_opsetid("ai.onnx.ml", 1)


@pytest.mark.parametrize(
    ("rule", "damage"),
    [
        ("publish-opset", lambda c: setattr(c.opset_import[0], "version", 10)),
        ("publish-opset", lambda c: c.opset_import.append(OTHER_DOMAIN)),
        ("publish-ir", lambda c: setattr(c, "ir_version", 8)),
        ("publish-batch", resize("obs_0", 0, "n")),
        ("publish-constant", use_doubles),
        ("publish-data", with_tensor(use_external_data)),
        ("publish-operators", operator("Sigmoid", op_type="Erf")),
        ("publish-unused-input", lambda c: c.graph.input.append(EPSILON)),
        ("publish-checker", operator("Gemm", input="nowhere")),
        ("publish-checker", lambda c: c.graph.node.append(c.graph.node[-1])),
        ("publish-checker", add_numbers_of_two_types),
        ("publish-type", declare("discrete_actions", TensorProto.FLOAT)),
    ],
)
def test_each_damage_to_a_model_is_found_by_the_publishing_rule_for_this_damage(rule, damage):
    candidate, spec = built()
    assert publishing_findings(candidate, spec) == []
    damage(candidate)
    findings = publishing_findings(candidate, spec)
    assert (rule, "error") in rules(findings)
    # Damage may also fail ONNX's own checker, but no other rule of this package.
    assert {finding.rule for finding in findings} <= {rule, "publish-checker"}


@pytest.mark.parametrize(
    ("damage", "n_findings"),
    [
        (resize("recurrent_in", 2, 5), 1),
        (resize("recurrent_out", 0, 1), 1),
        (constant("memory_size", 0.0), 2),
    ],
)
def test_memory_of_a_wrong_shape_is_found_before_publishing(damage, n_findings):
    candidate, spec = built(memory=6)
    assert publishing_findings(candidate, spec) == []
    damage(candidate)
    findings = rules(publishing_findings(candidate, spec))
    assert findings.count(("publish-memory", "error")) == n_findings
