"""Trajectories compared with a slow storage that has lists for each agent."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.columns import Columns, Field
from pipeline.data.rollout import Trajectories

OBS = [Field(shape=(2,)), Field(shape=(1, 2))]
PLAIN = {
    "choice": Field(shape=(1,), dtype=np.int64),
    "moment": Field(shape=(), dtype=np.int64, at_end=True),
}
EVERY = 2
RECURRENT = {**PLAIN, "memory": Field(shape=(3,), every=EVERY)}
HORIZON, N = 5, 6
END = ("slot", "moment", "begins", "ended", "terminated")


@dataclass
class Agent:
    """Rows of an agent's open trajectory, and rewards of its episode so far."""

    rows: list = field(default_factory=list)
    waiting: dict | None = None
    rewards: list = field(default_factory=list)
    begins: bool = True


class Lists:
    """Sends random messages to `Trajectories`, and compares each result with lists by agent."""

    def __init__(self, seed: int, fields: dict) -> None:
        self.rng, self.columns = np.random.default_rng(seed), Columns(fields, OBS)
        self.every = EVERY if "memory" in fields else 1
        self.storage = self.empty()
        self.agents = [Agent() for _ in range(N)]
        self.closed: list[tuple[list, dict, list]] = []

    def empty(self) -> Trajectories:
        return Trajectories(self.columns, horizon=HORIZON, capacity=1)

    def drawn(self, n: int) -> list:
        shapes = [spec.shape for spec in OBS]
        return [self.rng.random((n, *shape)).astype(np.float32) for shape in shapes]

    def message(self, n_slots: int = N) -> None:
        rng, storage = self.rng, self.storage
        storage.reserve(n_slots)
        if rng.random() < 0.1:
            dropped = rng.permutation(n_slots)[:2]
            storage.drop_open(dropped)
            for slot in dropped:
                self.agents[slot] = Agent()
        if rng.random() < 0.05:
            storage.clear_closed()
            self.closed.clear()
        order, ends = rng.permutation(n_slots), rng.random(n_slots) < 0.3
        for over in (True, False):
            self.complete(order[ends[order] == over], over=over)
        slots = rng.permutation(n_slots)[: rng.integers(1, n_slots + 1)]
        obs, n = self.drawn(len(slots)), len(slots)
        fields = {"choice": rng.integers(1000, size=(n, 1)), "memory": rng.random((n, 3))}
        storage.begin_transition(slots, obs, fields | {"is no field": obs[0]})
        fields["memory"] = fields["memory"].astype(np.float32)
        for row, slot in enumerate(slots.tolist()):
            values = {name: column[row].tolist() for name, column in fields.items()}
            self.agents[slot].waiting = values | {"obs": [seen[row].tolist() for seen in obs]}
        self.check_counts()

    def complete(self, slots, *, over: bool) -> None:
        rng, n = self.rng, len(slots)
        reward, obs = rng.random(n).astype(np.float32), self.drawn(n)
        cut, moment = rng.random(n) < 0.5, rng.integers(1000, size=n)
        n_before = len(self.closed)
        returns = []
        for row, slot in enumerate(slots.tolist()):
            seen = [values[row].tolist() for values in obs]
            end = {"slot": slot, "moment": int(moment[row]), "ended": over}
            end["terminated"] = over and not cut[row]
            returns += self.note(slot, float(reward[row]), seen, end)
        closed = self.storage.complete_transition(
            slots,
            reward,
            obs,
            ended=over,
            interrupted=cut if over else None,
            at_end={"moment": moment},
        )
        rows = [row for rows, *_ in self.closed[n_before:] for row in rows]
        assert (closed is None) == (not rows)
        if rows:
            assert closed.n_rows == len(rows)
            assert [seen.tolist() for seen in closed.obs] == [
                [row["obs"][i] for row in rows] for i in range(len(OBS))
            ]
            assert closed.episode_returns == pytest.approx([sum(gained) for gained in returns])
            assert closed.episode_lengths == [len(gained) for gained in returns]
            assert {type(length) for length in closed.episode_lengths} <= {int}

    def note(self, slot: int, reward: float, seen: list, end: dict) -> list:
        """Complete an agent's row; return its rewards if its episode ends."""
        agent = self.agents[slot]
        if agent.waiting is None:
            return []
        agent.rows.append(agent.waiting | {"reward": reward})
        agent.rewards.append(reward)
        agent.waiting = None
        if not end["ended"] and len(agent.rows) < HORIZON:
            return []
        self.closed.append((agent.rows, end | {"begins": agent.begins}, seen))
        self.agents[slot] = Agent() if end["ended"] else Agent(rewards=agent.rewards, begins=False)
        return [agent.rewards] if end["ended"] else []

    def counted(self, n_rows: int) -> int:
        """Return the number of rows, rounded up to whole sequences."""
        return -(-n_rows // self.every) * self.every

    def check_counts(self) -> None:
        storage, open_rows = self.storage, [len(agent.rows) for agent in self.agents]
        assert storage.n_closed == sum(self.counted(len(rows)) for rows, *_ in self.closed)
        assert storage.n_held == storage.n_closed + sum(map(self.counted, open_rows))
        waiting = [agent.waiting is not None for agent in self.agents]
        slots = np.arange(min(storage.n_slots, N))
        assert storage.are_waiting(slots).tolist() == waiting[: len(slots)]
        held = [row for a in self.agents for row in (*a.rows, *([a.waiting] if a.waiting else []))]
        assert storage.open_values("choice").tolist() == [row["choice"] for row in held]

    def check_rollout(self) -> None:
        rollout = self.storage.rollout()
        assert rollout.n_rows == sum(len(rows) for rows, *_ in self.closed)
        assert len(rollout.lengths) == len(self.closed)
        assert set(rollout.fields) == {"choice", "reward"}
        ends = {**rollout.at_end, "slot": rollout.slots}
        ends |= {name: getattr(rollout, name) for name in END[2:]}
        for k, (rows, end, seen) in enumerate(self.closed):
            place = slice(rollout.starts[k], rollout.starts[k] + rollout.lengths[k])
            for name, values in rollout.fields.items():
                assert values[place].tolist() == [row[name] for row in rows]
            for i in range(len(OBS)):
                assert rollout.obs[i][place].tolist() == [row["obs"][i] for row in rows]
                assert rollout.next_obs[i][k].tolist() == seen[i]
            assert {name: ends[name][k] for name in END} == end
            if self.every > 1:
                remembered = rollout.memory[k, : -(-len(rows) // EVERY)].tolist()
                assert remembered == [row["memory"] for row in rows[::EVERY]]

    def take_up(self, *, dirty: bool) -> None:
        """Continue with another storage, empty or used before, that has loaded this one's state."""
        closed, opened = self.storage.closed_state(), self.storage.open_state(N)
        for n_slots in (N, 2):
            state = self.storage.open_state(n_slots)
            for part in ("rows", "slots"):
                for name, values in state[part].items():
                    np.testing.assert_array_equal(values, opened[part][name][:n_slots])
        other = Lists(7, self.columns.fields)
        for _ in range(9):
            other.message()
        other.storage.reserve(2 * N)
        # Later changes must not change the saved states, which are copies.
        self.storage.drop_open()
        self.storage.clear_closed()
        self.storage.load_open_state(other.storage.open_state(N))
        self.storage = other.storage if dirty else self.empty()
        self.storage.load_closed_state(closed)
        self.storage.load_open_state(opened)
        self.check_counts()
        for name, values in self.storage.open_state(N)["rows"].items():
            np.testing.assert_array_equal(values, opened["rows"][name])


fields = pytest.mark.parametrize("fields", [PLAIN, RECURRENT], ids=["plain", "recurrent"])


@fields
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_trajectories_equal_the_trajectories_of_a_slow_storage_with_lists(fields, seed):
    lists = Lists(seed, fields)
    for n_slots in (1, 2, 3, 3, *[N] * 40):  # slots are added while trajectories are open
        lists.message(n_slots)
    lists.check_rollout()
    lists.storage.drop_open()
    assert lists.storage.n_held == lists.storage.n_closed
    assert len(lists.storage.open_values("choice")) == 0


@fields
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), dirty=st.booleans())
def test_restored_trajectories_continue_as_the_original(fields, seed, dirty):
    lists = Lists(seed, fields)
    for _ in range(3):
        for _ in range(12):
            lists.message()
        lists.take_up(dirty=dirty)
    for _ in range(12):
        lists.message()
    lists.check_rollout()


def test_transition_that_lacks_a_field_is_refused():
    storage = Trajectories(Columns(PLAIN, OBS[:1]), horizon=HORIZON, capacity=8)
    storage.reserve(1)
    with pytest.raises(KeyError, match="choice"):
        storage.begin_transition(np.array([0]), [np.ones((1, 2))], {"memory": np.zeros((1, 3))})


def test_state_of_an_open_trajectory_has_zeros_after_its_rows():
    storage, slots = Trajectories(Columns({}, OBS[:1]), horizon=HORIZON, capacity=8), np.array([0])
    storage.reserve(1)
    for time in range(1, HORIZON + 2):
        obs = np.full((1, 2), time, dtype=np.float32)
        storage.begin_transition(slots, [obs], {})
        storage.complete_transition(slots, np.ones(1, np.float32), [obs], ended=False)
    (rows,) = storage.open_state(1)["rows"]["obs_0"]
    assert rows[:, 0].tolist() == [HORIZON + 1, *[0] * (len(rows) - 1)]
