"""`mlagents_envs.side_channel.side_channel_manager` of ML-Agents, by rl-pipeline."""

from mlagents_envs.side_channel import IncomingMessage, OutgoingMessage, SideChannel
from pipeline.envs.side_channels import SideChannelManager
