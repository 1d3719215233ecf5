"""Where an environment comes from: one class for each `source`, and environments by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from pipeline.errors import SettingsError, shell_command
from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import (
    ContradictionError,
    Count,
    Positive,
    choice,
    entries_of,
    read,
    read_dataclass,
    setting_hints,
)

Platform = Literal["linux", "darwin", "windows"]
"""The systems that a build may be for."""
PLATFORMS: tuple[str, ...] = get_args(Platform)
URL_SCHEMES = ("https", "http", "file")
"""Where an archive may come from."""

_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
_METHOD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")
_SUFFIXES = (".x86_64", ".x86", ".exe", ".app")
_WATCHED = ("Assets", "Packages", "ProjectSettings")
_IDS = {"gymnasium": "gymnasium:CartPole-v1", "pettingzoo": "pettingzoo:mpe2.simple_tag_v3"}
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)
FORMS = (
    "a path (./Game), a simulator (`pipeline env list`), gymnasium:ID, pettingzoo:ID or "
    "module:function (my_env:make of my_env.py)"
)
"""What may name an environment, for errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentParams:
    """`environments.<name>`: where an environment comes from."""

    source: str
    """`builtin`, `gymnasium`, `pettingzoo`, `module`, `path`, `fetch` or `unity`."""
    args: tuple[str, ...] = ()
    """Arguments for the executable."""

    @staticmethod
    def from_node(node: Node, path: str) -> EnvironmentParams:
        """Read a map as the class that its `source` names, or a text as an environment's name."""
        if isinstance(node.value, str):
            try:
                return named(node.value)
            except SettingsError as error:
                raise fail(node, path, str(error)) from error
        entries = entries_of(node, path)
        if "source" not in entries:
            raise fail(node, path, "the key 'source' is required")
        source = choice(entries["source"], join(path, "source"), (*SOURCES, "editor"))
        if source == "editor":
            text = (
                "'editor' waits until someone presses Play, so nothing that came of it could be "
                "made again; train with `pipeline learn` without --env, or let the source 'unity' "
                "build it"
            )
            raise fail(entries["source"], join(path, "source"), text)
        if "max_ratio" in entries:
            text = "was removed; max_unpacked_gb limits what an archive unpacks to: remove the key"
            raise fail(entries["max_ratio"], join(path, "max_ratio"), text)
        # The source that has such a key explains more than "unknown key" would.
        for key, value in entries.items():
            owners = [name for name, cls in SOURCES.items() if key in setting_hints(cls)]
            if owners and source not in owners:
                listed = " and ".join(repr(name) for name in owners)
                text = f"belongs to the source {listed}, but the source is {source!r}"
                raise fail(value, join(path, key), text)
        environment: EnvironmentParams = read_dataclass(SOURCES[source], node, path)
        return environment

    def packed(self) -> tuple[str, dict[str, Any]] | None:
        """Return the simulator to pack, and its options; None if it is an executable already."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltinSource(EnvironmentParams):
    """One of our simulators."""

    name: str | None = None
    """The simulator; null for the simulator with the same name as this environment."""

    def packed(self) -> tuple[str, dict[str, Any]]:
        """Return the simulator, without options."""
        return self.name or "", {}


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeSource(EnvironmentParams):
    """Common settings of environments of Gymnasium, of PettingZoo and of your own."""

    id: str
    """The environment, as its library calls it."""
    copies: Count | None = 16
    """Environments in one process, stepped together."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    visual: Literal["auto", "always", "never"] = "auto"
    """Which observations that could be images become visual ones; auto: from 20 pixels a side."""
    action_scale: Positive | None = None
    """What an action of 1 means where the action space has no bounds; null refuses such spaces."""

    def __post_init__(self) -> None:
        if "render_mode" in self.kwargs:
            raise ContradictionError("kwargs.render_mode", "cannot be set: nothing is drawn")
        _check_finite(self.kwargs, "kwargs")

    def packed(self) -> tuple[str, dict[str, Any]]:
        """Return the bridge, and its keywords that are not at their defaults."""
        options: dict[str, Any] = {"id": self.id}
        if self.copies is not None:
            options["n_agents"] = self.copies
        for item in fields(self):
            value = getattr(self, item.name)
            # `kwargs` has a factory in place of a default.
            default = {} if item.name == "kwargs" else item.default
            if item.name not in ("source", "args", "id", "copies") and value != default:
                options[item.name] = value
        return self.source, options


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumSource(BridgeSource):
    """An environment that is registered with Gymnasium."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PettingzooSource(BridgeSource):
    """An environment of PettingZoo."""

    copies: Count | None = 4
    """Environments in one process, each with all its agents."""
    api: Literal["auto", "parallel", "aec"] = "auto"
    """Which interface to use; auto: parallel where there is one."""
    teams: Any = "none"
    """`none`, `index` (a team for each agent), or a map from agents to numbers from 0."""
    groups: Literal["none", "all", "behavior"] = "none"
    """Which agents of a copy share a group and its reward."""

    def __post_init__(self) -> None:
        # Not super(): `slots=True` makes a new class, which super() does not know of.
        BridgeSource.__post_init__(self)
        is_map = isinstance(self.teams, dict) and all(
            isinstance(team, int) and not isinstance(team, bool) and team >= 0
            for team in self.teams.values()
        )
        if self.teams not in ("none", "index") and not is_map:
            expected = "none, index, or a map from agents to whole numbers"
            raise ContradictionError("teams", f"must be {expected}, got {self.teams!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSource(PettingzooSource):
    """What a function or class of a Python module makes; `id` is `module:function`."""

    copies: Count | None = None
    """Agents of a simulator, or environments in one process; null for its own number, or 16."""

    def __post_init__(self) -> None:
        PettingzooSource.__post_init__(self)
        if not _FUNCTION.match(self.id):
            raise ContradictionError("id", f"needs the form module:function, got {self.id!r}")

    def found(self, root: Path) -> str | None:
        """The module's file or its package's folder, relative to `root`; None if not there."""
        top = self.id.partition(":")[0].partition(".")[0]
        # Python takes a package first, but a folder without __init__.py after a module.
        if (root / top / "__init__.py").exists():
            return top
        return next((name for name in (f"{top}.py", top) if (root / name).exists()), None)


@dataclass(frozen=True, slots=True)
class PerPlatform:
    """One text for every platform, or one for each of some."""

    values: dict[str, str]
    """By platform; the key `any` alone when there is one for all."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> PerPlatform:
        """Read a text, or a map from platforms to texts."""
        if not (isinstance(node.value, dict) and node.value):
            return cls({"any": read(str, node, path)})
        for name, entry in node.value.items():
            choice(Node(name, entry.source, entry.line, name), path, PLATFORMS)
        return cls({name: read(str, item, join(path, name)) for name, item in node.value.items()})

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
        _need("path", "path", self.path, "where the build is")

    def found(self, root: Path) -> str:
        """Return the whole build, relative to `root`: a file, an application or a folder.

        That is `path`, with the suffix of a program if it was left out. A Unity player needs the
        files of its folder, and a program of macOS needs its application.

        Raises:
            SettingsError: It is a folder that contains `root`, or the pipeline's builds.
        """
        names = [f"{self.path}{suffix}" for suffix in ("", *_SUFFIXES)]
        name = next((name for name in names if (root / name).exists()), self.path)
        folder, program = PurePath(name).parent, root / name
        app = next((path for path in (folder, *folder.parents) if path.suffix == ".app"), None)
        if app is not None:
            name = app.as_posix()
        elif program.is_file() and _is_player(program):
            name = folder.as_posix()
        if root.resolve().is_relative_to((root / name).resolve()):
            raise SettingsError(
                f"{self.path}: a player is copied with all files of its folder, and that folder, "
                f"{(root / name).resolve()}, contains the project {root.resolve()}; move the "
                "player's files into a folder of their own"
            )
        if (root / "build/env").resolve().is_relative_to((root / name).resolve()):
            raise SettingsError(
                f"{self.path}: the folder {name} is copied whole, and has build/env in it, where "
                "the pipeline puts environments; move the build to builds/, or beside the project"
            )
        return name


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

    def __post_init__(self) -> None:
        _need("url", "fetch", self.url.values, "where the archive is")
        for url in self.url.values.values():
            if _scheme(url) not in URL_SCHEMES:
                text = f"must start with one of {', '.join(URL_SCHEMES)}, got {url!r}"
                raise ContradictionError("url", text)
        if not self.sha256.values:
            fetch = shell_command("pipeline", "env", "fetch", next(iter(self.url.values.values())))
            text = f"the source 'fetch' needs the archive's digest; `{fetch}` finds it out"
            raise ContradictionError("sha256", text)
        for digest in self.sha256.values.values():
            if not _SHA256.match(digest):
                raise ContradictionError("sha256", f"needs 64 hex digits, got {digest!r}")
        if set(self.sha256.values) != set(self.url.values):
            expected = f"the same platforms as 'url' ({', '.join(self.url.values)})"
            text = f"needs {expected}, got {', '.join(self.sha256.values)}"
            raise ContradictionError("sha256", text)
        if self.platform is not None and "any" not in self.url.values:
            raise ContradictionError("platform", "is said by the keys of 'url' already")
        inside = PurePosixPath(self.executable or "x")  # without one, any name that lies inside
        if inside.is_absolute() or ".." in inside.parts:
            text = f"must lie inside the archive, got {self.executable!r}"
            raise ContradictionError("executable", text)

    def archive(self, platform: str) -> tuple[str, str] | None:
        """URL and digest of the archive for a platform; None when there is none."""
        url, digest = self.url.of(platform), self.sha256.of(platform)
        if url is None or digest is None or self.platform not in (None, platform):
            return None
        # Users may write capitals; `hexdigest`, which it is compared with, does not.
        return url, digest.lower()

    def platforms(self) -> tuple[str, ...]:
        """The platforms with an archive; `any` alone when the platform is not known."""
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
        _need("project", "unity", self.project, "where the Unity project is")
        if not _METHOD.match(self.method):
            text = f"needs 'Class.Method' of a script in Assets/Editor, got {self.method!r}"
            raise ContradictionError("method", text)

    @property
    def watched(self) -> tuple[str, ...]:
        """The parts of the project that a build depends on; Unity rewrites the others itself."""
        return tuple(f"{self.project.rstrip('/')}/{name}" for name in _WATCHED)


SOURCES: dict[str, type[EnvironmentParams]] = {
    "builtin": BuiltinSource,
    "path": PathSource,
    "fetch": FetchSource,
    "unity": UnitySource,
    "gymnasium": GymnasiumSource,
    "pettingzoo": PettingzooSource,
    "module": ModuleSource,
}
"""The class of each source."""


def named(text: str, *, is_file: Callable[[str], bool] | None = None) -> EnvironmentParams:
    """Return the environment that a name means, whether it exists or not; refuse other forms.

    `is_file` tells whether a word that could be a simulator is an executable.
    """
    text = text.strip()
    kind, colon, rest = text.partition(":")
    if colon and kind in _IDS:
        if not rest:
            raise SettingsError(f"{kind}: needs an id, as in {_IDS[kind]}")
        return SOURCES[kind](source=kind, id=rest)  # type: ignore[call-arg]  # both have one
    # Before paths, because a URL has slashes, too.
    if "://" in text:
        raise SettingsError(
            f"{text}: a URL is no environment; `pipeline env fetch` downloads the archive and "
            "prints the path to give instead"
        )
    # Before the colon is looked at: a path of Windows has one, too.
    if "/" in text or "\\" in text or text.endswith(_SUFFIXES) or (is_file and is_file(text)):
        return PathSource(path=text)
    if _FUNCTION.match(text):
        return ModuleSource(source="module", id=text)
    if colon or not text:
        near = [prefix for prefix in _IDS if kind and prefix.startswith(kind.lower())]
        near = near or get_close_matches(kind.lower(), _IDS, n=1)
        hint = f"; did you mean '{near[0]}:{rest}'?" if near else "."
        raise SettingsError(f"{text!r} names no environment{hint} Give {FORMS}")
    return BuiltinSource(source="builtin", name=text)


def _is_player(program: Path) -> bool:
    """Return whether a program is a Unity player for Linux or Windows, with files in its folder."""
    data = (f"{program.stem}_Data", f"{program.name}_Data")
    if any((program.parent / name).is_dir() for name in data):
        return True
    return any(program.parent.glob("UnityPlayer.*"))


def _scheme(url: str) -> str:
    """The scheme of a URL, empty if it is none."""
    try:
        return urlsplit(url).scheme
    except ValueError:  # as for `http://[`
        return ""


def _need(key: str, source: str, value: object, description: str) -> None:
    if not value:
        raise ContradictionError(key, f"the source {source!r} needs to know {description}")


def _check_finite(value: Any, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ContradictionError(key, f"must be finite, got {value!r}")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(item, f"{key}.{name}")
    elif isinstance(value, list):
        for item in value:
            _check_finite(item, key)
