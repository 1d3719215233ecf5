"""Choose the number for `steps_per_update: auto` by measurements before the first update."""

import copy
import logging
import statistics
import time
from collections import deque
from dataclasses import replace
from typing import cast

import torch

from pipeline import machine
from pipeline.algos.finite_checks import refuse_non_finite_rollout
from pipeline.algos.off_policy import OffPolicy
from pipeline.algos.schedules import completed
from pipeline.data.rollout import Rollout
from pipeline.settings.pace import chosen_pace, free_share
from pipeline.trainer.learner import Learner

_log = logging.getLogger(__name__)

_N_EXCHANGES = 200
"""Number of recent exchanges with the environments; their median time is used."""
_N_ROUNDS, _ROUND = 5, 12
"""Largest number of timed rounds, and number of updates in a round: a multiple of every
`policy_delay` from 1 to 4."""
_MOST_S = 2.0
"""Seconds of measured time after which no further round begins."""
_WORTH_SAYING = 1.5
"""The log recommends `threaded: true` if at least this factor times as many updates could then run
while the environments work."""


class PaceMeter:
    """Measures a behavior's exchanges with `n_envs` parallel environments, and its updates."""

    def __init__(self, learner: Learner, *, n_envs: int) -> None:
        self._learner = learner
        self._algorithm = cast("OffPolicy", learner.algorithm)
        self._n_envs = n_envs
        self._clocks = deque([(time.perf_counter(), 0.0)], maxlen=_N_EXCHANGES + 1)
        """For each exchange: the clock at its end and the total waiting time so far, in seconds."""
        self._n_rollouts = self._n_rows = 0
        self._n_exchanges = -1  # the first exchange has actions but no rewards, and closes no row

    def exchanged(self, waited_s: float) -> bool:
        """Record an exchange; return whether the first update may be due now.

        `waited_s` is the total time, in seconds, that the loop has waited for environments.
        """
        self._clocks.append((time.perf_counter(), waited_s))
        n_closed = self._learner.trajectories.n_closed
        self._n_exchanges += 1
        self._n_rollouts += n_closed > 0
        self._n_rows += n_closed
        n_stored = len(self._algorithm.replay) + n_closed
        return n_closed > 0 and self._algorithm.may_learn(self._learner.step, n_stored)

    def chosen(self, *, compiles: bool, n_learners: int) -> float:
        """Return the chosen number of agent steps for each update, and log the measurements.

        `n_learners` behaviors share the time in which environments work.
        """
        learner, clocks = self._learner, torch.tensor(self._clocks, dtype=torch.float64)
        # Medians are used, because one slow exchange (a reset, another process) would move a mean.
        exchange_s, wait_s = clocks.diff(dim=0).median(0).values.tolist()
        rollout = learner.trajectories.rollout(learner.grouping.moments)
        refuse_non_finite_rollout(rollout, step=learner.step)
        # `refuse_non_finite_rollout` names the step, which an error in `gradient_step_seconds`
        # would not do.
        update_s = gradient_step_seconds(self._algorithm, rollout, compiles=compiles)
        n_cores, n_threads = machine.n_processors(), torch.get_num_threads()
        share = free_share(n_cores=n_cores, n_envs=self._n_envs, n_threads=n_threads) / n_learners
        measured = {"wait_s": wait_s, "gradient_step_s": update_s, "share": share}
        # With `threaded`, updates are spread over all exchanges.
        pace = spread = chosen_pace(n_rows=self._n_rows / max(self._n_exchanges, 1), **measured)
        # Without `threaded`, all updates run after a complete rollout, in the waiting time of one
        # exchange.
        if not learner.settings.threaded:
            pace = chosen_pace(n_rows=self._n_rows / self._n_rollouts, **measured)
        more = pace / spread
        hint = (
            f"; threaded: true would allow {more:.1f} times as many updates"
            if more >= _WORTH_SAYING
            else ""
        )
        _log.info(
            "%s: steps_per_update is %g from now on: an exchange takes %.1f ms, of which %.1f ms "
            "are spent waiting, and an update %.1f ms%s.",
            learner.name, pace, 1e3 * exchange_s, 1e3 * wait_s, 1e3 * update_s, hint,
        )  # fmt: skip
        return pace


def gradient_step_seconds(algorithm: OffPolicy, rollout: Rollout, *, compiles: bool) -> float:
    """Return the seconds of an update from a replay, measured on a copy of the networks.

    The copy learns from `rollout`; neither the state of `algorithm` nor its random streams change.
    On the CPU the result is processor time, so that other work of the machine does not count.
    """
    # The copy of the algorithm makes an update for each agent step from the first step on, and its
    # replay is small enough for the rollout to fill.
    h = replace(
        algorithm.hyperparameters,
        steps_per_update=1.0,
        reward_signal_steps_per_update=1.0,
        buffer_init_steps=0,
        buffer_size=max(algorithm.hyperparameters.batch_size, rollout.n_rows),
    )
    settings = replace(algorithm.settings, hyperparameters=h)
    # New networks draw their initial weights from torch's global stream, which must not change.
    with torch.random.fork_rng(devices=[]):
        twin = type(algorithm)(algorithm.spec, settings, seed=0, device=algorithm.device)
    twin.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    if compiles:
        twin.compile()
    # The same rollout is stored repeatedly until a whole minibatch can be drawn.
    while len(twin.replay) < h.batch_size:
        completed(twin.update_in_parts(rollout, step=0))
    # A GPU computes outside this thread's processor time, so the wall clock is read for a GPU.
    clock = time.thread_time if algorithm.device.type == "cpu" else time.perf_counter
    seconds: list[float] = []
    # The first round warms up and is not counted.
    while len(seconds) <= _N_ROUNDS and (len(seconds) < 2 or sum(seconds) < _MOST_S):
        began = clock()
        # The step grows by `_ROUND` from call to call, so each call makes `_ROUND` updates.
        completed(twin.update_in_parts(rollout, step=1 + _ROUND * (1 + len(seconds))))
        seconds.append(clock() - began)
    return statistics.median(seconds[1:]) / _ROUND
