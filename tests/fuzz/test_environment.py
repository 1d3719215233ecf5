"""Conversations with a hostile environment, through the low-level API and in training."""

from __future__ import annotations

import tempfile
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from fuzzing.frame import fuzz
from hypothesis import strategies as st
from toys import Both

import pipeline
from pipeline.envs import launch, unity
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.side_channels import (
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    FloatPropertiesChannel,
    StatsSideChannel,
)
from pipeline.errors import UnityCommunicatorStoppedException
from pipeline.wire.channels import side_channels as wire
from pipeline.wire.codec.encoding import brain_parameters
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.transport.calls import parse_call

from .agents import SPECS, TRAINABLE_SPECS, message_of, spoil_agent, spoil_announcement
from .mutations import NAMES, messages, mutated, seldom

if TYPE_CHECKING:
    from pipeline.core.specs import BehaviorSpec

_OVER = "the script is over"
_USUAL_NAMES = st.sampled_from(("Ball?team=0", "Ball?team=1", "Ball", "Walker"))
_CHANNELS = st.sampled_from(
    (
        wire.STATS,
        wire.STATS,
        wire.STATS,
        wire.FLOAT_PROPERTIES,
        wire.ENGINE_CONFIGURATION,
        uuid.UUID(int=7),
    )
)


@st.composite
def _side_channels(draw: Any) -> bytes:
    frames = []
    for _ in range(draw(st.integers(1, 3))):
        message = wire.OutgoingMessage()
        message.write_string(draw(st.sampled_from(("", "speed", "a/b", "x" * 100))))
        message.write_float32(draw(st.floats(width=32)))
        message.write_int32(draw(st.sampled_from((0, 1, 2))))
        frames.append((draw(_CHANNELS), bytes(message.buffer)))
    return draw(mutated(st.just(wire.pack(frames)), most=2))


def _greeting(draw: Any) -> Any:
    greeting = m.UnityMessageProto(header={"status": 200})
    hello = greeting.unity_output.rl_initialization_output
    hello.communication_version, hello.package_version = "1.5.0", "3.0.0"
    hello.capabilities.baseRLCapabilities = True
    if seldom(draw, 12):
        hello.MergeFrom(draw(messages(m.UnityRLInitializationOutputProto, likely=0.3)))
    return greeting


def _announcement(draw: Any, name: str, spec: BehaviorSpec, harm: int) -> Any:
    brain = brain_parameters(name, spec, old_fields=draw(st.booleans()))
    if seldom(draw, 8 * harm):
        spoil_announcement(draw, brain)
    return brain


@st.composite
def _conversations(draw: Any, specs: Any = SPECS, *, least: int = 1, harm: int = 1) -> list[bytes]:
    """Return an environment's messages: a greeting, announcements with agents, further agents.

    Args:
        draw: Hypothesis' function that draws from a strategy.
        specs: strategy of the behaviors' specifications.
        least: fewest messages with agents.
        harm: faults are `harm` times as rare.
    """
    spec = draw(specs)
    seed = 4 * draw(st.integers(0, 99))
    names = draw(st.lists(_USUAL_NAMES, min_size=1, max_size=2, unique=True))
    if seldom(draw, 9 * harm):
        names[0] = draw(NAMES)
    out = [_greeting(draw)]
    n, n_ended = draw(st.integers(1 if least > 1 else 0, 3)), 0
    for turn in range(draw(st.integers(least, least + 11))):
        message = m.UnityMessageProto(header={"status": 200})
        if turn == 0 or seldom(draw, 20 * harm):
            brains = [_announcement(draw, name, spec, harm) for name in names]
            message.unity_output.rl_initialization_output.brain_parameters.extend(brains)
        for name in names:
            infos = message_of(draw, spec, n, n_ended, seed + turn % 4)
            if seldom(draw, 15 * harm) and infos.value:
                spoil_agent(draw, draw(st.sampled_from(list(infos.value))))
            message.unity_output.rl_output.agentInfos[name].CopyFrom(infos)
        if seldom(draw, 4 * harm):
            message.unity_output.rl_output.side_channel = draw(_side_channels())
        if seldom(draw, 30 * harm):
            message.MergeFrom(draw(messages(m.UnityMessageProto, likely=0.2)))
        n_ended = draw(st.sampled_from((0, 0, 0, 1)))
        out.append(message)
    sent = [message.SerializeToString() for message in out]
    if seldom(draw, 4 * harm):
        at = draw(st.integers(0, len(sent) - 1))
        sent[at] = draw(mutated(st.just(sent[at]), most=2))
    return sent


class _Script:
    """A replacement of the server that gives prepared messages as an environment's calls."""

    port = 5004

    def __init__(self, sent: list[bytes]) -> None:
        self._left = list(reversed(sent))

    def receive(self, *_: object) -> Any:
        if not self._left:
            raise UnityCommunicatorStoppedException(_OVER)
        return parse_call(self._left.pop())

    def reply(self, message: bytes) -> None:
        assert m.UnityMessageProto.FromString(message).header.status == 200

    def close(self, *_: object) -> None:
        self._left.clear()


def _connected(sent: list[bytes]) -> unity.UnityEnvironment:
    channels = (
        StatsSideChannel(),
        FloatPropertiesChannel(),
        EngineConfigurationChannel(),
        EnvironmentParametersChannel(),
    )
    with mock.patch.object(launch, "open_server", return_value=_Script(sent)):
        return unity.UnityEnvironment(side_channels=channels)


@fuzz(_conversations(), examples=120)
def test_messages_of_a_hostile_environment_are_accepted_or_refused(
    sent: list[bytes], folder: Path
) -> None:
    rng = np.random.default_rng(0)
    try:
        env = _connected(sent)
        env.reset()
        while True:
            for name, spec in env.behavior_specs.items():
                decision, terminal = env.get_steps(name)
                for steps in (decision, terminal):
                    shapes = [(len(steps), *obs.shape) for obs in spec.observation_specs]
                    assert [values.shape for values in steps.obs] == shapes
                env.set_actions(name, spec.action_spec.random_action(len(decision), rng))
            env.step()
    except UnityCommunicatorStoppedException as error:
        if str(error) != _OVER:
            raise


_NETWORK: dict[str, Any] = {"hidden_units": 4, "num_layers": 1, "vis_encode_type": "match3"}
_SMALL = {"network_settings": _NETWORK | {"normalize": True}, "time_horizon": 3}
_MEMORY = {"network_settings": _NETWORK | {"memory": {"memory_size": 4, "sequence_length": 2}}}
_SIGNALS = {
    "reward_signals": {
        name: {"gamma": 0.9, "network_settings": {"hidden_units": 4}}
        for name in ("curiosity", "rnd")
    }
}
_ON_POLICY = {"batch_size": 4, "buffer_size": 8, "num_epoch": 1}
_TRAINERS: tuple[dict[str, Any], ...] = (
    {"trainer_type": "ppo", "hyperparameters": _ON_POLICY, **_SMALL},
    {"trainer_type": "poca", "hyperparameters": _ON_POLICY, **_SMALL},
    {"trainer_type": "poca", "hyperparameters": _ON_POLICY, **_SMALL, **_MEMORY},
    {"trainer_type": "ppo", "hyperparameters": _ON_POLICY, **_SMALL, **_MEMORY, **_SIGNALS},
    {
        "trainer_type": "sac",
        "hyperparameters": {"batch_size": 4, "buffer_size": 16, "buffer_init_steps": 4},
        **_SMALL,
    },
)


@cache
def _warm_up() -> None:
    """Import the modules that training imports at its beginning."""
    with tempfile.TemporaryDirectory() as folder:
        for trainer in _TRAINERS:
            settings = {"behaviors": {"Toy": trainer | {"max_steps": 40}}}
            env = InProcessEnvironment(Both(n_agents=2))
            run_dir = Path(tempfile.mkdtemp(dir=folder))
            pipeline.train(env, settings, seed=1, run_dir=run_dir)


@fuzz(
    st.tuples(st.sampled_from(_TRAINERS), _conversations(TRAINABLE_SPECS, least=12, harm=4)),
    examples=10,
    warm_up=_warm_up,
)
def test_training_in_a_hostile_environment_ends_normally_or_with_a_refusal(
    example: tuple[dict[str, Any], list[bytes]], folder: Path
) -> None:
    trainer, sent = example
    steps = {"max_steps": 30, "summary_freq": 10, "checkpoint_interval": 10}
    settings = {"default_settings": trainer | steps}
    try:
        env = _connected(sent)
        pipeline.train(env, settings, seed=1, run_dir=folder / "run")
    except UnityCommunicatorStoppedException as error:
        if _OVER not in str(error):
            raise
