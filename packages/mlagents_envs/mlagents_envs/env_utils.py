"""`mlagents_envs.env_utils` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.envs.launch import (
    EnvironmentProcess as launch_executable,
)
from pipeline.envs.launch import (
    find_executable as validate_environment_path,
)

__getattr__ = _missing.reasons(
    {
        "get_platform": "use `sys.platform`",
        "logger": "the module's own logger; use `logging.getLogger(__name__)`",
    },
    __name__,
)
