"""Groups fed by hand: who is in a group when, what each agent is credited with, what is kept."""

import numpy as np
import pytest

from pipeline.data.columns import Columns, Field
from pipeline.data.groups import GroupMessage, Groups

MEMBER = Columns(
    {"discrete": Field(shape=(1,), dtype=np.int64), "over": Field(shape=(), dtype=np.bool_)},
    [Field(shape=(1,))],
)


def heard(agents, *, ended=False, interrupted=False, groups=None):
    """Agents as {slot: (observation, reward, group reward)}; all of group 1 unless said."""
    slots = np.array(list(agents), dtype=np.intp)
    numbers = np.array([(groups or {}).get(slot, 1) for slot in agents], dtype=np.int64)
    table = np.array(list(agents.values()), dtype=np.float32).reshape(len(agents), 3)
    return GroupMessage(
        slots=slots,
        group=Groups.key(KEYS, "worker", numbers, slots),
        reward=table[:, 1],
        group_reward=table[:, 2],
        obs=[table[:, :1]],
        interrupted=np.full(len(agents), interrupted) if ended else None,
    )


KEYS = Groups(MEMBER)
NOBODY = {}


def on_message(groups, deciding, ended=None, *, interrupted=False, numbers=None):
    gone = heard(ended or NOBODY, ended=True, interrupted=interrupted, groups=numbers)
    current = heard(deciding, groups=numbers)
    groups.on_message(gone, current, 9)
    action = (current.obs[0] * 10).astype(np.int64)
    return groups.decided(current.slots, {"discrete": action})


def seen(groups, moment):
    """What the members of a moment saw, and whether their task had ended."""
    members = groups.moments.members(np.array([moment]))
    rows = members.index[0][members.present[0]]
    obs = members.entities.obs[0][rows, 0].tolist()
    return sorted(zip(obs, members.entities.fields["over"][rows].tolist(), strict=True))


def did(groups, moment):
    members = groups.moments.members(np.array([moment]))
    return sorted(
        members.entities.fields["discrete"][members.index[0][members.present[0]], 0].tolist()
    )


def test_mates_that_decide_together_share_one_moment_with_what_all_saw_and_did():
    groups = Groups(MEMBER)
    rows = on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0), 2: (3, 0, 0)})
    assert len(set(rows["moment"].tolist())) == 1
    assert len(set(rows["entity"].tolist())) == 3
    assert seen(groups, rows["moment"][0]) == [(1, False), (2, False), (3, False)]
    assert did(groups, rows["moment"][0]) == [10, 20, 30]
    members = groups.moments.members(rows["moment"][:1])
    assert set(members.entities.fields) == {*MEMBER.fields, "id"}
    assert sorted(members.ids) == sorted(rows["entity"])


def test_agents_of_other_groups_other_workers_and_without_a_group_are_no_mates():
    groups = Groups(MEMBER)
    numbers = {0: 1, 1: 2, 2: 0, 3: 0, 4: 1}
    rows = on_message(groups, {i: (i, 0, 0) for i in range(5)}, numbers=numbers)
    assert [seen(groups, m) for m in rows["moment"]] == [
        [(0, False), (4, False)],
        [(1, False)],
        [(2, False)],
        [(3, False)],
        [(0, False), (4, False)],
    ]


def test_every_group_of_every_source_has_a_number_of_its_own():
    groups = Groups(MEMBER)
    ids = np.array([2**31 - 1, 2**31 - 2, 1, 1, 0, 0])
    slots = np.array([0, 1, 2, 3, 4, 7])
    keys = [groups.key(name, ids, slots) for name in ("a", "b", "c", "a")]
    assert {key.dtype for key in keys} == {np.dtype(np.int64)}
    named = np.concatenate([key[:4] for key in keys[:3]])
    assert len(set(named.tolist())) == 9
    assert (named >= 0).all()
    assert keys[3].tolist() == keys[0].tolist()
    for key in keys:  # by slot, whichever source an agent without a group is of
        assert key[4:].tolist() == keys[0][4:].tolist()
        assert len(set(key[4:].tolist())) == 2
        assert (key[4:] < 0).all()


def test_an_agent_that_ends_early_is_followed_by_the_mates_that_go_on():
    groups = Groups(MEMBER)
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0), 2: (3, 0, 0)})
    rows = on_message(groups, {1: (5, 1, 4), 2: (6, 0, 4)}, {0: (9, -2, 4)})
    assert groups.by_slot["gained_at_end"][0] == pytest.approx(3)
    assert groups.by_slot["gained"][1] == pytest.approx(3)
    end = groups.by_slot["end_moment"][0]
    assert seen(groups, end) == [(5, False), (6, False), (9, True)]
    assert seen(groups, rows["moment"][0]) == [(5, False), (6, False)]
    on_message(groups, {1: (7, 1, 0), 2: (8, 0, 0)})
    assert groups.by_slot["gained"][1] == pytest.approx(1)
    assert groups.finished == []


def test_a_group_that_ends_as_a_whole_is_not_followed_by_its_next_episode():
    groups = Groups(MEMBER)
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0)})
    on_message(groups, {0: (1, 1, 3), 1: (2, 0, 3)})
    rows = on_message(groups, {0: (7, 0, 0), 1: (8, 0, 0)}, {0: (5, 1, 2), 1: (6, 0, 2)})
    assert seen(groups, groups.by_slot["end_moment"][0]) == [(5, True), (6, True)]
    assert seen(groups, rows["moment"][0]) == [(7, False), (8, False)]
    assert groups.finished == [5.0]
    assert groups.by_slot["own_at_end"][:2] == pytest.approx([2, 0])
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0)})
    assert groups.by_slot["gained"][:2] == pytest.approx([0, 0])
    assert groups.by_slot["group_return"][:2] == pytest.approx([0, 0])


def test_members_cut_short_are_not_over():
    groups = Groups(MEMBER)
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0)})
    on_message(groups, {}, {0: (5, 0, 0), 1: (6, 0, 0)}, interrupted=True)
    assert seen(groups, groups.by_slot["end_moment"][1]) == [(5, False), (6, False)]


def test_a_mate_that_was_not_asked_takes_part_with_its_latest_decision():
    groups = Groups(MEMBER)
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0)})
    first = on_message(groups, {0: (3, 1, 0)})
    assert seen(groups, first["moment"][0]) == [(2, False), (3, False)]
    assert did(groups, first["moment"][0]) == [20, 30]
    on_message(groups, {0: (4, 1, 0)})
    on_message(groups, {1: (5, 4, 0)})
    assert groups.by_slot["gained"][1] == pytest.approx(6)
    on_message(groups, {0: (6, 0, 0)})
    assert groups.by_slot["gained"][0] == pytest.approx(4)


def test_who_vanished_is_no_mate_any_more():
    groups = Groups(MEMBER)
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0)})
    groups.drop(np.array([0]))
    rows = on_message(groups, {1: (3, 0, 0)})
    assert seen(groups, rows["moment"][0]) == [(3, False)]


def test_who_vanished_and_comes_back_is_owed_nothing_of_the_time_before():
    groups = Groups(MEMBER)
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0)})
    # Nothing is heard of slot 0, which would get 5 with its next message.
    on_message(groups, {1: (2, 5, 0)})
    groups.drop(np.array([0]))
    on_message(groups, {0: (1, 0, 0), 1: (2, 0, 0)})
    on_message(groups, {0: (1, 0, 0), 1: (2, 3, 0)})
    assert groups.by_slot["gained"][:2].tolist() == [3, 3]


def test_what_no_row_needs_is_forgotten_and_the_rest_stays_as_it_was():
    groups = Groups(MEMBER)
    moments = [
        int(on_message(groups, {0: (t, 0, 0), 1: (10 + t, 0, 0)})["moment"][0]) for t in range(20)
    ]
    groups.forget(np.array([moments[3], moments[17]]))
    assert len(groups.moments.state_dict()["entities"]["id"]) == 6
    for t in (3, 17, 19):
        assert seen(groups, moments[t]) == [(t, False), (10 + t, False)]
        assert did(groups, moments[t]) == [10 * t, 100 + 10 * t]
    rows = on_message(groups, {0: (50, 0, 0), 1: (60, 0, 0)})
    assert seen(groups, rows["moment"][0]) == [(50, False), (60, False)]
    assert seen(groups, moments[3]) == [(3, False), (13, False)]


def test_a_copy_from_its_state_goes_on_alike():
    groups, other = Groups(MEMBER), Groups(MEMBER)
    moments = [on_message(groups, {0: (t, 1, 0), 1: (10 + t, 0, 1)})["moment"][0] for t in range(5)]
    state = groups.state_dict(n_slots=2)
    assert {len(values) for values in state["by_slot"].values()} == {2}
    other.load_state_dict(state, with_open=True)
    for t, moment in enumerate(moments):
        assert seen(other, moment) == [(t, False), (10 + t, False)]
    rows = [on_message(g, {1: (8, 2, 0)}, {0: (7, 1, 1)}) for g in (groups, other)]
    assert rows[0]["moment"] == rows[1]["moment"]
    assert seen(groups, rows[0]["moment"][0]) == seen(other, rows[1]["moment"][0])
    for name in ("gained", "gained_at_end", "own_at_end", "end_moment"):
        assert np.array_equal(groups.by_slot[name][:2], other.by_slot[name][:2])


def test_credit_and_mates_are_those_of_a_slow_obvious_account():
    """200 messages of groups whose members come, go, end and pause at random."""
    rng = np.random.default_rng(3)
    groups = Groups(MEMBER)
    alive = {}  # slot: what it saw last
    credit = {}
    group_of = {slot: 1 + slot // 3 for slot in range(9)}
    for _ in range(200):
        ended = {s: (rng.random(), rng.normal(), 1) for s in alive if rng.random() < 0.1}
        deciding = {s: (rng.random(), rng.normal(), 1) for s in range(9) if rng.random() < 0.8}
        acting = {s: ended[s] for s in ended} | {
            s: deciding[s] for s in deciding if s in alive and s not in ended
        }
        for slot in alive:
            credit[slot] += sum(
                r for s, (_, r, _) in acting.items() if group_of[s] == group_of[slot]
            )
        rows = on_message(groups, deciding, ended, numbers=group_of)
        for slot in acting:
            name = "gained_at_end" if slot in ended else "gained"
            assert groups.by_slot[name][slot] == pytest.approx(credit.pop(slot) + 1, abs=1e-5)
            credit[slot] = 0.0
        stay = {s: deciding[s][0] if s in deciding else alive[s] for s in alive if s not in ended}
        for slot in ended:
            mates = [stay[s] for s in stay if group_of[s] == group_of[slot]]
            gone = [ended[s][0] for s in ended if group_of[s] == group_of[slot]]
            members = seen(groups, groups.by_slot["end_moment"][slot])
            assert [o for o, _ in members] == pytest.approx(sorted(mates + gone))
            assert sum(over for _, over in members) == len(gone)
            del alive[slot]
        credit = {s: v for s, v in credit.items() if s in alive} | {
            s: 0.0 for s in deciding if s not in alive
        }
        alive |= {s: deciding[s][0] for s in deciding}
        for slot, moment in zip(deciding, rows["moment"], strict=True):
            mates = [alive[s] for s in alive if group_of[s] == group_of[slot]]
            assert [o for o, _ in seen(groups, moment)] == pytest.approx(sorted(mates))
        if rng.random() < 0.1:
            groups.forget(np.zeros(0, dtype=np.int64))
