"""The sinks of a run: the standard sinks, sinks chosen by name, and the run that they record."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.envs.launch import find_executable
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.settings import RunSettings, to_mapping
from pipeline.settings.nodes import from_plain
from pipeline.settings.project.experiments import SINKS, SinkNames
from pipeline.tracking import run_metadata
from pipeline.tracking.base import Sink
from pipeline.tracking.console import ConsoleSink
from pipeline.tracking.curve_csv import CsvSink, UpdatesCsvSink

_log = logging.getLogger(__name__)

_LEFT_OUT = "The sink %s is not used in this run: %s"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The description of a run for its sinks."""

    folder: Path
    max_steps: Mapping[str, int]
    """`max_steps` of each behavior that the settings list."""
    keep_earlier: bool = True
    """Whether to continue the records of an earlier run in the folder."""
    debug_folder: Path | None = None
    """Folder of the records for debugging; None without debugging."""
    settings: RunSettings = field(default_factory=RunSettings)
    """All settings of the run."""
    key: run_metadata.RunKey | None = None
    """Key of the MLflow run; None if unknown."""
    row: run_metadata.RunMetadata | None = None
    """Metadata of the MLflow run; None if unknown."""
    record: Sink | None = None
    """Sink for the open MLflow run of a stage of the DAG, which the stage closes."""

    @property
    def prefixed(self) -> bool:
        """Whether tags begin with the behavior's name, in sinks that mix all behaviors' curves."""
        return len(self.max_steps) != 1


def standard_sinks(run: TrackedRun, names: Sequence[str] | None = None) -> list[Sink]:
    """Return the sinks of a run: console, CSV files, and the chosen sinks.

    Args:
        run: the run to record.
        names: names in `SINKS`; None for TensorBoard, MLflow in a stage, and the sinks and
            ML-Agents' statistics writers of all installed packages.

    Raises:
        SettingsError: A chosen sink cannot be imported.
    """
    # The CSV file is always written, because reports read it.
    sinks: list[Sink] = [ConsoleSink(), CsvSink(run.folder / "progress.csv")]
    if run.debug_folder is not None:
        sinks.append(UpdatesCsvSink(run.debug_folder))
    return sinks + (_by_default(run) if names is None else named_sinks(run, names))


def named_sinks(run: TrackedRun, names: Sequence[str]) -> list[Sink]:
    """Return the enabled sinks of these names; log a warning for a sink that cannot open.

    Raises:
        SettingsError: A sink is not installed, or cannot be imported.
    """
    # The names are checked as in params.yaml, so that a wrong name gets the same message.
    checked = SinkNames.from_node(from_plain(list(names), "pipeline.train"), "sinks")
    makers = {name: SINKS.load(name, package=f"{__name__}.") for name in checked}
    sinks = []
    for name, make in makers.items():
        try:
            sink = make(run)
        except Exception as error:  # noqa: BLE001  # no sink may stop training
            _log.warning(_LEFT_OUT, name, error)
            continue
        # `make` returns None for a sink that a setting has switched off.
        if sink is not None:
            sinks.append(sink)
    return sinks


def _by_default(run: TrackedRun) -> list[Sink]:
    names = ["stats_writers", "tensorboard", *(["mlflow"] if run.record is not None else [])]
    sinks = named_sinks(run, names)
    for name in (name for name in SINKS if name not in SINKS.ours):
        try:
            sinks += named_sinks(run, [name])
        except SettingsError as error:  # a warning only, because the user has not chosen the sink
            _log.warning(_LEFT_OUT, name, error)
    return sinks


def run_outside_dag(
    settings: RunSettings,
    *,
    env: object,
    build: Path | None = None,
    folder: Path,
    seed: int,
    source: str,
    trainer: str = "from Python",
    num_envs: int | None = None,
    device: str = "cpu",
    torch_threads: int | str = 1,
    resume: bool = False,
    debug_folder: Path | None = None,
) -> TrackedRun:
    """Return the description of a run outside the DAG, with all that the stage `train` records.

    `env` is the environment's name (None for the Unity Editor); `build` is its executable if `env`
    is not a path. The run's name is the folder's path below the working folder. `source` is the
    program that trains, such as `pipeline learn`; `trainer` is the configuration's file, or a text
    if there is no file. `num_envs` is the number of environments, if it differs from the settings.
    """
    # `dvc exp run --temp` works in a copy; the store is in the repository itself (DVC_ROOT).
    root = Path(os.environ.get("DVC_ROOT") or ".").resolve()
    name = _below(root, folder)
    # The name begins with `/` or `./`, so that it differs from the name of every experiment.
    name = name if name.startswith("/") else f"./{name}"
    environment, executable = _named_environment(env)
    configuration = to_mapping(settings)
    configuration["env_settings"]["num_envs"] = num_envs or settings.env_settings.num_envs
    data = [
        run_metadata.InputData(name=environment, path=_below(root, path), context="environment")
        for path in [build or executable]
        if path is not None
    ]
    row = run_metadata.row(
        configuration,
        name=name,
        seed=seed,
        runtime={"torch_threads": torch_threads, "device": device},
        facts={"environment": environment, "trainer": trainer},
        data=data,
        note=f"`{source}` in the folder `{name}`, seed {seed}.",
    )
    key = run_metadata.RunKey(
        experiment=name,
        seed=seed,
        stage="train",
        fingerprint="",  # equal for all settings, so that a resumed training continues its run
        resumed=resume,
        root=root,
        tags=run_metadata.tags(settings, environment=environment, source=source)
        | run_metadata.source_tags(root),
    )
    return TrackedRun(
        folder=folder,
        max_steps={
            behavior: trainer_settings.max_steps
            for behavior, trainer_settings in settings.behaviors.items()
        },
        keep_earlier=resume,
        debug_folder=debug_folder,
        settings=settings,
        key=key,
        row=row,
    )


def _named_environment(env: object) -> tuple[str, Path | None]:
    """Return an environment's name, and its executable or None."""
    first = env[0] if isinstance(env, list | tuple) and env else env
    if first is None:
        return "Unity Editor", None
    if not isinstance(first, str | Path):
        return getattr(first, "__name__", type(first).__name__), None
    try:
        build = find_executable(first)
    except UnityEnvironmentException:  # `first` is a simulator or an id of Gymnasium
        return str(first), None
    return build.stem, build


def _below(root: Path, path: Path) -> str:
    """Return a path relative to a folder; an absolute path if it is outside the folder."""
    path = path.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
