"""ML-Agents' names: what replaces each name of `mlagents_envs` 1.1.0, and stand-in modules.

Code that was written for `mlagents_envs` runs after its imports have been changed as `NAMES` says:
docs/how-to/migrating.md is the guide. With `stand_in` even the imports may stay. Each replacement
is imported on first access.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


class Name(NamedTuple):
    """What replaces a name of ML-Agents."""

    ours: str | None
    """Dotted path to import; None where there is no equivalent."""
    note: str = ""
    """What differs; without an equivalent the reason, and what to use instead."""


_ZOO = "today's PettingZoo: docs/how-to/wrappers.md"
_MANIFEST = Name("pipeline.envs.registry.read_manifest", "gives entries, not the file's map")

_MESSAGES = {
    "agent_action_pb2": "AgentActionProto",
    "agent_info_action_pair_pb2": "AgentInfoActionPairProto",
    "agent_info_pb2": "AgentInfoProto",
    "brain_parameters_pb2": "ActionSpecProto BrainParametersProto",
    "capabilities_pb2": "UnityRLCapabilitiesProto",
    "command_pb2": "STEP RESET QUIT",
    "custom_reset_parameters_pb2": "CustomResetParametersProto",
    "demonstration_meta_pb2": "DemonstrationMetaProto",
    "engine_configuration_pb2": "EngineConfigurationProto",
    "header_pb2": "HeaderProto",
    "observation_pb2": "NONE PNG DEFAULT GOAL_SIGNAL ObservationProto",
    "space_type_pb2": "discrete continuous",
    "training_analytics_pb2": "TrainingBehaviorInitialized TrainingEnvironmentInitialized",
    "unity_input_pb2": "UnityInputProto",
    "unity_message_pb2": "UnityMessageProto",
    "unity_output_pb2": "UnityOutputProto",
    "unity_rl_initialization_input_pb2": "UnityRLInitializationInputProto",
    "unity_rl_initialization_output_pb2": "UnityRLInitializationOutputProto",
    "unity_rl_input_pb2": "UnityRLInputProto",
    "unity_rl_output_pb2": "UnityRLOutputProto",
}
"""What the modules of `communicator_objects` define beside enumerations."""

_EQUAL: dict[str, dict[str, str]] = {
    "": {
        "base_env": "ActionTuple BaseEnv BehaviorMapping BehaviorSpec DecisionStep DecisionSteps "
        "DimensionProperty ObservationSpec ObservationType TerminalStep TerminalSteps",
        "environment": "UnityEnvironment",
        "exception": "UnityActionException UnityCommunicationException UnityEnvironmentException "
        "UnityCommunicatorStoppedException UnityException UnityObservationException "
        "UnitySideChannelException UnityTimeOutException UnityWorkerInUseException",
        "registry": "UnityEnvRegistry",
        "registry.unity_env_registry": "UnityEnvRegistry",
        "side_channel": "IncomingMessage OutgoingMessage SideChannel",
        "side_channel.engine_configuration_channel": "EngineConfigurationChannel",
        "side_channel.environment_parameters_channel": "EnvironmentParametersChannel",
        "side_channel.float_properties_channel": "FloatPropertiesChannel",
        "side_channel.incoming_message": "IncomingMessage",
        "side_channel.outgoing_message": "OutgoingMessage",
        "side_channel.raw_bytes_channel": "RawBytesChannel",
        "side_channel.side_channel": "SideChannel",
        "side_channel.stats_side_channel": "StatsAggregationMethod StatsSideChannel",
        "mlagents.trainers.stats": "StatsAggregationMethod",
    },
    "errors": {"exception": "UnityPolicyException"},
    "envs.gym_wrapper": {"envs.unity_gym_env": "UnityGymException"},
    "envs.registry": dict.fromkeys(
        ("envs", "registry", "registry.unity_env_registry"), "default_registry"
    ),
    "envs.side_channels": {"side_channel.engine_configuration_channel": "EngineConfig"},
    "protocol.generated.messages": {
        f"communicator_objects.{module}": names for module, names in _MESSAGES.items()
    },
    "tracking.sinks.stats_writers": {
        "mlagents.trainers.settings": "RunOptions",
        "mlagents.trainers.stats": "StatsPropertyType StatsSummary StatsWriter",
    },
}
"""Names that mean the same in a module of ours, by that module and by ML-Agents' module."""

_OTHER: dict[str, Name] = {
    "base_env.ActionSpec": Name(
        "pipeline.ActionSpec", "`random_action(n, rng)`: NumPy's global seed has no effect"
    ),
    "base_env.AgentId": Name("builtins.int"),
    "base_env.BehaviorName": Name("builtins.str"),
    "base_env.GroupId": Name("builtins.int"),
    "env_utils.launch_executable": Name(
        "pipeline.envs.launch.EnvironmentProcess", "takes one list: the program and its arguments"
    ),
    "env_utils.validate_environment_path": Name(
        "pipeline.envs.launch.find_executable", "gives a `Path`, and raises where there is none"
    ),
    "envs.unity_aec_env.UnityAECEnv": Name("pipeline.envs.pettingzoo_wrapper.UnityAECEnv", _ZOO),
    "envs.unity_gym_env.UnityToGymWrapper": Name(
        "pipeline.envs.gym_wrapper.UnityToOldGymWrapper",
        "`UnityToGymWrapper` there has Gymnasium's interface",
    ),
    "envs.unity_parallel_env.UnityParallelEnv": Name(
        "pipeline.envs.pettingzoo_wrapper.UnityParallelEnv", _ZOO
    ),
    "logging_util.get_logger": Name(
        "logging.getLogger", "no handler of its own; `pipeline learn` shows it all"
    ),
    "registry.binary_utils.load_local_manifest": _MANIFEST,
    "registry.binary_utils.load_remote_manifest": _MANIFEST,
    "registry.remote_registry_entry.RemoteRegistryEntry": Name(
        "pipeline.envs.registry.RemoteRegistryEntry", "the cache's place is PIPELINE_CACHE"
    ),
    "rpc_utils.behavior_spec_from_proto": Name("pipeline.protocol.decoding.behavior_spec_from"),
    "rpc_utils.process_pixels": Name(
        "pipeline.protocol.png.decode_png", "takes the shape (C, H, W) for the number of channels"
    ),
    "side_channel.side_channel_manager.SideChannelManager": Name(
        "pipeline.envs.side_channels.SideChannelManager",
        "`deliver` and `outgoing` are its two directions",
    ),
    "mlagents.plugins.ML_AGENTS_STATS_WRITER": Name("pipeline.tracking.sinks.stats_writers.GROUP"),
}
"""Names with an equivalent that has another name, or differs."""

_NONE: dict[str, dict[str, str]] = {
    "the connection; `UnityEnvironment(transport=...)` chooses between two": {
        "communicator": "Communicator",
        "communicator_objects.unity_to_external_pb2_grpc": "UnityToExternalProto "
        "UnityToExternalProtoServicer UnityToExternalProtoStub "
        "add_UnityToExternalProtoServicer_to_server",
        "rpc_communicator": "RpcCommunicator UnityToExternalServicerImplementation",
    },
    "an alias for type hints": {
        "communicator": "PollCallback",
        "envs.unity_gym_env": "GymStepResult",
        "side_channel.stats_side_channel": "EnvironmentStats StatList",
        "timers": "FuncT",
    },
    "an enumeration on the wire; its values are names beside it": {
        "communicator_objects.command_pb2": "CommandProto",
        "communicator_objects.observation_pb2": "CompressionTypeProto ObservationTypeProto",
        "communicator_objects.space_type_pb2": "SpaceTypeProto",
    },
    "the file's descriptor; every message has a `DESCRIPTOR` of its own": {
        f"communicator_objects.{module}": "DESCRIPTOR"
        for module in (*_MESSAGES, "unity_to_external_pb2")
    },
    "use `sys.platform`": {"env_utils": "get_platform"},
    "the module's own logger; use `logging.getLogger(__name__)`": dict.fromkeys(
        (
            *("env_utils", "environment", "envs", "envs.pettingzoo_env_factory"),
            *("envs.unity_gym_env", "registry.binary_utils", "side_channel.outgoing_message"),
            "side_channel.side_channel",
        ),
        "logger",
    ),
    "use `UnityAECEnv(default_registry[env_id].make(...))`": dict.fromkeys(
        ("envs", "envs.pettingzoo_env_factory"), "PettingZooEnvFactory"
    ),
    "use `flatten_branched=True` of the wrapper": {"envs.unity_gym_env": "ActionFlattener"},
    "what the two wrappers shared; they extend PettingZoo's own classes": {
        "envs.unity_pettingzoo_base_env": "UnityPettingzooBaseEnv"
    },
    "a format of ML-Agents' log": {"logging_util": "DATE_FORMAT DEBUG_LOG_FORMAT LOG_FORMAT"},
    "use `logging.getLogger('pipeline').setLevel(...)`": {"logging_util": "set_log_level"},
    "use `pipeline.InProcessEnvironment` with a simulator for tests without a process": {
        "mock_communicator": "MockCommunicator"
    },
    "no base class is needed: `register` takes what has `identifier` and `make`": {
        "registry.base_registry_entry": "BaseRegistryEntry"
    },
    "a part of a download; `RemoteRegistryEntry.executable()` does it all": {
        "registry.binary_utils": "BLOCK_SIZE ZipFileWithProgress download_and_extract_zip "
        "get_local_binary_path get_local_binary_path_if_exists get_tmp_dirs print_progress"
    },
    "a helper of `process_pixels`": {"rpc_utils": "OffsetBytesIO PNG_HEADER"},
    "serialize the agents as a `ListAgentInfoProto`, and give the bytes to "
    "`pipeline.protocol.layout_cache.Decoder(spec, name).decode`": {
        "rpc_utils": "steps_from_proto"
    },
    "telemetry for Unity; nothing here sends it": dict.fromkeys(
        ("side_channel", "side_channel.default_training_analytics_side_channel"),
        "DefaultTrainingAnalyticsSideChannel",
    ),
    "measures ML-Agents' own code; here `run_logs/timers.json`, `pipeline timers`": {
        "timers": "GaugeNode TIMER_FORMAT_VERSION TimerNode TimerStack add_metadata get_timer_root "
        "get_timer_stack_for_thread get_timer_tree hierarchical_timer merge_gauges reset_timers "
        "set_gauge timed"
    },
    "gathers what trainers report; a writer is given it by `write_stats`": {
        "mlagents.trainers.stats": "StatsReporter"
    },
    "writes what our sinks write already: docs/how-to/tracking.md": {
        "mlagents.trainers.stats": "ConsoleWriter GaugeWriter TensorboardWriter"
    },
}
"""Names without an equivalent, by the reason and by their module."""


def _listed(table: dict[str, dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the dotted name and its last part for each name of a table."""
    for key, modules in table.items():
        for module, names in modules.items():
            yield from ((key, f"{module}.{name}", name) for name in names.split())


def _every() -> Iterator[tuple[str, Name]]:
    yield from _OTHER.items()
    for level in ("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARNING"):
        yield f"logging_util.{level}", Name(f"logging.{level}")
    for ours, name, last in _listed(_EQUAL):
        # Joined: a string that begins with the package's name and a dot would count as an import;
        # see `stages.shared.sources`.
        yield name, Name(".".join(part for part in ("pipeline", ours, last) if part))
    for reason, name, _ in _listed(_NONE):
        yield name, Name(None, reason)


NAMES: dict[str, Name] = {
    name if name.startswith("mlagents.") else f"mlagents_envs.{name}": entry
    for name, entry in _every()
}
"""Every public name of `mlagents_envs` 1.1.0; of `mlagents`, what a statistics writer imports."""


def resolve(name: str) -> Any:
    """Return what replaces a dotted name, such as `mlagents_envs.base_env.ActionTuple`.

    Raises:
        KeyError: ML-Agents 1.1.0 has no such name, or `NAMES` does not list it.
        ImportError: There is no equivalent; the message says why.
    """
    entry = NAMES[name]
    if entry.ours is None:
        raise ImportError(
            f"{name} has no equivalent: {entry.note} (docs/how-to/migrating.md)", name=name
        )
    module, _, attribute = entry.ours.rpartition(".")
    return getattr(import_module(module), attribute)


def stand_in() -> None:
    """Make `import mlagents_envs` work in this process where ML-Agents is not installed.

    An installed package of that name is left alone.
    """
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.append(_StandIns())  # last: only for modules that no other finder has


class _StandIns(MetaPathFinder, Loader):
    """Finds and makes the modules whose names are in `NAMES`."""

    def __init__(self) -> None:
        parts = [name.split(".")[:-1] for name in NAMES]
        self._modules = {
            ".".join(module[:n]) for module in parts for n in range(1, len(module) + 1)
        }

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return a module's spec; None for other modules and where ML-Agents is installed."""
        top = sys.modules.get(name.partition(".")[0])
        installed = top is not None and getattr(top.__spec__, "loader", None) is not self
        if name not in self._modules or installed:
            return None
        # All as packages, or Python would not look for modules below them.
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its names; each is resolved on access."""
        start = f"{module.__name__}."

        def named(attribute: str) -> Any:
            if attribute.startswith("_"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
            # their modules also show what they import, and scripts take it from there
            elsewhere = (full_name for full_name in NAMES if full_name.endswith(f".{attribute}"))
            name = start + attribute if start + attribute in NAMES else next(elsewhere, None)
            if name is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
            return resolve(name)

        module.__dict__["__getattr__"] = named
