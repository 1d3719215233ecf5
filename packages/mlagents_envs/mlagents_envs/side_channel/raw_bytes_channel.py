"""`mlagents_envs.side_channel.raw_bytes_channel` of ML-Agents, by rl-pipeline."""

from mlagents_envs.side_channel import IncomingMessage, OutgoingMessage, SideChannel
from pipeline import RawBytesChannel
