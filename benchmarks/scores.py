"""Mean returns in the built-in simulators of scripted and of uniformly random players.

    python benchmarks/scores.py [NAME ...] [--episodes N]

A line for each way to give the behaviors' agents to either player. A return is the sum of an
agent's own and of its group's rewards, as `pipeline evaluate` counts it; `won` is the share of
agents whose return is positive. Random players choose among what the mask allows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING

import numpy as np

from pipeline import seeding
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.evaluation.episodes import evaluate
from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import registry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.protocol.specs import ActionSpec
    from pipeline.protocol.steps import DecisionSteps

SEED = 1


class Scripted:
    """The simulator's expert for one behavior."""

    kind = "scripted"

    def __init__(self, name: str, behavior: str) -> None:
        self._expert = registry.expert(name, behavior)

    def reset(self, seed: int) -> None:
        """Nothing to forget."""

    def act(self, steps: DecisionSteps, deterministic: bool = False) -> ActionTuple:  # noqa: ARG002  # of the interface
        """What the expert does."""
        return self._expert(steps)

    def end(self, agent_ids: Iterable[int]) -> None:
        """Nothing to forget."""


class Random(Scripted):
    """Uniform over the allowed actions."""

    kind = "random"

    def __init__(self, spec: ActionSpec) -> None:
        self._spec = spec
        self._rng = seeding.stream(SEED, "random player")

    def act(self, steps: DecisionSteps, deterministic: bool = False) -> ActionTuple:  # noqa: ARG002  # of the interface
        """One action per agent."""
        if not steps.action_mask:
            return self._spec.random_action(len(steps), self._rng)
        draws = [np.where(mask, -1.0, self._rng.random(mask.shape)) for mask in steps.action_mask]
        return ActionTuple(discrete=np.stack([draw.argmax(axis=1) for draw in draws], axis=1))


def report(name: str, n_episodes: int) -> None:
    """Print the lines of one simulator."""
    with InProcessEnvironment(registry.make(name, seed=SEED)) as env:
        env.reset()
        specs = dict(env.behavior_specs)
    kinds = itertools.product((Scripted, Random), repeat=len(specs))
    for chosen in kinds:
        players = {
            behavior: Scripted(name, behavior) if kind is Scripted else Random(spec.action_spec)
            for (behavior, spec), kind in zip(specs.items(), chosen, strict=True)
        }
        with InProcessEnvironment(registry.make(name, seed=SEED)) as env:
            played = evaluate(env, players, episodes=n_episodes, seed=SEED)
        for behavior, player in players.items():
            own = [one for one in played if one.behavior == behavior]
            returns = np.array([one.episode_return for one in own])
            error = returns.std() / np.sqrt(len(returns))
            sys.stdout.write(
                f"{behavior:20} {player.kind:8}  return {returns.mean():7.3f} +- {error:.3f}  "
                f"won {np.mean(returns > 0):.3f}  "
                f"decisions {np.mean([one.length for one in own]):6.1f}  "
                f"interrupted {np.mean([one.interrupted for one in own]):.3f}\n"
            )
        sys.stdout.write("\n" if len(specs) > 1 else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all simulators if none is named")
    parser.add_argument("--episodes", type=int, default=600, help="of each behavior")
    arguments = parser.parse_args()
    for one in arguments.names or registry.NAMES:
        report(one, arguments.episodes)
