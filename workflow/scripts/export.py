"""The stage `export`: see `pipeline.dag.stages.export`."""

from _start import stage

if __name__ == "__main__":
    stage("export")
