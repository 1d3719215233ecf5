"""What a run is to do, in a form that one of its processes can tell the others."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError
from pipeline.settings import RunSettings, load_run_settings, to_mapping
from pipeline.trainer.together import refuse_alone_only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.envs.base import BaseEnv
    from pipeline.settings import TrainerSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What every process of a run has to know; see `trainer.api.train`."""

    settings: RunSettings
    seed: int
    run_dir: Path
    env: str | Path | BaseEnv | Sequence[BaseEnv] | None
    num_envs: int
    env_args: Sequence[str]
    base_port: int | None
    log_folder: Path | None
    init_from: Mapping[str, Path]
    whole_weights: bool
    resume: bool
    torch_threads: int
    starting_lesson: int

    def plain(self) -> dict[str, Any]:
        """As plain values; environments that are objects are left out."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        settings = self.settings
        told["settings"] = to_mapping(settings)
        told["from_file"] = settings.from_file
        told["refused"] = settings.refused
        told["run_dir"] = str(self.run_dir.resolve())
        told["env"] = str(Path(self.env).resolve()) if isinstance(self.env, str | Path) else None
        told["env_args"] = list(self.env_args)
        told["log_folder"] = None if self.log_folder is None else str(self.log_folder.resolve())
        told["init_from"] = {name: str(path.resolve()) for name, path in self.init_from.items()}
        return told

    @classmethod
    def of(cls, told: Mapping[str, Any], env: BaseEnv | Sequence[BaseEnv] | None) -> Work:
        """What `plain` gave, with this process's own environments if it has any."""
        values = dict(told)
        from_file, refused = values.pop("from_file"), values.pop("refused")
        settings = load_run_settings(None, overrides=values["settings"], env_path_follows=True)
        values["settings"] = replace(settings, from_file=from_file, refused=refused)
        values["run_dir"] = Path(values["run_dir"])
        values["env"] = values["env"] if env is None else env
        values["log_folder"] = values["log_folder"] and Path(values["log_folder"])
        values["init_from"] = {name: Path(path) for name, path in values["init_from"].items()}
        return cls(**values)


def unthreaded(settings: RunSettings) -> RunSettings:
    """The same without `threaded`: averages in a thread of their own would come out of order."""

    def changed(name: str, one: TrainerSettings) -> TrainerSettings:
        if one.threaded:
            _log.warning("%s: threaded is not used with several learners.", name)
        return replace(one, threaded=False)

    default = settings.default_settings
    return replace(
        settings,
        behaviors={name: changed(name, one) for name, one in settings.behaviors.items()},
        default_settings=None if default is None else changed("default_settings", default),
    )


def refuse_alone(work: Work, n_learners: int, *, inference: bool, started: bool) -> None:
    """Refuse what only one process can do.

    Args:
        work: to do.
        n_learners: how many processes there shall be.
        inference: whether nothing is to be learned.
        started: whether the processes are there already.

    Raises:
        SettingsError: There is something of that kind.
    """
    if inference:
        raise SettingsError(
            f"--inference plays in one process, and {n_learners} learners are asked for; use one"
        )
    if work.env is None:
        raise SettingsError(
            f"{n_learners} learners need environments of their own, and there is one Unity Editor; "
            "name an executable"
        )
    if not started and not isinstance(work.env, str | Path):
        raise SettingsError(
            f"{n_learners} learners need an executable that each can start; an environment in this "
            "process is for one learner"
        )
    for name, settings in work.settings.behaviors.items():
        refuse_alone_only(name, settings, n_learners)
