"""`mlagents_envs.envs.unity_gym_env` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.envs.gym_wrapper import UnityGymException
from pipeline.envs.gym_wrapper import UnityToOldGymWrapper as UnityToGymWrapper

__getattr__ = _missing.reasons(
    {
        "GymStepResult": "an alias for type hints",
        "logger": "the module's own logger; use `logging.getLogger(__name__)`",
        "ActionFlattener": "use `flatten_branched=True` of the wrapper",
    },
    __name__,
)
