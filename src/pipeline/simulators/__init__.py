"""Built-in simulators, and the loop that makes them executable environments."""
