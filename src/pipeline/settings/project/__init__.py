"""`params.yaml`: environments, demonstrations, experiments and sweeps of a project."""
