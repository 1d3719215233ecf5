"""Many short jobs through a cluster executor, some of them killed: does every one end whole?

    pip install snakemake-executor-plugin-cluster-generic
    python benchmarks/cluster_jobs.py --jobs 64 --kill 10 --at-once 8

The jobs are seeds of one small experiment in a copy of the project, submitted by the scripts of
`workflow/cluster`. Each victim is stopped after its first checkpoint, in one of four ways by turns:
SIGKILL for the stage's process alone, as by a memory limit; SIGKILL for the job's script and all
else of the job, as when a node fails; SIGTERM and SIGUSR1 for the stage, as by a scheduler before a
time limit. Then is checked: every policy is there, every victim has continued from the step of its
checkpoint, no process is left over, every learning curve has each summary once, and MLflow has one
finished run per seed with every summary.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from worktrees import copy_project, environment, processes_in

SUMMARY, STEPS = 1000, 6000
PARAMS = f"""\
runtime: {{torch_threads: 1, device: cpu}}
environments:
  balance_ball: {{source: builtin, args: []}}
experiments:
  short:
    environment: balance_ball
    trainer: config/ppo/3DBall.yaml
    overrides:
      behaviors.3DBall.max_steps: {STEPS}
      behaviors.3DBall.summary_freq: {SUMMARY}
      behaviors.3DBall.checkpoint_interval: {SUMMARY}
      behaviors.3DBall.hyperparameters.buffer_size: 1000
    seeds: SEEDS
    stages: [train]
"""
MOST_S = 7200.0
WAYS = {
    "SIGKILL": signal.SIGKILL,
    "SIGKILL of the whole job": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGUSR1": signal.SIGUSR1,
}
"""How victims are stopped, in this order by turns."""


def main() -> int:
    """Run, print the results as JSON, and return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--kill", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(
            Path(folder),
            jobs=options.jobs,
            kill=options.kill,
            at_once=options.at_once,
            seed=options.seed,
        )
    print(json.dumps(results, indent=2))  # noqa: T201  # the result
    return 0 if whole(results) else 1


def whole(found: dict[str, Any]) -> bool:
    """Whether every check passes."""
    return bool(
        found["exit_code"] == 0
        and found["policies"] == found["finished_mlflow_runs"] == found["jobs"]
        and found["mlflow_runs"] == found["jobs"]
        and found["killed"] == found["resumed"] == found["victims"]
        and all(found["resumed_from_step"].get(str(victim), 0) > 0 for victim in found["victims"])
        and not found["broken_curves"]
        and not found["broken_mlflow_curves"]
        and not found["left_over"]
    )


def measure(folder: Path, *, jobs: int, kill: int, at_once: int, seed: int) -> dict[str, Any]:
    """Run the jobs in a copy of the project below `folder`, and return the results."""
    seeds = str(list(range(1, jobs + 1)))
    root = copy_project(folder / "project", PARAMS.replace("SEEDS", seeds))
    victims = random.Random(seed).sample(range(1, jobs + 1), kill)  # noqa: S311  # no secret
    command = [sys.executable, "-m", "snakemake", "--profile", "profiles/cluster-generic"]
    started = time.monotonic()
    with (folder / "snakemake.log").open("w") as log:
        engine = subprocess.Popen(  # noqa: S603  # fixed command
            [*command, "--jobs", str(at_once), "--quiet", "rules", "--", "results/short"],
            cwd=root,
            env=environment(root),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            killed = kill_some(engine, root, victims, until=started + MOST_S)
        finally:
            if engine.poll() is None:
                engine.terminate()
        code = engine.wait(60)
    if code != 0:
        sys.stderr.write((folder / "snakemake.log").read_text()[-4000:])
    time.sleep(2)
    facts = facts_of(root, jobs)
    return {
        "jobs": jobs,
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
        **seconds_of(facts),
        "policies": sum(
            place(root, n, "train").joinpath("policy.pt").is_file() for n in range(1, jobs + 1)
        ),
        "victims": sorted(victims),
        "killed": sorted(killed),
        "how": {
            way: sorted(victims[turn :: len(WAYS)]) for turn, way in enumerate(WAYS) if victims
        },
        "resumed": sorted(number for number, attempt in facts.items() if attempt["resumed"]),
        "resumed_from_step": resumed_from(root),
        "broken_curves": [n for n in range(1, jobs + 1) if not complete(place(root, n, "train"))],
        "left_over": [" ".join(process.cmdline()) for process in processes_in(root)],
        **mlflow_runs(root),
        "mlflow_warnings": said_of_mlflow(root),
    }


def facts_of(root: Path, jobs: int) -> dict[int, dict[str, Any]]:
    """Return the facts that each seed's last attempt wrote, by seed."""
    facts = {}
    for number in range(1, jobs + 1):
        file = place(root, number, ".work/train") / "stage.json"
        if file.is_file():
            facts[number] = json.loads(file.read_text())
    return facts


def seconds_of(facts: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Median seconds of a job that was not killed: all of its stage, and the training in it."""
    uninterrupted = [
        attempt for attempt in facts.values() if not attempt["resumed"] and "seconds" in attempt
    ]
    if not uninterrupted:
        return {}
    return {
        "median_stage_seconds": round(statistics.median(o["duration_s"] for o in uninterrupted), 2),
        "median_training_seconds": round(statistics.median(trained(o) for o in uninterrupted), 2),
    }


def trained(facts: dict[str, Any]) -> float:
    """Seconds of the training loop."""
    return float(facts["seconds"]["total"])


def said_of_mlflow(root: Path) -> list[str]:
    """Return the log lines that warn of an MLflow store that is not being written."""
    matches = [re.findall(r".*MLflow cannot be written.*", log.read_text()) for log in logs(root)]
    return [line for lines in matches for line in lines]


def logs(root: Path) -> list[Path]:
    """The logs of the seeds."""
    return sorted(root.glob("logs/train/short/*.log"))


def resumed_from(root: Path) -> dict[str, int]:
    """Return the step from which each seed's last attempt resumed, by seed."""
    steps = {}
    for log in logs(root):
        match = re.search(r"Resuming training of \S+ from step (\d+)", log.read_text())
        if match:
            steps[log.stem.removeprefix("seed")] = int(match[1])
    return steps


def place(root: Path, number: int, stage: str) -> Path:
    """Folder of one seed's results."""
    return root / "results" / stage / "short" / f"seed{number}"


def kill_some(
    engine: subprocess.Popen[bytes], root: Path, victims: list[int], *, until: float
) -> set[int]:
    """Stop each victim once, when it has a checkpoint and is at work; until the engine ends."""
    killed: set[int] = set()
    while engine.poll() is None and time.monotonic() < until:
        for process in processes_in(root):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "workflow/scripts/train.py" not in words[1:2] or words[-2] != "--seed":
                continue
            number = int(words[-1])
            saved = place(root, number, ".work/train") / "run/3DBall/checkpoint.pt"
            if number in victims and number not in killed and saved.is_file():
                stop(process.pid, list(WAYS)[victims.index(number) % len(WAYS)])
                killed.add(number)
        time.sleep(0.2)
    return killed


def stop(stage: int, way: str) -> None:
    """Stop the process of a stage, or its job, in one of the WAYS."""
    with contextlib.suppress(ProcessLookupError):  # it has ended just now
        if way.endswith("job"):
            os.killpg(os.getpgid(stage), WAYS[way])
        else:
            os.kill(stage, WAYS[way])


def complete(folder: Path) -> bool:
    """Whether the learning curve has every summary once, in order."""
    try:
        with (folder / "progress.csv").open(newline="") as file:
            steps = [int(row["step"]) for row in csv.DictReader(file)]
    except OSError:
        return False
    return [step // SUMMARY for step in steps] == list(range(1, STEPS // SUMMARY + 1))


def mlflow_runs(root: Path) -> dict[str, Any]:
    """How many runs the store has, how many of them have finished, and which lack a summary."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(ids, max_results=1000)
    broken = []
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "Environment/Cumulative Reward")
        if {point.step // SUMMARY for point in points} != set(range(1, STEPS // SUMMARY + 1)):
            broken.append(run.info.run_name)
    return {
        "mlflow_runs": len(runs),
        "finished_mlflow_runs": sum(mlflow_run.info.status == "FINISHED" for mlflow_run in runs),
        "broken_mlflow_curves": sorted(broken),
    }


if __name__ == "__main__":
    sys.exit(main())
