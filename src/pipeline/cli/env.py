"""`pipeline env`: build, list and fetch executables of environments, by name, id or URL."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pipeline.cli.parser import Parser, option
from pipeline.envs.registry import RemoteRegistryEntry, UnityEnvRegistry
from pipeline.errors import FetchError, SettingsError, shell_command
from pipeline.settings.project.environments import BridgeSource, EnvironmentParams, named

_REMOVED = {"--max-ratio": "it was removed; --max-unpacked-gb limits an archive's unpacked size"}
"""For each removed option of `fetch`: a text about the option that replaces it."""


def add_options(parser: Parser) -> None:
    """Add the subcommands `build`, `list` and `fetch`."""
    command = parser.add_command("build", "pack an environment into an executable", build)
    text = "a name that `pipeline env list` shows, gymnasium:ID, pettingzoo:ID or module:function"
    command.add_argument("name", help=text)
    option(command, "-o --output FILE", "the executable to write", required=True)
    option(command, "--copies N", "number of environments in one process")
    # Each use of `--arg` or `--option` adds a value to a list.
    several: dict[str, Any] = {"action": "append", "default": []}
    text = "keyword argument of the environment; may be repeated"
    option(command, "--arg KEY=VALUE", text, **several)
    text = (
        "a setting that the environment's section of params.yaml may have, such as teams=index; "
        "may be repeated"
    )
    option(command, "--option KEY=VALUE", text, **several)
    text = "list the built-in environments and the environments in manifests"
    _add_manifest(parser.add_command("list", text, list_environments))
    text = "fetch an environment's archive into the cache, and print its executable's path"
    command = parser.add_command("fetch", text, fetch_environment)
    text = "a name in a manifest, or the URL of an archive"
    command.add_argument("environment", metavar="NAME|URL", help=text)
    _add_manifest(command)
    text = "expected SHA-256 of the archive; without it, the command only prints the digest"
    option(command, "--sha256 DIGEST", text)
    text = "the executable's operating system; default: this machine's"
    option(command, "--platform SYSTEM", text, choices=("linux", "darwin", "windows"), metavar=None)
    text = "path of the executable in the archive; default: the archive's only executable"
    option(command, "--executable PATH", text)
    text = "refuse an archive that unpacks to more than N GB"
    option(command, "--max-unpacked-gb N", text, type=float, default=16.0)
    command.given_elsewhere = _REMOVED.get


def _add_manifest(parser: argparse.ArgumentParser) -> None:
    text = "a registry manifest in ML-Agents' format; may be given several times"
    option(parser, "--manifest FILE|URL", text, action="append", default=[])


def build(arguments: argparse.Namespace) -> str:
    """Pack an environment into an executable, and return a line about the file."""
    from pipeline.simulators.pack import pack

    name, copies, target = arguments.name, arguments.copies, arguments.output
    # Only the form of the name is checked; the environment is started by `pack`.
    environment = named(name)
    if isinstance(environment, BridgeSource):
        environment = _with_options(environment, arguments)
    elif arguments.arg or arguments.option:
        raise SettingsError(
            f"{name}: --arg and --option are only for gymnasium:ID, pettingzoo:ID and "
            "module:function; leave them out."
        )
    packed = environment.packed()
    if packed is None:
        raise SettingsError(
            f"{name}: is a path, so there is nothing to build; train in it: "
            + shell_command("pipeline", "learn", "CONFIG", "--env", name)
        )
    simulator, options = packed
    if copies is not None:  # a built-in simulator takes `--copies` as its number of agents
        if copies < 1:
            raise SettingsError(f"--copies: must be at least 1, got {copies}.")
        options["n_agents"] = copies
    pack(simulator, target, **options)
    learn = shell_command("pipeline", "learn", "CONFIG", "--env", target)
    return f"Wrote {target}. Train in it: {learn}"


def _with_options(environment: BridgeSource, arguments: argparse.Namespace) -> EnvironmentParams:
    """Return `environment` with the command line's options, checked as in params.yaml."""
    from pipeline.settings.nodes import from_plain

    options = _pairs("--option", arguments.option)
    options |= {"source": environment.source, "id": environment.id}
    if arguments.copies is not None:
        options["copies"] = arguments.copies
    if arguments.arg:
        options["kwargs"] = _pairs("--arg", arguments.arg)
    return EnvironmentParams.from_node(from_plain(options, "command line"), "")


def list_environments(arguments: argparse.Namespace) -> str:
    """Return a line for each built-in simulator and each entry of the manifests."""
    from pipeline.simulators import registry

    rows = [(name, registry.entry(name).summary) for name in registry.SIMULATORS]
    # A bridge can make any environment of another library, so the row of a bridge shows the form
    # of the names.
    for name in registry.BRIDGES:
        form = "MODULE:FUNCTION" if name == "module" else f"{name}:ID"
        rows.append((form, registry.entry(name).summary))
    rows += [(name, _summary(entry)) for name, entry in _registry(arguments.manifest).items()]
    width = max(16, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:{width}} {summary}" for name, summary in rows)


def fetch_environment(arguments: argparse.Namespace) -> str:
    """Return the path of an environment's executable; fetch it if it is not in the cache."""
    from pipeline.envs.sources import fetch
    from pipeline.envs.sources.executables import executable_in
    from pipeline.envs.sources.fetch import public

    address, sha256 = arguments.environment, arguments.sha256
    max_bytes = int(arguments.max_unpacked_gb * 1e9)
    # A text without `://` names an entry of a manifest, which has the URL and may have a digest.
    if "://" not in address:
        if sha256 or arguments.executable:
            raise SettingsError(
                f"{address}: --sha256 and --executable are only for a URL; an entry of a manifest "
                "has its own values; leave them out"
            )
        entry = _entry(address, arguments.manifest)
        return str(entry.executable(arguments.platform, max_bytes=max_bytes))
    if sha256 is None:
        # The archive is downloaded to compute its digest, but not unpacked, because the user has
        # not said that it is trusted.
        digest = fetch.digest_of(address, max_bytes=max_bytes)
        raise FetchError(
            f"{public(address)}: the expected digest of this archive is not given. The archive has "
            f"sha256 {digest}. If you trust it, give --sha256 {digest}, or write the digest into "
            "params.yaml; the archive was downloaded but not unpacked"
        )
    folder = fetch.fetch(address, sha256=sha256, max_bytes=max_bytes)
    chosen = {"platform": arguments.platform, "wanted": arguments.executable}
    return str(executable_in(folder, label=public(address), **chosen))


def _registry(manifests: Sequence[str]) -> UnityEnvRegistry:
    entries = UnityEnvRegistry()
    for manifest in manifests:
        entries.register_from_yaml(manifest)
    return entries


def _entry(name: str, manifests: Sequence[str]) -> RemoteRegistryEntry:
    from pipeline.simulators import registry

    entries = _registry(manifests)
    if name in entries:
        return entries[name]
    if name in registry.SIMULATORS:
        raise SettingsError(
            f"{name}: is built in and is not fetched; `pipeline env build {name} -o FILE` makes "
            "its executable"
        )
    near = get_close_matches(name, [*entries, *registry.SIMULATORS], n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    advice = "`pipeline env list` shows the names"
    if not manifests:
        advice = "names come from a manifest (--manifest FILE|URL), or give a URL"
    raise SettingsError(f"unknown environment '{name}'{hint} {advice[0].upper()}{advice[1:]}.")


def _summary(entry: RemoteRegistryEntry) -> str:
    lines = entry.description.strip().splitlines()
    systems = ", ".join(entry.urls) or "no platform"
    return f"{lines[0] if lines else 'no description'} ({systems})"


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values in texts such as `gravity=9.8`; values are read as YAML."""
    from pipeline.settings.nodes import to_plain
    from pipeline.settings.yaml_file import parse_yaml

    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SettingsError(f"{flag} {text}: needs the form KEY=VALUE, such as gravity=9.8.")
        # The value is read as YAML, so that `gravity=9.8` is a number as in params.yaml.
        values[key] = to_plain(parse_yaml(f"v: {value}", source=f"{flag} {key}"))["v"]
    return values
