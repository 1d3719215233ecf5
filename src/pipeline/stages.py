"""The old name of `dag`."""

raise ImportError("pipeline.stages is now pipeline.dag; write `python -m pipeline.dag` in dvc.yaml")
