"""`python -m pipeline.dag STAGE ...`: run a stage of the project in the working folder.

Projects of `pipeline init` use this command, because they have no folder of scripts. A checkout has
scripts, which start the code of the checkout even if another version is installed.
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
