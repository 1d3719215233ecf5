"""Agents with other observations than their behavior: refused, or accepted with a warning."""

import re

import numpy as np
import pytest
from wire_messages import decode_steps

from pipeline.core.specs import (
    ActionSpec,
    BehaviorSpec,
    ObservationSpec,
    ObservationType,
    refuse_other_spec,
)
from pipeline.errors import UnityObservationException as ObservationError
from pipeline.wire.codec.generated import messages as m
from pipeline.wire.codec.png import encode_png

TWO = BehaviorSpec(
    [ObservationSpec.vector(2, "eyes"), ObservationSpec.vector(2, "nose")], ActionSpec(1, ())
)


def agent_with(number, *names, shape=(2,)):
    info = m.AgentInfoProto(id=number)
    for name in names:
        observation = info.observations.add(shape=shape, dimension_properties=[1], name=name)
        observation.float_data.data.extend([0.5] * int(np.prod(shape)))
    return info


def agent_with_png(name):
    info = m.AgentInfoProto()
    info.observations.add(
        shape=[1, 2, 2],
        name=name,
        dimension_properties=[1, 2, 2],
        compression_type=m.PNG,
        compressed_data=encode_png(np.zeros((1, 2, 2), np.float32)),
    )
    return info


THREE = TWO._replace(observation_specs=[*TWO.observation_specs, ObservationSpec.vector(2, "ear")])
CAMERAS = TWO._replace(
    observation_specs=[ObservationSpec.visual(1, 2, 2, name) for name in ("left", "right")]
)


@pytest.mark.parametrize(
    ("spec", "infos"),
    [
        (TWO, [agent_with(8, "eyes", "nose"), agent_with(9, "nose", "eyes")]),
        (TWO, [agent_with(9, "nose", "eyes")]),
        (THREE, [agent_with(9, "nose", "eyes", "ear")]),
        (CAMERAS, [agent_with(9, "right", "left", shape=(1, 2, 2))]),
    ],
)
def test_error_for_an_agent_with_observations_in_another_order_names_its_id_and_both_orders(
    spec, infos
):
    sent = [observation.name for observation in infos[-1].observations]
    expected = (
        f"Agent with id=9 of behavior 'b' sent its observations in the order {sent}; the behavior "
        f"has the order {[obs.name for obs in spec.observation_specs]}, and all its agents must"
    )
    with pytest.raises(ObservationError, match=f"^{re.escape(expected)}"):
        decode_steps(infos, spec, "b")


@pytest.mark.parametrize("names", [["right"], ["left", "right"]])
def test_png_with_another_name_is_accepted_with_a_warning_if_observation_names_were_announced(
    caplog, names
):
    for named in ("", "left"):
        spec = BehaviorSpec([ObservationSpec.visual(1, 2, 2, named)], ActionSpec(1, ()))
        decode_steps(list(map(agent_with_png, names)), spec, f"{len(names)} {named} cameras")
        assert bool(caplog.records) == bool(named)
    assert "left cameras: an agent calls its observations ['right']" in caplog.text
    caplog.clear()
    spec = BehaviorSpec([ObservationSpec.vector(2), ObservationSpec.vector(2)], ActionSpec(1, ()))
    decode_steps([agent_with(1, "eyes", "nose")], spec, "nameless")
    assert not caplog.records


OTHER_SPECS = [
    (TWO._replace(action_spec=ActionSpec(0, (3,))), r"takes the actions .*Discrete: \(3,\)"),
    (
        TWO._replace(observation_specs=TWO.observation_specs[::-1]),
        r"in the order \['nose', 'eyes'\], the others \['eyes', 'nose'\]",
    ),
    (TWO._replace(observation_specs=TWO.observation_specs[:1]), "sends 1 observations"),
    (
        TWO._replace(
            observation_specs=[TWO.observation_specs[0], ObservationSpec.vector(3, "nose")]
        ),
        r"sends observation 1 'nose' as shape \(3,\), .*the others 'nose' as shape \(2,\)",
    ),
    (
        TWO._replace(
            observation_specs=[
                ObservationSpec.vector(2, "eyes", ObservationType.GOAL_SIGNAL),
                TWO.observation_specs[1],
            ]
        ),
        "'eyes' as .*GOAL_SIGNAL, the others .*DEFAULT",
    ),
]


@pytest.mark.parametrize(("other", "text"), OTHER_SPECS)
def test_error_for_a_specification_that_differs_from_the_known_one_names_the_difference(
    other, text
):
    with pytest.raises(ObservationError, match=f"^behavior b: worker 1 .*{text}"):
        refuse_other_spec("b", TWO, other, "worker 1")


def test_specifications_that_differ_only_in_names_count_as_the_same_behavior(caplog):
    renamed = [obs._replace(name=f"my {obs.name}") for obs in TWO.observation_specs]
    refuse_other_spec("named", TWO, TWO._replace(observation_specs=renamed), "worker 1")
    assert "Behavior named: an agent calls" in caplog.text
