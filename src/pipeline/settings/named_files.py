"""Files that settings name: looked for before anything is built or started."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from pipeline.errors import SettingsError, shell_command
from pipeline.files import similar
from pipeline.settings.schema import RunSettings, TrainerSettings

_log = logging.getLogger(__name__)


def missing_demonstrations(
    settings: RunSettings, *, folder: Path = Path(), made: Collection[str] = ()
) -> dict[str, str]:
    """Return the first mistake of each behavior whose demonstrations are not in `folder`.

    `default_settings` count where no behavior is listed. `made` has paths that a stage writes.
    """
    missing: dict[str, str] = {}
    for section, trainer in _listed(settings).items():
        for key, path in demonstrations(trainer):
            if (
                section not in missing
                and path not in made
                and (wrong := why_no_demonstrations(path, folder))
            ):
                at = f"{section}.{key}"
                at = at if settings.place_of(at) else at.partition("[")[0]
                place = settings.place_of(at)
                missing[section] = f"{place}: {at}: {wrong}" if place else f"{at}: {wrong}"
    return missing


def refuse_missing_demonstrations(
    settings: RunSettings, *, folder: Path = Path(), made: Collection[str] = ()
) -> None:
    """Refuse a run if no behavior has its demonstrations; else warn of behaviors without.

    One behavior that has them is enough: the environment may have only this one, as with the files
    of old releases, which list the behaviors of many environments. For the arguments see
    `missing_demonstrations`.
    """
    missing = list(missing_demonstrations(settings, folder=folder, made=made).values())
    if missing and len(missing) == len(_listed(settings)):
        raise SettingsError(missing[0])
    for text in missing:
        _log.warning("%s", text)


def refuse_missing_weights(settings: RunSettings, *, folder: Path) -> None:
    """Refuse an `init_path` that is not there, unless it names a file that another run makes."""
    if settings.checkpoint_settings.initialize_from is not None:
        return  # a bare name is a file of that run
    for name, trainer in settings.behaviors.items():
        path = trainer.init_path
        if path and Path(path).parts[:1] != ("results",) and not (folder / path).exists():
            key = f"behaviors.{name}.init_path"
            hint = similar(folder / path) or "; name a checkpoint, or leave it out"
            raise SettingsError(f"{settings.place_of(key)}: {key}: {path} is not there{hint}")


def _listed(settings: RunSettings) -> dict[str, TrainerSettings]:
    """Return the settings of behaviors by section; the defaults where none is listed."""
    if not settings.behaviors and settings.default_settings is not None:
        return {"default_settings": settings.default_settings}
    return {f"behaviors.{name}": trainer for name, trainer in settings.behaviors.items()}


def demonstrations(trainer: TrainerSettings) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each path to demonstrations, and the path."""
    users = {f"reward_signals.{name}": signal for name, signal in trainer.reward_signals.items()}
    for key, user in {**users, "behavioral_cloning": trainer.behavioral_cloning}.items():
        demo_path = getattr(user, "demo_path", None)
        for index, path in enumerate(demo_path.paths if demo_path else ()):
            yield f"{key}.demo_path[{index}]", path


def why_no_demonstrations(path: str, folder: Path) -> str | None:
    """Return what is wrong with a path to demonstrations; None when they are there."""
    full_path = folder / path
    if full_path.is_dir():
        return (
            None if any(full_path.glob("*.demo")) else f"{path} is a folder without '.demo' files"
        )
    if full_path.exists():
        return None
    record = shell_command("pipeline", "demo", "record", "ENV", "-o", path)
    remedy = f"; `{record}` makes one, or Unity's Demonstration Recorder"
    return f"{path} is not there{similar(full_path) or remedy}"
