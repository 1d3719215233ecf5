"""Microseconds to decode the message of a behavior, in each of the three ways.

    python benchmarks/decoding.py [--agents 1 12 64 256 1000] [--rounds 20]

The messages are those of balance_ball's agents (8 numbers observed) when no episode has ended. They
are read agent by agent (`protocol.decoding`), field by field, and with the layout of an earlier
message (both `protocol.layout_cache`), in turn within a round, on one processor; medians over the
rounds.
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

from pipeline.simulators.games.balance_ball import BEHAVIOR, BalanceBall
from pipeline.wire.codec.decoding import decode_steps
from pipeline.wire.codec.encoding import steps_bytes
from pipeline.wire.codec.generated.messages import ReceivedAgentInfosProto
from pipeline.wire.codec.layout_cache import Decoder, read_fields

if TYPE_CHECKING:
    from collections.abc import Callable


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Mean time of one of `repeats` calls."""
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats * 1e6


def compare(n_agents: int, rounds: int) -> list[float]:
    """Medians over the rounds: agent by agent, field by field, with a known layout."""
    simulator = BalanceBall(n_agents=n_agents)
    spec = simulator.behavior_specs[BEHAVIOR]
    decision, terminal = simulator.reset()[BEHAVIOR]
    decision.reward = np.full(n_agents, 0.1, dtype=np.float32)
    simulator.close()
    data = steps_bytes(decision, terminal, spec)
    decoder = Decoder(spec, BEHAVIOR)
    decoder.decode(data)

    def field_by_field() -> None:
        fields = read_fields(data, spec, lambda *_: None)
        if fields is None:
            raise RuntimeError("the message is not read field by field")
        fields.steps(spec, BEHAVIOR)

    ways: list[Callable[[], object]] = [
        lambda: decode_steps(ReceivedAgentInfosProto.FromString(data).value, spec, BEHAVIOR),
        field_by_field,
        lambda: decoder.decode(data),
    ]
    repeats = max(2000 // n_agents, 20)
    times = [[microseconds(way, repeats) for way in ways] for _ in range(rounds)]
    if decoder.n_cached != rounds * repeats:
        raise RuntimeError("the messages were not read by their layout")
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 12, 64, 256, 1000])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.rounds < 1 or min(options.agents) < 1:
        parser.error("--rounds and --agents must be at least 1")
    print("agents  agent by agent  field by field  known layout")  # noqa: T201
    for n_agents in options.agents:
        agent, field, layout = compare(n_agents, options.rounds)
        print(f"{n_agents:6d} {agent:12.1f} us {field:12.1f} us {layout:10.1f} us")  # noqa: T201


if __name__ == "__main__":
    main()
