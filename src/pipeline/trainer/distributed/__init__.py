"""Several processes that learn together: the group, the synchronisation, and the workers."""
