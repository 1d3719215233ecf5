"""The stage `sweep`: see `pipeline.dag.stages.sweep`."""

from _start import stage

if __name__ == "__main__":
    stage("sweep")
