"""What the policies of a finished run are worth: their ONNX files, played in the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scores import Scripted, action_specs, made

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.evaluation.episodes import evaluate
from pipeline.export.policy import OnnxPolicy

if TYPE_CHECKING:
    from pathlib import Path

    from cases import Case

    from pipeline.evaluation.episodes import Policy

SEED = 1001
"""Of the environment and of sampled actions; no run is trained with it."""


def returns(case: Case, models: Path, *, deterministic: bool) -> float:
    """Mean return of the ONNX policies in the folder `models`, of whichever trainer.

    In a duel the policy plays as many episodes from each side, against the scripted opponent.
    """
    own = case.environment
    names = list(action_specs(own.name, **own.options))
    if not case.duel:
        alone: dict[str, Policy] = {name: policy(models, name) for name in names}
        return mean(case, alone, names, deterministic=deterministic)
    sides = []
    for side in names:
        players: dict[str, Policy] = {name: Scripted(own.name, name) for name in names}
        players[side] = policy(models, side)
        sides.append(mean(case, players, [side], deterministic=deterministic))
    return float(np.mean(sides))


def match(case: Case, models: Path, others: Path) -> float:
    """Mean return of `models` against `others` of a duel, from both sides, with sampled actions."""
    own = case.environment
    names = list(action_specs(own.name, **own.options))
    sides = []
    for side in names:
        players: dict[str, Policy] = {name: policy(others, name) for name in names}
        players[side] = policy(models, side)
        sides.append(mean(case, players, [side], deterministic=False))
    return float(np.mean(sides))


def policy(models: Path, behavior: str) -> OnnxPolicy:
    """The final policy of a behavior."""
    return OnnxPolicy(models / f"{behavior.partition('?')[0]}.onnx")


def mean(
    case: Case, players: dict[str, Policy], counted: list[str], *, deterministic: bool
) -> float:
    """Mean return of the behaviors `counted`, of the episodes that begin first."""
    own = case.environment
    with InProcessEnvironment(made(own.name, **own.options)) as env:
        played = evaluate(
            env, players, episodes=case.n_episodes, seed=SEED, deterministic=deterministic
        )
    return float(np.mean([one.episode_return for one in played if one.behavior in counted]))
