"""Parts of a run that are chosen by name: built-in parts, and plug-ins of installed packages.

A package provides a plug-in by an entry point of one of five groups: `pipeline.algorithms`,
`pipeline.reward_signals`, `pipeline.encoders`, `pipeline.simulators`, `pipeline.sinks`. Built-in
parts are in tables of the same form, `name: module:attribute`, instead of in this distribution's
metadata: stages run the code of their checkout, executables contain files without metadata, and an
edited table in metadata would only take effect after a new installation. A class in a file of the
current folder is named `module:Class`, and needs no package. See docs/how-to/plugins.md.
"""

import ast
import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pipeline.errors import PipelineError, SettingsError, where
from pipeline.files import sha256_of

T = TypeVar("T")


@dataclass(eq=False)
class Group(Mapping[str, T], Generic[T]):
    """Built-in parts and plug-ins of one kind by name; a part is imported when it is looked up.

    A look-up of a built-in part does not search the installed packages, which would be slow.
    """

    name: str
    """Group of entry points by which packages register plug-ins."""
    ours: Mapping[str, str]
    """Built-in parts: the text `module:attribute` of each part, by the part's name."""
    _: KW_ONLY
    base: type | None = None
    """Base class of all plug-ins; None for parts that are not classes."""
    mlagents_group: str = ""
    """ML-Agents' group of entry points for parts of the same kind, which cannot be used here."""
    takes_files: bool = False
    """Whether `module:Class` names a part in a file of the user."""

    # Type hints compare and hash groups. Both use the identity, because a comparison by content
    # would import every part.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __contains__(self, name: object) -> bool:
        return name in self.ours or self._is_in_file(name) or name in self._plugins()

    def __iter__(self) -> Iterator[str]:
        yield from self.ours
        # Plug-ins are sorted, so that lists in messages do not depend on the order of installation.
        yield from sorted(set(self._plugins()) - set(self.ours))

    def __len__(self) -> int:
        return len({*self.ours, *self._plugins()})

    def __getitem__(self, name: str) -> T:
        """Import and return the part `name`; KeyError or SettingsError if it cannot be used."""
        return self.load(name)

    def load(self, name: str, *, package: str = "") -> T:
        """Return the part `name`; a module with a leading dot is relative to `package`."""
        if name in self.ours:
            # Built-in parts come first, so that an installed package cannot change the meaning of
            # a configuration.
            part: T = load(self.ours[name], package=package)
            return part
        if self._is_in_file(name):
            return self._from_file(name)
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
        """Return the entry point of a plug-in; refuse a name that several packages provide."""
        points = self._plugins()[name]
        # None of the packages is chosen, because the choice would depend on the order of sys.path.
        if len(points) > 1:
            names = " and ".join(sorted(brought_by(point)[0] for point in points))
            raise SettingsError(
                f"{self.name}: {names} both have a plug-in {name!r}; uninstall one of them"
            )
        return points[0]

    @property
    def more(self) -> str:
        """Text on how plug-ins are added, for the end of an error that lists the known names."""
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
        """Return the versions of the plug-ins' packages, and the digests of their files."""
        versions: dict[str, str] = {}
        for name in names:
            if self._is_in_file(name):
                versions |= digests(name)
            elif name not in self.ours:
                versions |= [brought_by(self.entry_point(name))]
        return dict(sorted(versions.items()))

    @property
    def has_plugins(self) -> bool:
        """Whether an installed package provides a plug-in of this kind."""
        return bool(self._plugins())

    def _is_in_file(self, name: object) -> bool:
        return self.takes_files and isinstance(name, str) and ":" in name

    def _from_file(self, name: str) -> T:
        loaded = named(name)
        kind: Any = loaded if self.base is None else getattr(loaded, "settings_class", None)
        if not (isinstance(kind, type) and issubclass(kind, self.base or object)):
            which = self.base and f", or its `settings_class` is not a {self.base.__name__}"
            raise SettingsError(f"{name}: is not a class{which or ''}: see docs/how-to/plugins.md")
        return cast("T", kind)

    def _plugins(self) -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
        # The path is part of the cache's key, because tests and stages extend `sys.path`.
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


def named(path: str, form: str = "module:Class, as in my_nets:Encoder for my_nets.py") -> Any:
    """Return the function or class `module:name`; the current folder is searched last.

    `form` is the form of such names, for an error message.
    """
    module, _, attribute = path.partition(":")
    current_folder = str(Path.cwd())
    # The folder is appended, so that a file in it does not hide an installed package.
    if current_folder not in sys.path:
        sys.path.append(current_folder)
    try:
        loaded = import_module(module)
    except Exception as error:
        # The remedy depends on whether the user's module is missing, or a module that it imports.
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and (module == missing or module.startswith(f"{missing}.")):
            near = get_close_matches(module, (file.stem for file in Path().glob("*.py")), n=1)
            remedy = f"did you mean '{near[0]}:{attribute}'?" if near else f"write {form}"
            raise SettingsError(
                f"{path}: there is no {missing.replace('.', '/')}.py in the current folder, and no "
                f"installed module '{missing}'; {remedy}"
            ) from error
        raise SettingsError(f"{path}: the module cannot be imported: {where(error)}") from error
    make = getattr(loaded, attribute, None)
    if not callable(make):
        names = [name for name, value in vars(loaded).items() if callable(value)]
        near = get_close_matches(attribute, names, n=1)
        hint = f"; did you mean '{module}:{near[0]}'?" if near else ""
        file = getattr(loaded, "__file__", None) or f"the module {module}"
        raise SettingsError(f"{path}: {file} has no function or class '{attribute}'{hint}")
    return make


def class_for(chosen: str, made_by: str) -> Any:
    """Return the class `chosen` if it is `module:Class`, or else the class at `made_by`."""
    try:
        # The name of the package is put together, because `dag.sources` counts a module's name in a
        # string as an import: every stage would depend on the algorithms.
        return named(chosen) if ":" in chosen else load(made_by, package=f"{__package__}.algos.")
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"names the class {made_by!r}, which cannot be imported ({error})"
        ) from error


@contextlib.contextmanager
def user_code(name: str, what: str = "fails") -> Iterator[None]:
    """Raise an exception of the user's code in the block as a SettingsError of one line."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        raise SettingsError(f"{name}: {what}: {where(error)}") from error


def digests(path: str) -> dict[str, str]:
    """Return the digests of the file of `module:Class` and of its imports in the current folder.

    The keys are relative paths; an imported package counts with all files. For a class of an
    installed package, return the package's version by its name.
    """
    root, waiting, found = Path.cwd(), [path.partition(":")[0]], {}
    while waiting:
        top = root / waiting.pop().partition(".")[0]
        for file in sorted(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]:
            name = file.relative_to(root).as_posix()
            if name in found or not file.is_file():
                continue
            found[name] = sha256_of(file)[:16]
            # A faulty file is reported when it is imported.
            with contextlib.suppress(SyntaxError, ValueError):
                for node in ast.walk(ast.parse(file.read_bytes())):
                    if isinstance(node, ast.Import):
                        waiting += [alias.name for alias in node.names]
                    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                        waiting.append(node.module)
    if not found:
        names = metadata.packages_distributions().get(path.partition(":")[0].partition(".")[0], ())
        return {name: metadata.version(name) for name in names}
    return found


def all_of(group: str) -> list[metadata.EntryPoint]:
    """Return every installed entry point of a group; entry points may have the same name."""
    points = _installed(group, tuple(sys.path))
    return [point for name in sorted(points) for point in points[name]]


def brought_by(point: metadata.EntryPoint) -> tuple[str, str]:
    """Return the name and the version of the package that provides a plug-in; empty if unknown."""
    return ("", "") if point.dist is None else (point.dist.name, point.dist.version)


@cache  # `path` is only a part of the cache's key: it decides which packages are found
def _installed(group: str, path: tuple[str, ...]) -> dict[str, tuple[metadata.EntryPoint, ...]]:  # noqa: ARG001
    """Return the installed entry points of a group by name; entry points may share a name."""
    points_of: dict[str, dict[str, metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=group):
        # A distribution in two folders of the path counts once, from the first folder.
        points_of.setdefault(point.name, {}).setdefault(brought_by(point)[0], point)
    return {name: tuple(points.values()) for name, points in points_of.items()}
