"""Reproducible reinforcement learning for game and robot agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.trainer.api import train

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def __getattr__(name: str) -> Any:
    """Import the trainer, and with it torch, only when it is asked for."""
    if name == "train":
        from pipeline.api import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
