"""Connected workers from any form of environment, and the parameters that they get."""

import contextlib
import threading
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from toys import Corridor

import pipeline
from pipeline.envs.base import StoredStepsEnv
from pipeline.envs.in_process import InProcessEnvironment, SimulatorSource
from pipeline.envs.side_channels import (
    EnvironmentParametersChannel,
    SideChannelManager,
    StatsAggregationMethod,
)
from pipeline.envs.workers import WorkerSet
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.settings import load_run_settings
from pipeline.simulators import client, registry
from pipeline.trainer import environment
from pipeline.trainer.curriculum import Curriculum
from pipeline.trainer.environment import JobSpec, open_workers, send_parameters
from pipeline.wire.channels.parameters import Sampler


def settings_with(parameters):
    return load_run_settings(None, overrides={"environment_parameters": parameters}).with_seed(1)


def opened(env, settings=None, **options):
    settings = settings or settings_with({})
    return open_workers(JobSpec(settings=settings, seed=0, run_dir=Path(), env=env, **options))


def test_environments_become_workers_in_the_given_order():
    first, second = (InProcessEnvironment(Corridor()) for _ in range(2))
    assert opened(first).envs == [first]
    assert opened([second, first]).envs == [second, first]


UNIFORM = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 0.1, "max_value": 0.7}}
GAUSSIAN = {"sampler_type": "gaussian", "sampler_parameters": {"mean": 2, "st_dev": 1}}
RANGES = {
    "sampler_type": "multirangeuniform",
    "sampler_parameters": {"intervals": [[7, 10], [15.1, 20]]},
}


def send(environment, parameters):
    curriculum = Curriculum(settings_with(parameters).environment_parameters)
    return send_parameters(WorkerSet([environment]), curriculum.values())


class Foreign(StoredStepsEnv):
    """An environment that another program has opened."""

    def step(self):
        raise AssertionError

    reset = close = step


class Wire(Foreign):
    """An environment that sends packed messages to a client session, as `UnityEnvironment` does."""

    def __init__(self, simulator):
        super().__init__()
        self.channel = EnvironmentParametersChannel()
        self.session = client.Session(simulator)

    def set_parameter(self, name, value):
        self.channel.set_parameter(name, value)
        return True

    def take_stats(self):
        return {}

    def hear(self):
        self.session._receive(SideChannelManager([self.channel]).outgoing())


def test_constant_parameters_are_sent_and_parameters_that_cannot_be_sent_are_reported():
    toy = Corridor()
    assert send(InProcessEnvironment(toy), {"gravity": 3.5}) == set()
    assert toy.parameters == {"gravity": 3.5}
    assert send(Foreign(), {"gravity": 3.5}) == {"gravity"}
    with pytest.raises(SettingsError, match=r"environment_parameters\.höhe: .*ASCII"):
        send(Wire(registry.make("grid_world")), {"höhe": 3.5})


@pytest.mark.parametrize("value", [0.1, UNIFORM, GAUSSIAN, RANGES])
def test_samplers_draw_equal_values_in_this_process_and_in_an_environment_over_the_wire(value):
    local, remote = (registry.make("balance_ball", n_agents=1) for _ in range(2))
    in_process, wire = InProcessEnvironment(local), Wire(remote)
    assert send(in_process, {"wind": value}) == send(wire, {"wind": value}) == set()
    wire.hear()
    drawn, others = ([s.parameters.read("wind", -1.0) for _ in range(50)] for s in (local, remote))
    assert drawn == others
    assert len(set(drawn)) == (1 if value == 0.1 else 50)
    for simulator in (local, remote):
        simulator.close()


def test_sampled_parameters_are_equal_in_all_workers_for_any_seed():
    simulators = [registry.make("grid_world") for _ in range(2)]
    workers = WorkerSet([InProcessEnvironment(simulator) for simulator in simulators])
    curriculum = Curriculum(settings_with({"wind": UNIFORM}).environment_parameters)
    send_parameters(workers, curriculum.values())
    first, second = ([s.parameters.read("wind", -1.0) for _ in range(5)] for s in simulators)
    assert first == second
    assert len(set(first)) == 5
    sampler = Sampler(kind=0, values=(0.0, 1.0), seed=2**31 + 5)
    local, wire = InProcessEnvironment(simulators[0]), Wire(simulators[1])
    for env in (local, wire):
        env.set_parameter("wind", sampler)
    wire.hear()
    first, second = (s.parameters.read("wind", -1.0) for s in simulators)
    assert first == second


def test_environment_that_cannot_sample_receives_a_newly_sampled_value_with_every_step():
    toy = Corridor()
    env = InProcessEnvironment(toy)
    send(env, {"wind": UNIFORM})
    drawn = []
    for advance in (env.reset, env.step, env.step):
        advance()
        drawn.append(toy.parameters["wind"])
    assert len(set(drawn)) == 3
    reported = env.take_stats()["Environment/Parameter/wind"]
    assert reported == [(value, StatsAggregationMethod.HISTOGRAM) for value in drawn]
    assert env.take_stats() == {}


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("engine", [{}, {"no_graphics_monitor": True}, {"no_graphics": True}])
def test_executable_runs_without_graphics_if_a_setting_or_the_machine_requires_it(
    monkeypatch, tmp_path, engine, headless
):
    launch = Mock()
    monkeypatch.setattr(environment, "launch_workers", launch)
    monkeypatch.setattr(environment, "runs_headless", lambda path: path == player and headless)
    player = tmp_path / "Game.x86_64"
    player.touch()
    settings = load_run_settings(None, overrides={"engine_settings": engine}).with_seed(1)
    opened(tmp_path / "Game", settings)
    is_required = engine.get("no_graphics", not engine and headless)
    assert launch.call_args.kwargs["no_graphics"] is is_required


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_training_an_executable_leaves_no_process_and_no_thread(
    fails, quick, tmp_path, monkeypatch, packed, recorder
):
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    built = packed("grid_world", tmp_path / "grid_world")
    threads, process = set(threading.enumerate()), psutil.Process()
    children = set(process.children(recursive=True))
    settings = quick("GridWorld", max_steps=600)
    if fails:
        monkeypatch.setattr(
            "pipeline.trainer.learner.Learner.learn", lambda _: pytest.fail("stop here")
        )
    with pytest.raises(pytest.fail.Exception) if fails else contextlib.nullcontext():
        result = pipeline.train(
            built, settings, seed=1, run_dir=tmp_path / "run", num_envs=2, sinks=[recorder]
        )
        assert result.behaviors["GridWorld"].steps >= 600
        assert result.behaviors["GridWorld"].n_updates > 0
        assert result.seconds["wire"] > 0
    assert recorder.n_closed == 1
    assert set(threading.enumerate()) <= threads
    assert set(process.children(recursive=True)) <= children


def test_a_simulator_that_fails_is_started_again_with_another_seed_until_the_limit(
    monkeypatch, caplog
):
    made = []

    class Failing(Corridor):
        def step(self, actions):
            if len(made) > 1 or self.fails:
                raise ZeroDivisionError("by the environment")
            return super().step(actions)

    def make(name, *, seed, **options):
        simulator = Failing()
        simulator.fails = not made
        made.append((name, seed, options))
        return simulator

    monkeypatch.setattr(registry, "make", make)
    with opened(SimulatorSource("corridor", {"n_agents": 1})) as workers:
        workers.reset()
        workers.step()
        assert workers.take_restarted() == [0]
        assert "ZeroDivisionError: by the environment" in caplog.text
        with pytest.raises(UnityEnvironmentException, match="exceeded the allowed number"):
            workers.step()
    assert [(name, options) for name, _, options in made] == [("corridor", {"n_agents": 1})] * 2
    assert made[1][1] == made[0][1] + 1
