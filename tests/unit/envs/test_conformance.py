"""Gymnasium's and PettingZoo's checks on the built-in games, in this process and as executables."""

import warnings

import pytest
from gymnasium.utils.env_checker import check_env

from pipeline.envs.gym_wrapper import UnityGymException, UnityToGymWrapper
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.pettingzoo_wrapper import UnityAECEnv, UnityParallelEnv
from pipeline.envs.unity import UnityEnvironment
from pipeline.simulators.registry import NAMES, make

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # pettingzoo warns about its own code
    from pettingzoo.test import api_test, parallel_api_test


MANY = {"couriers": 8, "collector": 3, "tag": 6}
"""Numbers of agents in games with changing agents, hybrid actions, and two behaviors."""
TOGETHER = {"pong": 2, "push_together": 3, "tag": 3}
"""Numbers of agents in one area of the games that a single agent cannot play."""


@pytest.fixture(scope="module")
def executables(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    return {name: packed(name, folder / name) for name in ("balance_ball", "grid_world", *MANY)}


def game(name, **options):
    """Return a function from a seed to a built-in game in this process."""
    return lambda seed: InProcessEnvironment(make(name, seed=seed, **options))


@pytest.fixture
def _any_warning():  # the checks warn about spaces without bounds and about names of agents
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("_any_warning")
@pytest.mark.parametrize("name", NAMES)
def test_simulator_passes_pettingzoo_api_tests(name):
    for wrapper, check in ((UnityParallelEnv, parallel_api_test), (UnityAECEnv, api_test)):
        check(wrapper(game(name), seed=1), num_cycles=200)
        check(wrapper(game(name)(seed=1)), num_cycles=200)


@pytest.mark.usefixtures("_any_warning")
@pytest.mark.parametrize("options", [{}, {"allow_multiple_obs": True, "uint8_visual": True}])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TOGETHER])
def test_simulator_passes_gymnasium_check_env(name, options):
    check_env(UnityToGymWrapper(game(name, n_agents=1), **options), skip_render_check=True)


@pytest.mark.parametrize(("name", "n_agents"), TOGETHER.items())
def test_multi_agent_simulator_is_refused_by_the_gymnasium_wrapper(name, n_agents):
    with pytest.raises(UnityGymException, match=rf"one Agent .* {n_agents} were|one behavior"):
        UnityToGymWrapper(game(name, n_agents=n_agents))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("balance_ball", {}),
        ("grid_world", {}),
        ("grid_world", {"allow_multiple_obs": True, "uint8_visual": True}),
    ],
)
def test_executable_passes_gymnasium_check_env(name, options, executables):
    env = UnityToGymWrapper(executables[name], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check warns about spaces without bounds
        check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n_agents"), {"balance_ball": 3, "grid_world": 3, **MANY}.items())
def test_executable_passes_pettingzoo_api_tests(name, n_agents, executables):
    def make(seed):
        args = ["--num-agents", str(n_agents)]
        return UnityEnvironment(executables[name], seed=seed, additional_args=args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = UnityParallelEnv(make, seed=1)
        assert 0 < len(env.possible_agents) <= n_agents
        parallel_api_test(env, num_cycles=200)
        env.close()
        turns = UnityAECEnv(make, seed=1)
        api_test(turns, num_cycles=200)
        turns.close()
