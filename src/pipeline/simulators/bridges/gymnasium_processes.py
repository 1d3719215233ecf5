"""Copies of a Gymnasium environment in several processes, with the same steps as in one process.

`python -m pipeline.simulators.bridges.gymnasium_processes DESCRIPTOR` steps the copies of another
process, which has the other end of the socket with this file descriptor.
"""

import contextlib
import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from pipeline import machine
from pipeline.core.specs import ActionTuple, BehaviorSpec
from pipeline.core.steps import Steps
from pipeline.errors import PipelineError, UnityEnvironmentException, where
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator, make_environment

_log = logging.getLogger(__name__)
_N_TIMED_STEPS, _TIMED_S = 20, 0.05
_MESSAGE_S = 0.12e-3
"""Seconds that the messages of a step take, which includes waking the other process."""
_WORK_S = 2 * _MESSAGE_S
"""Least time of the copies of one process in a step."""
_END_WAIT_S = 5.0


def shares(env_id: str, kwargs: Mapping[str, Any], n_copies: int) -> list[int]:
    """Return how many copies each process should step, this process first; no result depends on it.

    SettingsError if the environment cannot be made.
    """
    n_processes = min(machine.n_processors(), n_copies)
    if n_processes == 1 or os.name != "posix":
        return [n_copies]
    step_s = _step_s(env_id, kwargs)
    n_processes = min(n_processes, int(n_copies * step_s / _WORK_S))
    if n_processes <= 1:
        return [n_copies]
    text = "%s: %d processes step the %d copies, as a step of one copy takes %.2f ms."
    _log.info(text, env_id, n_processes, n_copies, 1e3 * step_s)
    # This process can step more copies than another one while the messages are under way.
    ahead = (n_processes - 1) * _MESSAGE_S / step_s
    n_own = min(round((n_copies + ahead) / n_processes), n_copies - n_processes + 1)
    n_others, n_more = divmod(n_copies - n_own, n_processes - 1)
    return [n_own, *(n_others + (k < n_more) for k in range(n_processes - 1))]


def _step_s(env_id: str, kwargs: Mapping[str, Any]) -> float:
    """Return the seconds of a step, measured with a copy that is used for nothing else."""
    env = make_environment(env_id, kwargs)
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        seconds: list[float] = []
        while len(seconds) < _N_TIMED_STEPS and sum(seconds) < _TIMED_S:
            action = env.action_space.sample()
            began = time.perf_counter()
            _, _, terminated, truncated, _ = env.step(action)
            seconds.append(time.perf_counter() - began)
            if terminated or truncated:
                env.reset()
    except (Exception, SystemExit):  # noqa: BLE001  # the run's first reset or step reports it
        return 0.0
    finally:
        env.close()
    return float(np.median(seconds))


class GymnasiumInProcesses:
    """The simulator `GymnasiumSimulator` with `shares[k]` of its copies in the k-th process.

    This process steps the first copies while the other processes step theirs. The trainer's
    environment parameters are not passed on, because random ones depend on the order of resets.
    """

    def __init__(self, shares: Sequence[int], **options: Any) -> None:
        self.n_copies, self.n_other_processes = sum(shares), len(shares) - 1
        self._bounds = [0, *itertools.accumulate(shares)]
        parts = [
            {**options, "first": low, "n_agents": high - low}
            for low, high in itertools.pairwise(self._bounds)
        ]
        # The others start while this process imports the environment's modules.
        self._others = [_Other(part) for part in parts[1:]]
        try:
            self._own = GymnasiumSimulator(**parts[0])
            for other in self._others:
                other.receive()
        except BaseException:
            self._end_others()
            raise

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of the only behavior."""
        return self._own.behavior_specs

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every copy of the environment."""
        for other in self._others:
            other.send("reset")
        return self._joined(self._own.reset())

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Step every copy once; raise ValueError for another number of actions."""
        ((name, all_actions),) = actions.items()
        own, *others = (
            {name: ActionTuple(all_actions.continuous[low:high], all_actions.discrete[low:high])}
            for low, high in itertools.pairwise(self._bounds)
        )
        for other, part in zip(self._others, others, strict=True):
            other.send("step", part)
        return self._joined(self._own.step(own))

    def set_parameter(self, name: str, value: float) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that one `GymnasiumSimulator` with all copies would return."""
        for other in self._others:
            other.send("state_dict")
        states = [self._own.state_dict(), *(other.receive() for other in self._others)]
        if None in states:
            return None
        lists = {key: [x for state in states for x in state[key]] for key in ("copies", "begun")}
        return {**states[0], **lists}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, or of one `GymnasiumSimulator` with all copies."""
        own, *others = (
            {**state, "copies": state["copies"][low:high], "begun": state["begun"][low:high]}
            for low, high in itertools.pairwise(self._bounds)
        )
        for other, part in zip(self._others, others, strict=True):
            other.send("load_state_dict", part)
        self._own.load_state_dict(own)
        for other in self._others:
            other.receive()

    def close(self) -> None:
        """Close every copy, and end the other processes."""
        self._end_others()
        self._own.close()

    def _end_others(self) -> None:
        for other in self._others:
            other.end()

    def _joined(self, own: Mapping[str, Steps]) -> dict[str, Steps]:
        ((name, steps),) = own.items()
        parts = [steps, *(other.receive()[name] for other in self._others)]
        decisions, terminals = zip(*parts, strict=True)
        ended = [part for part in terminals if len(part)]
        return {name: (_concatenated(decisions), _concatenated(ended or terminals[:1]))}


def _concatenated(parts: Any) -> Any:
    """Return the steps of several processes as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    fields: dict[str, Any] = {}
    for name in (field for field in first.__dataclass_fields__ if field != "_index"):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], list):  # one array for each observation or branch
            fields[name] = [np.concatenate(arrays) for arrays in zip(*values, strict=True)]
        else:
            fields[name] = None if values[0] is None else np.concatenate(values)
    return type(first)(**fields)


class _Other:
    """Another process with some of the copies."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        first, n_copies = options["first"], options["n_agents"]
        self._copies = f"{options['id']}, copies {first} to {first + n_copies - 1}"
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # A signal of the terminal ends the trainer, which then ends this process.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection.send(options)

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the other process's simulator."""
        try:
            self._connection.send_bytes(pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._refuse_ended()

    def receive(self) -> Any:
        """Return the result of the called method, or raise its error."""
        try:
            result = self._connection.recv()
        except (EOFError, OSError):
            self._refuse_ended()
        if isinstance(result, BaseException):
            raise result
        return result

    def _refuse_ended(self) -> None:
        code = self._process.wait()
        raise UnityEnvironmentException(f"{self._copies}: the process has ended (exit code {code})")

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve(connection: Connection) -> None:
    """Step copies for another process until it closes the connection or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    simulator, result = None, None
    with contextlib.suppress(EOFError, OSError):
        options = connection.recv()
        while True:
            try:
                if simulator is None:
                    simulator = GymnasiumSimulator(**options)
                else:
                    method, arguments = connection.recv()
                    result = getattr(simulator, method)(*arguments)
            except EOFError:
                raise
            except PipelineError as error:
                result = error
            except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's environment
                text = f"{type(simulator).__name__}: {where(error)}"
                result = UnityEnvironmentException(text)
            connection.send_bytes(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
    if simulator is not None:
        simulator.close()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
