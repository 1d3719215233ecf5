"""The stage `check`: see `pipeline.stages.check`."""

import sys
from pathlib import Path

# A stage runs the code of the checkout it lies in, also in the copies that `dvc exp run` makes.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from pipeline.stages.check import main
from pipeline.stages.process import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
