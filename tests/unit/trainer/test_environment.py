"""From what a user calls an environment to workers."""

from __future__ import annotations

import logging
import threading

import psutil
import pytest
from toys import Corridor

import pipeline
from pipeline.envs.base import StoredStepsEnv
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import SettingsError, UnityException
from pipeline.settings import load_run_settings
from pipeline.simulators.pack import pack
from pipeline.trainer import environment
from pipeline.trainer.environment import open_workers


def settings_with(parameters):
    return load_run_settings(None, overrides={"environment_parameters": parameters}).with_seed(1)


def test_one_environment_or_several_become_workers_in_their_order():
    one, two = (InProcessEnvironment(Corridor()) for _ in range(2))
    assert open_workers(one, settings_with({}), seed=0, num_envs=1).envs == (one,)
    assert open_workers([two, one], settings_with({}), seed=0, num_envs=1).envs == (two, one)


def test_constants_reach_an_environment_in_this_process():
    toy = Corridor()
    open_workers(InProcessEnvironment(toy), settings_with({"gravity": 3.5}), seed=0, num_envs=1)
    assert toy.parameters == {"gravity": 3.5}


def test_sampler_for_an_environment_in_this_process_is_refused():
    sampler = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 0, "max_value": 1}}
    with pytest.raises(SettingsError, match=r"environment_parameters\.gravity.*'uniform'"):
        open_workers(
            InProcessEnvironment(Corridor()),
            settings_with({"gravity": sampler}),
            seed=0,
            num_envs=1,
        )


class Foreign(StoredStepsEnv):
    """An environment that somebody else has opened."""

    def step(self):
        raise AssertionError

    reset = close = step


def test_parameters_that_cannot_be_sent_are_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        open_workers(Foreign(), settings_with({"gravity": 3.5}), seed=0, num_envs=1)
    assert "environment_parameters.gravity is not sent" in caplog.text


def test_curriculum_of_several_lessons_is_refused():
    criteria = {"behavior": "Toy", "threshold": 0.5}
    lessons = [
        {"name": "easy", "completion_criteria": criteria, "value": 1.0},
        {"name": "hard", "value": 2.0},
    ]
    with pytest.raises(SettingsError, match=r"environment_parameters\.gravity\.curriculum"):
        open_workers(
            InProcessEnvironment(Corridor()),
            settings_with({"gravity": {"curriculum": lessons}}),
            seed=0,
            num_envs=1,
        )


def test_every_process_is_told_engine_and_parameters(monkeypatch):
    seen = {}

    def launch(file_name, n_workers, **options):
        seen.update(options, file_name=file_name, n_workers=n_workers)

    monkeypatch.setattr(environment, "launch_workers", launch)
    sampler = {"sampler_type": "gaussian", "sampler_parameters": {"mean": 2, "st_dev": 1}}
    settings = settings_with({"gravity": 3.5, "wind": sampler})
    open_workers("player", settings, seed=7, num_envs=3, env_args=("--x",), base_port=6000)
    assert (seen["file_name"], seen["n_workers"], seen["seed"]) == ("player", 3, 7)
    assert (seen["args"], seen["base_port"]) == (("--x",), 6000)
    channels = seen["side_channels"]
    assert len(channels) == 3
    assert len({id(channel) for worker in channels for channel in worker}) == 9
    for parameters, engine, _ in channels:
        assert len(parameters.message_queue) == 2
        assert len(engine.message_queue) > 0


@pytest.mark.parametrize(
    ("start", "engine", "expected"),
    [
        (b"\x7fELF", {}, True),
        (b"\x7fELF", {"no_graphics_monitor": True}, False),
        (b"#!/bin/sh\n", {}, False),
        (b"#!/bin/sh\n", {"no_graphics": True}, True),
    ],
)
def test_a_player_runs_headless_where_there_is_no_display(
    monkeypatch, tmp_path, start, engine, expected
):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "PIPELINE_GRAPHICS"):
        monkeypatch.delenv(name, raising=False)
    seen = {}
    monkeypatch.setattr(environment, "launch_workers", lambda *_, **options: seen.update(options))
    player = tmp_path / "Game.x86_64"
    player.write_bytes(start)
    settings = load_run_settings(None, overrides={"engine_settings": engine}).with_seed(1)
    open_workers(tmp_path / "Game", settings, seed=0, num_envs=1)
    assert seen["no_graphics"] is expected
    monkeypatch.setenv("DISPLAY", ":0")
    open_workers(tmp_path / "Game", settings, seed=0, num_envs=1)
    assert seen["no_graphics"] is engine.get("no_graphics", False)


def test_missing_executable_is_named(tmp_path):
    with pytest.raises(UnityException, match="missing"):
        open_workers(tmp_path / "missing", settings_with({}), seed=0, num_envs=1)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_training_an_executable_leaves_no_process_and_no_thread(
    fails, quick, tmp_path, monkeypatch, recorder
):
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    built = pack("grid_world", tmp_path / "grid_world")
    threads, process = set(threading.enumerate()), psutil.Process()
    children = set(process.children(recursive=True))
    settings = quick("GridWorld", max_steps=600)
    if fails:
        monkeypatch.setattr(
            "pipeline.trainer.learner.Learner.learn", lambda _: pytest.fail("stop here")
        )
        with pytest.raises(pytest.fail.Exception):
            pipeline.train(
                built, settings, seed=1, run_dir=tmp_path / "run", num_envs=2, sinks=[recorder]
            )
    else:
        result = pipeline.train(
            built, settings, seed=1, run_dir=tmp_path / "run", num_envs=2, sinks=[recorder]
        )
        assert result.behaviors["GridWorld"].steps >= 600
        assert result.behaviors["GridWorld"].n_updates > 0
        assert result.seconds["wire"] > 0
    assert recorder.n_closed == 1
    assert set(threading.enumerate()) == threads
    assert set(process.children(recursive=True)) == children
