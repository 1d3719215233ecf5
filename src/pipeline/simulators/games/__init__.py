"""The built-in games, each with an expert: a scripted policy."""
