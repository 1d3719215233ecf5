"""Microseconds per exchange of the two transports, side by side.

    python benchmarks/exchange.py [--exchanges 2000] [--rounds 5]

An exchange is one call of an environment and its answer. The environment is another process that
only calls, with the general gRPC runtime (as Unity's players have it) or with the pipeline's own
channel (as the built-in simulators have it). Both transports are measured in turn within a round;
the medians over the rounds are printed, so that other work on the machine touches both alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from pipeline.wire.codec.generated.messages import UnityMessageProto  # noqa: E402
from pipeline.wire.transport.calls import METHOD  # noqa: E402
from pipeline.wire.transport.http2 import Channel  # noqa: E402
from pipeline.wire.transport.server import TRANSPORTS, open_server  # noqa: E402

SIZES = {"1 kB": 1_000, "100 kB": 100_000, "2 MB": 2_000_000, "8 MB": 8_000_000}
CLIENTS = {"general gRPC runtime": "general", "own channel": "own"}
_WARM_UP = 50


def message(size: int) -> bytes:
    """Return an environment's first message, a greeting, with `size` bytes in it."""
    out = UnityMessageProto(header={"status": 200})
    out.unity_output.rl_initialization_output.name = "AcademySingleton"
    out.unity_output.rl_output.side_channel = bytes(size)
    return out.SerializeToString()


def environment(client: str, port: int, size: int, n: int) -> None:
    """Call `n` times: what the other process does."""
    # The greeting is small: a peer that is not known yet may not send 8 MB.
    calls = [message(1_000), *[message(size)] * (n - 1)]
    if client == "own":
        channel = Channel(port, METHOD)
        for data in calls:
            channel.call(data)
        channel.close()
        return
    import grpc

    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"localhost:{port}", options=options) as general:
        call = general.unary_unary(METHOD)
        for data in calls:
            call(data, wait_for_ready=True)


def exchange_us(transport: str, client: str, size: int, n: int) -> float:
    """Mean time of an exchange, after some to warm up; the answer has 1 kB."""
    answer = message(1_000)
    with open_server(transport=transport) as server:
        command = [sys.executable, __file__, "--be", client, str(server.port), str(size)]
        with subprocess.Popen([*command, str(n + _WARM_UP)]) as process:  # noqa: S603  # ourselves

            def check() -> None:
                if process.poll():
                    raise RuntimeError(f"the calling process ended with {process.returncode}")

            for k in range(n + _WARM_UP):
                if k == _WARM_UP:
                    start = time.perf_counter()
                server.receive(60, check)
                server.reply(answer)
            seconds = time.perf_counter() - start
    return seconds / n * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchanges", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--be", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        client, *numbers = options.be
        environment(client, *map(int, numbers))
        return
    columns = "  ".join(f"{transport:>10}" for transport in TRANSPORTS)
    print(f"environment's client   message  {columns}   ratio")  # noqa: T201
    for title, client in CLIENTS.items():
        for name, size in SIZES.items():
            n = max(20, options.exchanges * 1_000 // max(1_000, size // 10))
            rounds = [
                {transport: exchange_us(transport, client, size, n) for transport in TRANSPORTS}
                for _ in range(options.rounds)
            ]
            medians = [statistics.median(times[t] for times in rounds) for t in TRANSPORTS]
            ratio = statistics.median(times["grpc"] / times["sockets"] for times in rounds)
            row = "  ".join(f"{value:>7,.0f} us" for value in medians)
            print(f"{title:<21}  {name:>7}  {row}  {ratio:5.2f}x", flush=True)  # noqa: T201


if __name__ == "__main__":
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    main()
