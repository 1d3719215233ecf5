"""`mlagents_envs.communicator_objects.command_pb2` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.wire.codec.generated.messages import QUIT, RESET, STEP

__getattr__ = _missing.reasons(
    {
        "CommandProto": "an enumeration on the wire; its values are names beside it",
        "DESCRIPTOR": "the file's descriptor; every message has a `DESCRIPTOR` of its own",
    },
    __name__,
)
