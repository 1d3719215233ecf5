"""The stage `evaluate`: see `pipeline.stages.evaluate`."""

from _start import stage

if __name__ == "__main__":
    stage("evaluate")
