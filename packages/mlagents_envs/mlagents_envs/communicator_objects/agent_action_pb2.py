"""`mlagents_envs.communicator_objects.agent_action_pb2` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.wire.codec.generated.messages import AgentActionProto

__getattr__ = _missing.reasons(
    {
        "DESCRIPTOR": "the file's descriptor; every message has a `DESCRIPTOR` of its own",
    },
    __name__,
)
