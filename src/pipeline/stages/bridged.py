"""Environments of Gymnasium and PettingZoo, for the stage `env` and for `pipeline plan`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pipeline.errors import SettingsError
from pipeline.settings.nodes import fail, find
from pipeline.settings.sources import BridgeSource
from pipeline.settings.yaml_file import read_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.settings.params import Params


def build(environment: BridgeSource, target: Path) -> Path:
    """Pack the environment into the executable `target`.

    Raises:
        SettingsError: There is none of its id, or it cannot be carried.
        StageError: It fails while it is played, or does not run by itself.
    """
    from pipeline.simulators.pack import pack

    return pack(environment.source, target, **environment.options())


def check_ids(params: Params) -> None:
    """Refuse ids of environments that are not there; their modules may lie beside params.yaml.

    Raises:
        SettingsError: An id is unknown; the message has its place, and the nearest ids.
    """
    here = str(params.path.resolve().parent)
    for name, environment in params.environments.items():
        if isinstance(environment, BridgeSource):
            if here not in sys.path:
                sys.path.append(here)
            from pipeline.simulators.bridges.naming import check

            try:
                check(environment.source, environment.id)
            except SettingsError as error:
                at = f"environments.{name}.id"
                raise fail(find(read_yaml(params.path), at), at, str(error)) from error
