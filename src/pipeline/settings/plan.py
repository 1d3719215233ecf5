"""`workflow/runs.yaml`: the table of runs that `dvc.yaml` goes through.

DVC neither nests interpolation nor crosses experiments with a list of seeds for each, so the table
is worked out here, from `params.yaml` and, for pretraining, the networks in the trainer files.
Snakemake uses the same table.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError, StageError
from pipeline.files import fingerprint, write_whole
from pipeline.settings.external_sources import PathSource, UnitySource
from pipeline.settings.run_file import to_mapping
from pipeline.settings.yaml_file import dump_yaml

if TYPE_CHECKING:
    from pipeline.settings.params import Params

_log = logging.getLogger(__name__)

RUNS_FILE = Path("workflow/runs.yaml")
_MOST_STAGES = 100
_HEADER = """\
# Made by `pipeline plan` from params.yaml: change that, and run the command again.
# One entry per run of a stage; dvc.yaml goes through each table with `foreach`.
"""


def plan(params: Params) -> dict[str, Any]:
    """The runs of each stage, under the one top-level key that DVC merges with params.yaml's.

    Returns:
        `{"runs": tables}`, where `environments`, `path_environments` (builds that are already
        there, and watched), `unity_environments` (Unity projects, whose sources are watched) and
        `demonstrations` are by name, and `pretrain`, `train_from_scratch`,
        `train_pretrained`, `export` and `evaluate` by `<experiment>-<seed>`, each entry with
        experiment, seed, environment, trainer, and demonstrations where it has any; those of
        `pretrain` have a digest of the networks too, which is all they take from the trainer file.

    Raises:
        SettingsError: The trainer configuration of an experiment with pretraining has a mistake.
    """
    tables: dict[str, dict[str, Any]] = {
        "environments": {},
        "path_environments": {},
        "unity_environments": {},
        "demonstrations": {},
        "pretrain": {},
        "train_from_scratch": {},
        "train_pretrained": {},
        "export": {},
        "evaluate": {},
    }
    for name, environment in params.environments.items():
        entry: dict[str, Any] = {"source": environment.source}
        if isinstance(environment, PathSource):
            path = environment.found(params.path.parent)
            tables["path_environments"][name] = entry | {"path": path}
        elif isinstance(environment, UnitySource):
            keys = ("assets", "packages", "settings")
            watched = dict(zip(keys, environment.watched, strict=True))
            tables["unity_environments"][name] = entry | watched
        else:
            tables["environments"][name] = entry
    for name, demonstration in params.demonstrations.items():
        tables["demonstrations"][name] = {"environment": demonstration.environment}
    for name, experiment in params.experiments.items():
        for seed in experiment.seeds:
            run: dict[str, Any] = {
                "experiment": name,
                "seed": seed,
                "environment": experiment.environment,
                "trainer": experiment.trainer,
            }
            if experiment.demonstrations is not None:
                run["demonstrations"] = experiment.demonstrations
            for stage in experiment.stages:
                entry = run
                if stage == "pretrain":
                    entry = run | {"network": _network(params, name)}
                tables[_table(stage, experiment.stages)][f"{name}-{seed}"] = entry
    return {"runs": tables}


def _network(params: Params, name: str) -> str:
    return fingerprint(to_mapping(params.network_settings(name)))[:16]


def plan_text(params: Params) -> str:
    """The content of the file that `write_plan` writes."""
    return _HEADER + dump_yaml(plan(params))


def write_plan(params: Params, path: Path | str = RUNS_FILE) -> None:
    """Write the table of runs, after checking every experiment's trainer configuration.

    Raises:
        SettingsError: A trainer configuration, or an override, has a mistake.
    """
    for name in params.experiments:
        _check_demonstrations(params, name)
    n_stages = sum(len(table) for table in plan(params)["runs"].values())
    if n_stages > _MOST_STAGES:
        _log.warning(
            "%s describes %d stages. DVC rewrites its lock file after each, which takes seconds "
            "beyond %d: use Snakemake for a sweep of this size, or `dvc exp run --queue`.",
            params.path,
            n_stages,
            _MOST_STAGES,
        )
    write_whole(path, plan_text(params))


def _check_demonstrations(params: Params, name: str) -> None:
    """Refuse a trainer that reads recorded episodes which its experiment does not wait for."""
    experiment, settings = params.experiments[name], params.run_settings(name)
    made = {f"data/demos/{one}.demo": one for one in params.demonstrations}
    for behavior, trainer in settings.behaviors.items():
        users: dict[str, object] = {
            "reward_signals.gail": trainer.reward_signals.get("gail"),
            "behavioral_cloning": trainer.behavioral_cloning,
        }
        for key, user in users.items():
            read = made.get(getattr(user, "demo_path", ""))
            if read is not None and read != experiment.demonstrations:
                raise SettingsError(
                    f"{params.path}: experiments.{name}: behaviors.{behavior}.{key}.demo_path "
                    f"reads data/demos/{read}.demo, which the stage demos makes; set "
                    f"'demonstrations: {read}' and add the stage pretrain, so that training waits "
                    "for it"
                )


def check_plan(params: Params, path: Path | str = RUNS_FILE) -> None:
    """Make sure that the table of runs is the one of these parameters.

    Raises:
        StageError: It is missing or out of date.
    """
    path = Path(path)
    state = "is missing" if not path.is_file() else "is out of date"
    if state == "is missing" or path.read_text(encoding="utf-8") != plan_text(params):
        raise StageError(f"{path} {state}: run `pipeline plan` to make it from {params.path}.")


def _table(stage: str, stages: tuple[str, ...]) -> str:
    if stage != "train":
        return stage
    return "train_pretrained" if "pretrain" in stages else "train_from_scratch"
