"""The stage `report`: see `pipeline.dag.stages.report`."""

from _start import stage

if __name__ == "__main__":
    stage("report")
