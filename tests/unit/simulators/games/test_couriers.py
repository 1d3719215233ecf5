import numpy as np
import pytest
from playing import acted, begun, now, policies, put, step

from pipeline.errors import SettingsError
from pipeline.simulators.games import couriers
from pipeline.simulators.games.couriers import BEHAVIOR, ROADS, Couriers


def placed(*seats, left=60):
    """Return a game with a courier at each (place, address) of `seats`."""
    at, address = np.array(seats).T
    return put(begun(Couriers, len(seats)), at=at, address=address, left=left)


def slowly(roads):
    """Return the fastest times, found by a search through all ways of up to five roads."""
    best = np.where(roads > 0, roads, 999)
    np.fill_diagonal(best, 0)
    longer = best
    for _ in range(4):
        longer = (longer[:, :, None] + best[None]).min(axis=1)
    return longer


def test_courier_asks_for_a_decision_only_when_it_arrives_at_a_place():
    simulator = placed((0, 3), (0, 3), (0, 3))  # roads of 3, 9 and 2 steps
    decisions, _ = step(simulator, 1, 2, 5)
    assert decisions.agent_id.tolist() == [2]
    decisions, _ = step(simulator, 0)  # 3 steps: until 5
    assert decisions.agent_id.tolist() == [0]  # at 3
    decisions, _ = step(simulator, 2)  # 2 steps: until 5
    assert decisions.agent_id.tolist() == [0, 2]
    assert now(simulator).left.tolist() == [55] * 3
    assert now(simulator).way.tolist() == [0, 4, 0]


def test_delivered_parcel_gives_a_reward_and_the_next_parcel_has_another_address():
    simulator = placed((0, 5))
    decisions, terminals = step(simulator, 5)
    assert decisions.reward.tolist() == [1.0]
    assert len(terminals) == 0
    assert decisions.obs[0][0, :6].argmax() == 5
    assert decisions.obs[0][0, 6:12].argmax() != 5
    assert decisions.obs[0][0, 12] == pytest.approx(58 / 60)
    decisions, _ = step(simulator, 0)
    assert decisions.reward.tolist() == [float(now(simulator).address[0] == 0)]


def test_places_without_a_road_are_masked_and_a_courier_that_chooses_such_a_place_waits():
    simulator = placed((0, 3), (3, 0))
    decisions, _ = step(simulator, 3, 1)
    assert decisions.agent_id.tolist() == [0, 1]
    assert now(simulator).left.tolist() == [59, 59]
    assert now(simulator).at.tolist() == [0, 3]
    (mask,) = decisions.action_mask
    assert [np.flatnonzero(~row).tolist() for row in mask] == [[1, 2, 4, 5], [0, 2, 4, 5]]


@pytest.mark.parametrize(("address", "left", "action", "reward"), [(3, 4, 2, 0.0), (5, 2, 5, 1.0)])
def test_shift_of_a_courier_may_end_between_places_and_a_delivery_in_the_last_step_counts(
    address, left, action, reward
):
    decisions, terminals = step(placed((0, address), left=left), action)
    assert (len(decisions), terminals.agent_id.tolist()) == (0, [0])
    assert terminals.interrupted.tolist() == [False]
    assert terminals.reward.tolist() == [reward]
    assert terminals.obs[0][0, 12] == 0.0


def test_after_a_break_a_courier_with_a_new_id_replaces_a_courier_that_has_left():
    simulator = placed((0, 3), (0, 3), left=2)
    _, terminals = step(simulator, 2, 2)
    pause = vars(now(simulator))["break"].tolist()
    assert terminals.agent_id.tolist() == [0, 1]
    assert all(1 <= length <= couriers.MAX_BREAK for length in pause)
    decisions, _ = simulator.step({})[BEHAVIOR]  # no courier had asked
    first = int(np.argmin(pause))
    assert decisions.agent_id[0] == first + 2
    assert decisions.reward[0] == 0.0
    assert decisions.obs[0][0, 12] == 1.0
    simulator = begun(Couriers, 300, seed=2)
    simulator._leave(np.arange(300))
    assert set(vars(now(simulator))["break"].tolist()) == set(range(1, couriers.MAX_BREAK + 1))


def test_id_of_an_ended_or_removed_courier_is_never_used_again():
    simulator = Couriers(n_agents=3)
    first, _ = simulator.reset()[BEHAVIOR]
    second, terminals = simulator.reset()[BEHAVIOR]
    assert (first.agent_id.tolist(), second.agent_id.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert len(terminals) == 0
    put(simulator, left=1)
    step(simulator, 0, 0, 0)
    assert simulator.reset()[BEHAVIOR][0].agent_id.tolist() == [6, 7, 8]
    simulator = Couriers(n_agents=4, seed=1)
    steps, by = simulator.reset(), policies("couriers", simulator)
    ended_ids, ended_alone = set(), 0
    for _ in range(600):
        decisions, terminals = steps[BEHAVIOR]
        assert not ended_ids & {*decisions.agent_id.tolist(), *terminals.agent_id.tolist()}
        ended_ids |= set(terminals.agent_id.tolist())
        ended_alone += len(decisions) == 0
        steps = simulator.step(acted(steps, by))
    assert len(ended_ids) > 30
    assert ended_alone > 0


def test_fastest_routes_between_places_equal_the_routes_of_an_exhaustive_search():
    assert couriers.fastest().tolist() == slowly(ROADS).tolist()
    detours = (couriers.fastest() < ROADS) & (ROADS > 0)
    assert detours.sum() >= 6  # where the direct road is slower


@pytest.mark.parametrize("start", range(6))
def test_couriers_expert_takes_a_fastest_route(start):
    for address in set(range(6)) - {start}:
        simulator = placed((start, address))
        by = policies("couriers", simulator, scripted=[BEHAVIOR])
        steps = {BEHAVIOR: step(simulator, start)}  # the own place: wait for a step
        while not steps[BEHAVIOR][0].reward.any():
            steps = simulator.step(acted(steps, by))
        assert couriers.SHIFT - 1 - now(simulator).left[0] == couriers.fastest()[start, address]


def test_parameter_shift_sets_the_shift_length_of_couriers_that_start_later():
    simulator = Couriers(n_agents=2)
    simulator.set_parameter("shift", 30.0)
    decisions, _ = simulator.reset()[BEHAVIOR]
    assert now(simulator).left.tolist() == [30, 30]
    assert decisions.obs[0][:, 12].tolist() == [0.5, 0.5]
    simulator.set_parameter("shift", 0.0)
    with pytest.raises(SettingsError, match="shift must be between 1 and 200, got 0"):
        simulator.reset()
