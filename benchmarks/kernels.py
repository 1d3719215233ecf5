"""Do other kernels give other files, does `--portable` end that, and what does it cost?

    python benchmarks/kernels.py                   settings of kernel dispatch
    python benchmarks/kernels.py --emulate Haswell SandyBridge    other processors, by qemu-x86_64
    python benchmarks/kernels.py --cost 5                 CPU seconds, so many pairs in turn

A row is a short training by `pipeline learn`, and the same with environment variables that make
libraries choose other kernels, or with the trainer on an emulated processor. Compared are the
SHA-256 of checkpoints, ONNX files and progress.csv; then the same with `--portable`. The last
column is the first cause that `pipeline provenance --diff` names for the first two.
"""

from __future__ import annotations

import argparse
import os
import resource
import site
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kills import say
from tables import table

from pipeline import files, machine

ROOT = Path(__file__).resolve().parents[1]
METHODS = {
    "PPO": ("ppo/3DBall", "balance_ball", {"max_steps": 2400, "buffer_size": 1200}),
    "SAC": ("sac/3DBall", "balance_ball", {"max_steps": 600, "buffer_init_steps": 300}),
    "images": ("ppo/GridWorld", "grid_world", {"max_steps": 1000, "buffer_size": 512}),
}
SETTINGS = (
    "ATEN_CPU_CAPABILITY=default",
    "MKL_CBWR=AVX2",
    "ONEDNN_MAX_CPU_ISA=AVX",
    "OPENBLAS_CORETYPE=Sandybridge",
    "NPY_DISABLE_CPU_FEATURES=X86_V3",
)
COST = {
    "PPO": {"max_steps": 24000, "buffer_size": 12000},
    "SAC": {"max_steps": 4000},
    "images": {"max_steps": 5120, "buffer_size": 2560},
}


def learn(
    method: str,
    folder: Path,
    *,
    setting: str = "",
    portable: bool = False,
    cpu: str = "",
    **changes: int,
) -> float:
    """Train in `folder`, and return the CPU seconds of the trainer and its environment."""
    file, environment, numbers = METHODS[method]
    text = (ROOT / f"config/{file}.yaml").read_text(encoding="utf-8")
    for key, value in (changes or numbers).items():
        lines = text.splitlines()
        text = "\n".join(
            f"{line.partition(key)[0]}{key}: {value}"
            if line.strip().startswith(f"{key}:")
            else line
            for line in lines
        )
    config = folder.parent / f"{folder.name}.yaml"
    config.write_text(text, encoding="utf-8")
    inherited = {
        name: content for name, content in os.environ.items() if name not in machine.PORTABLE
    }
    env = {**inherited, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    env |= dict([setting.split("=", 1)]) if setting else {}
    command = [sys.executable]
    if cpu:
        # Without exec, which would leave the emulator; an interpreter that is no link.
        command = ["qemu-x86_64", "-cpu", cpu, str(Path(sys.executable).resolve())]
        env |= dict(machine.PORTABLE) if portable else {}
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *site.getsitepackages()])
    command += ["-m", "pipeline", "learn", str(config), "--env", environment, "--seed", "1"]
    command += ["--results-dir", str(folder), "--run-id", "run", "--torch-device", "cpu"]
    command += ["--timeout-wait", "600", "--track", "jsonl", *(["--portable"] if portable else [])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    completed = subprocess.run(  # noqa: S603  # our own command line
        command, env=env, capture_output=True, text=True, check=False
    )
    if completed.returncode:
        sys.exit(f"{' '.join(command)}\n{completed.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file that must not depend on the machine."""
    paths = [path for path in folder.rglob("*") if path.suffix in (".pt", ".onnx", ".npz", ".csv")]
    return {str(path.relative_to(folder)): files.sha256_of(path) for path in sorted(paths)}


def n_differences(one: Path, two: Path) -> str:
    """Return how many files differ, of how many."""
    left, right = digests(one), digests(two)
    names = {*left, *right}
    return f"{sum(left.get(name) != right.get(name) for name in names)} of {len(names)}"


def cause(one: Path, two: Path) -> str:
    """Return what `pipeline provenance --diff` says of the policies of two runs."""
    models = [str(next((folder / "run").glob("*.onnx"))) for folder in (one, two)]
    command = [sys.executable, "-m", "pipeline", "provenance", models[1], "--diff", models[0]]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    completed = subprocess.run(  # noqa: S603  # our own command line
        command, env=env, capture_output=True, text=True, check=True
    )
    output = completed.stdout
    if "same bytes" in output:
        return "same bytes"
    first = output.partition("The first cause by which they may differ: ")[2].split("also:")[0]
    return "; ".join(line.strip() for line in first.splitlines()) or "none"


def compare(methods: list[str], cpus: list[str], folder: Path) -> None:
    """Print the table of differences."""
    rows = []
    for method in methods:
        runs = {portable: folder / f"{method}-{portable}" for portable in (False, True)}
        for portable, run in runs.items():
            learn(method, run, portable=portable)
        for number, variant in enumerate(cpus or SETTINGS):
            changed_runs = {portable: folder / f"{method}-{number}-{portable}" for portable in runs}
            options = {"cpu": variant} if cpus else {"setting": variant}
            for portable, other in changed_runs.items():
                learn(method, other, portable=portable, **options)
            counts = [n_differences(runs[portable], changed_runs[portable]) for portable in runs]
            rows.append((method, variant, *counts, cause(runs[False], changed_runs[False])))
            say(str(rows[-1]))
    say(
        table(("method", "setting", "files that differ", "with --portable", "--diff names"), rows),
        sys.stdout,
    )


def costs(methods: list[str], n_pairs: int, folder: Path) -> None:
    """Print the CPU seconds with and without."""
    rows = []
    for method in methods:
        pairs = [
            [
                learn(
                    method,
                    folder / f"{method}-{pair}-{portable}",
                    portable=portable,
                    **COST[method],
                )
                for portable in (False, True)
            ]
            for pair in range(n_pairs)
        ]
        plain, fixed = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(fixed_s / plain_s for plain_s, fixed_s in pairs)
        rows.append((method, f"{plain:.1f}", f"{fixed:.1f}", f"{ratio:.2f}"))
        say(str(rows[-1]))
    say(table(("method", "CPU s", "CPU s with --portable", "median ratio"), rows), sys.stdout)


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--emulate", nargs="+", metavar="CPU", default=[])
    parser.add_argument("--cost", type=int, metavar="PAIRS", default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kernels-") as name:
        if arguments.cost:
            costs(arguments.methods, arguments.cost, Path(name))
        else:
            compare(arguments.methods, arguments.emulate, Path(name))


if __name__ == "__main__":
    main()
