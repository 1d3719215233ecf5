"""Which worker, behavior, file or moment an action is about, and what the second of two does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_restarted_worker import NAME, FailsAt, Long
from toys import Corridor

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.settings.schema.trainer import SelfPlaySettings
from pipeline.trainer.checkpoints import manager as manager_module
from pipeline.trainer.checkpoints.manager import CheckpointManager
from pipeline.trainer.curriculum import Lessons
from pipeline.trainer.opponents import SnapshotPool
from pipeline.trainer.self_play import SelfPlay


def test_a_restart_of_one_worker_keeps_the_open_trajectories_of_the_other(quick, make_loop):
    envs = [
        InProcessEnvironment(Long(seed=1, n_agents=2)),
        FailsAt(Long(seed=2, n_agents=3), at=6),
    ]
    new = InProcessEnvironment(Long(seed=9, n_agents=3))
    with WorkerSet(envs, relaunch=lambda *_: new) as workers:
        loop = make_loop(workers, quick())
        loop._begin()
        for _ in range(9):
            loop._step()
            loop._receive()
        # two agents of the first worker have closed eight rows each; of the second nobody has
        assert loop.learners["Toy"].step == 2 * 8
        assert loop.resume_points.interrupted == [0]
        for _ in range(6):
            loop._step()
            loop._receive()
        assert loop.learners["Toy"].step == 2 * 8 + 3 * 8
    assert NAME in loop._learner_of


def player(name, **settings):
    """A stand-in for a learner with self-play, and with a policy of one weight."""
    self_play = SelfPlaySettings(play_against_latest_model_ratio=0.0, **settings)
    policy = torch.nn.Linear(1, 1, bias=False)
    return SimpleNamespace(
        name=name,
        policy=policy,
        past=SnapshotPool(lambda: policy, self_play, seed=1, device=torch.device("cpu")),
        step=0,
        learns=True,
        finished=False,
        settings=SimpleNamespace(self_play=self_play, max_steps=10**6),
    )


def weight(module):
    return float(module.weight if hasattr(module, "weight") else module["weight"])


def test_a_snapshot_that_is_due_is_taken_before_opponents_are_drawn():
    self_play, learner = SelfPlay(), player("A", window=1, save_steps=10, team_change=10)
    for team in (0, 1):
        self_play.join(f"A?team={team}", learner)
    learner.policy.weight.data.fill_(5.0)
    learner.step = 11
    assert self_play.advance()
    assert weight(learner.past.opponents["A?team=0"].policy) == 5.0


class Workers:
    """Notes the calls of a worker set in their order."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def reset(self):
        self.calls.append("reset")

    def set_parameter(self, name, value):
        self.calls.append((name, value))
        return True


LESSONS = {
    "pay": {
        "curriculum": [
            {
                "name": "first",
                "value": 1.0,
                "completion_criteria": {
                    "measure": "progress",
                    "behavior": "Toy",
                    "threshold": 0.5,
                    "require_reset": True,
                },
            },
            {"name": "second", "value": 2.0},
        ]
    },
    "wind": 3.0,
}


def lessons(settings, workers):
    return Lessons(workers, settings.environment_parameters)


@pytest.mark.parametrize("exact", [True, False])
def test_a_lesson_that_began_before_a_kill_is_told_after_it(exact, quick, make_learner):
    settings = quick(parameters=LESSONS)
    learner = make_learner(Corridor.spec)
    before = lessons(settings, Workers())
    learner.step = 400
    before.on_step([learner])  # killed before `apply` could tell the environments
    workers = Workers()
    after = lessons(settings, workers)
    after.restore({"lessons": before.state_dict()}, exact=exact)
    if not exact:
        after.begin()
    after.apply([learner])
    assert workers.calls == [("pay", 2.0), ("wind", 3.0), "reset"]
    assert not after.apply([learner])


class KilledError(Exception):
    """Stands for a kill."""


def test_a_second_kill_between_two_files_leaves_a_common_moment_too(tmp_path, quick, monkeypatch):
    settings = quick("A", "B")
    save, left = manager_module.save_checkpoint, []

    def killed(path, state):
        if not left or left.pop():
            save(path, state)
            return
        raise KilledError

    monkeypatch.setattr(manager_module, "save_checkpoint", killed)

    def moment(number):
        run = {"steps": {"A": number, "B": number}}
        return {name: {"behavior": name, "run": run, "learner": {}} for name in ("A", "B")}

    def saved():
        manager = CheckpointManager(tmp_path, settings)
        states = manager.saved()
        assert states["A"]["run"] == states["B"]["run"], "of one moment"
        return manager, states["A"]["run"]["steps"]["A"]

    CheckpointManager(tmp_path, settings).write(moment(1), workers=None)
    for number in (2, 3, 4):  # each run goes on from moment 1, and is killed after one file
        manager, resumed_at = saved()
        assert resumed_at == 1
        left[:] = [False, True]
        with pytest.raises(KilledError):
            manager.write(moment(number), workers=None)
    manager, resumed_at = saved()
    assert resumed_at == 1
    manager.write(moment(5), workers=None)
    assert saved()[1] == 5
    # A moment that was written whole is the one to keep from then on.
    left[:] = [False, True]
    with pytest.raises(KilledError):
        manager.write(moment(6), workers=None)
    assert saved()[1] == 5
