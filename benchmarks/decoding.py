"""Microseconds to decode the message of a behavior: in full, and as one that recurs.

    python benchmarks/decoding.py [--agents 1 12 100 1000] [--rounds 20]

The messages are those of balance_ball's agents (8 numbers observed) when no episode has ended. Both
ways are measured in turn within a round, on one processor; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from pipeline.protocol.codec import Decoder, decode_list, encode_steps
from pipeline.simulators.balance_ball import BEHAVIOR, BalanceBall

if TYPE_CHECKING:
    from collections.abc import Callable


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Mean time of one of `repeats` calls."""
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats * 1e6


def compare(n_agents: int, rounds: int) -> tuple[float, float]:
    """Medians over the rounds: decoded in full, and as a recurring message."""
    simulator = BalanceBall(n_agents=n_agents)
    spec = simulator.behavior_specs[BEHAVIOR]
    decision, terminal = simulator.reset()[BEHAVIOR]
    decision.reward = np.full(n_agents, 0.1, dtype=np.float32)
    simulator.close()
    message = encode_steps(decision, terminal, spec)
    decoder = Decoder(spec, BEHAVIOR)
    decoder.decode(message)
    repeats = max(2000 // n_agents, 20)
    in_full, recurring = [], []
    for _ in range(rounds):
        in_full.append(microseconds(lambda: decode_list(message, spec, BEHAVIOR), repeats))
        recurring.append(microseconds(lambda: decoder.decode(message), repeats))
    if decoder.n_recurring != rounds * repeats:
        raise RuntimeError("the messages were not read as recurring ones")
    return statistics.median(in_full), statistics.median(recurring)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 12, 100, 1000])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.rounds < 1 or min(options.agents) < 1:
        parser.error("--rounds and --agents must be at least 1")
    print("agents     in full   recurring   ratio")  # noqa: T201
    for n_agents in options.agents:
        in_full, recurring = compare(n_agents, options.rounds)
        print(  # noqa: T201
            f"{n_agents:6d} {in_full:8.1f} us {recurring:8.1f} us {in_full / recurring:6.1f}x"
        )


if __name__ == "__main__":
    main()
