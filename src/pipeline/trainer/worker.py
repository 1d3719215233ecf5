"""Main module of the further processes of a run; see `distributed.workers`."""

from __future__ import annotations

import logging
import sys

from pipeline.errors import Interrupted, PipelineError, one_line
from pipeline.trainer.api import run_as_learner
from pipeline.trainer.distributed.workers import started_here

_log = logging.getLogger(__name__)


def work() -> int:
    """Train the first process's job in this process, and write nothing.

    Returns:
        The exit code of the process. The first process reports this process's errors.
    """
    if not started_here():  # started by `torchrun`, which prints the output of all processes
        logging.getLogger("pipeline").setLevel(logging.WARNING)
    try:
        run_as_learner()
    except Interrupted as error:
        return error.exit_code
    except (PipelineError, OSError) as error:
        _log.info("This learner stops: %s", one_line(error))
        return int(getattr(error, "exit_code", PipelineError.exit_code))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    sys.exit(work())
