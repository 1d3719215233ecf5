"""Playing episodes with an exported policy, and statistics of their returns."""
