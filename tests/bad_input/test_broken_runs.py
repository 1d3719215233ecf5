"""Runs that fail while they train: full disks, numbers that are none, other weights, signals."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command import CONFIG

from pipeline.trainer.checkpoints.file import load_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = CONFIG.replace("max_steps: 240", "max_steps: 100000")


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[bool]:
    """Mount a disk of 128 KiB on the folder; False where this process may not."""
    folder.mkdir(parents=True, exist_ok=True)
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        yield False
        return
    command = [mount, "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:  # noqa: S603
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run([umount, str(folder)], check=True)  # noqa: S603


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder, tiny_disk(Path(folder)) as mounted:
        return mounted


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def limit_files() -> None:
    """Let no file grow beyond 8 KiB, which a checkpoint does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_nothing_of_itself(place):
    place.config(LONG)
    env = place.fake()
    arguments = ["learn", "config.yaml", "--env", str(env), "--run-id", "run", "--seed", "1"]
    error = place.pipeline(*arguments, before=limit_files).error
    assert "results/run/Echo/Echo-" in error
    assert "cannot be written (File too large)" in error
    assert "then resume" in error
    assert not list((place.folder / "results").rglob("*.pt"))
    assert temporary_files(place.folder) == []


if can_mount():  # elsewhere the test above stands for it

    def test_a_full_disk_keeps_the_last_good_checkpoint(place):
        place.config(LONG)
        env = place.fake()
        with tiny_disk(place.folder / "results") as mounted:
            assert mounted
            error = place.learn(env, config=place.folder / "config.yaml").error
            assert "(No space left on device); the last good one is kept" in error
            kept = sorted((place.folder / "results/run/Echo").glob("*.pt"))
            assert len(kept) >= 2
            for path in kept:
                assert load_checkpoint(path)["learner"]["step"] > 0
            assert temporary_files(place.folder) == []


@pytest.mark.slow
def test_numbers_that_are_none_stop_the_run_and_keep_what_was_learned_before(place):
    place.config(LONG)
    error = place.learn(
        place.fake("--mode", "nan", "--nan-at", "100"), config=place.folder / "config.yaml"
    ).error
    assert "The observations provided had NaN values." in error
    assert "behavior Echo?team=0, observation 0 'echo'" in error
    checkpoint = place.folder / "results/run/Echo/checkpoint.pt"
    state = load_checkpoint(checkpoint)["learner"]
    assert state["step"] > 100
    assert f"at step {state['step']} of Echo" in error
    assert all(values.isfinite().all() for values in state["algorithm"]["policy"].values())
    done = place.learn(place.fake(), "--resume")
    assert done.code == 0, done.err
    assert f"Resuming training of Echo from step {state['step']}." in done.err


def test_numbers_that_are_none_from_the_start_leave_nothing(place):
    place.config(LONG)
    env = place.fake("--mode", "nan", "--nan-at", "0")
    before = place.files()
    error = place.learn(env, config=place.folder / "config.yaml").error
    assert "before the first step" in error
    assert place.files() == before


def test_an_environment_that_dies_while_it_trains_is_named_with_its_signal(place):
    hour = "env_settings: {restarts_rate_limit_period_s: 3600}\n"  # a busy machine restarts slowly
    done = place.learn(place.fake("--mode", "die"), config=place.config(CONFIG + hour))
    assert "SIGKILL" in done.error
    assert "exceeded the allowed number of restarts, 1 of 1 in 3600 s" in done.error
    restart, anew = [line for line in done.err.splitlines() if line.startswith("[WARNING]")]
    assert "Restarting worker[0] after 'Environment shut down" in restart
    assert "Worker[0] begins anew (its state is not known)" in anew


def test_a_run_is_not_resumed_with_networks_of_another_size(place, trained):
    shutil.copytree(trained.folder / "results", place.folder / "results")
    config = place.config(CONFIG.replace("hidden_units: 16", "hidden_units: 24"))
    env = place.fake()
    learned = (place.folder / "results/run/Echo/checkpoint.pt").read_bytes()
    written = (place.folder / "results/run/configuration.yaml").read_bytes()
    error = place.learn(env, "--resume", config=config).error
    assert "results/run/Echo/checkpoint.pt: this checkpoint does not fit the behavior Echo" in error
    assert "size mismatch for" in error
    assert (place.folder / "results/run/Echo/checkpoint.pt").read_bytes() == learned
    assert (place.folder / "results/run/configuration.yaml").read_bytes() == written


def test_a_damaged_checkpoint_is_not_resumed(place, trained):
    shutil.copytree(trained.folder / "results", place.folder / "results")
    checkpoint = place.folder / "results/run/Echo/checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    error = place.learn(place.fake(), "--resume").error
    assert "checkpoint.pt: this is not a checkpoint, or it is damaged" in error


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(place, number, code):
    place.config(LONG.replace("summary_freq: 60", "summary_freq: 600"))
    env = place.fake()
    with place.started("learn", "config.yaml", "--env", str(env), "--run-id", "run") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Echo. Step: 600." in line:
                break
        process.send_signal(number)
        errors = process.communicate(timeout=300)[1].splitlines()
    assert process.returncode == code
    assert errors[-1].startswith("interrupted: stopped by a signal at step ")
    assert "of Echo; the state is saved in results/run; to continue, give the " in errors[-1]
    assert (place.folder / "results/run/run_logs/timers.json").is_file()
    step = load_checkpoint(place.folder / "results/run/Echo/checkpoint.pt")["learner"]["step"]
    if number != signal.SIGINT:  # resuming is the same after either
        return
    config = place.config(CONFIG.replace("max_steps: 240", f"max_steps: {step + 50}"))
    arguments = ["--env", str(env), "--run-id", "run", "--resume"]
    done = place.pipeline("learn", str(config), *arguments)
    assert done.code == 0, done.err
    assert f"Resuming training of Echo from step {step}." in done.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_run_has_started_leaves_nothing(place, number, code):
    place.config()
    running = place.folder / "running"
    os.mkfifo(running)
    env = place.program(f'echo yes > "{running}"; exec sleep 1000')
    before = place.files()
    arguments = ["learn", "config.yaml", "--env", str(env), "--run-id", "run"]
    with place.started(*arguments) as process:
        assert running.read_text() == "yes\n"
        process.send_signal(number)
        errors = process.communicate(timeout=300)[1]
    assert process.returncode == code
    assert errors == f"interrupted: stopped by {number.name}\n"
    assert place.files() == before
