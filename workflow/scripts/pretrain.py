"""The stage `pretrain`: see `pipeline.stages.pretrain`."""

from _start import stage

if __name__ == "__main__":
    stage("pretrain")
