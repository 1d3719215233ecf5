"""`pipeline env`: executables of built-in and other environments, by name, id or URL."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pipeline.errors import FetchError, SettingsError
from pipeline.settings.nodes import from_plain, to_plain
from pipeline.settings.source import EnvironmentParams
from pipeline.settings.sources import BridgeSource
from pipeline.settings.yaml_file import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.envs.archives import Limits
    from pipeline.envs.registry import RemoteRegistryEntry, UnityEnvRegistry


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


def list_environments(manifests: Sequence[str]) -> str:
    """The built-in simulators and the entries of manifests, one line each.

    Raises:
        PipelineError: A manifest cannot be read.
    """
    from pipeline.simulators import registry

    rows = [(name, registry.entry(name).summary) for name in registry.NAMES]
    rows += [(f"{name}:ID", registry.entry(name).summary) for name in registry.BRIDGES]
    rows += [(name, _summary(entry)) for name, entry in _registry(manifests).items()]
    width = max(16, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:{width}} {summary}" for name, summary in rows)


def fetch_environment(
    asked: str,
    *,
    manifests: Sequence[str],
    sha256: str | None,
    platform: str | None,
    executable: str | None,
    limits: Limits,
) -> str:
    """The path of an environment's program, fetched if it is not cached.

    Args:
        asked: a URL, or the name of an entry in a manifest.
        manifests: files or URLs.
        sha256: the digest that the archive must have.
        platform: the system that the program is for; this one if None.
        executable: path of the program in the archive; None for the only one.
        limits: how large the archive may become.

    Raises:
        PipelineError: There is no such environment, it cannot be fetched, or nothing says what its
            digest must be.
    """
    if "://" not in asked:
        if sha256 or executable:
            raise SettingsError(
                f"{asked}: --sha256 and --executable belong to a URL; the entry of a manifest has "
                "its own"
            )
        return str(_entry(asked, manifests).executable(platform, limits=limits))
    from pipeline.envs import fetch
    from pipeline.envs.download import public
    from pipeline.envs.programs import find_program

    if sha256 is None:
        found = fetch.digest_of(asked, limits=limits)
        raise FetchError(
            f"{public(asked)}: nothing says what this archive must be. It now has sha256 {found}. "
            f"If you trust it, give --sha256 {found}, or write it into params.yaml; it stays "
            "downloaded, not unpacked"
        )
    folder = fetch.fetch(asked, sha256=sha256, limits=limits)
    return str(find_program(folder, label=public(asked), platform=platform, wanted=executable))


def _registry(manifests: Sequence[str]) -> UnityEnvRegistry:
    from pipeline.envs.registry import UnityEnvRegistry

    entries = UnityEnvRegistry()
    for manifest in manifests:
        entries.register_from_yaml(manifest)
    return entries


def _entry(name: str, manifests: Sequence[str]) -> RemoteRegistryEntry:
    from pipeline.simulators import registry

    entries = _registry(manifests)
    if name in entries:
        return entries[name]
    if name in registry.NAMES:
        raise SettingsError(
            f"{name}: is built in and needs no fetching; `pipeline env build {name} -o FILE` "
            "makes its executable"
        )
    near = get_close_matches(name, [*entries, *registry.NAMES], n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    where = "`pipeline env list` shows the names"
    if not manifests:
        where = "names come from a manifest (--manifest FILE|URL), or give a URL"
    raise SettingsError(f"unknown environment '{name}'{hint} {where[0].upper()}{where[1:]}.")


def _summary(entry: RemoteRegistryEntry) -> str:
    lines = entry.description.strip().splitlines()
    systems = ", ".join(entry.urls) or "no platform"
    return f"{lines[0] if lines else 'no description'} ({systems})"


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in texts:
        key, given, value = text.partition("=")
        if not given or not key:
            raise SettingsError(f"{flag} {text}: needs the form KEY=VALUE, such as gravity=9.8.")
        found[key] = to_plain(parse_yaml(f"v: {value}", source=f"{flag} {key}"))["v"]
    return found
