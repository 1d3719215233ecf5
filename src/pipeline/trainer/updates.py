"""Updates of an algorithm: start an update, compute its next part, take its result.

With `threaded: true` the networks learn while the environments execute the agents' actions. When a
rollout is complete, a copy of the policy continues to act while the networks learn. The step of the
loop at which the updated policy takes over is computed from counts, never from a clock, so that a
run can be repeated bit for bit.

Short gradient steps are spread evenly over the loop's next steps, as many as the rollout took; they
run after the actions have been sent and before the environments' answer is read. Long gradient
steps would keep the environments waiting, so they run in a thread: torch releases Python's global
lock (GIL) during its arithmetic. The loop waits for the thread after a number of steps that grows
with the arithmetic, at most as many as the rollout took: the algorithm learns better from
experience of a more recent policy.
"""

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.algos.algorithm import Algorithm
from pipeline.algos.schedules import completed
from pipeline.core.arrays import FloatArray
from pipeline.data.rollout import Rollout
from pipeline.nets.layers import RunningNormalizer

PER_STEP = 50_000_000
"""Number of products (weights times rows) in a gradient step that takes a few ms, about as long as
a step of the loop."""


def steps_per_row(algorithm: Algorithm) -> float | None:
    """Return how many steps of the loop an update in a thread may take for each rollout row.

    None for updates between the loop's steps: of short gradient steps, or a few with a replay.
    """
    networks = algorithm.own_networks.values()
    n_weights = sum(parameter.numel() for network in networks for parameter in network.parameters())
    h = algorithm.settings.hyperparameters
    # The number of products is the same on every machine, unlike a measured time, so that an
    # updated policy acts at the same step everywhere.
    n_products = n_weights * h.batch_size
    if algorithm.replay is not None or n_products <= PER_STEP:
        return None
    return h.minibatches_per_step * n_products / PER_STEP


class Updates:
    """Computes each update of an algorithm completely when the update starts."""

    is_spread = False
    """Whether updates continue in later steps of the loop, so that each step calls `advance`."""
    in_thread = False
    """Whether gradient steps run in a thread."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.is_under_way = False
        """Whether an update has started and its statistics have not been taken yet."""
        self._stats: dict[str, float] = {}
        """Statistics of an update that is computed; `take` returns them."""
        self.set_values: dict[str, float] = {}
        """Values that replace scheduled values from the next update on; see `Callback.set`."""

    @property
    def acting(self) -> Algorithm:
        """The algorithm that decides for the agents now."""
        return self.algorithm

    def start(self, rollout: Rollout, *, step: int) -> bool:
        """Learn from closed trajectories after `step` agent steps; return whether an update began.

        The caller must have taken the result of any earlier update.

        Raises:
            TrainingError: See `Algorithm.update`; `advance` and `take` raise it, too.
        """
        self.algorithm.set_values = dict(self.set_values)
        self._stats = self.algorithm.update(rollout, step=step)
        self.is_under_way = bool(self._stats)
        return self.is_under_way

    def advance(self) -> None:
        """Compute the part of the update under way that is due in one step of the loop."""

    def take(self, *, at_once: bool = False) -> dict[str, float]:  # noqa: ARG002  # no update waits
        """Return a completed update's statistics, and let the new policy act; else return {}.

        With `at_once`, an unfinished update is completed first.
        """
        stats, self._stats, self.is_under_way = self._stats, {}, False
        return stats

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Add observations to the running normalizers."""
        self.algorithm.observe(obs)

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state."""
        return self.algorithm.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.algorithm.load_state_dict(state)

    def weights(self) -> dict[str, Any]:
        """Return copies of the weights of the policy that acts."""
        return self.algorithm.weights()


class Overlap(Updates):
    """Computes the updates of an algorithm during the steps of the loop after each rollout.

    A copy of the policy acts meanwhile. `steps_per_row` is the number of the loop's steps that an
    update in a thread may take for each row; None computes updates between the loop's steps.
    """

    is_spread = True

    def __init__(self, algorithm: Algorithm, *, steps_per_row: float | None = None) -> None:
        super().__init__(algorithm)
        self._steps_per_row = steps_per_row
        self._thread = None if steps_per_row is None else _new_thread()
        self.in_thread = self._thread is not None
        self._copy: Algorithm | None = None
        """Algorithm with the weights before the update; it acts during updates."""
        self._acting_weights: dict[str, dict[str, Tensor]] = {}
        """Weights of all networks before the last update, those of `_copy` included."""
        self._live: dict[str, dict[str, Tensor]] = {}
        """References to the weights of all networks of the algorithm that learns."""
        self._normalizers: list[RunningNormalizer] = []
        """Running normalizers of `_copy`."""
        self._parts: Generator[int, None, dict[str, float]] | None = None
        """Remaining parts of the update under way; None when all have been computed."""
        self._future: Future[dict[str, float]] | None = None
        """The update that the thread computes at present; None if there is no such update."""
        self._per_step = 1
        self._n_steps = 0  # steps of the loop since the last update began
        self._n_steps_left = 0  # steps of the loop until a computed update takes effect
        self._observed: list[Sequence[FloatArray]] = []

    @property
    def acting(self) -> Algorithm:
        """The algorithm that decides for the agents now."""
        return self._copy if self._copy is not None and self.is_under_way else self.algorithm

    def observe(self, obs: Sequence[FloatArray]) -> None:
        """Add observations to the running normalizers, at once or after the update under way."""
        # Normalizers must not change while gradient steps read them, so observations may wait.
        if self._parts is None and self._future is None:
            self.algorithm.observe(obs)
        else:
            self._observed.append(copy.deepcopy(obs))

    def start(self, rollout: Rollout, *, step: int) -> bool:
        """Start to learn from a copy of a rollout; see `Updates`."""
        self._prepare()
        # The acting copy gets the weights before the first part of the update changes them.
        self._copy_weights(self._live)
        # The values are copied, because a callback may change them before a thread reads them.
        self.algorithm.set_values = dict(self.set_values)
        # The rollout is copied, because the next rollout overwrites the memory of its arrays.
        parts = self.algorithm.update_in_parts(copy.deepcopy(rollout), step=step)
        n_steps = max(self._n_steps, 1)
        if self._thread is not None and self._steps_per_row is not None:
            self._future = self._thread.submit(_completed, parts)
            # The time until the updated policy acts is counted in steps and not in seconds, so that
            # the policy changes at the same step in every run.
            n_allowed = math.ceil(rollout.n_rows * self._steps_per_row)
            self._n_steps_left = min(n_allowed, n_steps)
        else:
            try:
                n_parts = next(parts)
            except StopIteration:  # no update: the replay only stored the rows
                return False
            self._parts, self._n_steps_left = parts, 0
            # The parts are spread over as many steps as the last rollout took, because the next
            # rollout may take as many.
            self._per_step = max(math.ceil(n_parts / n_steps), 1)
        self.is_under_way, self._n_steps = True, 0
        return True

    def _prepare(self) -> None:
        """Before the first update, make the acting copy and keep references to all weights."""
        if self._copy is not None:
            return
        self._copy = self.algorithm.copy_for_acting()
        networks, acting = self.algorithm.networks, self._copy.own_networks
        self._live = {name: network.state_dict() for name, network in networks.items()}
        self._acting_weights = self.algorithm.weights()
        self._acting_weights |= {name: network.state_dict() for name, network in acting.items()}
        modules = [module for network in acting.values() for module in network.modules()]
        self._normalizers = [
            normalizer for normalizer in modules if isinstance(normalizer, RunningNormalizer)
        ]

    @torch.no_grad()
    def _copy_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        # SAC copies its weights in each step, and `load_state_dict` takes ten times as long as this
        # loop.
        for name, tensors in weights.items():
            for key, tensor in tensors.items():
                self._acting_weights[name][key].copy_(tensor)
        for normalizer in self._normalizers:
            # `copy_` has changed the statistics, so the scale that was computed from them is wrong.
            normalizer.forget_scale()

    def advance(self) -> None:
        """Compute the part of the update under way that is due in one step of the loop."""
        self._n_steps += 1
        if not self.is_under_way:
            return
        if self._parts is None:
            # All parts are computed or in a thread, so only steps are counted.
            self._n_steps_left -= 1
        else:
            self._compute(self._per_step)

    def take(self, *, at_once: bool = False) -> dict[str, float]:
        """Return the statistics of a completed update, and let the updated policy act.

        An update in a thread is taken after the number of steps that `start` has computed. If the
        thread is still computing then, this call waits for the thread.
        """
        # The end is decided by a count of steps, because `future.done()` would depend on the clock.
        is_over = self._parts is None and self._n_steps_left <= 0
        if not (self.is_under_way and (is_over or at_once)):
            return {}
        self._compute()
        return super().take()

    def state_dict(self) -> dict[str, Any]:
        """Complete the update under way; return the algorithm's state and the acting weights."""
        # A call of `state_dict` must not change the step at which the updated policy begins to act.
        self._n_steps_left += math.ceil(self._compute() / self._per_step)
        waiting = {
            "weights": self.weights() if self.is_under_way else {},
            "stats": self._stats,
            "steps_left": self._n_steps_left,
            "steps": self._n_steps,
        }
        return {**self.algorithm.state_dict(), "threaded": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` or `Algorithm.state_dict` returned."""
        self.algorithm.load_state_dict(state)
        waiting: Mapping[str, Any] = state.get("threaded") or {}
        self._parts, self._future, self._observed = None, None, []
        self._stats, weights = waiting.get("stats", {}), waiting.get("weights", {})
        # Older files lack these counts; their updated policy then acts from the next step.
        self._n_steps_left, self._n_steps = waiting.get("steps_left", 1), waiting.get("steps", 0)
        self.is_under_way = bool(weights)
        if weights:
            self._prepare()
            self._copy_weights(weights)

    def weights(self) -> dict[str, Any]:
        """Return copies of the weights of the policy that acts."""
        if not self.is_under_way:
            return self.algorithm.weights()
        return {
            name: {key: tensor.clone() for key, tensor in tensors.items()}
            for name, tensors in self._acting_weights.items()
        }

    def _compute(self, most: int | None = None) -> int:
        """Compute at most `most` remaining parts of the update, or all; return their number."""
        n_parts = 0
        while self._parts is not None and n_parts != most:
            n_parts += 1
            try:
                next(self._parts)
            except StopIteration as end:
                self._parts, self._stats = None, end.value
        if self._future is not None:
            future, self._future = self._future, None
            self._stats = future.result()
        if self._parts is None:
            # Observations are added in the order in which they came: rounding depends on the order.
            observed, self._observed = self._observed, []
            for obs in observed:
                self.algorithm.observe(obs)
        return n_parts


def _completed(parts: Generator[int, None, dict[str, float]]) -> dict[str, float]:
    # NumPy has this setting for each thread; see Learner.learn.
    with np.errstate(over="ignore", invalid="ignore"):
        return completed(parts)


def _new_thread() -> ThreadPoolExecutor:
    """Return an executor of one thread, with as many torch threads as this thread has."""
    n = torch.get_num_threads()  # OpenMP keeps a number for each thread
    return ThreadPoolExecutor(1, "update", initializer=torch.set_num_threads, initargs=(n,))
