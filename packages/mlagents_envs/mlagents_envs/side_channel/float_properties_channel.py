"""`mlagents_envs.side_channel.float_properties_channel` of ML-Agents, by rl-pipeline."""

from mlagents_envs.side_channel import IncomingMessage, OutgoingMessage, SideChannel
from pipeline import FloatPropertiesChannel
