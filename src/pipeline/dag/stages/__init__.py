"""The stages of the DAG, one file each."""
