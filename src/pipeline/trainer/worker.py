"""A process beyond the first of a run with several learners: see `distributed.workers`."""

from __future__ import annotations

import logging
import sys

from pipeline.errors import Interrupted, PipelineError, one_line
from pipeline.trainer.api import take_part
from pipeline.trainer.distributed.workers import started_here

_log = logging.getLogger(__name__)


def work() -> int:
    """Run a process beyond the first: train what the first one says, and write nothing.

    Returns:
        The exit code of the process. The first process reports why this one fails.
    """
    if not started_here():  # but by `torchrun`, which shows the output of all
        logging.getLogger("pipeline").setLevel(logging.WARNING)
    try:
        take_part()
    except Interrupted as error:
        return error.exit_code
    except (PipelineError, OSError) as error:
        _log.info("This learner ends: %s", one_line(error))
        return int(getattr(error, "exit_code", PipelineError.exit_code))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    sys.exit(work())
