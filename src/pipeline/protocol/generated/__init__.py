"""Message classes made from the .proto files; see `pipeline.protocol.generate`."""
