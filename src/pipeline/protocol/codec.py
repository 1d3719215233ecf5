"""Messages to batch arrays and back.

The trainer uses `Decoder`, `behavior_spec_from` and `encode_actions`; a simulator uses
`encode_steps`, `decode_actions` and `brain_parameters`. The `..._bytes` forms give what can be
merged into a message in place (`message.MergeFromString`), without an intermediate one.
"""

from pipeline.protocol.bulk import decode_list
from pipeline.protocol.decoding import (
    NonFiniteError,
    behavior_spec_from,
    decode_actions,
    decode_steps,
)
from pipeline.protocol.encoding import (
    actions_bytes,
    brain_parameters,
    compressed_steps_bytes,
    encode_actions,
    encode_steps,
    steps_bytes,
)
from pipeline.protocol.recurring import Decoder

__all__ = [
    "Decoder",
    "NonFiniteError",
    "actions_bytes",
    "behavior_spec_from",
    "brain_parameters",
    "compressed_steps_bytes",
    "decode_actions",
    "decode_list",
    "decode_steps",
    "encode_actions",
    "encode_steps",
    "steps_bytes",
]
