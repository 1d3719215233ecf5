"""Drive an environment: launch it, step it, and see its agents as arrays."""
