"""Message classes made from `messages.proto`; see `pipeline.wire.codec.generate`."""
