import numpy as np
import pytest

from pipeline.simulators.games import rays


def one(*values):
    return np.array([values], dtype=np.float32)


def test_rays_are_ordered_from_the_middle_outwards_right_before_left():
    assert rays.spread(2, 60.0).tolist() == [0.0, 30.0, -30.0, 60.0, -60.0]


@pytest.mark.parametrize(
    ("degrees", "vector"),
    [(0, (0, 1)), (90, (1, 0)), (180, (0, -1)), (270, (-1, 0)), (30, (0.5, 0.75**0.5))],
)
def test_headings_turn_clockwise_from_the_positive_z_axis(degrees, vector):
    direction = rays.directions(np.array([degrees]))[0]
    assert direction == pytest.approx(vector, abs=2e-6)
    assert (direction != 0).all()
    assert direction.dtype == np.float32


def test_ray_measures_the_distance_to_the_first_wall_that_it_hits():
    direction = rays.directions(np.array([[0.0, 90.0, 180.0, 270.0, 45.0]]))
    distance = rays.to_walls(origin=one(1, 2), direction=direction, low=-4.0, high=10.0)
    assert distance.shape == (1, 5, 1)
    assert distance[0, :, 0] == pytest.approx([8, 9, 6, 5, 8 * 2**0.5], rel=1e-5)


def test_rays_hit_circles_in_front_and_miss_circles_at_the_side_behind_or_around_the_origin():
    direction = rays.directions(np.array([[0.0]]))
    centre = np.array([[(0, 5), (0.6, 5), (2, 5), (0, -5), (0, 0.5)]], dtype=np.float32)
    distance = rays.to_circles(
        origin=one(0, 0), direction=direction, centre=centre, radius=np.ones(5, dtype=np.float32)
    )
    assert distance[0, 0, :2] == pytest.approx([4.0, 4.2], abs=1e-4)
    assert np.isinf(distance[0, 0, 2:]).all()


def test_ray_shows_the_first_object_that_it_hits_within_its_length():
    distance = np.array([[[8.0, np.inf, 2.0], [30.0, 25.0, np.inf]]], dtype=np.float32)
    seen = rays.encode([distance], tag=np.array([0, 1, 2]), n_tags=3, length=20.0)
    assert seen.tolist() == [[0, 0, 1, 0, pytest.approx(0.1), 0, 0, 0, 1, 1]]
    assert seen.dtype == np.float32
