"""Progress of stages for `pipeline run`: one line of JSON per event, in one file for all stages.

The environment variable `PIPELINE_PROGRESS` has the file's path. Without it a stage reports
nothing. A stage never fails because a report cannot be written.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import Interrupted

FILE = "PIPELINE_PROGRESS"
_DVC = "DVC_STAGE"
"""Environment variable that DVC sets for its stages."""
_job: dict[str, str] = {}


def log_of(stage: str, instance: str) -> Path:
    """Return the path of a stage's log; `instance` is `all` if the stage has only one instance."""
    return Path("logs", f"{stage if instance == 'all' else f'{stage}/{instance}'}.log")


@contextlib.contextmanager
def reporting(stage: str, instance: str, root: Path) -> Iterator[None]:
    """Report the start and the end of a stage to `pipeline run`.

    If `pipeline run` uses DVC, the stage's output goes to the stage's log, because DVC would mix it
    with its own output. Snakemake redirects a stage's output itself.
    """
    _job.update(stage=stage, instance=instance)
    if _DVC in os.environ:
        log = root / log_of(stage, instance)
        if os.environ.get(FILE):
            _print_to(log)
        else:
            # The log of an earlier run is deleted, because it would be taken for this run's log.
            log.unlink(missing_ok=True)
    tell(state="begun")
    state = "failed"
    try:
        yield
        state = "done"
    except (KeyboardInterrupt, Interrupted):
        state = "stopped"
        raise
    finally:
        tell(state=state)
        _job.clear()


def tell(**facts: Any) -> None:
    """Append an event of the running stage, with the time, to the file of `pipeline run`."""
    path = os.environ.get(FILE)
    if not path or not _job:
        return
    line = json.dumps({**_job, "at": time.time(), **facts}) + "\n"
    # The file only serves a display, and a stage must not fail because of a display.
    with contextlib.suppress(OSError):
        # Each line is a single write with O_APPEND, so that lines of several processes do not mix.
        # Without O_CREAT, the file is not made again after `pipeline run` has deleted it.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


def log_aside(text: str) -> Path | None:
    """Write a long text into the log of a stage of DVC, and return the log's path.

    Returns None, and writes nothing, if the output of this process goes to a log already, or if the
    process is not a stage of DVC.
    """
    if not _job or os.environ.get(FILE) or _DVC not in os.environ:
        return None
    log = log_of(**_job)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")
    return log


def _print_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    # Text in the buffers was printed before this call, and does not belong in the log.
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    # File descriptors are redirected instead of `sys.stdout`, so that libraries and child processes
    # are redirected, too.
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
