"""Environments by name: find the environment that a name means, and build its executable once.

    build/cache/<name>-<digest of the name>/
        inputs.json                 digest of the present build, and its inputs
        <digest of a build>/<name>  the present build, and a few earlier builds that runs still use

An environment is built again when its inputs have changed: versions of installed packages, files of
this package, and the user's files.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.envs import executable
from pipeline.envs.in_process import SimulatorSource
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
from pipeline.settings.project.environments import (
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
from pipeline.simulators.executable import ExecutableArguments, parse

_log = logging.getLogger(__name__)

CACHE = Path("build/cache")  # folder of the builds, relative to the current folder
_INPUTS = "inputs.json"
_PARAMS = "params.yaml"
# Number of builds of a name that are kept, because a run restarts a failed environment from the
# build with which the run began.
_KEPT = 3


def environment_of(name: str) -> EnvironmentParams:
    """Return the environment of a name: an existing executable, or an environment to build.

    A single word is read as the path of an executable, else as an environment of params.yaml in the
    current folder, else as a simulator, else as the path of a folder with only one executable.

    Raises:
        SettingsError: The name has no valid form, or its entry in params.yaml has a mistake.
        UnityEnvironmentException: There is no executable and no simulator of this name.
    """
    environment = named(name, is_file=_is_program)
    if isinstance(environment, BuiltinSource):
        environment = _of_params(name.strip()) or environment
    if isinstance(environment, PathSource):
        _executable(environment.path)
    elif isinstance(environment, BuiltinSource) and environment.name not in registry.SIMULATORS:
        _executable(name)
        return PathSource(path=name)  # the path of a folder with one executable
    return environment


def _of_params(name: str) -> EnvironmentParams | None:
    """Return the environment `name` of params.yaml in the current folder; None if there is none."""
    try:
        node = read_yaml(_PARAMS)
    except SettingsError:  # there is no params.yaml, or it has no valid YAML
        return None
    for key in ("environments", name):
        if not isinstance(node.value, dict) or key not in node.value:
            return None
        node = node.value[key]
    environment = EnvironmentParams.from_node(node, f"environments.{name}")
    hint = ""
    if args := " ".join(environment.args):
        hint = f" Only stages use the args of params.yaml; here give them: --env-args {args}"
    _say_once(f"{name}: the environment of {node.where}.{hint}")
    if isinstance(environment, FetchSource | UnitySource):
        folder = executable.folder_of(name)
        if not (folder / executable.DESCRIPTION).is_file():
            raise UnityEnvironmentException(
                f"{name}: {folder} does not exist; `pipeline run` of an experiment makes it from "
                f"the source '{environment.source}' in {_PARAMS}"
            )
        return PathSource(path=str(executable.load(folder).file))
    if isinstance(environment, BuiltinSource):
        return BuiltinSource(source="builtin", name=environment.name or name)
    return environment


# The cache makes a repeated call with the same text do nothing.
@functools.cache
def _say_once(text: str) -> None:
    _log.info("%s", text)


def executable_of(name: str) -> Path:
    """Return the executable of a named environment, built now unless an up-to-date build exists."""
    environment = environment_of(name)
    packed = environment.packed()
    if packed is None:
        return _program_at(environment.path if isinstance(environment, PathSource) else name)
    # Options that params.yaml gives are part of the build's key, because they may change.
    is_named_so = packed == named(name).packed()
    return _built(name, "" if is_named_so else json.dumps(packed, sort_keys=True), *packed)


def in_process_source(name: str, args: Sequence[str], *, n_areas: int) -> SimulatorSource | None:
    """Return the simulator of a named environment, with the seeds and steps of its executable.

    None for an executable, a user's module, which may change the trainer's process, and arguments
    other than --num-agents.
    """
    simulator, options = environment_of(name).packed() or ("module", {})
    if simulator == "module":
        return None
    try:
        parsed = parse(args)
    except SettingsError:  # the executable reports mistakes in its arguments
        return None
    if replace(parsed, n_agents=None) != ExecutableArguments():
        return None
    default = options.pop("n_agents", None) or registry.n_agents_of(simulator, options)
    options["n_agents"] = (parsed.n_agents or default) * n_areas
    return SimulatorSource(simulator, options)


def in_folder(source: Any) -> Any:
    """Return the only executable of the folder `source`; return `source` if it is no folder."""
    if isinstance(source, str) and environment_of(source).packed() is not None:
        return source
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return source
    program = _program_at(str(source))
    return program if program.is_relative_to(Path(source).absolute()) else source


def _program_at(path: str) -> Path:
    program = _executable(path)
    if Path(path.strip()).absolute() in program.parents:
        _log.info("%s: using the executable in this folder, %s.", path, os.path.relpath(program))
    return program


def _is_program(text: str) -> bool:
    try:
        find_executable(text)
    except UnityEnvironmentException:
        return False
    return True


def _executable(path: str) -> Path:
    try:
        program = find_executable(path)
    except UnityEnvironmentException as error:
        folder = Path(path.strip())
        if folder.is_dir():
            with contextlib.suppress(FetchError):  # no executable for this system, or several
                return executable_in(folder, label=path).absolute()
        raise UnityEnvironmentException(f"{error} {_hint(path)}") from error
    if program.suffix == ".py" and not os.access(program, os.X_OK):
        raise UnityEnvironmentException(
            f"{path}: is a module, not an executable; give the function or class in it that makes "
            f"the environment, such as {program.stem}:make."
        )
    is_settings = program.suffix in (".yaml", ".yml")
    if is_settings or not (os.access(program, os.X_OK) or files.may_be_program(program)):
        what = files.what_is(program)
        raise UnityEnvironmentException(
            f"{path}: {what}, but --env takes an environment; give {FORMS}."
        )
    return program


def _hint(path: str) -> str:
    word = Path(path).stem
    if hint := path_hint(path):
        return hint
    if word in registry.SIMULATORS:
        built = shell_command("pipeline", "env", "build", word, "-o", path)
        return (
            f"`{built}` builds the executable; or give the name {word} alone, which is built "
            "automatically."
        )
    if re.search(r"-v\d+$", path):
        return f"For a registered environment of Gymnasium give `gymnasium:{path}`."
    if word == path:
        return f"No simulator has this name{registry.near(word)}. Give {FORMS}."
    if near := files.similar(path).removeprefix("; d"):
        return f"D{near}"
    built = shell_command("pipeline", "env", "build", "NAME", "-o", path)
    return f"`{built}` builds an executable of a simulator. Or give {FORMS}."


def _built(name: str, described: str, simulator: str, options: dict[str, Any]) -> Path:
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[: files.LONGEST_NAME // 2]
    # The folder's name has a digest, because different names may have the same label.
    folder = CACHE / f"{label}-{hashlib.sha256((name + described).encode()).hexdigest()[:8]}"
    # Locks of all projects are in the user's cache, so the lock's name depends on the whole path.
    key = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()
    with locked(f"build-{key}", f"the environment {name}"):
        program = _current_build(folder, label)
        if program is not None:
            _log.info("%s: using the build %s.", name, program)
            return program
        return _build(name, folder, label, simulator, options)


def _current_build(folder: Path, label: str) -> Path | None:
    """Return the present build; None if it does not exist or its inputs have changed."""
    from pipeline.simulators.pack import Needs, inputs_of

    try:
        record = json.loads((folder / _INPUTS).read_text(encoding="utf-8"))
        paths = {key: Path(file) for key, file in record["needs"]["files"].items()}
        needs = Needs(distributions=tuple(record["needs"]["distributions"]), files=paths)
        program = folder / record["build"] / label
        same = program.is_file() and inputs_of(needs) == record["inputs"]
    except (OSError, ValueError, KeyError, StageError):  # a removed package raises StageError
        return None
    return program if same else None


def _build(name: str, folder: Path, label: str, simulator: str, options: dict[str, Any]) -> Path:
    from pipeline.simulators.pack import inputs_of, needs_of, pack_with

    needs = needs_of(simulator, options)  # this comes first, because it detects mistakes in a name
    _log.info("%s: building into %s, for all later runs.", name, folder)
    # The inputs are read before packing: a file that changes meanwhile causes a new build.
    inputs = inputs_of(needs)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)  # a killed process may have left this folder
    try:
        digest = files.sha256_of(pack_with(needs, simulator, new / label, options))[:16]
        build = folder / digest
        # The build is renamed when it is complete. An existing build is never changed, because
        # other runs may have started it.
        if not (build / label).is_file():
            shutil.rmtree(build, ignore_errors=True)
            new.rename(build)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    paths = {key: str(file) for key, file in needs.files.items()}
    described = {"distributions": list(needs.distributions), "files": paths}
    files.write_json(folder / _INPUTS, {"build": digest, "needs": described, "inputs": inputs})
    others = [path for path in folder.iterdir() if path.is_dir() and path != build]
    for old in sorted(others, key=lambda path: path.stat().st_mtime)[: -_KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return build / label
