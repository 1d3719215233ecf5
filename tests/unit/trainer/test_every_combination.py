"""Training and export of every algorithm with every option and mixture of observations."""

import numpy as np
import pytest
from answers import Answer
from teams import Teamed
from toys import Toy

import pipeline
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.export.policy import OnnxPolicy
from pipeline.simulators import registry
from pipeline.trainer.checkpoints.file import load_checkpoint

GOAL = ObservationType.GOAL_SIGNAL
VECTOR, IMAGE = ObservationSpec.vector(3), ObservationSpec.visual(3, 20, 20)
LIST = ObservationSpec.entities(4, 2)
VECTOR_GOAL = ObservationSpec.vector(2, "wish", GOAL)
IMAGE_GOAL = ObservationSpec.visual(1, 20, 20, "target")._replace(observation_type=GOAL)
LIST_GOAL = ObservationSpec.entities(3, 2, "wishes")._replace(observation_type=GOAL)
MEMORY = {"memory": {"sequence_length": 4, "memory_size": 8}}
HYBRID = ActionSpec(2, (3,))


# Observations, network settings and actions of each case.
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
    """Random observations of the given kinds: one of two goals, and lists of random length."""

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


def trained(env, algorithm, folder, *, name="Toy", network=None, **changes):
    """Return the result of training in `env` with small networks."""
    behavior = {
        "trainer_type": algorithm,
        "hyperparameters": HYPERPARAMETERS[algorithm],
        "network_settings": {"hidden_units": 8, "normalize": True, **(network or {})},
        "max_steps": 80,
        "time_horizon": 4,
        **changes,
    }
    options = {"seed": 1, "run_dir": folder}
    environment = InProcessEnvironment(env)
    result = pipeline.train(environment, {"behaviors": {name: behavior}}, **options).behaviors[name]
    assert result.n_updates > 0
    return result


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", HYPERPARAMETERS)
@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_trains_and_exports_every_mixture_of_observations(
    name, algorithm, tmp_path
):
    obs, network, actions = CASES[name]
    spec = BehaviorSpec(obs, actions)
    toy = Noise(spec, n_agents=6)
    if algorithm == "poca":
        toy = Teamed(lambda **options: Noise(spec, **options), n_agents=6)
    result = trained(toy, algorithm, tmp_path, network=network)
    report = publish(result.checkpoint, tmp_path / "export")
    assert report["rows"] > 0


def test_curiosity_and_rnd_train_with_every_kind_of_goal_observation(tmp_path):
    spec = BehaviorSpec([VECTOR_GOAL, LIST_GOAL, IMAGE_GOAL], HYBRID)
    signals = {"extrinsic": {}, "curiosity": {}, "rnd": {}}
    trained(Noise(spec, n_agents=6), "ppo", tmp_path, reward_signals=signals)


ON_POLICY = {"batch_size": 64, "buffer_size": 512}
OFF_POLICY = {
    "batch_size": 64,
    "buffer_size": 2000,
    "buffer_init_steps": 200,
    "steps_per_update": 20,
    "reward_signal_steps_per_update": 20,
}
ALGORITHMS = {"ppo": ON_POLICY, "poca": ON_POLICY, "sac": OFF_POLICY}


def combined(algorithm, environment, folder, *, observation="vector", **changes):
    """Train until the algorithm has made several updates, and export the policy."""
    (name, *_) = (qualified.partition("?")[0] for qualified in environment.behavior_specs)
    options = {"max_steps": 2500, "time_horizon": 16, "summary_freq": 500} | changes
    network = {"hidden_units": 16, "num_layers": 1, "normalize": False}
    network |= MEMORY if observation == "memory" else {}
    options["hyperparameters"] = ALGORITHMS[algorithm]
    result = trained(environment, algorithm, folder, name=name, network=network, **options)
    assert result.steps >= options["max_steps"]
    assert result.n_updates > 1
    publish(result.checkpoint, folder)
    OnnxPolicy(folder / f"{name}.onnx")
    return result


SIGNALS = {
    "extrinsic": {"gamma": 0.9, "strength": 1.0},
    "curiosity": {"gamma": 0.9, "strength": 0.02},
    "rnd": {"gamma": 0.9, "strength": 0.01},
}
GAMES = {"save_steps": 800, "team_change": 1200, "swap_steps": 300, "window": 3}
observations = pytest.mark.parametrize("observation", ["vector", "memory"])
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"self_play": GAMES}, {"reward_signals": SIGNALS}, {"threaded": True}], ids=str
)
@observations
@algorithms
def test_every_algorithm_trains_and_exports_with_self_play_learned_rewards_and_threaded_updates(
    algorithm, observation, options, tmp_path
):
    is_game = "self_play" in options
    toy = Answer("hybrid", observation, seed=1, team_size=2)
    environment = registry.make("pong", seed=1) if is_game else toy
    result = combined(algorithm, environment, tmp_path, observation=observation, **options)
    assert not is_game or result.elo not in (None, 1200.0)
    state = load_checkpoint(result.checkpoint)["learner"]["algorithm"]["signals"]
    for name in ("curiosity", "rnd") if "reward_signals" in options else ():
        moments = state[name]["optimizer"]["state"][0]
        assert float(moments["step"]) > 1
        assert moments["exp_avg"].abs().sum() > 0


@pytest.mark.slow
@algorithms
def test_every_algorithm_trains_and_exports_with_group_rewards(algorithm, tmp_path):
    combined(algorithm, registry.make("push_together", seed=1), tmp_path, max_steps=1500)
