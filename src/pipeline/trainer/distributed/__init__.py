"""Several processes that learn together: their group, synchronisation, and start and end."""
