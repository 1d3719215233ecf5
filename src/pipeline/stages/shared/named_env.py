"""Environments by name: what a name means, and its executable, which is built once and kept.

    build/cache/<name>-<digest of the name>/
        inputs.json                 the present build, and the inputs that it was made from
        <digest of a build>/<name>  the present build, and a few that runs may still start

A name is built again when its inputs have changed: versions of installed packages, our files, and
the user's own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.envs.launch import find_executable
from pipeline.envs.sources.executables import executable_in, path_hint
from pipeline.envs.sources.fetch import locked
from pipeline.errors import (
    FetchError,
    SettingsError,
    StageError,
    UnityEnvironmentException,
    shell_command,
)
from pipeline.settings.environments import (
    FORMS,
    BuiltinSource,
    EnvironmentParams,
    FetchSource,
    PathSource,
    UnitySource,
    named,
)
from pipeline.settings.yaml_file import read_yaml
from pipeline.simulators import registry
from pipeline.stages.shared import executable

_log = logging.getLogger(__name__)

CACHE = Path("build/cache")
"""Folder of the builds, in the current folder."""
_INPUTS = "inputs.json"
_PARAMS = "params.yaml"
_KEPT = 3
"""Builds of one name that stay: a run restarts a failed environment from its first build."""


def environment_of(name: str) -> EnvironmentParams:
    """Return what a name means: an existing executable, or an environment to build.

    A word means the executable at that path, else the environment of params.yaml in the current
    folder, else the simulator of that name, else the only program of the folder at that path.

    Raises:
        SettingsError: The name has none of the forms, or its entry in params.yaml is wrong.
        UnityEnvironmentException: There is no such executable, and no such simulator.
    """
    environment = named(name, is_file=_is_program)
    if isinstance(environment, BuiltinSource):
        environment = _of_params(name.strip()) or environment
    if isinstance(environment, PathSource):
        _executable(environment.path)
    elif isinstance(environment, BuiltinSource) and environment.name not in registry.SIMULATORS:
        _executable(name)
        return PathSource(path=name)  # a folder with one program
    return environment


def _of_params(name: str) -> EnvironmentParams | None:
    """Return the environment that params.yaml in the current folder has by this name, or None."""
    try:
        node = read_yaml(_PARAMS)
    except SettingsError:  # no file, or none of a project
        return None
    for key in ("environments", name):
        if not isinstance(node.value, dict) or key not in node.value:
            return None
        node = node.value[key]
    environment = EnvironmentParams.from_node(node, f"environments.{name}")
    args = " ".join(environment.args)
    hint = f" Its args are for the stages; here give them: --env-args {args}" if args else ""
    _say_once(f"{name}: the environment of {node.where}.{hint}")
    if isinstance(environment, FetchSource | UnitySource):
        folder = executable.folder_of(name)
        if not (folder / executable.DESCRIPTION).is_file():
            raise UnityEnvironmentException(
                f"{name}: {folder} is not there; `pipeline run` of an experiment makes it from "
                f"the source '{environment.source}' in {_PARAMS}"
            )
        return PathSource(path=str(executable.load(folder).file))
    if isinstance(environment, BuiltinSource):
        return BuiltinSource(source="builtin", name=environment.name or name)
    return environment


@functools.cache
def _say_once(text: str) -> None:
    _log.info("%s", text)


def executable_of(name: str) -> Path:
    """Return the executable that a name means, built now unless a current build exists.

    Raises:
        PipelineError: There is no such environment, or it cannot be built.
    """
    environment = environment_of(name)
    packed = environment.packed()
    if packed is None:
        return _program_at(environment.path if isinstance(environment, PathSource) else name)
    # Of params.yaml the options may change, and with them the build.
    is_named_so = packed == named(name).packed()
    return _built(name, "" if is_named_so else json.dumps(packed, sort_keys=True), *packed)


def in_folder(source: Any) -> Any:
    """Return the only program of a folder; anything else that may name an environment as it is."""
    is_path = isinstance(source, Path) or (
        isinstance(source, str) and environment_of(source).packed() is None
    )
    if not is_path or not Path(source).is_dir():
        return source
    program = _program_at(str(source))
    return program if program.is_relative_to(Path(source).absolute()) else source


def _program_at(path: str) -> Path:
    program = _executable(path)
    if Path(path.strip()).absolute() in program.parents:
        _log.info("%s: taking the program of this folder, %s.", path, os.path.relpath(program))
    return program


def _is_program(text: str) -> bool:
    try:
        find_executable(text)
    except UnityEnvironmentException:
        return False
    return True


def _executable(path: str) -> Path:
    """Return the executable at a path; the error says what to do next."""
    try:
        program = find_executable(path)
    except UnityEnvironmentException as error:
        folder = Path(path.strip())
        if folder.is_dir():
            with contextlib.suppress(FetchError):  # none, several, or one of another system
                return executable_in(folder, label=path).absolute()
        raise UnityEnvironmentException(f"{error} {_hint(path)}") from error
    if program.suffix == ".py" and not os.access(program, os.X_OK):
        raise UnityEnvironmentException(
            f"{path}: is a module and no executable; name the function or class in it that makes "
            f"the environment, as in {program.stem}:make."
        )
    is_settings = program.suffix in (".yaml", ".yml")
    if is_settings or not (os.access(program, os.X_OK) or files.may_be_program(program)):
        what = files.what_is(program)
        raise UnityEnvironmentException(
            f"{path}: {what}, and --env takes the environment; give {FORMS}."
        )
    return program


def _hint(path: str) -> str:
    """Return what to write in place of a path at which there is no executable."""
    word = Path(path).stem
    if hint := path_hint(path):
        return hint
    if word in registry.SIMULATORS:
        built = shell_command("pipeline", "env", "build", word, "-o", path)
        return f"`{built}` makes it, and the name {word} alone is built and kept by itself."
    if re.search(r"-v\d+$", path):
        return f"A registered environment of Gymnasium is named so: `gymnasium:{path}`."
    if word == path:
        return f"No simulator is called so{registry.near(word)}. Give {FORMS}."
    if near := files.similar(path).removeprefix("; d"):
        return f"D{near}"
    built = shell_command("pipeline", "env", "build", "NAME", "-o", path)
    return f"`{built}` makes one. Or give {FORMS}."


def _built(name: str, described: str, simulator: str, options: dict[str, Any]) -> Path:
    """Return the build of a name, under a lock: one process at a time looks for it or makes it."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[: files.LONGEST_NAME // 2]
    folder = CACHE / f"{label}-{hashlib.sha256((name + described).encode()).hexdigest()[:8]}"
    key = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()
    with locked(f"build-{key}", f"the environment {name}"):
        program = _current_build(folder, label)
        if program is not None:
            _log.info("%s: taking its build, %s.", name, program)
            return program
        return _build(name, folder, label, simulator, options)


def _current_build(folder: Path, label: str) -> Path | None:
    """Return the present build; None if its inputs have changed or there is none."""
    from pipeline.simulators.pack import Needs, inputs_of

    try:
        record = json.loads((folder / _INPUTS).read_text(encoding="utf-8"))
        paths = {key: Path(file) for key, file in record["needs"]["files"].items()}
        needs = Needs(distributions=tuple(record["needs"]["distributions"]), files=paths)
        program = folder / record["build"] / label
        same = program.is_file() and inputs_of(needs) == record["inputs"]
    except (OSError, ValueError, KeyError, StageError):  # StageError: a package is gone
        return None
    return program if same else None


def _build(name: str, folder: Path, label: str, simulator: str, options: dict[str, Any]) -> Path:
    from pipeline.simulators.pack import inputs_of, needs_of, pack_with

    needs = needs_of(simulator, options)  # first: it detects mistakes in a name
    _log.info("%s: building it into %s, where it stays until it changes.", name, folder)
    inputs = inputs_of(needs)  # before packing: a change during it is a reason to build again
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    try:
        digest = files.sha256_of(pack_with(needs, simulator, new / label, options))[:16]
        if not (folder / digest / label).is_file():
            shutil.rmtree(folder / digest, ignore_errors=True)
            new.rename(folder / digest)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    paths = {key: str(file) for key, file in needs.files.items()}
    described = {"distributions": list(needs.distributions), "files": paths}
    files.write_json(folder / _INPUTS, {"build": digest, "needs": described, "inputs": inputs})
    builds = [path for path in folder.iterdir() if path.is_dir() and path.name != digest]
    for old in sorted(builds, key=lambda path: path.stat().st_mtime)[: -_KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return folder / digest / label
