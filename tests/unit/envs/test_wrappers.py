"""The wrappers for Gymnasium and PettingZoo, over environments without a process."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from test_restarts import Waits
from toys import Both, Chase, Crowd, Forbidden, Quadrant

from pipeline.core.specs import ActionSpec
from pipeline.envs import pettingzoo_wrapper
from pipeline.envs.gym_wrapper import (
    UnityGymException,
    UnityToGymWrapper,
    UnityToOldGymWrapper,
    action_space_of,
)
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.pettingzoo_wrapper import UnityAECEnv, UnityParallelEnv, UnityPettingZooException
from pipeline.errors import UnityEnvironmentException


def alone(toy, **options):
    return InProcessEnvironment(toy(n_agents=1, **options))


def test_wrappers_return_the_rewards_observations_and_episode_ends_of_their_environment(caplog):
    direct = Chase(seed=4, n_agents=1)
    env = UnityToGymWrapper(lambda seed: alone(Chase, seed=seed))
    first_obs, other, obs = (env.reset(seed=seed)[0] for seed in (4, 3, 4))
    assert not np.array_equal(first_obs, other)
    np.testing.assert_array_equal(first_obs, obs)
    ((first, _),) = direct.reset().values()
    np.testing.assert_array_equal(obs, first.obs[0][0])
    rng = np.random.default_rng(0)
    for number in range(1, Chase.length + 1):
        action = rng.uniform(-1, 1, 2).astype(np.float32)
        obs, reward, terminated, truncated, _ = env.step(action)
        assert (terminated, truncated) == (False, number == Chase.length)
        spec_action = direct.spec.action_spec.empty_action(1)
        spec_action.continuous[0] = action
        ((decision, terminal),) = direct.step({"Toy?team=0": spec_action}).values()
        batch = terminal if truncated else decision
        np.testing.assert_array_equal(obs, batch.obs[0][0])
        assert reward == pytest.approx(float(batch.reward[0]))
    with pytest.raises(UnityGymException, match="reset"):
        env.step(action)
    UnityToGymWrapper(alone(Chase)).reset(seed=3)
    assert "cannot change" in caplog.text


def test_gym_wrapper_action_space_samples_only_actions_that_the_mask_allows():
    env = UnityToGymWrapper(alone(Forbidden))
    _, info = env.reset()
    for _ in range(60):
        action = env.action_space.sample(mask=info["action_mask"])
        *_, terminated, truncated, info = env.step(action)  # raises for a forbidden action
        if terminated or truncated:
            _, info = env.reset()


def test_gym_wrapper_takes_hybrid_actions_as_a_tuple():
    env = UnityToGymWrapper(alone(Both))
    assert isinstance(env.action_space, spaces.Tuple)
    env.reset()
    _, reward, *_ = env.step((np.zeros(1, np.float32), np.int64(1)))
    assert np.isfinite(reward)


class Shades(Quadrant):
    """An environment whose image has the values k / 255 for every byte k."""

    def observe(self):
        return [np.arange(1200).reshape(1, 3, 20, 20) % 256 / np.float32(255)]


def test_gym_wrapper_returns_images_as_bytes_and_renders_them():
    env = UnityToGymWrapper(alone(Shades), uint8_visual=True)
    obs, _ = env.reset()
    assert obs.dtype == np.uint8
    assert np.array_equal(obs.ravel(), np.arange(1200) % 256)
    assert np.array_equal(env.render(), np.moveaxis(obs, 0, -1))


def test_old_gym_wrapper_has_the_interface_of_the_old_gym_and_gym_wrappers_can_be_vectorized():
    env = UnityToOldGymWrapper(alone(Chase))
    assert env.reset().shape == (4,)
    obs, _, done, info = env.step(np.zeros(2, np.float32))
    assert (obs.shape, done) == ((4,), False)
    assert len(info["step"]) == 1
    factories = [lambda seed=seed: UnityToGymWrapper(alone(Chase, seed=seed)) for seed in (1, 2)]
    envs = SyncVectorEnv(factories)
    assert envs.reset()[0].shape == (2, 4)
    envs.close()


def test_gym_wrapper_passes_the_error_of_a_with_block_to_the_environment_that_it_closes():
    env = Waits()
    with pytest.raises(ZeroDivisionError), UnityToGymWrapper(env):
        raise ZeroDivisionError
    assert env.left_with == [ZeroDivisionError]
    env = Waits()
    with UnityToGymWrapper(env):
        pass
    assert env.left_with == [None]
    several = Waits(n_agents=3)
    with pytest.raises(UnityGymException, match=r"one Agent .* 3 were detected"):
        UnityToGymWrapper(several)
    assert several.left_with == [UnityGymException]
    with pytest.raises(UnityGymException, match="one behavior"):
        UnityToGymWrapper(InProcessEnvironment(Crowd()))


@pytest.mark.parametrize("wrapper", [UnityParallelEnv, UnityAECEnv])
def test_pettingzoo_possible_agents_are_all_agents_that_appeared_since_the_last_reset(wrapper):
    env = wrapper(InProcessEnvironment(Crowd(seed=2)))  # each agent has another id
    seen = set()
    for _ in range(900):
        env.reset()
        assert set(env.agents) <= set(env.possible_agents)
        assert len(env.possible_agents) < 20
        for agent in env.agents:
            env.action_space(agent), env.observation_space(agent)
        seen |= set(env.agents)
    parallel = env.env if wrapper is UnityAECEnv else env
    assert len(seen) > 900
    assert len(parallel._spaces) < 300


def test_pettingzoo_wrapper_removes_agents_that_have_sent_nothing_for_many_steps(monkeypatch):
    monkeypatch.setattr(pettingzoo_wrapper, "_GONE_AFTER", 20)
    monkeypatch.setattr(pettingzoo_wrapper, "_MIN_AGENTS_TO_SWEEP", 16)
    toy = Crowd(seed=2)
    env = UnityParallelEnv(InProcessEnvironment(toy), seed=1)
    env.reset()
    vanished, ended, seen = set(), set(), set(env.agents)
    for number in range(600):
        before = set(env.agents)
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        obs, rewards, terminations, truncations, infos = env.step(actions)
        over = {agent for agent in obs if terminations[agent] or truncations[agent]}
        assert before <= set(obs) == set(rewards) == set(infos)
        assert set(obs) == set(terminations) == set(truncations)
        seen |= set(obs)
        assert number >= 20 or seen <= set(env.possible_agents), "nobody is gone yet"
        assert set(env.agents) == set(obs) - over
        assert set(env.agents) | over <= set(env.possible_agents)
        assert not over & ended
        vanished |= {agent for agent in over & before if not infos[agent]["asked"]}
        ended |= over
        records = (env.possible_agents, env._last_active, env._left, env._last, env._spaces)
        assert max(map(len, records)) < 120
    assert toy.next_id > 500
    assert len(vanished) > 10
    assert not vanished & set(env.agents)


def test_agents_of_the_next_episode_are_hidden_until_the_pettingzoo_wrapper_is_reset(monkeypatch):
    monkeypatch.setattr(pettingzoo_wrapper, "_GONE_AFTER", 2)
    monkeypatch.setattr(pettingzoo_wrapper, "_MIN_AGENTS_TO_SWEEP", 0)
    env = UnityParallelEnv(InProcessEnvironment(Chase(n_agents=3)))
    env.reset()
    agents = list(env.agents)
    with pytest.raises(UnityPettingZooException, match="Invalid action"):
        env.step({agents[0]: np.full(2, 3.0, np.float32)})
    env.reset()
    for number in range(1, 4 * Chase.length):
        obs, _, terminations, truncations, infos = env.step({})
        assert set(obs) == set(truncations) == set(terminations) == set(infos)
        if number == Chase.length:
            assert truncations == dict.fromkeys(agents, True)
    assert env.agents == []
    assert set(env.possible_agents) == set(agents)
    assert list(env.reset()[0]) == agents


def test_pettingzoo_wrapper_returns_the_same_spaces_after_every_reset():
    env = UnityParallelEnv(lambda seed: InProcessEnvironment(Chase(n_agents=2, seed=seed)), seed=1)
    spaces_of = {agent: env.action_space(agent) for agent in env.possible_agents}
    for seed in (None, 3):
        env.reset(seed=seed)
        assert all(env.action_space(agent) is spaces_of[agent] for agent in env.agents)


def test_pettingzoo_wrapper_returns_new_spaces_after_a_reset_that_makes_a_new_environment():
    toys = iter([Chase, Both])
    env = UnityParallelEnv(lambda seed: InProcessEnvironment(next(toys)(n_agents=1, seed=seed)))
    (agent,) = env.possible_agents
    before = env.action_space(agent)
    env.reset(seed=1)
    assert env.action_space(agent) != before
    env.step({agent: env.action_space(agent).sample()})


class Silent(Chase):
    """An environment in which no agent ever asks for a decision."""

    def reset(self):
        return {}

    def step(self, actions):  # noqa: ARG002  # no agent acts
        return {}


def test_pettingzoo_wrapper_refuses_an_environment_without_decisions_and_a_step_before_reset(
    monkeypatch,
):
    monkeypatch.setattr(pettingzoo_wrapper, "MAX_EMPTY_STEPS", 50)
    with pytest.raises(UnityPettingZooException, match="No agent asked for a decision in 50 steps"):
        UnityParallelEnv(env := InProcessEnvironment(Silent()))
    with pytest.raises(UnityEnvironmentException):  # closed by the failed constructor
        env.reset()
    for close in (False, True):
        wrapped = UnityParallelEnv(InProcessEnvironment(Chase(n_agents=2)))
        if close:
            wrapped.close()
        with pytest.raises(UnityPettingZooException, match="You must reset"):
            wrapped.step({})


def test_sample_of_hybrid_actions_takes_a_mask_of_the_discrete_actions():
    space = action_space_of(ActionSpec(2, (3, 2)))
    mask = (np.array([0, 0, 1], np.int8), np.array([1, 0], np.int8))
    for form in (mask, (None, mask)):
        continuous, discrete = space.sample(form)
        assert continuous.shape == (2,)
        assert discrete.tolist() == [2, 0]
    single = action_space_of(ActionSpec(1, (3,)))
    assert single.sample(np.array([0, 1, 0], np.int8))[1] == 1
    assert single.contains(single.sample())
