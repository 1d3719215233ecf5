"""`mlagents_envs.communicator_objects.unity_to_external_pb2_grpc` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "UnityToExternalProto UnityToExternalProtoServicer UnityToExternalProtoStub add_UnityToExternalProtoServicer_to_server": "the connection; `UnityEnvironment(transport=...)` chooses between two",
    },
    __name__,
)
