"""Groups compared with a slow computation, one agent at a time: members, rewards, moments."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.columns import Columns, Field
from pipeline.data.groups import GroupMessage, Groups

MEMBER = Columns(
    {
        "discrete": Field(shape=(1,), dtype=np.int64),
        "over": Field(shape=(), dtype=np.bool_),
        "memory": Field(shape=(1,)),
    },
    [Field(shape=(1,))],
)
# Source and group id of each slot: both sources have a group 1, and two agents have no group.
PLACES = [("a", 0), ("b", 0), ("a", 1), ("a", 1), ("a", 1), ("a", 2), ("b", 1), ("b", 1), ("a", 2)]
N = len(PLACES)


@dataclass(frozen=True)
class Member:
    """The last observation and action of a group member, or the last observation of its episode.

    `over` is set if the episode ended and was not cut short.
    """

    saw: float
    did: int = 0
    over: bool = False
    memory: float = 0.0


@dataclass
class Agent:
    """An agent that has decided, and its rewards since it began its episode or joined its group."""

    group: tuple
    last: Member
    owed: float = 0.0
    own: float = 0.0
    shared: float = 0.0


class Account:
    """Sends random messages to `Groups`, and compares each result with a slow computation."""

    def __init__(self, seed: int) -> None:
        self.rng, self.groups = np.random.default_rng(seed), Groups(MEMBER)
        self.agents: dict[int, Agent] = {}
        self.moments: dict[int, set[Member]] = {}
        """Members of each moment that is not forgotten."""

    def members(self, group) -> dict[int, Member]:
        return {slot: agent.last for slot, agent in self.agents.items() if agent.group == group}

    def numbers(self, slots, share):
        """Return random observations and rewards for some of the slots, in random order."""
        rng = self.rng
        chosen = rng.permutation(slots)[: rng.binomial(len(slots), share)]
        return {int(s): rng.normal(size=3).astype(np.float32).astype(float) for s in chosen}

    def place(self, slot: int) -> tuple:
        """Return the source and group id of a slot; a few agents change their group."""
        source, number = PLACES[slot]
        if number and self.rng.random() < 0.05:
            number = 3 - number
        return source, number

    def sent(self, numbers, places, **changes) -> GroupMessage:
        slots = np.array([*numbers], np.intp)
        table = np.array([*numbers.values()], np.float32).reshape(len(slots), 3)
        keys = [
            self.groups.key(places[slot][0], np.array([places[slot][1]]), np.array([slot]))[0]
            for slot in numbers
        ]
        return GroupMessage(
            slots=slots,
            group=np.array(keys, np.int64),
            reward=table[:, 1],
            group_reward=table[:, 2],
            obs=[table[:, :1]],
            **changes,
        )

    def message(self) -> None:
        rng, groups = self.rng, self.groups
        if rng.random() < 0.1:
            for slot in [*self.agents][:1]:  # the agent vanishes
                groups.drop(np.array([slot]))
                del self.agents[slot]
        # Some agents end without a decision; some decide in the message in which they end.
        ended, deciding = self.numbers(range(N), 0.15), self.numbers(range(N), 0.7)
        places = {slot: self.place(slot) for slot in {*ended, *deciding}}
        cut = rng.random(len(ended)) < 0.5
        memory = rng.random((len(ended), 1)).astype(np.float32)
        gone = self.sent(ended, places, interrupted=cut, memory=memory)
        groups.on_message(gone, self.sent(deciding, places), N + 1)
        slots, choices = np.array([*deciding], np.intp), rng.integers(1, 99, (len(deciding), 1))
        rows = groups.decided(slots, {"discrete": choices})
        acts = dict(zip(deciding, choices[:, 0].tolist(), strict=True))
        ends = {}
        for slot, is_cut, (remembered,) in zip(ended, cut, memory, strict=True):
            ends[slot] = Member(ended[slot][0], over=not is_cut, memory=float(remembered))
        self.credit(ended, deciding, places)
        after = self.end(ends, deciding, places, acts)
        self.begin(deciding, places, acts)
        self.check(after, deciding, rows)

    def goes_on(self, slot, ended, places) -> bool:
        agent = self.agents.get(slot)
        return agent is not None and slot not in ended and agent.group == self.key(slot, places)

    def key(self, slot, places) -> tuple:
        return places[slot] if places[slot][1] else ("alone", slot)

    def credit(self, ended, deciding, places) -> None:
        """Add rewards to the groups in which they were earned, before agents change groups."""
        earned = {slot: values for slot, values in ended.items() if slot in self.agents}
        earned |= {s: values for s, values in deciding.items() if self.goes_on(s, ended, places)}
        for slot, (_, own, _) in earned.items():
            for agent in self.agents.values():
                agent.owed += own * (agent.group == self.agents[slot].group)
        for slot, (_, own, shared) in earned.items():
            agent, name = self.agents[slot], f"step_reward{'_at_end' if slot in ended else ''}"
            assert self.groups.by_slot[name][slot] == pytest.approx(agent.owed + shared, abs=1e-5)
            agent.owed = 0.0
            agent.own, agent.shared = agent.own + own, agent.shared + shared

    def end(self, ends, deciding, places, acts) -> dict[int, set[Member]]:
        """Remove the ended agents; return the members that each agent's group had at that time."""
        for slot, (saw, *_) in deciding.items():
            if self.goes_on(slot, ends, places):
                self.agents[slot].last = Member(saw, acts[slot])
        gone = {slot: self.agents[slot] for slot in ends if slot in self.agents}
        for slot, agent in gone.items():
            agent.last = ends[slot]
        after = {slot: {*self.members(agent.group).values()} for slot, agent in gone.items()}
        for slot in gone:
            del self.agents[slot]
        finished = {}
        for slot, agent in gone.items():
            assert self.groups.by_slot["own_at_end"][slot] == pytest.approx(agent.own, abs=1e-5)
            shared = self.groups.by_slot["group_at_end"][slot]
            assert shared == pytest.approx(agent.shared, abs=1e-5)
            if agent.group[0] != "alone" and not self.members(agent.group):
                finished.setdefault(agent.group, []).append(agent.shared)
        means = sorted(map(np.mean, finished.values()))
        assert sorted(self.groups.finished) == pytest.approx(means, abs=1e-5)
        self.groups.finished.clear()
        acted = self.groups.by_slot["acted"]
        assert {slot: acted[slot] for slot in ends} == {slot: slot in gone for slot in ends}
        return after

    def begin(self, deciding, places, acts) -> None:
        for slot, (saw, *_) in deciding.items():
            key, agent = self.key(slot, places), self.agents.get(slot)
            if agent is None or agent.group != key:
                agent = self.agents[slot] = Agent(key, Member(0.0))
            agent.last = Member(saw, acts[slot])

    def check(self, after, deciding, rows) -> None:
        by_slot = self.groups.by_slot
        self.moments |= {int(by_slot["end_moment"][s]): members for s, members in after.items()}
        decided = zip(deciding, rows["moment"].tolist(), strict=True)
        latest = {moment: self.agents[slot].group for slot, moment in decided}
        self.moments |= {moment: {*self.members(g).values()} for moment, g in latest.items()}
        assert len(latest) == len(set(latest.values())), "members of a group share a moment"
        assert len(set(rows["entity"].tolist())) == len(deciding)
        for name, values in (("own_return", "own"), ("group_return", "shared")):
            expected = [getattr(agent, values) for agent in self.agents.values()]
            assert by_slot[name][[*self.agents]] == pytest.approx(expected, abs=1e-5)
        for moment, members in self.moments.items():
            assert seen(self.groups, moment) == members


def seen(groups: Groups, *moments: int) -> set[Member]:
    members = groups.moments.members(np.array(moments))
    at = members.index[members.present]
    fields = members.entities.fields
    columns = (members.entities.obs[0], fields["discrete"], fields["over"], fields["memory"])
    assert {*fields} == {*MEMBER.fields, "id"}
    return {Member(*row) for row in zip(*(column[at].ravel().tolist() for column in columns))}  # noqa: B905


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_members_rewards_and_returns_of_groups_equal_a_slow_computation(seed):
    """Agents come, end, pause, vanish and change groups; the state is saved and loaded."""
    account = Account(seed)
    for number in range(60):
        account.message()
        if number % 10 == 4:
            kept = [*account.moments][::3]
            account.groups.forget(np.array(kept, np.int64))
            account.moments = {moment: account.moments[moment] for moment in kept}
        if number % 10 == 9:
            state, account.groups = account.groups.state_dict(n_slots=N), Groups(MEMBER)
            assert {len(values) for values in state["by_slot"].values()} == {N}
            # Checkpoints keep the names of an earlier version.
            assert {"owed", "gained", "gained_at_end"} < state["by_slot"].keys()
            account.groups.load_state_dict(state, with_open=True)


def test_each_group_of_each_worker_and_each_agent_without_a_group_has_its_own_key():
    groups = Groups(MEMBER)
    ids = np.array([2**31 - 1, 2**31 - 2, 1, 1, 0, 0])
    slots = np.array([0, 1, 2, 3, 4, 7])
    keys = [groups.key(name, ids, slots) for name in ("a", "b", "c", "a")]
    assert {key.dtype for key in keys} == {np.dtype(np.int64)}
    named = np.concatenate([key[:4] for key in keys[:3]])
    assert len(set(named.tolist())) == 9
    assert (named >= 0).all()
    assert keys[3].tolist() == keys[0].tolist()
    for key in keys:  # keys of agents without a group depend on the slot only
        assert key[4:].tolist() == keys[0][4:].tolist()
        assert len(set(key[4:].tolist())) == 2
        assert (key[4:] < 0).all()


def test_group_observations_are_deleted_if_no_row_of_experience_refers_to_the_observations():
    account = Account(0)
    account.agents = {}
    groups, moments = account.groups, []
    places = {0: ("a", 1), 1: ("a", 1)}
    nobody = replace(account.sent({}, {}), interrupted=np.zeros(0, np.bool_))
    for time in range(20):
        groups.on_message(nobody, account.sent({0: (time, 0, 0), 1: (9 + time, 0, 0)}, places), 2)
        moments.append(groups.by_slot["moment"][0])
    groups.forget(np.array([moments[3], moments[17]]))
    assert len(groups.moments.state_dict()["entities"]["id"]) == 6
    assert {member.saw for member in seen(groups, moments[3], moments[19])} == {3, 12, 19, 28}
