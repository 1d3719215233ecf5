"""Milliseconds per minibatch of our updates against ML-Agents', side by side.

    python benchmarks/updates.py [--case ppo-64 sac-128 ...] [--rounds 5] [--compile]

Both learn from random experience with balance_ball's shapes (8 numbers seen, 2 continuous actions)
in networks of two layers of 128 with normalised observations, one reward signal, on one thread
each; batch sizes are those of ML-Agents' defaults and published configurations. Rounds alternate
between the two programs, and the ratio is taken within each round. Times are processor time.

Ours is of whole updates as the trainer calls them: PPO and POCA with values, advantages, three
epochs and statistics; SAC with taking new rows in, drawing minibatches, and statistics. ML-Agents'
is of drawing minibatches from its buffer, rewarding them (SAC) and `optimizer.update`: the values
and advantages that it computes as trajectories come in are not counted. A second ratio counts
nothing of ML-Agents' but `optimizer.update`, against all of ours. `poca-3` and
`poca-8` have groups of that many agents, of which all decide at all moments; in `poca-leaving`
groups of 8 lose one member after another. `--compile` compiles our gradient steps, and
`--units 512` makes both programs' layers wider. ML-Agents runs in the environment of `make peer`.

`--products` compares our updates of PPO and SAC, compiled and not, with their matrix products
alone: the same products with the same numbers, called in torch one after the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from acting import Products, repeated
from peer import peer_command
from tables import table

from pipeline.algos.poca import POCA
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.data.columns import Columns
from pipeline.data.groups import GroupSnapshots
from pipeline.data.rollout import Rollout
from pipeline.settings import load_run_settings
from pipeline.trainer.api import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.settings.trainer.schema import TrainerSettings

SPEC = BehaviorSpec([ObservationSpec.vector(8)], ActionSpec(2, ()))
CPU = torch.device("cpu")
LENGTH = 64
N_MINIBATCHES, N_EPOCHS = 10, 3
N_STORED, N_STEPS = 8192, 64
NETWORK = {"normalize": True, "hidden_units": 128, "num_layers": 2}


def settings(kind: str, **numbers: int) -> TrainerSettings:
    """Return the settings of a behavior with these hyperparameters."""
    behavior = {"trainer_type": kind, "hyperparameters": numbers, "network_settings": NETWORK}
    return load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]


def rollout(n_rows: int, rng: np.random.Generator, length: int = LENGTH) -> Rollout:
    """Random experience in trajectories of the same length."""
    n = n_rows // length
    n_rows = n * length
    return Rollout(
        obs=[rng.normal(size=(n_rows, 8)).astype(np.float32)],
        fields={
            "continuous": np.tanh(rng.normal(size=(n_rows, 2))).astype(np.float32),
            "discrete": np.zeros((n_rows, 0), np.int64),
            "log_prob": rng.normal(-1.0, 0.1, size=(n_rows, 2)).astype(np.float32),
            "reward": rng.normal(size=n_rows).astype(np.float32),
        },
        starts=np.arange(n) * length,
        lengths=np.full(n, length),
        terminated=np.zeros(n, np.bool_),
        next_obs=[rng.normal(size=(n, 8)).astype(np.float32)],
    )


def teamed(n_rows: int, rng: np.random.Generator, size: int, *, leave: bool) -> Rollout:
    """Return trajectories of groups of `size` agents, or of ever fewer if they `leave`."""
    n_groups = n_rows // (LENGTH * size) + (n_rows % (LENGTH * size) > 0)
    sizes = np.full(n_groups, size)
    if leave:
        sizes = size - np.arange(2 * n_rows // (LENGTH * (size + 1))) % size
    plain = rollout(int(sizes.sum()) * LENGTH, rng)
    algorithm = POCA(SPEC, settings("poca"), seed=1, device=CPU)
    moments = GroupSnapshots(Columns(algorithm.member_fields, algorithm.columns.obs))
    entity = np.zeros(plain.n_rows, np.int64)
    moment = np.zeros(plain.n_rows, np.int64)
    following = []
    first = 0
    for n_members in sizes:
        for step in range(LENGTH + 1):
            obs = rng.normal(size=(n_members, 8)).astype(np.float32)
            continuous = np.tanh(rng.normal(size=(n_members, 2))).astype(np.float32)
            members = moments.add_entities(n_members, [obs], {"continuous": continuous})
            number = moments.add_moments(members, np.array([n_members]))
            if step == LENGTH:
                following.append(np.repeat(number, n_members))
                break
            rows = first + np.arange(n_members) * LENGTH + step
            plain.obs[0][rows] = obs
            plain.fields["continuous"][rows] = continuous
            entity[rows], moment[rows] = members, number
        first += n_members * LENGTH
    return Rollout(
        obs=plain.obs,
        fields={**plain.fields, "entity": entity, "moment": moment},
        starts=plain.starts,
        lengths=plain.lengths,
        terminated=plain.terminated,
        next_obs=plain.next_obs,
        at_end={"next_moment": np.concatenate(following)},
        moments=moments,
    )


def on_policy(
    kind: str, batch_size: int, size: int, *, leave: bool, compiled: bool
) -> Callable[[], int]:
    """Return a function that makes a whole update and returns its number of minibatches."""
    n_rows = N_MINIBATCHES * batch_size
    numbers = {"batch_size": batch_size, "buffer_size": n_rows, "num_epoch": N_EPOCHS}
    algorithm_class = {"ppo": PPO, "poca": POCA}[kind]
    algorithm = algorithm_class(SPEC, settings(kind, **numbers), seed=1, device=CPU)
    if compiled:
        algorithm.compile()
    rng = np.random.default_rng(0)
    rows = rollout(n_rows, rng) if kind == "ppo" else teamed(n_rows, rng, size, leave=leave)

    def update() -> int:
        algorithm.update(rows, step=0)
        return N_EPOCHS * (rows.n_rows // batch_size)

    return update


def sac(batch_size: int, *, compiled: bool) -> Callable[[], int]:
    """Return a function that makes an update's gradient steps and returns their number."""
    sac_settings = settings("sac", batch_size=batch_size, buffer_size=N_STORED, steps_per_update=1)
    algorithm = SAC(SPEC, sac_settings, seed=1, device=CPU)
    if compiled:
        algorithm.compile()
    rng = np.random.default_rng(0)
    algorithm.replay.add(rollout(N_STORED, rng))
    new = rollout(N_STEPS, rng, length=16)
    done = 1

    def update() -> int:
        nonlocal done
        done += N_STEPS
        algorithm.update(new, step=done)
        return N_STEPS

    return update


CASES: dict[str, tuple[str, int, int, bool]] = {
    "ppo-64": ("ppo", 64, 1, False),
    "ppo-1024": ("ppo", 1024, 1, False),
    "sac-128": ("sac", 128, 1, False),
    "sac-256": ("sac", 256, 1, False),
    "poca-3": ("poca", 1024, 3, False),
    "poca-8": ("poca", 1024, 8, False),
    "poca-leaving": ("poca", 1024, 8, True),
}
"""Algorithm, batch size, agents of a group, and whether they leave it."""


def prepared(case: str, *, compiled: bool = False) -> Callable[[], int]:
    """Return the function of one round, already run once."""
    kind, batch_size, size, leave = CASES[case]
    if kind == "sac":
        run = sac(batch_size, compiled=compiled)
    else:
        run = on_policy(kind, batch_size, size, leave=leave, compiled=compiled)
    run()
    return run


def milliseconds(run: Callable[[], int]) -> float:
    """Processor time of a minibatch."""
    began = time.process_time()
    n_minibatches = run()
    return (time.process_time() - began) / n_minibatches * 1e3


def against_products(rounds: int) -> None:
    """Print a row for each algorithm and batch size, with the share of the products."""
    rows = []
    for kind in ("ppo", "sac"):
        for batch_size in (256, 1024):
            CASES[f"{kind}-{batch_size}"] = (kind, batch_size, 1, False)
            runs = [prepared(f"{kind}-{batch_size}", compiled=c) for c in (False, True)]
            with Products() as noted:
                n_minibatches = runs[0]()
            multiply = repeated(noted.calls)
            runs.append(lambda multiply=multiply, n=n_minibatches: multiply() or n)
            times = [[milliseconds(run) for run in runs] for _ in range(rounds)]
            middle = [statistics.median(column) for column in zip(*times, strict=True)]
            shares = [statistics.median(x[2] / x[k] for x in times) for k in (0, 1)]
            cells = [*(f"{value:.2f}" for value in middle), *(f"{x:.0%}" for x in shares)]
            rows.append([kind.upper(), str(batch_size), *cells])
    header = ["algorithm", "minibatch", "not compiled, ms", "compiled, ms", "products, ms"]
    print(table([*header, "share, not compiled", "share, compiled"], rows))  # noqa: T201


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--units", type=int, default=128, help="of a layer (default: 128)")
    parser.add_argument("--compile", action="store_true", help="compile our gradient steps")
    parser.add_argument("--products", action="store_true", help="compare with products alone")
    options = parser.parse_args()
    NETWORK["hidden_units"] = options.units
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.products:
        against_products(options.rounds)
        return
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [
        str(Path(peer_command()).with_name("python")),
        str(Path(__file__).with_name("peer_updates.py")),
        str(options.units),
    ]
    with subprocess.Popen(  # noqa: S603  # the program that is compared with
        command,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as peer:
        for case in options.case:
            kind, batch_size, size, leave = CASES[case]
            run = prepared(case, compiled=options.compile)
            rounds = []
            for _ in range(options.rounds):
                mine = milliseconds(run)
                peer.stdin.write(f"{kind} {batch_size} {size} {int(leave)}\n")
                rounds.append((mine, *map(float, peer.stdout.readline().split())))
            middle = [statistics.median(column) for column in zip(*rounds, strict=True)]
            ratios = sorted(theirs / mine for mine, theirs, _ in rounds)
            second = statistics.median(update / mine for mine, _, update in rounds)
            print(  # noqa: T201
                f"{case}, minibatches of {batch_size}: ours {middle[0]:.2f} ms, ML-Agents "
                f"{middle[1]:.2f} ms, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to "
                f"{ratios[-1]:.2f}); its optimizer.update {middle[2]:.2f} ms, ratio {second:.2f}",
                flush=True,
            )
        peer.stdin.close()


if __name__ == "__main__":
    main()
