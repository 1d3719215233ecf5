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

    from pipeline.evaluation.episodes import ActingPolicy

SEED = 1000
"""Added to a run's seed: the sum seeds the environment and the sampled actions. No run trains with
it, and no two runs of a program are measured with the same random numbers."""


def returns(case: Case, models: Path, *, seed: int, deterministic: bool) -> float:
    """Mean return of the ONNX policies in the folder `models`, from either trainer.

    In a duel the policy plays as many episodes from each side, against the scripted opponent.

    Args:
        case: what it was trained on.
        models: the folder.
        seed: of the run.
        deterministic: most probable actions instead of sampled ones.
    """
    listed = case.environment
    names = list(action_specs(listed.name, **listed.options))
    if not case.duel:
        policies: dict[str, ActingPolicy] = {name: policy(models, name) for name in names}
        return mean(case, policies, names, seed=seed, deterministic=deterministic)
    sides = []
    for side in names:
        players: dict[str, ActingPolicy] = {name: Scripted(listed.name, name) for name in names}
        players[side] = policy(models, side)
        sides.append(mean(case, players, [side], seed=seed, deterministic=deterministic))
    return float(np.mean(sides))


def match(case: Case, models: Path, others: Path, *, seed: int) -> float:
    """Mean return of `models` against `others` of a duel, from both sides, with sampled actions."""
    listed = case.environment
    names = list(action_specs(listed.name, **listed.options))
    sides = []
    for side in names:
        players: dict[str, ActingPolicy] = {name: policy(others, name) for name in names}
        players[side] = policy(models, side)
        sides.append(mean(case, players, [side], seed=seed, deterministic=False))
    return float(np.mean(sides))


def policy(models: Path, behavior: str) -> OnnxPolicy:
    """The final policy of a behavior."""
    return OnnxPolicy(models / f"{behavior.partition('?')[0]}.onnx")


def mean(
    case: Case,
    players: dict[str, ActingPolicy],
    counted: list[str],
    *,
    seed: int,
    deterministic: bool,
) -> float:
    """Mean return of the behaviors `counted`, over the episodes that begin first."""
    listed = case.environment
    options = (
        listed.options if case.at_once is None else {**listed.options, "n_agents": case.at_once}
    )
    with InProcessEnvironment(made(listed.name, seed=SEED + seed, **options)) as env:
        played = evaluate(
            env, players, episodes=case.n_episodes, seed=SEED + seed, deterministic=deterministic
        )
    return float(
        np.mean([episode.episode_return for episode in played if episode.behavior in counted])
    )
