"""`mlagents_envs.side_channel.side_channel` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from mlagents_envs.side_channel import IncomingMessage, OutgoingMessage, SideChannel

__getattr__ = _missing.reasons(
    {
        "logger": "the module's own logger; use `logging.getLogger(__name__)`",
    },
    __name__,
)
