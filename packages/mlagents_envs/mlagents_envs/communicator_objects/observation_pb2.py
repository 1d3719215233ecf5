"""`mlagents_envs.communicator_objects.observation_pb2` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.wire.codec.generated.messages import DEFAULT, GOAL_SIGNAL, NONE, PNG, ObservationProto

__getattr__ = _missing.reasons(
    {
        "CompressionTypeProto ObservationTypeProto": "an enumeration on the wire; its values are names beside it",
        "DESCRIPTOR": "the file's descriptor; every message has a `DESCRIPTOR` of its own",
    },
    __name__,
)
