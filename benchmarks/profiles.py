"""Steps per second where environments take as long as real players, as a share of what they give.

    python benchmarks/profiles.py [--quick] [--workload ppo sac ...] [--ms 0 6 14] [--envs 1 4]
        [--sigma 0.3] [--rounds 3] [--peer] [--json FILE]

A cell is a workload, a time per exchange and a number of environments. In each round of it the
environment-only rate (random actions through the low-level API), ours, ours `threaded`, and with
`--peer` mlagents-learn both ways are measured in turn, all on executables of ours whose every
exchange takes so many milliseconds more, constant or log-normal. Rates are agent steps per second
between the first and the last summary; printed are medians, and shares of the environment-only rate
taken within each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from peer import ROOT, train

from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.simulators import client, registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.protocol.simulator import Simulator
    from pipeline.protocol.specs import ActionTuple
    from pipeline.protocol.steps import Steps


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained."""

    config: str
    """From the repository's root."""
    simulator: str
    seconds: float = 12.0
    """Of the environment's own time that a measurement shall take."""


WORKLOADS = {
    "ppo": Workload(config="config/ppo/3DBall.yaml", simulator="balance_ball"),
    "sac": Workload(config="config/sac/3DBall.yaml", simulator="balance_ball"),
    "rnd": Workload(config="config/ppo/PyramidsRND.yaml", simulator="pyramids"),
    "visual": Workload(config="config/ppo/GridWorld.yaml", simulator="grid_world"),
    "poca": Workload(config="config/poca/PushTogether.yaml", simulator="push_together"),
}
N_SUMMARIES = 10
LEAST_STEPS = 12_000


class Slowed:
    """A simulator whose every exchange takes some milliseconds more.

    Args:
        simulator: does the work.
        ms: median of the time that is slept.
        sigma: of its logarithm; 0 sleeps always as long.
        seed: of the times.
    """

    def __init__(self, simulator: Simulator, *, ms: float, sigma: float, seed: int) -> None:
        self._simulator = simulator
        self._rng = np.random.default_rng(seed)
        self._seconds = ms / 1e3
        self._sigma = sigma

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulator, name)

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """One step, and the wait."""
        if self._seconds:
            time.sleep(self._seconds * float(np.exp(self._sigma * self._rng.standard_normal())))
        return self._simulator.step(actions)


def serve(options: argparse.Namespace) -> None:
    """Be the environment."""

    def make(seed: int, areas: int) -> Simulator:
        entry = registry.entry(options.serve)
        simulator = registry.make(options.serve, seed=seed, n_agents=entry.n_agents * areas)
        slowed: Any = Slowed(simulator, ms=options.ms[0], sigma=options.sigma, seed=seed)
        return slowed  # type: ignore[no-any-return]  # it has all that a simulator has

    client.converse(make, port=options.mlagents_port)


def executable(folder: Path, simulator: str, ms: float, sigma: float) -> Path:
    """A program that serves `simulator`, with `ms` more for every exchange."""
    program = folder / f"{simulator}-{ms:g}"
    words = f'"{sys.executable}" "{__file__}" --serve {simulator} --ms {ms} --sigma {sigma}'
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    return program


def environment_only(env: Path, n_envs: int, seconds: float) -> float:
    """Agent steps per second with random actions, stepped together as in training."""
    rng = np.random.default_rng(0)
    envs = [UnityEnvironment(env, worker_id=k, seed=k + 1, no_graphics=True) for k in range(n_envs)]
    with WorkerSet(envs) as workers:
        workers.reset()
        n_steps, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            for name, spec in workers.behavior_specs.items():
                here = [len(decision) for decision, _ in workers.get_steps(name)]
                n_steps += sum(here)
                actions = [spec.action_spec.random_action(n, rng) for n in here]
                workers.set_actions(name, actions)
            workers.step()
        return n_steps / spent


def configuration(workload: Workload, folder: Path, *, steps: int, **run: Any) -> Path:
    """The workload's configuration for so many steps, with `threaded` and `num_envs`."""
    content = yaml.safe_load((ROOT / workload.config).read_text())
    for behavior in content["behaviors"].values():
        behavior |= {"max_steps": steps, "summary_freq": max(steps // N_SUMMARIES, 1)}
        behavior |= {"threaded": run["threaded"], "checkpoint_interval": 10 * steps}
    content["env_settings"] = {"num_envs": run["n_envs"]}
    path = folder / "trainer.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def measure(
    name: str, ms: float, n_envs: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Rates of each round, by who."""
    workload = WORKLOADS[name]
    rates: dict[str, list[float]] = {}
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            env = executable(folder, workload.simulator, ms, options.sigma)
            alone = environment_only(env, n_envs, workload.seconds / 3)
            rates.setdefault("environment", []).append(alone)
            programs = ["ours", "peer"] if options.peer else ["ours"]
            for program in programs:
                speed = alone if program == "ours" else alone / 3  # the peer needs no more time
                steps = max(int(speed * workload.seconds), LEAST_STEPS)
                for threaded in (False, True):
                    changes = {"threaded": threaded, "n_envs": n_envs, "steps": steps}
                    config = configuration(workload, folder, **changes)
                    curve = train(program, config, env, seed=number, folder=folder)
                    who = f"{program}, threaded" if threaded else program
                    rates.setdefault(who, []).append(curve.rate())
    return rates


def line(name: str, ms: float, n_envs: int, rates: dict[str, list[float]]) -> str:
    """A row of the table."""
    alone = rates["environment"]
    cells = [name, f"{ms:g}", str(n_envs), f"{statistics.median(alone):,.0f}"]
    for who, found in rates.items():
        if who != "environment":
            shares = [one / all_of_it for one, all_of_it in zip(found, alone, strict=True)]
            cells.append(f"{statistics.median(found):,.0f} ({statistics.median(shares):.0%})")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure and print, or be the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one cell in about a minute")
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=["ppo"])
    parser.add_argument("--ms", nargs="+", type=float, default=[0.0, 2.0, 6.0, 14.0, 30.0])
    parser.add_argument("--envs", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--sigma", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="measure mlagents-learn too")
    parser.add_argument("--json", type=Path, help="write all rates of all rounds")
    parser.add_argument("--serve", choices=registry.NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--mlagents-port", type=int, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()  # a trainer gives an environment options of its own
    if options.serve:
        serve(options)
        return
    if options.quick:
        options.ms, options.envs, options.rounds = [6.0], [1], 1
    whos = ["ours", "ours, threaded", "mlagents-learn", "mlagents-learn, threaded"]
    titles = [
        "workload",
        "ms",
        "environments",
        "environment only",
        *whos[: 4 if options.peer else 2],
    ]
    print("| " + " | ".join(titles) + " |")  # noqa: T201
    print("|---|" + "--:|" * (len(titles) - 1))  # noqa: T201
    results = []
    for name in options.workload:
        for ms in options.ms:
            for n_envs in options.envs:
                rates = measure(name, ms, n_envs, options)
                print(line(name, ms, n_envs, rates), flush=True)  # noqa: T201
                results.append({"workload": name, "ms": ms, "envs": n_envs, "rates": rates})
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
