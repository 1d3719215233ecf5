"""Each call reaches the right worker and agent, with the right seed, in the right order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from steps import decision_steps, terminal_steps
from toys import Chase

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.envs import workers
from pipeline.envs.base import BaseEnv, SilenceWatch
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.pettingzoo_wrapper import UnityParallelEnv
from pipeline.envs.side_channels import EnvironmentParametersChannel, StateChannel, StatsSideChannel
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import WorkerSet, launch_workers
from pipeline.errors import UnityTimeOutException
from pipeline.settings.trainer.schema import EnvironmentSettings
from pipeline.simulators import client
from pipeline.wire.channels.parameters import UNIFORM, Sampler
from pipeline.wire.codec.generated.messages import ReceivedMessageProto, UnityMessageProto

NAME = "Toy?team=0"
SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec.create_hybrid(1, [4]))
OFTEN = EnvironmentSettings(restarts_rate_limit_n=-1)


class Worker(BaseEnv):
    """An environment that records its calls, observes its number, and fails at calls in `fails`."""

    codec_seconds = 0.0
    is_known_from_start = False

    def __init__(self, number, *, fails=(), goes_on=None, takes=True, has_state=True) -> None:
        self.number, self.fails, self.goes_on = number, list(fails), goes_on
        self.takes, self.has_state = takes, has_state
        self.calls: list[object] = []
        self.codec_seconds = float(number)

    def _note(self, call):
        self.calls.append(call)
        if call in self.fails:
            self.fails.remove(call)
            raise UnityTimeOutException("no answer")

    def step(self):
        self._note("step")

    def reset(self):
        self._note("reset")

    def close(self):
        self._note("close")

    @property
    def behavior_specs(self):
        return {NAME: SPEC}

    def get_steps(self, _):
        return decision_steps([[[self.number]]]), terminal_steps([np.zeros((0, 1))])

    def set_actions(self, _, action):
        self.calls.append(float(action.continuous[0, 0]))

    def set_action_for_agent(self, *_):
        raise AssertionError

    def set_parameter(self, name, value):
        self.calls.append((name, value))
        return self.takes

    def take_stats(self):
        return {"number": [(float(self.number), 0)]}

    def go_on_from(self, failed):
        if self.goes_on is None:
            raise ValueError("it keeps no state")
        self.calls.append(("goes on from", failed.number))
        if isinstance(self.goes_on, Exception):
            raise self.goes_on

    def request_state(self):
        self.calls.append("state")

    def state_dict(self):
        return {"number": self.number} if self.has_state else None

    def load_state_dict(self, state):
        self.calls.append(state["number"])


class Halves(Worker):
    """A `Worker` whose steps and resets have two halves, as in another process."""

    def step_send(self):
        self._note("send")

    def step_wait(self):
        self._note("wait")

    def reset_send(self):
        self._note("reset send")

    def reset_wait(self):
        self._note("reset wait")


def relaunching(*new):
    """Return a `relaunch` function that returns `new` one by one, and a list of its arguments."""
    waiting, asked = list(new), []

    def relaunch(worker, number):
        asked.append((worker, number))
        return waiting.pop(0)

    return relaunch, asked


def test_restarted_worker_gets_the_latest_parameters_and_reports_its_own_steps_and_statistics():
    envs = [Worker(1), Worker(2, fails=["step"]), Worker(3)]
    new, newer = Worker(20, fails=["step"]), Worker(200)
    relaunch, asked = relaunching(new, newer)
    workers = WorkerSet(envs, relaunch=relaunch, restarts=OFTEN)
    workers.set_parameter("wind", 2.5)
    workers.set_parameter("pay", 1.0)
    workers.set_parameter("wind", 3.5)
    workers.reset()
    workers.step()
    # The new environment gets the latest parameters before its first episode.
    assert new.calls == [("wind", 3.5), ("pay", 1.0), "reset"]
    assert workers.take_restarted() == [1]
    workers.set_parameter("pay", 4.0)
    assert (envs[1].calls[-1], new.calls[-1]) == ("step", ("pay", 4.0))
    assert [stats["number"][0][0] for stats in workers.take_stats()] == [1.0, 20.0, 3.0]
    workers.step()
    assert newer.calls == [("wind", 3.5), ("pay", 4.0), "reset"]
    assert asked == [(1, 1), (1, 2)]
    assert workers.take_restarted() == [1]
    assert workers.take_restarted() == []
    assert workers.codec_seconds == 1 + 2 + 20 + 200 + 3
    assert [float(d.obs[0][0, 0]) for d, _ in workers.get_steps(NAME)] == [1.0, 200.0, 3.0]


@pytest.mark.parametrize(
    ("known", "goes_on", "asked", "restarted"),
    [
        (True, True, [(1, 0)], []),
        (False, True, [(1, 1)], []),
        (True, None, [(1, 0)], [1]),
        (True, UnityTimeOutException("again"), [(1, 0), (1, 1)], [1]),
        (False, UnityTimeOutException("again"), [(1, 1), (1, 1)], [1]),
    ],
)
def test_replayed_worker_keeps_its_seed_and_a_reset_worker_is_reported(
    known, goes_on, asked, restarted
):
    failing = Worker(2, fails=["step"])
    failing.is_known_from_start = known
    new = Worker(20, goes_on=goes_on)
    relaunch, calls = relaunching(new, Worker(200))
    workers = WorkerSet([Worker(1), failing], relaunch=relaunch, restarts=OFTEN)
    workers.set_parameter("wind", 2.5)
    workers.reset()
    workers.step()
    assert calls == asked
    assert workers.take_restarted() == restarted
    if goes_on is True:
        assert new.calls == [("goes on from", 2)]
    else:
        assert workers.envs[1].calls[-2:] == [("wind", 2.5), "reset"]


def test_only_workers_that_fail_in_a_step_are_restarted():
    envs = [Worker(0, fails=["step"]), Worker(1), Worker(2, fails=["step"])]
    relaunch, asked = relaunching(Worker(10), Worker(12))
    workers = WorkerSet(envs, relaunch=relaunch, restarts=EnvironmentSettings())
    workers.reset()
    workers.step()
    assert asked == [(0, 1), (2, 1)]  # restarts are numbered and limited per worker
    assert workers.take_restarted() == [0, 2]
    assert [env.number for env in workers.envs] == [10, 1, 12]


def test_worker_restarted_in_the_first_half_of_a_step_skips_only_its_own_second_half():
    envs = [Halves(k, fails=["send"] if k == 0 else []) for k in range(4)]
    relaunch, _ = relaunching(new := Halves(10))
    workers = WorkerSet(envs, relaunch=relaunch, restarts=OFTEN)
    workers.reset()
    first, second = workers.groups
    for group in (first, second):
        workers.step_send(group)
    for group in (second, first):
        workers.step_wait(group)
    assert new.calls == ["reset"]
    assert [env.calls[-2:] for env in envs[1:]] == [["send", "wait"]] * 3
    workers.step()
    assert new.calls == ["reset", "send", "wait"]


def test_each_worker_has_its_own_steps_actions_and_state():
    envs = [Halves(k) for k in range(3)]
    workers = WorkerSet(envs)
    (first, second) = workers.groups
    shown = [decision.obs[0].ravel().tolist() for decision, _ in workers.get_steps(NAME, second)]
    assert shown == [[], [1.0], [2.0]]
    actions = [
        ActionTuple(np.array([[10.0 + k]], np.float32), np.zeros((1, 1), np.int32))
        for k in range(3)
    ]
    workers.set_actions(NAME, actions, second)
    assert [env.calls for env in envs] == [[], [11.0], [12.0]]
    workers.set_actions(NAME, actions, first)
    assert [env.calls for env in envs] == [[10.0], [11.0], [12.0]]
    assert workers.state_dict() == [{"number": k} for k in range(3)]
    workers.load_state_dict([{"number": 100 + k} for k in range(3)])
    assert [env.calls[-1] for env in envs] == [100, 101, 102]
    envs[1].has_state = False
    assert workers.state_dict() is None
    assert workers.set_parameter("wind", 1.0)
    envs[1].takes = False
    assert not workers.set_parameter("wind", 2.0)
    assert envs[2].calls[-1] == ("wind", 2.0), "those after it are sent it, too"


class Launched(Worker):
    """A replacement of `UnityEnvironment` that records its arguments."""

    made: list[SimpleNamespace]

    def __init__(self, file_name, *, worker_id=0, seed=0, side_channels=(), **options) -> None:
        super().__init__(worker_id)
        self.file_name, self.seed, self.channels, self.options = (
            file_name,
            seed,
            side_channels,
            options,
        )
        type(self).made.append(self)

    def connect(self):
        self.calls.append("connect")


def test_every_started_or_restarted_process_gets_its_worker_number_and_a_new_seed(monkeypatch):
    Launched.made = []
    monkeypatch.setattr(workers, "UnityEnvironment", Launched)
    # The second of three learners, each with two workers.
    started = launch_workers(
        "game",
        2,
        seed=100,
        first=2,
        n_all=6,
        side_channels=lambda: [object()],
        restarts=OFTEN,
        num_areas=3,
    )
    for _ in range(2):
        started.envs[1].fails = ["step"]
        started.step()
    started.envs[0].fails = ["step"]
    started.step()
    made = Launched.made
    assert [(env.number, env.seed) for env in made] == [
        (2, 102),
        (3, 103),
        (3, 103 + 6),
        (3, 103 + 12),
        (2, 102 + 6),
    ]
    assert [env.options["connect"] for env in made] == [False, False, True, True, True]
    assert [env.calls[0] for env in made[:2]] == ["connect"] * 2
    assert {env.options["num_areas"] for env in made} == {3}
    assert len({id(env.channels[0]) for env in made}) == 5


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
    assert (terminations, truncations) == (
        {two: False, three: True},
        {two: False, three: False},
    )
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
        pass


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


def test_agents_and_actions_of_two_behaviors_are_kept_apart_over_the_protocol():
    pair = Pair()
    env = connected(pair, seed=77, num_areas=3)
    start = env._server.greeting.rl_initialization_input
    assert (start.seed, start.num_areas) == (77, 3)
    env.reset()
    assert seen(env) == {"A": {1: 1.0, 2: 2.0}}
    env.set_actions("A", ActionTuple(np.array([[0.5], [-0.5]], np.float32)))
    env.step()
    assert seen(env) == {"A": {2: 12.0}, "B": {7: 17.0, 8: 18.0, 9: 19.0}}
    env.set_actions("B", ActionTuple(discrete=np.array([[1], [2], [0]], np.int32)))
    env.set_action_for_agent("A", 2, ActionTuple(np.array([[0.25]], np.float32)))
    env.step()
    assert seen(env) == {"A": {}, "B": {8: 28.0}}
    env.set_actions("B", ActionTuple(discrete=np.array([[2]], np.int32)))
    env.step()
    assert seen(env) == {"A": {1: 31.0, 2: 32.0}, "B": {}}
    assert pair.taken == [{"A": [0.5, -0.5]}, {"A": [0.25], "B": [1, 2, 0]}, {"B": [2]}]
    assert env.take_stats() == {"at": [(float(k), 1) for k in range(4)]}
    assert env.take_stats() == {}
    env.set_actions("A", ActionTuple(np.ones((2, 1), np.float32)))
    env.reset()
    env.step()
    assert pair.taken[-1] == {"A": [0.0, 0.0]}, "a reset forgets what was set"
    env.close()


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
