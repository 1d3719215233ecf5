"""Small projects: a params.yaml, and files like those that stages write."""

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
    """Write params.yaml and t.yaml, and return the loaded parameters.

    Args:
        root: The project's folder.
        names: Names of experiments that equal EXPERIMENT.
        behavior: The behavior that t.yaml trains with PPO.
        sections: YAML of further sections of params.yaml; it replaces sections of the same name.
        experiments: Changes of EXPERIMENT for each further experiment, by name.
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
    """Write files of a stage (maps as JSON, `progress` as CSV), and return their folder.

    Args:
        root: The project's folder.
        stage: The stage, such as `train`; `.work/train` for the stage's record.
        run: Experiment and seed, as in `walk/seed1`.
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
