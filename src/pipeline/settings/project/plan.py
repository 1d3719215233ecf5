"""`workflow/runs.yaml`: the table of runs that `dvc.yaml` expands.

DVC can neither nest interpolations nor combine each experiment with its own seeds, so this module
computes the table, from `params.yaml` and, for pretraining, the networks in the trainer files.
Snakemake uses the same table.
"""

import logging
from pathlib import Path, PurePath
from pkgutil import iter_modules
from typing import Any

from pipeline.errors import Mistakes, SettingsError, StageError
from pipeline.files import fingerprint, near_entry, similar, write_whole
from pipeline.plugins import Group
from pipeline.settings.nodes import fail, fail_at
from pipeline.settings.project.environments import (
    BuiltinSource,
    EnvironmentParams,
    ModuleSource,
    PathSource,
    UnitySource,
)
from pipeline.settings.project.experiments import ExperimentParams
from pipeline.settings.project.params import SECTIONS_OF_NAMES, Params
from pipeline.settings.project.sweeps import SweepParams, proposal_file
from pipeline.settings.trainer.run_file import (
    demonstrations,
    refuse_missing_demonstrations,
    refuse_missing_weights,
    refuse_undecided,
    to_mapping,
)
from pipeline.settings.trainer.schema import RunSettings
from pipeline.settings.yaml_file import dump_yaml, shared_maps, unusable_for_dvc

_log = logging.getLogger(__name__)

RUNS_FILE = Path("workflow/runs.yaml")
# With more stages, DVC's rewriting of dvc.lock after each stage becomes noticeable.
_MOST_STAGES = 100
_TABLES = (
    *("environments", "path_environments", "unity_environments"),
    *("demonstrations", "file_demonstrations", "pretrain", "train_from_scratch"),
    *("train_pretrained", "proposals", "sweeps", "train_chosen", "export"),
    *("evaluate", "evaluate_video"),
)
# Built-in simulators are not listed, because their package may not be imported by this package.
_OTHER_SIMULATORS: Group[Any] = Group("pipeline.simulators", {})
_HELPERS = {"areas", "drawing", "rays"}  # these modules in the games' folder are no simulators
OUR_SIMULATORS = {
    module.name for module in iter_modules([str(Path(__file__).parents[2] / "simulators/games")])
} - _HELPERS
"""Names of the built-in simulators, from their file names: this package may not import them."""
_HEADER = """\
# Made by `pipeline plan` from params.yaml: change that, and run the command again.
# One entry per run of a stage; dvc.yaml goes through each table with `foreach`.
"""


def plan(params: Params) -> dict[str, Any]:
    """Return the tables of runs, under the key `runs`, which DVC adds to params.yaml's keys.

    The keys of `environments`, `path_environments` (existing builds, and modules next to
    params.yaml), `unity_environments`, `demonstrations`, `file_demonstrations` and `sweeps` are
    names in params.yaml. `proposals` has the dependencies of each proposed trial. The keys of the
    other tables are runs, `<experiment>-<seed>`; `train_chosen` has the runs with values that a
    sweep chooses while it runs. A run's `base` is its experiment in params.yaml.

    Raises:
        SettingsError: The trainer configuration of an experiment with pretraining has a mistake,
            or two runs would have the same name.
    """
    # Empty tables are included: `foreach` over a missing key is an error in DVC.
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    for name, environment in params.environments.items():
        entry: dict[str, Any] = {"source": environment.source}
        path = None  # also for a module that is installed and not next to params.yaml
        if isinstance(environment, PathSource | ModuleSource):
            path = environment.found(params.path.parent)
        if path is not None:
            tables["path_environments"][name] = entry | {"path": path}
        elif isinstance(environment, UnitySource):
            watched = zip(("assets", "packages", "settings"), environment.watched, strict=True)
            tables["unity_environments"][name] = entry | dict(watched)
        else:
            tables["environments"][name] = entry | _plugins_of(name, environment)
    for name, demonstration in params.demonstrations.items():
        if demonstration.file is None:
            tables["demonstrations"][name] = {"environment": demonstration.environment}
        else:
            tables["file_demonstrations"][name] = {"file": demonstration.file}
    for name, sweep in params.sweeps.items():
        # The sweep's ranking depends on these values, in addition to the results of its trials.
        ranked = {"experiment": sweep.experiment, "metric": sweep.metric, "goal": sweep.goal}
        # Sweeps planned before this key existed must not run again.
        ranked |= {} if sweep.behavior is None else {"behavior": sweep.behavior}
        tables["sweeps"][name] = ranked | {"seeds": list(sweep.seeds), "trials": sweep.trials()}
        tables["proposals"] |= _proposals(name, sweep, params)
        for number, values in sweep.trials().items():
            _add_runs(tables, params, f"{name}/{number}", {"values": values} if values else {})
    for name in params.experiments:
        _add_runs(tables, params, name, {})
    return {"runs": tables}


def _plugins_of(name: str, environment: EnvironmentParams) -> dict[str, Any]:
    """Return `{"plugins": versions}` if a plug-in package has the simulator; else {}."""
    simulator = getattr(environment, "name", None) or name
    # Built-in names have precedence.
    if not isinstance(environment, BuiltinSource) or simulator in OUR_SIMULATORS:
        return {}
    is_plugin = simulator in _OTHER_SIMULATORS
    return {"plugins": _OTHER_SIMULATORS.versions(simulator)} if is_plugin else {}


def key_of(experiment: str, seed: int | str) -> str:
    """Return the key of a run in the tables, and in names of stages after the `@`."""
    # DVC does not allow a slash in the name of a stage.
    return f"{experiment.replace('/', '-')}-{seed}"


def _add_runs(
    tables: dict[str, dict[str, Any]], params: Params, name: str, more: dict[str, Any]
) -> None:
    experiment = params.experiment(name)
    for seed in experiment.seeds:
        run: dict[str, Any] = {"experiment": name, "base": experiment.base or name, "seed": seed}
        run |= {"environment": experiment.environment, "trainer": experiment.trainer}
        if experiment.demonstrations is not None:
            run["demonstrations"] = experiment.demonstrations
        learning = run | more
        # The versions of plug-ins are in the entry, so that another version reruns the training.
        if plugins := params.plugins(name):
            learning["plugins"] = plugins
        if experiment.resources.threads is not None:
            learning["threads"] = experiment.resources.threads
        if experiment.chosen is not None:
            learning["chosen"] = experiment.chosen.as_posix()
        for stage in experiment.stages:
            # The entry has only what the stage depends on: a change of the entry reruns it.
            entry = learning if stage in ("pretrain", "train") else run
            if stage == "pretrain":
                # The digest is of networks only: another learning rate causes no rerun.
                network = to_mapping(params.network_settings(name))
                entry = entry | {"network": fingerprint(network)[:16]}
            elif stage == "train" and experiment.learners > 1:
                entry = entry | {"learners": experiment.learners}
            # The trial `a/001` and an experiment `a-001` would have the same key.
            table, key = tables[table_of(stage, experiment)], key_of(name, seed)
            if key in table:
                other = f"has the name of a run of {table[key]['experiment']!r}; rename one of them"
                raise SettingsError(f"{params.path}: experiments.{name}: its run {key!r} {other}")
            table[key] = entry


def _proposals(name: str, sweep: SweepParams, params: Params) -> dict[str, Any]:
    """Return a table entry for each trial that is proposed while the sweep runs.

    A proposal depends on the previous proposal, which has all earlier results, and on the last
    trial that the new trial waits for.
    """
    proposed = sweep.proposed()
    # DVC needs equally many dependencies for each proposal, so the first proposal has the
    # environment in place of a previous proposal.
    before = [f"build/env/{params.experiments[sweep.experiment].environment}"]
    before += [proposal_file(f"{name}/{number}").as_posix() for number in proposed]
    return {
        f"{name}-{number}": {
            "trial": f"{name}/{number}",
            "told": f"{name}/{awaited}",
            "before": earlier,
            "seeds": list(sweep.seeds),
            "search": fingerprint(sweep.search())[:16],  # enough digits to notice a change
        }
        for (number, awaited), earlier in zip(proposed.items(), before, strict=False)
    }


def write_plan(params: Params, path: Path | str = RUNS_FILE) -> None:
    """Write the table of runs, after a check of all trainer configurations."""
    # All mistakes are reported now: a stage would report its mistake only hours later.
    check_settings(params)
    _refuse_missing_builds(params)
    table = plan(params)
    n_stages = sum(map(len, table["runs"].values()))
    if n_stages > _MOST_STAGES:
        text = "%s describes %d stages. DVC rewrites its lock file after each stage, which takes "
        text += "seconds with more than %d stages: use Snakemake, or `dvc exp run --queue`."
        _log.warning(text, params.path, n_stages, _MOST_STAGES)
    for line, at, first in shared_maps(params.path):
        text = "%s:%d: %s is an alias of the map %s, so `dvc exp run -S` changes both maps; write "
        text += "the map out twice if the copies may differ."
        _log.warning(text, params.path, line, at, first)
    write_whole(path, _HEADER + dump_yaml(table))


def check_settings(params: Params) -> None:
    """Check that DVC can read params.yaml, and check the settings of experiments and trials."""
    mistakes = Mistakes()
    for at, text, kind in unusable_for_dvc(params.path, SECTIONS_OF_NAMES):
        remedy = f"DVC reads {text.value} as {kind}; write it in quotes: '{text.value}'"
        mistakes.found.append(fail(text, at, remedy))
    for name, experiment in params.experiments.items():
        if experiment.chosen is None:  # the best trial of a sweep is not known yet
            with mistakes:
                settings = params.run_settings(name)
                refuse_undecided(settings)
                _check_demonstrations(params, name, settings)
    # A trial would repeat the mistakes of its experiment.
    mistakes.refuse()
    for name, sweep in params.sweeps.items():
        with mistakes:
            # All values are checked now, not first in a trial that is proposed after hours.
            for values in sweep.samples() if sweep.proposed() else ():
                refuse_undecided(params.trial_settings(name, values))
            for number in sweep.trials():
                if number not in sweep.proposed():
                    refuse_undecided(params.run_settings(f"{name}/{number}"))
    mistakes.refuse()


def _check_demonstrations(params: Params, name: str, settings: RunSettings) -> None:
    recorded = {f"data/demos/{recording}.demo": recording for recording in params.demonstrations}
    for behavior, trainer in settings.behaviors.items():
        for key, path in demonstrations(trainer):
            read = recorded.get(path)
            # DVC and Snakemake would not wait until the stage demos has written the file.
            if read not in (None, params.experiments[name].demonstrations):
                at = f"experiments.{name}: behaviors.{behavior}.{key.partition('[')[0]}"
                raise SettingsError(
                    f"{params.path}: {at} reads {path}, which the stage demos writes; set "
                    f"'demonstrations: {read}' and add the stage pretrain, so that training waits "
                    "for it"
                )


def _refuse_missing_builds(params: Params) -> None:
    """Refuse an environment's build that does not exist, if it is outside the project."""
    # Inside the project, a missing build may be the output of a stage that the user has added.
    folder = params.path.parent
    for name, environment in params.environments.items():
        path = PurePath(getattr(environment, "path", ""))
        if not isinstance(environment, PathSource) or not (
            path.is_absolute() or environment.path.startswith("..")
        ):
            continue
        build = folder / environment.found(folder)
        if not build.exists():
            near = near_entry(build)
            hint = f"did you mean '{path.with_name(near)}'?" if near else ""
            text = f"{environment.path} does not exist; {hint or 'name the program, or its folder'}"
            raise fail_at(params.document, f"environments.{name}.path", text)


def check_files(params: Params) -> None:
    """Check that all files exist to which params.yaml and its trainer files refer.

    Outputs of stages, and files that DVC keeps elsewhere, may be missing.
    """
    _refuse_missing_builds(params)
    folder = params.path.parent
    for name, demonstration in params.demonstrations.items():
        file = demonstration.file
        if file and not (folder / file).exists() and not (folder / f"{file}.dvc").exists():
            remedy = "; name a `.demo` file, or record one with the key `environment`"
            text = f"{file} does not exist{similar(folder / file) or remedy}"
            raise fail_at(params.document, f"demonstrations.{name}.file", text)
    recorded = {f"data/demos/{name}.demo" for name in params.demonstrations}
    for name, experiment in params.experiments.items():
        if experiment.chosen is None and "train" in experiment.stages:
            settings = params.run_settings(name)
            refuse_missing_demonstrations(settings, folder=folder, made=recorded)
            refuse_missing_weights(settings, folder=folder)


def check_plan(params: Params, path: Path | str = RUNS_FILE) -> None:
    """Raise StageError unless the file `path` has the table of runs that `params` gives."""
    path, text = Path(path), _HEADER + dump_yaml(plan(params))
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        state = "is out of date" if path.is_file() else "is missing"
        raise StageError(f"{path} {state}: run `pipeline plan` to make it from {params.path}.")


def table_of(stage: str, experiment: ExperimentParams) -> str:
    """Return the name of the table with an experiment's runs of a stage."""
    if stage == "evaluate" and experiment.filmed:
        return "evaluate_video"
    if stage != "train":
        return stage
    if experiment.chosen is not None:
        return "train_chosen"
    return "train_pretrained" if "pretrain" in experiment.stages else "train_from_scratch"
