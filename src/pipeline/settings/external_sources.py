"""Environments that come from outside: `environments.<name>` with one of the sources below."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import urlsplit

from pipeline.settings.nodes import Node, join
from pipeline.settings.reader import ContradictionError, choice, read
from pipeline.settings.schema.kinds import Positive  # noqa: TC001  # a type hint read at run time
from pipeline.settings.source import EnvironmentParams

if TYPE_CHECKING:
    from pathlib import Path

Platform = Literal["linux", "darwin", "windows"]
"""The systems that a build may be for."""
PLATFORMS: tuple[str, ...] = get_args(Platform)
URL_SCHEMES = ("https", "http", "file")
"""Where an archive may come from."""

_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
_METHOD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")
_SUFFIXES = (".x86_64", ".x86", ".exe", ".app")
_WATCHED = ("Assets", "Packages", "ProjectSettings")


@dataclass(frozen=True, slots=True)
class PerPlatform:
    """One text for every platform, or one for each of some."""

    values: dict[str, str]
    """By platform; the key `any` alone when there is one for all."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> PerPlatform:
        """Read a text, or a map from platforms to texts.

        Raises:
            SettingsError: It is neither, or a key is no platform.
        """
        if isinstance(node.value, dict) and node.value:
            for name, entry in node.value.items():
                choice(Node(name, entry.source, entry.line, name), path, PLATFORMS)
            entries = node.value
        else:
            entries = {"any": node}
        return cls(
            {
                name: read(str, entry, path if name == "any" else join(path, name))
                for name, entry in entries.items()
            }
        )

    def to_plain(self) -> Any:
        """What `from_node` read."""
        return self.values.get("any", self.values)

    def of(self, platform: str) -> str | None:
        """The text for a platform; None when there is none."""
        return self.values.get("any", self.values.get(platform))


_NOT_GIVEN = PerPlatform({})


@dataclass(frozen=True, kw_only=True, slots=True)
class PathSource(EnvironmentParams):
    """A build that is already there."""

    source: Literal["path"] = "path"
    """The kind."""
    path: str = ""
    """The program, its folder, or its name without suffix; relative to params.yaml."""

    def __post_init__(self) -> None:
        """Refuse a source without its key."""
        _need("path", "path", self.path, "where the build is")

    def found(self, root: Path) -> str:
        """`path`, with the suffix of a build where the name alone does not exist in `root`."""
        if not (root / self.path).exists():
            for suffix in _SUFFIXES:
                if (root / f"{self.path}{suffix}").exists():
                    return f"{self.path}{suffix}"
        return self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSource(EnvironmentParams):
    """An archive behind a URL, known by its digest."""

    source: Literal["fetch"] = "fetch"
    """The kind."""
    url: PerPlatform = _NOT_GIVEN
    """http, https or file: one, or one for each platform."""
    sha256: PerPlatform = _NOT_GIVEN
    """Hex digest of the archive: one, or one for each platform."""
    platform: Platform | None = None
    """What a single archive is for; null when unknown."""
    executable: str | None = None
    """The program inside the archive; null for the only one."""
    max_unpacked_gb: Positive = 16
    """Refuse an archive that unpacks to more, in 10^9 bytes."""
    max_ratio: Positive = 100
    """Refuse an archive that unpacks to more than this many times its size."""

    def __post_init__(self) -> None:
        """Refuse what cannot be fetched, or could not be checked."""
        _need("url", "fetch", self.url.values, "where the archive is")
        for url in self.url.values.values():
            if urlsplit(url).scheme not in URL_SCHEMES:
                raise ContradictionError(
                    "url", f"must start with one of {', '.join(URL_SCHEMES)}, got {url!r}"
                )
        if not self.sha256.values:
            raise ContradictionError(
                "sha256",
                "the source 'fetch' needs the archive's digest; "
                f"`pipeline env fetch {next(iter(self.url.values.values()))}` finds it out",
            )
        for digest in self.sha256.values.values():
            if not _SHA256.match(digest):
                raise ContradictionError("sha256", f"needs 64 hex digits, got {digest!r}")
        if set(self.sha256.values) != set(self.url.values):
            raise ContradictionError(
                "sha256",
                f"needs the same platforms as 'url' ({', '.join(self.url.values)}), "
                f"got {', '.join(self.sha256.values)}",
            )
        if self.platform is not None and "any" not in self.url.values:
            raise ContradictionError("platform", "is said by the keys of 'url' already")
        inside = PurePosixPath(self.executable or "x")
        if inside.is_absolute() or ".." in inside.parts:
            raise ContradictionError(
                "executable", f"must lie inside the archive, got {self.executable!r}"
            )

    def archive(self, platform: str) -> tuple[str, str] | None:
        """URL and digest of the archive for a platform; None when there is none."""
        url, digest = self.url.of(platform), self.sha256.of(platform)
        if url is None or digest is None or self.platform not in (None, platform):
            return None
        return url, digest.lower()

    def platforms(self) -> tuple[str, ...]:
        """The platforms that there is an archive for; `any` alone when that is not said."""
        return (self.platform,) if self.platform else tuple(self.url.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitySource(EnvironmentParams):
    """A Unity project that the Unity Editor builds in batch mode."""

    source: Literal["unity"] = "unity"
    """The kind."""
    project: str = ""
    """The project's folder, relative to params.yaml."""
    method: str = "PipelineBuild.Build"
    """The static C# method that builds; workflow/unity/PipelineBuild.cs has the default one."""
    editor: str | None = None
    """The Unity Editor's program; null for PIPELINE_UNITY_EDITOR, Unity Hub's, or PATH's."""
    build_args: tuple[str, ...] = ()
    """More arguments for the Editor, for example `-buildTarget`."""
    timeout_s: Positive = 3600
    """Seconds that the build may take."""

    def __post_init__(self) -> None:
        """Refuse a source without its key, and what is no method."""
        _need("project", "unity", self.project, "where the Unity project is")
        if not _METHOD.match(self.method):
            raise ContradictionError(
                "method", f"needs 'Class.Method' of a script in Assets/Editor, got {self.method!r}"
            )

    @property
    def watched(self) -> tuple[str, ...]:
        """The parts of the project that a build depends on; Unity rewrites the others itself."""
        return tuple(f"{self.project.rstrip('/')}/{name}" for name in _WATCHED)


ExternalSource = PathSource | FetchSource | UnitySource
"""An environment from outside."""


def _need(key: str, source: str, value: object, what: str) -> None:
    if not value:
        raise ContradictionError(key, f"the source {source!r} needs to know {what}")
