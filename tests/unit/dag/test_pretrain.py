"""The arguments that the stage `pretrain` gives to the trainer, and its outputs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline import trainer
from pipeline.dag.stages import pretrain
from pipeline.trainer.pretraining import PretrainResult


@pytest.mark.parametrize("is_trained", [True, False])
def test_pretrain_stage_passes_all_settings_to_the_trainer_and_writes_the_losses(
    is_trained, monkeypatch, tmp_path
):
    asked, told, threads = {}, [], []

    def trained(demos, settings, **options):
        asked.update(options, demos=demos, settings=settings)
        return PretrainResult(
            behavior="A",
            n_rows=90,
            epochs=2,
            loss=0.25,
            held_out_loss=1.5,
            losses=[(1.0, 2.0), (float("nan"), 1.5)],
            checkpoint=Path("a.pt"),
        )

    @contextlib.contextmanager
    def given(value):
        yield value

    def out(name):
        return tmp_path / name

    attempt = SimpleNamespace(run=tmp_path / "scratch", done=False, out=out)
    job = SimpleNamespace(
        inputs=[Path("data/demos/expert.demo")],
        params={"pretrain": {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3}},
    )
    monkeypatch.setattr(trainer, "pretrain", trained)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(pretrain, "job_of", lambda _: job)
    monkeypatch.setattr(pretrain, "attempt_at", lambda *_: given(attempt))
    monkeypatch.setattr(pretrain.provenance, "of_stage", lambda *a, **more: (a[2], more))
    monkeypatch.setattr(pretrain.policies, "join", lambda *a, **more: told.append((*a, more)))
    monkeypatch.setattr(pretrain.run_context, "recorded", lambda *_: given("record"))
    monkeypatch.setattr(pretrain.run_context, "tell_pretraining", lambda *a: told.append(a))
    run = SimpleNamespace(
        root=tmp_path,
        name="e",
        seed=7,
        runtime=lambda: {"torch_threads": 3, "device": "cuda"},
        params=SimpleNamespace(network_settings=lambda name: f"networks of {name}"),
        experiment=SimpleNamespace(
            demonstrations="expert", stages=("pretrain", "train") if is_trained else ("pretrain",)
        ),
    )
    pretrain.pretrain(run)
    demonstrations = Path("data/demos/expert.demo")
    assert asked == {
        "demos": [tmp_path / demonstrations],
        "settings": "networks of e",
        "seed": 7,
        "run_dir": tmp_path / "scratch",
        "device": "cuda",
        **job.params["pretrain"],
    }
    assert threads == [3]
    history = [(job.params, {"demonstrations": ("expert", demonstrations)})]
    joined = ({"A": Path("a.pt")}, tmp_path / "policy.pt", {"history": history})
    # With a stage `train`, the MLflow run belongs to that stage.
    assert told == ([joined] if is_trained else [joined, ("record", tmp_path)])
    metrics = {"rows": 90, "epochs": 2, "loss": 0.25, "held_out_loss": 1.5}
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"A": metrics}
    lines = (tmp_path / "progress.csv").read_text().splitlines()
    assert lines == ["step,loss,held_out_loss", "1,1,2", "2,nan,1.5"]
