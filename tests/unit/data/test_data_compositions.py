"""Whose numbers go where: storage of many agents, in any order of slots, against lists of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pipeline.data.columns import Columns, Field
from pipeline.data.groups import GroupMessage, Groups
from pipeline.data.rollout import Trajectories

OBS = ("first", "second")
COLUMNS = Columns(
    {
        "memory": Field(shape=(3,), every=2),
        "moment": Field(shape=(), dtype=np.int64, at_end=True),
    },
    [Field(shape=(2,)), Field(shape=(1, 2))],
)
HORIZON, N = 5, 6


@dataclass
class Agent:
    """What one slot's agent did since its trajectory began, and since its episode did."""

    rows: list = field(default_factory=list)
    waiting: dict | None = None
    episode: list = field(default_factory=list)
    begins: bool = True


def drawn(rng, n):
    return {
        "first": rng.random((n, 2)).astype(np.float32),
        "second": rng.random((n, 1, 2)).astype(np.float32),
        "memory": rng.random((n, 3)).astype(np.float32),
    }


def at(values: dict, row: int) -> dict:
    return {name: array[row].tolist() for name, array in values.items()}


class Lists:
    """Random messages to a storage, and a list for each agent."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.storage = Trajectories(COLUMNS, horizon=HORIZON, capacity=4)
        self.storage.reserve(N)
        self.agents = [Agent() for _ in range(N)]
        self.closed: list[tuple] = []
        self.returns, self.lengths, self.counted = [], [], ([], [])

    def message(self) -> None:
        rng = self.rng
        if rng.random() < 0.1:
            dropped = rng.permutation(N)[:2]
            self.storage.drop_open(dropped)
            for slot in dropped:
                self.agents[slot] = Agent()
        order, ends = rng.permutation(N), rng.random(N) < 0.3
        for over in (True, False):
            self.complete(order[ends[order] == over], over=over)
        deciding = rng.permutation(N)[: rng.integers(1, N + 1)]
        rows = drawn(rng, len(deciding))
        self.storage.begin_transition(deciding, [rows[name] for name in OBS], rows)
        for row, slot in enumerate(deciding.tolist()):
            self.agents[slot].waiting = at(rows, row)

    def complete(self, slots, *, over: bool) -> None:
        rng, n = self.rng, len(slots)
        reward, seen = rng.random(n).astype(np.float32), drawn(rng, n)
        cut, moment = rng.random(n) < 0.5, rng.integers(1000, size=n)
        closed = self.storage.complete_transition(
            slots,
            reward,
            [seen[name] for name in OBS],
            ended=over,
            interrupted=cut if over else None,
            at_end={"moment": moment},
        )
        if closed is not None:
            self.counted[0].extend(closed.episode_returns)
            self.counted[1].extend(closed.episode_lengths)
        for row, slot in enumerate(slots.tolist()):
            end = {"slot": slot, "ended": over, "moment": int(moment[row])}
            end["terminated"] = over and not cut[row]
            self.note(slot, float(reward[row]), at(seen, row), end)

    def note(self, slot: int, reward: float, seen: dict, end: dict) -> None:
        agent = self.agents[slot]
        if agent.waiting is None:
            return
        agent.rows.append(agent.waiting | {"reward": reward})
        agent.episode.append(reward)
        agent.waiting = None
        if not end["ended"] and len(agent.rows) < HORIZON:
            return
        self.closed.append((agent.rows, end | {"begins": agent.begins}, seen))
        self.agents[slot] = Agent(begins=False, episode=agent.episode)
        if end["ended"]:
            self.returns.append(sum(agent.episode))
            self.lengths.append(len(agent.episode))
            self.agents[slot] = Agent()


def test_trajectories_have_the_rows_ends_and_memories_of_their_own_agents():
    lists = Lists()
    for _ in range(60):
        lists.message()
    rollout = lists.storage.rollout()
    assert len(rollout.lengths) == len(lists.closed) > 40
    for k, (rows, end, seen) in enumerate(lists.closed):
        first = rollout.starts[k]
        stored = zip((*OBS, "reward"), (*rollout.obs, rollout.fields["reward"]), strict=True)
        for name, values in stored:
            there = values[first : first + rollout.lengths[k]].tolist()
            assert there == [row[name] for row in rows]
        n_sequences = -(-len(rows) // 2)
        assert rollout.memory[k, :n_sequences].tolist() == [row["memory"] for row in rows[::2]]
        assert [o[k].tolist() for o in rollout.next_obs] == [seen[name] for name in OBS]
        columns = {"slot": rollout.slots, "moment": rollout.at_end["moment"]}
        columns |= {name: getattr(rollout, name) for name in ("begins", "ended", "terminated")}
        assert {name: values[k] for name, values in columns.items()} == end
    assert lists.counted[0] == pytest.approx(lists.returns)
    assert lists.counted[1] == lists.lengths
    held = [row for a in lists.agents for row in (*a.rows, *([a.waiting] if a.waiting else []))]
    assert len(lists.storage.open_values("reward")) == len(held)


MEMBER = Columns(
    {"memory": Field(shape=(1,)), "over": Field(shape=(), dtype=np.bool_)}, [Field(shape=(1,))]
)


def message(agents: dict, *, cut=None) -> GroupMessage:
    """Agents as {slot: (group, own reward, group reward)}, which see and remember their slot."""
    slots = np.array(list(agents), np.intp)
    table = np.array(list(agents.values()), np.float32).reshape(len(agents), 3)
    return GroupMessage(
        slots=slots,
        group=table[:, 0].astype(np.int64),
        reward=table[:, 1],
        group_reward=table[:, 2],
        obs=[slots[:, None].astype(np.float32)],
        interrupted=None if cut is None else np.array([slot in cut for slot in agents]),
        memory=None if cut is None else 100 + slots[:, None].astype(np.float32),
    )


def members_of(groups: Groups, moment: int) -> dict[int, tuple[bool, float]]:
    members = groups.moments.members(np.array([moment]))
    rows = members.index[0][members.present[0]]
    fields = members.entities.fields
    columns = [values[rows] for values in (*members.entities.obs, fields["over"], fields["memory"])]
    return {int(o[0]): (bool(over), float(m[0])) for o, over, m in zip(*columns, strict=True)}


def test_groups_that_end_in_one_message_end_with_their_own_rewards_members_and_memories():
    groups, nobody = Groups(MEMBER), message({}, cut=())
    groups.on_message(nobody, message({s: (1 + s % 2, 0, 0) for s in range(5)}), 9)
    # 5 and 6 are asked in this message for the first time; 3 comes back at once, 4 goes on
    ended = {3: (2, 1, 20), 0: (1, 2, 30), 2: (1, 4, 40), 1: (2, 8, 60)}
    deciding = {4: (1, 16, 60), 3: (2, 0, 0), 5: (1, 0, 0), 6: (2, 0, 0)}
    unasked = {7: (1, 500, 600)}  # ends without a decision
    groups.on_message(message(ended | unasked, cut={0, 3}), message(deciding), 9)
    s = groups.by_slot
    sums = {1: 2 + 4 + 16, 2: 1 + 8}
    for slot, (group, own, shared) in ended.items():
        assert s["gained_at_end"][slot] == sums[group] + shared
        assert (s["own_at_end"][slot], s["group_at_end"][slot]) == (own, shared)
        followed = {1: {0: (False, 100.0), 2: (True, 102.0), 4: (False, 0.0)},
                    2: {3: (False, 103.0), 1: (True, 101.0)}}[group]  # fmt: skip
        assert members_of(groups, s["end_moment"][slot]) == followed
    assert s["gained"][4] == sums[1] + 60
    assert s["acted"][[0, 1, 2, 3, 7]].tolist() == [True] * 4 + [False]
    assert groups.finished == [(20 + 60) / 2], "the first group goes on"
    assert {slot: set(members_of(groups, s["moment"][slot])) for slot in deciding} == {
        4: {4, 5}, 5: {4, 5}, 3: {3, 6}, 6: {3, 6},
    }  # fmt: skip
    assert s["group_return"][[3, 4, 5]].tolist() == [0, 60, 0]


def test_an_agent_that_changes_its_group_brings_nothing_into_it_and_leaves_nothing_behind():
    groups, nobody = Groups(MEMBER), message({}, cut=())
    groups.on_message(nobody, message({0: (1, 0, 0), 1: (1, 0, 0), 2: (2, 0, 0)}), 9)
    groups.on_message(nobody, message({1: (1, 5, 7)}), 9)  # 0 is owed 5
    groups.on_message(nobody, message({0: (2, 3, 9), 2: (2, 1, 4)}), 9)
    s = groups.by_slot
    assert [s[name][0] for name in ("own_return", "group_return", "owed")] == [0, 0, 0]
    assert s["gained"][2] == 1 + 4
    assert set(members_of(groups, s["moment"][0])) == {0, 2}
    groups.on_message(nobody, message({0: (2, 6, 1), 1: (1, 2, 3), 2: (2, 0, 8)}), 9)
    assert s["gained"][:3].tolist() == [6 + 1, 2 + 3, 6 + 8]
    assert set(members_of(groups, s["moment"][1])) == {1}
    groups.on_message(nobody, message({1: (1, 0, 0)}), 9)
    kept = s["moment"][:3].copy()
    groups.forget(np.zeros(0, np.int64))
    assert [set(members_of(groups, moment)) for moment in kept] == [{0, 2}, {1}, {0, 2}]
    assert s["own_return"][:3].tolist() == [6, 7, 1]
    assert s["group_return"][:3].tolist() == [1, 10, 12]
