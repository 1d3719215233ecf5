from __future__ import annotations

import signal
import threading

import pytest
from toys import Corridor

import pipeline
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.errors import Interrupted, TrainingError
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.threaded import Threaded

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def checkpoint(tmp_path):
    return load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]


def n_updating():
    return sum(one.name.startswith("update of") for one in threading.enumerate())


@pytest.fixture
def held(monkeypatch):
    """Lets updates begin, and end only when it is set."""
    gate = threading.Event()
    update = PPO.update

    def waiting(self, rollout, *, step):
        gate.wait(timeout=60)
        return update(self, rollout, step=step)

    monkeypatch.setattr(PPO, "update", waiting)
    yield gate
    gate.set()


def test_threaded_run_learns_saves_and_leaves_no_thread(quick, tmp_path, in_process, recorder):
    """A policy that has learned nothing gets 0.5 in the corridor at best, and that by chance."""
    settings = quick(
        threaded=True,
        hyperparameters={"batch_size": 64, "buffer_size": 512, "learning_rate": 2e-3},
        network_settings={"hidden_units": 32, "num_layers": 2},
        reward_signals={"extrinsic": {"gamma": 0.95}},
        max_steps=16_000,
        time_horizon=32,
    )
    env = in_process(Corridor())
    result = pipeline.train(env, settings, seed=1, run_dir=tmp_path, sinks=[recorder])
    assert result.behaviors["Toy"].mean_reward > 0.9
    assert result.behaviors["Toy"].n_updates > 20
    assert any("Losses/Value Loss" in values for _, _, values in recorder.rows)
    assert checkpoint(tmp_path)["step"] == result.behaviors["Toy"].steps
    assert n_updating() == 0


def test_environment_steps_on_during_an_update_but_no_further_than_the_next(
    held, quick, tmp_path, in_process
):
    toy = Corridor(n_agents=4)
    steps_at = []
    step = toy.step

    def counted(actions):
        steps_at.append(n_updating())
        if sum(steps_at) == 20:  # so many steps after the update began
            held.set()
        return step(actions)

    toy.step = counted
    pipeline.train(in_process(toy), quick(threaded=True), seed=1, run_dir=tmp_path)
    assert sum(steps_at) >= 20


@pytest.mark.parametrize("trainer_type", ["ppo", "sac"])
def test_what_is_learned_does_not_depend_on_who_is_slow(
    trainer_type, quick, tmp_path, in_process, monkeypatch
):
    """Slow updates, slow environments, both in turn: counts alone say which policy acts."""
    settings = quick(
        threaded=True,
        trainer_type=trainer_type,
        hyperparameters={"batch_size": 32, "buffer_size": 128},
        network_settings={"normalize": True},
        max_steps=600,
        summary_freq=100,
    )
    algorithm = {"ppo": PPO, "sac": SAC}[trainer_type]
    update = algorithm.update
    saved = []
    for number, (updates_s, steps_s) in enumerate([(0.0, 0.0), (0.05, 0.0), (0.0, 0.005)]):

        def slow(self, rollout, *, step, updates_s=updates_s):
            threading.Event().wait(updates_s)
            return update(self, rollout, step=step)

        monkeypatch.setattr(algorithm, "update", slow)
        toy = Corridor(n_agents=4)

        def slowly(actions, step=toy.step, steps_s=steps_s):
            threading.Event().wait(steps_s)
            return step(actions)

        toy.step = slowly
        folder = tmp_path / str(number)
        pipeline.train(in_process(toy), settings, seed=1, run_dir=folder)
        saved.append((folder / "Toy" / "checkpoint.pt").read_bytes())
    assert saved[0] == saved[1]
    assert saved[0] == saved[2]


def test_next_update_waits_for_the_one_before(held, quick, tmp_path, in_process):
    toy = Corridor(n_agents=4)
    step, waits = toy.step, threading.Timer(1.0, held.set)

    def counted(actions):
        if n_updating() and not waits.is_alive() and not held.is_set():
            waits.start()
        return step(actions)

    toy.step = counted
    result = pipeline.train(in_process(toy), quick(threaded=True), seed=1, run_dir=tmp_path)
    assert held.is_set(), "the run ended only because the updates could"
    assert result.behaviors["Toy"].n_updates > 1


def test_failure_of_the_thread_stops_the_run_by_name_and_spares_the_checkpoint(
    quick, tmp_path, in_process, monkeypatch
):
    update = PPO.update

    def fails(self, rollout, *, step):
        if step > 300:
            raise TrainingError(f"step {step}: the PPO loss is not finite")
        return update(self, rollout, step=step)

    monkeypatch.setattr(PPO, "update", fails)
    with pytest.raises(TrainingError, match=r"^behavior Toy, step [0-9]+: the PPO loss"):
        pipeline.train(
            in_process(Corridor(n_agents=4)),
            quick(threaded=True, max_steps=5000),
            seed=1,
            run_dir=tmp_path,
            resume_interval_s=0.0,
        )
    assert 0 < checkpoint(tmp_path)["step"] < 500
    assert n_updating() == 0


def test_interrupted_run_saves_the_update_under_way_and_goes_on(held, quick, tmp_path, in_process):
    settings = quick(threaded=True, max_steps=800)
    toy = Corridor(n_agents=4)
    step = toy.step

    def interrupting(actions):
        if n_updating() and not held.is_set():
            signal.raise_signal(signal.SIGINT)
            held.set()
        return step(actions)

    toy.step = interrupting
    with pytest.raises(Interrupted, match="state is saved"):
        pipeline.train(in_process(toy), settings, seed=1, run_dir=tmp_path)
    assert n_updating() == 0
    saved = checkpoint(tmp_path)
    assert saved["n_updates"] == 1
    assert saved["algorithm"]["optimizer"]["state"][0]["step"] == 4  # minibatches of the update
    env = in_process(Corridor(n_agents=4))
    resumed = pipeline.train(env, settings, seed=1, run_dir=tmp_path, resume=True)
    assert resumed.behaviors["Toy"].steps >= 800


def test_untouched_by_default(quick, tmp_path, in_process, monkeypatch):
    monkeypatch.setattr(Threaded, "update", None)
    result = pipeline.train(in_process(Corridor(n_agents=4)), quick(), seed=1, run_dir=tmp_path)
    assert result.behaviors["Toy"].n_updates > 0
