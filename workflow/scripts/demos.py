"""The stage `demos`: see `pipeline.dag.stages.demos`."""

from _start import stage

if __name__ == "__main__":
    stage("demos")
