"""Message classes made from `messages.proto`; see `pipeline.protocol.generate`."""
