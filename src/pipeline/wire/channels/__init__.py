"""Side channels: their frames of bytes, environment parameters, and an environment's state."""
