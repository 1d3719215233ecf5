"""`mlagents_envs.mock_communicator` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "MockCommunicator": "use `pipeline.InProcessEnvironment` with a simulator for tests without a process",
    },
    __name__,
)
