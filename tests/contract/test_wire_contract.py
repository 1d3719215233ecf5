"""Messages and side channels follow the protocol's specification."""

import uuid

from google.protobuf import descriptor_pool

from pipeline.wire.channels import side_channels as wire
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.generated.messages import POOL

FIELDS = {
    "UnityMessageProto": {"header": 1, "unity_output": 2, "unity_input": 3},
    "HeaderProto": {"status": 1, "message": 2},
    "UnityInputProto": {"rl_input": 1, "rl_initialization_input": 2},
    "UnityOutputProto": {"rl_output": 1, "rl_initialization_output": 2},
    "UnityRLInitializationInputProto": {
        "seed": 1, "communication_version": 2, "package_version": 3, "capabilities": 4,
        "num_areas": 5,
    },
    "UnityRLInitializationOutputProto": {
        "name": 1, "communication_version": 2, "log_path": 3, "brain_parameters": 5,
        "package_version": 7, "capabilities": 8,
    },
    "UnityRLCapabilitiesProto": {
        "baseRLCapabilities": 1, "concatenatedPngObservations": 2, "compressedChannelMapping": 3,
        "hybridActions": 4, "trainingAnalytics": 5, "variableLengthObservation": 6,
        "multiAgentGroups": 7,
    },
    "UnityRLInputProto": {"agent_actions": 1, "command": 4, "side_channel": 5},
    "UnityRLOutputProto": {"agentInfos": 2, "side_channel": 3},
    "AgentInfoProto": {
        "reward": 7, "done": 8, "max_step_reached": 9, "id": 10, "action_mask": 11,
        "observations": 13, "group_id": 14, "group_reward": 15,
    },
    "AgentActionProto": {
        "vector_actions_deprecated": 1, "value": 4, "continuous_actions": 6, "discrete_actions": 7,
    },
    "AgentInfoActionPairProto": {"agent_info": 1, "action_info": 2},
    "BrainParametersProto": {
        "vector_action_size_deprecated": 3, "vector_action_descriptions_deprecated": 5,
        "vector_action_space_type_deprecated": 6, "brain_name": 7, "is_training": 8,
        "action_spec": 9,
    },
    "ActionSpecProto": {
        "num_continuous_actions": 1, "num_discrete_actions": 2, "discrete_branch_sizes": 3,
        "action_descriptions": 4,
    },
    "ObservationProto": {
        "shape": 1, "compression_type": 2, "compressed_data": 3, "float_data": 4,
        "compressed_channel_mapping": 5, "dimension_properties": 6, "observation_type": 7,
        "name": 8,
    },
    "DemonstrationMetaProto": {
        "api_version": 1, "demonstration_name": 2, "number_steps": 3, "number_episodes": 4,
        "mean_reward": 5,
    },
}  # fmt: skip


def test_protocol_messages_and_commands_follow_the_specification():
    for name, numbers in FIELDS.items():
        descriptor = POOL.FindMessageTypeByName(f"communicator_objects.{name}")
        assert {field.name: field.number for field in descriptor.fields} == numbers
    service = POOL.FindServiceByName("communicator_objects.UnityToExternalProto")
    assert [method.name for method in service.methods] == ["Exchange"]
    assert m.UnityRLInputProto().command == m.STEP == 0
    assert (m.RESET, m.QUIT) == (1, 2)
    # mlagents_envs in the same process may register the same definitions in the default pool.
    assert POOL is not descriptor_pool.Default()


def test_side_channel_ids_and_bytes_follow_the_specification():
    message = wire.OutgoingMessage()
    message.write_int32(2)
    message.write_float32(20.0)
    data = wire.pack([(wire.ENGINE_CONFIGURATION, bytes(message.buffer))])
    assert data.hex(" ", 4) == (
        "2c3451e9 7e4fea11 b238784f 4387d1f7 08000000 02000000 0000a041"
    )  # fmt: skip
    for name, channel in (("Stats", wire.STATS), ("TrainingAnalytics", wire.TRAINING_ANALYTICS)):
        url = f"com.unity.ml-agents/{name}SideChannel"
        assert uuid.uuid5(uuid.NAMESPACE_URL, url) == channel
