import numpy as np
import pytest
from playing import begun, now, put, sights, walk

from pipeline.core.specs import ActionTuple
from pipeline.simulators.games import pyramids
from pipeline.simulators.games.pyramids import (
    BEHAVIOR,
    GOAL,
    MAX_STEP,
    PYRAMID,
    RING,
    SWITCH_OFF,
    SWITCH_ON,
    WALL,
    Pyramids,
    slide,
)

NOTHING, FORWARD, BACK, RIGHT, LEFT = range(5)
PENALTY = -1.0 / MAX_STEP
SPOTS = {
    (room, k): (np.array(RING[room]) + 0.5) * 8 + np.array(offset) * 2.4
    for room in range(8)
    for k, offset in enumerate([(-1, -1), (-1, 1), (1, -1), (1, 1)])
}


def placed(position, heading=0, switch=(2, 1), goal=(5, 1)):
    """Return a game of one area with the given state, without pyramids."""
    spots = {"switch": SPOTS[switch], "goal": SPOTS[goal]}
    things = np.full((11, 2), pyramids.rays.HIDDEN)
    things[0] = SPOTS[switch]
    return put(begun(Pyramids), position=position, heading=heading, things=things, **spots)


def seen(simulator):
    return sights(walk(simulator, NOTHING)[0].obs[0], 5, pyramids.RAY_LENGTH)


def test_agent_observes_its_position_and_heading():
    vector_obs = walk(placed((12.0, 24.0 * 0.75), heading=3), NOTHING)[0].obs[1][0]
    assert vector_obs == pytest.approx([0.0, 0.5, 1.0, 0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize(
    ("along", "across", "change", "wanted"),
    [
        (4.0, 2.0, 0.5, 4.5),  # free within a room
        (7.5, 2.0, 0.5, 7.6),  # the wall next to the door
        (7.5, 4.0, 1.0, 8.5),  # the door at 4
        (16.5, 20.0, -1.0, 15.5),  # the door at 20
        (8.4, 2.0, -0.5, 8.4),  # the wall from behind
        (23.5, 12.0, 1.0, 23.6),  # outside
        (0.5, 12.0, -1.0, 0.4),
        (7.5, 12.0, 1.0, 7.6),  # the middle block has no doors
        (4.9, 8.1, 1.0, 5.1),  # across a door only by its width
        (4.9, 7.7, -2.5, 2.9),
    ],
)
def test_walls_stop_agents_and_doors_let_agents_through(along, across, change, wanted):
    moved = slide(
        along=np.array([along], dtype=np.float32),
        across=np.array([across], dtype=np.float32),
        change=np.array([change], dtype=np.float32),
    )
    assert moved == pytest.approx([wanted], abs=1e-5)


def test_agents_never_leave_the_rooms_or_enter_pyramids():
    simulator = begun(Pyramids, 200, seed=5)
    rng = np.random.default_rng(0)
    rooms = set()
    for _ in range(450):
        simulator.step({BEHAVIOR: ActionTuple(discrete=rng.choice([1, 1, 1, 3, 4], (200, 1)))})
        position = now(simulator).position
        assert ((position > 0.39) & (position < 23.61)).all()
        cell = (position // 8).astype(int)
        assert not (cell == 1).all(axis=1).any()
        near_line = (np.abs(position[:, None] - [[8.0], [16.0]]) < 0.39).any(axis=1)
        other = position[:, ::-1]
        at_door = np.minimum(np.abs(other - 4.0), np.abs(other - 20.0)) < 1.11
        assert (~near_line | at_door).all()
        offset = position[:, None] - now(simulator).things[:, 3:]
        assert (np.sqrt((offset**2).sum(axis=2)) > 1.09).all()
        rooms |= {tuple(row) for row in cell.tolist()}
    assert rooms == {tuple(room) for room in RING.tolist()}


def test_rays_end_at_walls_and_pyramids_and_go_through_doors():
    simulator = placed((4.0, 4.0), switch=(4, 0))
    tag, distance = seen(simulator)
    assert (tag[0], distance[0]) == (WALL, pytest.approx(20.0, abs=1e-3))  # two doors, outer wall
    assert distance[1] == pytest.approx(12 / np.cos(np.radians(15)), rel=1e-4)  # one door
    assert distance[3] == pytest.approx(4 / np.cos(np.radians(30)), rel=1e-4)  # next to the door
    for place in ((2.0, 4.0), (12.0, 4.0)):  # the second looks at the middle block
        tag, distance = seen(put(simulator, position=place))
        assert (tag[0], distance[0]) == (WALL, pytest.approx(4.0, abs=1e-3))
    things = now(simulator).things
    things[:, 5] = (4.0, 7.0)
    tag, distance = seen(put(simulator, position=(4.0, 4.0), things=things))
    assert (tag[0], distance[0]) == (PYRAMID, pytest.approx(2.2, abs=1e-4))


def test_the_switch_makes_the_goal_appear_and_the_goal_ends_the_episode():
    simulator = placed(SPOTS[2, 1] - (0.0, 2.0), switch=(2, 1), goal=(5, 1))
    tag, distance = seen(simulator)
    assert (tag[0], distance[0]) == (SWITCH_OFF, pytest.approx(1.2, abs=1e-4))
    put(simulator, position=SPOTS[5, 1])
    decisions, terminals = walk(simulator, NOTHING)
    assert len(terminals) == 0  # there is no goal before the switch is pressed
    put(simulator, position=SPOTS[2, 1] - (0.0, 2.0))
    decisions, terminals = walk(simulator, FORWARD)
    assert decisions.obs[1][0, 4] == 1.0
    assert decisions.reward == pytest.approx([PENALTY])
    put(simulator, position=SPOTS[2, 1] - (0.0, 2.0))
    assert seen(simulator)[0][0] == SWITCH_ON
    put(simulator, position=SPOTS[5, 1] - (0.0, 2.0))
    assert seen(simulator)[0][0] == GOAL
    decisions, terminals = walk(simulator, FORWARD)
    assert terminals.reward == pytest.approx([2.0 + PENALTY])
    assert terminals.interrupted.tolist() == [False]
    assert terminals.obs[1][0, 4] == 1.0
    assert decisions.obs[1][0, 4] == 0.0


def test_agent_switch_and_goal_begin_in_rooms_far_from_each_other():
    simulator = Pyramids(n_agents=3000, seed=1)
    decisions, _ = simulator.reset()[BEHAVIOR]
    state = now(simulator)

    def room(position):
        return (np.array(position)[:, None] // 8 == RING).all(axis=2).argmax(axis=1)

    def apart(rooms_a, rooms_b):
        return np.minimum((rooms_a - rooms_b) % 8, (rooms_b - rooms_a) % 8)

    start, switch, goal = map(room, (state.position, state.switch, state.goal))
    assert set(apart(start, switch).tolist()) == {2, 3, 4}
    assert set(apart(switch, goal).tolist()) == {3, 4}
    for rooms in (start, switch, goal):
        assert set(rooms.tolist()) == set(range(8))
    is_pyramid = state.things[:, 3:, 0] < 24.0
    rows = np.arange(3000)
    for occupied in (start, switch, goal):
        assert not is_pyramid[rows, occupied].any()
    assert set(is_pyramid.sum(axis=1).tolist()) == {5, 6}  # the goal may be in the first room
    assert (decisions.obs[1][:, 4] == 0.0).all()
