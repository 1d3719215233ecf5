"""Environments by name: ML-Agents' registry, and the manifests that fill it.

The manifests' format has no digests. So the digest of an archive is written to a lock file in the
manifest's folder when the archive is used for the first time, and later archives must have the same
digest. Our additional keys `linux_sha256`, `darwin_sha256` and `win_sha256` give the digests, so
that the first archive is checked, too.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipeline import files
from pipeline.envs.sources import fetch as fetching
from pipeline.envs.sources.executables import executable_in, this_platform
from pipeline.envs.sources.fetch import MAX_BYTES
from pipeline.errors import FetchError
from pipeline.settings import parse_yaml, read_yaml
from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import display, entries_of, read_dataclass

if TYPE_CHECKING:
    from pipeline.envs.unity import UnityEnvironment

_log = logging.getLogger(__name__)

# A manifest's keys begin with these names of the platforms.
_KEYS = {"linux": "linux", "darwin": "darwin", "windows": "win"}
# Largest size of a manifest in bytes, so that a wrong URL does not fill the disk.
_MANIFEST_BYTES = 16 << 20


class MissingBinaryError(FetchError, FileNotFoundError):
    """An entry has no executable for this platform; a `FileNotFoundError`, as in ML-Agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ManifestEntry:
    """An entry of a manifest, with ML-Agents' keys and our keys for digests."""

    expected_reward: float = 0.0
    description: str = ""
    linux_url: str | None = None
    darwin_url: str | None = None
    win_url: str | None = None
    linux_sha256: str | None = None
    darwin_sha256: str | None = None
    win_sha256: str | None = None
    additional_args: tuple[str, ...] = ()


class RemoteRegistryEntry:
    """An environment with the URL of an archive for each platform, fetched at its first use.

    Args:
        identifier: name of the environment.
        expected_reward: mean return of an agent that has learned the task.
        description: description of the task.
        linux_url: URL of the archive for Linux.
        darwin_url: URL of the archive for macOS.
        win_url: URL of the archive for Windows.
        additional_args: arguments for the executable, after the user's own arguments.
        sha256: known digests of the archives, by platform.
        lock: file that stores each archive's digest at its first use; None: a file in the cache.

    Attributes:
        urls: URLs of the archives, by platform (`linux`, `darwin`, `windows`).
    """

    def __init__(
        self,
        identifier: str,
        expected_reward: float,
        description: str,
        linux_url: str | None = None,
        darwin_url: str | None = None,
        win_url: str | None = None,
        additional_args: list[str] | None = None,
        *,
        sha256: Mapping[str, str | None] | None = None,
        lock: Path | None = None,
    ) -> None:
        self.identifier, self.expected_reward = identifier, expected_reward
        self.description = description
        urls = {"linux": linux_url, "darwin": darwin_url, "windows": win_url}
        self.urls = {platform: url for platform, url in urls.items() if url}
        self.additional_args = list(additional_args or ())
        self._sha256 = dict(sha256 or {})
        self._lock = lock

    def executable(self, platform: str | None = None, *, max_bytes: int = MAX_BYTES) -> Path:
        """Return the executable for a platform (None: this one), fetched if it is not cached.

        Raises:
            FetchError: The archive cannot be fetched, has another digest than before, or has no
                executable; `MissingBinaryError` if there is no executable for this platform.
        """
        platform = platform or this_platform()
        url = self.urls.get(platform)
        if url is None:
            raise MissingBinaryError(
                f"The entry {self.identifier} does not contain a valid url for this platform "
                f"({platform}); platforms with a url: {', '.join(self.urls) or 'none'}."
            )
        sha256 = self._sha256.get(platform) or self._trusted(url, max_bytes)
        folder = fetching.fetch(url, sha256=sha256, max_bytes=max_bytes)
        try:
            return executable_in(folder, label=fetching.public(url), platform=platform)
        except FetchError as error:
            raise MissingBinaryError(
                f"Binary not found, make sure {fetching.public(url)} is a valid url to a zip "
                f"folder containing a valid Unity executable ({error})"
            ) from error

    def make(self, **kwargs: Any) -> "UnityEnvironment":
        """Fetch the environment, and launch it with the keywords `kwargs` of `UnityEnvironment`.

        Raises:
            ValueError: `kwargs` have `file_name`.
            FetchError: The archive cannot be fetched.
            UnityException: The environment cannot be launched.
        """
        from pipeline.envs.launch import words_of
        from pipeline.envs.unity import UnityEnvironment

        if "file_name" in kwargs:
            raise ValueError("file_name is known from the entry of the registry; leave it out")
        # The entry's arguments come last, as in ML-Agents.
        args = [*words_of(kwargs.pop("additional_args", None) or ()), *self.additional_args]
        return UnityEnvironment(str(self.executable()), additional_args=args, **kwargs)

    def _trusted(self, url: str, max_bytes: int) -> str:
        """Return the digest of a URL's archive from the lock file, made at the first use."""
        # The first archive from a URL is trusted, and later archives must be equal to it, as ssh
        # does with the key of a host.
        lock = self._lock or lock_of_url("")
        key = hashlib.sha256(str(lock.absolute()).encode()).hexdigest()
        with fetching.locked(f"lock-{key}", str(lock)):
            # The file is locked, because two runs must not write two digests.
            digests = _read_lock(lock)
            if url in digests:
                return digests[url]
            digest = fetching.digest_of(url, max_bytes=max_bytes)
            files.write_json(lock, {"sha256": digests | {url: digest}})
        _log.warning(
            "%s: no digest of this archive is given, so its digest was written to %s at this first "
            "use; later archives must have the same digest.",
            fetching.public(url),
            lock,
        )
        return digest


class UnityEnvRegistry(Mapping[str, RemoteRegistryEntry]):
    """A mapping from names to environments; a manifest is read when an entry is first looked up."""

    def __init__(self) -> None:
        self._entries: dict[str, RemoteRegistryEntry] = {}
        self._waiting: list[RemoteRegistryEntry | str] = []

    def register(self, entry: RemoteRegistryEntry) -> None:
        """Add an entry; it replaces an entry with the same name."""
        self._waiting.append(entry)

    def register_from_yaml(self, path_to_yaml: str | Path) -> None:
        """Add the entries of a manifest (path or URL), which is read when an entry is looked up."""
        self._waiting.append(str(path_to_yaml))

    def clear(self) -> None:
        """Forget all entries and manifests."""
        self._entries.clear()
        self._waiting.clear()

    def __getitem__(self, identifier: str) -> RemoteRegistryEntry:
        self._read_waiting()
        if identifier not in self._entries:
            raise KeyError(f"The entry {identifier} is not present in the registry.")
        return self._entries[identifier]

    def __iter__(self) -> Iterator[str]:
        self._read_waiting()
        return iter(self._entries)

    def __len__(self) -> int:
        self._read_waiting()
        return len(self._entries)

    def _read_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            entries = read_manifest(first) if isinstance(first, str) else [first]
            # A later entry replaces an earlier entry with the same name, as in ML-Agents.
            self._entries |= {entry.identifier: entry for entry in entries}
            # The manifest is removed last, so that each look-up raises the error of an unreadable
            # manifest.
            self._waiting.pop(0)


default_registry = UnityEnvRegistry()
"""The environments that Unity has built; their manifest is fetched when it is first needed."""
default_registry.register_from_yaml(
    "https://storage.googleapis.com/mlagents-test-environments/1.1.0/manifest.yaml"
)


def read_manifest(path_or_url: str) -> list[RemoteRegistryEntry]:
    """Return the entries of a manifest.

    Raises:
        SettingsError: The file is not a manifest.
        FetchError: The manifest cannot be fetched.
    """
    if path_or_url.lower().startswith(("http://", "https://", "file://")):
        # The manifest is not cached, because it is small and may change.
        with TemporaryDirectory() as folder:
            file = fetching.download(path_or_url, Path(folder), max_bytes=_MANIFEST_BYTES)
            text = file.read_text(encoding="utf-8", errors="replace")
        return _entries(
            parse_yaml(text, source=fetching.public(path_or_url)), lock_of_url(path_or_url)
        )
    lock = Path(path_or_url).absolute()
    root = read_yaml(path_or_url, what="Registry manifest")
    return _entries(root, lock.with_name(f"{lock.name}.lock"))


def lock_of_url(url: str) -> Path:
    """Return the lock file of the manifest at `url`; if empty, of entries without a manifest."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16] if url else "entries"
    return fetching.cache_folder() / "trusted" / f"{name}.lock"


def _entries(root: Node, lock: Path) -> list[RemoteRegistryEntry]:
    top = entries_of(root, "")
    if list(top) != ["environments"] or not isinstance(top["environments"].value, list):
        raise fail(
            root,
            "",
            "a registry manifest has the one key 'environments', a list of maps with one "
            f"name each, got {display(root)}",
        )
    entries = []
    for index, item in enumerate(top["environments"].value):
        path = join("environments", index)
        for name, node in entries_of(item, path).items():
            values = asdict(read_dataclass(_ManifestEntry, node, join(path, name)))
            sha256 = {platform: values.pop(f"{key}_sha256") for platform, key in _KEYS.items()}
            entries.append(RemoteRegistryEntry(name, **values, sha256=sha256, lock=lock))
    return entries


def _read_lock(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FetchError(
            f"{path}: is damaged ({error}); restore it from version control"
        ) from error
    digests = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(digests, dict):
        raise FetchError(f"{path}: has no map 'sha256'; restore an earlier version")
    return {str(url): str(digest) for url, digest in digests.items()}
