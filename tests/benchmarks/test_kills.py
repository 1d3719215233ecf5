"""The checks of `benchmarks/kills.py` find broken files, left-over files and lost processes."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import left_behind
import pytest
from kill_scenarios import SCENARIOS
from kills import shares


def test_a_hundred_kills_are_divided_among_scenarios_by_the_share_of_each_scenario():
    counts = Counter(shares(list(SCENARIOS), 100).values())
    assert counts == {name: scenario.share for name, scenario in SCENARIOS.items()}


@pytest.mark.parametrize(
    ("name", "content", "after_kill"),
    [
        ("checkpoint.pt", b"PK\3\4", True),
        ("policy.onnx", b"\x08", True),
        ("replay-10.npz", b"PK\3\4", True),
        ("stage.json", b"{", True),
        ("configuration.yaml", b"", True),
        ("progress.csv", b"behavior,step\nBall,1\nBal", False),
        ("progress.csv", b"behavior,step\nBall,1\nBall,1\n", False),
    ],
)
def test_kill_benchmark_reports_broken_result_files(
    name: str, content: bytes, after_kill: bool, tmp_path: Path
):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / name).write_bytes(content)
    assert len(left_behind.unreadable(tmp_path)) == 1
    assert len(left_behind.unreadable(tmp_path, after_kill=True)) == after_kill


def test_left_over_files_are_found_although_steps_and_run_numbers_in_file_names_differ(
    tmp_path: Path,
):
    def kinds(*names: str) -> set[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        return left_behind.kinds(folder)

    uninterrupted = kinds("results/run/Ball-100.pt", "results/run/progress.csv")
    assert kinds("results/run/Ball-73.pt", "results/run.1/progress.csv") <= uninterrupted | {
        "results/run.#"
    }
    left = (
        kinds("results/run/Ball-100.pt", "results/run/.progress.csv.k_ab12cd.tmp") - uninterrupted
    )
    assert left == {"results/run/.progress.csv.k_ab#cd.tmp"}


def test_kill_benchmark_reports_a_training_that_did_not_resume():
    log = "[INFO] Resuming training of Ball from step 400."
    assert left_behind.lost(log, 400) == []
    assert left_behind.lost(log, 0) == []
    assert left_behind.lost(log, 40) == ["it did not continue from step 40"]


def test_process_left_over_after_a_kill_is_found_by_its_environment_variable():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])"
    reading, writing = os.pipe()
    variables = os.environ | {left_behind.MARK: "test"}
    try:
        subprocess.run([sys.executable, "-c", code], env=variables, stdin=reading, check=True)  # noqa: S603  # fixed
        until = time.monotonic() + 60.0
        while not (processes := left_behind.marked("test")) and time.monotonic() < until:
            time.sleep(0.01)  # a process's variables can be read only a moment after its start
        (orphan,) = processes
        assert orphan.cmdline()[-1] == "input()"
    finally:
        os.close(writing)
        os.close(reading)
    orphan.wait(60)
