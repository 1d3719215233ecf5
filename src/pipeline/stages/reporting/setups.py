"""What experiments were trained with, and by which settings they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from pipeline.settings import RunSettings, to_mapping
from pipeline.settings.experiments import ExperimentParams

_NO_PART_OF_RESULTS = (
    *("trainer_type", "checkpoint_interval", "keep_checkpoints", "even_checkpoints"),
    *("seed", "base_port"),
)
_MOST_DIFFERENCES = 6


def setup_of(
    settings: RunSettings, behavior: str, experiment: ExperimentParams | None = None
) -> dict[str, Any]:
    """Return what a behavior's results depend on, with what params.yaml says of its experiment."""
    full = to_mapping(settings)
    setup = dict(full["behaviors"].get(behavior) or full["default_settings"] or {})
    if experiment is not None:
        setup["pretrain"] = experiment.pretrain and asdict(experiment.pretrain)
        setup["learners"] = experiment.learners
    return setup | {key: full[key] for key in ("environment_parameters", "env_settings")}


def against_first(setups: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return, of each experiment but the first, how its setup differs from the first's."""
    texts: dict[str, str] = {}
    first: Mapping[str, Any] | None = None
    for name, setup in setups.items():
        if first is None:
            first = setup
            continue
        differences = _differences(first, setup)
        shown = [*islice(differences, _MOST_DIFFERENCES)]
        if n_more := sum(1 for _ in differences):
            shown.append(f"{n_more} more")
        texts[name] = ", ".join(shown) or "the same"
    return texts


def _differences(
    first: Mapping[str, Any], other: Mapping[str, Any], place: str = ""
) -> Iterator[str]:
    """Yield what nested settings have other than `first`, or instead of a part of it."""
    for key in dict.fromkeys([*first, *other]):
        was, now = first.get(key), other.get(key)
        name = f"{place}{key}"
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _differences(was, now, "" if key == "hyperparameters" else f"{name}.")
        elif isinstance(was, dict) or isinstance(now, dict):
            yield f"{'with' if now else 'without'} {name}"
        # A setting that only the other trainer knows is no difference of the experiments.
        elif was != now and {key} <= {*first} & {*other} and key not in _NO_PART_OF_RESULTS:
            yield f"{name} {as_text(now)} instead of {as_text(was)}"


def as_text(value: Any) -> str:
    """Format a setting's value; a dash for none."""
    return "-" if value is None else str(value)
