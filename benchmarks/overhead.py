"""What the pipeline costs when there is nothing to do: engines, the command, stages.

    python benchmarks/overhead.py --repeats 5
    python benchmarks/overhead.py --repeats 3 --real-time     # on a busy machine

In a copy of the project every experiment of params.yaml is made once with very few steps, by
Snakemake, and DVC is told (`pipeline sync`). Then each command is timed in turn, round by round, so
that a busy machine disturbs all alike. Wall and processor time, in seconds, processes started by
the command included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from worktrees import commit, copy_project, environment, shortened

STEPS = 2000
STAGE = "workflow/scripts/{}.py"
ONE = ("grid_world_ppo", "--seed", "1")
COMMANDS = {
    "`dvc repro`, nothing to do": ("dvc", "repro"),
    "`dvc status`": ("dvc", "status"),
    "`snakemake --cores 2`, nothing to do": ("snakemake", "--cores", "2", "--quiet", "all"),
    "`snakemake -n`": ("snakemake", "-n", "--quiet", "all"),
    "`pipeline --help`": ("python", "-m", "pipeline.cli.main", "--help"),
    "`pipeline plan --check`": ("python", "-m", "pipeline.cli.main", "plan", "--check"),
    "`pipeline sync`, nothing to do": ("python", "-m", "pipeline.cli.main", "sync"),
    "stage `env`": ("python", STAGE.format("env"), "grid_world"),
    "stage `export`": ("python", STAGE.format("export"), *ONE),
    "stage `evaluate`, 4 episodes": ("python", STAGE.format("evaluate"), *ONE),
    "stage `report`": ("python", STAGE.format("report")),
    "stage `train` that is refused": ("python", STAGE.format("train"), "none", "--seed", "1"),
}
"""What is timed, by its name in the table."""
WITHOUT = {
    name: {"PIPELINE_MLFLOW": "off"}
    for name in COMMANDS
    if name.startswith(("stage `export`", "stage `evaluate`"))
}
"""Commands that are timed once more with these variables."""
OPEN = "from pathlib import Path; import pipeline.tracking.mlflow_store as s; s.Store.open(Path())"
MOST_S = 5.0


def main() -> int:
    """Print the table; 1 when a median is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the seconds there too")
    parser.add_argument(
        "--real-time", action="store_true", help="ahead of other programs; for root"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = make(Path(folder) / "project")
        if options.real_time:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        seconds = measure(root, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=2) + "\n")
    print(table(seconds))  # noqa: T201  # the result
    return int(any(statistics.median(times["wall"]) > MOST_S for times in seconds.values()))


def make(root: Path) -> Path:
    """A copy in which both engines have nothing to do."""
    copy_project(root, shortened(STEPS))
    for command in (
        ("snakemake", "--cores", "2", "--quiet", "all"),
        ("python", "-m", "pipeline.cli.main", "sync"),
    ):
        run(root, command)
    commit(root, "made")
    return root


def run(root: Path, command: tuple[str, ...], *, check: bool = True, **more: str) -> None:
    """Run a command in the copy; a failure shows what it printed."""
    result = subprocess.run(  # noqa: S603  # fixed commands
        command, cwd=root, env=environment(root) | more, capture_output=True, text=True, check=False
    )
    if check and result.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {result.returncode}\n{result.stdout}\n{result.stderr}")


def measure(root: Path, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each command, by name.

    Stages run in a copy of the copy, since their outputs are new to the engines. Each round begins
    with an empty MLflow store, or `export` would find its model registered and skip that work.
    """
    cases = [(name, COMMANDS[name], {}) for name in COMMANDS]
    cases += [(f"{name}, MLflow off", COMMANDS[name], more) for name, more in WITHOUT.items()]
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "processor": []} for name, _, _ in cases
    }
    second = root.with_name("stages")
    shutil.copytree(root, second, symlinks=True)
    # A store that was copied with its checkout is refused.
    (second / "mlflow.db").unlink()
    run(second, ("python", "-c", OPEN))
    empty = shutil.copy(second / "mlflow.db", root.with_name("empty.db"))
    for _ in range(repeats):
        shutil.copy(empty, second / "mlflow.db")
        for name, command, more in cases:
            began, used = time.perf_counter(), processor_s()
            place = second if name.startswith("stage") else root
            run(place, command, check="refused" not in name, **more)
            seconds[name]["wall"].append(time.perf_counter() - began)
            seconds[name]["processor"].append(processor_s() - used)
    return seconds


def processor_s() -> float:
    """User and system time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """The seconds as Markdown."""
    lines = [
        "| | median | least | most | processor |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, seconds in found.items():
        wall = seconds["wall"]
        three = (statistics.median(wall), min(wall), max(wall))
        columns = (name, *(f"{value:.2f}" for value in three))
        used = f"{statistics.median(seconds['processor']):.2f}"
        lines.append(f"| {' | '.join((*columns, used))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
