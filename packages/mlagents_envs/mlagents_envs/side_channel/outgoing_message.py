"""`mlagents_envs.side_channel.outgoing_message` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline import OutgoingMessage

__getattr__ = _missing.reasons(
    {
        "logger": "the module's own logger; use `logging.getLogger(__name__)`",
    },
    __name__,
)
