"""Keys of the present format that test_run_settings.py does not write and read again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from single_keys import CRITERIA, SAMPLERS, at, holds, mapping_of, nested

if TYPE_CHECKING:
    from pathlib import Path

BEHAVIOR = "behaviors.B"

# Key path and value.
TODAY: list[tuple[str, Any]] = [
    ("torch_settings.device", "cpu"),
    *(
        (f"{BEHAVIOR}.{section}", {"demo_path": demos})
        for section in ("reward_signals.gail", "behavioral_cloning")
        for demos in (
            "a.demo",
            ["a.demo", "folder"],
            ["a.demo", {"path": "folder", "weight": 2.5}],
            [{"path": "a.demo", "weight": 2.5}],
        )
    ),
]

# Keys that are read and take effect under another name.
RENAMED: list[tuple[str, Any, str, Any]] = [
    (
        f"{BEHAVIOR}.reward_signals.{name}",
        {"encoding_size": 9, **more},
        f"{BEHAVIOR}.reward_signals.{name}.network_settings.hidden_units",
        9,
    )
    for name, more in (("curiosity", {}), ("rnd", {}), ("gail", {"demo_path": "a.demo"}))
] + [
    (f"{BEHAVIOR}.framework", "pytorch", f"{BEHAVIOR}.trainer_type", "ppo"),
    (
        f"{BEHAVIOR}.network_settings.conditioning_type",
        "none",
        f"{BEHAVIOR}.network_settings.goal_conditioning_type",
        "hyper",
    ),
]


@pytest.mark.parametrize(("path", "value"), TODAY)
def test_a_key_of_today_arrives(tmp_path: Path, path: str, value: Any) -> None:
    assert holds(at(path, mapping_of(nested(path, value), tmp_path)), value)


@pytest.mark.parametrize(("path", "value", "place", "got"), RENAMED)
def test_a_key_with_another_name_today_arrives_there(
    tmp_path: Path, path: str, value: Any, place: str, got: Any
) -> None:
    assert at(place, mapping_of(nested(path, value), tmp_path)) == got


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_of_today_arrives(tmp_path: Path, kind: str) -> None:
    sampler = {"sampler_type": kind, "sampler_parameters": {"seed": 9, **SAMPLERS[kind]}}
    parameters = mapping_of({"environment_parameters": {"p": sampler}}, tmp_path)
    assert holds(parameters["environment_parameters"]["p"]["curriculum"][0]["value"], sampler)


def test_a_lesson_of_today_arrives(tmp_path: Path) -> None:
    lessons = [
        {"name": "first", "value": 0.5, "completion_criteria": CRITERIA},
        {"name": "last", "value": 0.75},
    ]
    document = {"environment_parameters": {"p": {"curriculum": lessons}}, "behaviors": {"B": {}}}
    first, last = mapping_of(document, tmp_path)["environment_parameters"]["p"]["curriculum"]
    assert (first["name"], first["completion_criteria"]) == ("first", CRITERIA)
    assert last["completion_criteria"] is None
    assert at("value.sampler_parameters.value", last) == 0.75
