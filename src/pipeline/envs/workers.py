"""Several environments as one set of workers, stepped together or in turn, in a fixed order."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Self

from pipeline.core.specs import ActionTuple, BehaviorSpec, refuse_other_spec
from pipeline.core.steps import Steps, no_agents
from pipeline.envs.base import BaseEnv, SilenceWatch, StoredStepsEnv, last_message, worker_groups
from pipeline.envs.in_process import our_spec, our_steps
from pipeline.envs.side_channels import SideChannel, Stats
from pipeline.envs.unity import CONVERSATION_ERRORS, UnityEnvironment
from pipeline.errors import (
    Interrupted,
    UnityActionException,
    UnityEnvironmentException,
    UnityException,
    one_line,
)
from pipeline.settings.trainer.schema import EnvironmentSettings
from pipeline.wire.channels.parameters import Sampler
from pipeline.wire.transport.server import AnyServer

# Errors of a process that has died, hangs, or has ended the connection.
RESTARTABLE = (*CONVERSATION_ERRORS, UnityEnvironmentException)


class RestartBudget:
    """Counts the restarts of each worker and compares them with `limits` (None: the defaults)."""

    def __init__(self, limits: EnvironmentSettings | None = None) -> None:
        self.limits = limits or EnvironmentSettings()
        self._times: dict[int, deque[float]] = defaultdict(deque)
        self.counts: dict[int, int] = defaultdict(int)

    def refusal(self, worker: int) -> str | None:
        """Return the reason why the worker may not be started again, or None if it may."""
        limits = self.limits
        # As in ML-Agents, a limit of -1 allows any number of restarts.
        if 0 <= limits.max_lifetime_restarts <= self.counts[worker]:
            return (
                f"{self.counts[worker]} of {limits.max_lifetime_restarts} in all "
                "(env_settings.max_lifetime_restarts)"
            )
        recent = self._times[worker]
        while recent and time.monotonic() - recent[0] > limits.restarts_rate_limit_period_s:
            recent.popleft()
        if 0 <= limits.restarts_rate_limit_n <= len(recent):
            return (
                f"{len(recent)} of {limits.restarts_rate_limit_n} in "
                f"{limits.restarts_rate_limit_period_s:g} s (env_settings.restarts_rate_limit_n)"
            )
        return None

    def spend(self, worker: int) -> int:
        """Count one more restart of the worker, and return the number of its restarts so far."""
        self._times[worker].append(time.monotonic())
        self.counts[worker] += 1
        return self.counts[worker]


_log = logging.getLogger(__name__)

_RESET_TEXT = "Worker[%d] begins new episodes (%s). Its unfinished episodes are dropped, the other \
workers continue; the run cannot be repeated exactly any more."
# Seconds to wait for a signal after a worker failed: Ctrl+C or a cluster's scheduler signals all
# processes of a group, and the environments may end before this process gets its signal.
_GRACE_S = 0.5
# `methodcaller` is faster than lambdas, which are Python calls for each worker and step.
_STEP_SEND, _STEP_WAIT = methodcaller("step_send"), methodcaller("step_wait")


class WorkerSet:
    """Environments that step together; environments in other processes compute at the same time.

    A worker that fails in a step or a reset is started again alone, if `relaunch` and the budget
    allow it. It continues from its last state if its environment can report states. Otherwise
    its agents begin new episodes while the other workers continue, and `take_restarted` returns
    the worker.

    Args:
        envs: environment of each worker, closed when the `with` block ends: a `BaseEnv`, or an
            object of another class with the members of ML-Agents' `BaseEnv`.
        relaunch: called as `relaunch(worker, seed_number)`; returns a new environment for the
            worker. A `seed_number` of 0 means the seed of the first start, and n the new seed of
            the worker's n-th restart. None: a failed worker's error is raised.
        restarts: settings with the limits of restarts; None for the defaults.
        servers: servers of the environments' connections, closed after the environments.

    Attributes:
        should_stop: returns whether the run is told to stop; called during long waits.
        groups: groups of workers that can step in turn: while one group computes, the other group
            gets its actions. If an environment is in this process, all workers are one group.
        is_split: whether some environments compute between the halves of a step.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        *,
        relaunch: Callable[[int, int], BaseEnv] | None = None,
        restarts: EnvironmentSettings | None = None,
        servers: Sequence[AnyServer] = (),
    ) -> None:
        if not envs:
            raise ValueError("a worker set needs at least one environment")
        self.envs: list[Any] = list(envs)
        self._all = range(len(self.envs))
        # Methods are looked up in the class, because a wrapper's `__getattr__` would find methods
        # of the wrapped environment.
        self._split = [k for k, env in enumerate(envs) if hasattr(type(env), "step_send")]
        self.is_split = bool(self._split)
        self._unsplit = [k for k, env in enumerate(envs) if not hasattr(type(env), "step_send")]
        # A `StoredStepsEnv` has a watch already.
        self._silences: dict[int, SilenceWatch] = {}
        self._asked: set[int] = set()
        for worker, env in enumerate(envs):
            name = f"worker {worker} ({type(env).__name__})"
            if not isinstance(env, StoredStepsEnv):
                self._silences[worker] = SilenceWatch(name, partial(_last_message, env))
            # A UnityEnvironment's name has the worker's number already.
            elif not isinstance(env, UnityEnvironment):
                env.silence.name = name
        self._relaunch = relaunch
        self._budget = RestartBudget(restarts)
        self._servers = servers
        # The training loop sets a function that tells whether a signal has come.
        self.should_stop: Callable[[], bool] = lambda: False
        self.groups = [self._all] if self._unsplit else worker_groups(len(self.envs))
        # Workers whose actions were sent, but whose next steps were not received yet.
        self._under_way: set[int] = set()
        self._empty: dict[str, Steps] = {}
        self._restarted: set[int] = set()
        self._seed_numbers = dict.fromkeys(self._all, 0)
        self._done: set[int] = set()
        self._parameters: dict[str, float | Sampler] = {}
        self._codec_seconds = 0.0
        self._n_known: list[int] = []
        self._specs: dict[str, BehaviorSpec] = {}
        self._first_specs: dict[str, BehaviorSpec] = {}

    def __len__(self) -> int:
        return len(self.envs)

    def reset(self) -> None:
        """Begin a new episode for every agent of every worker; first finish steps under way."""
        self.step_wait()
        # Other processes reset while the environments in this process do.
        self._half_step(self._split, lambda env: env.reset_send())
        self._half_step(self._unsplit, lambda env: env.reset())
        self._half_step(self._split, lambda env: env.reset_wait())
        self._done.clear()
        if self._relaunch is not None:
            self.request_states()  # a worker that fails continues from this state

    def step(self) -> None:
        """Send every worker's actions, then wait for every worker."""
        self.step_send()
        self.step_wait()

    def step_send(self, group: Sequence[int] | None = None) -> None:
        """First half of `step`, for one of `groups` or all: other processes begin to compute."""
        workers = self._all if group is None else group
        self._under_way.update(workers)
        for worker, silence in self._silences.items():
            if worker in self._asked:
                silence.end()
            elif worker in workers:
                silence.count()
        self._asked.clear()
        # If there are environments in this process, there is only one group, and only the
        # environments in other processes are sent their actions here.
        self._half_step(self._split if self._unsplit else workers, _STEP_SEND)

    def step_wait(self, group: Sequence[int] | None = None) -> None:
        """Second half of `step`, for one of `groups` or all: wait until the step is finished."""
        workers = self._under_way.intersection(self._all if group is None else group)
        if not workers:
            return
        if self._unsplit:
            self._half_step(self._unsplit, lambda env: env.step())
        self._half_step(self._split if self._unsplit else sorted(workers), _STEP_WAIT)
        self._done -= workers
        self._under_way -= workers

    def take_restarted(self) -> list[int]:
        """Return the workers that a restart has reset since the last call: their agents are new."""
        restarted, self._restarted = sorted(self._restarted), set()
        return restarted

    def _half_step(self, workers: Sequence[int], half: Callable[[Any], None]) -> None:
        """Call the first or second half of `step` or `reset` on workers."""
        for worker in workers:
            if worker in self._done:  # its restart has finished the step
                continue
            try:
                half(self.envs[worker])
            except RESTARTABLE as error:
                # A run that is told to stop can only be saved if the worker can continue exactly.
                env = self.envs[worker]
                goes_on = isinstance(env, BaseEnv) and env.state_refusal is None
                is_stopping = not goes_on and self._is_stopping()
                if self._relaunch is None or is_stopping:
                    raise
                self._restart(worker, error, self._relaunch)

    def _is_stopping(self) -> bool:
        """Return whether a signal tells the run to stop, now or within 0.5 s."""
        deadline = time.monotonic() + _GRACE_S * self.is_split
        while not (is_stopping := self.should_stop()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return is_stopping

    def _restart(
        self, worker: int, error: UnityException, relaunch: Callable[[int, int], BaseEnv]
    ) -> None:
        """Start a worker again, repeatedly if it fails, until it runs or no restart is left."""
        # The failed environment's time stays in the sum of `codec_seconds`.
        self._codec_seconds += self.envs[worker].codec_seconds
        while True:
            if (refusal := self._budget.refusal(worker)) is not None:
                # A signal may come shortly after the failure. `_is_stopping` waits for it, because
                # the caller asks `should_stop` after this error.
                self._is_stopping()
                raise type(error)(
                    f"Worker {worker} exceeded the allowed number of restarts, {refusal}, after: "
                    f"{error}"
                ) from error
            number = self._budget.spend(worker)
            _log.warning(
                "Restarting worker[%d] after '%s' (restart %d).", worker, one_line(error), number
            )
            failed, no_replay = self.envs[worker], ""
            # A replay from the start needs the old seed; in all other cases a new seed is better,
            # because the old seed would repeat episodes that were learned from.
            if not (isinstance(failed, BaseEnv) and failed.is_known_from_start):
                self._seed_numbers[worker] = number
            try:
                env = relaunch(worker, self._seed_numbers[worker])
                try:
                    env.go_on_from(failed)
                except RESTARTABLE as replay_error:
                    no_replay = f"the replay failed: {one_line(replay_error)}"
                    self._seed_numbers[worker] = number
                    env = relaunch(worker, number)
                except ValueError as reason:
                    no_replay = str(reason)
                self._replace(worker, env, no_replay)
            except RESTARTABLE as next_error:
                if self.should_stop():
                    raise
                error = next_error
            else:
                return

    def _replace(self, worker: int, env: Any, no_replay: str) -> None:
        """Replace a worker's environment; reset it if `no_replay` says why a replay failed."""
        self.envs[worker] = env
        # The specifications are read again, because those of the new environment may differ.
        self._n_known = []
        if no_replay:
            if self.should_stop():  # a saved run must continue exactly, and this one cannot
                raise UnityEnvironmentException(
                    f"the worker cannot continue from its last step: {no_replay}"
                )
            _log.warning(_RESET_TEXT, worker, no_replay)
            # Without a replay, the new environment has not received the parameters.
            if _is_controlled(env):
                for name, value in self._parameters.items():
                    env.set_parameter(name, value)
            env.reset()
            self._restarted.add(worker)
        else:
            _log.info("Worker[%d] continues from its last step.", worker)
        self._done.add(worker)

    @property
    def state_refusal(self) -> str | None:
        """Reason why `state_dict` gives no states; None if it gives them. Valid after a reset."""
        for worker, env in enumerate(self.envs):
            reason = (
                env.state_refusal if isinstance(env, BaseEnv) else "the environment is no BaseEnv"
            )
            if reason is not None:
                return f"worker {worker}: {reason}"
        return None

    def request_states(self) -> None:
        """Request the states of all workers, for `state_dict`; to be called between two steps."""
        for env in self.envs:
            if isinstance(env, BaseEnv):
                env.request_state()

    def state_dict(self) -> list[dict[str, Any]] | None:
        """Return the workers' states at the last `request_states`; None if a state is missing."""
        states = [env.state_dict() if isinstance(env, BaseEnv) else None for env in self.envs]
        available = [state for state in states if state is not None]
        return available if len(available) == len(states) else None

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore states from `state_dict`, instead of a reset.

        Raises:
            ValueError: The number of states is wrong, or an environment cannot be restored.
            UnityObservationException: An environment has another specification than the state.
        """
        for env, state in zip(self.envs, states, strict=True):
            env.load_state_dict(state)

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter of every worker, with the next step or reset.

        Samplers have the same seed in all workers. Must be called between two steps. Return False
        if a worker does not take parameters.
        """
        self._parameters[name] = value
        sent = [_is_controlled(env) and env.set_parameter(name, value) for env in self.envs]
        return all(sent)

    def take_stats(self) -> list[Stats]:
        """Return the statistics of each worker since the last call."""
        return [env.take_stats() if _is_controlled(env) else {} for env in self.envs]

    @property
    def codec_seconds(self) -> float:
        """Seconds spent so far on converting messages to arrays and back."""
        return self._codec_seconds + sum(getattr(env, "codec_seconds", 0.0) for env in self.envs)

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of each behavior, from the first worker that has the behavior.

        Raises:
            UnityObservationException: Two workers have different specifications of a behavior, or a
                specification cannot be read.
        """
        # Specifications are never removed, so their number tells whether a new one was added.
        n_known = [len(env.behavior_specs) for env in self.envs]
        if n_known != self._n_known:
            specs: dict[str, BehaviorSpec] = {}
            for worker, env in enumerate(self.envs):
                for name, theirs in env.behavior_specs.items():
                    spec = our_spec(name, theirs)
                    first = self._first_specs.setdefault(name, spec)
                    refuse_other_spec(name, first, spec, f"worker {worker}")
                    specs.setdefault(name, first)
            self._specs, self._n_known = specs, n_known
        return self._specs

    def get_steps(self, behavior_name: str, group: Sequence[int] | None = None) -> list[Steps]:
        """Return the last decision and terminal steps of a behavior, one pair for each worker.

        If `group` is given, the pairs of all other workers have no agents. Raise
        UnityActionException if no worker has the behavior.
        """
        spec = self._spec(behavior_name)
        if group is None or len(group) == len(self.envs):
            return [_steps_of(env, behavior_name, spec) for env in self.envs]
        if behavior_name not in self._empty:
            self._empty[behavior_name] = no_agents(spec)
        steps = [self._empty[behavior_name]] * len(self.envs)
        for worker in group:
            steps[worker] = _steps_of(self.envs[worker], behavior_name, spec)
        return steps

    def set_actions(
        self, behavior_name: str, actions: Sequence[ActionTuple], group: Sequence[int] | None = None
    ) -> None:
        """Set the actions of all agents that asked for a decision, one ActionTuple per worker.

        If `group` is given, actions of all other workers are ignored. Raise UnityActionException
        if no worker has the behavior, or an array has a wrong shape.
        """
        self._spec(behavior_name)
        for worker, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            if behavior_name in env.behavior_specs and (group is None or worker in group):
                env.set_actions(behavior_name, action)
                if worker in self._silences and len(action.continuous):
                    self._asked.add(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        # Every worker is closed, even if closing another worker fails. After a failure, closing
        # does not wait until an environment ends; after an interruption by the user, closing waits.
        passed = (None, None, None) if isinstance(error[1], Interrupted) else error
        stack = ExitStack()
        for server in self._servers:
            stack.push(server)
        # Environments are pushed in reverse, so that worker 0 is closed first, and servers last.
        for env in reversed(self.envs):
            stack.push(env if isinstance(env, BaseEnv) else closing(env))
        stack.__exit__(*passed)

    def _spec(self, behavior_name: str) -> BehaviorSpec:
        spec = self._specs.get(behavior_name) or self.behavior_specs.get(behavior_name)
        if spec is not None:
            return spec
        raise UnityActionException(
            f"The group {behavior_name} does not correspond to an existing agent group in any of "
            f"{len(self.envs)} environments; the groups are {sorted(self.behavior_specs)}"
        )


def _steps_of(env: Any, name: str, spec: BehaviorSpec) -> Steps:
    if name not in env.behavior_specs:
        return no_agents(spec)
    steps: Steps = env.get_steps(name)
    # A UnityEnvironment's messages were checked when they were decoded.
    return steps if isinstance(env, UnityEnvironment) else our_steps(name, spec, steps)


def _last_message(env: Any) -> str:
    return last_message({name: env.get_steps(name) for name in env.behavior_specs}, ())


def _is_controlled(env: Any) -> bool:
    return hasattr(env, "set_parameter") and hasattr(env, "take_stats")


def launch_workers(
    file_name: str | Path,
    n_workers: int,
    *,
    seed: int,
    first: int = 0,
    n_all: int | None = None,
    side_channels: Callable[[], Sequence[SideChannel]] | None = None,
    restarts: EnvironmentSettings | None = None,
    **options: Any,
) -> WorkerSet:
    """Start `n_workers` processes at the same time; worker k gets the seed `seed` + k.

    Args:
        file_name: path of the executable.
        n_workers: number of processes.
        seed: seed of worker 0; the n-th restart of worker k gets `seed` + k + n * `n_all`.
        first: number of the first worker; other learners start workers with other numbers.
        n_all: number of the workers of all learners; None if there is one learner.
        side_channels: returns new side channels for one worker.
        restarts: settings with the limits of restarts; None: a failed worker's error is raised.
        options: further keywords of `UnityEnvironment`, the same for all workers.

    Raises:
        UnityException: A worker could not be started; then all workers are closed.
    """

    def make(worker: int, number: int, *, connect: bool = True) -> UnityEnvironment:
        return UnityEnvironment(
            file_name,
            worker_id=first + worker,
            # No other worker, learner or restart gets the same seed.
            seed=seed + first + worker + (n_all or n_workers) * number,
            side_channels=side_channels() if side_channels else (),
            connect=connect,
            **options,
        )

    with ExitStack() as stack:
        # All processes start at the same time; then each connection is awaited.
        envs = [stack.enter_context(make(k, 0, connect=False)) for k in range(n_workers)]
        for env in envs:
            env.connect()
        workers = WorkerSet(envs, relaunch=make if restarts else None, restarts=restarts)
        stack.pop_all()
    return workers
