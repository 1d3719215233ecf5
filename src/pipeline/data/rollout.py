"""Trajectories of many agents, written by slot and closed into one contiguous rollout.

Every live agent has a slot (see `data.slots`). A decision writes one row at [slot, cursor], where
the cursor is the number of complete rows in the slot's open trajectory; the reward arrives with the
agent's next message and completes the row. A trajectory closes when the
agent's episode ends or after `time_horizon` rows; then its rows, and the rows of all trajectories
that close in the same message, are copied to the end of the rollout, where an update reads them as
contiguous arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.data.columns import Columns, Field, GrowableRows, enlarged, rows_of
from pipeline.data.groups import GroupSnapshots

_ALL = slice(None)


def _no_agents() -> AnyArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """R rows of K closed trajectories, one trajectory after another.

    The arrays are views into preallocated memory, and valid until the next row is added.
    """

    obs: list[FloatArray]
    """One array [R, *shape] for each observation of the behavior."""
    fields: Mapping[str, AnyArray]
    """One array [R, ...] for each field, `reward` included."""
    starts: IntArray
    """[K] first row of each trajectory."""
    lengths: IntArray
    """[K] number of rows of each trajectory."""
    terminated: BoolArray
    """[K] whether the task ended, so that the value after the last row is 0."""
    next_obs: list[FloatArray]
    """One array [K, *shape] for each observation: its value after a trajectory's last row."""
    memory: FloatArray | None = None
    """[K, sequences, M] memory before each sequence of a trajectory; a short trajectory has fewer
    sequences, and then the later entries have no meaning. None without memory."""
    slots: AnyArray = field(default_factory=_no_agents)
    """[K] slot of each trajectory's agent."""
    begins: AnyArray = field(default_factory=_no_agents)
    """bool [K] whether an episode begins with the trajectory."""
    ended: AnyArray = field(default_factory=_no_agents)
    """bool [K] whether an episode ends with the trajectory, finished or cut short."""
    at_end: Mapping[str, AnyArray] = field(default_factory=dict)
    """One array [K, ...] for each field that is stored once for each trajectory."""
    moments: GroupSnapshots | None = None
    """Group snapshots to which the rows refer by number; None for algorithms without groups."""

    @property
    def n_rows(self) -> int:
        """Number of rows of all trajectories."""
        return len(self.fields["reward"])


@dataclass(kw_only=True, slots=True)
class ClosedTrajectories:
    """Data of the trajectories that closed in one message, for counters and the normalizer."""

    obs: list[FloatArray]
    """[rows, *shape] observations of the closed rows; valid until the next rows close."""
    n_rows: int = 0
    episode_returns: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)


class Trajectories:
    """Open trajectories by slot, and the rollout of closed trajectories.

    Args:
        columns: columns of a row, without the reward.
        horizon: number of rows after which a trajectory closes.
        capacity: initial capacity for closed rows; it grows if needed.
    """

    def __init__(self, columns: Columns[Field], *, horizon: int, capacity: int) -> None:
        self.fields_at_end = {name: spec for name, spec in columns.fields.items() if spec.at_end}
        """Fields that are stored once for each trajectory."""
        rows = {name: spec for name, spec in columns.fields.items() if not spec.at_end}
        self._sparse = {name: spec for name, spec in rows.items() if spec.every}
        self.columns = Columns({**rows, "reward": Field(shape=())}, columns.obs)
        self.horizon = horizon
        self._open = self.columns.map(lambda spec: self._block(spec, 0))
        self.n_slots = 0
        """Number of slots for which arrays are allocated."""
        self._cursor = np.zeros(0, dtype=np.intp)
        self._waiting = np.zeros(0, dtype=np.bool_)
        # Returns are summed in float64, because float32 loses small rewards in a long sum.
        self._episode_return = np.zeros(0, dtype=np.float64)
        self._episode_length = np.zeros(0, dtype=np.int64)
        dense = {name: spec for name, spec in self.columns.fields.items() if not spec.every}
        self._rows = GrowableRows(Columns(dense, columns.obs), capacity)
        # One row for each closed trajectory, with its length, how it ended, and the observation
        # after its last row.
        ends = {
            "length": Field(shape=(), dtype=np.int64),
            "terminated": Field(shape=(), dtype=np.bool_),
            "slot": Field(shape=(), dtype=np.int64),
            "begins": Field(shape=(), dtype=np.bool_),
            "ended": Field(shape=(), dtype=np.bool_),
            **self.fields_at_end,
            **{
                name: Field(shape=self._open.fields[name].shape[1:], dtype=spec.dtype)
                for name, spec in self._sparse.items()
            },
        }
        self._ends = GrowableRows(Columns(ends, columns.obs), 64)

    @property
    def n_closed(self) -> int:
        """Number of rows for the next update; with memory, each short sequence counts as full.

        So the number of sequences in an update does not depend on the length of episodes.
        """
        if not self._sparse:
            return self._rows.used
        return self._counted(self._ends.filled().fields["length"])

    @property
    def n_held(self) -> int:
        """Value that `n_closed` would have if all open trajectories were closed now."""
        return self.n_closed + self._counted(self._cursor)

    def _counted(self, lengths: AnyArray) -> int:
        """Return the sum of the trajectories' `lengths`, each rounded up to whole sequences."""
        # The only sparse field is the recurrent memory, so `every` is the sequence length.
        every = max((spec.every or 1 for spec in self._sparse.values()), default=1)
        return int((-(-lengths // every) * every).sum())

    def reserve(self, n_slots: int) -> None:
        """Allocate arrays for the slots 0 to `n_slots` - 1."""
        n_old = self.n_slots
        if n_slots <= n_old:
            return
        # The number of slots is doubled, so that the average time of adding an agent is constant.
        n = self.n_slots = max(n_slots, 2 * n_old)
        longest = int(self._cursor.max(initial=0)) + 1

        def grown(spec: Field, old: AnyArray) -> AnyArray:
            block = self._block(spec, n)
            # Unused rows are not copied, because the system provides memory only for written rows.
            used = -(-longest // (spec.every or 1))
            block[:n_old, :used] = old[:, :used]
            return block

        self._open = self.columns.map(grown, self._open)
        self._cursor = enlarged(self._cursor, n)
        self._waiting = enlarged(self._waiting, n)
        self._episode_return = enlarged(self._episode_return, n)
        self._episode_length = enlarged(self._episode_length, n)

    def begin_transition(
        self, slots: AnyArray, obs: Sequence[FloatArray], fields: Mapping[str, AnyArray]
    ) -> None:
        """Write the observations and actions of agents; `complete_transition` adds the rewards.

        Args:
            slots: [N] slots, each at most once.
            obs: one array [N, *shape] for each observation of the behavior.
            fields: arrays [N, ...] of every field except the reward; other keys are ignored. A
                missing field is a KeyError.
        """
        at = self._cursor[slots]
        for block, values in zip(self._open.obs, obs, strict=True):
            block[slots, at] = values
        for name, block in self._open.fields.items():
            if name in self._sparse:
                # A sparse field is stored at the first row of each sequence only.
                number, rest = np.divmod(at, self._sparse[name].every)
                values, is_kept = fields[name], rest == 0
                if is_kept.any():
                    block[slots[is_kept], number[is_kept]] = values[is_kept]
            elif name != "reward":
                block[slots, at] = fields[name]
        self._waiting[slots] = True

    def complete_transition(
        self,
        slots: AnyArray,
        reward: FloatArray,
        obs: Sequence[FloatArray],
        *,
        ended: bool,
        interrupted: BoolArray | None = None,
        at_end: Mapping[str, AnyArray] | None = None,
    ) -> ClosedTrajectories | None:
        """Add the rewards to the agents' waiting rows, and close trajectories that are complete.

        Args:
            slots: [N] slots; a slot is skipped if no decision waits for its reward.
            reward: [N] sum of rewards since the decision.
            obs: arrays [N, *shape] of the observations that arrived with the reward.
            ended: whether these agents' episodes have ended.
            interrupted: [N] whether each ended episode was cut short.
            at_end: arrays [N, ...] of the fields that are stored once for each trajectory.

        Returns:
            The trajectories that closed, or None.
        """
        # A waiting agent has an action in its open row, which has no reward yet.
        waiting = self._waiting[slots]
        at_end = at_end or {}
        # Agents that made no decision yet, or were dropped at a reset, are skipped.
        if not waiting.all():
            at_end = {name: values[waiting] for name, values in at_end.items()}
            slots, reward = slots[waiting], reward[waiting]
            obs = [values[waiting] for values in obs]
            interrupted = None if interrupted is None else interrupted[waiting]
        if len(slots) == 0:
            return None
        self._open.fields["reward"][slots, self._cursor[slots]] = reward
        self._cursor[slots] += 1
        self._waiting[slots] = False
        # Return and length are counted over the whole episode, which may have several trajectories.
        self._episode_return[slots] += reward
        self._episode_length[slots] += 1
        if ended and interrupted is not None:
            closed = self._close(slots, ~interrupted, obs, at_end, ended=True)
            closed.episode_returns = self._episode_return[slots].tolist()
            closed.episode_lengths = self._episode_length[slots].tolist()
            # The slot's agent begins another episode with its next decision.
            self._episode_return[slots] = 0.0
            self._episode_length[slots] = 0
            return closed
        # A trajectory that closes at the horizon has not ended its episode, so the value after its
        # last row is bootstrapped.
        full = self._cursor[slots] >= self.horizon
        if not full.any():
            return None
        return self._close(
            slots[full],
            np.zeros(int(full.sum()), np.bool_),
            [values[full] for values in obs],
            {name: values[full] for name, values in at_end.items()},
            ended=False,
        )

    def rollout(self, moments: GroupSnapshots | None = None) -> Rollout:
        """Return all closed trajectories; `moments` are the group snapshots of their rows."""
        rows, ends = self._rows.filled(), self._ends.filled()
        by_name = ends.fields
        lengths = by_name["length"]
        return Rollout(
            obs=rows.obs,
            fields=rows.fields,
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            terminated=by_name["terminated"],
            next_obs=ends.obs,
            memory=by_name.get("memory"),
            slots=by_name["slot"],
            begins=by_name["begins"],
            ended=by_name["ended"],
            at_end={name: by_name[name] for name in self.fields_at_end},
            moments=moments,
        )

    def are_waiting(self, slots: AnyArray) -> BoolArray:
        """Return bool [N]: whether the last row of each agent in `slots` waits for its reward."""
        return self._waiting[slots]

    def open_values(self, name: str) -> AnyArray:
        """Return the values [rows, ...] of a field in all open trajectories, in slot order."""
        used = self._cursor + self._waiting
        block = self._open.fields[name]
        return block[np.arange(block.shape[1]) < used[:, None]]

    def clear_closed(self) -> None:
        """Forget the closed trajectories; open trajectories continue."""
        self._rows.used = 0
        self._ends.used = 0

    def drop_open(self, slots: AnyArray | slice = _ALL) -> None:
        """Forget the open trajectories of `slots`, as after a reset of their environment."""
        self._cursor[slots] = 0
        self._waiting[slots] = False
        self._episode_return[slots] = 0.0
        self._episode_length[slots] = 0

    def closed_state(self) -> dict[str, Any]:
        """Return copies of the closed rows, and of the data stored once for each trajectory."""
        return {"rows": self._rows.state_dict(), "ends": self._ends.state_dict()}

    def load_closed_state(self, state: Mapping[str, Any]) -> None:
        """Replace the closed rows by the rows that `closed_state` returned."""
        self._rows.load_state_dict(state["rows"])
        self._ends.load_state_dict(state["ends"])

    def open_state(self, n_slots: int) -> dict[str, Any]:
        """Return copies of the open trajectories of slots 0 to `n_slots` - 1."""
        return {
            "rows": self.columns.map(partial(self._open_rows, n_slots), self._open).to_saved(),
            "slots": {name: values[:n_slots].copy() for name, values in self._slot_arrays()},
        }

    def load_open_state(self, state: Mapping[str, Any]) -> None:
        """Restore the open trajectories that `open_state` returned."""
        n_slots = len(state["slots"]["cursor"])
        self.reserve(n_slots)
        for block, values in self._open.pairs(Columns.from_saved(state["rows"])):
            block[:n_slots] = values
        for name, values in self._slot_arrays():
            values[:n_slots] = state["slots"][name]

    def _open_rows(self, n_slots: int, spec: Field, block: AnyArray) -> AnyArray:
        """Return a copy [n_slots, rows, ...] of a column of `_open`, with zeros in unused rows."""
        rows: AnyArray = block[:n_slots].copy()
        # A waiting decision has no reward yet; its place still has an older trajectory's reward.
        waiting = 0 if block is self._open.fields["reward"] else self._waiting[:n_slots]
        n_used = -(-(self._cursor[:n_slots] + waiting) // (spec.every or 1))
        rows[np.arange(rows.shape[1]) >= n_used[:, None]] = 0
        return rows

    def _slot_arrays(self) -> list[tuple[str, AnyArray]]:
        return [
            ("cursor", self._cursor),
            ("waiting", self._waiting),
            ("episode_return", self._episode_return),
            ("episode_length", self._episode_length),
        ]

    def _close(
        self,
        slots: AnyArray,
        terminated: BoolArray,
        obs: Sequence[FloatArray],
        at_end: Mapping[str, AnyArray],
        *,
        ended: bool,
    ) -> ClosedTrajectories:
        lengths = self._cursor[slots]
        # One call copies all trajectories that close; each slot's block has `horizon` rows.
        rows = self._rows.append_from(self._open, rows_of(slots * self.horizon, lengths))
        ends: dict[str, AnyArray] = {
            "length": lengths,
            "terminated": terminated,
            "slot": slots,
            # The episode is longer than the trajectory if an earlier part of the episode has closed
            # at the horizon.
            "begins": self._episode_length[slots] == lengths,
            "ended": np.full(len(slots), ended),
            **at_end,
        }
        # The memory before every sequence is copied; `cut` skips the sequences that a short
        # trajectory does not have.
        ends.update({name: self._open.fields[name][slots] for name in self._sparse})
        self._ends.append(len(slots), Columns(ends, list(obs)))
        self._cursor[slots] = 0
        return ClosedTrajectories(obs=rows, n_rows=len(rows[0]))

    def _block(self, spec: Field, n_slots: int) -> AnyArray:
        n_rows = -(-self.horizon // (spec.every or 1))
        return np.zeros((n_slots, n_rows, *spec.shape), dtype=spec.dtype)
