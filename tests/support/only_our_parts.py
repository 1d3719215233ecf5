"""Hides installed plug-ins, so that no test depends on them."""

import os
import sys
from importlib import metadata
from pathlib import Path

from example_plugin_site import distribution


def hide_plugins(folder: Path) -> None:
    """Write metadata without entry points into `folder`, and put `folder` first on the path.

    Python takes a distribution from the first folder of the path that has it, in this process and
    in processes that inherit PYTHONPATH. Packages in folders before `folder` stay visible.
    """
    hidden = {
        installed.name: installed.version
        for installed in metadata.distributions()
        for point in installed.entry_points
        if point.group.startswith(("pipeline.", "mlagents."))
    }
    for name, version in hidden.items():
        distribution(folder, name, version, groups={})
    if hidden:
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = search_path(folder)


def search_path(*first: Path) -> str:
    """Return a PYTHONPATH of `first`, followed by this process's PYTHONPATH."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])
