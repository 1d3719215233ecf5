"""Returns of scripted and of uniformly random players.

    python benchmarks/scores.py [NAME ...] [--episodes N]

NAME is a built-in simulator, all of them if none is named, or `gymnasium:ID` or `pettingzoo:ID`,
which have no scripted player. A line for each behavior and each way to give the behaviors' agents
to either player. A return is the sum of an agent's own and of its group's rewards, as `pipeline
evaluate` counts it, and the episodes are those that it counts; +- is the standard error, `won` the
share of agents whose return is positive. Random players choose among what the mask allows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from simulators import allowed

from pipeline import seeding
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.evaluation.episodes import evaluate
from pipeline.simulators import registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeline.core.simulator import Simulator
    from pipeline.core.specs import ActionSpec, ActionTuple
    from pipeline.core.steps import DecisionSteps
    from pipeline.evaluation.episodes import ActingPolicy

SEED = 1


class Scripted:
    """The simulator's expert for one behavior, which keeps its own memories."""

    kind = "scripted"

    def __init__(self, name: str, behavior: str) -> None:
        self._expert = registry.expert(name, behavior)

    def reset(self, seed: int) -> None:
        """Do nothing: it begins without memories."""

    def act(self, steps: DecisionSteps, deterministic: bool = False) -> ActionTuple:  # noqa: ARG002  # of the interface
        """Return the expert's actions."""
        return self._expert(steps)

    def end(self, agent_ids: Iterable[int]) -> None:
        """Do nothing: experts notice where an episode begins."""


class Random:
    """Uniform over the allowed actions."""

    kind = "random"

    def __init__(self, spec: ActionSpec) -> None:
        self._spec = spec
        self._rng = seeding.stream(SEED, "random player")

    def reset(self, seed: int) -> None:
        """Do nothing: its random stream continues."""

    def act(self, steps: DecisionSteps, deterministic: bool = False) -> ActionTuple:  # noqa: ARG002  # of the interface
        """One action per agent."""
        return allowed(steps, self._spec, self._rng)

    def end(self, agent_ids: Iterable[int]) -> None:
        """Nothing to forget."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Results of the agents of one behavior."""

    behavior: str
    kind: str
    mean: float
    error: float
    low: float
    high: float
    won: float
    length: float
    interrupted: float

    def __str__(self) -> str:
        return (
            f"{self.behavior:20} {self.kind:8}  return {self.mean:8.3f} +- {self.error:.3f} "
            f"({self.low:.3f} to {self.high:.3f})  won {self.won:.3f}  "
            f"decisions {self.length:6.1f}  interrupted {self.interrupted:.3f}"
        )


def made(name: str, *, seed: int = SEED, **options: Any) -> Simulator:
    """The simulator or bridged environment called `name`, with its own stream of `seed`."""
    source, _, env_id = name.partition(":")
    chosen = {"id": env_id, **options} if env_id else options
    return registry.make(source, seed=seed, **chosen)


def action_specs(name: str, **options: Any) -> dict[str, ActionSpec]:
    """Return the action spec of each behavior, by its qualified name."""
    simulator = made(name, **options)
    try:
        return {behavior: spec.action_spec for behavior, spec in simulator.behavior_specs.items()}
    finally:
        simulator.close()


def play(name: str, kinds: Mapping[str, str], n_episodes: int, **options: Any) -> list[Score]:
    """Scores of players of `kinds`, "scripted" or "random" for each behavior."""
    specs = action_specs(name, **options)
    players: dict[str, ActingPolicy] = {
        behavior: Scripted(name, behavior) if kind == Scripted.kind else Random(specs[behavior])
        for behavior, kind in kinds.items()
    }
    with InProcessEnvironment(made(name, **options)) as env:
        played = evaluate(env, players, episodes=n_episodes, seed=SEED)
    scores = []
    for behavior, kind in kinds.items():
        counted = [episode for episode in played if episode.behavior == behavior]
        returns = np.array([episode.episode_return for episode in counted])
        scores.append(
            Score(
                behavior=behavior,
                kind=kind,
                mean=float(returns.mean()),
                error=float(returns.std() / np.sqrt(len(returns))),
                low=float(returns.min()),
                high=float(returns.max()),
                won=float((returns > 0).mean()),
                length=float(np.mean([episode.length for episode in counted])),
                interrupted=float(np.mean([episode.interrupted for episode in counted])),
            )
        )
    return scores


def report(name: str, n_episodes: int) -> None:
    """Print the lines of one environment."""
    behaviors = list(action_specs(name))
    kinds = (Scripted.kind, Random.kind) if name in registry.NAMES else (Random.kind,)
    for chosen in itertools.product(kinds, repeat=len(behaviors)):
        for score in play(name, dict(zip(behaviors, chosen, strict=True)), n_episodes):
            sys.stdout.write(f"{score}\n")
        sys.stdout.write("\n" if len(behaviors) > 1 else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all simulators if none is named")
    parser.add_argument("--episodes", type=int, default=600, help="of each behavior")
    arguments = parser.parse_args()
    for environment_name in arguments.names or registry.NAMES:
        report(environment_name, arguments.episodes)
