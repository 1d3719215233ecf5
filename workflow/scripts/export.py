"""The stage `export`: see `pipeline.stages.export`."""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save yet, and no traceback to show
    # A stage runs the code of the checkout it lies in, also in the copies that `dvc exp run` makes.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    from pipeline.stages.shared.process import leave  # first, because it notes the parent

    # isort: split
    from pipeline.stages.export import main

    leave(main(sys.argv[1:]))
