"""Main module of a run's processes of rank 1 and above; see `distributed.workers`."""

import logging
import sys

from pipeline.errors import Interrupted, PipelineError, one_line
from pipeline.trainer.api import run_as_learner
from pipeline.trainer.distributed.workers import started_here

_log = logging.getLogger(__name__)


def work() -> int:
    """Train together with the first process, which reports the errors; return the exit code."""
    # `torchrun` prints the output of all processes that it starts, so they log only warnings.
    if not started_here():
        logging.getLogger("pipeline").setLevel(logging.WARNING)
    try:
        run_as_learner()
    except Interrupted as error:
        return error.exit_code
    except (PipelineError, OSError) as error:
        # The first process gets this message from the store and reports it as an error.
        _log.info("This learner stops: %s", one_line(error))
        return int(getattr(error, "exit_code", PipelineError.exit_code))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    sys.exit(work())
