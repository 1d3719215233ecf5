"""What each option of SAC and PPO that is off by default changes, over seeds.

    python benchmarks/options.py [--task sac-chase ppo-corridor ...] [--seeds 10] [--option ...]
                                 [--folder results/options] [--write]

A number is the mean return of all episodes of a training, so that it counts how soon and how well
is learned. Tasks are toys of tests/learning, GridWorld, and Gymnasium's Hopper-v5 with the shipped
settings but for the steps. Runs are made one after another; what has been measured is kept in
`--folder`, so that a call after an interruption goes on with the rest. Rows are of what is there
for all seeds. --write puts them into docs/explanation/sac.md and ppo.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer import ROOT
from runs import say
from tables import put, table
from variants import Curve

import pipeline
from pipeline.evaluation.statistics import summarize
from pipeline.files import write_whole
from pipeline.settings import load_run_settings

sys.path[:0] = [str(ROOT / "tests/learning"), str(ROOT / "tests/support")]  # toys, and their steps
N_SUMMARIES = 20
CONSTANT = {"learning_rate_schedule": "constant"}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sac": {
        "none": {},
        "n_steps: 3": {"n_steps": 3},
        "decoupled_entropy: true": {"decoupled_entropy": True},
        "target_sigma: 0.15": {"target_sigma": 0.15},
        "held_noise: 16": {"held_noise": 16},
        "reward_normalization: true": {"reward_normalization": True},
    },
    "ppo": {
        "none": {},
        "recompute_advantages: true": {"recompute_advantages": True},
        "return_normalization: true": {"return_normalization": True},
        "none, constant schedules": CONSTANT,
        "desired_kl: 0.01": CONSTANT | {"desired_kl": 0.01},
    },
}
TOY: dict[str, dict[str, Any]] = {  # those of tests/learning/test_every_algorithm.py
    "sac": {"batch_size": 64, "buffer_size": 10_000, "buffer_init_steps": 256}
    | {"learning_rate": 3e-3, "steps_per_update": 4, "init_entcoef": 0.2, "tau": 0.02},
    "ppo": {"batch_size": 64, "buffer_size": 1024, "learning_rate": 2e-3},
}
GRID_SAC = {"batch_size": 128, "buffer_size": 50_000, "buffer_init_steps": 500} | {
    "learning_rate": 1e-3,
    "steps_per_update": 10,
    "init_entcoef": 0.05,
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and for how many steps."""

    environment: str
    steps: int
    has_choices: bool
    config: str = ""
    """Below config/; empty for the settings of toys."""
    changes: dict[str, Any] | None = None
    """Of the configuration's section; hyperparameters take the place of all others."""


TASKS = {
    "sac-chase": Task(environment="Chase", steps=3000, has_choices=False),
    "sac-corridor": Task(environment="Corridor", steps=4000, has_choices=True),
    "sac-grid_world": Task(
        environment="grid_world",
        steps=20_000,
        has_choices=True,
        config="ppo/GridWorld.yaml",
        changes={"trainer_type": "sac", "hyperparameters": GRID_SAC},
    ),
    "sac-hopper": Task(
        environment="gymnasium:Hopper-v5",
        steps=8000,
        has_choices=False,
        config="sac/Hopper.yaml",
        changes={"checkpoint_interval": 10**9},
    ),
    "ppo-chase": Task(environment="Chase", steps=20_000, has_choices=False),
    "ppo-corridor": Task(environment="Corridor", steps=10_000, has_choices=True),
    "ppo-grid_world": Task(
        environment="grid_world", steps=60_000, has_choices=True, config="ppo/GridWorld.yaml"
    ),
    "ppo-hopper": Task(
        environment="gymnasium:Hopper-v5",
        steps=60_000,
        has_choices=False,
        config="ppo/Hopper.yaml",
    ),
}


def fits(option: dict[str, Any], task: Task) -> bool:
    """Whether an option can change anything in a task."""
    if "decoupled_entropy" in option:
        return task.has_choices
    return not task.has_choices or not option.keys() & {"target_sigma", "held_noise"}


def settings_of(name: str, option: dict[str, Any]) -> dict[str, Any]:
    """A behavior's section."""
    task, trainer = TASKS[name], name.partition("-")[0]
    if task.config:
        run = load_run_settings(ROOT / "config" / task.config)
        (section,) = pipeline.settings.reader.to_map(run.behaviors).values()
    else:
        section = {
            "trainer_type": trainer,
            "hyperparameters": TOY[trainer],
            "network_settings": {"hidden_units": 32},
            "reward_signals": {"extrinsic": {"gamma": 0.95}},
            "time_horizon": 8 if trainer == "sac" else 32,
        }
    section |= task.changes or {}
    section |= {"max_steps": task.steps, "summary_freq": task.steps // N_SUMMARIES}
    section["hyperparameters"] = section["hyperparameters"] | option
    return {"default_settings": section}


def measured(name: str, title: str, seed: int, folder: Path) -> float:
    """Mean return of all episodes of one training, from the folder if it was made before."""
    path = folder / f"{name}-{title.replace(': ', '=')}-{seed}.json"
    if not path.exists():
        import toys

        environment: Any = TASKS[name].environment
        if toy := getattr(toys, environment, None):
            environment = pipeline.envs.in_process.InProcessEnvironment(toy(seed=seed))
        elif ":" not in environment:
            environment = pipeline.make_env(environment, seed=seed)
        else:
            environment = pipeline.make_env(environment, seed=seed, n_agents=1)
        curve = Curve()
        option = OPTIONS[name.partition("-")[0]][title]
        with tempfile.TemporaryDirectory() as run:
            settings = settings_of(name, option)
            pipeline.train(environment, settings, seed=seed, run_dir=run, sinks=[curve])
        rewards = [reward for reward in curve.rewards.values() if reward == reward]
        write_whole(path, json.dumps({"return": sum(rewards) / len(rewards)}))
    return float(json.loads(path.read_text("utf-8"))["return"])


def main() -> None:
    """Measure what is missing, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--option", nargs="+")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=ROOT / "results/options")
    parser.add_argument("--write", action="store_true", help="the tables into their pages")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for trainer, of_trainer in OPTIONS.items():
        names = [name for name in options.task if name.startswith(trainer)]
        rows = []
        for title, option in of_trainer.items():
            if options.option and title not in options.option:
                continue
            cells = [title]
            for name in names:
                if not fits(option, TASKS[name]):
                    cells.append("-")
                    continue
                seeds = range(1, options.seeds + 1)
                found = summarize([measured(name, title, seed, options.folder) for seed in seeds])
                cells.append(f"{found.mean:.2f} [{found.ci_low:.2f}, {found.ci_high:.2f}]")
            rows.append(cells)
        header = [trainer, *(f"{TASKS[n].environment}, {TASKS[n].steps:,} steps" for n in names)]
        if names:
            say(table(header, rows))
            if options.write:
                put(ROOT / f"docs/explanation/{trainer}.md", f"options-{trainer}", header, rows)


if __name__ == "__main__":
    main()
