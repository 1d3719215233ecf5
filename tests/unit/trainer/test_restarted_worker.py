"""What a learner keeps and drops when one of its workers is started again."""

from __future__ import annotations

import numpy as np
import pytest
from steps import take_turn
from toys import Chase

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import UnityTimeOutException

NAME = "Toy?team=0"


class Long(Chase):
    length = 1000


class FailsAt(InProcessEnvironment):
    def __init__(self, simulator, at) -> None:
        super().__init__(simulator)
        self.left = at

    def step(self):
        self.left -= 1
        if self.left == 0:
            raise UnityTimeOutException("no answer")
        super().step()


@pytest.mark.parametrize("memory", [None, {"sequence_length": 4, "memory_size": 8}])
def test_only_the_restarted_workers_open_trajectories_are_dropped(make_learner, memory):
    network = {"hidden_units": 8, "num_layers": 1, "memory": memory}
    envs = [
        InProcessEnvironment(Long(seed=1, n_agents=2)),
        FailsAt(Long(seed=2, n_agents=3), at=6),
        InProcessEnvironment(Long(seed=3, n_agents=2)),
    ]
    relaunched = Long(seed=9, n_agents=3)
    with WorkerSet(envs, relaunch=lambda *_: InProcessEnvironment(relaunched)) as workers:
        workers.reset()
        learner = make_learner(
            Chase.spec, time_horizon=8, max_steps=100_000, network_settings=network
        )
        for _ in range(14):
            steps = workers.get_steps(NAME)
            decided = take_turn(learner, steps, team=NAME)
            workers.set_actions(NAME, decided.actions)
            workers.step()
            for worker in workers.take_restarted():
                assert worker == 1
                learner.drop_unfinished(worker)
                begun = relaunched.observe()[0].astype(np.float32)
                if learner.memories is not None:
                    taken_slots = learner.slots.state_dict()["taken"]
                    live = {slot for entry in taken_slots for slot in entry["slots"].tolist()}
                    free = sorted(set(range(learner.slots.n_slots)) - live)
                    assert len(free) == 3
                    assert not learner.memories[free].any()
                    assert learner.memories[sorted(live)].any()
    assert learner.slots.n_slots == 7
    # six decisions of worker 1 are lost with its process, the eight after that are a trajectory
    closed = learner.trajectories.rollout()
    assert closed.lengths.tolist() == [8] * 4
    rows = closed.obs[0].reshape(-1, 8, 4)
    firsts = {tuple(first) for first in rows[:, 0].tolist()}
    assert {tuple(first) for first in begun.tolist()}.isdisjoint(firsts)  # one step short of 8
    steps = learner.step
    learner.absorb(learner.receive(workers.get_steps(NAME), team=NAME))
    assert learner.step == steps + 3 * 8
    rows = learner.trajectories.rollout().obs[0].reshape(-1, 8, 4)
    assert {tuple(f) for f in begun.tolist()} <= {tuple(first) for first in rows[:, 0].tolist()}
