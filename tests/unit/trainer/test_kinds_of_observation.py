"""Every algorithm trains on every mixture of observations, and its policy can be exported."""

from __future__ import annotations

import numpy as np
import pytest
from teams import Teamed
from toys import Toy

import pipeline
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.stages.export import publish

GOAL = ObservationType.GOAL_SIGNAL
VECTOR, IMAGE = ObservationSpec.vector(3), ObservationSpec.visual(3, 20, 20)
LIST = ObservationSpec.entities(4, 2)
VECTOR_GOAL = ObservationSpec.vector(2, "wish", GOAL)
IMAGE_GOAL = ObservationSpec.visual(1, 20, 20, "target")._replace(observation_type=GOAL)
LIST_GOAL = ObservationSpec.entities(3, 2, "wishes")._replace(observation_type=GOAL)
MEMORY = {"memory": {"sequence_length": 4, "memory_size": 8}}
HYBRID = ActionSpec(2, (3,))

# Observations, network settings and actions.
CASES = {
    "an image as goal": ([VECTOR, IMAGE_GOAL], {}, HYBRID),
    "nothing but an image as goal": ([IMAGE_GOAL], {"num_layers": 1}, ActionSpec(0, (3,))),
    "an image as goal, with memory": ([VECTOR, IMAGE_GOAL], MEMORY, ActionSpec(2, ())),
    "an image as goal beside a list": ([IMAGE_GOAL, LIST], {}, HYBRID),
    "a list as goal": ([VECTOR, LIST_GOAL], {}, HYBRID),
    "nothing but a list as goal": ([LIST_GOAL], {}, ActionSpec(0, (3,))),
    "a list as goal, with memory": ([VECTOR, LIST_GOAL], MEMORY, HYBRID),
    "goals of every kind": ([LIST_GOAL, IMAGE_GOAL, VECTOR, VECTOR_GOAL, IMAGE, LIST], {}, HYBRID),
    "goals of every kind, with memory": ([VECTOR_GOAL, LIST_GOAL, IMAGE_GOAL], MEMORY, HYBRID),
    "an image as goal that is an input": (
        [VECTOR, IMAGE_GOAL],
        {"goal_conditioning_type": "none"},
        HYBRID,
    ),
}
HYPERPARAMETERS = {
    "ppo": {"batch_size": 16, "buffer_size": 32, "num_epoch": 1},
    "poca": {"batch_size": 16, "buffer_size": 32, "num_epoch": 1},
    "sac": {"batch_size": 16, "buffer_size": 200, "buffer_init_steps": 20},
}


class Noise(Toy):
    """Observations of the given kinds that mean nothing: few goals, lists of any length."""

    def __init__(self, spec: BehaviorSpec, **options) -> None:
        super().__init__(**options)
        self.spec = spec
        self.length = 5
        self.goals = {
            obs_spec.name: self.rng.random((2, *obs_spec.shape))
            for obs_spec in spec.observation_specs
        }

    def begin(self, rows):
        pass

    def observe(self):
        values = [self._values(spec) for spec in self.spec.observation_specs]
        for entities in (array for array in values if array.ndim == 3):
            most = entities.shape[1]
            entities[np.arange(most) >= self.rng.integers(0, most + 1, (self.n, 1))] = 0.0
        return values

    def _values(self, spec):
        if spec.observation_type == GOAL:
            return self.goals[spec.name][self.rng.integers(0, 2, self.n)]
        return self.rng.normal(0, 1, (self.n, *spec.shape))

    def advance(self, _action):
        return self.rng.normal(0, 1, self.n), self.rng.random(self.n) < 0.1


def trained(env, algorithm, network, folder, **changes):
    """The result of training `env` with networks as small as can be."""
    behavior = {
        "trainer_type": algorithm,
        "hyperparameters": HYPERPARAMETERS[algorithm],
        "network_settings": {"hidden_units": 8, "normalize": True, **network},
        "max_steps": 80,
        "time_horizon": 4,
        **changes,
    }
    result = pipeline.train(env, {"behaviors": {"Toy": behavior}}, seed=1, run_dir=folder)
    return result.behaviors["Toy"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", HYPERPARAMETERS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_trained_on_and_its_policy_is_exported(name, algorithm, in_process, tmp_path):
    obs, network, actions = CASES[name]
    spec = BehaviorSpec(obs, actions)
    toy = Noise(spec, n_agents=6)
    if algorithm == "poca":
        toy = Teamed(lambda **options: Noise(spec, **options), n_agents=6)
    result = trained(in_process(toy), algorithm, network, tmp_path)
    assert result.n_updates > 0
    report = publish(result.checkpoint, tmp_path / "export")
    assert report["rows"] > 0


def test_learned_rewards_take_goals_of_every_kind(in_process, tmp_path):
    spec = BehaviorSpec([VECTOR_GOAL, LIST_GOAL, IMAGE_GOAL], HYBRID)
    signals = {"reward_signals": {"extrinsic": {}, "curiosity": {}, "rnd": {}}}
    result = trained(in_process(Noise(spec, n_agents=6)), "ppo", {}, tmp_path, **signals)
    assert result.n_updates > 0
