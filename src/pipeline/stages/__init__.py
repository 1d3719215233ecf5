"""The stages of the DAG, one file each; what they share is in `shared`."""
