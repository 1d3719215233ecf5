"""Where the weights that a new run begins with come from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from pipeline.settings import RunSettings

_log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"


def first_weights(settings: RunSettings) -> dict[str, Path]:
    """The checkpoint that each listed behavior begins with, for those that have one.

    `initialize_from` names a run in the same results folder. A behavior's `init_path` is another
    file of that run's behavior when it is a bare name, and else a path of its own. A resumed run
    goes on with its own weights.

    Raises:
        SettingsError: The run or a checkpoint is not there.
    """
    asked = settings.checkpoint_settings
    if asked.resume:
        for name, one in settings.behaviors.items():
            if one.init_path is not None:
                _log.info("A resumed run has its own weights: init_path of %s is not used.", name)
        return {}
    run = None
    if asked.initialize_from is not None:
        run = Path(asked.results_dir) / asked.initialize_from
        if not asked.initialize_from or not run.is_dir():
            raise SettingsError(
                f"Could not initialize from {run}. Make sure models have already been saved with "
                "that run ID."
            )
        if not settings.behaviors:
            _log.warning(
                "No behavior begins with the weights of %s: only those begin with them that the "
                "configuration file lists under behaviors.",
                run,
            )
    found = {
        name: file
        for name, one in settings.behaviors.items()
        if (file := _file(run and files.named(run, name), one.init_path)) is not None
    }
    for name, file in found.items():
        if file.suffix != ".pt" or not file.is_file():
            raise SettingsError(
                f"Could not initialize from {file}. It does not exist or is not a `.pt` file; "
                f"behaviors.{name}.init_path chooses another one."
            )
    return found


def _file(folder: Path | None, init_path: str | None) -> Path | None:
    if init_path is None:
        return None if folder is None else folder / CHECKPOINT
    if folder is not None and Path(init_path).name == init_path:
        return folder / init_path
    path = Path(init_path)
    return path / CHECKPOINT if path.is_dir() else path
