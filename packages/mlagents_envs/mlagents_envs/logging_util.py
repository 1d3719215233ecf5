"""`mlagents_envs.logging_util` of ML-Agents, by rl-pipeline."""

from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, NOTSET, WARNING
from logging import getLogger as get_logger

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "DATE_FORMAT DEBUG_LOG_FORMAT LOG_FORMAT": "a format of ML-Agents' log",
        "set_log_level": "use `logging.getLogger('pipeline').setLevel(...)`",
    },
    __name__,
)
