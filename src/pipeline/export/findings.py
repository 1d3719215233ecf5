"""One thing that a check of a model objects to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing about a model that the loader, or publishing, objects to."""

    severity: Severity
    """As the Unity Inspector shows it; at run time only errors stop the model."""
    rule: str
    """Number of the loader's check (1 to 20, v2-a to v2-d), or the name of a publishing rule."""
    message: str
    """What is wrong."""

    def __str__(self) -> str:
        return f"{self.severity} (rule {self.rule}): {self.message}"


def warning(rule: str, message: str) -> Finding:
    """A finding that the Inspector shows in yellow."""
    return Finding(severity="warning", rule=rule, message=message)


def error(rule: str, message: str) -> Finding:
    """A finding that stops the model."""
    return Finding(severity="error", rule=rule, message=message)
