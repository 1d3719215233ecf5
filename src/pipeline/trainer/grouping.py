"""Connects a learner with the groups of its agents, for algorithms that learn from whole groups."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.algos.algorithm import Algorithm
from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.data.columns import Columns, Field
from pipeline.data.groups import GroupMessage, Groups
from pipeline.data.rollout import ClosedTrajectories, Trajectories
from pipeline.tracking import names
from pipeline.trainer.batching import Message, Part
from pipeline.trainer.statistics import Statistics

_log = logging.getLogger(__name__)


def group_tracker_for(algorithm: Algorithm) -> GroupTracker | NoGroups:
    """Return a `GroupTracker` if the algorithm has `member_fields`, else `NoGroups`."""
    fields = algorithm.member_fields
    return GroupTracker(Columns(fields, algorithm.columns.obs)) if fields else NoGroups()


class NoGroups:
    """Stands in for `GroupTracker`: agents learn from the sum of their own and group rewards."""

    moments = None
    """Group snapshots for `Rollout.moments`; None, because no groups are tracked."""

    def __init__(self) -> None:
        self._warned_of_group_reward = False

    def _do_nothing(self, *_arguments: object, **_options: object) -> None:
        pass

    receive = forget_used = drop = load_state_dict = _do_nothing

    def outcome(
        self, step: DecisionSteps | TerminalSteps, _slots: AnyArray
    ) -> tuple[FloatArray, Mapping[str, AnyArray]]:
        """Return the rewards [N] to learn from, and the fields to store at a trajectory's end."""
        if not self._warned_of_group_reward and step.group_reward.any():
            self._warned_of_group_reward = True
            # This is the text of ML-Agents, including its spelling.
            _log.warning(
                "An agent recieved a Group Reward, but you are not using a multi-agent trainer. "
                "Please use the POCA trainer for best results."
            )
        return step.reward + step.group_reward, {}

    def rows(self, _slots: AnyArray, rows: Mapping[str, AnyArray]) -> Mapping[str, AnyArray]:
        """Return `rows`, the fields [N, ...] to store with the agents' decisions, unchanged."""
        return rows

    def report(
        self, closed: ClosedTrajectories | None, _slots: AnyArray, statistics: Statistics
    ) -> None:
        """Add the returns and lengths of the ended episodes to the statistics."""
        if closed is not None:
            statistics.add_episodes(closed.episode_returns, closed.episode_lengths)

    def report_idle(self, terminal: TerminalSteps, idle: BoolArray, statistics: Statistics) -> None:
        """Add the ended episodes of `idle` agents [N], which never decided, to the statistics."""
        # A game may end before an agent's first turn; the agent's episode then has a return but no
        # decision.
        total = (terminal.reward + terminal.group_reward)[idle]
        statistics.add_episodes(total.tolist(), [0] * len(total))

    def state_dict(self, *, n_slots: int) -> dict[str, Any]:  # noqa: ARG002
        """Return an empty state."""
        return {}


class GroupTracker(Groups):
    """Tracks the groups of one behavior's agents, and the snapshots that their members share.

    `columns` are the fields and observations that the algorithm needs of every group member.
    """

    def __init__(self, columns: Columns[Field]) -> None:
        super().__init__(columns)
        # These fields are known after the decision; the other columns are known with the
        # observation.
        described = ("continuous", "discrete", "memory")
        self._described = [name for name in columns.fields if name in described]

    def receive(self, message: Message, n_slots: int, memories: FloatArray | None) -> None:
        """Update the groups from a message of all workers; called before `outcome`."""
        parts: list[Part[Any]] = [*message.ended, *message.deciding]
        if not parts:
            return
        template = parts[0].steps.obs
        ended = self._joined(message.ended, message.team, template)
        if memories is not None and len(memories):
            # An agent that never acted may have a slot beyond `memories`. With the mode "clip" this
            # agent gets another agent's memory, which is not used.
            ended = replace(ended, memory=memories.take(ended.slots, axis=0, mode="clip"))
        deciding = self._joined(message.deciding, message.team, template)
        self.on_message(ended, deciding, n_slots)

    def outcome(
        self, step: DecisionSteps | TerminalSteps, slots: AnyArray
    ) -> tuple[FloatArray, Mapping[str, AnyArray]]:
        """Return the rewards [N] to learn from, and the fields to store at a trajectory's end."""
        s = self.by_slot
        ended = isinstance(step, TerminalSteps)
        gained, moment = (
            ("step_reward_at_end", "end_moment") if ended else ("step_reward", "moment")
        )
        # The rewards are summed in float64, but stored in float32 like all rewards of rows.
        return s[gained][slots].astype(np.float32), {"next_moment": s[moment][slots]}

    def rows(self, slots: AnyArray, rows: Mapping[str, AnyArray]) -> Mapping[str, AnyArray]:
        """Return `rows` with the fields `entity` (stored agent) and `moment` (group snapshot)."""
        described = {name: rows[name] for name in self._described}
        return {**rows, **self.decided(slots, described)}

    def report(
        self, closed: ClosedTrajectories | None, slots: AnyArray, statistics: Statistics
    ) -> None:
        """Add the ended episodes of agents in `slots`, and of their groups, to the statistics."""
        for total in self.finished:
            statistics.add(names.GROUP_REWARD, total)
        # `finished` is cleared even without a closed trajectory, so that no return counts twice.
        self.finished.clear()
        if closed is None:
            return
        s = self.by_slot
        # Agents that have not acted in their episode are left out, as in `closed`.
        slots = slots[s["acted"][slots]]
        own_return = s["own_at_end"][slots]
        statistics.add_episodes(
            (own_return + s["group_at_end"][slots]).tolist(),
            closed.episode_lengths,
            own=own_return.tolist(),
            learned=closed.episode_returns,
        )

    def report_idle(self, terminal: TerminalSteps, idle: BoolArray, statistics: Statistics) -> None:
        """Add the ended episodes of `idle` agents [N], which never decided, to the statistics."""
        reward = terminal.reward[idle]
        total = reward + terminal.group_reward[idle]
        statistics.add_episodes(total.tolist(), [0] * len(total), own=reward.tolist())

    def forget_used(self, trajectories: Trajectories) -> None:
        """Drop the snapshots that no open trajectory refers to; called after an update."""
        self.forget(trajectories.open_values("moment"))

    def _joined(
        self, parts: Sequence[Part[Any]], team: Hashable, template: Sequence[AnyArray]
    ) -> GroupMessage:
        def joined(pieces: list[AnyArray], dtype: Any) -> AnyArray:
            return np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype)

        # Workers number their groups independently, so the worker is part of the key.
        keys = [self.key((team, worker), step.group_id, slots) for worker, step, slots in parts]
        steps = [part.steps for part in parts]
        interrupted = [step.interrupted for step in steps if isinstance(step, TerminalSteps)]
        return GroupMessage(
            slots=joined([part.slots for part in parts], np.intp),
            group=joined(keys, np.int64),
            reward=joined([step.reward for step in steps], np.float32),
            group_reward=joined([step.group_reward for step in steps], np.float32),
            obs=[
                # The empty first piece gives the shape and type if there are no agents.
                np.concatenate([values[:0], *[step.obs[i] for step in steps]])
                for i, values in enumerate(template)
            ],
            interrupted=joined(interrupted, np.bool_) if interrupted else None,
        )
