"""The `env` stage: make an executable of an environment in params.yaml, in its own folder."""

import os
import shutil
from functools import partial
from pathlib import Path

from pipeline import files
from pipeline.dag import project
from pipeline.dag.attempt import Job, attempt_at
from pipeline.dag.project import named, pinned, planned
from pipeline.envs.sources.executables import executable_in, this_platform
from pipeline.errors import StageError
from pipeline.settings.project.environments import (
    BridgeSource,
    EnvironmentParams,
    FetchSource,
    ModuleSource,
    PathSource,
    UnitySource,
)
from pipeline.settings.reader import to_map

_PLAYER = "player"


def build(name: str, root: Path) -> None:
    """Make the environment `name` as an executable in `build/env/<name>`.

    Raises:
        PipelineError: The plan is out of date, or the environment cannot be built or fetched.
    """
    params = planned(root)
    environment = named(params.environments, name, "environments")
    # constraints.txt, with the pinned versions, is an input, because another version of a package
    # makes another environment.
    inputs = [pinned(root), *_inputs(environment, root)]
    job = Job(
        stage="env",
        instance=name,
        params=to_map(environment),
        inputs=tuple(inputs),
        outputs=(Path("build/env") / name,),
    )
    with attempt_at(job, root) as attempt:
        make(name, environment, attempt.out(name), root, attempt.run)


main = partial(
    project.main, __doc__, build, name="a name under `environments` in params.yaml", short=True
)


def make(name: str, environment: EnvironmentParams, folder: Path, root: Path, work: Path) -> None:
    """Make `folder` with the executable and its description; write logs into `work`."""
    from pipeline.simulators.pack import pack

    simulator, archive = None, None
    match environment:
        case PathSource():
            program = _copied(root / environment.found(root), folder)
        case FetchSource():
            program, archive = _fetched(name, environment, folder)
        case UnitySource():
            program = _built(name, environment, folder, root, work)
        case BridgeSource():
            packed, options = environment.packed()
            program = pack(packed, folder / name, **options)
        case _:
            # This is a built-in simulator. The key `name` gives its name; without this key it is
            # named like the environment.
            simulator = getattr(environment, "name", None) or name
            program = pack(simulator, folder / simulator)
    files.write_json(
        folder / "environment.json",
        {
            "name": name,
            "file": program.relative_to(folder).as_posix(),
            "args": list(environment.args),
            "source": environment.source,
            "simulator": simulator,
            "sha256": files.sha256_of(program),
            # Digest of the folder without this file; `sha256` alone would miss changes in the data
            # files of the executable.
            "build_sha256": files.sha256_of(folder),
            "archive_sha256": archive,
        },
    )


def _inputs(source: EnvironmentParams, root: Path) -> list[Path]:
    """Return the local files and folders from which the environment is made; [] without any."""
    inputs, wrong = [], ""
    if isinstance(source, PathSource):
        inputs, wrong = [source.found(root)], "a build is expected here; correct `path`"
    elif isinstance(source, UnitySource):
        inputs, wrong = list(source.watched), "a Unity project has this folder; correct `project`"
    elif isinstance(source, ModuleSource):
        inputs = [path for path in [source.found(root)] if path]
    for path in inputs:
        if not (root / path).exists():
            raise StageError(f"{path}: does not exist; {wrong} in params.yaml")
    return [Path(path) for path in inputs]


def _built(name: str, source: UnitySource, folder: Path, root: Path, work: Path) -> Path:
    from pipeline.envs.sources.unity_build import build

    player = build(source, root=root, name=name, folder=work / _PLAYER, log=work / "editor.log")
    folder.mkdir(parents=True)
    shutil.move(work / _PLAYER, folder / _PLAYER)
    return folder / player.relative_to(work)


def _fetched(name: str, source: FetchSource, folder: Path) -> tuple[Path, str]:
    """Copy a fetched archive's files; return the executable and the archive's sha256."""
    from pipeline.envs.sources.fetch import fetch, public

    platform = this_platform()
    archive = source.archive(platform)
    if archive is None:
        raise StageError(
            f"params.yaml: environments.{name}: has builds for {' and '.join(source.platforms())}, "
            f"but this machine runs {platform}; give 'url' and 'sha256' of a build for {platform}"
        )
    url, sha256 = archive
    cached = fetch(url, sha256=sha256, max_bytes=int(source.max_unpacked_gb * 1e9))
    program = executable_in(cached, label=public(url), wanted=source.executable)
    # The files are copied, not linked: engines delete outputs and DVC relinks them, which must not
    # touch the cache.
    shutil.copytree(cached, folder / _PLAYER, symlinks=True)
    return folder / _PLAYER / program.relative_to(cached), sha256


def _copied(source: Path, folder: Path) -> Path:
    """Copy a build, and return the executable in the copy."""
    folder.mkdir(parents=True)
    if source.is_file():
        copy = Path(shutil.copy(source, folder / source.name))
        if not os.access(copy, os.X_OK):
            # Downloads often lose the permission to execute a file.
            copy.chmod(0o755)
        return executable_in(folder, label=str(source))
    # A macOS application is signed together with its links, so the links are kept.
    app = source.suffix == ".app"
    inside = folder / source.name if app else folder
    shutil.copytree(source, inside, symlinks=app, dirs_exist_ok=True)
    return executable_in(folder, label=str(source))
