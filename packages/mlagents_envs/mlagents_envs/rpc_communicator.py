"""`mlagents_envs.rpc_communicator` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "RpcCommunicator UnityToExternalServicerImplementation": "the connection; `UnityEnvironment(transport=...)` chooses between two",
    },
    __name__,
)
