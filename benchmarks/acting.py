"""Microseconds of a decision in NumPy and in torch, and of its products alone, by what decides.

    python benchmarks/acting.py

Each decision is timed after the one before, and after 5 ms of sleep, as beside a real player: then
caches hold something else. The products are its convolutions and matrix products with the same
numbers, called in torch one after the other: a decision in torch takes no less. All kinds
in turn, medians, one thread each.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peer import ROOT
from threadpoolctl import threadpool_limits
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.settings import load_run_settings
from pipeline.trainer.supported import algorithm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
_PRODUCTS = {"linear", "addmm", "mm", "mv", "bmm", "baddbmm", "matmul", "conv2d", "convolution"}
_PRODUCTS |= {"convolution_backward"}  # large dense layers are convolutions, too
KINDS = ("NumPy", "torch", "products")


def decisions(config: str, spec: BehaviorSpec, n_agents: int) -> dict[str, Callable[[], object]]:
    """Return the same decision of an untrained policy by each kind."""
    (settings,) = load_run_settings(ROOT / config).behaviors.values()
    rng = np.random.default_rng(0)
    obs = [
        rng.normal(size=(n_agents, *obs_spec.shape)).astype(np.float32)
        for obs_spec in spec.observation_specs
    ]
    new = algorithm_of(settings)
    by_kind = [new(spec, settings, seed=1, device=torch.device("cpu")) for _ in range(2)]
    by_kind[1].policy.numpy_actor = None
    acts = [functools.partial(algorithm.act, obs, None) for algorithm in by_kind]
    return dict(zip(KINDS, [*acts, products(acts[1])], strict=True))


class Products(TorchDispatchMode):
    """Notes the calls of convolutions and matrix products while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Call an operation, and keep it with its arguments if it is one of those."""
        del types
        call = functools.partial(func, *args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.calls.append(call)
        return call()


def products(decide: Callable[[], object]) -> Callable[[], None]:
    """Return a function that repeats the products of `decide`, with the same numbers."""
    with Products() as noted:
        decide()
    return repeated(noted.calls)


def repeated(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that makes the calls in their order, without gradients."""

    def multiply() -> None:
        with torch.inference_mode():
            for call in calls:
                call()

    return multiply


def microseconds(config: str, spec: BehaviorSpec, n_agents: int, *, asleep: float) -> list[float]:
    """Return the median time of a decision, of each kind."""
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    by_kind = decisions(config, spec, n_agents)
    for _ in range(N):
        for kind, decide in by_kind.items():
            time.sleep(asleep) if asleep else decide()
            began = time.perf_counter()
            decide()
            spent[kind].append(1e6 * (time.perf_counter() - began))
    return [statistics.median(times[N // 10 :]) for times in spent.values()]


def main() -> None:
    """Print a row for each case."""
    torch.set_num_threads(1)
    titles = [*KINDS, *(f"{kind}, after 5 ms" for kind in KINDS)]
    print("| decision | " + " | ".join(titles) + " |")  # noqa: T201
    print("|---|" + "--:|" * len(titles))  # noqa: T201
    with threadpool_limits(1, user_api="blas"):
        for name, case in CASES.items():
            times = [*microseconds(*case, asleep=0.0), *microseconds(*case, asleep=0.005)]
            print(f"| {name} | " + " | ".join(f"{median:.0f}" for median in times) + " |")  # noqa: T201


if __name__ == "__main__":
    main()
