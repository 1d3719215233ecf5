"""Where an environment comes from: one class for each `source`, and environments by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
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
"""Operating systems of Unity builds."""
PLATFORMS: tuple[str, ...] = get_args(Platform)
URL_SCHEMES = ("https", "http", "file")
"""Schemes that the URL of an archive may have."""

# Unity players on Linux, Windows and macOS have these suffixes.
_SUFFIXES = (".x86_64", ".x86", ".exe", ".app")
# An example of an environment's name for each library that has ids, by the name's prefix.
_IDS = {"gymnasium": "gymnasium:CartPole-v1", "pettingzoo": "pettingzoo:mpe2.simple_tag_v3"}
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)
FORMS = (
    "a path (./Game), a simulator (`pipeline env list`), gymnasium:ID, pettingzoo:ID or "
    "module:function (my_env:make of my_env.py)"
)
"""The ways to name an environment, for error messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentParams:
    """`environments.<name>`: where an environment comes from."""

    source: str
    """The kind of source: `builtin`, `gymnasium`, `pettingzoo`, `module`, `path`, `fetch` or
    `unity`."""
    args: tuple[str, ...] = ()
    """Arguments for the environment's executable."""

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
            text = "'editor' waits until someone presses Play, so its results could not be "
            text += "reproduced; train with `pipeline learn` without --env, or use the source "
            text += "'unity' to build the project"
            raise fail(entries["source"], join(path, "source"), text)
        # The following errors help more than "unknown key".
        for key, value in entries.items():
            owners = [name for name, cls in SOURCES.items() if key in setting_hints(cls)]
            text = ""
            if key == "max_ratio":
                text = "is an old key; remove it: max_unpacked_gb limits the unpacked size now"
            elif owners and source not in owners:
                listed = " and ".join(map(repr, owners))
                text = f"belongs to the source {listed}, but the source is {source!r}"
            if text:
                raise fail(value, join(path, key), text)
        environment: EnvironmentParams = read_dataclass(SOURCES[source], node, path)
        return environment

    def packed(self) -> tuple[str, dict[str, Any]] | None:
        """Return the name and options of the simulator to pack; None for an executable."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltinSource(EnvironmentParams):
    """A built-in simulator."""

    name: str | None = None
    """Name of the simulator; null if this environment's own name is the simulator's name."""

    def packed(self) -> tuple[str, dict[str, Any]]:
        """Return the simulator's name, and no options."""
        return self.name or "", {}


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgeSource(EnvironmentParams):
    """Settings that environments of Gymnasium, of PettingZoo and of your own modules share."""

    id: str
    """The environment's name in its library."""
    copies: Count | None = 16
    """Number of environments in one process, which step together."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""
    visual: Literal["auto", "always", "never"] = "auto"
    """Which image-shaped observations become visual; auto: images of at least 20x20 pixels."""
    action_scale: Positive | None = None
    """For an action space without bounds: the value that the policy's action 1 stands for; null
    refuses such spaces."""

    def __post_init__(self) -> None:
        if "render_mode" in self.kwargs:
            text = "cannot be set, because environments draw no pictures here"
            raise ContradictionError("kwargs.render_mode", text)
        _check_finite(self.kwargs, "kwargs")

    def packed(self) -> tuple[str, dict[str, Any]]:
        """Return the bridge's name, and the id, the number of copies and all changed options."""
        copies = {} if self.copies is None else {"n_agents": self.copies}
        # Options at their default are left out, so that a new option does not change old builds.
        default = type(self)(source=self.source, id=self.id, copies=self.copies, args=self.args)
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = {key: item for key, item in values.items() if item != getattr(default, key)}
        return self.source, {"id": self.id, **copies, **changed}


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumSource(BridgeSource):
    """An environment registered with Gymnasium."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PettingzooSource(BridgeSource):
    """An environment of PettingZoo."""

    copies: Count | None = 4
    """Number of environments in one process, each with all its agents."""
    api: Literal["auto", "parallel", "aec"] = "auto"
    """PettingZoo's interface to use; auto: parallel if the environment has this interface."""
    teams: Any = "none"
    """`none`, `index` (a team for each agent), or a map from agents' names to team numbers from
    0."""
    groups: Literal["none", "all", "behavior"] = "none"
    """Which agents of an environment are in one group and share the group's reward: none, all, or
    all agents of a behavior."""

    def __post_init__(self) -> None:
        # super() would fail in a class that `slots=True` has replaced by a copy.
        BridgeSource.__post_init__(self)
        numbers = self.teams.values() if isinstance(self.teams, dict) else [None]
        is_map = all(type(number) is int and number >= 0 for number in numbers)
        if self.teams not in ("none", "index") and not is_map:
            expected = "none, index, or a map from agents to whole numbers"
            raise ContradictionError("teams", f"must be {expected}, got {self.teams!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSource(PettingzooSource):
    """An environment that a function or class of a module makes; `id` is `module:function`."""

    copies: Count | None = None
    """Number of a simulator's agents, or of environments in one process; null for the simulator's
    default, or for 16 environments."""

    def __post_init__(self) -> None:
        PettingzooSource.__post_init__(self)
        if not _FUNCTION.match(self.id):
            raise ContradictionError("id", f"needs the form module:function, got {self.id!r}")

    def found(self, root: Path) -> str | None:
        """Return the module's file or its package's folder, relative to `root`; None if absent."""
        # The first part of `package.module:function` decides what Python imports.
        top = self.id.partition(":")[0].partition(".")[0]
        # The order is that of Python's imports: a folder without __init__.py is last.
        paths = {f"{top}/__init__.py": top, f"{top}.py": f"{top}.py", top: top}
        return next((name for path, name in paths.items() if (root / path).exists()), None)


@dataclass(frozen=True, slots=True)
class PerPlatform:
    """A setting with one text for all platforms, or with a text for each platform."""

    values: dict[str, str]
    """The text for each platform; the only key is `any` if one text is for all platforms."""

    @classmethod
    def from_node(cls, node: Node, path: str) -> PerPlatform:
        """Read a text, or a map from platforms to texts."""
        if not (isinstance(node.value, dict) and node.value):
            return cls({"any": read(str, node, path)})
        for name, entry in node.value.items():
            choice(replace(entry, value=name), path, PLATFORMS)
        return cls({name: read(str, item, join(path, name)) for name, item in node.value.items()})

    def to_plain(self) -> Any:
        """Return the plain text or map that `from_node` reads back."""
        return self.values.get("any", self.values)

    def of(self, platform: str) -> str | None:
        """Return the text for a platform; None if there is none."""
        return self.values.get("any", self.values.get(platform))


_NOT_GIVEN = PerPlatform({})


@dataclass(frozen=True, kw_only=True, slots=True)
class PathSource(EnvironmentParams):
    """An environment that is an existing build."""

    source: Literal["path"] = "path"
    """The kind of source: an existing build."""
    path: str = ""
    """The program, its folder, or its name without suffix; relative to params.yaml."""

    def __post_init__(self) -> None:
        _need("path", "path", self.path, "where the build is")

    def found(self, root: Path) -> str:
        """Return the program, or the folder of a Unity player (`.app` on macOS), below `root`.

        Raises:
            SettingsError: The build is a folder that contains `root` or the pipeline's own builds.
        """
        # Unity's own settings name a build without its suffix, which differs between platforms.
        names = [f"{self.path}{suffix}" for suffix in ("", *_SUFFIXES)]
        name = next((name for name in names if (root / name).exists()), self.path)
        folder, program = PurePath(name).parent, root / name
        app = next((path for path in (folder, *folder.parents) if path.suffix == ".app"), None)
        if app is not None:
            name = app.as_posix()
        elif program.is_file() and _is_player(program):
            name = folder.as_posix()
        # The whole folder is copied, and it must not contain the copy itself.
        copied, project = (root / name).resolve(), root.resolve()
        if project.is_relative_to(copied):
            raise SettingsError(
                f"{self.path}: a player is copied together with all files of its folder, but that "
                f"folder, {copied}, contains the project {project}; move the player's files into a "
                "folder of their own"
            )
        if (root / "build/env").resolve().is_relative_to(copied):
            raise SettingsError(
                f"{self.path}: the folder {name} is copied completely, but contains build/env, "
                "where the pipeline stores environments; move the build to builds/, or out of the "
                "project"
            )
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSource(EnvironmentParams):
    """An archive to download, verified by its digest."""

    source: Literal["fetch"] = "fetch"
    """The kind of source: an archive."""
    url: PerPlatform = _NOT_GIVEN
    """Address of the archive (http, https or file): one for all platforms, or one for each
    platform."""
    sha256: PerPlatform = _NOT_GIVEN
    """Hex digest of the archive: one for all platforms, or one for each platform."""
    platform: Platform | None = None
    """The platform of a single archive; null if unknown."""
    executable: str | None = None
    """Path of the program inside the archive; null if the archive has only one program."""
    max_unpacked_gb: Positive = 16
    """Maximum size of the unpacked archive, in 10^9 bytes; a larger archive is refused."""

    def __post_init__(self) -> None:
        _need("url", "fetch", self.url.values, "where the archive is")
        for url in self.url.values.values():
            if _scheme(url) not in URL_SCHEMES:
                text = f"must start with one of {', '.join(URL_SCHEMES)}, got {url!r}"
                raise ContradictionError("url", text)
        if not self.sha256.values:
            fetch = shell_command("pipeline", "env", "fetch", next(iter(self.url.values.values())))
            text = f"the source 'fetch' needs the archive's digest; `{fetch}` prints it"
            raise ContradictionError("sha256", text)
        for digest in self.sha256.values.values():
            if not re.fullmatch("[0-9a-fA-F]{64}", digest):
                raise ContradictionError("sha256", f"needs 64 hex digits, got {digest!r}")
        # An archive without a digest could change unnoticed, and the results with it.
        if set(self.sha256.values) != set(self.url.values):
            expected = f"the same platforms as 'url' ({', '.join(self.url.values)})"
            text = f"needs {expected}, got {', '.join(self.sha256.values)}"
            raise ContradictionError("sha256", text)
        if self.platform is not None and "any" not in self.url.values:
            text = "the keys of 'url' give the platforms already; remove 'platform'"
            raise ContradictionError("platform", text)
        # The path is joined to the folder of the unpacked archive, and must not lead out of it.
        inside = PurePosixPath(self.executable or "")
        if inside.is_absolute() or ".." in inside.parts:
            text = f"must be a path inside the archive, got {self.executable!r}"
            raise ContradictionError("executable", text)

    def archive(self, platform: str) -> tuple[str, str] | None:
        """Return the URL and digest of the archive for a platform; None if there is no archive."""
        url, digest = self.url.of(platform), self.sha256.of(platform)
        if url is None or digest is None or self.platform not in (None, platform):
            return None
        # Users may write capitals, but the digest is compared with a `hexdigest` in lower case.
        return url, digest.lower()

    def platforms(self) -> tuple[str, ...]:
        """Return the platforms with an archive; `any` for one archive without a platform."""
        return (self.platform,) if self.platform else tuple(self.url.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitySource(EnvironmentParams):
    """A Unity project, built by the Unity Editor in batch mode."""

    source: Literal["unity"] = "unity"
    """The kind of source: a Unity project."""
    project: str = ""
    """The project's folder, relative to params.yaml."""
    method: str = "PipelineBuild.Build"
    """The static C# method that builds the project; the default method is in
    workflow/unity/PipelineBuild.cs."""
    editor: str | None = None
    """Path of the Unity Editor's program; null for Unity Hub's Editor of the project's version,
    else `unity-editor` on PATH. The variable PIPELINE_UNITY_EDITOR wins over this key."""
    build_args: tuple[str, ...] = ()
    """More arguments for the Editor, for example `-buildTarget`."""
    timeout_s: Positive = 3600
    """Time limit of the build in seconds."""

    def __post_init__(self) -> None:
        _need("project", "unity", self.project, "where the Unity project is")
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", self.method):
            text = f"needs 'Class.Method' of a script in Assets/Editor, got {self.method!r}"
            raise ContradictionError("method", text)

    @property
    def watched(self) -> tuple[str, ...]:
        """The project's folders on which a build depends; Unity writes all other folders itself."""
        folders = ("Assets", "Packages", "ProjectSettings")
        return tuple(f"{self.project.rstrip('/')}/{name}" for name in folders)


SOURCES: dict[str, type[EnvironmentParams]] = {
    "builtin": BuiltinSource,
    "path": PathSource,
    "fetch": FetchSource,
    "unity": UnitySource,
    "gymnasium": GymnasiumSource,
    "pettingzoo": PettingzooSource,
    "module": ModuleSource,
}
"""The settings class for each value of `source`."""


def named(text: str, *, is_file: Callable[[str], bool] | None = None) -> EnvironmentParams:
    """Return the environment that a name in one of the `FORMS` stands for; refuse other texts.

    The environment need not exist. `is_file` tells whether a word that could be a simulator's name
    is an executable.
    """
    text = text.strip()
    kind, colon, rest = text.partition(":")
    if colon and kind in _IDS:
        if not rest:
            raise SettingsError(f"{kind}: an id is missing; write for example {_IDS[kind]}")
        return SOURCES[kind](source=kind, id=rest)  # type: ignore[call-arg]  # both have `id`
    # URLs are tested before paths, because a URL also has slashes.
    if "://" in text:
        remedy = "`pipeline env fetch` downloads the archive and prints the path to use"
        raise SettingsError(f"{text}: a URL is not an environment; {remedy}")
    # Paths are tested before the forms with a colon, because a Windows path also has one.
    if "/" in text or "\\" in text or text.endswith(_SUFFIXES) or (is_file and is_file(text)):
        return PathSource(path=text)
    if _FUNCTION.match(text):
        return ModuleSource(source="module", id=text)
    if colon or not text:
        # `gym:CartPole-v1` means Gymnasium; a prefix that is no abbreviation may be misspelt.
        near = [prefix for prefix in _IDS if kind and prefix.startswith(kind.lower())]
        near = near or get_close_matches(kind.lower(), _IDS, n=1)
        hint = f"; did you mean '{near[0]}:{rest}'?" if near else "."
        raise SettingsError(f"{text!r} is not an environment{hint} Give {FORMS}")
    return BuiltinSource(source="builtin", name=text)


def _is_player(program: Path) -> bool:
    """Return whether a program is a Unity player for Linux or Windows, by files next to it."""
    data = (program.with_name(f"{name}_Data") for name in (program.stem, program.name))
    return any(path.is_dir() for path in data) or any(program.parent.glob("UnityPlayer.*"))


def _scheme(url: str) -> str:
    try:
        return urlsplit(url).scheme
    except ValueError:  # for example, `http://[` raises it
        return ""


def _need(key: str, source: str, value: object, description: str) -> None:
    if not value:
        raise ContradictionError(key, f"the source {source!r} needs this key: {description}")


# JSON, in which options are packed, has no NaN and no infinity (RFC 8259, section 6).
def _check_finite(value: Any, key: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ContradictionError(key, f"must be finite, got {value!r}")
    for name, item in value.items() if isinstance(value, dict) else ():
        _check_finite(item, f"{key}.{name}")
    for item in value if isinstance(value, list) else ():
        _check_finite(item, key)
