"""ML-Agents' names: what `mlagents_envs` 1.1.0 calls what, and stand-ins for its modules.

Code that was written for `mlagents_envs` runs after its imports have been changed as `NAMES` says:
docs/how-to/migrating.md is the guide. `stand_in` spares even that. Nothing is imported from here
before it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType


class Name(NamedTuple):
    """What takes the place of a name of ML-Agents."""

    ours: str | None
    """Dotted path to import; None where there is nothing of the kind."""
    note: str = ""
    """What differs; where there is no equivalent, why, and what to use."""


_LOGGER = Name(None, "the module's own logger; use `logging.getLogger(__name__)`")
_TIMER = Name(None, "measures ML-Agents' own code; here `run_logs/timers.json`, `pipeline timers`")
_DOWNLOAD = Name(None, "a part of a download; `RemoteRegistryEntry.executable()` does it all")
_TRANSPORT = Name(None, "the connection; `UnityEnvironment(transport=...)` chooses between two")
_ENUM = Name(None, "an enumeration on the wire; its values are names beside it")
_DESCRIPTOR = Name(None, "the file's descriptor; every message has a `DESCRIPTOR` of its own")
_TELEMETRY = Name(None, "telemetry for Unity; nothing here sends it")
_ANALYTICS = "mlagents_envs.side_channel.default_training_analytics_side_channel"
_ALIAS = Name(None, "an alias for type hints")
_WRITERS = Name(None, "writes what our sinks write already: docs/how-to/tracking.md")

NAMES: dict[str, Name] = {
    "mlagents_envs.base_env.ActionSpec": Name(
        "pipeline.ActionSpec", "`random_action(n, rng)`: NumPy's global seed has no effect"
    ),
    "mlagents_envs.base_env.ActionTuple": Name("pipeline.ActionTuple"),
    "mlagents_envs.base_env.AgentId": Name("builtins.int"),
    "mlagents_envs.base_env.BaseEnv": Name("pipeline.BaseEnv"),
    "mlagents_envs.base_env.BehaviorMapping": Name("pipeline.BehaviorMapping"),
    "mlagents_envs.base_env.BehaviorName": Name("builtins.str"),
    "mlagents_envs.base_env.BehaviorSpec": Name("pipeline.BehaviorSpec"),
    "mlagents_envs.base_env.DecisionStep": Name("pipeline.DecisionStep"),
    "mlagents_envs.base_env.DecisionSteps": Name("pipeline.DecisionSteps"),
    "mlagents_envs.base_env.DimensionProperty": Name("pipeline.DimensionProperty"),
    "mlagents_envs.base_env.GroupId": Name("builtins.int"),
    "mlagents_envs.base_env.ObservationSpec": Name("pipeline.ObservationSpec"),
    "mlagents_envs.base_env.ObservationType": Name("pipeline.ObservationType"),
    "mlagents_envs.base_env.TerminalStep": Name("pipeline.TerminalStep"),
    "mlagents_envs.base_env.TerminalSteps": Name("pipeline.TerminalSteps"),
    "mlagents_envs.communicator.Communicator": _TRANSPORT,
    "mlagents_envs.communicator.PollCallback": _ALIAS,
    "mlagents_envs.env_utils.get_platform": Name(None, "use `sys.platform`"),
    "mlagents_envs.env_utils.launch_executable": Name(
        "pipeline.envs.launch.EnvironmentProcess", "takes one list: the program and its arguments"
    ),
    "mlagents_envs.env_utils.logger": _LOGGER,
    "mlagents_envs.env_utils.validate_environment_path": Name(
        "pipeline.envs.launch.find_executable", "gives a `Path`, and raises where there is none"
    ),
    "mlagents_envs.environment.UnityEnvironment": Name("pipeline.UnityEnvironment"),
    "mlagents_envs.environment.logger": _LOGGER,
    "mlagents_envs.envs.PettingZooEnvFactory": Name(
        None, "use `UnityAECEnv(default_registry[env_id].make(...))`"
    ),
    "mlagents_envs.envs.default_registry": Name("pipeline.envs.registry.default_registry"),
    "mlagents_envs.envs.logger": _LOGGER,
    "mlagents_envs.envs.pettingzoo_env_factory.PettingZooEnvFactory": Name(
        None, "use `UnityAECEnv(default_registry[env_id].make(...))`"
    ),
    "mlagents_envs.envs.pettingzoo_env_factory.logger": _LOGGER,
    "mlagents_envs.envs.unity_aec_env.UnityAECEnv": Name(
        "pipeline.envs.pettingzoo_wrapper.UnityAECEnv",
        "today's PettingZoo: docs/how-to/wrappers.md",
    ),
    "mlagents_envs.envs.unity_gym_env.ActionFlattener": Name(
        None, "use `flatten_branched=True` of the wrapper"
    ),
    "mlagents_envs.envs.unity_gym_env.GymStepResult": _ALIAS,
    "mlagents_envs.envs.unity_gym_env.UnityGymException": Name(
        "pipeline.envs.gym_wrapper.UnityGymException"
    ),
    "mlagents_envs.envs.unity_gym_env.UnityToGymWrapper": Name(
        "pipeline.envs.gym_wrapper.UnityToOldGymWrapper",
        "`UnityToGymWrapper` there has Gymnasium's interface",
    ),
    "mlagents_envs.envs.unity_gym_env.logger": _LOGGER,
    "mlagents_envs.envs.unity_parallel_env.UnityParallelEnv": Name(
        "pipeline.envs.pettingzoo_wrapper.UnityParallelEnv",
        "today's PettingZoo: docs/how-to/wrappers.md",
    ),
    "mlagents_envs.envs.unity_pettingzoo_base_env.UnityPettingzooBaseEnv": Name(
        None, "what the two wrappers shared; they extend PettingZoo's own classes"
    ),
    "mlagents_envs.exception.UnityActionException": Name("pipeline.UnityActionException"),
    "mlagents_envs.exception.UnityCommunicationException": Name(
        "pipeline.UnityCommunicationException"
    ),
    "mlagents_envs.exception.UnityCommunicatorStoppedException": Name(
        "pipeline.UnityCommunicatorStoppedException"
    ),
    "mlagents_envs.exception.UnityEnvironmentException": Name("pipeline.UnityEnvironmentException"),
    "mlagents_envs.exception.UnityException": Name("pipeline.UnityException"),
    "mlagents_envs.exception.UnityObservationException": Name("pipeline.UnityObservationException"),
    "mlagents_envs.exception.UnityPolicyException": Name("pipeline.errors.UnityPolicyException"),
    "mlagents_envs.exception.UnitySideChannelException": Name("pipeline.UnitySideChannelException"),
    "mlagents_envs.exception.UnityTimeOutException": Name("pipeline.UnityTimeOutException"),
    "mlagents_envs.exception.UnityWorkerInUseException": Name("pipeline.UnityWorkerInUseException"),
    "mlagents_envs.logging_util.CRITICAL": Name("logging.CRITICAL"),
    "mlagents_envs.logging_util.DATE_FORMAT": Name(None, "a format of ML-Agents' log"),
    "mlagents_envs.logging_util.DEBUG": Name("logging.DEBUG"),
    "mlagents_envs.logging_util.DEBUG_LOG_FORMAT": Name(None, "a format of ML-Agents' log"),
    "mlagents_envs.logging_util.ERROR": Name("logging.ERROR"),
    "mlagents_envs.logging_util.FATAL": Name("logging.FATAL"),
    "mlagents_envs.logging_util.INFO": Name("logging.INFO"),
    "mlagents_envs.logging_util.LOG_FORMAT": Name(None, "a format of ML-Agents' log"),
    "mlagents_envs.logging_util.NOTSET": Name("logging.NOTSET"),
    "mlagents_envs.logging_util.WARNING": Name("logging.WARNING"),
    "mlagents_envs.logging_util.get_logger": Name(
        "logging.getLogger", "no handler of its own; `pipeline learn` shows it all"
    ),
    "mlagents_envs.logging_util.set_log_level": Name(
        None, "use `logging.getLogger('pipeline').setLevel(...)`"
    ),
    "mlagents_envs.mock_communicator.MockCommunicator": Name(
        None, "use `pipeline.InProcessEnvironment` with a simulator for tests without a process"
    ),
    "mlagents_envs.registry.UnityEnvRegistry": Name("pipeline.UnityEnvRegistry"),
    "mlagents_envs.registry.base_registry_entry.BaseRegistryEntry": Name(
        None, "no base class is needed: `register` takes what has `identifier` and `make`"
    ),
    "mlagents_envs.registry.binary_utils.BLOCK_SIZE": _DOWNLOAD,
    "mlagents_envs.registry.binary_utils.ZipFileWithProgress": _DOWNLOAD,
    "mlagents_envs.registry.binary_utils.download_and_extract_zip": _DOWNLOAD,
    "mlagents_envs.registry.binary_utils.get_local_binary_path": _DOWNLOAD,
    "mlagents_envs.registry.binary_utils.get_local_binary_path_if_exists": _DOWNLOAD,
    "mlagents_envs.registry.binary_utils.get_tmp_dirs": _DOWNLOAD,
    "mlagents_envs.registry.binary_utils.load_local_manifest": Name(
        "pipeline.envs.registry.read_manifest", "gives entries, not the file's map"
    ),
    "mlagents_envs.registry.binary_utils.load_remote_manifest": Name(
        "pipeline.envs.registry.read_manifest", "gives entries, not the file's map"
    ),
    "mlagents_envs.registry.binary_utils.logger": _LOGGER,
    "mlagents_envs.registry.binary_utils.print_progress": _DOWNLOAD,
    "mlagents_envs.registry.default_registry": Name("pipeline.envs.registry.default_registry"),
    "mlagents_envs.registry.remote_registry_entry.RemoteRegistryEntry": Name(
        "pipeline.envs.registry.RemoteRegistryEntry", "the cache's place is PIPELINE_CACHE"
    ),
    "mlagents_envs.registry.unity_env_registry.UnityEnvRegistry": Name("pipeline.UnityEnvRegistry"),
    "mlagents_envs.registry.unity_env_registry.default_registry": Name(
        "pipeline.envs.registry.default_registry"
    ),
    "mlagents_envs.rpc_communicator.RpcCommunicator": _TRANSPORT,
    "mlagents_envs.rpc_communicator.UnityToExternalServicerImplementation": _TRANSPORT,
    "mlagents_envs.rpc_utils.OffsetBytesIO": Name(None, "a helper of `process_pixels`"),
    "mlagents_envs.rpc_utils.PNG_HEADER": Name(None, "a helper of `process_pixels`"),
    "mlagents_envs.rpc_utils.behavior_spec_from_proto": Name(
        "pipeline.protocol.decoding.behavior_spec_from"
    ),
    "mlagents_envs.rpc_utils.process_pixels": Name(
        "pipeline.protocol.png.decode_png", "takes the shape (C, H, W) for the number of channels"
    ),
    "mlagents_envs.rpc_utils.steps_from_proto": Name(
        None,
        "serialize the agents as a `ListAgentInfoProto`, and give the bytes to "
        "`pipeline.protocol.layout_cache.Decoder(spec, name).decode`",
    ),
    "mlagents_envs.side_channel.DefaultTrainingAnalyticsSideChannel": _TELEMETRY,
    "mlagents_envs.side_channel.IncomingMessage": Name("pipeline.IncomingMessage"),
    "mlagents_envs.side_channel.OutgoingMessage": Name("pipeline.OutgoingMessage"),
    "mlagents_envs.side_channel.SideChannel": Name("pipeline.SideChannel"),
    f"{_ANALYTICS}.DefaultTrainingAnalyticsSideChannel": _TELEMETRY,
    "mlagents_envs.side_channel.engine_configuration_channel.EngineConfig": Name(
        "pipeline.envs.side_channels.EngineConfig"
    ),
    "mlagents_envs.side_channel.engine_configuration_channel.EngineConfigurationChannel": Name(
        "pipeline.EngineConfigurationChannel"
    ),
    "mlagents_envs.side_channel.environment_parameters_channel.EnvironmentParametersChannel": Name(
        "pipeline.EnvironmentParametersChannel"
    ),
    "mlagents_envs.side_channel.float_properties_channel.FloatPropertiesChannel": Name(
        "pipeline.FloatPropertiesChannel"
    ),
    "mlagents_envs.side_channel.incoming_message.IncomingMessage": Name("pipeline.IncomingMessage"),
    "mlagents_envs.side_channel.outgoing_message.OutgoingMessage": Name("pipeline.OutgoingMessage"),
    "mlagents_envs.side_channel.outgoing_message.logger": _LOGGER,
    "mlagents_envs.side_channel.raw_bytes_channel.RawBytesChannel": Name(
        "pipeline.RawBytesChannel"
    ),
    "mlagents_envs.side_channel.side_channel.SideChannel": Name("pipeline.SideChannel"),
    "mlagents_envs.side_channel.side_channel.logger": _LOGGER,
    "mlagents_envs.side_channel.side_channel_manager.SideChannelManager": Name(
        "pipeline.envs.side_channels.SideChannelManager",
        "`deliver` and `outgoing` are its two directions",
    ),
    "mlagents_envs.side_channel.stats_side_channel.EnvironmentStats": _ALIAS,
    "mlagents_envs.side_channel.stats_side_channel.StatList": _ALIAS,
    "mlagents_envs.side_channel.stats_side_channel.StatsAggregationMethod": Name(
        "pipeline.StatsAggregationMethod"
    ),
    "mlagents_envs.side_channel.stats_side_channel.StatsSideChannel": Name(
        "pipeline.StatsSideChannel"
    ),
    "mlagents_envs.timers.FuncT": _ALIAS,
    "mlagents_envs.timers.GaugeNode": _TIMER,
    "mlagents_envs.timers.TIMER_FORMAT_VERSION": _TIMER,
    "mlagents_envs.timers.TimerNode": _TIMER,
    "mlagents_envs.timers.TimerStack": _TIMER,
    "mlagents_envs.timers.add_metadata": _TIMER,
    "mlagents_envs.timers.get_timer_root": _TIMER,
    "mlagents_envs.timers.get_timer_stack_for_thread": _TIMER,
    "mlagents_envs.timers.get_timer_tree": _TIMER,
    "mlagents_envs.timers.hierarchical_timer": _TIMER,
    "mlagents_envs.timers.merge_gauges": _TIMER,
    "mlagents_envs.timers.reset_timers": _TIMER,
    "mlagents_envs.timers.set_gauge": _TIMER,
    "mlagents_envs.timers.timed": _TIMER,
}
"""Every public name of `mlagents_envs` 1.1.0; those of its messages are added below."""

MEMBERS: dict[str, str] = {
    "ActionTuple.discrete_dtype": "it is always int32",
    "EngineConfigurationChannel.ConfigurationType": "numbers on the wire",
    "EnvironmentParametersChannel.EnvironmentDataTypes": "numbers on the wire",
    "EnvironmentParametersChannel.SamplerTypes": "numbers on the wire",
    "RemoteRegistryEntry.(tmp_dir)": "the cache's place is PIPELINE_CACHE",
    "SideChannelManager.(side_channels)": "called `channels`",
    "SideChannelManager.generate_side_channel_messages": "called `outgoing`",
    "SideChannelManager.process_side_channel_message": "called `deliver`",
    "UnityAECEnv.dones": "`terminations` and `truncations`",
    "UnityAECEnv.seed": "give the seed to `reset`",
    "UnityAECEnv.side_channel": "keep the channels that you gave the environment",
    "UnityParallelEnv.dones": "`step` gives `terminations` and `truncations`",
    "UnityParallelEnv.infos": "`step` gives them",
    "UnityParallelEnv.rewards": "`step` gives them",
    "UnityParallelEnv.seed": "give the seed to `reset`",
    "UnityParallelEnv.side_channel": "keep the channels that you gave the environment",
    "UnityWorkerInUseException.MESSAGE_TEMPLATE": "`str(error)` is the message",
}
"""Public members, and arguments of constructors in brackets, that our equivalents lack."""

_MESSAGES = {
    "agent_action_pb2": "AgentActionProto",
    "agent_info_action_pair_pb2": "AgentInfoActionPairProto",
    "agent_info_pb2": "AgentInfoProto",
    "brain_parameters_pb2": "ActionSpecProto BrainParametersProto",
    "capabilities_pb2": "UnityRLCapabilitiesProto",
    "command_pb2": "CommandProto STEP RESET QUIT",
    "custom_reset_parameters_pb2": "CustomResetParametersProto",
    "demonstration_meta_pb2": "DemonstrationMetaProto",
    "engine_configuration_pb2": "EngineConfigurationProto",
    "header_pb2": "HeaderProto",
    "observation_pb2": "CompressionTypeProto ObservationTypeProto NONE PNG DEFAULT GOAL_SIGNAL "
    "ObservationProto",
    "space_type_pb2": "SpaceTypeProto discrete continuous",
    "training_analytics_pb2": "TrainingBehaviorInitialized TrainingEnvironmentInitialized",
    "unity_input_pb2": "UnityInputProto",
    "unity_message_pb2": "UnityMessageProto",
    "unity_output_pb2": "UnityOutputProto",
    "unity_rl_initialization_input_pb2": "UnityRLInitializationInputProto",
    "unity_rl_initialization_output_pb2": "UnityRLInitializationOutputProto",
    "unity_rl_input_pb2": "UnityRLInputProto",
    "unity_rl_output_pb2": "UnityRLOutputProto",
    "unity_to_external_pb2": "",
    "unity_to_external_pb2_grpc": "UnityToExternalProto UnityToExternalProtoServicer "
    "UnityToExternalProtoStub add_UnityToExternalProtoServicer_to_server",
}
_ENUMS = ("CommandProto", "CompressionTypeProto", "ObservationTypeProto", "SpaceTypeProto")


def _messages() -> dict[str, Name]:
    table = {}
    for module, names in _MESSAGES.items():
        start = f"mlagents_envs.communicator_objects.{module}."
        # A module of a service, `_pb2_grpc`, has no descriptor of its own.
        if module.endswith("_pb2"):
            table[f"{start}DESCRIPTOR"] = _DESCRIPTOR
        for name in names.split():
            ours = Name(f"pipeline.protocol.generated.messages.{name}")
            other = _TRANSPORT if module.endswith("_grpc") else _ENUM
            table[start + name] = other if name in _ENUMS or other is _TRANSPORT else ours
    return table


NAMES |= _messages()

FOR_WRITERS: dict[str, Name] = {
    "mlagents.plugins.ML_AGENTS_STATS_WRITER": Name("pipeline.tracking.sinks.stats_writers.GROUP"),
    "mlagents.trainers.settings.RunOptions": Name(
        "pipeline.tracking.sinks.stats_writers.RunOptions"
    ),
    "mlagents.trainers.stats.ConsoleWriter": _WRITERS,
    "mlagents.trainers.stats.GaugeWriter": _WRITERS,
    "mlagents.trainers.stats.StatsAggregationMethod": Name("pipeline.StatsAggregationMethod"),
    "mlagents.trainers.stats.StatsPropertyType": Name(
        "pipeline.tracking.sinks.stats_writers.StatsPropertyType"
    ),
    "mlagents.trainers.stats.StatsReporter": Name(
        None, "gathers what trainers report; a writer is given it by `write_stats`"
    ),
    "mlagents.trainers.stats.StatsSummary": Name(
        "pipeline.tracking.sinks.stats_writers.StatsSummary"
    ),
    "mlagents.trainers.stats.StatsWriter": Name(
        "pipeline.tracking.sinks.stats_writers.StatsWriter"
    ),
    "mlagents.trainers.stats.TensorboardWriter": _WRITERS,
}
"""What a statistics writer imports from `mlagents`."""


def resolve(name: str) -> Any:
    """Return what takes the place of a name of ML-Agents.

    Args:
        name: dotted, such as `mlagents_envs.base_env.ActionTuple`.

    Raises:
        KeyError: ML-Agents 1.1.0 has no such name, or none that is known here.
        ImportError: There is no equivalent; the message says why.
    """
    entry = {**NAMES, **FOR_WRITERS}[name]
    if entry.ours is None:
        raise ImportError(
            f"{name} has no equivalent: {entry.note} (docs/how-to/migrating.md)", name=name
        )
    module, _, attribute = entry.ours.rpartition(".")
    return getattr(import_module(module), attribute)


def stand_in() -> None:
    """Make `import mlagents_envs` find ours, in this process, where ML-Agents is not installed.

    A package of that name that is installed is left alone.
    """
    if not any(isinstance(one, _StandIns) for one in sys.meta_path):
        sys.meta_path.append(_StandIns())  # last: it is asked for what nobody else has


class _StandIns(MetaPathFinder, Loader):
    """Finds and makes the modules that the tables have names of."""

    def __init__(self) -> None:
        self._names = {**NAMES, **FOR_WRITERS}
        parts = [name.split(".")[:-1] for name in self._names]
        self._modules = {".".join(one[:n]) for one in parts for n in range(1, len(one) + 1)}

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return how to make a module; None for one that is not ML-Agents', or beside its own."""
        top = sys.modules.get(name.partition(".")[0])
        installed = top is not None and getattr(top.__spec__, "loader", None) is not self
        if name not in self._modules or installed:
            return None
        # All as packages, or Python would not look for modules below them.
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its names; each is looked for when it is asked for."""
        start = f"{module.__name__}."

        def named(attribute: str) -> Any:
            if attribute.startswith("_"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
            # their modules also show what they import, and scripts take it from there
            elsewhere = (one for one in self._names if one.endswith(f".{attribute}"))
            name = start + attribute if start + attribute in self._names else next(elsewhere, None)
            if name is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
            return resolve(name)

        module.__dict__["__getattr__"] = named
