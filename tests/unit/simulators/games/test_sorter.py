import numpy as np
import pytest
from playing import begun, now, put, step

from pipeline.core.specs import DimensionProperty
from pipeline.errors import SettingsError
from pipeline.simulators.games.sorter import BEHAVIOR, MAX_STEP, MAX_TILES, Sorter
from pipeline.wire.channels.parameters import Sampler

PENALTY = -1.0 / MAX_STEP


def placed(tiles):
    """Return a game of one area with `tiles` of (number, place), in rows from the first on."""
    simulator = put(begun(Sorter), position=0.0, heading=0, entities=0.0, waits=False)
    state = now(simulator)
    for row, (number, place) in enumerate(tiles):
        angle = np.radians(place * 18.0)
        state.number[0, row], state.waits[0, row] = number, True
        state.entities[0, row, number] = 1.0
        state.entities[0, row, 20:22] = np.sin(angle), np.cos(angle)
    return put(simulator, number=state.number, waits=state.waits, entities=state.entities)


def visit(simulator, place):
    """Stand in front of a place, facing up, and return the next step's result."""
    angle = np.radians(place * 18.0)
    return step(put(simulator, position=(9.0 * np.sin(angle), 9.0 * np.cos(angle))), 0, 0, 0)


def test_tiles_are_observed_as_a_list_of_variable_length():
    tiles, _ = Sorter(n_agents=1).behavior_specs[BEHAVIOR].observation_specs
    assert tiles.dimension_property == (DimensionProperty.VARIABLE_SIZE, DimensionProperty.NONE)


def test_tile_with_the_smallest_unvisited_number_gives_a_reward_and_is_marked_as_visited():
    simulator = placed([(17, 0), (4, 5), (9, 10)])
    decisions, terminals = visit(simulator, 5)
    assert decisions.reward == pytest.approx([1.0 + PENALTY])
    assert len(terminals) == 0
    assert decisions.obs[0][0, :, 22].tolist() == [0.0, 1.0] + [0.0] * 18
    decisions, _ = visit(simulator, 5)  # a visited tile has no more effect
    assert decisions.reward == pytest.approx([PENALTY])
    decisions, _ = visit(simulator, 10)
    assert decisions.reward == pytest.approx([1.0 + PENALTY])
    decisions, terminals = visit(simulator, 0)
    assert terminals.reward == pytest.approx([1.0 + PENALTY])
    assert terminals.interrupted.tolist() == [False]
    assert terminals.obs[0][0, :3, 22].tolist() == [1.0, 1.0, 1.0]
    assert decisions.obs[0][0, :, 22].tolist() == [0.0] * 20


def test_tile_counts_as_touched_only_at_its_own_place_and_a_tile_out_of_order_ends_the_episode():
    simulator = placed([(17, 0), (4, 5)])
    for place in (3, 4, 6, 7):
        decisions, terminals = visit(simulator, place)
        assert decisions.reward == pytest.approx([PENALTY])
        assert len(terminals) == 0
    decisions, terminals = visit(simulator, 0)
    assert terminals.reward == pytest.approx([-1.0 + PENALTY])
    assert terminals.interrupted.tolist() == [False]
    assert terminals.obs[0][0, :, 22].tolist() == [0.0] * 20
    assert decisions.reward.tolist() == [0.0]


def test_observed_tiles_are_different_and_in_random_order():
    tiles = Sorter(n_agents=1000, seed=2).reset()[BEHAVIOR][0].obs[0]
    is_tile = tiles.any(axis=2)
    counts = is_tile.sum(axis=1)
    assert set(counts.tolist()) == set(range(1, 21))
    assert (is_tile == (np.arange(20) < counts[:, None])).all()
    assert (tiles[:, :, :20].sum(axis=1) <= 1.0).all()
    assert (tiles[:, :, :20].sum(axis=2) == is_tile).all()
    places = np.round(np.degrees(np.arctan2(tiles[..., 20], tiles[..., 21])) / 18.0) % 20
    for row, count in enumerate(counts):
        assert len(set(places[row, :count].tolist())) == count
    first, second = tiles[counts > 1, :2, :20].argmax(axis=2).T
    assert 0.45 < (first < second).mean() < 0.55


def test_parameter_num_tiles_limits_the_tiles_of_episodes_that_begin_later():
    simulator = begun(Sorter, 300)
    simulator.set_parameter("num_tiles", 3.0)
    before = now(simulator).waits.sum(axis=1).max()
    assert before == MAX_TILES
    decisions, _ = simulator.reset()[BEHAVIOR]
    assert set(decisions.obs[0].any(axis=2).sum(axis=1).tolist()) == {1, 2, 3}


def test_each_area_draws_its_own_value_if_the_parameter_num_tiles_is_sampled():
    simulator = Sorter(n_agents=300)
    simulator.parameters.set_sampler(
        "num_tiles", Sampler(kind=2, values=(1.0, 1.9, 9.0, 9.9), seed=1)
    )
    simulator.reset()
    counts = now(simulator).waits.sum(axis=1)
    assert counts.max() == 9
    assert 0.4 < (counts == 1).mean() < 0.7


@pytest.mark.parametrize("value", [0.0, 21.0, float("nan")])
def test_impossible_value_of_the_parameter_num_tiles_is_refused(value):
    simulator = Sorter(n_agents=1)
    simulator.set_parameter("num_tiles", value)
    with pytest.raises(SettingsError, match="num_tiles must be from 1 to 20, got"):
        simulator.reset()
