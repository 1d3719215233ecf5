"""What a statistics writer of ML-Agents' is told, by `mlagents-learn` and by `pipeline learn`.

The same writer (`tests/support/recording_writer.py`) is installed for both by its entry point, and
both train in the same executable with the same seed. Values differ, because what is learned
differs; categories, keys, ways of aggregating and properties must not.

    python benchmarks/stats_writers.py
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from math import isnan
from pathlib import Path
from typing import Any

import peer
import yaml

ROOT = Path(__file__).resolve().parent.parent
WRITER = ROOT / "tests/support/recording_writer.py"
GROUP = "mlagents.stats_writer"
SEED = 3
_SMALL = {"batch_size": 64, "buffer_size": 256}
_BASE = {
    "network_settings": {"hidden_units": 16, "num_layers": 1},
    "max_steps": 3000,
    "summary_freq": 1000,
    "time_horizon": 64,
}
_CURIOUS = {"extrinsic": {}, "curiosity": {"strength": 0.1}, "rnd": {"strength": 0.1}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo with curiosity, rnd and lessons": (
        "balance_ball",
        {
            "default_settings": {
                **_BASE,
                "trainer_type": "ppo",
                "hyperparameters": _SMALL,
                "reward_signals": _CURIOUS,
            },
            "environment_parameters": {"mass": {"curriculum": [{"name": "one", "value": 1.0}]}},
        },
    ),
    "sac": (
        "balance_ball",
        {
            "default_settings": {
                **_BASE,
                "trainer_type": "sac",
                "hyperparameters": {"batch_size": 64, "buffer_size": 2000, "steps_per_update": 20},
            }
        },
    ),
    "ppo against itself": (
        "pong",
        {
            "default_settings": {
                **_BASE,
                "trainer_type": "ppo",
                "hyperparameters": _SMALL,
                "self_play": {"save_steps": 500},
            }
        },
    ),
    "poca": (
        "push_together",
        {
            "default_settings": {
                **_BASE,
                "trainer_type": "poca",
                "hyperparameters": _SMALL,
                "max_steps": 9000,
                "summary_freq": 3000,
            }
        },
    ),
}
"""Simulator and trainer configuration of each case."""


def site(folder: Path) -> Path:
    """Return a folder in which the writer is installed."""
    info = folder / "recording_writer-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(WRITER, folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recording-writer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nrecord = recording_writer:get_writers\n")
    return folder


def calls(path: Path) -> list[dict[str, Any]]:
    """Return what the writer has noted."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(noted: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what has to be equal: of each call everything but values."""
    statistics: dict[str, str] = {}
    properties, hyperparameters, steps = [], set(), []
    for call in noted:
        if call["call"] == "write_stats":
            steps.append((call["category"], call["step"]))
            # ML-Agents reports the temperature of discrete choices also where there are none: NaN
            numbers = {key: entry for key, entry in call["values"].items() if not isnan(entry[2])}
            statistics |= {key: entry[0] for key, entry in numbers.items()}
        else:
            properties.append((call["category"], call["type"], call["known"]))
            if isinstance(call["value"], dict):
                hyperparameters |= set(call["value"])
    return {
        "steps": steps,
        "statistics": statistics,
        "properties": properties,
        "hyperparameters": sorted(hyperparameters),
    }


def compare(folder: Path, environment: str, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what each program told the writer."""
    executable = peer.executable(environment)
    config = folder / "trainer.yaml"
    folder.mkdir(parents=True)
    config.write_text(yaml.safe_dump(run))
    installed = site(folder / "site")
    by_program = {}
    for program in ("peer", "ours"):
        peer.train(program, config, executable, seed=SEED, folder=folder, site=installed)
        by_program[program] = told(calls(folder / f"{program}-{SEED}/calls.jsonl"))
    return by_program


def main() -> int:
    """Compare every case, and say what differs."""
    same = True
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (environment, run)) in enumerate(CASES.items()):
            reports = compare(Path(folder) / str(number), environment, run)
            theirs, ours = reports["peer"], reports["ours"]
            print(f"{name} ({environment}): {len(theirs['statistics'])} statistics")  # noqa: T201
            for kind, expected in theirs.items():
                equal = ours[kind] == expected
                same &= equal
                print(f"  {kind}: {'equal' if equal else 'DIFFERENT'}")  # noqa: T201
                if not equal:
                    print(f"    mlagents-learn: {expected}\n    pipeline learn: {ours[kind]}")  # noqa: T201
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
