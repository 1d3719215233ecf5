"""The stage `propose`: see `pipeline.stages.propose`."""

from _start import stage

if __name__ == "__main__":
    stage("propose")
