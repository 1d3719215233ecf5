"""Steps per second where environments take as long as real players, as a share of what they give.

    python benchmarks/profiles.py [--quick] [--workload ppo sac ...] [--ms 0 6 14] [--envs 1 4]
        [--agents N] [--sigma 0.3] [--rounds 3] [--peer] [--compile] [--auto] [--json FILE]

A cell is a workload, a time per exchange and a number of environments. In each round of it the
environment-only rate (random actions through the low-level API), ours, ours `threaded`, and with
`--peer` mlagents-learn both ways are measured in turn, all on executables of ours whose every
exchange takes so many milliseconds more, constant or log-normal. Rates are agent steps per second
as the environments count them, without the first two rollouts and the last of a run; printed are
medians, and shares of the environment-only rate taken within each round. `compute only` is the rate
that ours would have if environments answered at once. In self-play only the steps of the team that
learns count. `--compile` is for ours. With `--auto`, for workloads that learn from a replay,
`steps_per_update` is auto, and each run's line of what it measured and chose is printed. Below the
table stands what `pipeline timers` predicts from the runs with one environment, beside what was
measured.
"""

from __future__ import annotations

import argparse
import json
import os
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
from pitches import Pitches

from pipeline.cli import timers
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.simulators import client, registry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from peer import Curve

    from pipeline.core.arrays import AnyArray
    from pipeline.core.simulator import Simulator
    from pipeline.core.specs import ActionTuple
    from pipeline.core.steps import Steps


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained."""

    config: str
    """From the repository's root."""
    simulator: str
    seconds: float = 12.0
    """Seconds of the environment's own time that a measurement takes."""
    updates: int = 5
    """Fewest updates of a run."""
    rollout: int | None = None
    """Agent steps between updates where trajectories end together; else `buffer_size`."""
    learning: float = 1.0
    """Part of the agents whose steps a trainer counts."""


WORKLOADS = {
    "ppo": Workload(config="config/ppo/3DBall.yaml", simulator="balance_ball"),
    "sac": Workload(config="config/sac/3DBall.yaml", simulator="balance_ball"),
    "xqc": Workload(config="config/xqc/3DBall.yaml", simulator="balance_ball"),
    "rnd": Workload(
        config="config/ppo/PyramidsRND.yaml", simulator="pyramids", updates=7, rollout=4096
    ),
    "visual": Workload(config="config/ppo/GridWorld.yaml", simulator="grid_world"),
    "poca": Workload(config="config/poca/PushTogether.yaml", simulator="push_together"),
    "soccer": Workload(
        config="benchmarks/cases/soccer_twos.yaml", simulator="soccer_twos", learning=0.5
    ),
}


class Slowed:
    """A simulator whose every exchange takes some milliseconds more.

    Args:
        simulator: does the work.
        ms: median of the time that is slept.
        sigma: of its logarithm; 0 sleeps always as long.
        seed: of the times.
        log: a folder that gets a file with the second and the agent steps of every exchange.
    """

    def __init__(
        self, simulator: Simulator, *, ms: float, sigma: float, seed: int, log: Path | None = None
    ) -> None:
        self._simulator = simulator
        self._rng = np.random.default_rng(seed)
        self._seconds = ms / 1e3
        self._sigma = sigma
        self._log = log
        self._exchanges: list[tuple[float, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulator, name)

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """One step, and the wait."""
        n_steps = sum(len(action.continuous) for action in actions.values())
        self._exchanges.append((time.monotonic(), n_steps))
        if self._seconds:
            time.sleep(self._seconds * float(np.exp(self._sigma * self._rng.standard_normal())))
        return self._simulator.step(actions)

    def close(self) -> None:
        """Write the log."""
        self._simulator.close()
        if self._log is not None:
            np.save(self._log / f"{os.getpid()}.npy", np.array(self._exchanges).reshape(-1, 2))


def serve(options: argparse.Namespace) -> None:
    """Run as the environment."""

    def make(seed: int, areas: int) -> Simulator:
        if options.serve == "soccer_twos":
            simulator: Any = Pitches(seed=seed, n_agents=(options.agents or 12) * areas)
        else:
            n_agents = options.agents or registry.entry(options.serve).n_agents
            simulator = registry.make(options.serve, seed=seed, n_agents=n_agents * areas)
        times = {"ms": options.ms[0], "sigma": options.sigma, "seed": seed}
        slowed: Any = Slowed(simulator, **times, log=options.log)
        return slowed  # type: ignore[no-any-return]  # it has all that a simulator has

    client.converse(make, port=options.mlagents_port)


def executable(folder: Path, simulator: str, ms: float, options: argparse.Namespace) -> Path:
    """A program that serves `simulator`, with `ms` more for every exchange."""
    program = folder / f"{simulator}-{ms:g}"
    words = f'"{sys.executable}" "{__file__}" --serve {simulator} --ms {ms} --sigma {options.sigma}'
    words += f' --log "{folder}"'
    words += f" --agents {options.agents}" if options.agents else ""
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
                counts = [len(decision) for decision, _ in workers.get_steps(name)]
                n_steps += sum(counts)
                actions = [spec.action_spec.random_action(n, rng) for n in counts]
                workers.set_actions(name, actions)
            workers.step()
        return n_steps / spent


def configuration(workload: Workload, folder: Path, *, steps: int, **run: Any) -> Path:
    """The workload's configuration for about so many steps, with `threaded` and `num_envs`."""
    content = yaml.safe_load((ROOT / workload.config).read_text())
    every = rollout_steps(workload)
    steps = max(-(-steps // every), workload.updates) * every
    for behavior in content["behaviors"].values():
        behavior |= {"max_steps": steps, "summary_freq": every}
        behavior |= {"threaded": run["threaded"], "checkpoint_interval": 10 * steps}
        if run.get("auto"):
            behavior["hyperparameters"]["steps_per_update"] = "auto"
    content["env_settings"] = {"num_envs": run["n_envs"]}
    path = folder / "trainer.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def rollout_steps(workload: Workload) -> int:
    """Agent steps between two updates; SAC, whose updates are many, begins after a few."""
    if workload.rollout is not None:
        return workload.rollout
    content = yaml.safe_load((ROOT / workload.config).read_text())
    (behavior,) = content["behaviors"].values()
    size: int = behavior["hyperparameters"]["buffer_size"]
    return 1000 if "buffer_init_steps" in behavior["hyperparameters"] else size


def taken(folder: Path) -> list[AnyArray]:
    """Read and remove the logs of the environments that have ended, [exchanges, 2] each."""
    paths = sorted(folder.glob("*.npy"))
    logs = [np.load(path) for path in paths]
    for path in paths:
        path.unlink()
    return logs


def steady_rate(logs: Sequence[AnyArray], every: int) -> float:
    """Agent steps per second from two rollouts of `every` steps after the start to the last one.

    The first rollout has no update beside it, the first update is compiled, and the last rollout
    has none either.

    Args:
        logs: for each environment [exchanges, 2] the second and the agent steps.
        every: agent steps of a rollout.
    """
    exchanges = np.concatenate(logs)
    seconds, n_steps = exchanges[exchanges[:, 0].argsort(kind="stable")].T
    total = n_steps.cumsum()
    first, last = total.searchsorted([2 * every, total[-1] - every])
    return float((total[last] - total[first]) / (seconds[last] - seconds[first]))


def compute_only(curve: Curve, folder: Path, seed: int) -> float:
    """Agent steps per second of the trainer's own time, without compiling, in a seed's run."""
    spent = json.loads((folder / f"ours-{seed}/run_logs/seconds.json").read_text())
    return curve.steps[-1] / (spent["total"] - spent["environment"] - spent.get("compile", 0.0))


def chosen_paces(log: Path) -> list[str]:
    """The lines in which a run says what it has measured and chosen for `auto`."""
    return [text for text in log.read_text().splitlines() if "steps_per_update is" in text]


_PREDICTED = ("predicted for threaded", "predicted for 4 environments")


def measure(
    name: str, ms: float, n_envs: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the rates of each round, by program and mode."""
    workload = WORKLOADS[name]
    more = ["--torch-compile"] if options.compile else []
    rates: dict[str, list[float]] = {}
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            env = executable(folder, workload.simulator, ms, options)
            env_rate = workload.learning * environment_only(env, n_envs, workload.seconds / 3)
            rates.setdefault("environment", []).append(env_rate)
            programs = ["ours", "peer"] if options.peer else ["ours"]
            for program in programs:
                # The peer needs no more time.
                speed = env_rate if program == "ours" else env_rate / 3
                steps = int(speed * workload.seconds)
                for threaded in (False, True):
                    changes = {"threaded": threaded, "n_envs": n_envs, "steps": steps}
                    changes["auto"] = options.auto
                    config = configuration(workload, folder, **changes)
                    taken(folder)  # drops the logs of random actions, or of the run before
                    curve = train(program, config, env, seed=number, folder=folder, options=more)
                    every = int(rollout_steps(workload) / workload.learning)
                    logs = taken(folder)
                    rate = workload.learning * steady_rate(logs, every)
                    if program == "ours" and options.auto:
                        print(*chosen_paces(folder / f"ours-{number}.log"), sep="\n", flush=True)  # noqa: T201
                    if program == "ours" and not threaded:
                        computed = compute_only(curve, folder, number)
                        rates.setdefault("compute", []).append(computed)
                        times = timers.read(folder / f"ours-{number}")
                        predicted = rates.setdefault(_PREDICTED[0], [])
                        predicted.append(rate * times.after(threaded=True))
                        predicted = rates.setdefault(_PREDICTED[1], [])
                        predicted.append(rate * times.after(n_times=4))
                    variant = f"{program}, threaded" if threaded else program
                    rates.setdefault(variant, []).append(rate)
    return rates


def predictions(cells: Mapping[tuple[str, float, int], Mapping[str, list[float]]]) -> list[str]:
    """Return lines of predicted and measured rates, for each workload and time."""
    lines = []
    for (name, ms, n_envs), rates in cells.items():
        if n_envs != 1:
            continue
        measured = [rates["ours, threaded"], cells.get((name, ms, 4), {}).get("ours")]
        for title, measurements in zip(_PREDICTED, measured, strict=True):
            if measurements is not None:
                expected, got = statistics.median(rates[title]), statistics.median(measurements)
                far = f"{expected / got - 1:+.0%}"
                lines.append(
                    f"{name}, {ms:g} ms: {title} {expected:,.0f}, measured {got:,.0f}: {far}"
                )
    return lines


def line(name: str, ms: float, n_envs: int, rates: dict[str, list[float]]) -> str:
    """A row of the table."""
    env_rates = rates["environment"]
    cells = [name, f"{ms:g}", str(n_envs)]
    cells += [f"{statistics.median(rates[variant]):,.0f}" for variant in ("environment", "compute")]
    for variant, measured in rates.items():
        if variant not in ("environment", "compute", *_PREDICTED):
            shares = [rate / env_rate for rate, env_rate in zip(measured, env_rates, strict=True)]
            cells.append(f"{statistics.median(measured):,.0f} ({statistics.median(shares):.0%})")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure and print, or run as the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one cell in about a minute")
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=["ppo"])
    parser.add_argument("--ms", nargs="+", type=float, default=[0.0, 2.0, 6.0, 14.0, 30.0])
    parser.add_argument("--envs", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--sigma", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agents", type=int, help="instead of the simulator's own number")
    parser.add_argument("--peer", action="store_true", help="measure mlagents-learn too")
    parser.add_argument("--compile", action="store_true", help="ours with --torch-compile")
    parser.add_argument("--auto", action="store_true", help="steps_per_update: auto")
    parser.add_argument("--json", type=Path, help="write all rates of all rounds")
    parser.add_argument("--serve", choices=[*registry.NAMES, "soccer_twos"], help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mlagents-port", type=int, help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()  # a trainer gives an environment options of its own
    if options.serve:
        serve(options)
        return
    if options.quick:
        options.ms, options.envs, options.rounds = [6.0], [1], 1
    programs = ["ours", "ours, threaded", "mlagents-learn", "mlagents-learn, threaded"]
    titles = [
        "workload",
        "ms",
        "environments",
        "environment only",
        "compute only",
        *programs[: 4 if options.peer else 2],
    ]
    print("| " + " | ".join(titles) + " |")  # noqa: T201
    print("|---|" + "--:|" * (len(titles) - 1))  # noqa: T201
    cells = {}
    for name in options.workload:
        for ms in options.ms:
            for n_envs in options.envs:
                rates = measure(name, ms, n_envs, options)
                print(line(name, ms, n_envs, rates), flush=True)  # noqa: T201
                cells[name, ms, n_envs] = rates
    print(*predictions(cells), sep="\n")  # noqa: T201
    if options.json is not None:
        names = ("workload", "ms", "envs")
        results = [dict(zip(names, key, strict=True), rates=cell) for key, cell in cells.items()]
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
