"""Values of environment parameters at each reading, and a simulator's `Controls`."""

import json

import numpy as np
import pytest

from pipeline.wire.channels.parameters import (
    GAUSSIAN,
    MULTI_RANGE,
    READING,
    UNIFORM,
    Controls,
    Parameters,
    Sampler,
    Source,
)

UNEVEN = (0.0, 1.0, 10.0, 13.0)


def sampler(kind, values, seed=5):
    return Sampler(kind=kind, values=values, seed=seed)


def draws(kind, values, n=4000):
    return np.array([source() for source in [Source(sampler(kind, values))] for _ in range(n)])


@pytest.mark.parametrize(
    ("kind", "values"),
    [(3, (0.0, 1.0)), (-1, (0.0, 1.0)), (UNIFORM, ()), (UNIFORM, (1.0,)), (2, (0.0, 1.0, 2.0))],
)
def test_invalid_sampler_is_refused(kind, values):
    with pytest.raises(ValueError, match="sampler"):
        sampler(kind, values)


def test_gaussian_sampler_draws_around_the_mean_with_a_positive_or_negative_deviation():
    for deviation in (0.5, -0.5):
        drawn = draws(GAUSSIAN, (3.0, deviation))
        assert drawn.mean() == pytest.approx(3.0, abs=0.05)
        assert drawn.std() == pytest.approx(0.5, abs=0.05)
        # 58 % for uniform draws with the same standard deviation.
        assert np.mean(np.abs(drawn - 3.0) < 0.5) == pytest.approx(0.683, abs=0.04)


def test_multi_range_sampler_draws_uniformly_from_the_union_of_the_ranges():
    drawn = draws(UNIFORM, (2.0, 6.0))
    assert (drawn.min() >= 2.0, drawn.max() < 6.0) == (True, True)
    assert np.histogram(drawn, 4, (2.0, 6.0))[0].min() > 900
    drawn = draws(MULTI_RANGE, UNEVEN)
    low, high = drawn[drawn < 5.0], drawn[drawn > 5.0]
    assert (low.min() >= 0.0, low.max() < 1.0) == (True, True)
    assert (high.min() >= 10.0, high.max() < 13.0) == (True, True)
    assert len(low) / len(drawn) == pytest.approx(0.25, abs=0.03)
    for part, places, ends in ((low, 4, (0.0, 1.0)), (high, 3, (10.0, 13.0))):
        assert np.histogram(part, places, ends)[0].min() > 0.8 * len(part) / places
    drawn = draws(MULTI_RANGE, (1.0, 1.0, 7.0, 7.0))  # ranges of width 0
    assert set(drawn) == {1.0, 7.0}
    assert np.mean(drawn == 1.0) == pytest.approx(0.5, abs=0.05)


def test_equal_samplers_draw_equal_values_and_samplers_with_other_seeds_draw_other_values():
    source, twin, other = (Source(sampler(UNIFORM, (0.0, 1.0), seed)) for seed in (5, 5, 6))
    first = [source() for _ in range(5)]
    assert first == [twin() for _ in range(5)]
    assert first != [other() for _ in range(5)]
    assert len(set(first)) == 5
    Source(sampler(UNIFORM, (0.0, 1.0), seed=-1))  # seeds in messages are signed


def test_parameter_has_the_value_set_last_and_method_take_readings_returns_each_reading_once():
    parameters = Parameters()
    assert parameters.read("speed", 7.0) == 7.0
    parameters.set_sampler("speed", sampler(UNIFORM, (0.0, 1.0)))
    parameters.set_value("size", 2)
    values = parameters.values()
    assert values["size"] == 2.0
    assert isinstance(values["size"], float)
    second_reading = parameters.read("speed", 7.0)
    assert 0.0 <= second_reading != values["speed"]
    readings = [("speed", values["speed"]), ("size", 2.0), ("speed", second_reading)]
    assert parameters.take_readings() == readings
    assert parameters.take_readings() == []
    parameters.set_value("speed", 3.0)
    assert parameters.read("speed", 7.0) == 3.0


def test_restored_parameters_continue_the_random_draws_of_their_samplers():
    parameters, resumed = Parameters(), Parameters()
    parameters.set_value("size", 2.0)
    parameters.set_sampler("speed", sampler(MULTI_RANGE, UNEVEN))
    parameters.values()
    resumed.set_value("gone", 1.0)
    resumed.load_state_dict(json.loads(json.dumps(parameters.state_dict())))
    for _ in range(3):
        assert parameters.values() == resumed.values()
    assert parameters.state_dict() == resumed.state_dict()


class Plain:
    """A simulator that records its parameters."""

    def __init__(self):
        self.given = []

    def set_parameter(self, name, value):
        self.given.append((name, value))


class Drawing(Plain):
    """A simulator that draws from samplers itself, and reports statistics."""

    def __init__(self):
        super().__init__()
        self.parameters = Parameters()

    def stats(self):
        return [("score", 4.0, 0)]


def test_simulator_without_a_parameters_object_receives_a_new_sampled_value_in_each_step():
    simulator = Plain()
    controls = Controls(simulator)
    controls.set_value("size", 2.0)
    controls.set_sampler("speed", sampler(UNIFORM, (0.0, 1.0)))
    expected = Source(sampler(UNIFORM, (0.0, 1.0)))
    for _ in range(2):
        controls.draw()
    first, second = expected(), expected()
    assert simulator.given == [("size", 2.0), ("speed", first), ("speed", second)]
    assert controls.take_stats() == [
        (READING + "speed", first, 3),
        (READING + "speed", second, 3),
    ]
    controls.set_value("speed", 9.0)
    controls.draw()
    assert simulator.given[3:] == [("speed", 9.0)]
    assert controls.take_stats() == []


def test_simulator_with_a_parameters_object_draws_values_from_the_sampler_itself():
    simulator = Drawing()
    controls = Controls(simulator)
    controls.set_sampler("speed", sampler(UNIFORM, (0.0, 1.0)))
    controls.draw()
    assert simulator.given == []
    first = Source(sampler(UNIFORM, (0.0, 1.0)))()
    assert simulator.parameters.read("speed", 7.0) == first
    assert controls.take_stats() == [("score", 4.0, 0), (READING + "speed", first, 3)]
    assert controls.state_dict() == {"drawn": {}, "samplers": ["speed"]}


def test_restored_controls_continue_the_saved_samplers_and_drop_samplers_that_were_not_saved():
    simulators, names = (Plain(), Plain()), [f"p{n}" for n in range(9)]
    original, resumed = map(Controls, simulators)
    for name in reversed(names):
        original.set_sampler(name, sampler(GAUSSIAN, (0.0, 1.0)))
    original.draw()
    assert [name for name, _ in simulators[0].given] == names
    resumed.set_sampler("size", sampler(GAUSSIAN, (0.0, 1.0)))
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    simulators[0].given.clear()
    for controls in (original, resumed):
        controls.draw()
    assert simulators[0].given == simulators[1].given
    assert [name for name, _ in simulators[1].given] == names
