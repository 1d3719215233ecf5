"""The policy, history and recorded observations of each exported file."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.dag import provenance
from pipeline.dag.stages import export
from pipeline.export import publish as writing
from pipeline.tracking import run_metadata
from pipeline.trainer.checkpoints import restore


@dataclass
class Report:
    """Stands for the report of a written file."""

    size: int


@pytest.mark.parametrize(
    ("history", "told"),
    [
        ([], None),
        ([{"stage": "pretrain"}, {"stage": "learn"}], [None, [30]]),
        ([{"interrupted_at_steps": [9]}, {"stage": "export"}], [[9], None]),
    ],
)
def test_export_checks_the_onnx_file_with_observations_recorded_in_the_checkpoint(
    history, told, monkeypatch, tmp_path
):
    saved = SimpleNamespace(
        behavior="A",
        policy="policy",
        recorded_obs="seen",
        recorded_masks="allowed",
        interrupted=[30],
        step=70,
    )
    written = []

    def write(policy, target, **options):
        written.append((policy, target, options))
        return Report(size=5)

    monkeypatch.setattr(restore, "load_policy", {Path("a.pt"): saved}.__getitem__)
    monkeypatch.setattr(writing, "record", lambda *arguments: arguments)
    monkeypatch.setattr(writing, "publish", write)
    monkeypatch.setattr(provenance, "text", lambda entries: [*entries])
    report = export.publish(Path("a.pt"), tmp_path, label="-70", history=history)
    assert report == {"size": 5, "step": 70}
    ((policy, target, options),) = written
    assert (policy, target) == ("policy", tmp_path / "A-70.onnx")
    assert options["recording"] == ("policy", "seen", "allowed")
    records = options["metadata"].get(provenance.KEY)
    assert (records and [r.get("interrupted_at_steps") for r in records]) == told


def test_every_behavior_of_a_run_is_exported_with_history_and_digest_of_the_policy(
    monkeypatch, tmp_path
):
    calls, told = [], []
    policy = tmp_path / "results/train/e/seed7/policy.pt"
    policy.parent.mkdir(parents=True)
    policy.write_text("learned")

    @contextlib.contextmanager
    def given(value):
        yield value

    def published(path, folder, *, history):
        calls.append((path, folder, history))
        return {"step": len(calls)}

    record = SimpleNamespace(
        made=told.append, model=lambda path, *, environment: told.append((path, environment))
    )
    attempt = SimpleNamespace(run=tmp_path / "scratch", out=lambda name: tmp_path / "out" / name)
    monkeypatch.setattr(export, "attempt_at", lambda *_: given(attempt))
    monkeypatch.setattr(export.run_context, "recorded", lambda *_: given(record))
    monkeypatch.setattr(
        export.policies, "split", lambda path, to: {n: (path, to, n) for n in ("A", "B")}
    )
    monkeypatch.setattr(export.policies, "history", lambda path: [path.name])
    monkeypatch.setattr(export.provenance, "of_stage", lambda *arguments: arguments[2])
    monkeypatch.setattr(export, "publish", published)
    monkeypatch.setattr(export.files, "write_json", lambda path, value: told.append((path, value)))
    monkeypatch.setattr(export, "read_map", lambda path: dict(told[:1])[path])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    run = SimpleNamespace(
        root=tmp_path,
        instance="e/seed7",
        folder=lambda stage: Path("results") / stage / "e/seed7",
        runtime=lambda: {"torch_threads": 3},
        params=SimpleNamespace(runtime=SimpleNamespace(torch_threads=2)),
        experiment=SimpleNamespace(environment="ball"),
    )
    export.export(run)
    folder, history = tmp_path / "out/seed7", ["policy.pt", {"runtime": {"torch_threads": 3}}]
    assert calls == [((policy, tmp_path / "scratch", n), folder, history) for n in ("A", "B")]
    digest = {run_metadata.POLICY_DIGEST: run_metadata.dvc_digest(policy)}
    reports = {"A": {"step": 1} | digest, "B": {"step": 2} | digest}
    assert told == [
        (folder / "export.json", reports),
        folder,
        (folder / "A.onnx", "ball"),
        (folder / "B.onnx", "ball"),
    ]
