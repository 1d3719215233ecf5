"""What third-party environments need to run: installed distributions, and modules beside them.

The environment is played for a while in a process of its own, where nothing else is imported:

    python -m pipeline.simulators.needs OUTPUT '{"simulator": NAME, "options": {...}}'
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import logging.handlers
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import PipelineError, SettingsError, StageError, where
from pipeline.protocol.specs import BehaviorSpec
from pipeline.protocol.steps import Steps
from pipeline.simulators import registry
from pipeline.simulators.bridges import module_bridge

_log = logging.getLogger(__name__)

_LIMIT_S = 300
_N_STEPS = 300
"""Enough for most episodes to end and begin anew, where modules may be imported late."""
_OWN = Path(__file__).resolve().parents[2]
# An executable draws nothing, so libraries for drawing must not count as needed.
_ENVIRONMENT = {"MUJOCO_GL": "disable", "SDL_VIDEODRIVER": "dummy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The contents of an executable beside this package."""

    distributions: tuple[str, ...]
    """Names of installed distributions."""
    files: Mapping[str, Path]
    """Single files by their path under the folder of libraries: modules that were imported."""


def needs_of(name: str, options: Mapping[str, Any]) -> Needs:
    """Return the contents of a simulator's executable; see `pack.pack`.

    Third-party environments are played for a while in a process of their own, to see what they
    import.

    Raises:
        SettingsError: There is no such simulator, it lacks an option, or it cannot be made.
        StageError: It fails while it is played, or takes too long.
    """
    entry = registry.entry(name)
    registry.check_options(name, options)
    if entry.bridge:
        needs = needs_from(_imported_by(name, options))
        return replace(needs, distributions=(*entry.distributions, *needs.distributions))
    if entry.package is None:
        return Needs(distributions=entry.distributions, files={})
    spec = importlib.util.find_spec(entry.package)
    if spec is None or not spec.submodule_search_locations:
        raise StageError(f"{entry.package}: a simulator from outside must lie in a package.")
    # From its folder: an editable package has no list of its files.
    files = _package_files(Path(spec.submodule_search_locations[0]))
    return Needs(distributions=entry.distributions, files=files)


def _imported_by(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Play a bridge's environment; return the file of each module that it imports by its name."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "modules.json"
        described = json.dumps({"simulator": name, "options": dict(options)})
        # In a process of its own: this one has imported much that the environment does not need.
        command = [sys.executable, "-m", __name__, str(target), described]
        code, output = run(command, folder)
        if code == 2:
            raise SettingsError(output.splitlines()[-1] if output else f"{name}: cannot be made")
        if code != 0:
            raise StageError(f"{options.get('id')}: fails while it is played: {_end(output)}")
        played = json.loads(target.read_text(encoding="utf-8"))
    for note in played["notes"]:
        _log.info("%s", note)
    imported: dict[str, str] = played["modules"]
    return imported


def run(command: list[str], folder: str, **extra: str) -> tuple[int, str]:
    """Run a command in `folder` with this process' module path; gives exit code and output.

    The current folder ends that path, so that a module beside the caller is found there, and hides
    none that is installed.

    Raises:
        StageError: It takes too long.
    """
    # Empty entries would mean the new process's own folder.
    path = os.pathsep.join([*filter(None, sys.path), str(Path.cwd())])
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **extra}
    try:
        done = subprocess.run(  # noqa: S603  # this interpreter, or what was built just now
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise StageError(f"{command[0]}: did not end within {_LIMIT_S} s.") from None
    return done.returncode, done.stderr.strip()


def verify(executable: Path, env_id: str) -> None:
    """Let a packed environment begin an episode, with nothing but what was packed.

    Raises:
        StageError: It cannot.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(executable.resolve()), "--describe"]
        code, output = run(command, folder, PIPELINE_PYTHON=sys.executable)
    if code != 0:
        raise StageError(
            f"{env_id}: the packed executable does not run by itself ({_end(output)}); an import "
            "that happens only in it, or a file that no package lists, is missing."
        )


def _end(output: str) -> str:
    return output.splitlines()[-1] if output else "it printed nothing"


def needs_from(imported: Mapping[str, str]) -> Needs:
    """Return distributions that own modules, and the files and packages that none owns.

    `imported` has the file of each module; it is empty for those without one.
    """
    owners = importlib.metadata.packages_distributions()
    contents: dict[str, set[str]] = {}
    distributions: set[str] = set()
    files: dict[str, Path] = {}
    for module, file in imported.items():
        root = _root_of(module, file)
        if root is None:
            continue
        relative = Path(file).relative_to(root)
        for name in sorted(set(owners.get(module.partition(".")[0], ()))):
            if name not in contents:
                contents[name] = _content(name)
            # Several distributions may share a top package; the one that lists the file owns it.
            if os.path.realpath(file) in contents[name]:
                distributions.add(name)
                files[relative.as_posix()] = Path(file)
                break
        else:
            # It belongs to no distribution: take its file, or the whole folder of its package.
            top = root / relative.parts[0]
            files |= {top.name: top} if top.is_file() else _package_files(top)
    return Needs(distributions=tuple(sorted(distributions)), files=files)


def _root_of(module: str, file: str) -> Path | None:
    """Return the folder in which a module's top package lies; None if it need not be packed.

    The standard library, this package, and modules with another name than their file need not.
    """
    path = Path(file)
    depth = module.count(".") + (path.stem == "__init__")
    if not file or len(path.parents) <= depth or _OWN in path.parents:
        return None
    root = path.parents[depth]
    if path.relative_to(root).parts[0].partition(".")[0] != module.partition(".")[0]:
        return None
    libraries = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    standard = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    if root in libraries or not standard.intersection((root, *root.parents)):
        return root
    return None


def _content(name: str) -> set[str]:
    distribution = importlib.metadata.distribution(name)
    return {os.path.realpath(str(file.locate())) for file in distribution.files or ()}


def _package_files(folder: Path) -> dict[str, Path]:
    """Return all files of a package by their path beside it, but bytecode and hidden ones."""
    files = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
        if file.is_file() and not is_hidden and file.suffix != ".pyc":
            files[f"{folder.name}/{inside.as_posix()}"] = file
    return files


def trace(target: str, described: str) -> int:
    """Write the file of each imported module, and what bridges noted, to `target` as JSON.

    Returns:
        An exit code.
    """
    request = json.loads(described)
    notes = logging.handlers.BufferingHandler(capacity=100)
    bridges = logging.getLogger(module_bridge.__package__)
    bridges.addHandler(notes)
    bridges.setLevel(logging.INFO)
    # Modules that the tracing itself has imported do not count.
    before = set(sys.modules)
    try:
        _play(request["simulator"], request["options"])
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of an environment that others wrote
        sys.stderr.write(f"{where(error)}\n")
        return 1
    modules = {
        name: str(getattr(module, "__file__", None) or "")
        for name, module in sorted(sys.modules.items())
        if name not in before
    }
    lines = list(dict.fromkeys(record.getMessage() for record in notes.buffer))
    content = {"modules": modules, "notes": lines}
    Path(target).write_text(json.dumps(content), encoding="utf-8")
    return 0


def _play(name: str, options: dict[str, Any]) -> None:
    n_agents = module_bridge.n_agents_of(options["id"], copies=2) if name == "module" else 2
    simulator = registry.make(name, seed=0, **options | {"n_agents": n_agents})
    rng = np.random.default_rng(0)
    specs = simulator.behavior_specs
    steps = simulator.reset()
    for _ in range(_N_STEPS):
        for behavior, sent in steps.items():
            _refuse_other_shapes(options["id"], behavior, sent, specs[behavior])
        steps = simulator.step(
            {
                behavior: specs[behavior].action_spec.random_action(len(decisions), rng)
                for behavior, (decisions, _) in steps.items()
            }
        )
    simulator.close()


def _refuse_other_shapes(env_id: str, behavior: str, sent: Steps, spec: BehaviorSpec) -> None:
    """Raise SettingsError if a simulator sends other shapes than it has announced."""
    announced = [tuple(obs.shape) for obs in spec.observation_specs]
    for steps in sent:
        shapes = [tuple(values.shape[1:]) for values in steps.obs]
        if len(steps) and shapes != announced:
            raise SettingsError(
                f"{env_id}: an agent of {behavior} observes the shapes {shapes}, and the "
                f"specification says {announced}; let the simulator send what it announces"
            )


if __name__ == "__main__":
    sys.exit(trace(*sys.argv[1:]))
