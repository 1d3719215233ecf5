"""Parts of a run that are chosen by name: built-in parts, and plug-ins of installed packages.

A package provides a plug-in by an entry point of one of five groups: `pipeline.algorithms`,
`pipeline.reward_signals`, `pipeline.encoders`, `pipeline.simulators`, `pipeline.sinks`. Built-in
parts are in tables of the same form, `name: module:attribute`, instead of in this distribution's
metadata: stages run the code of their checkout, executables contain files without metadata, and an
edited table in metadata would only take effect after a new installation. See
docs/how-to/plugins.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any, Generic, TypeVar

from pipeline.errors import SettingsError

T = TypeVar("T")


@dataclass(eq=False)
class Group(Mapping[str, T], Generic[T]):
    """Built-in parts and plug-ins of one kind by name; a part is imported when it is looked up.

    A look-up of a built-in part does not search the installed packages, which would be slow.
    """

    name: str
    """Group of entry points by which packages register plug-ins."""
    ours: Mapping[str, str]
    """Built-in parts: the text `module:attribute` of each by its name."""
    _: KW_ONLY
    base: type | None = None
    """Base class of all plug-ins; None for parts that are not classes."""
    mlagents_group: str = ""
    """ML-Agents' group of entry points for parts of the same kind, which cannot be used here."""

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in self._plugins()

    def __iter__(self) -> Iterator[str]:
        yield from self.ours
        # Plug-ins are sorted, so that lists in messages do not depend on the order of installation.
        yield from sorted(set(self._plugins()) - set(self.ours))

    def __len__(self) -> int:
        return len({*self.ours, *self._plugins()})

    def __getitem__(self, name: str) -> T:
        """Import and return the part `name`.

        Raises:
            KeyError: No part has this name.
            SettingsError: The part cannot be imported, has the wrong type, or is ambiguous.
        """
        return self.load(name)

    def load(self, name: str, *, package: str = "") -> T:
        """Return the part `name`; a module with a leading dot is relative to `package`."""
        if name in self.ours:
            # Built-in names win, so that an installed package cannot change what a file means.
            part: T = load(self.ours[name], package=package)
            return part
        point = self.entry_point(name)
        try:
            loaded: T = point.load()
        # A third-party package may raise any exception during its import.
        except Exception as error:
            raise self._unusable(point, f"{type(error).__name__}: {error}") from error
        if self.base is not None and not (
            isinstance(loaded, type) and issubclass(loaded, self.base)
        ):
            raise self._unusable(point, f"{point.value} is not a subclass of {self.base.__name__}")
        return loaded

    def entry_point(self, name: str) -> metadata.EntryPoint:
        """Return the entry point of a plug-in.

        Raises:
            KeyError: No plug-in has this name.
            SettingsError: Several packages provide this name.
        """
        points = self._plugins()[name]
        # Choosing one package silently would depend on the order of folders in sys.path.
        if len(points) > 1:
            names = " and ".join(sorted(brought_by(point)[0] for point in points))
            raise SettingsError(f"{self.name}: {names} both have {name!r}; uninstall one of them")
        return points[0]

    @property
    def more(self) -> str:
        """Text on how to add plug-ins, for the end of an error that lists the known names."""
        text = f". Packages with an entry point in {self.name!r} add more: docs/how-to/plugins.md"
        points = all_of(self.mlagents_group) if self.mlagents_group else []
        # ML-Agents' own trainers are in the same group, but they are built in here.
        foreign = [point for point in points if brought_by(point)[0] != "mlagents"]
        if foreign:
            named = ", ".join(
                f"{point.name!r} of {' '.join(brought_by(point))}" for point in foreign
            )
            guide = "docs/how-to/migrating.md"
            text += f". These are written for ML-Agents and must be ported ({guide}): {named}"
        return text

    def versions(self, *names: str) -> dict[str, str]:
        """Return name and version of each package that provides a plug-in among `names`."""
        # Only the metadata is read; the plug-in itself is not imported.
        points = (self.entry_point(name) for name in names if name not in self.ours)
        return dict(sorted(brought_by(point) for point in points))

    @property
    def has_plugins(self) -> bool:
        """Whether an installed package provides a plug-in of this kind."""
        return bool(self._plugins())

    def _plugins(self) -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
        # The path is part of the cache's key: tests and stages extend it.
        return _installed(self.name, tuple(sys.path))

    def _unusable(self, point: metadata.EntryPoint, reason: str) -> SettingsError:
        return SettingsError(
            f"{self.name}: {point.name!r} of {' '.join(brought_by(point))} cannot be used "
            f"({reason}); install another version, or uninstall it"
        )


def load(path: str, *, package: str = "") -> Any:
    """Return the object at `module:attribute`; a leading dot means relative to `package`."""
    module, _, attribute = path.partition(":")
    return getattr(
        import_module(package + module[1:] if module.startswith(".") else module), attribute
    )


def all_of(group: str) -> list[metadata.EntryPoint]:
    """Return every installed entry point of a group; several packages may have the same name."""
    points = _installed(group, tuple(sys.path))
    return [point for name in sorted(points) for point in points[name]]


def brought_by(point: metadata.EntryPoint) -> tuple[str, str]:
    """Return name and version of the package that provides a plug-in."""
    return ("", "") if point.dist is None else (point.dist.name, point.dist.version)


@cache  # `path` is only a part of the key: it decides what is installed
def _installed(group: str, path: tuple[str, ...]) -> dict[str, tuple[metadata.EntryPoint, ...]]:  # noqa: ARG001
    """Return the installed entry points of a group by name; several packages may share a name."""
    points_of: dict[str, dict[str, metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=group):
        # A distribution in two folders of the path counts once, from the first folder.
        points_of.setdefault(point.name, {}).setdefault(brought_by(point)[0], point)
    return {name: tuple(points.values()) for name, points in points_of.items()}
