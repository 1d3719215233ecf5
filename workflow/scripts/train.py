"""The stage `train`: see `pipeline.dag.stages.train`."""

from _start import stage

if __name__ == "__main__":
    stage("train")
