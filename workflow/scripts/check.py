"""The stage `check`: see `pipeline.dag.stages.check`."""

from _start import stage

if __name__ == "__main__":
    stage("check")
