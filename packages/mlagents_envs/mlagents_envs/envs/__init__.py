"""`mlagents_envs.envs` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.envs.registry import default_registry

__getattr__ = _missing.reasons(
    {
        "logger": "the module's own logger; use `logging.getLogger(__name__)`",
        "PettingZooEnvFactory": "use `UnityAECEnv(default_registry[env_id].make(...))`",
    },
    __name__,
)
