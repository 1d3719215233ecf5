"""`steps_per_update: auto`: what is measured of a behavior before its first update."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipeline import machine
from pipeline.algos.finite_checks import refuse_non_finite_rollout
from pipeline.algos.off_policy import OffPolicy
from pipeline.algos.schedules import completed
from pipeline.data.rollout import Rollout
from pipeline.settings.pace import chosen_pace, free_share
from pipeline.trainer.learner import Learner

if TYPE_CHECKING:
    from pipeline.settings.schema import OffPolicySettings

_log = logging.getLogger(__name__)

_N_EXCHANGES = 200
"""The last exchanges, of which the median is taken."""
_N_ROUNDS, _ROUND = 5, 12
"""Updates are measured in rounds of so many, in which each part of one comes equally often."""
_MOST_S = 2.0
"""No further round is made after so many seconds."""
_WORTH_SAYING = 1.5
"""How many times as many updates `threaded` must hide to be named."""


class PaceMeter:
    """Measures exchanges until a behavior's first update may be due, and then an update.

    Args:
        learner: of an algorithm that learns from a replay.
        n_envs: environments that work at the same time.
    """

    def __init__(self, learner: Learner, *, n_envs: int) -> None:
        self._learner = learner
        self._n_envs = n_envs
        self._exchanges: deque[tuple[float, float]] = deque(maxlen=_N_EXCHANGES)
        """Seconds of each, and those in which it was waited."""
        self._last: tuple[float, float] | None = None
        self._n_exchanges = self._n_rollouts = self._n_rows = 0

    def exchanged(self, waited_s: float) -> bool:
        """Note an exchange; return whether the first update may be due now.

        Args:
            waited_s: seconds in which environments have been waited for since the run began.
        """
        now = time.perf_counter()
        if self._last is not None:
            began, waited_before_s = self._last
            self._exchanges.append((now - began, waited_s - waited_before_s))
        self._last = now, waited_s
        learner, n_closed = self._learner, self._learner.trajectories.n_closed
        self._n_exchanges += 1
        self._n_rollouts += n_closed > 0
        self._n_rows += n_closed
        algorithm = learner.algorithm
        if not (n_closed and learner.learns and isinstance(algorithm, OffPolicy)):
            return False
        return algorithm.may_learn(learner.step, len(algorithm.replay) + n_closed)

    def chosen(self, *, compiles: bool, n_learners: int) -> float:
        """Return the agent steps for each update, and log what was measured.

        Args:
            compiles: whether gradient steps are compiled.
            n_learners: behaviors that share the time in which environments work.
        """
        learner = self._learner
        exchange_s, wait_s = map(statistics.median, zip(*self._exchanges, strict=True))
        rollout = learner.trajectories.rollout(learner.grouping.moments)
        refuse_non_finite_rollout(rollout, step=learner.step)
        gradient_step_s = gradient_step_seconds(learner, rollout, compiles=compiles)
        share = free_share(
            n_cores=machine.n_processors(), n_envs=self._n_envs, n_threads=torch.get_num_threads()
        )
        spread, together = (
            chosen_pace(
                wait_s=wait_s,
                gradient_step_s=gradient_step_s,
                n_rows=self._n_rows / n_starts,
                share=share / n_learners,
            )
            for n_starts in (self._n_exchanges, self._n_rollouts)
        )
        pace = spread if learner.settings.threaded else together
        hint = ""
        if pace >= spread * _WORTH_SAYING:
            hint = f"; threaded: true would hide {pace / spread:.1f} times as many"
        _log.info(
            "%s: steps_per_update is %g from now on: an exchange takes %.1f ms, of which %.1f ms "
            "are spent waiting, and an update %.1f ms%s.",
            learner.name, pace, 1e3 * exchange_s, 1e3 * wait_s, 1e3 * gradient_step_s, hint,
        )  # fmt: skip
        return pace


def gradient_step_seconds(learner: Learner, rollout: Rollout, *, compiles: bool) -> float:
    """Return the seconds of an update from a replay, measured on a copy of the networks.

    Args:
        learner: nothing of it changes, and no number is drawn from its streams.
        rollout: closed trajectories; the copy learns from them.
        compiles: whether gradient steps are compiled.
    """
    algorithm, settings = learner.algorithm, learner.settings
    h: OffPolicySettings = settings.hyperparameters  # type: ignore[assignment]  # only these have `auto`
    h = replace(
        h,
        steps_per_update=1.0,
        reward_signal_steps_per_update=1.0,
        buffer_init_steps=0,
        buffer_size=max(h.batch_size, rollout.n_rows),
    )
    settings = replace(settings, hyperparameters=h)
    with torch.random.fork_rng(devices=[]):
        twin: OffPolicy = type(algorithm)(  # type: ignore[assignment]  # only these have `auto`
            learner.spec, settings, seed=0, device=algorithm.device
        )
    twin.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    if compiles:
        twin.compile()
    completed(twin.update_in_parts(rollout, step=0))
    while len(twin.replay) < h.batch_size:
        completed(twin.update_in_parts(rollout, step=0))
    seconds: list[float] = []
    # One more than is counted: the first warms up.
    while len(seconds) <= _N_ROUNDS and (len(seconds) < 2 or sum(seconds) < _MOST_S):
        began = time.perf_counter()
        # n gradient steps are counted from 1, so the first round ends at step 1 + its length.
        completed(twin.update_in_parts(rollout, step=1 + _ROUND * (1 + len(seconds))))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) / _ROUND
