"""The old name of `pipeline.dag`, for `dvc.yaml` of older projects; it exits with an error."""

import sys

_MOVED = "pipeline.stages is now pipeline.dag; write `python -m pipeline.dag` in dvc.yaml"

if __name__ == "__main__":
    sys.stderr.write(f"error: {_MOVED}\n")
    sys.exit(2)
raise ImportError(_MOVED)
