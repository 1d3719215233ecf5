"""Do many processes that log to the embedded MLflow store at once lose anything?

    python benchmarks/tracking.py                      # 8 processes, a new store
    python benchmarks/tracking.py --processes 16 --summaries 400

Each process is one run of the pipeline, through the class that the stages use: it begins its row,
logs summaries as fast as it can, and ends. Afterwards every point is read back and compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from pipeline.tracking.mlflow_run import MlflowRun
from pipeline.tracking.run_metadata import RunKey


def main() -> int:
    """Start the processes, and compare what they logged with what the store has."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--processes", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--summaries", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--metrics", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return work(arguments.root, arguments.worker, arguments.summaries, arguments.metrics)
    with tempfile.TemporaryDirectory() as folder:
        results = run(Path(folder), arguments.processes, arguments.summaries, arguments.metrics)
    sys.stdout.write(json.dumps(results, indent=2) + "\n")
    return int(results["errors"] > 0 or results["points_missing"] > 0)


def run(root: Path, n_processes: int, n_summaries: int, n_metrics: int) -> dict[str, float]:
    """Let the processes log at once into a store that does not exist before.

    Returns:
        Numbers of processes, points and errors, and seconds.
    """
    sizes = ["--summaries", str(n_summaries), "--metrics", str(n_metrics), "--root", str(root)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    start = time.perf_counter()
    workers = [
        subprocess.Popen(  # noqa: S603  # this file
            [sys.executable, __file__, "--worker", str(number), *sizes],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(n_processes)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    seconds = time.perf_counter() - start
    errors = sum(worker.returncode != 0 for worker in workers)
    reports = [json.loads(text) for text in outputs if text]
    return {
        "processes": n_processes,
        "errors": errors,
        "points_logged": n_processes * n_summaries * n_metrics,
        "points_missing": missing(root, n_processes, n_summaries, n_metrics),
        "seconds": round(seconds, 1),
        "slowest_begin_and_end_s": round(max(report["ended_s"] for report in reports), 1),
        "caller_us_per_summary": round(
            1e6 * max(report["called_s"] for report in reports) / n_summaries
        ),
    }


def work(root: Path, number: int, n_summaries: int, n_metrics: int) -> int:
    """Run as one of the processes; return 0 if it knows of no loss."""
    key = RunKey(
        experiment=f"run{number}",
        seed=number,
        stage="train",
        fingerprint="",
        root=root,
    )
    start = time.perf_counter()
    track = MlflowRun(key)
    for step in range(n_summaries):
        track.on_summary("Walker", values_at(number, step, n_metrics), step)
    called = time.perf_counter() - start
    track.end()
    ended = time.perf_counter() - start
    sys.stdout.write(json.dumps({"called_s": called, "ended_s": ended}))
    return int(track.lost > 0 or track.run_id is None)


def values_at(number: int, step: int, n_metrics: int) -> dict[str, float]:
    """What a process logs at a step: a value that no other process, step or metric has."""
    return {f"m{metric}": number * 1e6 + step * 1e3 + metric for metric in range(n_metrics)}


def missing(root: Path, n_processes: int, n_summaries: int, n_metrics: int) -> int:
    """Return how many logged points are missing from the store, or have another value."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("pipeline")
    runs = {
        run.data.tags["pipeline.seed"]: run
        for run in client.search_runs([experiment.experiment_id])
    }
    lost = 0
    for number in range(n_processes):
        expected = [values_at(number, step, n_metrics) for step in range(n_summaries)]
        if str(number) not in runs:
            lost += n_summaries * n_metrics
            continue
        for name in expected[0]:
            points = client.get_metric_history(runs[str(number)].info.run_id, name)
            stored = {point.step: point.value for point in points}
            lost += sum(stored.get(step) != values[name] for step, values in enumerate(expected))
    return lost


if __name__ == "__main__":
    sys.exit(main())
