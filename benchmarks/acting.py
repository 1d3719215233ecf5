"""Microseconds of a decision in NumPy and in torch, by what decides.

    python benchmarks/acting.py

Each decision is timed after the one before, and after 5 ms of sleep, as beside a real player: then
caches hold something else. Both kinds in turn, medians, one thread each.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from peer import ROOT
from threadpoolctl import threadpool_limits

from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.settings import load_run_settings
from pipeline.trainer.supported import algorithm_of

if TYPE_CHECKING:
    from pipeline.algos.algorithm import Algorithm

BALL = BehaviorSpec([ObservationSpec.vector(8)], ActionSpec(2, ()))
SOCCER = BehaviorSpec(
    [ObservationSpec.vector(264), ObservationSpec.vector(72)], ActionSpec(0, (3, 3, 3))
)
GOAL = ObservationSpec.vector(2)._replace(observation_type=ObservationType.GOAL_SIGNAL)
GRID = BehaviorSpec([ObservationSpec.visual(3, 20, 20), GOAL], ActionSpec(0, (5,)))
ENTITIES = BehaviorSpec(
    [ObservationSpec.vector(8), ObservationSpec.entities(8, 4)], ActionSpec(2, ())
)
CASES = {
    "PPO, 3DBall, 12 agents": ("config/ppo/3DBall.yaml", BALL, 12),
    "SAC, 3DBall, 12 agents": ("config/sac/3DBall.yaml", BALL, 12),
    "POCA, SoccerTwos, 6 players": ("benchmarks/cases/soccer_twos.yaml", SOCCER, 6),
    "POCA, SoccerTwos, 2 players": ("benchmarks/cases/soccer_twos.yaml", SOCCER, 2),
    "PPO, 3DBall, 96 agents": ("config/ppo/3DBall.yaml", BALL, 96),
    "PPO, image and goal, 16 agents": ("config/ppo/GridWorld.yaml", GRID, 16),
    "PPO, entities, 12 agents": ("config/ppo/3DBall.yaml", ENTITIES, 12),
}
N = 400
KINDS = ("NumPy", "torch")


def policies(config: str, spec: BehaviorSpec) -> dict[str, Algorithm]:
    """Return the same untrained policy twice: with its NumPy actor and without it."""
    (settings,) = load_run_settings(ROOT / config).behaviors.values()
    algorithms = {}
    for kind in KINDS:
        algorithms[kind] = algorithm_of(settings)(
            spec, settings, seed=1, device=torch.device("cpu")
        )
    algorithms["torch"].policy.numpy_actor = None
    return algorithms


def microseconds(config: str, spec: BehaviorSpec, n_agents: int, *, asleep: float) -> list[float]:
    """Return the median time of a decision, of each kind."""
    algorithms = policies(config, spec)
    rng = np.random.default_rng(0)
    obs = [
        rng.normal(size=(n_agents, *obs_spec.shape)).astype(np.float32)
        for obs_spec in spec.observation_specs
    ]
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(N):
        for kind, algorithm in algorithms.items():
            time.sleep(asleep) if asleep else algorithm.act(obs, None)
            began = time.perf_counter()
            algorithm.act(obs, None)
            spent[kind].append(1e6 * (time.perf_counter() - began))
    return [statistics.median(times[N // 10 :]) for times in spent.values()]


def main() -> None:
    """Print a row for each case."""
    torch.set_num_threads(1)
    print("| decision | NumPy | torch | NumPy, after 5 ms | torch, after 5 ms |")  # noqa: T201
    print("|---|--:|--:|--:|--:|")  # noqa: T201
    with threadpool_limits(1, user_api="blas"):
        for name, case in CASES.items():
            times = [*microseconds(*case, asleep=0.0), *microseconds(*case, asleep=0.005)]
            print(f"| {name} | " + " | ".join(f"{median:.0f}" for median in times) + " |")  # noqa: T201


if __name__ == "__main__":
    main()
