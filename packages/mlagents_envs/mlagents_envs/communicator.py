"""`mlagents_envs.communicator` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "Communicator": "the connection; `UnityEnvironment(transport=...)` chooses between two",
        "PollCallback": "an alias for type hints",
    },
    __name__,
)
