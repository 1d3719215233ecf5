"""The built-in simulators, each with an expert: a scripted policy."""
