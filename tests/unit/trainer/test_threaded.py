from __future__ import annotations

import signal
import threading

import pytest
from toys import Corridor

import pipeline
from pipeline.algos.ppo import PPO
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


def test_full_rollout_waits_for_the_update_before(held):
    class Slow:
        replay = None

        def ready(self, n_rows):
            return n_rows > 3

    algorithm = Threaded("Toy", Slow(), horizon=8)
    algorithm._thread = threading.Thread(target=held.wait)
    algorithm._thread.start()
    assert not algorithm.ready(3)
    assert algorithm.ready(4), "the loop calls update, which waits"
    held.set()
    algorithm.close()
    assert n_updating() == 0


def test_replay_takes_in_what_has_come_meanwhile_up_to_twenty_trajectories(held):
    class Replaying:
        replay = ()

        def ready(self, n_rows):
            return n_rows > 0

    algorithm = Threaded("Toy", Replaying(), horizon=8)
    assert algorithm.ready(1)
    algorithm._thread = threading.Thread(target=held.wait)
    algorithm._thread.start()
    assert not algorithm.ready(159)
    assert algorithm.ready(160)
    held.set()
    algorithm.close()


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
