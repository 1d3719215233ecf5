"""Side channels: their frames, environment parameters, and the state of an environment."""
