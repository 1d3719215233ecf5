"""`mlagents_envs.side_channel.incoming_message` of ML-Agents, by rl-pipeline."""

from pipeline import IncomingMessage
