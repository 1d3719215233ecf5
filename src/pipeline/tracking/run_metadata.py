"""The key by which a stage finds its MLflow run, and the metadata of that run."""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline import files
from pipeline.settings import RunSettings

# False and 0 do not count as empty, because they are values of settings.
_EMPTY_VALUES: tuple[Any, ...] = (None, {}, [])
_SHARED = "hyperparameters"
EXACT = "train.exact"
"""Tag: `yes`, or the steps of interruptions that were not resumed exactly."""
INTERRUPTED = "interrupted_at_step"
"""Key in a training's results: the step of the last interruption that was not resumed exactly."""
POLICY_DIGEST = "policy_md5"
"""Key in export.json, and in the metrics.json of `evaluate`: DVC's digest of the policy.pt."""
STOCHASTIC = "stochastic"
"""Key in the metrics.json of `evaluate`: true if actions were stochastic, absent if not."""
VARIANT, BASELINE, WORKSPACE = "pipeline.variant", "pipeline.baseline", "workspace"
"""Tags with a DVC experiment's name and base commit; the name that counts without an experiment."""


_WRITTEN = ("src", "config", "workflow", "params.yaml", "dvc.yaml", "Snakefile")
"""Paths that users edit; `source_tags` tells whether git has uncommitted edits of them."""
_GIT_WAIT_S, _LOCK_WAIT_S = 5.0, 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKey:
    """The key by which a stage finds its MLflow run."""

    experiment: str
    """The experiment's name in params.yaml."""
    seed: int
    stage: str
    """Stage of the DAG; `train` may begin a new run, other stages continue the current run."""
    fingerprint: str
    """Digest of the stage's inputs; a training with another digest begins a new run."""
    policy: str | None = None
    """DVC's digest of the trained policy that a later stage works on."""
    resumed: bool = False
    """Whether a killed attempt is resumed; training again from the start begins a new run."""
    root: Path
    """The project's folder, which has the store unless MLFLOW_TRACKING_URI names another."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Facts to search by: algorithm, environment, commit, DVC's experiment."""

    @property
    def variant(self) -> str:
        """Name of the DVC experiment in which the stage runs; else `workspace`."""
        return self.tags.get(VARIANT, WORKSPACE)

    @property
    def label(self) -> str:
        """Names of the experiment and of the DVC experiment; the same for all seeds."""
        return label(self.experiment, self.variant)

    @property
    def name(self) -> str:
        """The name of the run."""
        return label(f"{self.experiment}-seed{self.seed}", self.variant)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputData:
    """An input of a run, as an entry of MLflow's list of datasets."""

    name: str
    path: str
    """Path relative to the project."""
    context: str
    """What the run uses the input for: `environment` or `demonstrations`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that describe the input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetadata:
    """The metadata of a run, equal in all stages."""

    params: Mapping[str, Any]
    """Parameters by name, as `parameters` returns them."""
    configuration: str
    """The configuration with all defaults, as YAML."""
    data: Sequence[InputData]
    note: str
    """Markdown that MLflow shows above the run."""


def label(name: str, variant: str) -> str:
    """Return a name, followed by the DVC experiment's name if there is one."""
    return name if variant == WORKSPACE else f"{name} ({variant})"


def parameters(
    behaviors: Mapping[str, Mapping[str, Any]], *, prefix: bool = False
) -> dict[str, Any]:
    """Return the behaviors' settings that are not empty, by the names that they get in MLflow.

    A name is the setting's dotted key, without `hyperparameters.`: `learning_rate`. With several
    behaviors, or `prefix`, each name starts with its behavior.
    """
    flat_settings: dict[str, Any] = {}
    for behavior, settings in behaviors.items():
        start = f"{behavior}." if prefix or len(behaviors) > 1 else ""
        for name, value in leaves(settings):
            flat_settings[start + name.removeprefix(f"{_SHARED}.")] = value
    return flat_settings


def row(
    settings: Mapping[str, Any],
    *,
    name: str,
    seed: int,
    runtime: Mapping[str, Any],
    facts: Mapping[str, Any],
    data: Sequence[InputData],
    note: str,
) -> RunMetadata:
    """Return the metadata of a training for MLflow.

    `settings` is the result of `to_mapping`, `name` the name of the experiment or run, `facts` are
    other parameters (`environment`, `trainer`, ...), and `note` is Markdown for the top of the
    page.
    """
    shared = {
        **facts,
        "seed": seed,
        "num_envs": settings["env_settings"]["num_envs"],
        "environment_parameters": settings["environment_parameters"] or {},
        **runtime,
    }
    # The artifact `configuration.yaml` keeps this order of keys.
    configuration = {"experiment": name, "seed": seed, "runtime": dict(runtime), **settings}
    # These settings are left out, because they have folders of this machine, which differ between
    # runs.
    configuration.pop("checkpoint_settings", None)
    return RunMetadata(
        params=parameters(settings["behaviors"])
        | {key: value for key, value in shared.items() if value != {}},
        # JSON turns paths, enumerations and tuples into plain YAML values.
        configuration=yaml.safe_dump(
            json.loads(json.dumps(configuration, default=str)), sort_keys=False
        ),
        data=data,
        note=note,
    )


def flat(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of all behaviors in one mapping from names to values."""
    return {
        f"{behavior}/{name}" if len(metrics) > 1 else name: value
        for behavior, values in metrics.items()
        for name, value in values.items()
    }


def flattened(values: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested mappings; lists and empty mappings are values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{start}{name}.")
        else:
            yield f"{start}{name}", value


def leaves(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return dotted names and values of nested mappings, without empty values."""
    return [(name, value) for name, value in flattened(settings) if value not in _EMPTY_VALUES]


def dvc_digest(path: Path) -> str:
    """Return the digest of a file or folder as in `dvc.lock`: MD5, with `.dir` for a folder.

    A folder's digest is the digest of the list of its files and their digests. Hidden files, which
    Snakemake writes, are left out.
    """
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, _md5).hexdigest()
    # DVC lists files only; an empty subfolder does not change the digest.
    within = (file for file in path.rglob("*") if file.is_file())
    names = {file.relative_to(path).as_posix(): file for file in within}
    # The list has the format of DVC's cache, so that its digest equals the digest in dvc.lock.
    listed = [
        {"md5": dvc_digest(names[name]), "relpath": name}
        # DVC sorts by the parts of a path, so `a/b` comes before `a.txt`.
        for name in sorted(names, key=lambda posix_path: tuple(posix_path.split("/")))
        if not any(part.startswith(".") for part in name.split("/"))
    ]
    return f"{_md5(json.dumps(listed, sort_keys=True).encode()).hexdigest()}.dir"


def git(root: Path, *arguments: str, timeout_s: float = 60.0) -> str | None:
    """Return git's output; None if git fails or is not installed, or without a repository."""
    command = ["git", "-C", str(root), *arguments]
    try:
        result = subprocess.run(  # noqa: S603  # git, without a shell
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    # Without git the result is None: facts from git are only displayed, and must not stop training.
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def tags(settings: RunSettings, *, environment: str, source: str) -> dict[str, str]:
    """Return the tags by which MLflow searches and shows a run.

    `source` is the command of the whole run, not only of the stage that begins it.
    """
    kinds = sorted({str(behavior.trainer_type) for behavior in settings.behaviors.values()})
    return {
        "pipeline.algorithm": " ".join(kinds),
        "pipeline.environment": environment,
        "mlflow.source.name": source,
        "mlflow.source.type": "LOCAL",
    }


def source_tags(root: Path) -> dict[str, str]:
    """Return tags of the code's origin: commit, edits since then, and DVC's experiment."""
    tags = {VARIANT: WORKSPACE}
    if experiment := os.environ.get("DVC_EXP_NAME"):
        tags = {VARIANT: experiment, BASELINE: os.environ.get("DVC_EXP_BASELINE_REV", "")}
    commit = git(root, "rev-parse", "HEAD", timeout_s=_GIT_WAIT_S)
    if commit:
        tags["mlflow.source.git.commit"] = commit.strip()
        # Only tracked files that users edit count, because results change with every run.
        edited = git(root, "status", "--porcelain", "-uno", "--", *_WRITTEN, timeout_s=_GIT_WAIT_S)
        tags["pipeline.uncommitted"] = "yes" if edited else "no"
    return tags


def checkout(root: Path) -> str:
    """Return the id of this copy of the repository; it is kept when the folder is moved.

    A copied folder gets a new id. Hosts of a cluster that share a folder read the same id.
    """
    from filelock import FileLock

    path = root / "results/.work/checkout.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_LOCK_WAIT_S):
        # Without a stored root, `/` counts as the earlier folder. It exists, so this folder is not
        # a moved one and gets a new id.
        noted, here = {"root": "/", "id": ""}, str(root)
        with contextlib.suppress(OSError, ValueError, TypeError):
            noted |= json.loads(path.read_text(encoding="utf-8"))
        if noted["root"] != here:
            is_moved = not Path(noted["root"]).exists()
            new = files.fingerprint([platform.node(), here])[:12]
            noted = {"id": noted["id"] if is_moved else new, "root": here}
            files.write_json(path, noted)
        return noted["id"]


def note(experiment: str, seed: int, *, folders: Sequence[str]) -> str:
    """Return the description of a run on its MLflow page, as Markdown."""
    listed = "\n".join(f"- `{folder}`" for folder in folders)
    return (
        f"Experiment **{experiment}** of `params.yaml`, seed {seed}. All its stages write to this "
        f"row: learning curves over environment steps, final numbers as `<stage>/<name>`, plots of "
        f"the evaluation, the resolved configuration (artifact `configuration.yaml`) and the "
        f"policy.\n\nIts files, which are the record:\n\n{listed}\n\n"
        f"`pipeline runs {experiment}-{seed}` finds the git revision that has them. A row below "
        "this row is another attempt at this run, made from other inputs or with the same result."
    )


def _md5(data: bytes = b"") -> Any:
    # DVC uses MD5. Without `usedforsecurity=False`, systems in FIPS mode refuse it.
    return hashlib.md5(data, usedforsecurity=False)
