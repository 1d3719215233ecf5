"""`environments.<name>`: what every source of environments has; the kinds are in `sources`."""

from dataclasses import dataclass, fields

from pipeline.settings.nodes import Node, fail, join
from pipeline.settings.reader import choice, entries_of, read_dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentParams:
    """`environments.<name>`: where an environment comes from."""

    source: str
    """The kind: a key of `sources.SOURCES`."""
    args: tuple[str, ...] = ()
    """Arguments for the executable."""

    @staticmethod
    def from_node(node: Node, path: str) -> "EnvironmentParams":
        """The environment of the class that its `source` names.

        Raises:
            SettingsError: There is no such source, or a key does not belong to it.
        """
        from pipeline.settings.sources import SOURCES  # which are made from this class

        entries = entries_of(node, path)
        if "source" not in entries:
            raise fail(node, path, "the key 'source' is required")
        source = choice(entries["source"], join(path, "source"), (*SOURCES, "editor"))
        if source == "editor":
            raise fail(
                entries["source"],
                join(path, "source"),
                "'editor' waits until someone presses Play, so nothing that came of it could be "
                "made again; train with `pipeline learn` without --env, or let the source 'unity' "
                "build it",
            )
        own = {item.name for item in fields(SOURCES[source])}
        for key, value in entries.items():
            owners = [name for name, cls in SOURCES.items() if key in {f.name for f in fields(cls)}]
            if key not in own and owners:
                listed = " and ".join(repr(name) for name in owners)
                raise fail(
                    value,
                    join(path, key),
                    f"belongs to the source {listed}, but the source is {source!r}",
                )
        read: EnvironmentParams = read_dataclass(SOURCES[source], node, path)
        return read
