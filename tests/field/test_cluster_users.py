"""Reports of users whose runs are started, stopped and requeued by a scheduler."""

import contextlib
import re
import signal
import threading
import time

import psutil
import pytest

import pipeline
from pipeline.dag import process
from pipeline.errors import Interrupted, UnityProcessEndedException
from pipeline.settings import load_run_settings
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.checkpoints.restore import resumes_exactly
from pipeline.trainer.stopping import StopRequest, stop_on_signal

BEHAVIOR = "3DBall"
NEVER = 10**9


class StopsAll(StopRequest):
    """Ends the environments at call `kill_at`, and requests a stop from call `at` on."""

    def __init__(self, at, kill_at):
        super().__init__()
        self.n_asked, self.at, self.kill_at = 0, at, kill_at
        self.before = set(psutil.Process().children())  # other tests need these

    def __call__(self):
        self.n_asked += 1
        if self.n_asked == self.kill_at:
            for child in set(psutil.Process().children()) - self.before:
                child.terminate()
        if self.n_asked >= self.at:
            self.signal_number = signal.SIGTERM
        return super().__call__()


def stopped(packed, folder, monkeypatch, stop, *, max_restarts=10, **options):
    """Train until all processes are stopped; return the message and the settings."""
    behavior = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 64, "buffer_size": 256, "num_epoch": 1},
        "network_settings": {"hidden_units": 8, "num_layers": 1},
        "max_steps": NEVER,
        "time_horizon": 8,
    }
    overrides = {
        "behaviors": {BEHAVIOR: behavior},
        "env_settings": {"max_lifetime_restarts": max_restarts},
    }
    settings = load_run_settings(None, overrides=overrides)
    monkeypatch.setattr("pipeline.trainer.api.stop_on_signal", lambda: contextlib.nullcontext(stop))
    build = packed("balance_ball", folder / "ball")
    with pytest.raises(Interrupted) as caught:
        pipeline.train(
            build, settings, seed=1, run_dir=folder / "run", export=True, num_envs=2, **options
        )
    assert caught.value.exit_code == 143
    return str(caught.value), settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "kill_at", "max_restarts"),
    [
        *((at, kill_at, 10) for at, kill_at in ((80, 80), (80, 81), (81, 80), (120, 80))),
        (80, 79, 0),  # before there is a resume point
    ],
)
def test_run_is_saved_if_trainer_and_environments_get_sigterm_together(
    at, kill_at, max_restarts, packed, tmp_path, monkeypatch
):
    """scancel and systemd send SIGTERM to all processes of a job."""
    stop = StopsAll(at, kill_at)
    message, settings = stopped(packed, tmp_path, monkeypatch, stop, max_restarts=max_restarts)
    step = load_checkpoint(tmp_path / "run" / BEHAVIOR / "checkpoint.pt")["learner"]["step"]
    assert f"at step {step} of {BEHAVIOR}; the state is saved" in message
    assert (tmp_path / "run" / f"{BEHAVIOR}.onnx").is_file()
    if max_restarts:
        assert (tmp_path / "run" / BEHAVIOR / f"{BEHAVIOR}-{step}.onnx").is_file()
        assert resumes_exactly(tmp_path / "run", settings)


@pytest.mark.slow
def test_last_saved_state_is_kept_if_environments_cannot_be_restarted(
    packed, tmp_path, monkeypatch
):
    """The last resume point stays, and the message names its step."""
    stop = StopsAll(120, 119)
    message, settings = stopped(
        packed, tmp_path, monkeypatch, stop, max_restarts=0, resume_interval_s=0.0
    )
    (said,) = re.findall(rf"the state at step (\d+) of {BEHAVIOR} is saved", message)
    state = load_checkpoint(tmp_path / "run" / BEHAVIOR / "checkpoint.pt")
    assert state["learner"]["step"] == int(said) > 0
    assert (tmp_path / "run" / f"{BEHAVIOR}.onnx").is_file()
    assert resumes_exactly(tmp_path / "run", settings)


def test_stage_exits_with_code_143_if_sigterm_comes_just_after_its_environment_has_ended():
    """The environment's end is noticed before the signal comes."""

    began, main = time.monotonic(), threading.get_ident()
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGTERM)).start()
    with pytest.raises(process.Stopped) as caught, process.signals():
        raise UnityProcessEndedException("Environment shut down with return code -15")
    assert caught.value.exit_code == 143
    assert time.monotonic() - began < 5


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
@pytest.mark.parametrize("under_nohup", [False, True])
def test_closed_terminal_stops_a_training_unless_nohup_ignores_sighup(under_nohup):
    # whoever runs the tests may ignore it
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    stage = process.signals() if under_nohup else contextlib.nullcontext()
    try:
        with stop_on_signal() as request, stage:
            signal.raise_signal(signal.SIGHUP)
            assert request() != under_nohup
    finally:
        signal.signal(signal.SIGHUP, before)
    assert under_nohup or request.exit_code == 129
