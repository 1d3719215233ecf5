"""`params.yaml`: environments, demonstrations and experiments that the DAG is made of."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.settings.nodes import Node, fail, find, join, merge, to_plain, undotted
from pipeline.settings.reader import (
    ContradictionError,
    choice,
    entries_of,
    read_dataclass,
    shown,
    suggestion,
)
from pipeline.settings.run_file import load_run_settings, to_mapping
from pipeline.settings.schema.kinds import Count, CountOrZero, Positive
from pipeline.settings.schema.run import RunSettings
from pipeline.settings.source import EnvironmentParams
from pipeline.settings.subsets import check_subsets
from pipeline.settings.sweeps import SweepParams, best_file, best_name
from pipeline.settings.yaml_file import read_yaml

STAGES = ("pretrain", "train", "export", "evaluate")
"""The stages that an experiment may ask for, in the order in which they run."""

_NEEDS = {"export": "train", "evaluate": "export"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")

Stage = Literal["pretrain", "train", "export", "evaluate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeParams:
    """`runtime`: what every stage that computes is told."""

    torch_threads: Count = 1
    """Threads of each process; a part of the result, since sums round differently."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:0`, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationParams:
    """`demonstrations.<name>`: episodes to record, or a file that is there already."""

    environment: str | None = None
    """A name under `environments`; to record in."""
    policy: Literal["expert"] = "expert"
    """Who acts: the simulator's own expert."""
    episodes: Count | None = None
    """Episodes to record."""
    seed: CountOrZero | None = None
    """Seed of the environment and the policy."""
    file: str | None = None
    """A `.demo` file, for example one that a person has played in Unity, instead of recording."""

    def __post_init__(self) -> None:
        """Refuse what says neither, or both."""
        recording = {
            "environment": self.environment,
            "episodes": self.episodes,
            "seed": self.seed,
        }
        for key, value in recording.items():
            if self.file is not None and value is not None:
                raise ContradictionError(
                    key, f"{value!r} is for recording, but 'file' names what is there; remove one"
                )
            if self.file is None and value is None:
                raise ContradictionError(
                    "environment" if self.environment else "policy",
                    f"the key {key!r} is required to record; or name a .demo under 'file'",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainParams:
    """`experiments.<name>.pretrain`: supervised learning of the demonstrated actions."""

    epochs: Count
    """Passes over all demonstrations."""
    batch_size: Count
    """Demonstrated steps in a minibatch."""
    learning_rate: Positive
    """Step size of Adam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationParams:
    """`experiments.<name>.evaluation`: episodes of the exported policy."""

    episodes: Count
    """Episodes to play."""
    seed: CountOrZero
    """Seed of the environment, away from those of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceParams:
    """`experiments.<name>.resources`: what its jobs may use; read by Snakemake, never a result."""

    threads: Count | None = None
    """Threads of pretrain and train instead of `runtime.torch_threads`; this is a result."""
    memory_mb: Count = 2000
    """Memory of pretrain, and of each learner of train, in MB."""
    minutes: Count = 720
    """Time that train is given, in minutes."""
    gpus: CountOrZero = 0
    """GPUs of pretrain, and of each learner of train; `runtime.device` says if they are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentParams:
    """`experiments.<name>`: one trainer configuration in one environment, with several seeds."""

    environment: str
    """A name under `environments`."""
    trainer: str
    """The trainer configuration, relative to params.yaml."""
    overrides: dict[str, Any]
    """Changes to the trainer configuration: nested, or with dotted keys."""
    seeds: tuple[CountOrZero, ...]
    """One run for each."""
    stages: tuple[Stage, ...]
    """What to run, in order."""
    demonstrations: str | None = None
    """A name under `demonstrations`, for `pretrain`."""
    pretrain: PretrainParams | None = None
    """Needed when `stages` has pretrain."""
    evaluation: EvaluationParams | None = None
    """Needed when `stages` has evaluate."""
    learners: Count = 1
    """Processes that train one run together, each with environments of its own; a result."""
    resources: ResourceParams = field(default_factory=ResourceParams)
    """What its jobs may use."""
    base: str | None = field(default=None, metadata={"internal": True})
    """The experiment that a trial or the best of a sweep is made from."""
    best_of: str | None = field(default=None, metadata={"internal": True})
    """The sweep whose best configuration this is."""

    def __post_init__(self) -> None:
        """Refuse seeds twice, stages out of order, and stages without what they need."""
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ContradictionError(
                "seeds", f"needs one seed or more, each once, got {list(self.seeds)}"
            )
        _check_stages(self.stages)
        if "pretrain" in self.stages and self.demonstrations is None:
            raise ContradictionError("stages", "pretrain needs the key 'demonstrations'")
        if self.demonstrations is not None and "pretrain" not in self.stages:
            raise ContradictionError(
                "demonstrations", "is used by the stage pretrain, which 'stages' does not have"
            )
        for stage, key, section in (
            ("pretrain", "pretrain", self.pretrain),
            ("evaluate", "evaluation", self.evaluation),
        ):
            if stage in self.stages and section is None:
                raise ContradictionError("stages", f"{stage} needs the section {key!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """All of `params.yaml`."""

    runtime: RuntimeParams = field(default_factory=RuntimeParams)
    """What every stage that computes is told."""
    environments: dict[str, EnvironmentParams] = field(default_factory=dict)
    """Environments by name."""
    demonstrations: dict[str, DemonstrationParams] = field(default_factory=dict)
    """Demonstrations by name."""
    experiments: dict[str, ExperimentParams] = field(default_factory=dict)
    """Experiments by name, with the best of each sweep as one more."""
    sweeps: dict[str, SweepParams] = field(default_factory=dict)
    """Sweeps by name."""
    subsets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Experiments, runs and sweeps that are asked for together, by name."""
    path: Path = field(default=Path("params.yaml"), metadata={"internal": True}, compare=False)
    """The file, from whose folder other paths are meant."""

    def experiment(self, name: str) -> ExperimentParams:
        """The experiment called `name`, or the trial `<sweep>/<number>` as one.

        Raises:
            SettingsError: There is none.
        """
        if name in self.experiments:
            return self.experiments[name]
        sweep, _, number = name.partition("/")
        trials = self.sweeps[sweep].trials() if sweep in self.sweeps else {}
        if number not in trials:
            node = Node(name, str(self.path))
            hint = suggestion(name, [*self.experiments, *(f"{sweep}/{one}" for one in trials)])
            raise fail(node, "experiments", f"no experiment is called {name!r}{hint}")
        base = self.experiments[self.sweeps[sweep].experiment]
        return replace(
            base,
            overrides=self._changed(base, trials[number], f"sweeps.{sweep}"),
            seeds=self.sweeps[sweep].seeds,
            base=self.sweeps[sweep].experiment,
        )

    def overrides(self, name: str) -> dict[str, Any]:
        """All changes to the trainer configuration, with those that a sweep chose.

        Raises:
            SettingsError: There is no such experiment, or its sweep has not been run.
        """
        experiment = self.experiment(name)
        if experiment.best_of is None:
            return experiment.overrides
        best = self.path.parent / best_file(experiment.best_of)
        if not best.is_file():
            raise fail(
                Node(name, str(best)),
                "",
                f"is missing: the sweep {experiment.best_of!r} has not chosen a best configuration "
                f"yet. Run `dvc repro sweep@{experiment.best_of}` or `snakemake --cores 1`.",
            )
        chosen = to_plain(read_yaml(best, what="Best of the sweep"))["values"]
        return self._changed(experiment, chosen, str(best))

    def _changed(
        self, base: ExperimentParams, values: dict[str, Any], source: str
    ) -> dict[str, Any]:
        """The overrides of an experiment with a sweep's values laid on them."""
        laid = merge(undotted(base.overrides, str(self.path)), undotted(values, source))
        plain: dict[str, Any] = to_plain(laid)
        return plain

    def run_settings(self, name: str, *, env_path: str | None = None) -> RunSettings:
        """The trainer configuration of an experiment, with its overrides.

        Args:
            name: the experiment.
            env_path: the environment's executable, put into `env_settings`.

        Raises:
            SettingsError: There is no such experiment, or its configuration has a mistake.
        """
        experiment = self.experiment(name)
        section = "experiments" if experiment.base is None else "sweeps"
        source = f"{self.path}: {section}.{name}.overrides"
        overrides = dict(self.overrides(name))
        if env_path is not None:
            overrides["env_settings.env_path"] = env_path
        return load_run_settings(
            self.path.parent / experiment.trainer,
            overrides=overrides,
            overrides_from=source,
            env_path_follows=True,
        )

    def network_settings(self, name: str) -> RunSettings:
        """The trainer configuration of an experiment reduced to its networks.

        Pretraining depends on no more, so a new learning rate does not repeat it.

        Raises:
            SettingsError: There is no such experiment, or its configuration has a mistake.
        """
        whole = to_mapping(self.run_settings(name))
        kept = ("trainer_type", "network_settings")
        behaviors = {
            behavior: {key: settings[key] for key in kept}
            for behavior, settings in whole["behaviors"].items()
        }
        reduced: dict[str, Any] = {"behaviors": behaviors}
        if whole["default_settings"] is not None:
            reduced["default_settings"] = {key: whole["default_settings"][key] for key in kept}
        settings = load_run_settings(None, overrides=reduced, env_path_follows=True)
        return replace(settings, from_file=True)


def load_params(path: Path | str = Path("params.yaml")) -> Params:
    """Read `params.yaml` and check that everything which it names is there.

    Raises:
        SettingsError: It cannot be read, or something in it is not as it must be.
    """
    path = Path(path)
    root = read_yaml(path, what="Parameter file")
    read: Params = read_dataclass(Params, root, "")
    params = Params(
        runtime=read.runtime,
        environments=read.environments,
        demonstrations=read.demonstrations,
        experiments=read.experiments | _best_ones(read),
        sweeps=read.sweeps,
        subsets=read.subsets,
        path=path,
    )
    for section in ("environments", "demonstrations", "experiments", "sweeps", "subsets"):
        _check_names(root, section)
    for name, demonstration in params.demonstrations.items():
        at = f"demonstrations.{name}"
        if demonstration.file is None:
            _check_reference(root, f"{at}.environment", params.environments)
        elif Path(demonstration.file) == Path(f"data/demos/{name}.demo"):
            node = find(root, f"{at}.file")
            raise fail(
                node, f"{at}.file", f"{shown(node)} is what the stage makes; keep yours elsewhere"
            )
    for name in read.sweeps:
        _check_sweep(root, read, name)
    for name, experiment in read.experiments.items():
        at = f"experiments.{name}"
        _check_reference(root, f"{at}.environment", params.environments)
        if experiment.demonstrations is not None:
            _check_reference(root, f"{at}.demonstrations", params.demonstrations)
        if not (path.parent / experiment.trainer).is_file():
            node = find(root, f"{at}.trainer")
            raise fail(node, f"{at}.trainer", f"there is no file {experiment.trainer!r}")
    check_subsets(root, params)
    return params


def _best_ones(read: Params) -> dict[str, ExperimentParams]:
    """The best of each sweep as an experiment; sweeps of unknown experiments are refused later."""
    return {
        best_name(name): replace(
            read.experiments[sweep.experiment],
            seeds=sweep.best.seeds,
            base=sweep.experiment,
            best_of=name,
        )
        for name, sweep in read.sweeps.items()
        if sweep.best is not None and sweep.experiment in read.experiments
    }


def _check_sweep(root: Node, read: Params, name: str) -> None:
    at = f"sweeps.{name}"
    _check_reference(root, f"{at}.experiment", read.experiments)
    node = find(root, at)
    base = read.experiments[read.sweeps[name].experiment]
    if "evaluate" not in base.stages or "pretrain" in base.stages:
        raise fail(
            node,
            f"{at}.experiment",
            "a sweep needs an experiment with the stages train, export and evaluate, and without "
            f"pretrain; {read.sweeps[name].experiment!r} has {list(base.stages)}",
        )
    for taken in (name, best_name(name)):
        if taken in read.experiments:
            raise fail(
                node,
                at,
                f"the results of this sweep would lie in those of the experiment {taken!r}; "
                "rename one of them",
            )


def _check_stages(stages: tuple[str, ...]) -> None:
    if not stages or list(stages) != [name for name in STAGES if name in stages]:
        raise ContradictionError(
            "stages", f"must be some of {list(STAGES)}, each once, in this order; got {[*stages]}"
        )
    for stage, before in _NEEDS.items():
        if stage in stages and before not in stages:
            raise ContradictionError("stages", f"{stage} needs the stage {before!r} before it")


def _check_names(root: Node, section: str) -> None:
    for name, node in entries_of(root.value.get(section, Node({}, root.source)), section).items():
        if not _NAME.match(name):
            raise fail(
                node,
                join(section, name),
                f"the name {name!r} becomes a folder and part of a stage's name: use letters, "
                "digits, '_' and '-', starting with a letter or digit",
            )


def _check_reference(root: Node, at: str, known: dict[str, Any]) -> None:
    node = find(root, at)
    if not known:
        raise fail(node, at, f"{shown(node)} is not defined, and nothing of its kind is")
    choice(node, at, known)
