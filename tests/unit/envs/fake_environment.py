"""An environment for tests, written with the general gRPC runtime: three agents that echo actions.

Each agent observes (message number, its previous first and second action, its id). Agent 1
ends its episode in every third message, and asks again in the same message.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))

import grpc

from pipeline.wire.codec.generated import messages as m
from pipeline.wire.transport.calls import METHOD

NAME = "Echo?team=0"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlagents-port", type=int, required=True)
    parser.add_argument("--mode", default="normal")
    parser.add_argument("--nan-at", type=int, default=1, help="message of modes nan and die")
    parser.add_argument("--quiet", action="store_true", help="do not echo the side channel")
    parser.add_argument("--wide", action="store_true", help="observations of five numbers")
    parser.add_argument("--record", type=Path, help="folder for what was received, by port")
    parser.add_argument("-logFile")
    parser.add_argument("-nographics", action="store_true")
    parser.add_argument("-batchmode", action="store_true")
    options = parser.parse_args()
    if options.record is not None:
        (options.record / f"{options.mlagents_port}.args").write_text("\n".join(sys.argv[1:]))
    sys.stdout.write("fake environment starts\n")
    sys.stdout.flush()
    if options.mode == "exit":
        sys.stderr.write("cannot find the scene\n")
        sys.exit(3)
    if options.mode == "silent":
        signal.pause()
    channel = grpc.insecure_channel(
        f"localhost:{options.mlagents_port}",
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
    )
    converse(
        channel.unary_unary(
            METHOD,
            request_serializer=m.UnityMessageProto.SerializeToString,
            response_deserializer=m.UnityMessageProto.FromString,
        ),
        options,
    )
    channel.close()


def converse(exchange: grpc.UnaryUnaryMultiCallable, options: argparse.Namespace) -> None:
    mode = options.mode
    reply = exchange(greeting(mode), wait_for_ready=True)
    if reply.header.status != 200:
        sys.exit(0)
    seed = reply.unity_input.rl_initialization_input.seed
    if options.record is not None:
        received = reply.unity_input.rl_initialization_input.SerializeToString()
        (options.record / f"{options.mlagents_port}.start").write_bytes(received)
    message = m.UnityMessageProto(header={"status": 200})
    if mode == "announced-second":
        announce(message.unity_output.rl_initialization_output)
    number, announced = 0, mode.startswith(("announced-", "observed-"))
    while True:
        reply = exchange(message)
        if reply.header.status != 200:
            return
        rl_input = reply.unity_input.rl_input
        if options.record is not None and rl_input.side_channel:
            with (options.record / f"{options.mlagents_port}.channels").open("ab") as file:
                file.write(rl_input.side_channel)
        actions = [
            list(entry.continuous_actions) for entry in rl_input.agent_actions[NAME].value
        ] or [[float(seed), 0.0]] * 3
        number = 0 if rl_input.command == m.RESET else number + 1
        if mode == "die" and number == max(2, options.nan_at):
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "quit" and number == 2:
            exchange(m.UnityMessageProto(header={"status": 400}))
            return
        message = m.UnityMessageProto(header={"status": 200})
        echo = b"" if options.quiet else rl_input.side_channel
        output = observe(number, actions, echo, extra=[0.0] * options.wide)
        message.unity_output.rl_output.CopyFrom(output)
        if not announced:
            announce(message.unity_output.rl_initialization_output)
            announced = True
        spoil(message.unity_output, number, options)


def greeting(mode: str) -> m.UnityMessageProto:
    hello = m.UnityMessageProto(header={"status": 200})
    start = hello.unity_output.rl_initialization_output
    start.name, start.package_version = "AcademySingleton", "3.0.0"
    start.communication_version = "0.15.0" if mode == "old" else "1.5.0"
    start.capabilities.baseRLCapabilities = True
    if mode in ("announced-first", "observed-first"):
        announce(start)
    if mode == "observed-first":
        hello.unity_output.rl_output.CopyFrom(observe(0, [[0.0, 0.0]] * 3, b"", []))
    return hello


def announce(start: m.UnityRLInitializationOutputProto) -> None:
    brain = start.brain_parameters.add()
    brain.brain_name = NAME
    brain.action_spec.num_continuous_actions = 2


def spoil(output: m.UnityOutputProto, number: int, options: argparse.Namespace) -> None:
    """Change a message as the option `--mode` says."""
    if options.mode == "changed" and number == 2:
        brain = output.rl_initialization_output.brain_parameters.add()
        brain.brain_name = NAME
        brain.action_spec.num_continuous_actions = 3
    if options.mode == "unannounced":
        add(output.rl_output.agentInfos["Stranger?team=0"].value, 9, number, [0.0, 0.0])
    if options.mode == "nan" and number == options.nan_at:
        infos = output.rl_output.agentInfos[NAME].value
        infos[1].observations[0].float_data.data[2] = float("nan")


def observe(
    number: int, actions: list[list[float]], echo: bytes, extra: list[float]
) -> m.UnityRLOutputProto:
    output = m.UnityRLOutputProto(side_channel=echo)
    infos = output.agentInfos[NAME].value
    if number and number % 3 == 0:
        add(infos, 1, number, actions[1] + extra).done = True
    for agent in range(3):
        add(infos, agent, number, actions[agent] + extra)
    return output


def add(infos: list, agent: int, number: int, action: list[float]) -> m.AgentInfoProto:
    info = infos.add(id=agent, reward=float(number))
    numbers = [number, *action, agent]
    obs = info.observations.add(shape=[len(numbers)], dimension_properties=[1], name="echo")
    obs.float_data.data.extend(numbers)
    return info


if __name__ == "__main__":
    main()
