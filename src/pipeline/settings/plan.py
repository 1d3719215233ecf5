"""`workflow/runs.yaml`: the table of runs that `dvc.yaml` goes through.

DVC neither nests interpolation nor crosses experiments with a list of seeds for each, so the table
is worked out here, from `params.yaml` and, for pretraining, the networks in the trainer files.
Snakemake uses the same table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path, PurePath
from pkgutil import iter_modules
from typing import Any

from pipeline.errors import Mistakes, SettingsError, StageError
from pipeline.files import fingerprint, near_entry, similar, write_whole
from pipeline.plugins import Group
from pipeline.settings.environments import (
    BuiltinSource,
    EnvironmentParams,
    ModuleSource,
    PathSource,
    UnitySource,
)
from pipeline.settings.experiments import ExperimentParams
from pipeline.settings.nodes import fail, fail_at
from pipeline.settings.params import SECTIONS_OF_NAMES, Params
from pipeline.settings.run_file import (
    demonstrations,
    refuse_missing_demonstrations,
    refuse_missing_weights,
    refuse_undecided,
    to_mapping,
)
from pipeline.settings.schema import RunSettings
from pipeline.settings.sweeps import SweepParams, proposal_file
from pipeline.settings.yaml_file import dump_yaml, read_yaml, shared_maps, unusable_for_dvc

_log = logging.getLogger(__name__)

RUNS_FILE = Path("workflow/runs.yaml")
_MOST_STAGES = 100
_TABLES = (
    *("environments", "path_environments", "unity_environments"),
    *("demonstrations", "file_demonstrations", "pretrain", "train_from_scratch"),
    *("train_pretrained", "proposals", "sweeps", "train_chosen", "export"),
    *("evaluate", "evaluate_video"),
)
_OTHER_SIMULATORS: Group[Any] = Group("pipeline.simulators", {})  # ours lie above this package
_HELPERS = {"areas", "drawing", "rays"}  # of the games, in their folder
OUR_SIMULATORS = {
    module.name for module in iter_modules([str(Path(__file__).parents[1] / "simulators/games")])
} - _HELPERS
"""Their names; the modules lie above this package."""
_HEADER = """\
# Made by `pipeline plan` from params.yaml: change that, and run the command again.
# One entry per run of a stage; dvc.yaml goes through each table with `foreach`.
"""


def plan(params: Params) -> dict[str, Any]:
    """Return the runs of each stage, under the one key that DVC merges with params.yaml's.

    Returns:
        `{"runs": tables}`, where `environments`, `path_environments` (builds, and modules beside
        params.yaml, which are watched), `unity_environments` (projects whose sources are watched),
        `demonstrations` and `file_demonstrations` (those that are not recorded) are by name, and
        `pretrain`, `train_from_scratch`, `train_pretrained`, `train_chosen` (with values that a
        sweep chooses while it runs), `export`, `evaluate` and `evaluate_video` by
        `<experiment>-<seed>`, each entry with experiment, base (the experiment in params.yaml that
        it comes from), seed, environment, trainer, and demonstrations where it has any; those of
        `pretrain` have a digest of the networks too, which is all they take from the trainer file.
        Trials of sweeps are entries like others, with the `values` they change. `sweeps` has what
        the ranking of each needs, and `proposals` what each trial is proposed from.

    Raises:
        SettingsError: The trainer configuration of an experiment with pretraining has a mistake,
            or two runs would have the same name.
    """
    # All tables, empty ones too: `foreach` over a key that is not there is an error in DVC.
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    for name, environment in params.environments.items():
        entry: dict[str, Any] = {"source": environment.source}
        path = None
        if isinstance(environment, PathSource | ModuleSource):
            path = environment.found(params.path.parent)
        if path is not None:
            tables["path_environments"][name] = entry | {"path": path}
        elif isinstance(environment, UnitySource):
            keys = ("assets", "packages", "settings")
            watched = dict(zip(keys, environment.watched, strict=True))
            tables["unity_environments"][name] = entry | watched
        else:
            tables["environments"][name] = entry | _plugins_of(name, environment)
    for name, demonstration in params.demonstrations.items():
        if demonstration.file is None:
            tables["demonstrations"][name] = {"environment": demonstration.environment}
        else:
            tables["file_demonstrations"][name] = {"file": demonstration.file}
    for name, sweep in params.sweeps.items():
        # What its ranking depends on, beside the results of its trials.
        ranked = {"experiment": sweep.experiment, "metric": sweep.metric, "goal": sweep.goal}
        ranked |= {} if sweep.behavior is None else {"behavior": sweep.behavior}
        tables["sweeps"][name] = ranked | {"seeds": list(sweep.seeds), "trials": sweep.trials()}
        tables["proposals"] |= _proposals(name, sweep, params)
        for number, values in sweep.trials().items():
            _add_runs(tables, params, f"{name}/{number}", {"values": values} if values else {})
    for name in params.experiments:
        _add_runs(tables, params, name, {})
    return {"runs": tables}


def _plugins_of(name: str, environment: EnvironmentParams) -> dict[str, Any]:
    """Return the version of the package that brings a simulator, if one does."""
    simulator = getattr(environment, "name", None) or name
    if not isinstance(environment, BuiltinSource) or simulator not in _OTHER_SIMULATORS:
        return {}
    if simulator in OUR_SIMULATORS:  # no plug-in of that name replaces it
        return {}
    return {"plugins": _OTHER_SIMULATORS.versions(simulator)}


def key_of(experiment: str, seed: int | str) -> str:
    """Return the name of a run in the tables, and in stages after the `@`."""
    # DVC does not allow a slash in the name of a stage.
    return f"{experiment.replace('/', '-')}-{seed}"


def _add_runs(
    tables: dict[str, dict[str, Any]], params: Params, name: str, more: dict[str, Any]
) -> None:
    """Add an entry per seed to the table of each of the experiment's stages."""
    experiment = params.experiment(name)
    for seed in experiment.seeds:
        run: dict[str, Any] = {
            "experiment": name,
            "base": experiment.base or name,
            "seed": seed,
            "environment": experiment.environment,
            "trainer": experiment.trainer,
        }
        if experiment.demonstrations is not None:
            run["demonstrations"] = experiment.demonstrations
        learning = run | more
        if plugins := params.plugins(name):
            learning["plugins"] = plugins
        if experiment.resources.threads is not None:
            learning["threads"] = experiment.resources.threads
        if experiment.chosen is not None:
            learning["chosen"] = experiment.chosen.as_posix()
        for stage in experiment.stages:
            # An entry has what its stage depends on and no more, or edits would run it again.
            entry = learning if stage in ("pretrain", "train") else run
            if stage == "pretrain":
                # A digest of the networks alone: another learning rate leaves the entry as it is.
                network = to_mapping(params.network_settings(name))
                entry = entry | {"network": fingerprint(network)[:16]}
            elif stage == "train" and experiment.learners > 1:
                entry = entry | {"learners": experiment.learners}
            # The trial `a/001` and an experiment called `a-001` would have one name.
            table, key = tables[table_of(stage, experiment)], key_of(name, seed)
            if key in table:
                raise SettingsError(
                    f"{params.path}: experiments.{name}: its run {key!r} is also one of "
                    f"{table[key]['experiment']!r}; rename one of them"
                )
            table[key] = entry


def _proposals(name: str, sweep: SweepParams, params: Params) -> dict[str, Any]:
    """Return an entry for each trial that is proposed while the sweep runs.

    A trial's proposal is made from the proposal before it, which has all results so far, and from
    the last trial that it waits for. DVC needs as many dependencies of each, so the first proposal
    has the environment in place of a proposal before it.
    """
    proposed = sweep.proposed()
    environment = params.experiments[sweep.experiment].environment
    before = [f"build/env/{environment}"]
    before += [proposal_file(f"{name}/{number}").as_posix() for number in proposed]
    return {
        f"{name}-{number}": {
            "trial": f"{name}/{number}",
            "told": f"{name}/{awaited}",
            "before": earlier,
            "seeds": list(sweep.seeds),
            "search": fingerprint(sweep.search())[:16],
        }
        for (number, awaited), earlier in zip(proposed.items(), before, strict=False)
    }


def _text_of(table: Mapping[str, Any]) -> str:
    return _HEADER + dump_yaml(table)


def write_plan(params: Params, path: Path | str = RUNS_FILE) -> None:
    """Write the table of runs, after checking every experiment's trainer configuration."""
    check_settings(params)
    _refuse_missing_builds(params)
    table = plan(params)
    n_stages = sum(map(len, table["runs"].values()))
    if n_stages > _MOST_STAGES:
        _log.warning(
            "%s describes %d stages. DVC rewrites its lock file after each, which takes seconds "
            "beyond %d: use Snakemake for a sweep of this size, or `dvc exp run --queue`.",
            params.path,
            n_stages,
            _MOST_STAGES,
        )
    for line, at, first in shared_maps(params.path):
        _log.warning(
            "%s:%d: %s is the map of %s, by an alias, so `dvc exp run -S` on one changes both; "
            "write the map out where they may differ.",
            params.path, line, at, first,
        )  # fmt: skip
    write_whole(path, _text_of(table))


def check_settings(params: Params) -> None:
    """Make sure that DVC can read params.yaml, and each experiment and trial its configuration."""
    mistakes = Mistakes()
    for at, text, kind in unusable_for_dvc(params.path, SECTIONS_OF_NAMES):
        remedy = f"DVC reads {text.value} as {kind}; write it in quotes: '{text.value}'"
        mistakes.found.append(fail(text, at, remedy))
    for name, experiment in params.experiments.items():
        if experiment.chosen is None:  # the best of a sweep is yet to be found
            with mistakes:
                settings = params.run_settings(name)
                refuse_undecided(settings)
                _check_demonstrations(params, name, settings)
    mistakes.refuse()  # the trials of a sweep would repeat what is wrong in its experiment
    for name, sweep in params.sweeps.items():
        with mistakes:
            # A trial that is proposed after hours must not be the first with a value.
            for values in sweep.samples() if sweep.proposed() else ():
                refuse_undecided(params.trial_settings(name, values))
            for number in sweep.trials():
                if number not in sweep.proposed():
                    refuse_undecided(params.run_settings(f"{name}/{number}"))
    mistakes.refuse()


def _check_demonstrations(params: Params, name: str, settings: RunSettings) -> None:
    """Refuse a trainer that reads recorded episodes which its experiment does not wait for."""
    recorded = {
        f"data/demos/{demonstration}.demo": demonstration for demonstration in params.demonstrations
    }
    for behavior, trainer in settings.behaviors.items():
        for key, path in demonstrations(trainer):
            read = recorded.get(path)
            # DVC and Snakemake do not see this path, so they would not record the file first.
            if read not in (None, params.experiments[name].demonstrations):
                raise SettingsError(
                    f"{params.path}: experiments.{name}: behaviors.{behavior}."
                    f"{key.partition('[')[0]} reads {path}, which the stage demos makes; set "
                    f"'demonstrations: {read}' and add the stage pretrain, so that training waits "
                    "for it"
                )


def _refuse_missing_builds(params: Params) -> None:
    """Refuse a build outside of the project that is not there.

    Inside of it, a stage of the user's own may make the build.
    """
    folder = params.path.parent
    for name, environment in params.environments.items():
        if isinstance(environment, PathSource) and (
            PurePath(environment.path).is_absolute() or environment.path.startswith("..")
        ):
            build = folder / environment.found(folder)
            if not build.exists():
                near = near_entry(build)
                hint = (
                    "; name the program, or its folder"
                    if near is None
                    else f"; did you mean '{PurePath(environment.path).with_name(near)}'?"
                )
                at = f"environments.{name}.path"
                raise fail_at(read_yaml(params.path), at, f"{environment.path} is not there{hint}")


def check_files(params: Params) -> None:
    """Make sure that files which params.yaml and its trainer files name are there.

    What a stage makes, or DVC keeps elsewhere, need not be there yet.
    """
    _refuse_missing_builds(params)
    folder = params.path.parent
    for name, demonstration in params.demonstrations.items():
        file = demonstration.file
        if file and not (folder / file).exists() and not (folder / f"{file}.dvc").exists():
            hint = similar(folder / file) or "; name a `.demo` file, or record one by `environment`"
            at = f"demonstrations.{name}.file"
            raise fail_at(read_yaml(params.path), at, f"{file} is not there{hint}")
    recorded = {f"data/demos/{name}.demo" for name in params.demonstrations}
    for name, experiment in params.experiments.items():
        if experiment.chosen is None and "train" in experiment.stages:
            settings = params.run_settings(name)
            refuse_missing_demonstrations(settings, folder=folder, made=recorded)
            refuse_missing_weights(settings, folder=folder)


def check_plan(params: Params, path: Path | str = RUNS_FILE) -> None:
    """Make sure that the file has the table of runs of these parameters."""
    path, text = Path(path), _text_of(plan(params))
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        state = "is out of date" if path.is_file() else "is missing"
        raise StageError(f"{path} {state}: run `pipeline plan` to make it from {params.path}.")


def table_of(stage: str, experiment: ExperimentParams) -> str:
    """Return the name of the table that has an experiment's runs of a stage."""
    if stage == "evaluate" and experiment.filmed:
        return "evaluate_video"
    if stage != "train":
        return stage
    if experiment.chosen is not None:
        return "train_chosen"
    return "train_pretrained" if "pretrain" in experiment.stages else "train_from_scratch"
