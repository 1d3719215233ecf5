"""`python -m pipeline.stages STAGE ...`: a stage of the project in the working folder.

For projects that `pipeline init` made, whose dvc.yaml finds no scripts beside it. The scripts of a
checkout start the code of that checkout instead, whatever is installed.
"""

import importlib
import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save yet, and no traceback to show
    from pipeline.stages.shared.process import leave
    from pipeline.stages.shared.project import PROJECT

    os.environ[PROJECT] = "."
    stage = importlib.import_module(f"{__package__}.{sys.argv[1]}")
    leave(stage.main(sys.argv[2:]))
