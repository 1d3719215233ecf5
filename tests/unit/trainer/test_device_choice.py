"""`device: null` and `threads: null` choose by measurement.

`cpu:0` stands in for a second device, because torch accepts this name.
"""

import logging
import time
from unittest.mock import Mock

import pytest
import torch
from toys import Chase, Corridor

import pipeline
from pipeline.algos.policy import Policy
from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.trainer import device_choice, loop, updates
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.device_choice import (
    devices_here,
    fastest_device,
    fastest_threads,
    step_seconds,
)
from pipeline.trainer.learner import Learner
from pipeline.trainer.supported import usable_device

CPU, SECOND = torch.device("cpu"), torch.device("cpu:0")


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(device_choice, "devices_here", lambda: [CPU, SECOND])


def settings_of(**changes):
    return load_run_settings(None, overrides={"behaviors": {"Toy": changes}}).behaviors["Toy"]


@pytest.mark.parametrize(("slower", "wanted"), [(CPU, SECOND), (SECOND, CPU)])
def test_faster_device_is_chosen_and_logged(slower, wanted, two_devices, monkeypatch, caplog):
    seconds = lambda *arguments, **_: 2.0 if arguments[-1] == slower else 1.0  # noqa: E731
    monkeypatch.setattr(device_choice, "step_seconds", seconds)
    caplog.set_level(logging.INFO)
    device = fastest_device("Toy", Chase.spec, settings_of(trainer_type="ppo"), n_agents=4)
    assert device == wanted
    (line,) = [
        record.getMessage() for record in caplog.records if "learns on" in record.getMessage()
    ]
    assert line.startswith(f"Toy learns on {wanted}, where a step takes ")
    assert f" on {slower}" in line
    assert "\n" not in line


@pytest.mark.parametrize(("cuda", "devices"), [(False, [CPU]), (True, [CPU, torch.device("cuda")])])
def test_candidate_devices_are_the_cpu_and_cuda_if_available(monkeypatch, cuda, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert devices_here() == devices


def test_single_device_is_chosen_without_measuring(monkeypatch):
    monkeypatch.setattr(device_choice, "devices_here", lambda: [CPU])
    monkeypatch.setattr(device_choice, "step_seconds", None)
    assert fastest_device("Toy", Chase.spec, settings_of(trainer_type="sac"), n_agents=1) == CPU


def test_resume_is_refused_if_the_device_of_the_earlier_run_is_unavailable():
    settings = settings_of(trainer_type="ppo")
    with pytest.raises(SettingsError, match="'cuda:99' cannot be used here"):
        fastest_device("Toy", Chase.spec, settings, n_agents=1, kept="cuda:99")


@pytest.mark.parametrize("trainer_type", ["ppo", "sac", "poca"])
@pytest.mark.parametrize("memory", [None, {"sequence_length": 6, "memory_size": 8}])
def test_device_measurement_does_not_use_the_global_random_stream(trainer_type, memory):
    settings = settings_of(
        trainer_type=trainer_type,
        hyperparameters={"batch_size": 16},
        network_settings={"hidden_units": 8, "num_layers": 1, "memory": memory},
    )
    before = torch.random.get_rng_state()
    assert step_seconds(Corridor.spec, settings, CPU, n_agents=2) > 0
    assert torch.equal(before, torch.random.get_rng_state())


def test_measured_time_of_a_step_is_the_time_of_an_agent_to_act(monkeypatch):
    act = Policy.act
    monkeypatch.setattr(Policy, "act", lambda *given: (time.sleep(0.02), act(*given))[1])
    measured = step_seconds(Chase.spec, settings_of(trainer_type="ppo"), CPU, n_agents=2)
    assert measured > 0.02 / 2


def test_minibatches_per_step_are_computed_from_the_hyperparameters_of_ppo_and_sac():
    ppo = settings_of(trainer_type="ppo", hyperparameters={"batch_size": 64, "num_epoch": 3})
    sac = settings_of(trainer_type="sac", hyperparameters={"steps_per_update": 10})
    assert ppo.hyperparameters.minibatches_per_step == 3 / 64
    assert sac.hyperparameters.minibatches_per_step == 0.1


@pytest.mark.parametrize("name", ["warp", "xla", "hpu"])
def test_unavailable_device_is_refused_whichever_error_torch_raises(name):
    with pytest.raises(SettingsError, match=f"'{name}' cannot be used here"):
        usable_device(name)


@pytest.fixture
def cores(monkeypatch):
    """Sets the number of processors, and the seconds of a step for each number of threads."""

    def choose(n_processors, costs):
        measured = []

        def seconds(*_, **__):
            measured.append(torch.get_num_threads())
            return costs[torch.get_num_threads()]

        monkeypatch.setattr(device_choice.machine, "n_processors", lambda: n_processors)
        monkeypatch.setattr(device_choice, "step_seconds", seconds)
        return measured

    before = torch.get_num_threads()
    yield choose
    torch.set_num_threads(before)


def threads_for(n_busy, device=CPU):
    settings = settings_of(trainer_type="ppo")
    return fastest_threads("Toy", Chase.spec, settings, device, n_agents=4, n_busy=n_busy)


@pytest.mark.parametrize(
    ("costs", "wanted"),
    [
        ({1: 8.0, 2: 4.0, 4: 3.0, 8: 2.9, 16: 3.5}, 4),  # the fewest threads within 5 % of 2.9
        ({1: 1.0, 2: 1.0, 4: 1.2, 8: 2.0, 16: 4.0}, 1),
        ({1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0, 16: 0.5}, 16),
    ],
)
def test_smallest_number_of_threads_that_is_nearly_the_fastest_is_chosen_and_logged(
    cores, caplog, costs, wanted
):
    measured, before = cores(17, costs), torch.get_num_threads()
    caplog.set_level(logging.INFO)
    assert threads_for(n_busy=1) == wanted
    assert measured == [1, 2, 4, 8, 16]
    assert torch.get_num_threads() == before
    (line,) = [r.getMessage() for r in caplog.records if "threads, where" in r.getMessage()]
    assert line.startswith(f"Toy learns with {wanted} of 16 threads, where a step takes ")
    assert line.endswith("; --threads or torch_settings.threads chooses another number.")


def test_processors_that_environments_need_are_not_used_for_torch_threads(cores):
    costs = {1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0}
    assert cores(8, costs) == []
    assert [threads_for(n_busy) for n_busy in (0, 4, 6, 7, 20)] == [8, 4, 2, 1, 1]


def test_learner_on_a_gpu_or_in_a_portable_run_uses_one_thread_without_a_measurement(
    cores, monkeypatch
):
    measured = cores(16, {})
    assert threads_for(1, torch.device("cuda")) == 1
    monkeypatch.setattr(device_choice.machine, "is_portable", lambda: True)
    assert threads_for(1) == 1
    assert measured == []


def test_resumed_run_keeps_its_device_and_number_of_threads_without_measuring_again(
    two_devices, cores, quick, tmp_path, in_process, monkeypatch
):
    cores(4, {})
    measured = Mock(side_effect=[2.0, 1.0, 2.0, 1.0, 1.5])  # two devices, then 1, 2 and 4 threads
    monkeypatch.setattr(device_choice, "step_seconds", measured)
    run = {"seed": 1, "run_dir": tmp_path, "device": None, "torch_threads": None}
    for max_steps in (300, 600):
        settings = quick(max_steps=max_steps)
        resume = max_steps == 600
        pipeline.train(in_process(Chase(n_agents=4)), settings, resume=resume, **run)
        saved = load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")
        assert (saved["run"]["devices"], saved["run"]["threads"]) == ({"Toy": "cpu:0"}, 2)
        assert saved["learner"]["step"] >= max_steps
    assert measured.call_count == 5


def test_threads_for_updates_start_with_the_measured_number_of_torch_threads(
    cores, quick, tmp_path, in_process, monkeypatch
):
    cores(4, {1: 2.0, 2: 1.0, 4: 1.5})
    used = []

    def noted(*arguments, **options):
        used.append(updates._new_thread().submit(torch.get_num_threads).result())
        return Learner(*arguments, **options)

    monkeypatch.setattr(loop, "Learner", noted)
    run = {"seed": 1, "run_dir": tmp_path, "torch_threads": None}
    pipeline.train(in_process(Chase(n_agents=4)), quick(max_steps=300), **run)
    assert used == [2]


def test_runs_with_a_fixed_number_of_threads_measure_nothing_and_write_equal_checkpoints(
    cores, quick, tmp_path, in_process
):
    measured = cores(16, {})
    for name in "ab":
        run = {"seed": 1, "run_dir": tmp_path / name, "torch_threads": 2}
        pipeline.train(in_process(Chase(n_agents=4)), quick(max_steps=300), **run)
    assert measured == []
    a, b = (tmp_path / name / "Toy" / "checkpoint.pt" for name in "ab")
    assert a.read_bytes() == b.read_bytes()
    assert "threads" not in load_checkpoint(a)["run"]
