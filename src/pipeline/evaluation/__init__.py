"""Episodes of an exported policy, and statistics over them."""
