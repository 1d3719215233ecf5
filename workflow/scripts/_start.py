"""How the scripts beside this file start a stage."""

import signal
import sys
from importlib import import_module
from pathlib import Path


def stage(name: str) -> None:
    """Run a stage of this checkout with the command line's words, and end the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save yet, and no traceback to show
    # A stage runs the code of the checkout it lies in, also in the copies that `dvc exp run` makes.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    from pipeline.dag.process import leave  # first, because it notes the parent

    leave(import_module(f"pipeline.dag.stages.{name}").main(sys.argv[1:]))
