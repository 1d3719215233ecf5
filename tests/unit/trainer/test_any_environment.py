"""Training in any environment object: ML-Agents' members and classes, Gymnasium, PettingZoo."""

from collections import namedtuple
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from mpe2 import simple_spread_v3
from toys import BEHAVIOR, Chase

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import SettingsError, UnityObservationException
from pipeline.settings import load_run_settings
from pipeline.trainer.environment import JobSpec, open_workers
from pipeline.wire.codec.decoding import NonFiniteError

# Classes as in ML-Agents: named tuples without defaults, and a plain Enum.
Kind = Enum("Kind", {"DEFAULT": 0, "GOAL_SIGNAL": 1})
Observed = namedtuple("Observed", "shape dimension_property observation_type name")
Actions = namedtuple("Actions", "continuous_size discrete_branches")
Spec = namedtuple("Spec", "observation_specs action_spec")
NAME = "Walker?team=0"


class Theirs:
    """An environment with only the members that training needs, with lists in place of arrays."""

    def __init__(self, *, as_lists=True, n_agents=3, **changes):
        image = Observed((2, 20, 20), (1, 2, 2), Kind.DEFAULT, "camera")
        goal = Observed([2], (1,), Kind.GOAL_SIGNAL, "goal")
        crowd = Observed((3, 2), (4, 1), Kind.DEFAULT, "crowd")
        self.spec = Spec(
            [Observed((4,), (1,), Kind.DEFAULT, "v"), image, goal, crowd], Actions(2, [3])
        )
        self.rng = np.random.default_rng(1)
        self.n, self.as_lists, self.changes = n_agents, as_lists, changes
        self.calls = []
        self.known = {}
        self.age = 0

    @property
    def behavior_specs(self):
        return self.known

    def reset(self):
        self.calls.append("reset")
        self.known = {NAME: self.spec}
        self.age = 0

    def step(self):
        self.age += 1

    def close(self):
        self.calls.append("close")

    def set_actions(self, behavior_name, action):
        assert behavior_name == NAME
        assert (action.continuous.shape, action.discrete.shape) == ((self.n, 2), (self.n, 1))
        assert (action.continuous.dtype, action.discrete.dtype) == (np.float32, np.int32)

    def get_steps(self, behavior_name):
        assert behavior_name == NAME
        ends = self.age % 4 == 3
        fields = {**self.fields(self.n), "action_mask": [np.zeros((self.n, 3), dtype=bool)]}
        decision = SimpleNamespace(**fields)
        n = self.n if ends else 0
        terminal = SimpleNamespace(**self.fields(n), interrupted=[False] * n)
        for key, value in self.changes.items():
            setattr(decision, key, value)
        return decision, terminal

    def fields(self, n):
        def values(*shape):
            array = self.rng.random((n, *shape))
            return array.tolist() if self.as_lists else array

        return {
            "obs": [values(*spec.shape) for spec in self.spec.observation_specs],
            "reward": values(),
            "agent_id": list(range(n)),
            "group_id": [0] * n,
            "group_reward": [0.0] * n,
        }


def settings(*names, algorithm="ppo"):
    on_policy = {"batch_size": 16, "buffer_size": 32, "num_epoch": 1}
    off_policy = {"batch_size": 16, "buffer_size": 200, "buffer_init_steps": 20}
    behavior = {
        "trainer_type": algorithm,
        "hyperparameters": off_policy if algorithm == "sac" else on_policy,
        "network_settings": {"hidden_units": 8, "num_layers": 1},
        "max_steps": 60,
        "time_horizon": 4,
    }
    return {"behaviors": dict.fromkeys(names, behavior)}


def begun(env):
    job = JobSpec(settings=load_run_settings(None), seed=0, run_dir=Path(), env=env)
    workers = open_workers(job)
    workers.reset()
    return workers


def trained(env, folder, *names, **options):
    return pipeline.train(env, settings(*names, **options), seed=1, run_dir=folder).behaviors


@pytest.mark.parametrize("as_lists", [True, False])
@pytest.mark.parametrize("several", [False, True])
def test_training_accepts_and_closes_any_object_with_the_members_of_an_mlagents_environment(
    several, as_lists, tmp_path
):
    envs = [Theirs(as_lists=as_lists) for _ in range(1 + several)]
    result = trained(envs if several else envs[0], tmp_path, "Walker")["Walker"]
    assert result.steps >= 60
    assert result.n_updates > 0
    assert [env.calls for env in envs] == [["reset", "close"]] * len(envs)


def test_foreign_specification_and_steps_are_converted_to_the_types_of_this_package():
    workers = begun(Theirs())
    spec = workers.behavior_specs[NAME]
    assert [obs.shape for obs in spec.observation_specs] == [(4,), (2, 20, 20), (2,), (3, 2)]
    assert [int(obs.observation_type) for obs in spec.observation_specs] == [0, 0, 1, 0]
    assert spec.observation_specs[3].dimension_property == (4, 1)
    assert spec.action_spec == (2, (3,))
    ((decision, terminal),) = workers.get_steps(NAME)
    assert {values.dtype.name for values in decision.obs} == {"float32"}
    assert (decision.reward.dtype, decision.agent_id.dtype) == (np.float32, np.int32)
    assert terminal.interrupted.dtype == np.bool_
    assert [values.shape for values in terminal.obs] == [(0, 4), (0, 2, 20, 20), (0, 2), (0, 3, 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"obs": []}, "0 observations were sent, but 4 are specified"),
        ({"obs": [[["a"] * 4] * 3] * 4}, "observation 0 'v' cannot be read as float32"),
        ({"obs": [[[1.0, 2.0]] * 3] * 4}, r"observation 0 'v' has shape \(3, 2\), not \(3, 4\)"),
        ({"obs": [[[1.0], [2.0, 3.0]]] * 4}, "observation 0 'v' cannot be read as float32"),
        ({"reward": [1.0]}, r"reward has shape \(1,\), not \(3,\)"),
        ({"agent_id": [0, 1, 1 << 40]}, "agent_id cannot be read as int32"),
        ({"agent_id": np.array([0, 1, 1 << 40])}, "agent_id has values that are not int32"),
        ({"group_id": [0.5, 0, 0]}, "group_id has values that are not int32"),
        ({"action_mask": [[[False] * 3] * 3] * 2}, "2 action masks were sent, but 1 are specified"),
        (
            {"action_mask": [[[False] * 2] * 3]},
            r"action mask 0 has shape \(3, 2\), not \(3, 3\)",
        ),
    ],
)
def test_error_for_steps_with_a_field_of_wrong_shape_or_type_names_the_field(changes, words):
    workers = begun(Theirs(**changes))
    with pytest.raises(UnityObservationException, match=f"behavior {NAME[:6]}.*{words}"):
        workers.get_steps(NAME)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("field", ["reward", "group_reward", "obs"])
def test_non_finite_rewards_and_observations_stop_the_run(field, value, tmp_path):
    env = Theirs()
    values = [0.0, value, 0.0]
    if field == "obs":
        values = [np.full((3, *obs_spec.shape), value) for obs_spec in env.spec.observation_specs]
    env.changes = {field: values}
    with pytest.raises(NonFiniteError, match=rf"The {field.replace('obs', 'observation')}.*Walker"):
        trained(env, tmp_path, "Walker")
    assert env.calls == ["reset", "close"]


def test_environment_without_needed_members_or_with_an_unreadable_specification_is_refused(
    tmp_path,
):
    with pytest.raises(
        SettingsError, match=r"type SimpleNamespace.*lacks behavior_specs, get_steps"
    ):
        trained(SimpleNamespace(reset=None, step=None), tmp_path, "Walker")
    theirs = Theirs()
    theirs.spec = Spec([], SimpleNamespace(continuous_size=2))
    with pytest.raises(UnityObservationException, match=r"Walker.*specification cannot be read"):
        begun(theirs).behavior_specs.keys()


class Careless(Chase):
    """A simulator with observations as lists and rewards of another dtype than float32."""

    def _decisions(self, reward):
        steps = super()._decisions(reward)
        steps.obs = [values.astype(self.dtype).tolist() for values in steps.obs]
        steps.reward = steps.reward.astype(self.dtype)
        return steps


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_observations_and_rewards_of_a_simulator_become_float32(dtype, algorithm, tmp_path):
    simulator = Careless(n_agents=4)
    simulator.dtype = dtype
    ((decision, _),) = begun(InProcessEnvironment(simulator)).get_steps(BEHAVIOR)
    assert {values.dtype.name for values in (*decision.obs, decision.reward)} == {"float32"}
    env = InProcessEnvironment(simulator)
    assert trained(env, tmp_path, "Toy", algorithm=algorithm)["Toy"].n_updates > 0


class Lever(gymnasium.Env):
    """An unregistered environment with float64 observations."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.seeds = []
        self.is_closed = False
        self.age = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.seeds.append(seed)
        self.age = 0
        return self.np_random.uniform(-1, 1, 3), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.age += 1
        return self.np_random.uniform(-1, 1, 3), float(action), self.age == 3, self.age == 5, {}

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_gymnasium_environments_get_different_seeds_and_are_closed_after_training(
    algorithm, tmp_path
):
    runs = []
    for label in ("one", "two"):
        envs = [Lever(), Lever()]
        result = trained(envs, tmp_path / label, "Lever", algorithm=algorithm)
        assert result["Lever"].n_updates > 0
        assert all(env.is_closed and set(env.seeds[1:]) == {None} for env in envs)
        runs.append([env.seeds for env in envs])
    assert None not in (runs[0][0][0], runs[0][1][0])
    assert runs[0][0][0] != runs[0][1][0]
    assert runs[0] == runs[1]


def test_policies_train_in_a_pettingzoo_environment_which_is_closed_afterwards(tmp_path):
    env = simple_spread_v3.parallel_env()
    env.close = Mock(wraps=env.close)
    assert trained(env, tmp_path, "agent")["agent"].n_updates > 0
    env.close.assert_called_once_with()


def test_error_for_a_misspelled_behavior_name_in_a_mapping_of_settings_proposes_the_right_name(
    tmp_path,
):
    message = r"name Walker has not been specified.*rename 'Wolker' there to 'Walker'"
    with pytest.raises(SettingsError, match=message):
        trained(Theirs(), tmp_path, "Wolker")
    defaults = {"default_settings": settings("x")["behaviors"]["x"]}
    result = pipeline.train(Theirs(), defaults, seed=1, run_dir=tmp_path / "default")
    assert result.behaviors["Walker"].n_updates > 0
