"""A trainer for tests: a gRPC server that hands requests to the test and waits for its answers."""

import queue
from concurrent import futures

import grpc
import pytest
from wire_messages import decode_steps

from pipeline.wire.codec.actions import actions_bytes
from pipeline.wire.codec.decoding import behavior_spec_from
from pipeline.wire.codec.generated.messages import RESET, UnityMessageProto

WAIT_S = 30


class FakeTrainer:
    def __init__(self):
        self._requests = queue.SimpleQueue()
        self._answers = queue.SimpleQueue()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(
            self._exchange,
            request_deserializer=UnityMessageProto.FromString,
            response_serializer=UnityMessageProto.SerializeToString,
        )
        service = "communicator_objects.UnityToExternalProto"
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Exchange": handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.spec = None
        self.name = ""

    def _exchange(self, request, _context):
        self._requests.put(request)
        return self._answers.get(timeout=WAIT_S)

    def hear(self):
        return self._requests.get(timeout=WAIT_S)

    def say(self, message):
        self._answers.put(message)

    def greet(self, seed=1, num_areas=1):
        """Answer the handshake, and return the environment's description of itself."""
        hello = self.hear()
        answer = message()
        answer.unity_input.rl_initialization_input.seed = seed
        answer.unity_input.rl_initialization_input.num_areas = num_areas
        self.say(answer)
        self.hear()
        return hello.unity_output.rl_initialization_output

    def reset(self, side_channel=b""):
        """Send RESET, and return the first behavior's steps."""
        command = message()
        command.unity_input.rl_input.command = RESET
        command.unity_input.rl_input.side_channel = side_channel
        self.say(command)
        return self._steps()

    def step(self, actions):
        """Send actions of the first behavior, and return its steps."""
        command = message()
        command.unity_input.rl_input.agent_actions[self.name].MergeFromString(
            actions_bytes(actions, self.spec.action_spec)
        )
        self.say(command)
        return self._steps()

    def _steps(self):
        output = self.hear().unity_output
        for brain in output.rl_initialization_output.brain_parameters:
            self.name = brain.brain_name
            first = output.rl_output.agentInfos[self.name].value[0]
            self.spec = behavior_spec_from(brain, first)
        return decode_steps(output.rl_output.agentInfos[self.name].value, self.spec)

    def end(self):
        self.say(message(400))

    def stop(self):
        self.say(message(400))
        self._server.stop(0).wait()


def message(status=200):
    built = UnityMessageProto()
    built.header.status = status
    return built


@pytest.fixture
def trainer():
    fake = FakeTrainer()
    yield fake
    fake.stop()
