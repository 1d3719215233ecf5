"""`subsets.<name>`: what is asked for together, for example a quick check of everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.settings.nodes import Node, fail, find
from pipeline.settings.reader import suggestion

if TYPE_CHECKING:
    from pipeline.settings.params import Params


def runs_of(params: Params, name: str) -> list[tuple[str, int]]:
    """Experiments and seeds that a name stands for.

    Args:
        params: of the project.
        name: a subset, an experiment, a sweep (with its best), or a run as `<experiment>-<seed>`.

    Returns:
        Pairs of experiment and seed, each once; empty when nothing has this name.
    """
    if name in params.subsets:
        parts = [run for part in params.subsets[name] for run in _runs_of_one(params, part)]
        return list(dict.fromkeys(parts))
    return _runs_of_one(params, name)


def check_subsets(root: Node, params: Params) -> None:
    """Refuse subsets that name nothing, or are named like something else.

    Raises:
        SettingsError: There is one.
    """
    known = [*params.experiments, *params.sweeps]
    for name, parts in params.subsets.items():
        at = f"subsets.{name}"
        node = find(root, at)
        if name in known:
            raise fail(node, at, "is the name of an experiment or sweep too; rename one of them")
        if not parts:
            raise fail(node, at, f"names nothing; list some of {', '.join(known)}")
        for part in parts:
            if not _runs_of_one(params, part):
                raise fail(
                    node,
                    at,
                    f"there is no experiment, run or sweep {part!r}{suggestion(part, known)} "
                    "A run is written `<experiment>-<seed>`",
                )


def _runs_of_one(params: Params, name: str) -> list[tuple[str, int]]:
    if name in params.experiments:
        return [(name, seed) for seed in params.experiments[name].seeds]
    if name in params.sweeps:
        sweep = params.sweeps[name]
        trials = [(f"{name}/{number}", seed) for number in sweep.trials() for seed in sweep.seeds]
        best = [] if sweep.best is None else _runs_of_one(params, f"{name}_best")
        return trials + best
    experiment, _, seed = name.rpartition("-")
    known = params.experiments.get(experiment)
    if known is None or seed not in map(str, known.seeds):
        return []
    return [(experiment, int(seed))]
