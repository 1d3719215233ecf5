"""Restarts, states and specifications of the second of several workers, also in later steps."""

from __future__ import annotations

import pytest
from test_worker_composition import NAME, OFTEN, SPEC, Halves, Worker, relaunching

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.envs.workers import WorkerSet
from pipeline.errors import UnityObservationException, UnityTimeOutException


@pytest.mark.parametrize(
    ("relaunch", "asked"), [(None, ()), (lambda *_: None, ("state",))], ids=["never", "again"]
)
def test_states_of_workers_are_requested_after_a_reset_if_workers_may_be_restarted(relaunch, asked):
    order = []

    class Noting(Halves):
        def _note(self, call):
            order.append((self.number, call))

        def request_state(self):
            order.append((self.number, "state"))

    WorkerSet([Noting(0), Noting(1)], relaunch=relaunch, restarts=OFTEN).reset()
    calls = ("reset send", "reset wait", *asked)
    assert order == [(number, call) for call in calls for number in (0, 1)]


@pytest.mark.parametrize("fails", ["reset send", "reset wait", "send", "wait"])
def test_worker_restarted_during_a_step_takes_part_in_the_next_step_and_reset(fails):
    envs = [Halves(0), Halves(1, fails=[fails])]
    relaunch, _ = relaunching(new := Halves(10))
    workers = WorkerSet(envs, relaunch=relaunch, restarts=OFTEN)
    workers.reset()
    if "reset" not in fails:
        workers.step()
    assert [call for call in new.calls if call != "state"] == ["reset"]
    new.calls.clear()
    workers.step()
    workers.reset()
    workers.step()
    assert new.calls == ["send", "wait", "reset send", "reset wait", "state", "send", "wait"]


def test_state_refusal_names_the_first_worker_that_cannot_return_a_state():
    envs = [Worker(0), Worker(1), Worker(2)]
    kind = type("Gives", (Worker,), {"state_refusal": None})
    envs[0] = kind(0)
    assert WorkerSet(envs).state_refusal == "worker 1: Worker has no state_dict"
    assert WorkerSet([kind(0), object(), Worker(2)]).state_refusal.startswith("worker 1: ")
    assert WorkerSet([kind(0), kind(1)]).state_refusal is None


@pytest.mark.parametrize(("gives", "is_begun_again"), [(True, True), (False, False)])
def test_run_that_is_stopping_restarts_a_worker_only_if_the_worker_can_continue_its_episodes(
    gives, is_begun_again
):
    kinds = [type("Kind", (Worker,), {"state_refusal": None if g else "no"}) for g in (gives, True)]
    envs = [kinds[1](0), kinds[0](1, fails=["step"]), kinds[1](2)]
    relaunch, asked = relaunching(Worker(10, goes_on=True))
    workers = WorkerSet(envs, relaunch=relaunch, restarts=OFTEN)
    workers.reset()
    workers.should_stop = lambda: True
    if is_begun_again:
        workers.step()
    else:
        with pytest.raises(UnityTimeOutException, match=r"^no answer$"):
            workers.step()
    assert bool(asked) is is_begun_again


def test_worker_that_cannot_continue_begins_no_new_episode_while_the_run_is_stopping():
    kind = type("Kind", (Worker,), {"state_refusal": None})
    relaunch, _ = relaunching(new := Worker(10))
    workers = WorkerSet([kind(0), kind(1, fails=["step"])], relaunch=relaunch, restarts=OFTEN)
    workers.reset()
    workers.should_stop = lambda: True
    with pytest.raises(Exception, match="cannot continue from its last step: it keeps no state"):
        workers.step()
    assert "reset" not in new.calls


def test_restarted_worker_must_have_the_same_behavior_specification_as_before_its_restart():
    other = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec.create_hybrid(1, [4]))
    kind = type("Other", (Worker,), {"behavior_specs": {NAME: other}})
    relaunch, _ = relaunching(kind(10))
    workers = WorkerSet([Worker(0, fails=["step"])], relaunch=relaunch, restarts=OFTEN)
    workers.reset()
    assert workers.behavior_specs == {NAME: SPEC}
    workers.step()  # no other worker has the behavior
    with pytest.raises(UnityObservationException, match="worker 0"):
        _ = workers.behavior_specs


def test_behavior_that_the_second_worker_announces_first_is_known_for_every_worker():
    wide = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(2, ()))

    class Late(Worker):
        behavior_specs = {NAME: SPEC}  # noqa: RUF012  # changed below

    envs = [Late(0), Late(1), Late(2)]
    workers = WorkerSet(envs)
    assert list(workers.behavior_specs) == [NAME]
    envs[1].behavior_specs = {NAME: SPEC, "Late": wide}
    assert workers.behavior_specs == {NAME: SPEC, "Late": wide}
    for name, shape in ((NAME, (0, 1)), ("Late", (0, 3)), (NAME, (0, 1))):
        steps = workers.get_steps(name, [2] if name == NAME else [0])
        assert steps[0][0].obs[0].shape == steps[1][0].obs[0].shape == shape
