"""Policies out of checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from remembering import Cue
from toys import Both, Chase, Corridor, Quadrant, Wish

from pipeline.export.publish import record
from pipeline.protocol.specs import (
    ActionSpec,
    BehaviorSpec,
    ObservationSpec,
    spec_from_mapping,
    spec_to_mapping,
)
from pipeline.trainer.checkpoints.restore import load_policy

NETWORK = {"hidden_units": 8, "num_layers": 2, "normalize": True}


MEMORY = {"memory": {"sequence_length": 4, "memory_size": 6}}


@pytest.mark.parametrize(
    ("toy", "network"),
    [*((toy, {}) for toy in (Chase, Corridor, Both, Quadrant, Wish)), (Cue, MEMORY)],
)
def test_saved_policy_acts_as_the_trained_one(toy, network, quick, monkeypatch, train_in):
    learners = []
    monkeypatch.setattr(
        "pipeline.trainer.loop.Learner",
        lambda *args, **named: learners.append(Learner(*args, **named)) or learners[0],
    )
    from pipeline.trainer.learner import Learner

    result = train_in(
        toy(n_agents=4), quick(network_settings=NETWORK | network, max_steps=300)
    ).behaviors["Toy"]
    saved = load_policy(result.checkpoint)
    assert (saved.behavior, saved.step) == ("Toy", result.steps)
    assert saved.spec == toy.spec
    assert saved.settings.network_settings.hidden_units == 8
    assert len(saved.recorded_obs[0]) == 32
    trained = record(learners[0].algorithm.policy, saved.recorded_obs, saved.recorded_masks)
    loaded = record(saved.policy, saved.recorded_obs, saved.recorded_masks)
    assert ("recurrent_out" in loaded.expected) == bool(network)
    assert trained.expected.keys() == loaded.expected.keys()
    for name, values in trained.expected.items():
        np.testing.assert_array_equal(values, loaded.expected[name])
    assert (saved.recorded_masks is None) == (not toy.spec.action_spec.discrete_size)


def test_run_that_never_updated_can_be_exported_too(quick, train_in):
    result = train_in(Corridor(n_agents=4), quick(max_steps=10)).behaviors["Toy"]
    assert result.n_updates == 0
    saved = load_policy(result.checkpoint)
    assert saved.recorded_obs[0].shape == (4, 6)
    np.testing.assert_array_equal(saved.recorded_masks, np.ones((4, 3), np.float32))


def test_specification_survives_as_plain_values():
    specs = [Both.spec, Quadrant.spec, Wish.spec]
    specs.append(BehaviorSpec([ObservationSpec.entities(5, 3, "others")], ActionSpec(0, (2, 3))))
    for spec in specs:
        assert spec_from_mapping(spec_to_mapping(spec)) == spec
