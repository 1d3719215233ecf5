"""The `env` stage: an environment from params.yaml becomes an executable in a folder."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.errors import StageError
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan
from pipeline.settings.reader import to_map
from pipeline.settings.sources import BridgeSource, PathSource
from pipeline.stages import bridged, common, process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.settings.sources import EnvironmentParams

_PROGRAMS = (".x86_64", ".x86", ".exe", ".app")


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a name under `environments` in params.yaml")
    arguments = parser.parse_args(argv)
    return process.run(lambda: build(arguments.name, common.checkout()))


def build(name: str, root: Path) -> None:
    """Make `build/env/<name>`.

    Raises:
        StageError: The plan is out of date, or the build that `path` names cannot be used.
    """
    params = load_params(root / "params.yaml")
    check_plan(params, root / "workflow/runs.yaml")
    environment = common.named(params.environments, name, "environments")
    inputs = [Path("constraints.txt")]
    if isinstance(environment, PathSource):
        inputs.append(Path(str(environment.path)))
    job = common.Job(
        stage="env",
        instance=name,
        params=to_map(environment),
        inputs=tuple(inputs),
        outputs=(Path("build/env") / name,),
    )
    with common.attempt(job, root) as attempt:
        make(name, environment, attempt.out(name), root)


def make(name: str, environment: EnvironmentParams, folder: Path, root: Path) -> None:
    """Put the executable and its description into a new `folder`."""
    simulator = None
    if isinstance(environment, PathSource):
        program = _copied(root / str(environment.path), folder)
    elif isinstance(environment, BridgeSource):
        program = bridged.build(environment, folder / name)
    else:
        from pipeline.simulators.pack import pack

        simulator = getattr(environment, "name", None) or name
        program = pack(simulator, folder / simulator)
    files.write_json(
        folder / "environment.json",
        {
            "file": program.relative_to(folder).as_posix(),
            "args": list(environment.args),
            "source": environment.source,
            "simulator": simulator,
            "sha256": files.sha256_of(program),
        },
    )


def _copied(source: Path, folder: Path) -> Path:
    """Copy a build, and find the program in it."""
    if not source.exists():
        raise StageError(f"{source}: there is no build here; correct `path` in params.yaml")
    if source.is_file():
        if source.with_name(f"{source.stem}_Data").exists():
            raise StageError(
                f"{source}: this program needs the files beside it; let `path` name their folder, "
                f"{source.parent}"
            )
        folder.mkdir(parents=True)
        return Path(shutil.copy(source, folder / source.name))
    shutil.copytree(source, folder)
    found = [p for p in sorted(folder.iterdir()) if p.suffix in _PROGRAMS]
    found = found or [p for p in sorted(folder.iterdir()) if p.is_file() and os.access(p, os.X_OK)]
    if len(found) != 1:
        listed = ", ".join(p.name for p in found) or "none"
        raise StageError(
            f"{source}: expected one program in this folder, found {listed}. Keep one that ends in "
            f"{', '.join(_PROGRAMS)}, or one executable file."
        )
    return found[0]
