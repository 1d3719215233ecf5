"""Runs that fail: unwritable files, NaN observations and signals."""

import os
import signal

import pytest
from command import CONFIG

LONG = CONFIG.replace("max_steps: 240", "max_steps: 100000")


# Limits files to 8 KiB, which a checkpoint exceeds.
LIMITED = """\
import resource, sys
from pipeline.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
sys.exit(main())
"""


def test_unwritable_checkpoint_ends_the_run_and_leaves_no_partial_file(place):
    place.config(LONG)
    env = place.fake()
    arguments = ["learn", "config.yaml", "--env", str(env), "--run-id", "run", "--seed", "1"]
    error = place.python("-c", LIMITED, *arguments).error
    assert "results/run/Echo/Echo-" in error
    assert "cannot be written (File too large)" in error
    assert "then resume" in error
    assert not list((place.folder / "results").rglob("*.pt"))
    assert not list(place.folder.rglob("*.tmp"))


def test_run_with_nan_observations_at_the_start_is_refused_and_leaves_no_files(place):
    place.config(LONG)
    env = place.fake("--mode", "nan", "--nan-at", "0")
    before = place.files()
    error = place.learn(env, config=place.folder / "config.yaml").error
    assert "before the first step" in error
    assert place.files() == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_sigint_and_sigterm_before_the_run_has_started_leave_no_files(place, number, code):
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
