"""Each call reaches the right worker, also after restarts of failed workers."""

from typing import ClassVar

import numpy as np
import pytest
from steps import decision_steps, terminal_steps
from toys import Chase

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.envs import workers as workers_module
from pipeline.envs.base import BaseEnv, worker_groups
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet, launch_workers
from pipeline.errors import (
    UnityActionException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityObservationException,
    UnityTimeOutException,
)
from pipeline.settings.trainer.schema import EnvironmentSettings

NAME = "Toy?team=0"
SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec.create_hybrid(1, [4]))
WIDE = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(2, ()))
OFTEN = EnvironmentSettings(restarts_rate_limit_n=-1)
NO_ANSWER = UnityTimeOutException("no answer")


class Worker(BaseEnv):
    """An environment that records its calls, observes its number, and fails at calls in `fails`.

    It also adds its calls to `log`, with its number.
    """

    codec_seconds = 0.0
    is_known_from_start = False

    def __init__(self, number, *, fails=(), error=NO_ANSWER, goes_on=None, log=None) -> None:
        self.number, self.fails, self.error, self.goes_on = number, list(fails), error, goes_on
        self.log = [] if log is None else log
        self.takes = self.has_state = True
        self.calls: list[object] = []
        self.codec_seconds = float(number)

    def _note(self, call):
        self.calls.append(call)
        self.log.append((self.number, call))
        if call in self.fails:
            self.fails.remove(call)
            raise self.error

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
            super().go_on_from(failed)
        self.calls.append(("goes on from", failed.number))
        if isinstance(self.goes_on, Exception):
            raise self.goes_on

    def request_state(self):
        self._note("state")

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


def gives_state(kind=Worker, refusal=None):
    return type("Gives", (kind,), {"state_refusal": refusal})


def restarting(envs, *new, limits=OFTEN):
    """Return a set of workers that are replaced by `new` one by one, and all replacements."""
    waiting, asked = list(new), []

    def relaunch(worker, number):
        asked.append((worker, number))
        if isinstance(waiting[0], Exception):
            raise waiting.pop(0)
        return waiting.pop(0)

    workers = WorkerSet(envs, relaunch=relaunch, restarts=limits)
    workers.reset()
    return workers, asked


def played(workers, n_steps):
    for _ in range(n_steps):
        workers.step()


def test_restarted_worker_gets_the_latest_parameters_and_reports_its_own_steps_and_statistics(
    caplog,
):
    envs = [Worker(1), Worker(2, fails=["step"]), Worker(3)]
    new, newer = Worker(20, fails=["step"]), Worker(200)
    workers, asked = restarting(envs, new, newer)
    workers.set_parameter("wind", 2.5)
    workers.set_parameter("pay", 1.0)
    workers.set_parameter("wind", 3.5)
    workers.step()
    # The new environment gets the latest parameters before its first episode.
    assert new.calls == [("wind", 3.5), ("pay", 1.0), "reset"]
    restart, continuation = [record.getMessage() for record in caplog.records]
    assert restart == "Restarting worker[1] after 'no answer' (restart 1)."
    assert continuation.startswith(
        "Worker[1] begins new episodes (Worker keeps no state). Its unfinished episodes"
    )
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
    workers, calls = restarting([Worker(1), failing], new, Worker(200))
    workers.set_parameter("wind", 2.5)
    workers.step()
    assert calls == asked
    assert workers.take_restarted() == restarted
    if goes_on is True:
        assert new.calls == [("goes on from", 2)]
    else:
        assert workers.envs[1].calls[-2:] == [("wind", 2.5), "reset"]


def test_only_workers_that_fail_in_a_step_are_restarted():
    envs = [Worker(0, fails=["step"]), Worker(1), Worker(2, fails=["step"])]
    workers, asked = restarting(envs, Worker(10), Worker(12), limits=EnvironmentSettings())
    workers.step()
    assert asked == [(0, 1), (2, 1)]  # restarts are numbered and limited per worker
    assert workers.take_restarted() == [0, 2]
    assert [env.number for env in workers.envs] == [10, 1, 12]


GONE = UnityCommunicatorStoppedException
FOUR = EnvironmentSettings(max_lifetime_restarts=4, restarts_rate_limit_n=-1)


@pytest.mark.parametrize(
    ("error", "limits", "new", "text"),
    [
        (
            GONE("gone"),
            EnvironmentSettings(),
            [Worker(10, fails=["step"], error=GONE("gone again"))],
            r"Worker 1 exceeded the allowed number of restarts, 1 of 1 in 60 s.*: gone again",
        ),
        (  # a restart that fails counts as a restart
            UnityTimeOutException("hung"),
            FOUR,
            [UnityTimeOutException("did not start")] * 4,
            r"4 of 4 in all .*: did not start",
        ),
        (UnityActionException("wrong shape"), FOUR, [], "wrong shape"),  # a caller's mistake
    ],
)
def test_error_of_a_worker_is_raised_with_a_reason_if_the_restart_budget_is_used_up(
    error, limits, new, text
):
    failing = Worker(1, fails=["step"], error=error)
    workers, asked = restarting([Worker(0), failing], *new, limits=limits)
    with pytest.raises(type(error), match=text):
        played(workers, 2)
    assert asked == [(1, number) for number in range(1, len(new) + 1)]


@pytest.mark.parametrize("fails", ["reset send", "reset wait", "send", "wait"])
def test_worker_restarted_during_a_step_takes_part_in_the_next_step_and_reset(fails):
    new = Halves(10)
    workers, _ = restarting([Halves(0), Halves(1, fails=[fails])], new)
    if "reset" not in fails:
        workers.step()
    assert [call for call in new.calls if call != "state"] == ["reset"]
    new.calls.clear()
    workers.step()
    workers.reset()
    workers.step()
    assert new.calls == ["send", "wait", "reset send", "reset wait", "state", "send", "wait"]


def test_worker_restarted_in_the_first_half_of_a_step_skips_only_its_own_second_half():
    envs = [Halves(k, fails=["send"] if k == 0 else []) for k in range(4)]
    workers, _ = restarting(envs, new := Halves(10))
    first, second = workers.groups
    for group in (first, second):
        workers.step_send(group)
    for group in (second, first):
        workers.step_wait(group)
    assert new.calls == ["reset"]
    assert [env.calls[-2:] for env in envs[1:]] == [["send", "wait"]] * 3


@pytest.mark.parametrize("restarts", [False, True])
def test_states_of_workers_are_requested_after_a_reset_if_workers_may_be_restarted(restarts):
    log = []
    envs = [Halves(k, log=log) for k in (0, 1)]
    if restarts:
        restarting(envs)
    else:
        WorkerSet(envs).reset()
    calls = ("reset send", "reset wait", "state")[: 2 + restarts]
    assert log == [(number, call) for call in calls for number in (0, 1)]


@pytest.mark.parametrize(
    ("refusal", "goes_on", "error"),
    [
        (None, True, None),
        ("no", True, "^no answer$"),
        (None, None, "cannot continue from its last step: Gives keeps no state"),
    ],
)
def test_run_that_is_stopping_restarts_a_worker_only_if_the_worker_can_continue_its_episodes(
    refusal, goes_on, error
):
    gives = gives_state()
    envs = [gives(0), gives_state(refusal=refusal)(1, fails=["step"]), gives(2)]
    new = Worker(10, goes_on=goes_on)
    workers, asked = restarting(envs, new)
    workers.should_stop = lambda: True
    if error is None:
        workers.step()
    else:
        with pytest.raises((UnityTimeOutException, UnityEnvironmentException), match=error):
            workers.step()
    assert bool(asked) is (refusal is None)
    assert "reset" not in new.calls


def test_state_refusal_names_the_first_worker_that_cannot_return_a_state():
    gives = gives_state()
    envs = [gives(0), Worker(1), Worker(2)]
    assert WorkerSet(envs).state_refusal == "worker 1: Worker has no state_dict"
    assert WorkerSet([gives(0), object(), Worker(2)]).state_refusal.startswith("worker 1: ")
    assert WorkerSet([gives(0), gives(1)]).state_refusal is None


class Known(Worker):
    """A worker with the behaviors in `behavior_specs`."""

    behavior_specs: ClassVar = {NAME: SPEC}

    def get_steps(self, name):
        obs = np.full((1, 3 if name == "Late" else 1), self.number)
        return decision_steps([obs]), terminal_steps([obs[:0]])


def test_specification_of_a_behavior_must_be_the_same_in_all_workers_and_after_restarts():
    other = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec.create_hybrid(1, [4]))
    new = Known(10)
    new.behavior_specs = {NAME: other}
    workers, _ = restarting([Worker(0, fails=["step"])], new)
    assert workers.behavior_specs == {NAME: SPEC}
    workers.step()  # no other worker has the behavior
    with pytest.raises(UnityObservationException, match="worker 0"):
        _ = workers.behavior_specs
    new.behavior_specs = {NAME: BehaviorSpec(SPEC.observation_specs, ActionSpec(0, (2,)))}
    said = rf"^behavior {NAME[:3]}.*: worker 1 takes the actions"
    with pytest.raises(UnityObservationException, match=said):
        _ = WorkerSet([Worker(0), new]).behavior_specs


def test_behavior_that_the_second_worker_announces_first_is_known_for_every_worker():
    envs = [Known(0), Known(1), Known(2)]
    workers = WorkerSet(envs)
    assert list(workers.behavior_specs) == [NAME]
    envs[1].behavior_specs = {NAME: SPEC, "Late": WIDE}
    assert workers.behavior_specs == {NAME: SPEC, "Late": WIDE}
    for name, shape in ((NAME, (0, 1)), ("Late", (0, 3)), (NAME, (0, 1))):
        steps = workers.get_steps(name, [2] if name == NAME else [0])
        assert steps[0][0].obs[0].shape == steps[1][0].obs[0].shape == shape
    assert [len(decision) for decision, _ in workers.get_steps("Late")] == [0, 1, 0]
    workers.set_actions("Late", [ActionTuple(np.full((1, 2), k)) for k in (5, 6, 7)])
    assert [env.calls for env in envs] == [[], [6.0], []]
    with pytest.raises(UnityActionException, match=f"'Late', '{NAME[:3]}"):
        workers.get_steps("C")
    with pytest.raises(ValueError, match="shorter"):
        workers.set_actions("Late", [])


def test_each_worker_has_its_own_steps_actions_and_state():
    envs = [Halves(k) for k in range(3)]
    workers = WorkerSet(envs)
    (first, second) = workers.groups
    shown = [decision.obs[0].ravel().tolist() for decision, _ in workers.get_steps(NAME, second)]
    assert shown == [[], [1.0], [2.0]]
    actions = [ActionTuple(np.array([[10.0 + k]]), np.zeros((1, 1))) for k in range(3)]
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


@pytest.mark.parametrize(
    ("n", "groups"), [(1, [[0]]), (2, [[0], [1]]), (5, [[0, 1], [2, 3, 4]]), (4, [[0, 1], [2, 3]])]
)
def test_workers_are_divided_into_two_groups_in_order(n, groups):
    assert [list(group) for group in worker_groups(n)] == groups
    workers = WorkerSet([InProcessEnvironment(Chase(n_agents=1)) for _ in range(n)])
    assert [list(group) for group in workers.groups] == [list(range(n))], "all in this process"


def test_trainer_waits_for_one_group_of_workers_while_the_other_group_computes_a_step():
    log = []
    workers = WorkerSet([Halves(k, log=log) for k in range(3)])
    first, second = workers.groups
    workers.step_wait(first)  # no step has been sent
    workers.step_send(first)
    workers.step_send(second)
    workers.step_wait(first)
    assert log == [(0, "send"), (1, "send"), (2, "send"), (0, "wait")]
    workers.reset()  # first ends the step of the second group
    begun = [(k, half) for half in ("reset send", "reset wait") for k in range(3)]
    assert log[4:] == [(1, "wait"), (2, "wait"), *begun]


def test_all_workers_are_closed_when_closing_one_fails():
    envs = [Worker(0), Worker(1, fails=["close"]), Worker(2)]
    with pytest.raises(UnityTimeOutException, match="no answer"), WorkerSet(envs):
        pass
    assert [env.calls for env in envs] == [["close"]] * 3


class Launched(Worker):
    """A replacement of `UnityEnvironment` that records its arguments."""

    made: ClassVar = []

    def __init__(self, file_name, *, worker_id=0, seed=0, side_channels=(), **options) -> None:
        super().__init__(worker_id)
        self.seed, self.channels, self.options = seed, side_channels, options
        assert file_name == "game"
        self.made.append(self)

    def connect(self):
        self.calls.append("connect")


def test_every_started_or_restarted_process_gets_its_worker_number_and_a_new_seed(monkeypatch):
    monkeypatch.setattr(workers_module, "UnityEnvironment", Launched)
    # The second of three learners, each with two workers.
    options = {"side_channels": lambda: [object()], "restarts": OFTEN, "num_areas": 3}
    started = launch_workers("game", 2, seed=100, first=2, n_all=6, **options)
    for worker in (1, 1, 0):
        started.envs[worker].fails = ["step"]
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
