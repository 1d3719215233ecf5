"""The built-in games, each with the expert that plays it."""
