"""Slots compared with a dictionary of agents, and slots of agents that vanish."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.data.slots import MIN_SLOTS_TO_SWEEP, STALE_AFTER_MESSAGES, Slots
from pipeline.errors import UnityEnvironmentException


class ByDictionary:
    """Slots that look up one agent at a time in a dictionary."""

    def __init__(self):
        self.slots, self.free, self.n_slots = {}, [], 0

    def look_up(self, source, ids):
        for agent in ids:
            if (source, agent) not in self.slots:
                if self.free:
                    self.slots[source, agent] = self.free.pop()
                else:
                    self.slots[source, agent] = self.n_slots
                    self.n_slots += 1
        return [self.slots[source, agent] for agent in ids]

    def release(self, source, ids):
        released = sorted(agent for agent in set(ids) if (source, agent) in self.slots)
        self.free += [self.slots.pop((source, agent)) for agent in released]


def ids(*agents):
    return np.array(agents, dtype=np.int32)


AGENTS = st.lists(st.integers(-3, 12), unique=True, max_size=8)
MOVES = st.lists(st.tuples(st.sampled_from("deg"), st.sampled_from("ab"), AGENTS), max_size=30)


@given(moves=MOVES)
@example(moves=[("d", "a", [0, 1]), ("g", "a", [0, 1]), ("d", "a", [2, 3])])
def test_slots_equal_the_slots_of_a_slow_look_up_in_a_dictionary(moves):
    fast, slow = Slots(), ByDictionary()
    for move, source, agents in moves:
        if move == "g":
            fast.release(source, agents)
            slow.release(source, agents)
            continue
        look_up = fast.deciding if move == "d" else fast.ended
        assert look_up(source, ids(*agents)).tolist() == slow.look_up(source, agents)
        assert fast.n_slots == slow.n_slots
        assert fast.n_taken == len(slow.slots)


def test_agent_that_asks_for_two_decisions_in_one_message_is_refused():
    assert Slots().ended("w", ids(7, 3, 7)).tolist() == [0, 1, 0]
    slots = Slots()
    with pytest.raises(UnityEnvironmentException, match=r"^agent 7 of \('A\?team=0', 2\) asks for"):
        slots.deciding(("A?team=0", 2), ids(7, 3, 7))


def vanishing(slots, n_messages, *, n_new=4, first=0):
    """Two agents stay; each message has `n_new` new agents, which are in no later message."""
    freed, most = [], 0
    for message in range(first, first + n_messages):
        freed += slots.sweep().tolist()
        new = np.arange(n_new) + 100 + message * n_new
        slots.deciding("w", np.concatenate((ids(1, 2), new)))
        most = max(most, slots.n_taken)
    return freed, most


def test_number_of_slots_is_bounded_if_agents_vanish():
    slots = Slots()
    freed, most = vanishing(slots, 10_000)
    assert most <= 2 * 4 * (STALE_AFTER_MESSAGES + 10)
    assert slots.n_slots == most
    assert len(freed) > 30_000


def test_method_sweep_returns_an_index_array_even_if_no_slot_is_freed():
    slots = Slots()
    slots.deciding("w", ids(1))
    array = np.arange(3)
    assert array[slots.sweep()].tolist() == []


def test_agents_with_messages_keep_their_slots_and_silent_agents_get_new_slots():
    slots = Slots()
    before = slots.deciding("w", ids(1, 2)).tolist()
    (silent,) = slots.deciding("other", ids(1)).tolist()
    freed, _ = vanishing(slots, 4 * STALE_AFTER_MESSAGES)
    assert slots.deciding("w", ids(1, 2)).tolist() == before
    assert silent in freed
    assert not set(before) & set(freed)
    (renewed,) = slots.deciding("other", ids(1)).tolist()
    assert renewed not in slots.deciding("w", np.arange(100, 200, dtype=np.int32))


def test_silent_agents_keep_their_slots_if_no_messages_come():
    slots = Slots()
    before = slots.deciding("w", np.arange(3 * MIN_SLOTS_TO_SWEEP, dtype=np.int32)).tolist()
    slots.sweep()
    for _ in range(3 * STALE_AFTER_MESSAGES):
        assert len(slots.sweep()) == 0
    assert slots.deciding("w", np.arange(3 * MIN_SLOTS_TO_SWEEP, dtype=np.int32)).tolist() == before


def test_restored_slots_continue_as_the_original():
    slots, resumed = Slots(), Slots()
    vanishing(slots, 1500)
    slots.release("w", [2])
    resumed.load_state_dict(slots.state_dict())
    assert vanishing(slots, 3000, first=1500) == vanishing(resumed, 3000, first=1500)
    for left, right in zip(slots.state_dict()["taken"], resumed.state_dict()["taken"], strict=True):
        assert left["source"] == right["source"]
        np.testing.assert_array_equal(left["ids"], right["ids"])
        np.testing.assert_array_equal(left["slots"], right["slots"])


GIVEN_BACK = {
    "released": lambda slots: slots.release("a", [7]),
    "of a worker that is gone": lambda slots: slots.forget(lambda source: source == "a"),
    "silent for long": lambda slots: vanishing(slots, 4 * STALE_AFTER_MESSAGES),
    "unknown to a state taken up": lambda slots: slots.load_state_dict(Slots().state_dict()),
}


@pytest.mark.parametrize("way", GIVEN_BACK)
def test_two_live_agents_never_share_a_slot_after_a_slot_was_freed(way):
    slots = Slots()
    slots.deciding("a", ids(7, 8))
    GIVEN_BACK[way](slots)
    slots.deciding("b", np.arange(slots.n_slots + 1, dtype=np.int32))
    slots_of_a = slots.deciding("a", ids(7, 8)).tolist()
    by_source = {entry["source"]: entry["slots"].tolist() for entry in slots.state_dict()["taken"]}
    assert sorted(by_source["a"]) == sorted(slots_of_a)
    assert len({slot for of_source in by_source.values() for slot in of_source}) == slots.n_taken
    assert slots.deciding("a", ids(7, 8)).tolist() == slots_of_a


@pytest.mark.parametrize(
    ("silent", "n_gone"), [(STALE_AFTER_MESSAGES - 1, 0), (STALE_AFTER_MESSAGES, 8)]
)
def test_agent_is_stale_after_1000_messages_of_its_worker_and_team(silent, n_gone):
    slots = Slots()
    sources = [(team, worker) for team in "AB" for worker in range(4)]
    agents = np.arange(MIN_SLOTS_TO_SWEEP, dtype=np.int32)
    for source in sources:
        slots.deciding(source, agents)
    for _ in range(silent):
        for source in sources:
            slots.deciding(source, agents[1:])
    assert len(slots.sweep()) == n_gone


def test_agent_with_a_just_ended_episode_does_not_count_as_silent_and_keeps_its_slot():
    slots, agents = Slots(), np.arange(MIN_SLOTS_TO_SWEEP, dtype=np.int32)
    quiet = slots.deciding("quiet", agents)
    for _ in range(STALE_AFTER_MESSAGES):
        slots.deciding("others", agents)
    slots.ended("quiet", ids(5, 3))
    slots.deciding("others", agents)
    assert sorted(slots.sweep()) == sorted(set(quiet) - {quiet[3], quiet[5]})


@pytest.mark.parametrize("joining", ["worker", "a new one"])
def test_message_count_of_a_new_or_returning_worker_begins_at_the_current_clock_value(joining):
    """If the count began at 0, the worker's messages would not advance the clock for a while."""
    slots, agents = Slots(), np.arange(MIN_SLOTS_TO_SWEEP, dtype=np.int32)
    slots.deciding("worker", agents)
    for _ in range(STALE_AFTER_MESSAGES // 2):
        others = slots.deciding("others", agents)
    slots.forget(lambda source: source == "worker")
    for _ in range(STALE_AFTER_MESSAGES + 1):
        slots.deciding(joining, agents)
    assert sorted(slots.sweep()) == sorted(others)


def test_silent_agents_keep_their_slots_until_the_number_of_agents_doubles():
    slots, agents = Slots(), np.arange(MIN_SLOTS_TO_SWEEP, dtype=np.int32)
    quiet = slots.deciding("quiet", agents)
    slots.deciding("others", agents)
    slots.sweep()
    for _ in range(STALE_AFTER_MESSAGES):
        slots.deciding("others", agents)
    slots.deciding("more", np.arange(2 * MIN_SLOTS_TO_SWEEP - 1, dtype=np.int32))
    assert len(slots.sweep()) == 0
    slots.deciding("more", ids(-1))
    assert sorted(slots.sweep()) == sorted(quiet)


def test_state_of_slots_restores_message_counts_and_free_slots_and_does_not_change_later():
    slots, resumed = Slots(), Slots()
    slots.deciding("a", ids(0, 1, 2, 3))
    for _ in range(4):
        slots.deciding("b", ids(0))
    slots.release("a", [3])
    slots.release("a", [1])
    state = slots.state_dict()
    resumed.load_state_dict(state)
    for each in (slots, resumed):
        each.deciding("a", ids(0, 2))
        assert each.state_dict()["clock"] == 3, "b has sent 4 messages, counted from 0"
        assert each.deciding("a", ids(8, 9)).tolist() == [1, 3], "the last freed slot first"
    assert state["heard"].tolist() == [0, 0, 0, 0, 3]
    assert state["n_slots"] == 5
