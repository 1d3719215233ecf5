"""The learning algorithms, each in a file of its own."""
