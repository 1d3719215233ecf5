"""When the file that a run continues from is written anew."""

from __future__ import annotations

import pytest
from toys import Corridor

from pipeline.envs.workers import WorkerSet
from pipeline.trainer import loop as loop_module
from pipeline.trainer.stopping import StopRequest


@pytest.fixture
def run(quick, make_loop, in_process, recorder, monkeypatch):
    """Train where saving takes so many seconds; return what was written at which step, in order."""

    def train(save_s, **options):
        written = []

        class Noted(loop_module.CheckpointManager):
            def snapshot(self, learners, run, *, with_open):
                written.append(("moment", learners[0].step))
                return super().snapshot(learners, run, with_open=with_open)

            def write(self, states, *, workers):
                super().write(states, workers=workers)
                self.save_s = save_s

            def milestone(self, learner, run):
                written.append(("milestone", learner.step))
                return super().milestone(learner, run)

        monkeypatch.setattr(loop_module, "CheckpointManager", Noted)
        with WorkerSet([in_process(Corridor(n_agents=4))]) as workers:
            settings = quick(checkpoint_interval=300, max_steps=700)
            loop = make_loop(workers, settings, sinks=[recorder], **options)
            loop.keeper.save_s = save_s
            result = loop.run(StopRequest()).behaviors["Toy"]
        return written, result.n_updates

    return train


def test_after_every_update_where_nothing_keeps_it_from_that(run):
    written, n_updates = run(0.0, resume_interval_s=0.0)
    moments = [step for event, step in written if event == "moment"]
    assert len(moments) >= n_updates - 1 > 3


def test_less_often_where_saving_takes_long_but_with_every_milestone(run):
    written, _ = run(1e12, resume_interval_s=1e-6)
    milestones = [step for event, step in written if event == "milestone" and step < 700]
    moments = [step for event, step in written if event == "moment" and step < 700]
    assert len(milestones) == 2
    assert moments == milestones


def test_saving_takes_as_long_as_both_its_halves(make_loop, quick, in_process, monkeypatch):
    with WorkerSet([in_process(Corridor(n_agents=4))]) as workers:
        keeper = make_loop(workers, quick()).keeper
    clock = iter([100.0, 103.0, 200.0, 205.0])
    monkeypatch.setattr("pipeline.trainer.checkpoints.manager.time.monotonic", lambda: next(clock))
    states = keeper.snapshot([], {}, with_open=True)
    assert keeper.save_s == 3.0
    keeper.write(states, workers=None)
    assert keeper.save_s == 8.0
    assert keeper.saved_at == 205.0
