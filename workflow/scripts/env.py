"""The stage `env`: see `pipeline.dag.stages.env`."""

from _start import stage

if __name__ == "__main__":
    stage("env")
