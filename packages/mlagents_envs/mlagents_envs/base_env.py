"""`mlagents_envs.base_env` of ML-Agents, by rl-pipeline."""

from pipeline import (
    ActionSpec,
    ActionTuple,
    BaseEnv,
    BehaviorMapping,
    BehaviorSpec,
    DecisionStep,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalStep,
    TerminalSteps,
)

AgentId = int
BehaviorName = str
GroupId = int
