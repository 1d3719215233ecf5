"""The state that `pipeline sync` reads from Snakemake, for a workflow of one rule."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.dag.engines import environment, snakemake_state
from pipeline.errors import StageError

pytestmark = pytest.mark.slow

SNAKEFILE = """\
rule train:
    output:
        "results/train/{name}/seed{seed}/policy.pt",
    shell:
        "echo weights > {output}; while [ -e hold ]; do touch held; sleep 0.1; done"


rule all:
    default_target: True
    input:
        "results/train/sweep/001/seed2/policy.pt",
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    return tmp_path


def start(root: Path) -> subprocess.Popen[bytes]:
    command = ["snakemake", "--cores", "1", "--quiet", "all"]
    return subprocess.Popen(command, cwd=root, env=environment(), start_new_session=True)  # noqa: S603


def test_snakemake_job_is_pending_before_its_run_and_unrecorded_after_its_record_is_deleted(
    root: Path,
):
    assert snakemake_state(root).pending == ("train@sweep-001-2",)
    assert start(root).wait(timeout=300) == 0
    assert snakemake_state(root).up_to_date
    shutil.rmtree(root / ".snakemake")
    assert snakemake_state(root).unrecorded == ("train@sweep-001-2",)


def test_incomplete_output_of_a_killed_snakemake_is_an_error(root: Path):
    (root / "hold").touch()
    running = start(root)
    end = time.monotonic() + 300
    while not (root / "held").exists() and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    with pytest.raises(StageError, match="IncompleteFilesException") as caught:
        snakemake_state(root)
    assert "policy.pt" in str(caught.value)
    assert "Config MD5" not in str(caught.value), "the header of Snakemake's log"
