"""`mlagents_envs.rpc_utils` of ML-Agents, by rl-pipeline."""

from mlagents_envs import _missing
from pipeline.wire.codec.decoding import behavior_spec_from as behavior_spec_from_proto
from pipeline.wire.codec.png import decode_png as process_pixels

__getattr__ = _missing.reasons(
    {
        "OffsetBytesIO PNG_HEADER": "a helper of `process_pixels`",
        "steps_from_proto": "serialize the agents as a `ListAgentInfoProto`, and give the bytes to `pipeline.wire.codec.layout_cache.Decoder(spec, name).decode`",
    },
    __name__,
)
