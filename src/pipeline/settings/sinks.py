"""The sinks that a run may be given by name: in `params.yaml`, `--track`, or from Python."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

from pipeline.plugins import Group
from pipeline.settings.nodes import fail
from pipeline.settings.reader import choice, display

if TYPE_CHECKING:
    from pipeline.settings.nodes import Node

_OURS = ("jsonl", "mlflow", "stats_writers", "tensorboard", "wandb")
SINKS: Group[Any] = Group("pipeline.sinks", {name: f".{name}:for_run" for name in _OURS})
"""Functions of a `TrackedRun` by name; ours lie in `pipeline.tracking.sinks`."""

_EXTRAS = {"mlflow": "train", "tensorboard": "train", "wandb": "wandb"}
"""Our sinks that need a package, which is called as they are, and the extra that installs it."""


class SinkNames(tuple[str, ...]):
    """Names of sinks that are installed, each once."""

    __slots__ = ()

    @classmethod
    def from_node(cls, node: Node, path: str) -> Self:
        """Read a list of names.

        Raises:
            SettingsError: Nothing is called so, or it needs a package that is not installed.
        """
        if not isinstance(node.value, list):
            raise fail(node, path, f"needs a list of sinks, got {display(node)}")
        names = [choice(item, path, SINKS) for item in node.value]
        for name, item in zip(names, node.value, strict=True):
            # Looked for and not imported: these packages take seconds.
            if name in _EXTRAS and find_spec(name) is None:
                remedy = f"pip install 'rl-pipeline[{_EXTRAS[name]}]', or leave {name} out"
                raise fail(item, path, f"the package {name!r} is not installed; {remedy}")
        return cls(dict.fromkeys(names))
