"""`mlagents_envs.side_channel.engine_configuration_channel` of ML-Agents, by rl-pipeline."""

from mlagents_envs.side_channel import IncomingMessage, OutgoingMessage, SideChannel
from pipeline import EngineConfigurationChannel
from pipeline.envs.side_channels import EngineConfig
