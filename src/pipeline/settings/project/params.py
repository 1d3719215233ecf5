"""`params.yaml`: the environments, demonstrations, experiments and sweeps of the DAG."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import Mistakes, SettingsError
from pipeline.files import listed, similar
from pipeline.settings.nodes import (
    Node,
    fail,
    fail_at,
    find,
    join,
    located,
    merge,
    respelled,
    to_plain,
    undotted,
)
from pipeline.settings.project.environments import EnvironmentParams, UnitySource
from pipeline.settings.project.experiments import (
    DemonstrationParams,
    ExperimentParams,
    RuntimeParams,
    SinkNames,
)
from pipeline.settings.project.sweeps import SweepParams, best_file, best_name, proposal_file
from pipeline.settings.reader import choice, display, read_dataclass, suggestion, to_map
from pipeline.settings.trainer.run_file import as_resolved, load_run_settings, to_mapping
from pipeline.settings.trainer.schema import ENCODERS, HYPERPARAMETERS, REWARD_SIGNALS, RunSettings
from pipeline.settings.yaml_file import read_yaml


def _of_stage(settings: RunSettings) -> RunSettings:
    """Return the settings with `compile: false` in place of null, as only stages read them."""
    chosen = settings.torch_settings
    return replace(settings, torch_settings=replace(chosen, compile=bool(chosen.compile)))


# In these sections the user chooses the keys; in all other sections keys are names of settings.
SECTIONS_OF_NAMES = ("environments", "demonstrations", "experiments", "sweeps", "subsets")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """The content of `params.yaml`."""

    runtime: RuntimeParams = field(default_factory=RuntimeParams)
    """Threads, device and kernels of torch in the stages of every run."""
    environments: dict[str, EnvironmentParams] = field(default_factory=dict)
    """Environments by name."""
    demonstrations: dict[str, DemonstrationParams] = field(default_factory=dict)
    """Demonstrations by name."""
    experiments: dict[str, ExperimentParams] = field(default_factory=dict)
    """Experiments by name, including the run of each sweep's best configuration."""
    sweeps: dict[str, SweepParams] = field(default_factory=dict)
    """Sweeps by name."""
    subsets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups of experiments, runs and sweeps, by name."""
    track: SinkNames | None = None
    """Sinks of the stage train in addition to console and CSV; no stage depends on them. None for
    TensorBoard, MLflow, and the sinks of all installed packages."""
    path: Path = field(default=Path("params.yaml"), metadata={"internal": True}, compare=False)
    """Path of the file; other paths are relative to the file's folder."""
    document: Node = field(
        default=Node({}, "params.yaml"), metadata={"internal": True}, compare=False, repr=False
    )
    """The file's content as nodes, with lines for errors."""

    def experiment(self, name: str) -> ExperimentParams:
        """Return the experiment `name`, or the trial `<sweep>/<number>` as an experiment."""
        if name in self.experiments:
            return self.experiments[name]
        # A trial's name is `<sweep>/<number>`; a name of params.yaml has no slash.
        sweep, _, number = name.partition("/")
        trials = self.sweeps[sweep].trials() if sweep in self.sweeps else {}
        if number not in trials:
            hint = suggestion(name, [*self.experiments, *(f"{sweep}/{trial}" for trial in trials)])
            raise SettingsError(f"{self.path}: experiments: no experiment is called {name!r}{hint}")
        settings = self.sweeps[sweep]
        base, source = self.experiments[settings.experiment], f"{self.path}: sweeps.{sweep}"
        return replace(
            base,
            # Trials have no videos: a sweep would write hundreds of them.
            evaluation=base.evaluation and replace(base.evaluation, video=False),
            overrides=self._merged(base.overrides, trials[number], source),
            chosen=proposal_file(name) if number in settings.proposed() else None,
            seeds=settings.seeds,
            base=settings.experiment,
        )

    def overrides(self, name: str) -> dict[str, Any]:
        """Return an experiment's overrides, including the values that a sweep has chosen for it."""
        experiment = self.experiment(name)
        if experiment.chosen is None:
            return experiment.overrides
        path = self.path.parent / experiment.chosen
        if not path.is_file():
            text = f"the sweep has not chosen the values of {name!r} yet. Run `pipeline run` or"
            raise SettingsError(f"{path}: is missing: {text} `dvc repro {experiment.chosen_by}`.")
        # The file is read at each call, because it appears while the DAG runs.
        chosen = to_plain(read_yaml(path, what="Choice of the sweep"))["values"]
        return self._merged(experiment.overrides, chosen, str(path))

    def resolved_overrides(self, name: str) -> dict[str, Any]:
        """Return an experiment's overrides as a nested map, with values as in resolved settings."""
        written = undotted(self.overrides(name), str(self.path))
        # The values come from the resolved settings, in which `1e-3` and `0.001` are equal numbers.
        return dict(respelled(as_resolved(written, to_mapping(self.run_settings(name)))))

    def in_one_spelling(self) -> dict[str, Any]:
        """Return what stages depend on, in one form: `1e-3` and `0.001` are equal text."""
        keys = ("runtime", "environments", "demonstrations")
        values = to_map({key: getattr(self, key) for key in keys})
        # Experiments that `load_params` made for sweeps are left out: params.yaml lacks them.
        written = {name: item for name, item in self.experiments.items() if item.base is None}
        values["experiments"] = to_map(written)
        for name in written:
            values["experiments"][name]["overrides"] = self.resolved_overrides(name)
        return dict(respelled(values))

    def _merged(
        self, overrides: Mapping[str, Any], values: Mapping[str, Any], source: str
    ) -> dict[str, Any]:
        """Return `overrides` merged with `values`, which win; the keys of both may be dotted."""
        # Dotted keys are split first, because `a.b` and `{a: {b: ...}}` are the same key.
        return dict(to_plain(merge(undotted(overrides, str(self.path)), undotted(values, source))))

    def run_settings(self, name: str, *, env_path: str | None = None) -> RunSettings:
        """Return the trainer configuration of an experiment, with its overrides and `env_path`."""
        overrides = self.overrides(name)
        if env_path is not None:
            # The executable is merged last, so that an override in params.yaml cannot replace it.
            overrides = self._merged(overrides, {"env_settings.env_path": env_path}, str(self.path))
        return self._trainer_file(name, overrides)

    def trial_settings(self, sweep: str, values: dict[str, Any]) -> RunSettings:
        """Return the trainer configuration of a sweep's trial with the given values."""
        base = self.experiments[self.sweeps[sweep].experiment].overrides
        overrides = self._merged(base, values, f"{self.path}: sweeps.{sweep}")
        return self._trainer_file(f"{sweep}/001", overrides)

    def _trainer_file(self, name: str, overrides: dict[str, Any]) -> RunSettings:
        """Return the trainer configuration; errors give the lines of overrides in params.yaml."""
        experiment, (sweep, _, number) = self.experiment(name), name.partition("/")
        written = [find(self.document, f"experiments.{experiment.base or name}.overrides")]
        if experiment.base is not None:
            if not number:
                sweep = next(other for other in self.sweeps if best_name(other) == name)
            keys = find(self.document, f"sweeps.{sweep}").value
            # The sweep's values come last, because they are merged over the experiment's values.
            if "parameters" in keys:
                written.append(keys["parameters"])
            elif number and "configurations" in keys:
                written.append(keys["configurations"].value[int(number) - 1])
        node = undotted(overrides, str(self.path))
        for values in written:
            node = located(node, undotted(values, str(self.path)))
        return _of_stage(load_run_settings(self.path.parent / experiment.trainer, overrides=node))

    def plugins(self, name: str) -> dict[str, str]:
        """Return versions of plug-in packages and digests of the files that an experiment uses."""
        groups, experiment = (HYPERPARAMETERS, REWARD_SIGNALS, ENCODERS), self.experiment(name)
        file = self.path.parent / experiment.trainer
        written = f"{experiment.overrides}{file.read_text('utf-8') if file.is_file() else ''}"
        is_class_named = re.search(r"[\w.]+:[A-Za-z_]\w*", written)  # in the form `module:Class`
        if not any(group.has_plugins for group in groups) and not is_class_named:
            return {}  # no plug-in can be in use, and reading every trainer file would be slow
        # A sweep's choice is left out, because it is unknown when runs are planned.
        return self._trainer_file(name, experiment.overrides).plugins()

    def network_settings(self, name: str) -> RunSettings:
        """Return the parts of an experiment's trainer configuration that define its networks.

        Pretraining depends only on these parts, so another learning rate does not repeat it.
        """
        full = to_mapping(self.run_settings(name))

        # The trainer type decides which networks there are, and restricts their width for POCA.
        def reduced(trainer: dict[str, Any]) -> dict[str, Any]:
            return {key: trainer[key] for key in ("trainer_type", "network_settings")}

        behaviors = {name: reduced(trainer) for name, trainer in full["behaviors"].items()}
        overrides: dict[str, Any] = {"behaviors": behaviors}
        if full["default_settings"] is not None:
            overrides["default_settings"] = reduced(full["default_settings"])
        settings = _of_stage(load_run_settings(None, overrides=overrides))
        # Unlisted behaviors remain an error, as with the complete file.
        return replace(settings, from_file=True)

    def runs_of(self, name: str) -> list[tuple[str, int]]:
        """Return the experiment and seed of each run that a name stands for.

        The name may be of a subset, an experiment, a sweep (including its best configuration), or a
        run: `<experiment>-<seed>`. The list is empty for an unknown name.
        """
        parts = self.subsets.get(name, (name,))
        return list(dict.fromkeys(run for part in parts for run in self._runs(part)))

    def _runs(self, name: str) -> list[tuple[str, int]]:
        """Return the runs of an experiment, a sweep or a single run, by name; not of a subset."""
        if name in self.experiments:
            return [(name, seed) for seed in self.experiments[name].seeds]
        if name in self.sweeps:
            sweep = self.sweeps[name]
            trials = [(f"{name}/{trial}", seed) for trial in sweep.trials() for seed in sweep.seeds]
            return trials + ([] if sweep.best is None else self._runs(best_name(name)))
        # The name is split at the last hyphen, because an experiment's name may have hyphens.
        experiment, _, seed = name.rpartition("-")
        base = self.experiments.get(experiment)
        is_run = base is not None and seed in map(str, base.seeds)
        return [(experiment, int(seed))] if is_run else []


def load_params(path: Path | str = Path("params.yaml")) -> Params:
    """Read `params.yaml`; refuse invalid names, and references to entries that do not exist."""
    path = Path(path)
    root = read_yaml(path, what="Parameter file")
    read: Params = read_dataclass(Params, root, "")
    # These checks concern names. The names themselves come first: all other messages contain them.
    mistakes = Mistakes()
    for section in SECTIONS_OF_NAMES:
        for name, node in root.value.get(section, Node({}, "")).value.items():
            if not _NAME.match(name):
                text = f"the name {name!r} is used for a folder and in a stage's name: use letters,"
                text += " digits, '_' and '-', starting with a letter or digit"
                mistakes.found.append(fail(node, join(section, name), text))
    mistakes.refuse()
    for name in read.demonstrations:
        with mistakes:
            _check_demonstration(root, read, name)
    for name in read.sweeps:
        with mistakes:
            _check_sweep(root, read, name)
    for name in read.experiments:
        with mistakes:
            _check_experiment(root, read, name, path.parent)
    mistakes.refuse()
    # All stages can run the best configuration of a sweep, as an ordinary experiment.
    experiments = dict(read.experiments)
    for name, sweep in read.sweeps.items():
        if sweep.best is not None:
            base, seeds = read.experiments[sweep.experiment], sweep.best.seeds
            best = replace(base, seeds=seeds, base=sweep.experiment, chosen=best_file(name))
            experiments[best_name(name)] = best
    params = replace(read, experiments=experiments, path=path, document=root)
    _check_subsets(root, params)
    return params


def _check_demonstration(root: Node, read: Params, name: str) -> None:
    at, file = f"demonstrations.{name}", read.demonstrations[name].file
    if file is None:
        _check_reference(root, f"{at}.environment", read.environments)
    elif Path(file) == Path(f"data/demos/{name}.demo"):
        text = f"{file!r} is the output of the stage demos; move your file elsewhere"
        raise fail_at(root, f"{at}.file", text)


def _check_experiment(root: Node, read: Params, name: str, folder: Path) -> None:
    at, experiment = f"experiments.{name}", read.experiments[name]
    undotted(find(root, f"{at}.overrides"), "")  # `undotted` raises an error for repeated keys
    _check_reference(root, f"{at}.environment", read.environments)
    if experiment.demonstrations is not None:
        _check_reference(root, f"{at}.demonstrations", read.demonstrations)
    is_unity = isinstance(read.environments[experiment.environment], UnitySource)
    if experiment.filmed and is_unity:
        text = "videos of a Unity player are not supported: record the exported policy in the"
        raise fail_at(root, f"{at}.evaluation.video", f"{text} Editor")
    trainer = folder / experiment.trainer
    if not trainer.is_file():
        hint = similar(trainer) or listed(trainer, ".yaml")
        text = f"the file {experiment.trainer!r} does not exist{hint}"
        raise fail_at(root, f"{at}.trainer", text)


def _check_sweep(root: Node, read: Params, name: str) -> None:
    at, sweep = f"sweeps.{name}", read.sweeps[name]
    keys = find(root, at).value
    for changes in [keys.get("parameters"), *getattr(keys.get("configurations"), "value", ())]:
        if changes is not None:
            undotted(changes, "")
    _check_reference(root, f"{at}.experiment", read.experiments)
    base = read.experiments[sweep.experiment]
    if "evaluate" not in base.stages or "pretrain" in base.stages:
        text = "a sweep needs an experiment with the stages train, export and evaluate, and without"
        text = f"{text} pretrain; {sweep.experiment!r} has {list(base.stages)}"
        raise fail_at(root, f"{at}.experiment", text)
    if sweep.prune_after is not None and base.learners > 1:
        text = "needs an experiment with one learner; remove prune_after, or set learners: 1"
        raise fail_at(root, f"{at}.prune_after", text)
    for other in (name, best_name(name)):
        if other in read.experiments:
            text = "the results of this sweep would be mixed with those of the experiment"
            raise fail_at(root, at, f"{text} {other!r}; rename one of them")


def _check_reference(root: Node, at: str, known: dict[str, Any]) -> None:
    node = find(root, at)
    if not known:
        raise fail(node, at, f"{display(node)} is not defined; define it in params.yaml")
    choice(node, at, known)


def _check_subsets(root: Node, params: Params) -> None:
    """Refuse subsets that are empty, contain unknown names, or have a name already in use."""
    known, mistakes = [*params.experiments, *params.sweeps], Mistakes()
    for name, parts in params.subsets.items():
        at = f"subsets.{name}"
        with mistakes:
            if name in known:
                text = "is also the name of an experiment or sweep; rename one of them"
                raise fail_at(root, at, text)
            if not parts:
                raise fail_at(root, at, f"is empty; list some of {', '.join(known)}")
            for part in parts:
                if not params._runs(part):
                    text = f"there is no experiment, run or sweep {part!r}{suggestion(part, known)}"
                    raise fail_at(root, at, f"{text} A run is written `<experiment>-<seed>`")
    mistakes.refuse()
