"""Signals to a training process."""

import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from interpreter import variables

from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.stopping import StopRequest, stop_on_signal

WAIT_S = 300
TRAINING = """
import signal, sys
import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import Interrupted
from toys import Corridor

class Waiting(Corridor):
    n_steps = 0

    def step(self, actions):
        self.n_steps += 1
        if self.n_steps == 100:
            print("in a step", flush=True)
            sys.stdin.readline()
            print("signal taken", flush=True)
            sys.stdin.readline()
        return super().step(actions)

settings = {"behaviors": {"Toy": {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 32, "buffer_size": 128, "num_epoch": 1},
    "network_settings": {"hidden_units": 8, "num_layers": 1},
    "max_steps": 10**9, "time_horizon": 8}}}
try:
    pipeline.train(InProcessEnvironment(Waiting(n_agents=4)), settings, seed=1, run_dir=sys.argv[1])
except Interrupted as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""


@contextmanager
def training(folder):
    process = subprocess.Popen(  # noqa: S603  # our own program
        [sys.executable, "-c", TRAINING, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables(OMP_NUM_THREADS="1"),
    )
    try:
        assert process.stdout.readline() == "in a step\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def send(process, number):
    """Send a signal and then a line to a process that waits for a line."""
    process.send_signal(number)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "signal taken\n"


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_saves_and_ends_the_run(number, exit_code, tmp_path):
    with training(tmp_path) as process:
        send(process, number)
        output, _ = process.communicate("\n", timeout=WAIT_S)
        assert process.returncode == exit_code
    assert re.search(r"stopped by a signal at step [0-9]+ of Toy; the state is saved in", output)
    assert load_checkpoint(tmp_path / "Toy" / "checkpoint.pt")["learner"]["step"] > 300


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_the_run_at_once(second, tmp_path):
    with training(tmp_path) as process:
        send(process, signal.SIGINT)
        process.send_signal(second)
        assert process.wait(timeout=WAIT_S) == -second


def test_context_manager_stop_on_signal_restores_the_signal_handlers_at_its_end():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with stop_on_signal() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request()
        assert request.exit_code == 143
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert {number: signal.getsignal(number) for number in before} == before


def test_signal_handlers_are_not_changed_outside_the_main_thread():
    seen = []

    def work():
        with stop_on_signal() as request:
            seen.append((request, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    assert seen == [(StopRequest(), before)]
