"""A scheduler's warning before a time limit, which every process of a job gets."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from project import environment

STAGE = """
import signal, sys, time
def save(*_):
    print("saving", flush=True)
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(138)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_stage_saves_its_state_and_ends_if_all_processes_of_its_job_get_a_signal(project: Path):
    (project / "workflow/scripts/env.py").write_text(STAGE)
    log = project / "logs/env/collector.log"
    command = ["snakemake", "--mode", "remote", "--cores", "1", "--", "build/env/collector"]
    with subprocess.Popen(  # noqa: S603  # as a scheduler's job calls it
        [sys.executable, "-m", *command],
        cwd=project,
        env=environment(project),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as job:
        limit = time.monotonic() + 300
        while not (log.exists() and "ready" in log.read_text()) and time.monotonic() < limit:
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGUSR1)
        assert job.wait(300) == 1
    assert log.read_text().split() == ["ready", "saving", "saved"]
