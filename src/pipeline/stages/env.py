"""The `env` stage: an environment from params.yaml becomes an executable in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.settings.external_sources import ExternalSource
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan
from pipeline.settings.reader import to_map
from pipeline.settings.sources import BridgeSource
from pipeline.stages import bridged, common, external, process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.settings.source import EnvironmentParams


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a name under `environments` in params.yaml")
    arguments = parser.parse_args(argv)
    return process.run(lambda: build(arguments.name, common.checkout()), short=True)


def build(name: str, root: Path) -> None:
    """Make `build/env/<name>`.

    Raises:
        PipelineError: The plan is out of date, or the environment cannot be had.
    """
    params = load_params(root / "params.yaml")
    check_plan(params, root / "workflow/runs.yaml")
    environment = common.named(params.environments, name, "environments")
    inputs = [Path("constraints.txt"), *external.inputs(environment, root)]
    job = common.Job(
        stage="env",
        instance=name,
        params=to_map(environment),
        inputs=tuple(inputs),
        outputs=(Path("build/env") / name,),
    )
    with common.attempt(job, root) as attempt:
        make(name, environment, attempt.out(name), root, attempt.run)


def make(name: str, environment: EnvironmentParams, folder: Path, root: Path, work: Path) -> None:
    """Put the executable and its description into a new `folder`; keep logs in `work`."""
    simulator, archive = None, None
    if isinstance(environment, ExternalSource):
        program, archive = external.put(name, environment, folder, root, work)
    elif isinstance(environment, BridgeSource):
        program = bridged.build(environment, folder / name)
    else:
        from pipeline.simulators.pack import pack

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
            "build_sha256": files.sha256_of(folder),
            "archive_sha256": archive,
        },
    )
