"""`mlagents_envs.environment` of ML-Agents, by rl-pipeline."""

# ML-Agents' module shows what it imports, and scripts take these from here.
from mlagents_envs import _missing
from mlagents_envs.base_env import (
    ActionSpec,
    ActionTuple,
    BaseEnv,
    BehaviorMapping,
    BehaviorName,
    BehaviorSpec,
    DecisionSteps,
    TerminalSteps,
)
from mlagents_envs.exception import (
    UnityActionException,
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)
from mlagents_envs.side_channel.side_channel import SideChannel
from pipeline import UnityEnvironment

__getattr__ = _missing.reasons(
    {"logger": "the module's own logger; use `logging.getLogger(__name__)`"}, __name__
)
