"""Records of what made a policy: each stage adds a record to its result, up to the ONNX file.

A record has only inputs: the stage's parameters, digests of the files that it read, versions of the
packages that decide rounding, and git's id of each source file's content. So equal inputs give
equal bytes in any clone on any machine. A commit's id is left out, because two commits with the
same sources would give different bytes. The commit can be found by git's ids of the files in any
repository that has it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline import files, machine
from pipeline.dag import run_context, sources
from pipeline.dag.attempt import Attempt
from pipeline.envs import executable
from pipeline.plugins import digests
from pipeline.settings import RunSettings, to_mapping
from pipeline.simulators.pack import packages_in

KEY = "pipeline.provenance"
PACKAGES = ("numpy", "torch", "onnx")
FORMAT = 1
# Packages with code that decides the result of `pipeline learn`, unlike commands and reports.
_LEARN_FOLDERS = (
    *("algos", "core", "data", "demos", "envs", "export", "nets", "settings", "simulators"),
    *("trainer", "wire"),
)

Record = dict[str, Any]


def of_stage(
    run: run_context.Run, attempt: Attempt, parameters: Mapping[str, Any], **inputs: Any
) -> Record:
    """Return the record of a stage of the DAG.

    `inputs` has name and path of each file that was read, by kind, such as `environment`.
    """
    environment = attempt.root / inputs["environment"][1] if "environment" in inputs else None
    return {
        "stage": attempt.job.stage,
        "run": run.instance,
        "experiment": run.name,
        "seed": run.seed,
        "fingerprint": attempt.fingerprint,
        "parameters": dict(parameters),
        "parameters_sha256": files.fingerprint(dict(parameters)),
        "inputs": {
            kind: {"name": name, "path": str(path), "sha256": attempt.digests[str(path)]}
            for kind, (name, path) in inputs.items()
        },
        "versions": versions(environment and executable.load(environment).file)
        | run.params.plugins(run.name),
        "code_sha256": files.fingerprint(dict(attempt.sources)),
        "sources": dict(attempt.sources),
    }


def train_parameters(run: run_context.Run) -> dict[str, Any]:
    """Return the parameters that training depends on, including all defaults."""
    settings = to_mapping(run.params.run_settings(run.name))
    # Folders, run ids and options to resume do not change the result.
    settings.pop("checkpoint_settings", None)
    return {
        "settings": settings,
        "runtime": run.runtime(),
        "seed": run.seed,
        **run.learners(),
        **run.plugins(),
    }


def of_learn(
    settings: RunSettings, seed: int, weights: Mapping[str, Path], program: Path | None = None
) -> Record:
    """Return the record of a run of `pipeline learn`, with file names instead of paths.

    `weights` has the file of each behavior's initial weights. `program` is the environment's
    executable; None if the setting `env_path` names the executable.
    """
    content: dict[str, Any] = to_mapping(settings)
    # Paths and ports differ between machines; the environment itself is recorded by its digest.
    content.pop("checkpoint_settings", None)
    env = content.get("env_settings", {})
    env.pop("base_port", None)
    named = env.pop("env_path", None)
    path = Path(program or named) if program or named else None
    inputs: dict[str, Any] = {} if path is None else {"environment": _read(path)}
    for behavior, section in content.get("behaviors", {}).items():
        for kind, at in _demonstrations(section):
            inputs[f"demonstrations of {behavior} ({kind})"] = _read(Path(at))
    for behavior, file in weights.items():
        inputs[f"first weights of {behavior}"] = _read(file)
    package = Path(__file__).resolve().parents[1]
    used = [file for name in _LEARN_FOLDERS for file in (package / name).rglob("*.py")]
    ids = sources.ids(package.parent, [*used, *package.glob("*.py")])
    # The values become JSON's types, so that the digest is of the values in the record.
    plain = json.loads(json.dumps(content, default=str))
    if machine.is_portable():
        plain["runtime"] = {"deterministic": "portable"}
    return {
        "stage": "learn",
        "run": settings.checkpoint_settings.run_id,
        "seed": seed,
        "parameters": plain,
        "parameters_sha256": files.fingerprint(plain),
        "inputs": inputs,
        "versions": versions(path and _program_at(path)) | settings.plugins(),
        "code_sha256": files.fingerprint(ids),
        "sources": ids,
    }


def interrupted(record: Record, steps: Sequence[int]) -> Record:
    """Return the record with the steps at which the run was interrupted and not resumed exactly.

    A record without such steps promises that equal inputs give equal bytes.
    """
    return {**record, "interrupted_at_steps": list(steps)} if steps else record


def versions(environment: Path | None = None) -> dict[str, str]:
    """Return the versions of the packages that decide rounding, without suffixes such as `+cpu`.

    If the executable `environment` is given, the versions of its packages, such as MuJoCo, are
    added.
    """
    # The suffix differs between machines that have the same version.
    ours = {name: metadata.version(name).partition("+")[0] for name in PACKAGES}
    return (packages_in(environment) if environment else {}) | ours


def installed(name: str) -> str:
    """Return a package's version in the form that records have, or `not installed`.

    If `name` is a file of the user with an encoder, reward signal or trainer, the file's digest is
    returned.
    """
    if name.endswith(".py"):
        return digests(name.removesuffix(".py").replace("/", ".")).get(name, "not there")
    try:
        version = metadata.version(name)
    # The name may come from a file and be invalid.
    except (metadata.PackageNotFoundError, ValueError):
        return "not installed"
    return version.partition("+")[0] if name in PACKAGES else version


def text(history: Sequence[Record]) -> str:
    """Return the records as compact JSON with sorted keys.

    A source file with the same content as in an earlier record is left out.
    """
    seen: dict[str, str] = {}
    stages = []
    for record in history:
        # Most stages share most sources, so a later record has only the files that differ.
        new = {
            name: source_id
            for name, source_id in record["sources"].items()
            if seen.get(name) != source_id
        }
        seen |= new
        stages.append({**record, "sources": new})
    value = {"format": FORMAT, "stages": stages}
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _demonstrations(behavior: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Remove demonstrations from a behavior's settings; yield the section and path of each of them.

    The section is `behavioral_cloning` or the name of a reward signal, followed by a number if the
    section has several files.
    """
    sections = {"behavioral_cloning": behavior.get("behavioral_cloning")}
    sections |= behavior.get("reward_signals") or {}
    for kind, section in sections.items():
        if isinstance(section, dict) and section.get("demo_path"):
            # The path is removed, because paths differ between machines; the record has the files'
            # digests instead.
            named = section.pop("demo_path")
            several = named if isinstance(named, list) else [named]
            paths = [entry["path"] if isinstance(entry, dict) else str(entry) for entry in several]
            for number, path in enumerate(paths, start=1):
                yield (f"{kind}, {number}" if len(paths) > 1 else kind), path


def _program_at(path: Path) -> Path:
    """Return the path of a program, with the suffix of the platform if `path` lacks it."""
    if path.exists():
        return path
    matches = sorted(path.parent.glob(f"{path.name}*"))
    return next((match for match in matches if match.is_file()), path)


def _read(path: Path) -> dict[str, str]:
    """Return the name and SHA-256 of a file.

    For a Unity executable the SHA-256 includes the files in its data folder.
    """
    path = _program_at(path)
    if not path.exists():
        return {"name": path.name, "sha256": "unknown"}
    digest = files.sha256_of(path)
    # The executable of a Unity build is the same for every game; only the files in the data folder
    # differ.
    data = path.with_name(f"{path.stem}_Data")
    if data.is_dir():
        digest = files.fingerprint([digest, files.sha256_of(data)])
    return {"name": path.name, "sha256": digest}
