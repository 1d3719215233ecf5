from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import machine
from pipeline.dag.project import PROJECT
from pipeline.dag.stages import train

BEGIN = """
import json, os
from pipeline import machine
machine.restart_in_portable_mode()
import numpy, torch
print(json.dumps([os.getpid(), machine.facts()]))
"""


def test_restart_in_portable_mode_keeps_the_process_id_and_sets_portable_kernels(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BEGIN)
    command = [sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # ours
        pid, facts = json.loads(process.communicate()[0])
    assert process.returncode == 0
    assert pid == process.pid, "who started it waits for this process"
    assert facts["portable"]
    assert facts["torch"] == "DEFAULT"
    assert facts["variables"].items() >= machine.PORTABLE.items()
    assert facts["OpenBLAS threads"] == 1


def test_process_that_is_already_in_portable_mode_is_not_restarted(monkeypatch):
    for name, value in machine.PORTABLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("began again"))
    machine.restart_in_portable_mode()
    assert machine.summary(machine.facts()).startswith("portable")


def test_processor_model_counts_as_a_cause_of_other_rounding_only_without_portable_mode():
    facts = {"portable": False, "processor": "one", "variables": {"A": "1"}, "torch": "AVX2"}
    assert machine.decisive(facts) == {"processor": "one", "torch": "AVX2", "A": "1"}
    assert machine.decisive(facts | {"portable": True}) == {"torch": "AVX2", "A": "1"}
    assert machine.summary(facts) == "one: torch AVX2"


@pytest.mark.parametrize("is_portable", [True, False])
def test_each_torchrun_process_of_a_portable_run_restarts(is_portable, monkeypatch, tmp_path):
    params = Path("tests/workflow/tiny.yaml").read_text()
    if is_portable:
        params = params.replace("device: cpu", "device: cpu\n  deterministic: portable")
    (tmp_path / "params.yaml").write_text(params)
    shutil.copytree("config", tmp_path / "config")
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**variables, PROJECT: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(machine, "restart_in_portable_mode", lambda: calls.append("begun again"))
    monkeypatch.setattr("pipeline.trainer.worker.work", lambda: calls.append("learned") or 0)
    assert train.main(["plain", "--seed", "1"]) == 0
    assert calls == ["begun again"] * is_portable + ["learned"]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("max 100000", 8),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        (None, 8),
    ],
)
def test_container_has_as_many_processors_as_its_share_of_their_time(
    share, expected, monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "_CGROUP_SHARE", tmp_path / "cpu.max")
    if share is not None:
        (tmp_path / "cpu.max").write_text(f"{share}\n")
    assert machine.n_processors() == expected
