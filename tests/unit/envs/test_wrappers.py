"""Gymnasium's and PettingZoo's own checks on our wrappers, over real executables and in process."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from toys import Both, Chase, Crowd, Forbidden, Quadrant

from pipeline.envs.gym_wrapper import (
    UnityGymException,
    UnityToGymWrapper,
    UnityToOldGymWrapper,
)
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.pettingzoo_wrapper import (
    UnityAECEnv,
    UnityParallelEnv,
    UnityPettingZooException,
)
from pipeline.envs.unity import UnityEnvironment
from pipeline.simulators.pack import pack

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of pettingzoo about itself
    from pettingzoo.test import api_test, parallel_api_test


@pytest.fixture(scope="module")
def executables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    return {name: pack(name, folder / name) for name in ("balance_ball", "grid_world")}


def alone(toy, **options):
    return InProcessEnvironment(toy(n_agents=1, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("balance_ball", {}),
        ("grid_world", {}),
        ("grid_world", {"allow_multiple_obs": True, "uint8_visual": True}),
    ],
)
def test_executable_passes_gymnasiums_check(name, options, executables):
    env = UnityToGymWrapper(executables[name], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of spaces without bounds
        check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["balance_ball", "grid_world"])
def test_executable_passes_pettingzoos_tests(name, executables):
    def make(seed):
        args = ["--num-agents", "3"]
        return UnityEnvironment(executables[name], seed=seed, additional_args=args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = UnityParallelEnv(make, seed=1)
        assert len(env.possible_agents) == 3
        parallel_api_test(env, num_cycles=200)
        env.close()
        turns = UnityAECEnv(make, seed=1)
        api_test(turns, num_cycles=200)
        turns.close()


def test_interrupted_is_truncated_and_the_end_is_terminated():
    env = UnityToGymWrapper(lambda seed: alone(Chase, seed=seed))
    env.reset(seed=1)
    ends = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(Chase.length)]
    assert ends[:-1] == [(False, False)] * (Chase.length - 1)
    assert ends[-1] == (False, True)
    with pytest.raises(UnityGymException, match="reset"):
        env.step(np.zeros(2, np.float32))


def test_rewards_and_observations_are_the_environments():
    toy = Chase(seed=4, n_agents=1)
    env, direct = UnityToGymWrapper(lambda seed: alone(Chase, seed=seed)), toy
    obs, _ = env.reset(seed=4)
    ((first, _),) = direct.reset().values()
    np.testing.assert_array_equal(obs, first.obs[0][0])
    rng = np.random.default_rng(0)
    for _ in range(5):
        action = rng.uniform(-1, 1, 2).astype(np.float32)
        obs, reward, *_ = env.step(action)
        spec_action = direct.spec.action_spec.empty_action(1)
        spec_action.continuous[0] = action
        ((decision, _),) = direct.step({"Toy?team=0": spec_action}).values()
        np.testing.assert_array_equal(obs, decision.obs[0][0])
        assert reward == pytest.approx(float(decision.reward[0]))


def test_reset_with_a_seed_begins_the_same_again():
    env = UnityToGymWrapper(lambda seed: alone(Chase, seed=seed))
    one, other, again = (env.reset(seed=seed)[0] for seed in (3, 4, 3))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_an_environment_that_runs_says_that_its_seed_stays(caplog):
    UnityToGymWrapper(alone(Chase)).reset(seed=3)
    assert "cannot change" in caplog.text


def test_masks_keep_samples_allowed():
    env = UnityToGymWrapper(alone(Forbidden))
    _, info = env.reset()
    for _ in range(60):
        action = env.action_space.sample(mask=info["action_mask"])
        *_, terminated, truncated, info = env.step(action)  # the toy raises on a forbidden one
        if terminated or truncated:
            _, info = env.reset()


def test_hybrid_actions_are_a_tuple():
    env = UnityToGymWrapper(alone(Both))
    assert isinstance(env.action_space, spaces.Tuple)
    env.reset()
    _, reward, *_ = env.step((np.zeros(1, np.float32), np.int64(1)))
    assert np.isfinite(reward)


def test_images_as_bytes_and_as_a_picture():
    env = UnityToGymWrapper(alone(Quadrant), uint8_visual=True)
    obs, _ = env.reset()
    assert obs.dtype == np.uint8
    assert obs.max() == 255
    assert env.render().shape == (20, 20, 3)


def test_old_interface():
    env = UnityToOldGymWrapper(alone(Chase))
    assert env.reset().shape == (4,)
    obs, _, done, info = env.step(np.zeros(2, np.float32))
    assert (obs.shape, done) == ((4,), False)
    assert len(info["step"]) == 1


def test_gymnasium_runs_several_side_by_side():
    made = [lambda seed=seed: UnityToGymWrapper(alone(Chase, seed=seed)) for seed in (1, 2)]
    envs = SyncVectorEnv(made)
    obs, _ = envs.reset()
    assert obs.shape == (2, 4)
    envs.close()


def test_several_agents_or_behaviors_are_refused_by_gymnasiums_wrapper():
    with pytest.raises(UnityGymException, match=r"one Agent .* 3 were detected"):
        UnityToGymWrapper(InProcessEnvironment(Chase(n_agents=3)))
    with pytest.raises(UnityGymException, match="one behavior"):
        UnityToGymWrapper(InProcessEnvironment(Crowd()))


def test_agents_that_end_stay_away_until_reset():
    env = UnityParallelEnv(InProcessEnvironment(Chase(n_agents=2)))
    env.reset()
    agents = list(env.agents)
    for _ in range(Chase.length):
        obs, _, terminations, truncations, infos = env.step({})
        assert set(obs) == set(truncations) == set(terminations) == set(infos)
    assert env.agents == []
    assert truncations == dict.fromkeys(agents, True)
    obs, _ = env.reset()
    assert list(obs) == agents


def test_agents_that_come_and_go_are_carried():
    env = UnityParallelEnv(InProcessEnvironment(Crowd(seed=2)))
    env.reset()
    seen = set(env.agents)
    for _ in range(30):
        before = set(env.agents)
        obs, rewards, terminations, truncations, infos = env.step({})
        assert before <= set(obs) == set(rewards) == set(infos)
        assert set(terminations) == set(truncations) == set(obs)
        seen |= set(env.agents)
    assert len(seen) > 20
    assert set(env.possible_agents) >= seen


def test_actions_outside_of_their_space_are_refused():
    env = UnityParallelEnv(InProcessEnvironment(Chase(n_agents=2)))
    env.reset()
    with pytest.raises(UnityPettingZooException, match="Invalid action"):
        env.step({env.agents[0]: np.full(2, 3.0, np.float32)})


def test_step_before_reset_is_refused():
    env = UnityParallelEnv(InProcessEnvironment(Chase(n_agents=2)))
    env.close()
    with pytest.raises(UnityPettingZooException, match="You must reset"):
        env.step({})


def test_low_level_api_and_wrappers_need_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import pipeline.envs.unity, pipeline.envs.gym_wrapper, pipeline.envs.pettingzoo_wrapper\n"
        "import pipeline.envs.side_channels, pipeline.protocol.demo\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)  # noqa: S603  # stands above
