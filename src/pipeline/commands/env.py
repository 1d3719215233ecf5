"""`pipeline env`: executables of built-in simulators, and of environments that others wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError
from pipeline.settings.nodes import from_plain, to_plain
from pipeline.settings.sources import BridgeSource, EnvironmentParams
from pipeline.settings.yaml_file import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def build(
    name: str,
    target: Path,
    *,
    copies: int | None = None,
    kwargs: Sequence[str] = (),
    options: Sequence[str] = (),
) -> str:
    """Pack an environment into the executable `target`; gives what to tell the user.

    Args:
        name: a built-in simulator, or `gymnasium:ID` or `pettingzoo:ID`.
        target: the file to write.
        copies: environments in one process; of a built-in simulator its agents.
        kwargs: `key=value`, for the environment; values are read as YAML.
        options: `key=value`, for the bridge.

    Raises:
        SettingsError: There is no such environment, or an option is not one of it.
        StageError: It cannot be packed.
    """
    from pipeline.simulators import pack, registry

    source, _, env_id = name.partition(":")
    if source in registry.BRIDGES:
        given = _pairs("--option", options) | {"source": source, "id": env_id}
        if copies is not None:
            given["copies"] = copies
        if kwargs:
            given["kwargs"] = _pairs("--arg", kwargs)
        read = EnvironmentParams.from_node(from_plain(given, "command line"), "")
        wanted = read.options() if isinstance(read, BridgeSource) else {}
        pack.pack(source, target, **wanted)
    else:
        if kwargs or options:
            raise SettingsError(
                f"{name}: --arg and --option belong to gymnasium:ID and pettingzoo:ID; "
                "leave them out."
            )
        if copies is not None and copies < 1:
            raise SettingsError(f"--copies: must be at least 1, got {copies}.")
        pack.pack(name, target, **({} if copies is None else {"n_agents": copies}))
    return f"Wrote {target}. Train in it: pipeline learn CONFIG --env {target}"


def names() -> str:
    """The built-in simulators, and how to name other environments."""
    from pipeline.simulators import registry

    lines = [f"{name:16} {registry.entry(name).summary}" for name in registry.NAMES]
    lines += [f"{f'{name}:ID':16} {registry.entry(name).summary}" for name in registry.BRIDGES]
    return "\n".join(lines)


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in texts:
        key, given, value = text.partition("=")
        if not given or not key:
            raise SettingsError(f"{flag} {text}: needs the form KEY=VALUE, such as gravity=9.8.")
        found[key] = to_plain(parse_yaml(f"v: {value}", source=f"{flag} {key}"))["v"]
    return found
