"""`pipeline env list` and `pipeline env fetch`: environments by name or URL."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from pipeline.errors import FetchError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.envs.archives import Limits
    from pipeline.envs.registry import RemoteRegistryEntry, UnityEnvRegistry


def list_environments(manifests: Sequence[str]) -> str:
    """The built-in simulators and the entries of manifests, one line each.

    Raises:
        PipelineError: A manifest cannot be read.
    """
    from pipeline.simulators import registry

    rows = [(name, registry.entry(name).summary) for name in registry.NAMES]
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
