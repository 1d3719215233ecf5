"""The codec with messages in place of bytes: what a test writes field by field, and reads back."""

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
    """Decode the agents one by one."""
    data = UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()
    return decoding.decode_steps(ReceivedAgentInfosProto.FromString(data).value, spec, name)


def decode_list(message: Any, spec: BehaviorSpec, name: str = "") -> Steps:
    """Decode the agents of a first message, all at once if they are many."""
    return Decoder(spec, name).decode(message.SerializeToString())


def encode_actions(
    action: ActionTuple, spec: BehaviorSpec
) -> UnityRLInputProto.ListAgentActionProto:
    """Encode one entry per agent."""
    data = actions.actions_bytes(action, spec.action_spec)
    return UnityRLInputProto.ListAgentActionProto.FromString(data)


def decode_actions(message: Any, spec: ActionSpec) -> ActionTuple:
    """The actions of all agents."""
    return actions.decode_actions(message.SerializeToString(), spec)
