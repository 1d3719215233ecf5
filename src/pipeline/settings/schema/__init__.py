"""The settings of the present configuration format, as frozen dataclasses."""

from pipeline.settings.schema.demonstrations import DemoPath, DemoSource
from pipeline.settings.schema.hyperparameters import (
    HYPERPARAMETERS,
    Hyperparameters,
    HyperparameterSettings,
    OnPolicySettings,
    POCASettings,
    PPOSettings,
    SACSettings,
)
from pipeline.settings.schema.kinds import GoalConditioning, Schedule, VisualEncoder
from pipeline.settings.schema.network import MemorySettings, NetworkSettings
from pipeline.settings.schema.parameters import (
    SAMPLERS,
    CompletionCriteria,
    ConstantSampler,
    EnvironmentParameter,
    GaussianSampler,
    Lesson,
    MultiRangeUniformSampler,
    Sampler,
    UniformSampler,
)
from pipeline.settings.schema.reward_signals import (
    REWARD_SIGNALS,
    CuriositySettings,
    ExtrinsicSettings,
    GAILSettings,
    RewardSignalSettings,
    RNDSettings,
)
from pipeline.settings.schema.run import (
    CheckpointSettings,
    EngineSettings,
    EnvironmentSettings,
    RunSettings,
    TorchSettings,
)
from pipeline.settings.schema.trainer import (
    BehavioralCloningSettings,
    SelfPlaySettings,
    TrainerSettings,
)

__all__ = [
    "HYPERPARAMETERS",
    "REWARD_SIGNALS",
    "SAMPLERS",
    "BehavioralCloningSettings",
    "CheckpointSettings",
    "CompletionCriteria",
    "ConstantSampler",
    "CuriositySettings",
    "DemoPath",
    "DemoSource",
    "EngineSettings",
    "EnvironmentParameter",
    "EnvironmentSettings",
    "ExtrinsicSettings",
    "GAILSettings",
    "GaussianSampler",
    "GoalConditioning",
    "HyperparameterSettings",
    "Hyperparameters",
    "Lesson",
    "MemorySettings",
    "MultiRangeUniformSampler",
    "NetworkSettings",
    "OnPolicySettings",
    "POCASettings",
    "PPOSettings",
    "RNDSettings",
    "RewardSignalSettings",
    "RunSettings",
    "SACSettings",
    "Sampler",
    "Schedule",
    "SelfPlaySettings",
    "TorchSettings",
    "TrainerSettings",
    "UniformSampler",
    "VisualEncoder",
]
