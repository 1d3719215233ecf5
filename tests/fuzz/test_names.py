"""Names that become paths: behaviors, runs, environments, and files in settings."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from fuzzing.frame import command, fuzz
from hypothesis import strategies as st
from made_archives import zipped
from toys import Corridor

import pipeline
from pipeline.cli.learn_run import folder_of, run_folder
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import PipelineError
from pipeline.settings.project.params import load_params
from pipeline.tracking.curve_csv import CsvSink
from pipeline.tracking.sinks import TrackedRun
from pipeline.tracking.sinks.tensorboard import TensorBoardSink

from .mutations import NAMES

_ROOT = Path(__file__).resolve().parents[2]
_LONG = st.sampled_from(("é" * 130, "a" * 250, "a/" * 150, "a" * 5000))
_PATHS = st.sampled_from(
    ("../../up", "a/../../up", "~", "~root/x", "/dev/null", "/proc/self/mem", "a//b", "./a", "a/")
)
_ODD = st.sampled_from(
    (".lock", "checkpoint.pt", "run_logs", "a.tmp", ".a.1.tmp", "a?team=1?team=2", "?team=x", "%2e")
)
_TEXTS = st.one_of(NAMES, _PATHS, _LONG, _ODD, st.text("ab./?\\\0\n:*", max_size=8))


class _Named:
    """The game Corridor with another behavior name."""

    def __init__(self, name: str) -> None:
        self._corridor, self._name = Corridor(n_agents=2), name

    @property
    def behavior_specs(self) -> Any:
        return {self._name: self._corridor.spec}

    def reset(self) -> Any:
        (steps,) = self._corridor.reset().values()
        return {self._name: steps}

    def step(self, actions: Any) -> Any:
        (name,) = self._corridor.behavior_specs
        (steps,) = self._corridor.step({name: actions[self._name]}).values()
        return {self._name: steps}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._corridor, name)


def _train(name: str, max_steps: int, run_dir: Path, *, resume: bool) -> Any:
    behavior = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 4, "buffer_size": 8, "num_epoch": 1},
        "network_settings": {"hidden_units": 4, "num_layers": 1},
        "max_steps": max_steps,
        "checkpoint_interval": 10,
        "summary_freq": 10,
    }
    run = TrackedRun(folder=run_dir, max_steps={})
    return pipeline.train(
        InProcessEnvironment(_Named(name)),  # type: ignore[arg-type]
        {"default_settings": behavior},
        seed=1,
        run_dir=run_dir,
        export=True,
        sinks=[TensorBoardSink(run), CsvSink(run_dir / "progress.csv")],
        resume=resume,
    )


@cache
def _warm_up() -> None:
    """Import the modules that training imports at its beginning."""
    with tempfile.TemporaryDirectory() as folder:
        _train("Toy", 20, Path(folder), resume=False)


@fuzz(_TEXTS, examples=20, warm_up=_warm_up)
def test_runs_with_any_behavior_name_are_resumed_or_refused(name: str, folder: Path) -> None:
    run = folder / "results" / "run"
    (folder / "up").write_text("precious")
    try:
        _train(name, 20, run, resume=False)
        result = _train(name, 40, run, resume=True)
    finally:
        assert sorted(path.name for path in folder.iterdir()) in (["results", "up"], ["up"])
        assert (folder / "up").read_text() == "precious"
    saved = [path for path in run.rglob("checkpoint.pt") if path.parent.parent == run]
    assert len(saved) == 1
    assert len(result.behaviors) == 1
    assert sum(path.name.endswith(".onnx") for path in run.iterdir()) == 1


_ARGUMENTS = _TEXTS.map(lambda text: text.replace("\0", "0"))
"""Texts without NUL, which neither a command's arguments nor settings can contain."""


@fuzz(st.lists(_ARGUMENTS, min_size=1, max_size=3), examples=100)
def test_run_ids_name_folders_in_results_or_are_refused(names: list[str], folder: Path) -> None:
    results = folder / "results"
    (folder / "precious").touch()
    try:
        for name in names:
            with run_folder(folder_of(results, name), resume=False, force=True) as run:
                run.start()
                (run.path / "a").touch()
    finally:
        beside = {path.name for path in folder.iterdir()} - {"precious", "results"}
        assert not beside


def _quoted(text: str) -> str:
    """Return any text as a quoted YAML string."""
    return '"' + "".join(f"\\U{ord(character):08x}" for character in text) + '"'


@fuzz(st.tuples(_ARGUMENTS, _TEXTS), examples=40)
def test_environments_with_any_name_are_fetched_or_refused(
    names: tuple[str, str], folder: Path
) -> object:
    name, other = names
    (folder / "a.zip").write_bytes(zipped({"game.x86_64": b"#!/bin/sh\n"}))
    (folder / "manifest.yaml").write_text(
        f"environments:\n- {_quoted(name)}:\n    linux_url: file://{folder}/a.zip\n"
        f"- b:\n    linux_url: {_quoted(f'file://{folder}/{other}')}\n"
    )
    with mock.patch.dict(os.environ, {"PIPELINE_CACHE": str(folder / "cache")}):
        options = ("--manifest", "manifest.yaml", "--platform", "linux")
        accepted = command("env", "list", *options[:2])
        accepted &= not name.startswith("-") and command("env", "fetch", name, *options)
        accepted and command("env", "fetch", "b", *options)
    return accepted


_URLS = st.one_of(
    _ARGUMENTS.map("file://{}".format),
    st.sampled_from(("http://[", "https://]@x", "file://[/a.zip", "http://", "://", "file:///%00")),
    st.sampled_from(("ftp://x/a", "http:///a.zip", "file://localhost/a%2e%2e/b", "http://a b/")),
)


@fuzz(st.tuples(_URLS, st.sampled_from(("0" * 64, "", "x" * 64))), examples=40)
def test_archives_with_any_url_are_fetched_or_refused(
    example: tuple[str, str], folder: Path
) -> object:
    url, digest = example
    with mock.patch.dict(os.environ, {"PIPELINE_CACHE": str(folder / "cache")}):
        return command("env", "fetch", url, "--sha256", digest)


@fuzz(_ARGUMENTS, examples=60)
def test_commands_accept_or_refuse_files_with_any_name(name: str, folder: Path) -> object:
    if name.startswith("-"):
        return False
    (folder / "config.yaml").write_text("behaviors: {A: {trainer_type: ppo}}\n")
    used = [
        command("demo", "info", name),
        command("config", "check", name),
        command("onnx", "check", name),
        command("config", "upgrade", name, "-o", "new.yaml"),
    ]
    with mock.patch.dict(os.environ, {"PIPELINE_CACHE": str(folder / "cache")}):
        used.append(command("env", "list", "--manifest", name))
    target = folder / name
    if target.is_relative_to(folder) and ".." not in target.parts and name.strip("./"):
        used.append(command("config", "upgrade", "config.yaml", "-o", name))
    return any(used)


@fuzz(_TEXTS, examples=60, warm_up=_warm_up)
def test_files_with_any_name_in_settings_are_used_or_refused(name: str, folder: Path) -> object:
    text = (_ROOT / "params.yaml").read_text()
    (folder / "config").symlink_to(_ROOT / "config")
    (folder / "params.yaml").write_text(text.replace("config/ppo/3DBall.yaml", _quoted(name)))
    cloning = f"behavioral_cloning: {{demo_path: {_quoted(name)}, steps: 4, strength: 1}}"
    for setting in (f"init_path: {_quoted(name)}", cloning):
        (folder / "trainer.yaml").write_text(
            f"behaviors: {{Toy: {{trainer_type: ppo, max_steps: 4, {setting}}}}}\n"
        )
        try:
            env = InProcessEnvironment(Corridor(n_agents=2))
            pipeline.train(env, folder / "trainer.yaml", seed=1, run_dir=folder / "run")
        except PipelineError:
            assert not list((folder / "run").rglob("*.pt"))
    load_params(Path("params.yaml"))
    return True
