"""A replay buffer: the newest rows of closed trajectories, which are sampled many times.

Rows are stored in ring buffers. Each observation is stored once: trajectories are written one after
another, each followed by its last observation, so that the observation after a row is always in the
place after the row's own observation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.data.columns import Columns, Field, cut, rows_of
from pipeline.data.rollout import Rollout

# Number of places that are allocated at first for the last observations of trajectories, as a share
# of the capacity.
_ENDS = 1 / 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Copies of B rows of a replay buffer."""

    obs: list[FloatArray]
    """One array [B, *shape] for each observation of the behavior."""
    next_obs: list[FloatArray]
    """Arrays in the form of `obs`, with the observation that follows each row."""
    fields: dict[str, AnyArray]
    """Arrays [B, ...] of all other fields; `done` is True where the task ended with the row."""
    lengths: AnyArray
    """int64 [S] number of rows of each sequence; the rows are sorted by sequence."""
    memory: FloatArray | None
    """[S, M] recurrent memory before each sequence; None without memory."""


class Replay:
    """The newest `capacity` rows of experience, in arrays that are allocated once.

    New rows overwrite the oldest rows. If the agents have a memory, whole sequences are sampled,
    and a sequence is not sampled any more after one of its rows was overwritten. A rollout has a
    field `next_NAME` only once for each trajectory: the value of the field NAME after the
    trajectory's last row. The replay has `next_NAME` for every row: the value of NAME in the next
    row, or the rollout's value for the last row of a trajectory. The columns are the columns of
    `Trajectories`, with a field `memory` if there is memory.
    """

    def __init__(self, columns: Columns[Field], *, capacity: int, sequence_length: int = 1) -> None:
        self.capacity = capacity
        self.sequence_length = sequence_length
        n_places = capacity + int(capacity * _ENDS) + 1
        self._obs: list[AnyArray] = [
            np.zeros((n_places, *field.shape), field.dtype) for field in columns.obs
        ]
        self._rows: dict[str, AnyArray] = {
            name: np.zeros((capacity, *field.shape), field.dtype)
            for name, field in columns.fields.items()
            if name != "memory"
        }
        self._rows["reward"] = np.zeros(capacity, np.float32)
        self._rows["done"] = np.zeros(capacity, np.bool_)
        # Place of each row's observation, counted from the first observation ever added.
        self._place = np.zeros(capacity, np.int64)
        self._memory = None
        if "memory" in columns.fields:
            self._memory = np.zeros((capacity, *columns.fields["memory"].shape), np.float32)
            self._start = np.zeros(capacity, np.int64)
            self._length = np.zeros(capacity, np.int64)
        # Number of all rows that were ever added; the newest `capacity` rows are stored.
        self.n_added = 0
        self._n_places = 0
        self._n_sequences = self._first_sequence = 0
        self.kept: list[tuple[str, str, int]] = []
        """(name, digest, number of rows) of each file with rows of this replay, oldest first."""
        # Numbers of rows and sequences that had been added when a file was last added to `kept`.
        self._saved_up_to = (0, 0)

    def __len__(self) -> int:
        """Return the number of stored rows."""
        return min(self.n_added, self.capacity)

    @property
    def remembers(self) -> bool:
        """Whether rows are sampled as whole sequences with the memory before each sequence."""
        return self._memory is not None

    def add(self, rollout: Rollout) -> None:
        """Add the rows of closed trajectories; only the newest `capacity` rows are stored."""
        lengths = rollout.lengths.astype(np.int64)
        n_rows, n_ends = rollout.n_rows, len(lengths)
        if n_rows == 0:
            return
        trajectory = np.repeat(np.arange(n_ends), lengths)
        # Each earlier trajectory has taken one place more, for its last observation.
        row_places = self._n_places + np.arange(n_rows) + trajectory
        end_places = self._n_places + np.cumsum(lengths + 1) - 1
        last_rows = np.cumsum(lengths) - 1
        done = np.zeros(n_rows, np.bool_)
        done[last_rows] = rollout.terminated
        columns = {**rollout.fields, "done": done}
        for name, at_end in rollout.at_end.items():
            columns[name] = np.roll(rollout.fields[name.removeprefix("next_")], -1, axis=0)
            columns[name][last_rows] = at_end
        # Only the newest rows are written: a rollout larger than the ring would overwrite itself.
        newest = slice(max(n_rows - self.capacity, 0), n_rows)
        at = (self.n_added + np.arange(n_rows)[newest]) % self.capacity
        for name, stored in self._rows.items():
            stored[at] = columns[name][newest]
        self._place[at] = row_places[newest]
        if self.remembers and rollout.memory is not None:
            new = cut(rollout.lengths, self.sequence_length)
            memory = rollout.memory[new.trajectory, new.number]
            self._note_sequences(new.starts, new.lengths, memory, n_rows)
        self.n_added += n_rows
        self._n_places += n_rows + n_ends
        # Room is made before the observations are written, because their rings may have to grow.
        self._make_room(n_rows + n_ends)
        size = len(self._obs[0])
        places = row_places[newest] % size
        last = end_places >= row_places[newest][0]
        for stored, obs, next_obs in zip(self._obs, rollout.obs, rollout.next_obs, strict=True):
            stored[places] = obs[newest]
            stored[end_places[last] % size] = next_obs[last]

    def sample(self, rng: np.random.Generator, n_rows: int) -> Sampled:
        """Draw rows uniformly and with replacement; with memory, whole sequences instead.

        With memory n_rows // sequence_length sequences are drawn, but at least one.
        """
        if self._memory is None:
            return self.read(self.draw(rng, n_rows))
        n = max(n_rows // self.sequence_length, 1)
        chosen = rng.integers(self._first_sequence, self._n_sequences, n) % self.capacity
        lengths, memory = self._length[chosen], self._memory[chosen]
        return self.read(rows_of(self._start[chosen], lengths), lengths=lengths, memory=memory)

    def draw(self, rng: np.random.Generator, n_rows: int) -> AnyArray:
        """Draw row numbers, int64 [n_rows], counted from the first row that was ever added."""
        # Rows are counted back from the newest row, which also works for a replay that is not full.
        numbers: AnyArray = self.n_added - 1 - rng.integers(0, len(self), n_rows)
        return numbers

    def following(self, rows: AnyArray, n: int) -> tuple[AnyArray, BoolArray]:
        """Return the numbers of rows [B] and of the n - 1 rows after each of them, int64 [n, B].

        The second result, bool [n, B], says whether the row with this number exists and belongs to
        the same trajectory as the given row.
        """
        steps = np.arange(n)[:, None]
        numbers = rows + steps
        # A trajectory's last observation has a place of its own, so the first row of the next
        # trajectory is two places after this trajectory's last row.
        places = self._place[numbers % self.capacity]
        follows = (numbers < self.n_added) & (places == places[0] + steps)
        return np.minimum(numbers, self.n_added - 1), follows

    def read(
        self, rows: AnyArray, *, lengths: AnyArray | None = None, memory: FloatArray | None = None
    ) -> Sampled:
        """Return copies of rows [B], which are counted from the first row that was ever added.

        `lengths` [S] are the rows of each sequence, None if each row is a sequence of its own;
        `memory` [S, M] is the recurrent memory before each sequence, None without memory.
        """
        at = rows % self.capacity
        size = len(self._obs[0])
        place = self._place[at]
        # The next observation is at the next place, for the last row of a trajectory, too.
        now, later = place % size, (place + 1) % size
        return Sampled(
            obs=[stored[now] for stored in self._obs],
            next_obs=[stored[later] for stored in self._obs],
            fields={name: stored[at] for name, stored in self._rows.items()},
            lengths=np.ones(len(rows), np.int64) if lengths is None else lengths,
            memory=memory,
        )

    def _note_sequences(
        self, starts: AnyArray, lengths: AnyArray, memory: AnyArray, n_rows: int
    ) -> None:
        """Store the sequences of new rows, and forget the sequences that these rows overwrite.

        Called before `n_added` counts the `n_rows` new rows. `starts` [S] are first rows, counted
        from the first new row, and `memory` [S, M] is the memory before them.
        """
        if self._memory is None:
            return
        oldest = self.n_added + n_rows - self.capacity
        n_stored = self._n_sequences - self._first_sequence
        # A sequence has at least one row, so the new rows overwrite at most `n_rows` sequences;
        # `sequence_length` is only a margin.
        n_candidates = min(n_stored, n_rows + self.sequence_length)
        candidates = (self._first_sequence + np.arange(n_candidates)) % self.capacity
        self._first_sequence += int(np.searchsorted(self._start[candidates], oldest))
        fits = self.n_added + starts >= oldest
        at = (self._n_sequences + np.arange(int(fits.sum()))) % self.capacity
        self._start[at] = self.n_added + starts[fits]
        self._length[at] = lengths[fits]
        self._memory[at] = memory[fits]
        self._n_sequences += len(at)

    def _make_room(self, n_new: int) -> None:
        """Enlarge the observation rings if they are full: short episodes need many extra places."""
        size = len(self._obs[0])
        oldest = int(self._place[(self.n_added - len(self)) % self.capacity])
        n_live = self._n_places - oldest
        if n_live <= size:
            return
        n_written = self._n_places - n_new
        # Places are counted from the first observation ever, so their remainders change with the
        # size of the ring, and each observation is copied to its new index.
        places = np.arange(min(oldest, n_written), n_written)
        # The rings are enlarged by half, so that the average time of adding a row stays constant.
        bigger = max(n_live, size + size // 2)
        for i, stored in enumerate(self._obs):
            self._obs[i] = np.zeros((bigger, *stored.shape[1:]), stored.dtype)
            self._obs[i][places % bigger] = stored[places % size]

    def state_dict(self) -> dict[str, AnyArray]:
        """Return copies of all rows, the oldest first."""
        return self._state(0, 0)

    def new_rows(self) -> dict[str, AnyArray]:
        """Return copies, in `state_dict`'s format, of the rows that are in no file of `kept`."""
        return self._state(*self._saved_up_to)

    def note_kept(self, name: str, digest: str, n_rows: int) -> None:
        """Append a file with the newest rows to `kept`; drop files with overwritten rows only."""
        self.kept.append((name, digest, n_rows))
        self._saved_up_to = (self.n_added, self._n_sequences)
        # A file is needed as long as fewer than `capacity` rows were added after its own rows.
        n_newer = 0
        for at in reversed(range(len(self.kept))):
            if n_newer >= self.capacity:
                del self.kept[: at + 1]
                break
            n_newer += self.kept[at][2]

    def _state(self, first_row: int, first_sequence: int) -> dict[str, AnyArray]:
        oldest = max(self.n_added - len(self), first_row)
        at = np.arange(oldest, self.n_added) % self.capacity
        first = int(self._place[at[0]]) if len(at) else self._n_places
        places = np.arange(first, self._n_places) % len(self._obs[0])
        rows = {name: stored[at] for name, stored in self._rows.items()}
        state = {
            "place": self._place[at] - first,
            **Columns(rows, [stored[places] for stored in self._obs]).to_saved(),
        }
        if self._memory is not None:
            first = max(self._first_sequence, first_sequence)
            sequences = np.arange(first, self._n_sequences) % self.capacity
            state["sequence_start"] = self._start[sequences] - oldest
            state["sequence_length"] = self._length[sequences]
            state["sequence_memory"] = self._memory[sequences]
        return state

    def load_state_dict(self, state: Mapping[str, AnyArray]) -> None:
        """Replace all rows by the rows that `state_dict` returned, with the errors of `extend`."""
        self.clear()
        self.extend(state)

    def clear(self) -> None:
        """Forget all rows, and the files in `kept`."""
        self.n_added = self._n_places = self._n_sequences = self._first_sequence = 0
        self.kept, self._saved_up_to = [], (0, 0)

    def extend(self, state: Mapping[str, AnyArray]) -> None:
        """Add rows that `state_dict` or `new_rows` returned; they become the newest rows.

        Raises:
            KeyError, ValueError: The columns of `state` are not the columns of this replay, or
                `state` has more rows than `capacity`.
        """
        obs = Columns.from_saved(state).obs
        n_rows, n_places = len(state["place"]), len(obs[0])
        if n_rows > self.capacity:
            raise ValueError(
                f"the saved replay has {n_rows} rows, and buffer_size is {self.capacity}; set "
                f"buffer_size to {n_rows} or more"
            )
        at = (self.n_added + np.arange(n_rows)) % self.capacity
        for name, stored in self._rows.items():
            stored[at] = state[name]
        self._place[at] = self._n_places + state["place"]
        if self._memory is not None:
            starts, lengths = state["sequence_start"], state["sequence_length"]
            self._note_sequences(starts, lengths, state["sequence_memory"], n_rows)
        self.n_added += n_rows
        self._n_places += n_places
        self._make_room(n_places)
        places = np.arange(self._n_places - n_places, self._n_places)
        for stored, values in zip(self._obs, obs, strict=True):
            stored[places % len(stored)] = values
