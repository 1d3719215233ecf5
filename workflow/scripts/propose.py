"""The stage `propose`: see `pipeline.dag.stages.propose`."""

from _start import stage

if __name__ == "__main__":
    stage("propose")
