"""Small projects: a params.yaml, and files that stages leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from pipeline.settings.project.params import Params, load_params

EXPERIMENT = {
    "environment": "ball",
    "trainer": "t.yaml",
    "overrides": {},
    "seeds": [1],
    "stages": ["train", "export", "evaluate"],
    "evaluation": {"episodes": 2, "seed": 9},
}


def params_of(
    root: Path, *names: str, behavior: str = "Ball", sections: str = "", **experiments: Any
) -> Params:
    """Write params.yaml and t.yaml.

    Args:
        root: The project's folder.
        names: Experiments that are called so and are as EXPERIMENT.
        behavior: What t.yaml trains by PPO.
        sections: Further sections of params.yaml, or others in the place of these.
        experiments: What each further experiment has that EXPERIMENT has not.
    """
    (root / "t.yaml").write_text(f"behaviors: {{{behavior}: {{trainer_type: ppo}}}}\n")
    written = {
        "environments": {"ball": {"source": "builtin", "name": "balance_ball"}},
        "experiments": {
            name: EXPERIMENT | more
            for name, more in ({key: {} for key in names} | experiments).items()
        },
    }
    written |= yaml.safe_load(sections) or {}
    (root / "params.yaml").write_text(yaml.safe_dump(written, sort_keys=False))
    return load_params(root / "params.yaml")


def left(root: Path, stage: str, run: str, /, **files: object) -> Path:
    """Write files that a stage leaves: JSON of a map, `progress` as a curve; give their folder.

    Args:
        root: The project's folder.
        stage: The stage, such as `train`; `.work/train` for its record.
        run: Experiment and seed, as `walk/seed1`.
        files: The content of each file, by its name without a suffix.
    """
    folder = root / "results" / stage / run
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, dict):
            (folder / f"{name}.json").write_text(json.dumps(content))
        elif name == "progress":
            (folder / "progress.csv").write_text(f"behavior,step,reward\n{content}")
        else:
            (folder / f"{name}.pt").write_bytes(str(content).encode())
    return folder
