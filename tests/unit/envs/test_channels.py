import logging
import struct
import uuid

import pytest

from pipeline.envs.side_channels import (
    EngineConfig,
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    FloatPropertiesChannel,
    RawBytesChannel,
    SideChannelManager,
    StatsAggregationMethod,
    StatsSideChannel,
)
from pipeline.errors import UnityCommunicationException, UnitySideChannelException
from pipeline.wire.channels import side_channels as wire


def sent(channel) -> list[bytes]:
    return [payload for _, payload in wire.unpack(SideChannelManager([channel]).outgoing())]


def statistic(name, value, method) -> bytes:
    key = struct.pack("<i", len(name)) + name.encode()
    return wire.pack([(wire.STATS, key + struct.pack("<fi", value, method))])


@pytest.mark.parametrize("method", [-1, 4, 2**31 - 1])
def test_statistics_are_stored_until_they_are_read_and_unknown_aggregation_methods_are_refused(
    method,
):
    channel = StatsSideChannel()
    text = rf"statistic (Score){{40}}\.\.\. has the aggregation method {method}; .* 0 AVERAGE, 1 "
    with pytest.raises(UnitySideChannelException, match=text):
        SideChannelManager([channel]).deliver(statistic("Score" * 100, 1.0, method))
    SideChannelManager([channel]).deliver(2 * statistic("speed", 1.5, 2))
    value = (1.5, StatsAggregationMethod.SUM)
    assert channel.get_and_reset_stats() == {"speed": [value, value]}
    assert channel.get_and_reset_stats() == {}


def test_engine_configuration_channel_sends_one_message_for_the_size_and_one_per_other_setting():
    channel = EngineConfigurationChannel()
    channel.set_configuration(EngineConfig.default_config())
    assert sent(channel) == [
        struct.pack("<iii", 0, 80, 80),
        struct.pack("<ii", 1, 1),
        struct.pack("<if", 2, 20),
        struct.pack("<ii", 3, -1),
        struct.pack("<ii", 4, 60),
    ]
    channel.set_configuration_parameters(time_scale=1)
    assert sent(channel) == [struct.pack("<if", 2, 1)]
    with pytest.raises(UnitySideChannelException, match="width=80, height=None"):
        channel.set_configuration_parameters(width=80)
    assert sent(channel) == []


def test_environment_parameters_and_samplers_are_encoded_as_the_protocol_specifies():
    channel = EnvironmentParametersChannel()
    channel.set_float_parameter("mass", 2.5)
    channel.set_uniform_sampler_parameters("mass", 1, 2, 7)
    channel.set_gaussian_sampler_parameters("mass", 1, 0.5, 8)
    channel.set_multirangeuniform_sampler_parameters("mass", [(0, 1), (4, 5)], 9)
    key = struct.pack("<i", 4) + b"mass"
    assert sent(channel) == [
        key + struct.pack("<if", 0, 2.5),
        key + struct.pack("<iiiff", 1, 7, 0, 1, 2),
        key + struct.pack("<iiiff", 1, 8, 1, 1, 0.5),
        key + struct.pack("<iiiiffff", 1, 9, 2, 4, 0, 1, 4, 5),
    ]


def test_float_properties_set_in_one_channel_are_received_by_the_channel_at_the_other_end():
    sender, receiver = FloatPropertiesChannel(), FloatPropertiesChannel()
    sender.set_property("wind", 2.0)
    SideChannelManager([receiver]).deliver(SideChannelManager([sender]).outgoing())
    assert receiver.get_property("wind") == 2.0
    assert receiver.list_properties() == ["wind"]
    assert receiver.get_property_dict_copy() == {"wind": 2.0}
    assert receiver.get_property("rain") is None


@pytest.mark.parametrize("kind", [EngineConfigurationChannel, EnvironmentParametersChannel])
def test_side_channels_that_only_send_refuse_received_messages(kind):
    channel = kind()
    data = wire.pack([(channel.channel_id, b"x")])
    with pytest.raises(UnityCommunicationException, match=kind.__name__):
        SideChannelManager([channel]).deliver(data)


def test_unknown_side_channel_is_warned_about_once_and_other_channels_get_their_messages(caplog):
    raw = RawBytesChannel(uuid.UUID(int=7))
    manager = SideChannelManager([raw])
    frames = [(uuid.UUID(int=5), b"x"), (uuid.UUID(int=7), b"\0y"), (uuid.UUID(int=6), b"")]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            manager.deliver(wire.pack(frames))
    assert [record.message for record in caplog.records] == [
        f"Unknown side channel data received. Channel type: 00000000-0000-0000-0000-00000000000{n}."
        for n in (5, 6)
    ]
    assert raw.get_and_clear_received_messages() == [b"\0y"] * 3
    manager.deliver(wire.pack([(wire.TRAINING_ANALYTICS, b"any")]))
    assert str(wire.TRAINING_ANALYTICS) in caplog.text


def test_side_channel_messages_are_sent_once_in_the_order_of_the_channels():
    engine, parameters = EngineConfigurationChannel(), EnvironmentParametersChannel()
    raw = RawBytesChannel(uuid.UUID(int=1))
    manager = SideChannelManager([engine, parameters, raw])
    raw.send_raw_data(b"first")
    parameters.set_float_parameter("wind", 1.0)
    engine.set_configuration_parameters(time_scale=2.0)
    parameters.set_float_parameter("wind", 3.0)
    frames = wire.unpack(manager.outgoing())
    assert [channel for channel, _ in frames] == [
        wire.ENGINE_CONFIGURATION,
        wire.ENVIRONMENT_PARAMETERS,
        wire.ENVIRONMENT_PARAMETERS,
        uuid.UUID(int=1),
    ]
    assert [payload[-4:] for _, payload in frames[1:3]] == [struct.pack("<f", x) for x in (1, 3)]
    assert manager.outgoing() == b""
    manager.deliver(wire.pack([(uuid.UUID(int=1), b"a"), (uuid.UUID(int=1), b"b")]))
    assert raw.get_and_clear_received_messages() == [b"a", b"b"]
    assert raw.get_and_clear_received_messages() == []
