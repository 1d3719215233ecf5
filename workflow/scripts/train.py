"""The stage `train`: see `pipeline.stages.train`."""

from _start import stage

if __name__ == "__main__":
    stage("train")
