"""`python -m pipeline.dag STAGE ...`: run a stage of the project in the working folder.

For projects of `pipeline init`, which have no folder of scripts. The scripts of a checkout start
the code of that checkout instead, even if another version is installed.
"""

import importlib
import os
import signal
import sys

if __name__ == "__main__":
    # An interrupt during the imports ends the process at once, without a traceback: there is
    # nothing to save yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline.dag.process import leave
    from pipeline.dag.project import PROJECT

    # Without this variable, `project` would return the folder of the installed package.
    os.environ[PROJECT] = "."
    stage = importlib.import_module(f"{__package__}.stages.{sys.argv[1]}")
    leave(stage.main(sys.argv[2:]))
