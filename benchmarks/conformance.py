"""Play an executable at random over the wire, and see whether it does all that it must."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
from simulators import allowed

from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N_RESETS = 3
"""Resets between the steps, beside the first one."""
_BLOCK = 20
_MARK = "PIPELINE_BENCHMARK_MARK"
_PATIENCE_S = 5.0


@dataclass(kw_only=True)
class Outcome:
    """Results of playing one executable."""

    n_wanted: int
    """Steps that were asked for."""
    start_s: float | None = None
    """From its launch to the first observations; None if it never sent any."""
    n_steps: int = 0
    """Steps that it took."""
    n_resets: int = 0
    """Resets that it answered, the first one included."""
    closed: bool = False
    """Whether it ended by itself when the conversation did."""
    n_left: int = 0
    """Processes of its own that were still there afterwards; they have been killed since."""
    env_rate: float = float("nan")
    """Steps per second, of the lower quartile of the blocks' times."""
    agent_rate: float = float("nan")
    """Decisions per second, likewise."""
    problem: str = ""
    """First line of what went wrong, empty if nothing did."""

    @property
    def failures(self) -> list[str]:
        """The checks that it failed; empty if all is well."""
        checks = {
            "did not start": self.start_s is not None,
            f"took {self.n_steps} of {self.n_wanted} steps": self.n_steps == self.n_wanted,
            f"answered {self.n_resets} of {1 + N_RESETS} resets": self.n_resets == 1 + N_RESETS,
            "did not end by itself": self.closed,
            f"left {self.n_left} processes": self.n_left == 0,
        }
        failed = [message for message, is_well in checks.items() if not is_well]
        return [*failed, self.problem] if self.problem else failed


def drive(executable: Path, *, n_steps: int, timeout_s: float = 60.0) -> Outcome:
    """Play `n_steps` random steps in an executable, close it, and count what it leaves running.

    Args:
        executable: any program that speaks the protocol.
        n_steps: exchanges with actions; at least one block of 20 for each reset.
        timeout_s: longest wait for a message, and for the end of the process.
    """
    outcome = Outcome(n_wanted=n_steps)
    with _marked() as mark:
        try:
            _play(executable, outcome, timeout_s)
        except PipelineError as error:
            outcome.problem = str(error).splitlines()[0]
        outcome.n_left = _kill_left_over(mark)
    return outcome


def _play(executable: Path, outcome: Outcome, timeout_s: float) -> None:
    begin = time.perf_counter()
    env = UnityEnvironment(executable, seed=1, no_graphics=True, timeout_wait=timeout_s)
    try:
        env.reset()
        outcome.start_s, outcome.n_resets = time.perf_counter() - begin, 1
        _step(env, outcome)
    except BaseException:
        with contextlib.suppress(PipelineError):
            env.close()
        raise
    begin = time.perf_counter()
    env.close()
    outcome.closed = time.perf_counter() - begin < timeout_s  # then it would have been killed


def _step(env: UnityEnvironment, outcome: Outcome) -> None:
    """Take the steps, with a reset after every quarter but the last."""
    rng = np.random.default_rng(0)
    times, n_decisions = np.zeros(outcome.n_wanted), 0
    part = -(-outcome.n_wanted // (1 + N_RESETS))
    for k in range(outcome.n_wanted):
        if k and k % part == 0:
            env.reset()
            outcome.n_resets += 1
        for behavior, spec in env.behavior_specs.items():
            decisions, _ = env.get_steps(behavior)
            n_decisions += len(decisions)
            if len(decisions):
                env.set_actions(behavior, allowed(decisions, spec.action_spec, rng))
        begin = time.perf_counter()
        env.step()
        times[k] = time.perf_counter() - begin
        outcome.n_steps += 1
    blocks = times[: len(times) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).mean(axis=1)
    outcome.env_rate = float(1.0 / np.percentile(blocks, 25))
    outcome.agent_rate = outcome.env_rate * n_decisions / len(times)


@contextlib.contextmanager
def _marked() -> Iterator[str]:
    """Yield a value that all processes started meanwhile have in their environment."""
    mark = uuid.uuid4().hex
    os.environ[_MARK] = mark
    try:
        yield mark
    finally:
        del os.environ[_MARK]


def _kill_left_over(mark: str) -> int:
    """Kill the processes with `mark` that do not end within seconds; return their number."""
    _, alive = psutil.wait_procs(_processes_with(mark), timeout=_PATIENCE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=1.0)
    return len(alive)


def _processes_with(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                processes.append(process)
    return processes
