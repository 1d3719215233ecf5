"""The stage `report`: see `pipeline.stages.report`."""

from _start import stage

if __name__ == "__main__":
    stage("report")
