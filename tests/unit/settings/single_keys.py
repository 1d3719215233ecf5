"""Whole configuration files from a single key, and what is read from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.settings import dump_yaml, load_run_settings, to_mapping

if TYPE_CHECKING:
    from pathlib import Path

SAMPLERS = {
    "uniform": {"min_value": 0.25, "max_value": 0.5},
    "gaussian": {"mean": 0.25, "st_dev": 0.5},
    "multirangeuniform": {"intervals": [[0.25, 0.5]]},
    "constant": {"value": 0.25},
}
CRITERIA = {
    "behavior": "B",
    "measure": "progress",
    "threshold": 0.25,
    "min_lesson_length": 9,
    "signal_smoothing": False,
    "require_reset": True,
}


def at(path: str, mapping: Any) -> Any:
    for key in path.split("."):
        mapping = mapping[key]
    return mapping


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def mapping_of(document: dict[str, Any], folder: Path, **paths: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    path.write_text(dump_yaml(document))
    return to_mapping(load_run_settings(path, **paths))


def holds(got: Any, stated: Any) -> bool:
    if isinstance(stated, dict):
        return all(holds(got[key], value) for key, value in stated.items())
    return bool(got == stated)
