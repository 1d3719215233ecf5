"""The simulator's side of the state side channel."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_client import command, parameter, play

from pipeline.simulators import client, executable, registry
from pipeline.wire.channels import side_channels, state
from pipeline.wire.channels.parameters import UNIFORM, Sampler
from pipeline.wire.channels.state import StateMessageType
from pipeline.wire.codec.generated.messages import RESET, ReceivedMessageProto, UnityMessageProto


def frame(kind, content=b""):
    return side_channels.pack([(side_channels.STATE, state.message(kind, content))])


def answers(message):
    """Return type and content of each message on the state channel."""
    frames = side_channels.unpack(message.unity_output.rl_output.side_channel)
    return [state.read(data) for channel, data in frames if channel == side_channels.STATE]


def of_agents(message):
    infos = message.unity_output.rl_output.agentInfos
    return {name: agents.SerializeToString(deterministic=True) for name, agents in infos.items()}


class Player:
    """Drives a session with random actions for the agents that asked."""

    def __init__(self, name):
        self.simulator = registry.make(name, seed=3)
        self.session = client.Session(self.simulator)
        self.specs = self.simulator.behavior_specs

    def say(self, message):
        """Return the session's answer to one command."""
        received = ReceivedMessageProto.FromString(message.SerializeToString())
        request = received.unity_input.rl_input
        self.session._receive(request.side_channel)
        data = self.session._advance(request)
        return UnityMessageProto.FromString(data)

    def step(self, rng, channel=b""):
        actions = {}
        for name, n in self.session._n_asking.items():
            spec = self.specs[name].action_spec
            if n:
                actions[name] = (spec.random_action(n, rng), spec)
        return self.say(command(0, channel, actions))


@pytest.mark.parametrize("name", ["balance_ball", "couriers", "tag"])
def test_built_in_simulator_continues_exactly_from_a_restored_state(name):
    player, resumed = Player(name), Player(name)
    rng = np.random.default_rng(0)
    assert answers(player.say(command(RESET, frame(StateMessageType.CAN)))) == [
        (StateMessageType.CAN, b"")
    ]
    for _ in range(30):
        player.step(rng)
    rng, replayed_rng = np.random.default_rng(1), np.random.default_rng(1)
    first = player.step(rng, frame(StateMessageType.STATE))
    ((kind, saved),) = answers(first)
    assert kind == StateMessageType.STATE
    restored = resumed.say(command(RESET, frame(StateMessageType.RESTORE, saved)))
    assert answers(restored) == [(StateMessageType.RESTORE, b"")]
    assert not of_agents(restored)
    assert of_agents(resumed.step(replayed_rng)) == of_agents(first)
    for _ in range(30):
        assert of_agents(resumed.step(replayed_rng)) == of_agents(player.step(rng))


def test_restored_simulator_that_only_has_set_parameter_receives_the_same_sampled_values():
    """A message that restores a state draws no value: samplers continue from the saved state."""

    def wind(*messages):
        simulator, received = registry.make("grid_world", n_agents=1, seed=3), []
        numbers = SimpleNamespace(
            behavior_specs=simulator.behavior_specs,
            reset=simulator.reset,
            step=simulator.step,
            get_state=simulator.state_dict,
            set_state=simulator.load_state_dict,
            set_parameter=lambda name, value: received.append((name, value)),
        )
        return play(numbers, *messages), received

    sampler = parameter("wind", Sampler(kind=UNIFORM, values=(2.0, 4.0), seed=1))
    sent, drawn = wind(
        command(RESET, sampler), command(0, frame(StateMessageType.STATE)), command(), command()
    )
    ((_, saved),) = answers(sent[2])
    commands = [command()] * 3
    assert wind(command(RESET, frame(StateMessageType.RESTORE, saved)), *commands)[1] == drawn[1:]


def test_session_answers_whether_its_simulator_can_return_and_restore_a_state(capsys):
    simulator = registry.make("grid_world", seed=3)

    class Stateless:
        behavior_specs, reset, step = simulator.behavior_specs, simulator.reset, simulator.step

    class Named(Stateless):
        get_state, set_state = simulator.state_dict, simulator.load_state_dict

    remedy = b"give the environment get_state() and set_state(state)"
    for kind, expected in (
        (Stateless, (StateMessageType.CANNOT, b"Stateless does not give its state; " + remedy)),
        (Named, (StateMessageType.CAN, b"")),
    ):
        _, answer = play(kind(), command(RESET, frame(StateMessageType.CAN)))
        assert answers(answer) == [expected]
    assert executable.main("pong", ["--describe"]) == 0
    assert "gives its state: " in capsys.readouterr().out
    grid, ball = Player("grid_world"), Player("balance_ball")
    grid.say(command(RESET))
    ((_, saved),) = answers(grid.step(np.random.default_rng(0), frame(StateMessageType.STATE)))
    ((kind, why),) = answers(ball.say(command(RESET, frame(StateMessageType.RESTORE, saved))))
    assert kind == StateMessageType.CANNOT, "it is of another simulator"
    assert b"Error" in why


def test_reset_that_restores_a_state_begins_no_episodes_and_each_request_gets_one_answer():
    player, resumed = Player("grid_world"), Player("grid_world")
    rng = np.random.default_rng(0)
    player.say(command(RESET))
    ((_, saved),) = answers(player.step(rng, frame(StateMessageType.STATE)))
    assert answers(player.step(rng)) == []
    for _ in range(2):  # the second time in the middle of episodes
        restored = resumed.say(command(RESET, frame(StateMessageType.RESTORE, saved)))
        assert (answers(restored), of_agents(restored)) == ([(StateMessageType.RESTORE, b"")], {})
        begun = resumed.say(command(RESET))
        assert answers(begun) == []
        assert of_agents(begun), "episodes begin again"
    resumed.say(command(RESET, frame(StateMessageType.RESTORE, saved)))
    rngs = np.random.default_rng(1), np.random.default_rng(1)
    resumed.step(rngs[0])
    assert of_agents(resumed.say(command(RESET))), "the step was the message after"
