"""XQC step by step from CrossQ, and CrossQ against sb3-contrib's.

    python benchmarks/crossq_ladder.py [--env HalfCheetah-v5 Hopper-v5] [--rung sb3 crossq ... xqc]
                                       [--seeds 5] [--steps 16000] [--folder results/ladder]
    python benchmarks/crossq_ladder.py --speed [--rounds 5]

Each rung changes one thing about the rung before: sb3 (sb3-contrib's CrossQ with critics of our
size), crossq (ours), target (a target network), before (normalised before the activation), norms
(weights of norm 1), rewards (divided by the spread of returns), atoms (distributions), and xqc (the
settings of its paper). All have two layers of 256, minibatches of 256, one update for each step,
one environment and one thread. A rung's number is the mean return of 20 episodes of the final
policy's most likely actions.

Runs are made one after another. What has been measured is kept in `--folder`, so that a call after
an interruption goes on with the rest; the table is printed at the end. `--speed` prints gradient
steps per second of processor time instead, in rounds that alternate between the programs.

sb3-contrib lives in an environment of its own; SB3_PYTHON names its interpreter:
`python -m venv .venv-sb3 && .venv-sb3/bin/pip install sb3-contrib "gymnasium[mujoco]"`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tables import table

import pipeline
from pipeline.algos import xqc
from pipeline.algos.sac import SAC
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.data.rollout import Rollout
from pipeline.evaluation.statistics import summarize
from pipeline.files import write_whole
from pipeline.settings import load_run_settings
from pipeline.trainer.api import keep_freed_memory
from pipeline.trainer.supported import algorithm_of

ROOT = Path(__file__).resolve().parent.parent
PEER = Path(__file__).with_name("peer_crossq.py")
N_EPISODES, N_TIMED = 20, 200
CROSSQ = {
    "critic": "crossq",
    "batch_size": 256,
    "buffer_init_steps": 5000,
    "learning_rate": 1e-3,
    "learning_rate_schedule": "constant",
    "init_entcoef": 1.0,
    "target_sigma": 0.0892,  # an entropy of -1 for each component
    "reward_normalization": False,
}
PAPER = {"critic": "xqc", "batch_size": 256, "buffer_init_steps": 5000}
RUNGS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # changes of the recipe; hyperparameters; gamma
    "crossq": ({}, CROSSQ, 0.99),
    "target": ({"has_target": True}, CROSSQ, 0.99),
    "before": ({"has_target": True, "is_before": True}, CROSSQ, 0.99),
    "norms": ({"has_target": True, "is_before": True, "has_unit_norms": True}, CROSSQ, 0.99),
    "rewards": (
        {"has_target": True, "is_before": True, "has_unit_norms": True},
        CROSSQ | {"reward_normalization": True, "init_entcoef": 0.01},
        0.99,
    ),
    "atoms": (
        {},
        CROSSQ | {"critic": "xqc", "reward_normalization": True, "init_entcoef": 0.01},
        0.99,
    ),
    "xqc": ({}, PAPER, 0.995),
}


def main() -> int:
    """Measure what is missing, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", nargs="+", default=["HalfCheetah-v5", "Hopper-v5"])
    parser.add_argument("--rung", nargs="+", choices=["sb3", *RUNGS], default=["sb3", *RUNGS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16_000)
    parser.add_argument("--folder", type=Path, default=ROOT / "results/ladder")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.speed:
        return speed(options.rounds)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for rung in options.rung:
        cells = []
        for env in options.env:
            returns = [
                measured(rung, env, seed, options.steps, options.folder)
                for seed in range(1, options.seeds + 1)
            ]
            cells.append(", ".join(f"{value:.0f}" for value in returns))
            if len(returns) > 1:
                summary = summarize(returns)
                cells[-1] += f" ({summary.mean:.0f} [{summary.ci_low:.0f}, {summary.ci_high:.0f}])"
        rows.append([rung, *cells])
    sys.stdout.write(table(["Rung", *options.env], rows))
    return 0


def measured(rung: str, env: str, seed: int, steps: int, folder: Path) -> float:
    """Mean return of one training, from the folder if it has been made before."""
    path = folder / f"{rung}-{env}-{steps}-{seed}.json"
    if not path.exists():
        began = time.monotonic()
        mean = (
            peer_return(env, seed, steps) if rung == "sb3" else our_return(rung, env, seed, steps)
        )
        result = {"return": mean, "seconds": round(time.monotonic() - began)}
        write_whole(path, json.dumps(result) + "\n")
        sys.stderr.write(f"{path.stem}: {mean:.0f} in {result['seconds']} s\n")
    return float(json.loads(path.read_text("utf-8"))["return"])


def peer_return(env: str, seed: int, steps: int) -> float:
    """Return what sb3-contrib's CrossQ reaches."""
    output = peer("--env", env, "--seed", str(seed), "--steps", str(steps))
    return float(output.split()[-1])


def peer(*arguments: str) -> str:
    """Standard output of `peer_crossq.py`; ends the program with the remedy without sb3-contrib."""
    python = Path(os.environ.get("SB3_PYTHON", ROOT / ".venv-sb3/bin/python"))
    if not python.exists():
        sys.stderr.write(f"{python} does not exist: make it as this file's first lines say\n")
        sys.exit(2)
    command = [str(python), str(PEER), *arguments]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  # ours
    return completed.stdout


def our_return(rung: str, env: str, seed: int, steps: int) -> float:
    """Return what our trainer reaches on a rung."""
    changes, hyperparameters, gamma = RUNGS[rung]
    before = dict(xqc.RECIPES)
    mode = str(hyperparameters["critic"])
    xqc.RECIPES[mode] = replace(xqc.RECIPES[mode], **changes)
    behavior = {
        "trainer_type": "xqc",
        "hyperparameters": hyperparameters,
        "network_settings": {"hidden_units": 256, "num_layers": 2},
        "reward_signals": {"extrinsic": {"gamma": gamma}},
        "max_steps": steps,
        "time_horizon": 1,
        "summary_freq": steps,
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = {"default_settings": behavior}
            one = pipeline.make_env(f"gymnasium:{env}", seed=seed, n_agents=1)
            result = pipeline.train(one, run, seed=seed, run_dir=folder)
            policy = pipeline.load_policy(next(iter(result.behaviors.values())).checkpoint)
            return float(np.mean([episode(env, policy, seed, k) for k in range(N_EPISODES)]))
    finally:
        xqc.RECIPES.update(before)


def episode(env: str, policy: Any, seed: int, number: int) -> float:
    """Return of an episode of the most likely actions."""
    with gymnasium.make(env) as game:
        obs, _ = game.reset(seed=1000 * seed + number)
        total, is_over = 0.0, False
        while not is_over:
            action = policy.act(obs)
            obs, reward, ended, cut, _ = game.step(policy.native(action, game.action_space)[0])
            total, is_over = total + float(reward), ended or cut
    return total


def speed(n_rounds: int) -> int:
    """Print gradient steps per second of processor time."""
    keep_freed_memory()  # as in a run of ours
    ours = {
        "crossq": stocked("xqc", CROSSQ),
        "xqc": stocked("xqc", PAPER),
        "sac": stocked("sac", {"batch_size": 256}),
    }
    gc.collect()
    gc.freeze()  # as in a run of ours, too
    rates: dict[str, list[float]] = {name: [] for name in ("sb3", *ours)}
    for _ in range(n_rounds):
        rates["sb3"].append(float(peer("--speed", str(N_TIMED)).split()[-1]))
        for name, algorithm in ours.items():
            began = time.process_time()
            for batch in algorithm.sampler.minibatches(N_TIMED):
                algorithm.learn_minibatch(batch)
                algorithm.n_updates += 1
            rates[name].append(N_TIMED / (time.process_time() - began))
    header = ["Program", "Gradient steps per second", "of sb3-contrib's CrossQ, least to most"]
    rows = []
    for name, values in rates.items():
        ratios = sorted(own / other for own, other in zip(values, rates["sb3"], strict=True))
        middle = statistics.median(ratios)
        shares = f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([name, f"{statistics.median(values):.1f}", shares])
    sys.stdout.write(table(header, rows))
    return 0


def stocked(kind: str, hyperparameters: dict[str, Any], n_rows: int = 5000) -> xqc.XQC | SAC:
    """An algorithm with random experience of HalfCheetah's shapes, after some gradient steps."""
    behavior = {
        "trainer_type": kind,
        "hyperparameters": hyperparameters,
        "network_settings": {"hidden_units": 256, "num_layers": 2},
    }
    settings = load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]
    spec = BehaviorSpec([ObservationSpec.vector(17)], ActionSpec(6, ()))
    algorithm: Any = algorithm_of(settings)(spec, settings, seed=1, device=torch.device("cpu"))
    rng = np.random.default_rng(1)
    algorithm.replay.add(
        Rollout(
            obs=[rng.normal(size=(n_rows, 17)).astype(np.float32)],
            fields={
                "continuous": np.tanh(rng.normal(size=(n_rows, 6))).astype(np.float32),
                "discrete": np.zeros((n_rows, 0), np.int64),
                "reward": rng.normal(size=n_rows).astype(np.float32),
            },
            starts=np.array([0]),
            lengths=np.array([n_rows]),
            terminated=np.array([False]),
            next_obs=[np.zeros((1, 17), np.float32)],
            slots=np.array([0]),
        )
    )
    for batch in algorithm.sampler.minibatches(10):
        algorithm.learn_minibatch(batch)
        algorithm.n_updates += 1
    trained: xqc.XQC | SAC = algorithm
    return trained


if __name__ == "__main__":
    sys.exit(main())
