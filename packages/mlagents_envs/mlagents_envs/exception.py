"""`mlagents_envs.exception` of ML-Agents, by rl-pipeline."""

from pipeline import (
    UnityActionException,
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityException,
    UnityObservationException,
    UnitySideChannelException,
    UnityTimeOutException,
    UnityWorkerInUseException,
)
from pipeline.errors import UnityPolicyException
