"""The stage `pretrain`: see `pipeline.dag.stages.pretrain`."""

from _start import stage

if __name__ == "__main__":
    stage("pretrain")
