"""Reproducible reinforcement learning for game and robot agents: the public Python API.

Every name in `__all__` may be imported from here. A name's module is imported on first access, so
that `import pipeline` is quick. docs/reference/python.md shows how to use the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# No other module is imported here, because its import would slow down the start of each command.
from pipeline.version import __version__

# These imports are for type checkers and editors, which do not run `__getattr__` below.
if TYPE_CHECKING:
    from pipeline.api import (
        LoadedPolicy,
        build_env,
        evaluate,
        export_policy,
        load_policy,
        make_env,
        train,
    )
    from pipeline.core.simulator import Simulator
    from pipeline.core.specs import (
        ActionSpec,
        ActionTuple,
        BehaviorSpec,
        DimensionProperty,
        ObservationSpec,
        ObservationType,
    )
    from pipeline.core.steps import DecisionStep, DecisionSteps, TerminalStep, TerminalSteps
    from pipeline.envs.base import BaseEnv, BehaviorMapping
    from pipeline.envs.in_process import InProcessEnvironment
    from pipeline.envs.registry import UnityEnvRegistry
    from pipeline.envs.side_channels import (
        EngineConfigurationChannel,
        EnvironmentParametersChannel,
        FloatPropertiesChannel,
        RawBytesChannel,
        SideChannel,
        StatsAggregationMethod,
        StatsSideChannel,
    )
    from pipeline.envs.unity import UnityEnvironment
    from pipeline.errors import (
        PipelineError,
        UnityActionException,
        UnityCommunicationException,
        UnityCommunicatorStoppedException,
        UnityEnvironmentException,
        UnityException,
        UnityObservationException,
        UnitySideChannelException,
        UnityTimeOutException,
        UnityWorkerInUseException,
    )
    from pipeline.tracking.base import Callback, Sink, Update
    from pipeline.wire.channels.side_channels import IncomingMessage, OutgoingMessage

__all__ = [
    "ActionSpec",
    "ActionTuple",
    "BaseEnv",
    "BehaviorMapping",
    "BehaviorSpec",
    "Callback",
    "DecisionStep",
    "DecisionSteps",
    "DimensionProperty",
    "EngineConfigurationChannel",
    "EnvironmentParametersChannel",
    "FloatPropertiesChannel",
    "InProcessEnvironment",
    "IncomingMessage",
    "LoadedPolicy",
    "ObservationSpec",
    "ObservationType",
    "OutgoingMessage",
    "PipelineError",
    "RawBytesChannel",
    "SideChannel",
    "Simulator",
    "Sink",
    "StatsAggregationMethod",
    "StatsSideChannel",
    "TerminalStep",
    "TerminalSteps",
    "UnityActionException",
    "UnityCommunicationException",
    "UnityCommunicatorStoppedException",
    "UnityEnvRegistry",
    "UnityEnvironment",
    "UnityEnvironmentException",
    "UnityException",
    "UnityObservationException",
    "UnitySideChannelException",
    "UnityTimeOutException",
    "UnityWorkerInUseException",
    "Update",
    "__version__",
    "build_env",
    "evaluate",
    "export_policy",
    "load_policy",
    "make_env",
    "train",
]


# For a type checker, the function would make every name a public name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name on first access."""
        # `import_module` is imported here, so that this package itself has no further public names.
        from importlib import import_module

        # The table is in this function, because `dag.sources` counts a module's name in a string as
        # an import, except in `__getattr__`. Elsewhere, the table would make these modules part of
        # the source code of every stage, because every stage imports this package.
        modules = {
            "pipeline.api": "LoadedPolicy build_env evaluate export_policy load_policy make_env "
            "train",
            "pipeline.envs.base": "BaseEnv BehaviorMapping",
            "pipeline.envs.in_process": "InProcessEnvironment",
            "pipeline.envs.registry": "UnityEnvRegistry",
            "pipeline.envs.side_channels": "EngineConfigurationChannel FloatPropertiesChannel "
            "EnvironmentParametersChannel RawBytesChannel SideChannel StatsAggregationMethod "
            "StatsSideChannel",
            "pipeline.envs.unity": "UnityEnvironment",
            "pipeline.wire.channels.side_channels": "IncomingMessage OutgoingMessage",
            "pipeline.core.simulator": "Simulator",
            "pipeline.core.specs": "ActionSpec ActionTuple BehaviorSpec DimensionProperty "
            "ObservationSpec ObservationType",
            "pipeline.core.steps": "DecisionStep DecisionSteps TerminalStep TerminalSteps",
            "pipeline.tracking.base": "Callback Sink Update",
        }
        if name in __all__:
            # All other public names are exceptions, which are in `pipeline.errors`.
            ours = (module for module, names in modules.items() if name in names.split())
            return getattr(import_module(next(ours, "pipeline.errors")), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # The public names are added, so that completion in a Python shell offers them before they are
    # imported.
    return [*globals(), *__all__]
