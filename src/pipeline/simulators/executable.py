"""The `main` of every packed executable: its command line, its log, its signals, its exit code."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError, UnityException
from pipeline.simulators import arguments, registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.protocol.simulator import Simulator

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


def main(name: str, argv: Sequence[str], options: dict[str, Any] | None = None) -> int:
    """Run the simulator called `name` as an environment.

    Args:
        name: one of `registry.NAMES` or `registry.BRIDGES`.
        argv: arguments after the program's own name.
        options: keywords for the simulator, fixed when the executable was built.

    Returns:
        Exit code: 0 after the trainer ended the conversation, 1 if it is not there or is gone,
        2 for a mistake in the arguments or parameters.
    """
    own = registry.entry(name)
    chosen = {"n_agents": own.n_agents, **(options or {})}
    shown = str(chosen.get("id", name))
    usage = arguments.USAGE.format(
        program=shown, summary=own.summary, counted=own.counted, n_agents=chosen["n_agents"]
    )
    try:
        parsed = arguments.parse(argv)
    except PipelineError as error:
        sys.stderr.write(f"{shown}: {error}\n\n{usage}")
        return 2
    if parsed.help:
        sys.stdout.write(usage)
        return 0
    if parsed.describe:
        return _describe(name, parsed, chosen)
    if parsed.port is None:
        sys.stderr.write(f"{shown}: --mlagents-port is missing.\n\n{usage}")
        return 2
    _set_up_log(parsed.log_file)
    if parsed.ignored:
        _log.info("Ignored arguments: %s", " ".join(parsed.ignored))
    _set_up_signals()
    return _run(name, parsed, chosen)


def _describe(name: str, parsed: arguments.PlayerArguments, options: dict[str, Any]) -> int:
    """Begin an episode, and print what came of it."""
    from pipeline.simulators.describing import description

    n_agents = parsed.n_agents or options.pop("n_agents")
    options.pop("n_agents", None)
    try:
        simulator = registry.make(name, n_agents=n_agents, **options)
        text = description(simulator)
        simulator.close()
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def _run(name: str, parsed: arguments.PlayerArguments, options: dict[str, Any]) -> int:
    from pipeline.simulators import client

    shown = options.get("id", name)
    per_area = options.pop("n_agents")
    per_area = parsed.n_agents or per_area
    try:
        client.converse(
            partial(_make, name, per_area, options),
            port=parsed.port or 0,
            connect_timeout_s=parsed.connect_timeout_s,
            compress=parsed.compress,
        )
    except PipelineError as error:
        _log.error("%s: %s", shown, error)  # the message says all a user needs
        return 1 if isinstance(error, UnityException) else 2
    return 0


def _make(name: str, per_area: int, options: dict[str, Any], seed: int, areas: int) -> Simulator:
    simulator = registry.make(name, seed=seed, n_agents=per_area * areas, **options)
    gc.collect()
    gc.freeze()  # what is here now stays to the end: the collector need not look at it again
    return simulator


def _set_up_log(log_file: str | None) -> None:
    """Send log lines to the file, or to the standard error if there is none or it is unusable."""
    handler: logging.Handler = logging.StreamHandler()
    problem = None
    if log_file not in (None, "-"):
        try:
            Path(str(log_file)).parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(str(log_file), mode="w", encoding="utf-8")
        except OSError as error:
            problem = error
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(levelname)s %(message)s")
    if problem is not None:
        _log.warning("-logFile: %s; log lines come here instead.", problem)


def _set_up_signals() -> None:
    """End quietly on Ctrl+C, and with the process that started this one.

    Linux sends the parent-death signal also when only the parent's starting thread ends, so the
    handler looks whether the parent itself is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()

    def leave_with_parent(_number: int, _frame: object) -> None:
        if os.getppid() != parent:
            with contextlib.suppress(OSError):
                os.write(2, b"the process that started this environment is gone; it ends.\n")
            os._exit(1)

    signal.signal(signal.SIGUSR1, leave_with_parent)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)
