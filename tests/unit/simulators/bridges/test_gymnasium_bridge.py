import gymnasium
import numpy as np
import pytest
from bridge_toys import wire_of
from gymnasium import spaces

from pipeline.core.specs import ActionTuple
from pipeline.errors import SettingsError
from pipeline.seeding import derive
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.batches import Batch, Codec
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator


def only(steps):
    ((_, behavior_steps),) = steps.items()
    return behavior_steps


def stepped(simulator, continuous=None, discrete=None):
    (name,) = simulator.behavior_specs
    return only(simulator.step({name: ActionTuple(continuous, discrete)}))


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_copies_in_the_gymnasium_bridge_give_the_same_steps_as_separate_environments(name):
    simulator = GymnasiumSimulator(id=name, n_agents=3, seed=7)
    envs = [gymnasium.make(name) for _ in range(3)]
    seen = [env.reset(seed=derive(7, "gymnasium", k))[0] for k, env in enumerate(envs)]
    decisions, _ = only(simulator.reset())
    assert decisions.action_mask is None
    n_ended = 0
    for _ in range(250):
        assert np.array_equal(decisions.obs[0], np.float32(seen))
        actions = [env.action_space.sample() for env in envs]
        wires = [wire_of(env.action_space, a) for env, a in zip(envs, actions, strict=True)]
        decisions, terminals = stepped(
            simulator,
            np.array([c for c, _ in wires], dtype=np.float32).reshape(3, -1),
            np.array([d for _, d in wires], dtype=np.int32).reshape(3, -1),
        )
        for k, env in enumerate(envs):
            seen[k], reward, terminated, truncated, _ = env.step(actions[k])
            if terminated or truncated:
                n_ended += 1
                last = terminals[k]
                assert np.array_equal(last.obs[0], np.float32(seen[k]))
                assert last.interrupted == (not terminated)
                assert last.reward == pytest.approx(reward, rel=1e-6)
                assert decisions[k].reward == 0.0
                seen[k], _ = env.reset()
            else:
                assert k not in terminals
                assert decisions[k].reward == pytest.approx(reward, rel=1e-6)
    assert n_ended >= 3
    simulator.close()


class Lane(gymnasium.Env):
    """Has given ends, a mask by its number, and a record of the arguments of each reset.

    All observations are in one array, which each step overwrites.
    """

    observation_space = spaces.Box(-1e3, 1e3, (1,))
    action_space = spaces.Discrete(3)

    def __init__(self, number, *ends) -> None:
        self.number, self.ends, self.resets, self.actions = number, list(ends), [], []
        self.age, self.obs = 0, np.zeros(1, np.float32)

    def _seen(self):
        self.obs[0] = 10.0 * self.number + self.age
        return self.obs, {"action_mask": np.arange(3) != (self.number + self.age) % 3}

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        self.age = 0
        return self._seen()

    def step(self, action):
        self.actions.append(int(action))
        self.age += 1
        obs, info = self._seen()
        over, cut = self.ends.pop(0) if self.ends else (False, False)
        return obs, float(self.number + 1), over, cut, info

    def render(self):
        return np.full((2, 2, 3), self.number, np.uint8)


def test_episodes_of_the_copies_of_a_gymnasium_environment_end_and_begin_independently():
    over, cut, both, neither = (True, False), (False, True), (True, True), (False, False)
    lanes = [Lane(0, neither, both), Lane(1, cut, over), Lane(2, neither, cut)]
    simulator = GymnasiumSimulator(id=lanes, seed=5)
    (name,) = simulator.behavior_specs
    simulator.reset()
    actions = ActionTuple(np.zeros((3, 0), np.float32), np.array([[0], [1], [2]], np.int32))
    simulator.set_parameter("wind", 2.0)
    decision, terminal = simulator.step({name: actions})[name]
    assert decision.obs[0].ravel().tolist() == [1.0, 10.0, 21.0]
    assert decision.reward.tolist() == [1.0, 0.0, 3.0]
    assert [row.tolist().index(True) for row in decision.action_mask[0]] == [1, 1, 0]
    assert (terminal.agent_id.tolist(), terminal.obs[0].ravel().tolist()) == ([1], [11.0])
    assert (terminal.reward.tolist(), terminal.interrupted.tolist()) == ([2.0], [True])
    decision, terminal = simulator.step({name: actions})[name]
    assert terminal.agent_id.tolist() == [0, 1, 2]
    assert terminal.interrupted.tolist() == [False, False, True]
    assert terminal.obs[0].ravel().tolist() == [2.0, 11.0, 22.0]
    assert decision.obs[0].ravel().tolist() == [0.0, 10.0, 20.0]
    assert decision.reward.tolist() == [0.0] * 3
    assert [lane.actions for lane in lanes] == [[0, 0], [1, 1], [2, 2]]
    seeds = [lane.resets[0][0] for lane in lanes]
    assert len(set(seeds)) == 3
    assert None not in seeds
    # later episodes continue the copy's own generator, and get the parameters
    assert [lane.resets[1:] for lane in lanes] == [[(None, {"wind": 2.0})] * n for n in (1, 2, 1)]
    assert [int(simulator.render(agent)[0, 0, 0]) for agent in range(3)] == [0, 1, 2]


def test_gymnasium_bridge_refuses_a_number_of_actions_that_differs_from_its_number_of_copies():
    simulator = GymnasiumSimulator(id="CartPole-v1", n_agents=2)
    simulator.reset()
    with pytest.raises(ValueError, match="zip"):
        stepped(simulator, discrete=np.zeros((3, 1)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"id": "CartPol-v1"}, r"no environment 'CartPol-v1'; did you mean 'CartPole-v1'\? "),
        ({"id": "CartPole"}, r"no environment 'CartPole'; did you mean .*'CartPole-v1'"),
        ({"id": "CartPole-v7"}, "'CartPole-v1'"),
        ({"id": "no_such_module:CartPole-v1"}, "there is no module 'no_such_module'; install it"),
        ({"id": "CartPole-v1", "kwargs": {"foo": 3}}, "kwargs.*'foo'.*; correct kwargs"),
        ({"id": "CartPole-v1", "kwargs": {"render_mode": "human"}}, "render_mode cannot be set"),
        (
            {"id": "test/Recorder-v0", "kwargs": {"observation_space": spaces.Text(3)}},
            "test/Recorder-v0: the observation 'observation' is a Text space",
        ),
    ],
)
def test_environment_that_cannot_be_made_is_refused_in_one_line(options, said):
    with pytest.raises(SettingsError, match=said) as refused:
        GymnasiumSimulator(**options)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_behavior_is_named_after_the_environment_and_errors_name_missing_packages():
    simulator = GymnasiumSimulator(id="test/Recorder-v0", n_agents=2)
    assert list(simulator.behavior_specs) == ["test-Recorder-v0?team=0"]
    assert naming.behavior_name("ale_py:ALE/Pong-v5") == "ALE-Pong-v5"
    gymnasium.register("test/Broken-v0", entry_point="box3d:Env")
    try:
        said = r"needs is not installed .*'box3d'.*constraints.txt"
        with pytest.raises(SettingsError, match=said):
            GymnasiumSimulator(id="test/Broken-v0")
    finally:
        del gymnasium.registry["test/Broken-v0"]


def test_each_agent_gets_its_own_action_mask_although_earlier_agents_have_none_or_ended():
    codec = Codec(
        spaces.Box(0, 9, (1,)), spaces.MultiDiscrete([2, 3]), where="x", visual="auto", scale=None
    )
    batch = Batch(codec, 5)
    allowed = {2: ([1, 0], [1, 1, 0]), 3: ([0, 1], [0, 1, 1])}
    for agent in (1, 2, 5, 3, 4):
        row = (agent / 2, agent, 0, agent / 4)
        if agent == 5:
            batch.end(np.float32([agent]), True, row)
            continue
        info = {"action_mask": allowed[agent]} if agent in allowed else {}
        batch.decide(np.float32([agent]), info, row)
    decisions, terminals = batch.steps()
    assert decisions.agent_id.tolist() == [1, 2, 3, 4]
    assert decisions.obs[0].ravel().tolist() == [1, 2, 3, 4]
    assert (terminals.agent_id.tolist(), terminals.obs[0].tolist()) == ([5], [[5]])
    first, second = (mask.tolist() for mask in decisions.action_mask)
    assert first == [[False, False], [False, True], [True, False], [False, False]]
    assert second == [[False] * 3, [False, False, True], [True, False, False], [False] * 3]
