"""Each call reaches the right agent of an environment, in the right order."""

from typing import ClassVar

import numpy as np
import pytest
from steps import decision_steps, terminal_steps
from toys import Chase

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.envs.base import SilenceWatch
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.pettingzoo_wrapper import UnityParallelEnv
from pipeline.envs.side_channels import EnvironmentParametersChannel, StateChannel, StatsSideChannel
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import UnityEnvironmentException
from pipeline.simulators import client
from pipeline.wire.channels.parameters import UNIFORM, Sampler
from pipeline.wire.codec.generated.messages import ReceivedMessageProto, UnityMessageProto

NAME = "Toy?team=0"
SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec.create_hybrid(1, [4]))


def test_sampled_parameter_is_set_before_each_reset_and_step_that_reads_the_parameter():
    read = []

    class Reads(Chase):
        def reset(self):
            read.append(self.parameters.get("wind"))
            return super().reset()

        def step(self, actions):
            read.append(self.parameters.get("wind"))
            return super().step(actions)

    env = InProcessEnvironment(Reads(n_agents=1))
    env.set_parameter("wind", Sampler(kind=UNIFORM, values=(1.0, 2.0), seed=3))
    env.reset()
    env.step()
    assert None not in read
    assert len(set(read)) == 2


def test_state_of_an_environment_is_returned_once_and_includes_pending_statistics():
    class Reports(Chase):
        reports: ClassVar = [("score", 0.0, 0)]

        def stats(self):
            reports, self.reports = self.reports, []
            return reports

    env = InProcessEnvironment(Reports(n_agents=1))
    env.reset()
    env.request_state()
    state = env.state_dict()
    assert env.state_dict() is None
    assert env.take_stats()["score"] == [(0.0, 0)]
    env.load_state_dict(state)
    assert env.take_stats()["score"] == [(0.0, 0)]


def test_action_is_applied_to_its_agent_in_one_step_only():
    taken = []

    class Takes(Chase):
        spec = SPEC

        def observe(self):
            return [np.zeros((self.n, 1))]

        def step(self, actions):
            taken.append(actions[NAME])
            return {NAME: (self._decisions(np.zeros(self.n)), terminal_steps([np.zeros((0, 1))]))}

    env = InProcessEnvironment(Takes(n_agents=3))
    env.reset()
    action = ActionTuple(np.array([[0.5]], np.float32), np.array([[3]], np.int32))
    env.set_action_for_agent(NAME, 2, action)
    env.set_action_for_agent(NAME, 1, ActionTuple(-action.continuous, action.discrete - 1))
    env.step()
    env.step()
    assert taken[0].continuous.ravel().tolist() == [0.0, -0.5, 0.5]
    assert taken[0].discrete.ravel().tolist() == [0, 2, 3]
    assert not taken[1].continuous.any()
    assert not taken[1].discrete.any()


class Scripted:
    """An environment that gives `messages` one by one, and records the actions."""

    behavior_specs: ClassVar = {NAME: SPEC}

    def __init__(self, *messages) -> None:
        self.messages, self.at, self.actions = messages, 0, []

    def reset(self):
        self.at = 0

    def step(self):
        self.at += 1

    def get_steps(self, _):
        return self.messages[self.at]

    def set_actions(self, _, action):
        self.actions.append(action)

    def close(self):
        pass


def shown(ids, values, ended=(), **ends):
    """Return decision and terminal steps of these agents; an ended agent observes its id."""
    masks = [np.arange(4)[None] == np.array(ids).reshape(-1, 1)]
    obs = [np.array(values, np.float32).reshape(-1, 1)]
    decision = decision_steps(obs, ids, masks=masks, reward=10.0 + np.array(ids, np.float32))
    return decision, terminal_steps([np.array(ended, np.float32).reshape(-1, 1)], ended, **ends)


def test_pettingzoo_wrapper_gives_each_agent_its_own_observation_mask_reward_and_end():
    one, two, three = (f"{NAME}?agent_id={k}" for k in (1, 2, 3))
    env = Scripted(
        shown([3, 1, 2], [0.3, 0.1, 0.2]),
        shown([2], [0.22]),  # agents 1 and 3 do not ask
        # Agent 1 ends, and its next episode begins in the same message.
        shown([3, 1], [0.33, 0.11], [1], reward=5.0, interrupted=True),
        shown([1, 2], [0.5, 0.6], [3], reward=7.0),
    )
    wrapped = UnityParallelEnv(env, seed=1)
    samples = [wrapped.action_space(agent).sample()[0].item() for agent in (one, two, three)]
    assert len(set(samples)) == 3, "agents draw from streams of their own"
    obs, _ = wrapped.reset()
    act = {
        agent: (np.array([k / 10], np.float32), np.int64(k)) for k, agent in enumerate(obs, start=1)
    }
    assert {agent: round(float(seen["observation"][0]), 2) for agent, seen in obs.items()} == {
        three: 0.3,
        one: 0.1,
        two: 0.2,
    }
    assert obs[three]["action_mask"].tolist() == [1, 1, 1, 0]
    obs, rewards, _, _, infos = wrapped.step(act)
    assert env.actions[0].discrete.ravel().tolist() == [act[a][1] for a in (three, one, two)]
    assert {a: round(float(seen["observation"][0]), 2) for a, seen in obs.items()} == {
        one: 0.1,
        two: 0.22,
        three: 0.3,
    }
    assert rewards == {one: 0.0, two: 12.0, three: 0.0}
    assert {agent: info["asked"] for agent, info in infos.items()} == {
        one: False,
        two: True,
        three: False,
    }
    obs, rewards, terminations, truncations, _ = wrapped.step({})
    assert (terminations[one], truncations[one], rewards[one]) == (False, True, 5.0)
    assert float(obs[one]["observation"][0]) == 1.0, "of its end, not of its next episode"
    assert round(float(obs[two]["observation"][0]), 2) == 0.22, "the last it had"
    assert wrapped.agents == [two, three]
    obs, rewards, terminations, truncations, _ = wrapped.step({one: act[one], three: act[three]})
    assert env.actions[-1].discrete.ravel().tolist() == [act[three][1], 0], "1 has ended"
    assert (terminations, truncations) == ({two: False, three: True}, {two: False, three: False})
    assert rewards == {two: 12.0, three: 7.0}
    assert wrapped.agents == [two]


class Pair:
    """A behavior with continuous actions, and, from the second message on, one with discrete."""

    behavior_specs: ClassVar = {
        "A": BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ())),
        "B": BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(0, (3,))),
    }
    messages: ClassVar = [{"A": [1, 2]}, {"B": [7, 8, 9], "A": [2]}, {"B": [8]}, {"A": [1, 2]}]

    def __init__(self) -> None:
        self.at, self.n_resets, self.told, self.taken = 0, 0, [], []
        self.is_closed = False

    def reset(self):
        self.n_resets += 1
        self.at = 0
        return self._shown()

    def step(self, actions):
        taken = {name: action for name, action in actions.items() if len(action.continuous)}
        self.taken.append(
            {name: [*a.continuous.ravel(), *a.discrete.ravel()] for name, a in taken.items()}
        )
        self.at += 1
        return self._shown()

    def _shown(self):
        return {
            name: (
                decision_steps([np.array(ids, np.float32)[:, None] + 10 * self.at], ids),
                terminal_steps([np.zeros((0, 1))]),
            )
            for name, ids in self.messages[self.at].items()
        }

    def stats(self):
        return [("at", float(self.at), 1)]

    def set_parameter(self, name, value):
        self.told.append((name, value))

    def get_state(self):
        return {"at": self.at, "told": [list(pair) for pair in self.told]}

    def set_state(self, state):
        self.at = state["at"]

    def close(self):
        self.is_closed = True


class Wire:
    """The server of a conversation with a simulator in this process."""

    port, has_greeted = 5004, True

    def __init__(self, simulator) -> None:
        self.session = client.Session(simulator)
        self.calls = [
            client._greeting(),
            UnityMessageProto(header={"status": 200}).SerializeToString(),
        ]

    def receive(self, *_):
        return ReceivedMessageProto.FromString(self.calls.pop(0))

    def reply(self, content):
        message = ReceivedMessageProto.FromString(content)
        if len(self.calls) == 1:
            self.greeting = UnityMessageProto.FromString(content).unity_input
            return
        command = message.unity_input.rl_input
        self.session._receive(command.side_channel)
        self.calls.append(self.session._advance(command))

    def release(self, _):
        pass


def connected(simulator, **options):
    channels = [EnvironmentParametersChannel(), StatsSideChannel(), StateChannel()]
    return UnityEnvironment(None, server=Wire(simulator), side_channels=channels, **options)


def seen(env):
    """Return the observation of each agent, by behavior and agent."""
    return {
        name: {
            agent: float(env.get_steps(name)[0][agent].obs[0][0])
            for agent in env.get_steps(name)[0]
        }
        for name in env.behavior_specs
    }


@pytest.mark.parametrize("in_process", [False, True])
def test_agents_and_actions_of_two_behaviors_are_kept_apart(in_process):
    pair = Pair()
    env = InProcessEnvironment(pair) if in_process else connected(pair, seed=77, num_areas=3)
    if not in_process:
        start = env._server.greeting.rl_initialization_input
        assert (start.seed, start.num_areas) == (77, 3)
    assert seen(env) == {}
    env.step()  # the first step is a reset
    assert pair.taken == []
    assert seen(env) == {"A": {1: 1.0, 2: 2.0}}
    env.set_actions("A", ActionTuple(np.array([[0.5], [-0.5]], np.float32)))
    env.step()
    assert seen(env) == {"A": {2: 12.0}, "B": {7: 17.0, 8: 18.0, 9: 19.0}}
    env.set_actions("B", ActionTuple(discrete=np.array([[1], [2], [0]], np.int32)))
    env.set_action_for_agent("A", 2, ActionTuple(np.array([[0.25]], np.float32)))
    env.step()
    assert seen(env) == {"A": {}, "B": {8: 28.0}}
    env.set_action_for_agent("B", 8, ActionTuple(discrete=np.array([[2]], np.int32)))
    env.step()
    assert seen(env) == {"A": {1: 31.0, 2: 32.0}, "B": {}}
    assert pair.taken == [{"A": [0.5, -0.5]}, {"A": [0.25], "B": [1, 2, 0]}, {"B": [2]}]
    ats = [(float(k), 1) for k in range(4)]
    assert env.take_stats() == {"at": ats[-1:] if in_process else ats}
    assert env.take_stats() == ({"at": ats[-1:]} if in_process else {})
    env.set_actions("A", ActionTuple(np.ones((2, 1), np.float32)))
    env.reset()
    env.set_parameter("wind", 2.5)
    env.set_action_for_agent("A", 2, ActionTuple(np.array([[0.25]], np.float32)))
    env.step()
    assert pair.taken[-1] == {"A": [0.0, 0.25]}, "a reset forgets what was set"
    assert pair.told == [("wind", 2.5)]
    env.close()
    assert pair.is_closed is in_process
    with pytest.raises(UnityEnvironmentException, match="No Unity environment is loaded"):
        env.reset()


@pytest.mark.parametrize("in_process", [False, True])
def test_restored_environment_drops_actions_that_were_set_and_begins_no_episode(in_process):
    pairs = Pair(), Pair()
    first, second = (InProcessEnvironment(p) if in_process else connected(p) for p in pairs)
    first.reset()
    first.step()
    first.take_stats()
    first.set_parameter("wind", 2.0)
    first.request_state()
    first.step()
    state = first.state_dict()
    assert first.state_dict() is None
    second.reset()
    second.take_stats()
    second.set_actions("A", ActionTuple(np.ones((2, 1), np.float32)))
    second.load_state_dict(state)
    assert (pairs[1].at, pairs[1].n_resets) == (1, 1)
    assert seen(second) == {"A": {2: 12.0}, "B": {7: 17.0, 8: 18.0, 9: 19.0}}
    second.step()
    assert pairs[1].taken == [{"A": [0.0], "B": [0, 0, 0]}]
    assert seen(second) == seen(first) == {"A": {}, "B": {8: 28.0}}
    second.reset()
    assert (pairs[1].at, pairs[1].n_resets) == (0, 2)
    for env in (first, second):
        env.close()


def test_silence_warning_counts_only_the_time_that_the_trainer_has_waited_for_a_decision(caplog):
    now = [0.0]
    watch = SilenceWatch("Game", lambda: "it is quiet", clock=lambda: now[0])

    def lines(seconds, *, waits=True):
        (watch.begin_wait if waits else watch.end_wait)()
        now[0] += seconds
        watch.check()
        found = [record.args[:3] for record in caplog.records]
        caplog.clear()
        return found

    for _ in range(2):  # a second silence is measured like the first
        watch.count()
        assert lines(29) == []
        assert lines(500, waits=False) == [], "the trainer was at work, and did not wait"
        assert lines(1) == [("Game", 1, 30.0)]
        assert lines(269) == []
        assert lines(1) == [("Game", 1, 300.0)]
        watch.end()
        assert not watch.is_on
