"""Groups of workers that step in turn: one group computes while the other gets its actions."""

from __future__ import annotations

import numpy as np
import pytest
from in_turn import InTurn
from toys import Chase

from pipeline.envs.base import worker_groups
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet


class Split(InTurn):
    """An environment that logs both halves of its steps: sending and waiting."""

    def __init__(self, number, log):
        super().__init__(Chase(n_agents=2))
        self.number, self.log = number, log

    def step_send(self):
        self.log.append(f"send {self.number}")

    def step_wait(self):
        self.log.append(f"wait {self.number}")
        super().step_wait()

    def reset_send(self):
        self.log.append(f"reset {self.number}")


@pytest.mark.parametrize(
    ("n", "groups"), [(1, [[0]]), (2, [[0], [1]]), (5, [[0, 1], [2, 3, 4]]), (4, [[0, 1], [2, 3]])]
)
def test_workers_are_divided_into_two_groups_in_order(n, groups):
    assert [list(group) for group in worker_groups(n)] == groups
    workers = WorkerSet([InProcessEnvironment(Chase(n_agents=1)) for _ in range(n)])
    assert [list(group) for group in workers.groups] == [list(range(n))], "all in this process"


def test_trainer_waits_for_one_group_of_workers_while_the_other_group_computes_a_step():
    log = []
    workers = WorkerSet([Split(k, log) for k in range(3)])
    workers.reset()
    log.clear()
    first, second = workers.groups
    workers.step_wait(first)  # no step has been sent
    workers.step_send(first)
    workers.step_send(second)
    workers.step_wait(first)
    assert log == ["send 0", "send 1", "send 2", "wait 0"]
    workers.reset()  # first ends the step of the second group
    assert log[4:] == ["wait 1", "wait 2", "reset 0", "reset 1", "reset 2"]


def test_group_of_workers_returns_steps_and_takes_actions_only_of_workers_in_the_group():
    workers = WorkerSet([Split(k, []) for k in range(3)])
    workers.reset()
    (name,) = workers.behavior_specs
    first, second = workers.groups
    assert [len(decision) for decision, _ in workers.get_steps(name, second)] == [0, 2, 2]
    spec = workers.behavior_specs[name].action_spec
    actions = [spec.random_action(n, np.random.default_rng(0)) for n in (2, 0, 0)]
    workers.set_actions(name, actions, first)
    workers.step()
