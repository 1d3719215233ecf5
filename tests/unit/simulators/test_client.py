import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.core.specs import ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.envs.side_channels import EnvironmentParametersChannel, SideChannelManager
from pipeline.errors import UnityCommunicationException, UnityTimeOutException
from pipeline.simulators import client, registry
from pipeline.simulators.games import grid_world
from pipeline.wire.channels import side_channels
from pipeline.wire.channels.parameters import MULTI_RANGE, UNIFORM, Sampler
from pipeline.wire.codec.actions import actions_bytes
from pipeline.wire.codec.generated.messages import (
    QUIT,
    RESET,
    ReceivedMessageProto,
    UnityMessageProto,
)


def command(kind=0, side_channel=b"", actions=None):
    message = UnityMessageProto()
    message.header.status = 200
    message.unity_input.rl_input.command = kind
    message.unity_input.rl_input.side_channel = side_channel
    for name, (values, spec) in (actions or {}).items():
        entries = message.unity_input.rl_input.agent_actions[name]
        entries.MergeFromString(actions_bytes(values, spec))
    return message


def play(simulator, *commands):
    """Return the messages that a session sends for these commands and for the final end."""
    end = UnityMessageProto()
    end.header.status = 400
    requests = [message.SerializeToString() for message in (*commands, end)]
    answers, sent = iter(map(ReceivedMessageProto.FromString, requests)), []

    def exchange(request, timeout_s=None):
        sent.append(UnityMessageProto.FromString(request))
        return next(answers)

    client.Session(simulator).run(exchange)
    return sent


def parameter(name, value):
    channel = EnvironmentParametersChannel()
    channel.set_parameter(name, value)
    return SideChannelManager([channel]).outgoing()


class Recorder(grid_world.GridWorld):
    """A grid world that records its parameters and reports statistics."""

    def __init__(self, **options):
        super().__init__(**options)
        self.told = []

    def set_parameter(self, name, value):
        self.told.append((name, value))

    def stats(self):
        return [("Grid/Told", float(len(self.told)), 1)]


def test_statistics_have_their_own_side_channel_and_unused_side_channels_are_ignored():
    simulator = Recorder(n_agents=1)
    data = side_channels.pack(
        [(side_channels.ENGINE_CONFIGURATION, bytes(12)), (side_channels.FLOAT_PROPERTIES, b"x")]
    )
    sent = play(simulator, command(RESET, data), command(0, parameter("a", 1.0)))
    assert simulator.told == [("a", 1.0)]
    ((channel, payload),) = side_channels.unpack(sent[2].unity_output.rl_output.side_channel)
    message = side_channels.IncomingMessage(payload)
    read = message.read_string(), message.read_float32(), message.read_int32()
    assert (channel, read) == (side_channels.STATS, ("Grid/Told", 1.0, 1))


@pytest.mark.parametrize("first", [RESET, 0])
def test_first_command_resets_the_simulator_which_announces_each_behavior_only_once(first):
    sent = play(
        grid_world.GridWorld(n_agents=2), command(first), command(), command(RESET), command(QUIT)
    )
    assert [message.header.status for message in sent] == [200, 200, 200, 200, 400]
    assert not sent[0].HasField("unity_output")
    outputs = [message.unity_output for message in sent[1:4]]
    announced = [output.rl_initialization_output.brain_parameters for output in outputs]
    assert [[brain.brain_name for brain in brains] for brains in announced] == [
        ["GridWorld?team=0"],
        [],
        [],
    ]
    infos = outputs[0].rl_output.agentInfos["GridWorld?team=0"].value
    assert [(info.id, info.done, info.reward) for info in infos] == [(0, False, 0), (1, False, 0)]
    assert [len(info.action_mask) for info in infos] == [5, 5]


def test_error_for_a_wrong_number_of_actions_names_the_behavior_and_both_numbers():
    simulator = grid_world.GridWorld(n_agents=3)
    spec = simulator.behavior_specs[grid_world.BEHAVIOR].action_spec
    actions = {grid_world.BEHAVIOR: (ActionTuple(discrete=np.zeros((2, 1))), spec)}
    with pytest.raises(UnityCommunicationException, match=r"GridWorld.*for 2 agents, but 3"):
        play(simulator, command(RESET), command(actions=actions))


def test_sampler_sets_a_new_value_for_every_episode_until_a_fixed_value_is_sent():
    def scales(*commands):
        simulator = registry.make("balance_ball", n_agents=3)
        play(simulator, *commands)
        simulator.close()
        return [scale for _, scale in simulator._shape]

    values = Sampler(kind=MULTI_RANGE, values=(1.0, 1.5, 3.0, 3.25), seed=7)
    sampler = parameter("scale", values)
    drawn = scales(command(RESET, sampler))
    assert len(set(drawn)) == 3
    assert all(1.0 <= scale <= 1.5 or 3.0 <= scale <= 3.25 for scale in drawn)
    assert scales(command(RESET, parameter("scale", 2.0))) == [2.0] * 3  # before the command
    assert scales(command(RESET, sampler)) == drawn
    assert scales(command(RESET, sampler), command(RESET)) != drawn
    assert scales(command(RESET, sampler), command(RESET, parameter("scale", 1.25))) == [1.25] * 3


def test_simulator_that_only_has_set_parameter_receives_the_values_drawn_from_a_sampler():
    simulator, received = grid_world.GridWorld(n_agents=1), []
    only_numbers = SimpleNamespace(
        behavior_specs=simulator.behavior_specs,
        reset=simulator.reset,
        step=simulator.step,
        set_parameter=lambda *arguments: received.append(arguments),
    )
    sampler = Sampler(kind=UNIFORM, values=(2.0, 4.0), seed=1)
    play(only_numbers, command(RESET, parameter("wind", sampler)), command())
    assert [name for name, _ in received] == ["wind", "wind"]
    assert all(2.0 <= value <= 4.0 for _, value in received)
    assert received[0] != received[1]


@pytest.fixture
def converse(trainer):
    """Run `client.converse` with the trainer in a thread, and return its future."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda make, **more: pool.submit(
            client.converse, make, port=trainer.port, connect_timeout_s=20, **more
        )
        trainer.end()


def test_handshake_sends_version_3_and_all_capabilities_and_receives_seed_and_number_of_areas(
    trainer, converse
):
    calls = []

    def make(seed, areas):
        calls.append((seed, areas))
        return grid_world.GridWorld(seed=seed, n_agents=2 * areas)

    conversation = converse(make)
    hello = trainer.greet(seed=77, num_areas=3)
    decisions, _ = trainer.reset()
    decisions, _ = trainer.step(trainer.spec.action_spec.empty_action(len(decisions)))
    assert len(decisions) == 6
    trainer.end()
    assert conversation.exception(30) is None
    assert calls == [(77, 3)]
    assert (hello.package_version, hello.communication_version) == ("3.0.0", "1.5.0")
    assert len(hello.capabilities.ListFields()) == 7


class Cameras(grid_world.GridWorld):
    """A grid world whose agents also observe their image twice, as six channels."""

    def __init__(self, **options):
        super().__init__(**options)
        spec = self._specs[grid_world.BEHAVIOR]
        pixels = grid_world.SIZE * grid_world.CELL
        stacked = ObservationSpec.visual(6, pixels, pixels, "Stacked")
        observations = [*spec.observation_specs, stacked]
        self._specs = {grid_world.BEHAVIOR: BehaviorSpec(observations, spec.action_spec)}

    def _observe(self, rows):
        image, goal = super()._observe(rows)
        return [image, goal, np.concatenate((image, image), axis=1)]


@pytest.mark.parametrize(("several", "compressed"), [(True, [1, 0, 1]), (False, [1, 0, 0])])
def test_images_are_sent_as_png_without_loss_if_the_trainer_can_read_them(
    several, compressed, trainer, converse, monkeypatch
):
    answer = command()
    answer.unity_input.rl_initialization_input.capabilities.concatenatedPngObservations = several
    conversation = converse(lambda *_: Cameras(seed=3, n_agents=4), compress=True)
    trainer.hear()
    trainer.say(answer)
    trainer.hear()
    sent, hear = [], trainer.hear
    monkeypatch.setattr(trainer, "hear", lambda: sent.append(hear()) or sent[-1])
    local = Cameras(seed=3, n_agents=4)
    expected, (decisions, _) = local.reset()[grid_world.BEHAVIOR], trainer.reset()
    for _ in range(grid_world.MAX_STEP):
        actions = ActionTuple(discrete=decisions.action_mask[0].argmin(axis=1)[:, None])
        expected = local.step({grid_world.BEHAVIOR: actions})[grid_world.BEHAVIOR]
        (decisions, terminals) = trainer.step(actions)
        for received, expected_steps in zip((decisions, terminals), expected, strict=True):
            assert received.agent_id.tolist() == expected_steps.agent_id.tolist()
            for remote_obs, local_obs in zip(received.obs, expected_steps.obs, strict=True):
                np.testing.assert_array_equal(remote_obs, local_obs)
    assert len(terminals) == 4
    for message in sent:
        for info in message.unity_output.rl_output.agentInfos[grid_world.BEHAVIOR].value:
            assert [obs.compression_type for obs in info.observations] == compressed
    trainer.end()
    assert conversation.exception(30) is None


def test_lost_connection_to_the_trainer_is_an_error(trainer, converse):
    conversation = converse(lambda *_: grid_world.GridWorld(n_agents=1))
    trainer.greet()
    trainer.reset()
    trainer._server.stop(0).wait()
    error = conversation.exception(30)
    assert isinstance(error, UnityCommunicationException)
    assert f"the connection to the trainer on port {trainer.port} is lost" in str(error)


def test_failing_simulator_reports_its_error_and_then_sends_the_end_of_the_conversation(
    trainer, converse
):
    def make(*_):
        raise ZeroDivisionError

    reported = []
    conversation = converse(make, report=reported.append)
    hello = trainer.hear()
    assert hello.header.status == 200
    answer = command()
    trainer.say(answer)
    assert trainer.hear().header.status == 400
    assert isinstance(reported[0], ZeroDivisionError)
    trainer.end()
    assert isinstance(conversation.exception(30), ZeroDivisionError)


def test_simulator_reports_that_the_program_on_the_port_does_not_answer_or_is_no_trainer(
    monkeypatch,
):
    monkeypatch.setattr(client, "_GREETING_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        with pytest.raises(UnityTimeOutException, match=f"localhost:{port} did not answer"):
            client.converse(lambda *_: None, port=port)
        listener.accept()[0].close()
        monkeypatch.setattr(client, "_GREETING_S", 20.0)
        conversation = pool.submit(client.converse, lambda *_: None, port=port)
        caller, _ = listener.accept()
        caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        caller.close()
        assert isinstance(conversation.exception(30), UnityCommunicationException)
