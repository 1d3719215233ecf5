"""Demonstrations from and as Minari datasets; the datasets are made here, without a network."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from minari_recordings import collect

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.demos.demo_file import read_demo, writing_demo
from pipeline.demos.table_import import import_table
from pipeline.errors import DemonstrationError, SettingsError
from pipeline.simulators.bridges.batches import Codec

minari = pytest.importorskip("minari")

from pipeline.demos.minari_datasets import read_dataset, write_dataset  # noqa: E402  # needs minari


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


def assert_equal_trees(tree, other, rounding=0.0):
    assert type(tree) is type(other)
    if isinstance(tree, dict):
        assert tree.keys() == other.keys()
    if isinstance(tree, dict | tuple):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            assert_equal_trees(tree[key], other[key], rounding)
    else:
        assert tree.dtype == other.dtype
        np.testing.assert_allclose(tree, other, rtol=0, atol=rounding)


def assert_equal_datasets(dataset, other, rounding=0.0):
    assert dataset.total_episodes == other.total_episodes > 0
    for left, right in zip(dataset, other, strict=True):
        assert_equal_trees(left.observations, right.observations)
        assert_equal_trees(left.actions, right.actions, rounding)
        np.testing.assert_array_equal(np.float32(left.rewards), np.float32(right.rewards))
        assert right.rewards.dtype == left.rewards.dtype == np.float64
        np.testing.assert_array_equal(left.terminations, right.terminations)
        np.testing.assert_array_equal(left.truncations, right.truncations)


def there_and_back(tmp_path, dataset, env_id):
    table, behavior, spec = read_dataset(dataset.spec.dataset_id)
    steps = import_table(table, behavior, spec, tmp_path / "a.demo")
    write_dataset(read_demo(tmp_path / "a.demo"), "back/again-v0", env_id)
    return minari.load_dataset("back/again-v0"), behavior, steps


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4"])
def test_gymnasium_dataset_round_trips(tmp_path, env_id):
    env = gymnasium.make(env_id, max_episode_steps=40)
    dataset = collect("local/random-v0", env)
    reimported, behavior, steps = there_and_back(tmp_path, dataset, f"gymnasium:{env_id}")
    assert_equal_datasets(dataset, reimported)
    assert behavior == env_id
    assert reimported.spec.env_spec.id == env_id
    assert reimported.action_space == env.action_space
    assert "3 episodes" in steps[0]
    assert any(step.startswith("last obs      3 in the table, 0 repeated") for step in steps)


class Trees(gymnasium.Env):
    """An environment with trees of all supported kinds of spaces."""

    observation_space = spaces.Dict(
        {
            "pixels": spaces.Box(0, 255, (20, 24, 3), np.uint8),
            "preview": spaces.Box(0, 255, (10, 12, 3), np.uint8),
            "rest": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)]),
            "vector": spaces.Box(-1, 1, (2, 2), np.float32),
        }
    )
    action_space = spaces.Dict(
        {
            "arm": spaces.Box(np.float32([-1, 0]), np.float32([3, 8]), dtype=np.float32),
            "key": spaces.Discrete(3, start=5),
            "more": spaces.Tuple([spaces.MultiDiscrete([[2, 4]]), spaces.MultiBinary(2)]),
        }
    )

    def reset(self, *, seed=None, options=None):  # noqa: ARG002  # Gymnasium's signature
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.n = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.n += 1
        return self.observation_space.sample(), 0.5, self.n == 4, False, {}


def test_dataset_with_nested_spaces_round_trips(tmp_path):
    gymnasium.register("demonstrated/Trees-v0", f"{__name__}:Trees")
    try:
        dataset = collect("trees-v1", gymnasium.make("demonstrated/Trees-v0"))
        reimported, behavior, _ = there_and_back(tmp_path, dataset, "demonstrated/Trees-v0")
        spaces_of_both = dataset.observation_space, dataset.action_space
        for visual, scale in (("auto", 255), ("never", 1)):
            spec = Codec(*spaces_of_both, where="toy", visual=visual, scale=None).spec
            table, _, _ = read_dataset("trees-v1", spec)
            first = dataset[0].observations["preview"][0]
            assert np.array_equal(table.columns["obs1"][0], first.ravel() / np.float32(scale))
    finally:
        del gymnasium.registry["demonstrated/Trees-v0"]
    # The conversion from -1..3 to -1..1 and back rounds to float32 twice.
    assert_equal_datasets(dataset, reimported, rounding=3e-7)
    assert behavior == "demonstrated-Trees-v0"
    assert read_demo(tmp_path / "a.demo").spec.observation_specs[0].shape == (3, 20, 24)


@pytest.mark.parametrize("kind", [(2, (3, 2)), (0, (3,)), (1, (4,)), (2, ())])
def test_demonstration_round_trips_through_a_dataset_without_an_environment(tmp_path, kind):
    entities = ObservationSpec.entities(2, 3, "near")
    vision = ObservationSpec.visual(2, 5, 4, "eye")
    spec = BehaviorSpec([entities, vision], ActionSpec(*kind))
    rng, done = np.random.default_rng(0), np.array([0, 0, 1, 0, 1, 1, 0], dtype=bool)
    actions = spec.action_spec.random_action(len(done), rng)
    actions.continuous[done], actions.discrete[done] = 0, 0
    obs = [
        rng.random((len(done), *observation_spec.shape), dtype=np.float32)
        for observation_spec in (entities, vision)
    ]
    reward = np.float32([0, 1, 2, 0, 3, 0, 0])
    with writing_demo(tmp_path / "a.demo", "B", spec) as writer:
        cut = np.arange(len(done)) == 4
        writer.append(obs=obs, actions=actions, reward=reward, done=done, interrupted=cut)
    write_dataset(read_demo(tmp_path / "a.demo"), "mine-v0")
    table, name, _ = read_dataset("mine-v0", spec)
    import_table(table, "B", spec, tmp_path / "b.demo")
    original, reimported = read_demo(tmp_path / "a.demo"), read_demo(tmp_path / "b.demo")
    assert name == "mine"
    assert reimported.spec == spec
    full_episodes = slice(0, 5)  # not the episode without an action, and not the open episode
    for left, right in zip(original.obs, reimported.obs, strict=True):
        np.testing.assert_array_equal(left[full_episodes], right)
    for field in ("continuous", "discrete", "reward", "done", "interrupted"):
        np.testing.assert_array_equal(
            getattr(original, field)[full_episodes], getattr(reimported, field)
        )


def test_actions_outside_their_bounds_are_clipped_and_counted(tmp_path):
    env = gymnasium.make("Pendulum-v1", max_episode_steps=5)
    wide = np.random.default_rng(1).uniform(-4, 4, (5, 1)).astype(np.float32)
    dataset = collect("wide-v0", env, draw=lambda number: wide[number])
    actions = np.concatenate([episode.actions for episode in dataset])
    table, behavior, spec = read_dataset("wide-v0")
    steps = import_table(table, behavior, spec, tmp_path / "a.demo")
    n_beyond = int((np.abs(actions) > 2).sum())
    assert 0 < n_beyond < len(actions)
    assert f"; {n_beyond} numbers beyond them were clipped, as the environment does" in steps[1]
    demo = read_demo(tmp_path / "a.demo")
    np.testing.assert_array_equal(demo.continuous[~demo.done], actions.clip(-2, 2) / 2)


def test_import_of_actions_without_bounds_needs_an_action_scale(tmp_path):
    env = gymnasium.make("Pendulum-v1", max_episode_steps=5)
    free = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    collect("free-v0", env, acted=free)
    table, behavior, spec = read_dataset("free-v0")
    with pytest.raises(DemonstrationError, match=r"exceeds -1..1.*--action-scale"):
        import_table(table, behavior, spec, tmp_path / "b.demo")
    import_table(table, behavior, spec, tmp_path / "b.demo", action_scale=(10,))
    demo = read_demo(tmp_path / "b.demo")
    actions = np.concatenate([episode.actions for episode in minari.load_dataset("free-v0")])
    np.testing.assert_array_equal(demo.continuous[~demo.done], np.float32(actions / 10.0))


def test_invalid_datasets_are_refused(tmp_path):
    with pytest.raises(DemonstrationError, match=r"not on this machine; fetch it with `minari dow"):
        read_dataset("nobody/nothing-v0")
    dataset = collect("cart-v0", gymnasium.make("CartPole-v1"))
    there_and_back(tmp_path, dataset, None)
    demo = read_demo(tmp_path / "a.demo")
    for use in (read_dataset, lambda name: write_dataset(demo, name)):
        with pytest.raises(DemonstrationError, match=r"minari:nothing: is not an id of a dataset"):
            use("nothing")
    with pytest.raises(
        DemonstrationError, match="minari:cart-v0: exists already; raise the version"
    ):
        write_dataset(demo, "cart-v0")
    with pytest.raises(DemonstrationError, match=r"Pendulum-v1: observes \[\(3,\)\] and takes"):
        write_dataset(demo, "cart-v1", "gymnasium:Pendulum-v1")
    # The environment below has the same observations.
    collect("hill-v0", gymnasium.make("MountainCar-v0", max_episode_steps=5))
    import_table(*read_dataset("hill-v0"), tmp_path / "hill.demo")
    hill, env_id = read_demo(tmp_path / "hill.demo"), "gymnasium:MountainCarContinuous-v0"
    with pytest.raises(DemonstrationError, match=r"Continuous-v0: observes \[\(2,\)\] and takes"):
        write_dataset(hill, "hill-v1", env_id)
    with pytest.raises(SettingsError, match=r"Gymnasium has no environment 'CartPol-v1'"):
        write_dataset(demo, "cart-v1", "gymnasium:CartPol-v1")
    assert not (tmp_path / "datasets" / "cart-v1").exists()


def test_failed_export_leaves_no_dataset(tmp_path, monkeypatch):
    dataset = collect("cart-v0", gymnasium.make("CartPole-v1"))
    there_and_back(tmp_path, dataset, None)

    def fail(self, episodes):
        raise OSError("no space left")

    storage = minari.dataset._storages.hdf5_storage.HDF5Storage
    monkeypatch.setattr(storage, "update_episodes", fail)
    with pytest.raises(OSError, match="no space left"):
        write_dataset(read_demo(tmp_path / "a.demo"), "cart-v1")
    assert not (tmp_path / "datasets" / "cart-v1").exists()
