"""A behavior in training: its algorithm, its experience, and its numbers of steps and updates."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.algos.algorithm import Algorithm
from pipeline.algos.finite_checks import refuse_non_finite_rollout
from pipeline.algos.off_policy import OffPolicy
from pipeline.algos.policy import Decision
from pipeline.algos.process_group import LearnerGroup
from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.data.columns import enlarged
from pipeline.data.replay import Replay
from pipeline.data.rollout import ClosedTrajectories, Trajectories
from pipeline.data.slots import STALE_AFTER_MESSAGES, Slots
from pipeline.errors import TrainingError, UnityPolicyException
from pipeline.settings.trainer.schema import TrainerSettings
from pipeline.tracking import names
from pipeline.trainer.batching import (
    Message,
    Part,
    concat_steps,
    first_terminal_per_agent,
    sample_rows,
    split_actions,
)
from pipeline.trainer.grouping import group_tracker_for
from pipeline.trainer.opponents import Opponent, SnapshotPool
from pipeline.trainer.statistics import Statistics
from pipeline.trainer.supported import algorithm_for
from pipeline.trainer.updates import Overlap, Updates, steps_per_row

_log = logging.getLogger(__name__)


class Decided(NamedTuple):
    """Decisions for the agents of a behavior in one step of all workers."""

    actions: list[ActionTuple]
    """Actions of each worker's agents."""
    decision: Decision | None
    """Actions of all workers' agents, with log-probabilities and values; None if no agent asks."""
    obs: list[FloatArray]
    """One array [N, *shape] for each observation, with all workers' agents."""


class Learner:
    """Chooses the actions of one behavior's agents in all workers, and learns from their steps.

    With `learns=False` the learner only chooses actions and counts episodes.
    """

    def __init__(
        self,
        name: str,
        spec: BehaviorSpec,
        settings: TrainerSettings,
        *,
        seed: int,
        device: torch.device,
        learns: bool = True,
    ) -> None:
        algorithm = algorithm_for(name, settings)
        self.name = name
        self.spec = spec
        self.settings = settings
        self.learns = learns
        self.algorithm = algorithm(spec, settings, seed=seed, device=device)
        self.updates = (
            Overlap(self.algorithm, steps_per_row=steps_per_row(self.algorithm))
            if settings.threaded and learns
            else Updates(self.algorithm)
        )
        self.snapshot_pool: SnapshotPool | None = None
        if learns and settings.self_play is not None:
            self.snapshot_pool = SnapshotPool(
                lambda: self.acting.policy, settings.self_play, seed=seed, device=device
            )
        self.statistics = self.pending_stats = Statistics()
        self.sync: LearnerGroup | None = None
        """Synchronises this learner with the learners of other processes; None without others."""
        self.step = 0
        self.n_updates = 0
        self.last_update: Mapping[str, float] = {}
        """Statistics of the last update, by tag."""
        self._n_rollouts = 0
        self._before = self._counted()
        self.recorded = sample_rows(
            [np.zeros((0, *obs.shape), np.float32) for obs in spec.observation_specs], None
        )
        self.seconds = {"inference": 0.0, "update": 0.0, "storage": 0.0}
        self.slots = Slots()
        self.grouping = group_tracker_for(self.algorithm)
        self._warned_of_vanished = False
        self.memories: FloatArray | None = None
        """[n_slots, M] recurrent state of the agent in each slot; None without memory."""
        if self.algorithm.memory_size:
            self.memories = np.zeros((0, self.algorithm.memory_size), dtype=np.float32)
        # With a replay, rows wait for an update in the replay and not here.
        n_waiting = 0 if self.algorithm.replay is not None else settings.hyperparameters.buffer_size
        self.trajectories = Trajectories(
            self.algorithm.columns,
            horizon=settings.time_horizon,
            capacity=n_waiting + settings.time_horizon,
        )

    @property
    def counts(self) -> Counter[str]:
        """Agent steps, rollouts and gradient steps (with a replay only) of this process's run."""
        return self._counted() - self._before

    def _counted(self) -> Counter[str]:
        n_gradient_steps = getattr(self.algorithm, "n_updates", 0)
        return Counter(
            agent_steps=self.step, rollouts=self._n_rollouts, gradient_steps=n_gradient_steps
        )

    def take_pace(self, settings: TrainerSettings) -> None:
        """Use `settings`, in which `steps_per_update` is a number and all else is as before."""
        self.settings = settings
        if isinstance(self.algorithm, OffPolicy):
            self.algorithm.take_pace(settings)

    @property
    def replay_to_keep(self) -> Replay | None:
        """The replay, if `save_replay_buffer` is set; else None."""
        keep = getattr(self.settings.hyperparameters, "save_replay_buffer", False)
        return self.algorithm.replay if keep else None

    @property
    def acting(self) -> Algorithm:
        """The algorithm that chooses actions; in a `threaded` update a copy with old weights."""
        return self.updates.acting

    @property
    def finished(self) -> bool:
        """Whether `max_steps` is reached; always False with `learns=False`."""
        return self.learns and self.step >= self.settings.max_steps

    def receive(self, steps: Sequence[Steps], *, team: str = "") -> Message:
        """Return the workers' steps as a message, with the slot of each agent."""
        began = time.perf_counter()
        # Slots are freed first, so that agents of this message can get them.
        vanished = self.slots.sweep()
        if len(vanished):
            self._drop_vanished(vanished)
        ended = []
        for worker, (decision, terminal) in enumerate(steps):
            if len(terminal.agent_id):
                source, first = (team, worker), first_terminal_per_agent(terminal)
                ended.append(Part(worker, first, self.slots.ended(source, first.agent_id)))
                # Python sets are used, because NumPy takes ten times as long for a few agents.
                if gone := set(first.agent_id.tolist()).difference(decision.agent_id.tolist()):
                    self.slots.release(source, list(gone))
        # New agents get the slots of agents that have ended, so ended agents come first.
        deciding = [
            Part(worker, decision, self.slots.deciding((team, worker), decision.agent_id))
            for worker, (decision, _) in enumerate(steps)
            if len(decision.agent_id)
        ]
        if self.slots.n_slots > self.trajectories.n_slots:
            self._reserve_slots()
        self.seconds["storage"] += time.perf_counter() - began
        return Message(team, len(steps), deciding, ended)

    def complete_transitions(self, message: Message) -> None:
        """Complete the agents' open transitions with the rewards and observations of a message."""
        began = time.perf_counter()
        # A group's critic uses the memories of ended agents; these memories are cleared below.
        self.grouping.receive(message, self.slots.n_slots, self.memories)
        for part in message.ended:
            self._ended(message.team, part)
        for _, decision, slots in message.deciding:
            reward, at_end = self.grouping.outcome(decision, slots)
            at_end = {**at_end, **self._next_allowed(decision)}
            closed = self.trajectories.complete_transition(
                slots, reward, decision.obs, ended=False, at_end=at_end
            )
            if closed is not None:
                self._count(closed)
        self.seconds["storage"] += time.perf_counter() - began

    def learn(self) -> bool:
        """Start or continue an update that is due; return whether an update has been completed."""
        sync, n_rows = self.sync, self.trajectories.n_closed
        is_ready = self.algorithm.ready(n_rows) if sync is None else sync.should_update()
        if not is_ready and not self.updates.is_spread:
            return False
        # Rows that no update will use would fill the memory.
        if is_ready and (self.finished or not self.learns):
            self._clear_closed()
            return False
        optimizer = self.algorithm.optimizer
        began, compiled_s = time.perf_counter(), optimizer.compile_s
        try:
            # Values that overflow raise a TrainingError later, so NumPy's warning is not needed.
            with np.errstate(over="ignore", invalid="ignore"):
                stats = self._updated(is_ready=is_ready)
        except TrainingError as error:
            raise TrainingError(f"behavior {self.name}, {error}") from error
        if stats:
            self.statistics.add_all(stats if sync is None else sync.mean(stats))
            self.n_updates += 1
            self.last_update = stats
        compile_s = optimizer.compile_s - compiled_s
        self.seconds["update"] += time.perf_counter() - began - compile_s
        if compile_s:
            self.seconds["compile"] = self.seconds.get("compile", 0.0) + compile_s
        return bool(stats)

    def _updated(self, *, is_ready: bool) -> dict[str, float]:
        """Start or continue an update; return its statistics once it is complete, else {}."""
        updates = self.updates
        # If the next rollout is complete, the update under way is finished at once.
        if is_ready and updates.is_under_way:
            return updates.take(at_once=True)
        updates.advance()
        # A completed update is taken before a new update starts, because `start` requires this.
        stats = updates.take()
        if not is_ready:
            return stats
        rollout = self.trajectories.rollout(self.grouping.moments)
        refuse_non_finite_rollout(rollout, step=self.step)
        self._n_rollouts += 1
        is_learned = updates.start(rollout, step=self.step)
        # With a replay, `start` may store rows without an update; then nothing is recorded.
        if is_learned or self.algorithm.replay is None:
            self.record(rollout.obs, rollout.fields)
        self._clear_closed()
        return stats or updates.take()

    def decide(self, message: Message) -> Decided:
        """Choose the actions of all workers' deciding agents in one batch."""
        began = time.perf_counter()
        counts = [0] * message.n_workers
        for worker, _, slots in message.deciding:
            counts[worker] = len(slots)
        if not message.deciding:
            return Decided([self.spec.action_spec.empty_action(0) for _ in counts], None, [])
        decisions = [part.steps for part in message.deciding]
        obs, masks = concat_steps(decisions, self.spec.action_spec.discrete_branches)
        player: Algorithm | Opponent
        player = self.acting
        if self.snapshot_pool is not None:
            # A team without an opponent is the team that learns.
            player = self.snapshot_pool.opponents.get(message.team, player)
        try:
            decision = player.act(obs, masks, self._memories_of(message))
        except UnityPolicyException as error:
            location = f"behavior {self.name}, step {self.step}"
            raise UnityPolicyException(f"{location}: {error}") from error
        actions = split_actions(decision.action, counts)
        self.seconds["inference"] += time.perf_counter() - began
        return Decided(actions, decision, obs)

    def begin_transitions(self, message: Message, decided: Decided) -> None:
        """Store the decisions as open transitions, which wait for their rewards."""
        if decided.decision is None:
            return
        began = time.perf_counter()
        slots = message.slots
        memory = decided.decision.memory
        if self.memories is not None and memory is not None:
            # An opponent has only the policy's part of a memory.
            self.memories[slots, : memory.shape[1]] = memory
        if self.snapshot_pool is not None and message.team in self.snapshot_pool.opponents:
            return  # opponents do not learn
        rows = decided.decision.rows
        self.trajectories.begin_transition(slots, decided.obs, self.grouping.rows(slots, rows))
        self.pending_stats.add(names.ENTROPY, decided.decision.entropy)
        # These observations allow an export of a run that is stopped before its first update.
        if not len(self.recorded["obs"][0]):
            self.record(decided.obs, rows)
        self.seconds["storage"] += time.perf_counter() - began

    def record(self, obs: Sequence[FloatArray], fields: Mapping[str, Any]) -> None:
        """Keep a sample of observations [N, ...] and action masks, to check exported policies."""
        allowed = fields.get("allowed")  # a single True means that no row has a mask
        self.recorded = sample_rows(obs, allowed if isinstance(allowed, np.ndarray) else None)

    def learn_with(self, others: LearnerGroup) -> None:
        """Synchronise with the learners of this behavior in other processes from now on."""
        self.sync = others
        self.restart_pending_stats()

    def restart_pending_stats(self) -> None:
        """Clear `pending_stats`, the statistics of this process since the last synchronisation."""
        self.pending_stats = Statistics()

    def drop_unfinished(self, worker: int | None = None) -> None:
        """Drop the open trajectories of one worker's agents, or of all agents, after a reset."""

        def gone(source: Any) -> bool:  # a source is (team, worker)
            return worker is None or bool(source[1] == worker)

        self._drop(self.slots.forget(gone))
        if self.snapshot_pool is not None:
            self.snapshot_pool.games.forget(gone)

    def _drop_vanished(self, slots: AnyArray) -> None:
        if not self._warned_of_vanished:
            self._warned_of_vanished = True
            _log.warning(
                "%d agents of %s have vanished without the end of an episode: they were in none of "
                "the last %d messages. Their unfinished trajectories are not learned from; the "
                "environment should end the episode of an agent before it removes the agent.",
                len(slots),
                self.name,
                STALE_AFTER_MESSAGES,
            )
        self._drop(slots)

    def _drop(self, slots: AnyArray) -> None:
        if not len(slots):
            return
        self.trajectories.drop_open(slots)
        self.grouping.drop(slots)
        if self.memories is not None:
            self.memories[slots] = 0.0

    def _ended(self, team: str, part: Part[TerminalSteps]) -> None:
        _, terminal, slots = part
        if self.memories is not None:
            self.memories[slots] = 0.0
        reward, at_end = self.grouping.outcome(terminal, slots)
        at_end = {**at_end, **self._next_allowed(terminal)}
        # `are_waiting` is called first, because after `complete_transition` no agent waits.
        idle = ~self.trajectories.are_waiting(slots)
        closed = self.trajectories.complete_transition(
            slots, reward, terminal.obs, ended=True, interrupted=terminal.interrupted, at_end=at_end
        )
        if closed is not None:
            self._count(closed)
        self.grouping.report(closed, slots, self.pending_stats)
        # Decisions of opponents are not stored, so every opponent would count as idle.
        if idle.any() and not (
            self.snapshot_pool is not None and team in self.snapshot_pool.opponents
        ):
            self.grouping.report_idle(terminal, idle, self.pending_stats)

    def _next_allowed(self, steps: DecisionSteps | TerminalSteps) -> dict[str, BoolArray]:
        """Return the field `next_allowed` [N, choices], all True at the end of an episode.

        The map is empty if the algorithm does not store the field.
        """
        if "next_allowed" not in self.trajectories.fields_at_end:
            return {}
        if isinstance(steps, DecisionSteps) and steps.action_mask is not None:
            return {"next_allowed": ~np.concatenate(steps.action_mask, axis=1)}
        n_choices = sum(self.spec.action_spec.discrete_branches)
        return {"next_allowed": np.ones((len(steps.agent_id), n_choices), np.bool_)}

    def _clear_closed(self) -> None:
        self.trajectories.clear_closed()
        self.grouping.forget_used(self.trajectories)

    def _reserve_slots(self) -> None:
        self.trajectories.reserve(self.slots.n_slots)
        if self.memories is not None and len(self.memories) < self.trajectories.n_slots:
            self.memories = enlarged(self.memories, self.trajectories.n_slots)

    def _memories_of(self, message: Message) -> FloatArray | None:
        """Return the memories [N, M] of the deciding agents, zeros at the start of an episode."""
        if self.memories is None:
            return None
        recalled: FloatArray = self.memories[message.slots]
        for part in message.ended:
            # An agent that ended in this message and asks again begins a new episode.
            recalled[np.isin(message.slots, part.slots)] = 0
        return recalled

    def _count(self, closed: ClosedTrajectories) -> None:
        # After `max_steps` neither the weights nor the normalizers change.
        if self.learns and not self.finished:
            self.updates.observe(closed.obs)
        if self.sync is None:
            self.step += closed.n_rows
        else:
            # Steps of all processes are added to `step` at a synchronisation.
            self.sync.steps += closed.n_rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which training continues, without the rows of `experience`."""
        state = {
            "step": self.step,
            "n_updates": self.n_updates,
            "algorithm": self.updates.state_dict(),
            "statistics": self.statistics.state_dict(),
            "recorded": self.recorded,
        }
        if self.snapshot_pool is not None:
            state["self_play"] = self.snapshot_pool.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`; ValueError if the recorded observations do not fit."""
        shapes = [(*obs.shape,) for obs in self.spec.observation_specs]
        if [(*obs.shape[1:],) for obs in state["recorded"]["obs"]] != shapes:
            raise ValueError(f"the recorded observations do not have the shapes {shapes}")
        self.step = int(state["step"])
        self.n_updates = int(state["n_updates"])
        self.updates.load_state_dict(state["algorithm"])
        # `counts` subtracts these numbers, so that it begins at 0 when a run is resumed.
        self._before = self._counted()
        self.statistics.load_state_dict(state["statistics"])
        self.recorded = dict(state["recorded"])
        # The key is missing if the run began without self-play.
        if self.snapshot_pool is not None and "self_play" in state:
            self.snapshot_pool.load_state_dict(state["self_play"])

    def weights_dict(self) -> dict[str, Any]:
        """Return copies of the acting policy's weights, in the form of `state_dict`."""
        return {
            "step": self.step,
            "n_updates": self.n_updates,
            "algorithm": self.updates.weights(),
            "recorded": self.recorded,
        }

    def experience(self, *, with_open: bool) -> dict[str, Any]:
        """Return the rows that wait for an update; with `with_open` also the open trajectories."""
        memories = None if self.memories is None else self.memories[: self.slots.n_slots]
        return {
            "closed": self.trajectories.closed_state(),
            "open": self.trajectories.open_state(self.slots.n_slots) if with_open else None,
            "slots": self.slots.state_dict() if with_open else None,
            "memories": None if not with_open or memories is None else memories.copy(),
            "games": self.snapshot_pool.games.state_dict()
            if with_open and self.snapshot_pool
            else None,
            "groups": self.grouping.state_dict(n_slots=self.slots.n_slots),
        }

    def load_experience(self, state: Mapping[str, Any], *, with_open: bool) -> None:
        """Restore the rows that `experience` returned; open trajectories only if `with_open`."""
        self.trajectories.load_closed_state(state["closed"])
        self.grouping.load_state_dict(state.get("groups") or {}, with_open=with_open)
        if with_open:
            self.slots.load_state_dict(state["slots"])
            self.trajectories.load_open_state(state["open"])
            if self.snapshot_pool is not None and state.get("games") is not None:
                self.snapshot_pool.games.load_state_dict(state["games"])
            if self.memories is not None:
                self.memories = state["memories"].reshape(-1, self.algorithm.memory_size)
                self._reserve_slots()
