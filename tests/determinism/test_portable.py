"""Portable trainings compute the stored tensors, on whatever x86-64 processor runs the tests."""

import json
import platform
import re
from importlib import metadata
from pathlib import Path

import portable_trace
import pytest
from interpreter import python

import pipeline

SCRIPT = portable_trace.__file__


def stored(case: str) -> dict:
    return json.loads((portable_trace.FOLDER / f"{case}.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="--portable covers x86-64 alone")
@pytest.mark.parametrize("case", portable_trace.CASES)
def test_portable_training_computes_the_stored_tensors(case):
    versions = stored(case)["versions"]
    now = {name: metadata.version(name).partition("+")[0] for name in versions}
    if now != versions:
        pytest.skip(f"made with {versions}, and installed are {now}; `make install` has the first")
    file = portable_trace.FOLDER / f"{case}.json"
    done = python(SCRIPT, case, "--against", file, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\ndocs/explanation/provenance.md"
    assert f"{len(portable_trace.rows_of(stored(case)))} tensors are the same" in done.stdout


@pytest.mark.parametrize("case", portable_trace.CASES)
def test_stored_trace_of_a_training_contains_all_stages_and_names_the_cpu_that_computed_it(case):
    content = stored(case)
    assert content["processor"].startswith("x86_64 ")
    stages = [stage.partition(",")[0] for stage in content["trace"]]
    assert {"observe", "act", "update 1", "weights after update 1"} <= set(stages)
    kernels = {"images": "aten.convolution", "memory": "aten.mkldnn_rnn_layer"}
    tensors = [tensor for _, tensor, _ in portable_trace.rows_of(content)]
    assert any(tensor.startswith(kernels.get(case, "aten.addmm")) for tensor in tensors)
    assert any("backward" in tensor or "aten.mm" in tensor for tensor in tensors)


def test_no_source_calls_the_square_root_of_torch_which_differs_between_processors():
    """Compiled steps have Inductor's square root, and are never part of a portable training."""
    calls = re.compile(r"\.sqrt\(\)|torch\.sqrt\(|_sqrt\(")
    found = {
        file.name
        for file in Path(pipeline.__file__).parent.rglob("*.py")
        if calls.search(file.read_text("utf-8"))
    }
    assert found == {"adam.py"}


def test_function_first_difference_names_the_first_tensor_that_differs_between_two_traces():
    rows = portable_trace.rows_of(stored("PPO"))
    assert portable_trace.first_difference(rows, rows) is None
    other = [list(row) for row in rows]
    number = next(n for n, row in enumerate(rows) if row[1].startswith("aten.addmm"))
    other[number][2] = other[number + 5][2] = "00000000"
    named = portable_trace.first_difference(rows, other)
    assert named == f"update 1: {rows[number][1]} (number {number} of {len(rows)})"
    other[number][1] = "aten.mul"
    assert named is not None
    assert portable_trace.first_difference(rows, other) == (
        f"{named}, where the other run computed aten.mul"
    )
    assert portable_trace.first_difference(rows, rows[:9]) == (
        "one run ends after 9 tensors, the other goes on"
    )


def test_digest_of_an_array_depends_on_values_shape_and_dtype():
    import torch

    values = torch.arange(6, dtype=torch.float32)
    assert portable_trace.digest(values) == portable_trace.digest(values.numpy())
    changed = values.clone()
    changed[3] += 2**-21  # one bit
    others = [changed, values.reshape(2, 3), values.double(), values.int()]
    assert len({portable_trace.digest(value) for value in [values, *others]}) == 5
