"""Reports of users who learn from recordings: datasets of Minari, and tables of their own."""

import itertools
import sys

import field_environments
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from minari_recordings import collect

from pipeline.demos.demo_file import read_demo
from pipeline.demos.table_import import import_table
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator

minari = pytest.importorskip("minari")

from pipeline.demos.minari_datasets import read_dataset, write_dataset  # noqa: E402  # needs minari


@pytest.fixture(autouse=True)
def _datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


@pytest.fixture
def register(monkeypatch):
    """Registers environment classes with Gymnasium for the time of a test."""
    names = []

    def registered(env_class):
        # Minari stores the entry point, which therefore has to be text.
        monkeypatch.setattr(sys.modules[__name__], "Registered", env_class)
        names.append("field/Registered-v0")
        gymnasium.register(names[-1], f"{__name__}:Registered")
        return names[-1]

    yield registered
    for name in names:
        del gymnasium.registry[name]


Registered = None
"""The class that the fixture `register` has registered."""


class Grid(field_environments.Guess):
    """Samples of a space; the actions do not matter."""

    def observe(self):
        return self.observation_space.sample()

    def step(self, action):  # noqa: ARG002  # Gymnasium's form
        self.n_steps += 1
        return self.observe(), 1.0, self.n_steps >= 4, False, {}


def grid(low, high, shape, dtype):
    """An environment class whose observations are samples of this Box."""
    return type("Bounded", (Grid,), {"observation_space": spaces.Box(low, high, shape, dtype)})


def spec_of(env_id, visual):
    sim = GymnasiumSimulator(id=env_id, visual=visual)
    return next(iter(sim.behavior_specs.values()))


def there_and_back(env_id, tmp_path, visual="auto", choices=(0, 1)):
    """Return a dataset's episode, the imported demonstration, and the exported episode."""
    env = gymnasium.make(env_id, disable_env_checker=True)
    env.observation_space.seed(1)
    draw = itertools.cycle(choices)
    dataset = collect("there-v0", env, draw=lambda _: np.int64(next(draw)), seeds=[3])
    table, behavior, spec = read_dataset("there-v0", spec_of(env_id, visual))
    import_table(table, behavior, spec, tmp_path / "a.demo")
    demo = read_demo(tmp_path / "a.demo")
    write_dataset(demo, "back-v0", env_id)
    return next(iter(dataset)), demo, next(iter(minari.load_dataset("back-v0")))


@pytest.mark.parametrize(
    ("bounds", "shape", "visual"),
    [
        ((0, 15, np.uint8), (20, 24, 3), "always"),
        ((0, 65535, np.uint16), (3, 20, 24), "always"),
        ((-4, 7, np.int64), (20, 24, 3), "always"),
        ((-1, 1, np.float32), (20, 24, 3), "always"),
        ((0, 1, np.uint8), (20, 24), "always"),
        ((0, 1, np.uint8), (20, 20, 1), "auto"),  # stable-baselines3#1162
        ((0, 255, np.uint8), (7, 7, 3), "always"),
        ((0, 255, np.uint8), (7, 7, 3), "auto"),
        ((0, 255, np.uint8), (20, 24, 3), "never"),
    ],
)
def test_grid_observations_survive_import_and_export_as_image_or_vector(
    register, tmp_path, bounds, shape, visual
):
    env_id = register(grid(*bounds[:2], shape, bounds[2]))
    there, demo, back = there_and_back(env_id, tmp_path, visual)
    is_image = demo.obs[0].ndim == 4
    assert is_image == (visual == "always" or shape == (20, 20, 1))
    if is_image:
        low, high, _ = bounds
        expected = (there.observations.astype(np.float64) - low) / (high - low)
        assert np.sort(demo.obs[0], axis=None) == pytest.approx(np.sort(expected, axis=None))
    np.testing.assert_allclose(back.observations, there.observations, atol=1e-6)
    assert back.observations.dtype == bounds[2]


class Forbids(field_environments.MaskInsideObservation):
    """Forbids the choice that is the number of the step, modulo 3."""

    def observe(self):
        mask = (np.arange(3) != self.n_steps % 3).astype(np.int8)
        return {"observations": np.full(1, self.n_steps / 10, np.float32), "action_mask": mask}


def test_recorded_action_mask_survives_import_and_export(register, tmp_path):
    there, demo, back = there_and_back(register(Forbids), tmp_path, choices=(1, 2, 0))
    assert [values.shape for values in demo.obs] == [(11, 1)]
    forbidden = there.observations["action_mask"] == 0
    assert np.array_equal(demo.action_mask[0][:-1], forbidden[:-1])
    assert not demo.action_mask[0][-1].any()  # nobody acts on the last observation
    for key, recorded in there.observations.items():
        assert np.array_equal(back.observations[key][:-1], recorded[:-1])
        assert back.observations[key].dtype == recorded.dtype
    assert np.array_equal(back.actions, there.actions)
