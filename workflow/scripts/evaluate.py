"""The stage `evaluate`: see `pipeline.dag.stages.evaluate`."""

from _start import stage

if __name__ == "__main__":
    stage("evaluate")
