"""Several processes that learn together: their group, what they synchronise, and the workers."""
