"""The codec with protobuf messages in place of bytes, which tests write field by field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pipeline.wire.codec import actions, decoding
from pipeline.wire.codec.generated.messages import (
    AgentInfoProto,
    ReceivedAgentInfosProto,
    UnityRLInputProto,
    UnityRLOutputProto,
)
from pipeline.wire.codec.layout_cache import Decoder

if TYPE_CHECKING:
    from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
    from pipeline.core.steps import Steps


def decode_steps(infos: Iterable[AgentInfoProto], spec: BehaviorSpec, name: str = "") -> Steps:
    """Return the steps of agent infos, decoded one by one."""
    data = UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()
    return decoding.decode_steps(ReceivedAgentInfosProto.FromString(data).value, spec, name)


def decode_list(message: Any, spec: BehaviorSpec, name: str = "") -> Steps:
    """Return the steps of a list of agent infos, decoded by a new `Decoder`."""
    return Decoder(spec, name).decode(message.SerializeToString())


def encode_actions(
    action: ActionTuple, spec: BehaviorSpec
) -> UnityRLInputProto.ListAgentActionProto:
    """Return a message with one entry per agent."""
    data = actions.actions_bytes(action, spec.action_spec)
    return UnityRLInputProto.ListAgentActionProto.FromString(data)


def decode_actions(message: Any, spec: ActionSpec) -> ActionTuple:
    """Return the actions of all agents in a message."""
    return actions.decode_actions(message.SerializeToString(), spec)
