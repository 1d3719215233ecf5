"""How time and memory grow with rows of a replay, runs of a project, and rows in MLflow.

    python benchmarks/growth.py replay [--sizes 1e4 1e5 1e6 1e7]
    python benchmarks/growth.py dag [--sizes 10 100 1000 10000]
    python benchmarks/growth.py mlflow [--sizes 10 100 1000 5000]

Each size is measured in processes of its own. Nothing is trained: rows of a replay are random, runs
are only planned, and rows of MLflow are copies of a row that the pipeline's own class has written.
`benchmarks/scale.py` measures environments, agents and behaviors.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
from tables import table

from pipeline.data.columns import Columns, Field
from pipeline.data.replay import Replay
from pipeline.data.rollout import Rollout
from pipeline.settings.project.sweeps import MOST_TRIALS
from pipeline.tracking.mlflow_run import MlflowRun
from pipeline.tracking.run_metadata import RunKey
from pipeline.trainer.checkpoints.replay_files import save_new_rows, save_replay

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {
    "replay": (10**4, 10**5, 10**6, 10**7),
    "dag": (10, 100, 1000, 10_000),
    "mlflow": (10, 100, 1000, 5000),
}
STAGES = Path(__file__).resolve().parents[1] / "workflow/scripts"
COMMAND = ("-m", "pipeline.cli.main")
SEEDS = 10
"""Seeds of each experiment and trial."""
BETWEEN = """\
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.call(sys.argv[1:])
seconds = time.perf_counter() - start
print()
print(code, seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def replay(n: int) -> dict[str, str]:
    """Fill a replay of n rows: 8 numbers observed, 2 continuous actions, episodes of 64 rows."""
    before, rng = psutil.Process().memory_info().rss, np.random.default_rng(0)
    filled = Replay(Columns({"continuous": Field(shape=(2,))}, [Field(shape=(8,))]), capacity=n)
    rows, ends = 2048, 32
    obs, last = rng.random((rows, 8), np.float32), rng.random((ends, 8), np.float32)
    lengths = np.full(ends, rows // ends)
    rollout = Rollout(
        obs=[obs],
        fields={"continuous": obs[:, :2], "reward": obs[:, 0]},
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        terminated=np.ones(ends, np.bool_),
        next_obs=[last],
        memory=None,
    )
    while filled.n_added < n:
        filled.add(rollout)
    used = psutil.Process().memory_info().rss - before
    add_s = [timed(lambda: filled.add(rollout)) for _ in range(50)]
    sample_s = [timed(lambda: filled.sample(rng, 256)) for _ in range(1000)]
    learner = cast("Any", SimpleNamespace(replay_to_keep=filled, step=0))
    with tempfile.TemporaryDirectory() as name:
        save_new_rows(Path(name), learner)
        save_s = []
        for _ in range(5):
            for _ in range(5):
                filled.add(rollout)
            save_s.append(timed(lambda: save_new_rows(Path(name), learner)))
        whole_s = timed(lambda: save_replay(Path(name), learner))
        size = (Path(name) / "replay-0.npz").stat().st_size
    return {
        "rows": f"{n:,}",
        "bytes per row": f"{used / n:.0f}",
        "ns to add a row": f"{1e9 * statistics.median(add_s) / rows:.0f}",
        "us to draw 256 rows": f"{1e6 * statistics.median(sample_s):.0f}",
        "resume point, 10,240 new rows, ms": f"{1e3 * statistics.median(save_s):.0f}",
        "whole replay at the end, s": f"{whole_s:.2f}",
        "its file, MB": f"{size / 2**20:.1f}",
    }


EXPERIMENT = """\
  {name}:
    environment: cartpole_v1
    trainer: config/cartpole_v1.yaml
    overrides:
      behaviors:
        CartPole-v1:
          hyperparameters:
            learning_rate: {rate}
    seeds: {seeds}
    stages: [train, export, evaluate]
    evaluation:
      episodes: 50
      seed: 10000
"""
SWEEP = """\
  sweep{number}:
    experiment: base
    method: random
    runs: {runs}
    seed: {number}
    seeds: {seeds}
    parameters:
      behaviors.CartPole-v1.hyperparameters.learning_rate: {{min: 0.0001, max: 0.01}}
"""


def project(folder: Path, n: int, *, sweeps: bool) -> str:
    """Write a project of n runs, as experiments or as trials of sweeps; return a run's policy."""
    run(sys.executable, *COMMAND, "init", str(folder), "--gymnasium", "CartPole-v1")
    path, seeds = folder / "params.yaml", list(range(1, SEEDS + 1))
    text = path.read_text(encoding="utf-8").partition("experiments:")[0] + "experiments:\n"
    if sweeps:
        text += EXPERIMENT.format(name="base", rate=0.001, seeds=[0]) + "sweeps:\n"
        starts = range(0, n // SEEDS, MOST_TRIALS)
        sizes = [min(MOST_TRIALS, n // SEEDS - start) for start in starts]
        for number, size in enumerate(sizes):
            text += SWEEP.format(number=number, runs=size, seeds=seeds)
    else:
        for number in range(n // SEEDS):
            rate = 0.001 + 1e-6 * number
            text += EXPERIMENT.format(name=f"e{number}", rate=rate, seeds=seeds)
    path.write_text(text, encoding="utf-8")
    return f"results/train/{'sweep0/001' if sweeps else 'e0'}/seed1/policy.pt"


def dag(n: int, *, sweeps: bool) -> dict[str, str]:
    """Plan n runs of train, export and evaluate: as experiments, or as trials of sweeps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "project"
        policy = project(folder, n, sweeps=sweeps)
        plan = run(sys.executable, *COMMAND, "plan", folder=folder)
        dry_run = (sys.executable, "-m", "snakemake", "--quiet", "rules", "-n")
        everything = run(*dry_run, folder=folder)
        one = run(*dry_run, policy, folder=folder)
        # The stage refuses an unknown experiment, after it has read and checked the project.
        unknown = (str(STAGES / "train.py"), "none", "--seed", "1")
        refused = run(sys.executable, *unknown, folder=folder, code=2)
    return {
        "runs": f"{n:,}",
        "`pipeline plan`, s": f"{plan[0]:.1f}",
        "its MB": f"{plan[1]:.0f}",
        "`snakemake -n`, s": f"{everything[0]:.1f}",
        "its memory, MB": f"{everything[1]:.0f}",
        "of one run, s": f"{one[0]:.1f}",
        "start of a stage, s": f"{refused[0]:.1f}",
    }


def run(*command: str, folder: Path | None = None, code: int = 0) -> tuple[float, float]:
    """Run a command to its expected exit code; return its seconds and its memory in MB."""
    variables = os.environ | ({} if folder is None else {"PIPELINE_PROJECT": str(folder)})
    # The system counts this process's memory as a child's until the child runs its own program, so
    # a small process starts the command.
    between = (sys.executable, "-S", "-c", BETWEEN, *command)
    ended = subprocess.run(  # noqa: S603  # fixed commands
        between, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    *output, numbers = ended.stdout.splitlines()
    actual, seconds, kb = numbers.split()
    if int(actual) != code:
        sys.exit("\n".join((f"{' '.join(command)}: exit {actual}", *output, ended.stderr)))
    return float(seconds), int(kb) / 1024


def mlflow(n: int) -> dict[str, str]:
    """Fill a store with n rows, and let a run begin, end, register its model and be scored."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.chdir(root)
        written(root, 0, score=n)
        multiply(root / "mlflow.db", n)
        lives = [written(root, n + number, score=0) for number in range(5)]
        medians = {key: statistics.median(life[key] for life in lives) for key in lives[0]}
        medians["score, a new best"] = written(root, n + 5, score=n + 1)["score"]
        listing_s, mb = run(sys.executable, *COMMAND, "runs", folder=root)
        size = (root / "mlflow.db").stat().st_size
    return {
        "rows": f"{n:,}",
        **{f"{key}, ms": f"{1e3 * seconds:.0f}" for key, seconds in medians.items()},
        "`pipeline runs`, s": f"{listing_s:.1f}",
        "its MB": f"{mb:.0f}",
        "store, MB": f"{size / 2**20:.1f}",
    }


def written(root: Path, number: int, *, score: float) -> dict[str, float]:
    """Write a row as the stages do, with a model; return the seconds of each part."""
    model = root / "exported/Walker.onnx"
    if not model.exists():
        save_model(model)
    name, seed = f"experiment{number // SEEDS}", number % SEEDS
    trained, exported, evaluated = (
        MlflowRun(RunKey(experiment=name, seed=seed, stage=stage, fingerprint="", root=root))
        for stage in ("train", "export", "evaluate")
    )
    seconds = {}
    seconds["begin"] = timed(lambda: trained.params({f"p{k}": k for k in range(40)}))
    trained.settings({f"t{k}": k for k in range(10)})
    curve = [(1000 * k, 0.5) for k in range(20)]
    seconds["300 points"] = timed(
        lambda: trained.points({f"m{k}": curve for k in range(15)}, stage="train")
    )
    seconds["end"] = timed(trained.end)
    seconds["find again"] = timed(lambda: exported.settings({"opset": 17}))
    seconds["register"] = timed(lambda: exported.model(model, environment="walker"))
    exported.end()
    evaluated.settings({"episodes": 64})
    scores, build = {"Walker": score}, root / "exported"
    seconds["score"] = timed(
        lambda: evaluated.score(scores, environment="walker", build=build, params={})
    )
    evaluated.end()
    if lost := trained.lost + exported.lost + evaluated.lost:
        sys.exit(f"MLflow lost {lost} entries")
    return seconds


def save_model(path: Path) -> None:
    """Write a small ONNX file."""
    import onnx

    path.parent.mkdir()
    observed = onnx.helper.make_tensor_value_info("obs_0", onnx.TensorProto.FLOAT, ["batch", 4])
    acted = onnx.helper.make_tensor_value_info("action", onnx.TensorProto.FLOAT, ["batch", 4])
    node = onnx.helper.make_node("Identity", ["obs_0"], ["action"])
    graph = onnx.helper.make_graph([node], "policy", [observed], [acted])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)


OF_RUN = (
    *("runs", "tags", "params", "metrics", "latest_metrics", "logged_models", "logged_model_tags"),
    *("logged_model_metrics", "logged_model_params", "model_versions", "model_version_tags"),
)
"""Tables of MLflow with what belongs to one run."""


def multiply(path: Path, n: int) -> None:
    """Copy the only run of a store, with its model, until the store has n runs."""
    database = sqlite3.connect(path)
    for name in OF_RUN:
        cursor = database.execute(f"SELECT * FROM {name}")  # a name from this file
        columns = [description[0] for description in cursor.description]
        rows = [dict(zip(columns, row, strict=True)) for row in cursor]
        copies = [copied(row, number) for number in range(1, n) for row in rows]
        marks = ", ".join("?" * len(columns))
        insert = f"INSERT INTO {name} VALUES ({marks})"  # a name from this file
        database.executemany(insert, [tuple(copy.values()) for copy in copies])
    database.commit()
    database.close()


def copied(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a row of a table of MLflow, changed to belong to the run with a number."""
    run_id, model_id = f"{number:032x}", f"m-{number:032x}"
    new: dict[str, Any] = {"run_uuid": run_id, "run_id": run_id, "source_run_id": run_id}
    new |= {"model_id": model_id, "source": f"models:/{model_id}", "version": number + 1}
    experiment = f"experiment{number // SEEDS}"
    tags = {"pipeline.experiment": experiment, "pipeline.seed": str(number % SEEDS)}
    tags |= {"experiment": experiment, "score": repr(float(number))}
    new |= {"value": tags[row["key"]]} if row.get("key") in tags else {}
    return row | {key: value for key, value in new.items() if key in row}


CASES: dict[str, dict[str, Callable[[int], dict[str, str]]]] = {
    "replay": {"": replay},
    "dag": {
        "experiments of 10 seeds": partial(dag, sweeps=False),
        "trials of sweeps, of 10 seeds": partial(dag, sweeps=True),
    },
    "mlflow": {"": mlflow},
}
"""By case: what is measured, by the title of its table."""


def main() -> None:
    """Print the tables of a case, with a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--sizes", type=float, nargs="+", help="default: as in the docs")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes or SIZES[options.case]]
    if options.only is not None:
        sys.stdout.write(json.dumps(CASES[options.case][options.only](sizes[0])) + "\n")
        return
    for title in CASES[options.case]:
        rows = []
        for size in sizes:  # each in a process of its own, so that memory is measured apart
            words = (options.case, "--sizes", str(size), "--only", title)
            command = (sys.executable, __file__, *words)
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603  # this file
            rows.append(json.loads(output.splitlines()[-1]))
        sys.stdout.write(f"{title}\n{table([*rows[0]], [[*row.values()] for row in rows])}")


if __name__ == "__main__":
    main()
