"""`mlagents_envs.side_channel.default_training_analytics_side_channel` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing

__getattr__ = _missing.reasons(
    {
        "DefaultTrainingAnalyticsSideChannel": "telemetry for Unity; nothing here sends it",
    },
    __name__,
)
