"""Which learners, optimizers and notes take part when processes learn together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from toys import Corridor

from pipeline.tracking import names
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.distributed.sync import LearnerSync, Synchronizer
from pipeline.trainer.statistics import Statistics
from pipeline.trainer.stopping import StopRequest


class Pair(DistributedGroup):
    """The first of two processes without the second; `answer` gives the note of that one."""

    def __init__(self, answer=lambda note: note) -> None:
        self.rank, self.size, self.others = 0, 2, None
        self.stop = StopRequest()
        self._answer = answer

    def all_gather_object(self, value, look=None):  # noqa: ARG002  # nobody is waited for
        return [value, self._answer(value)]

    def average_gradients_(self, values):
        values /= 2


@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_gradients_of_signals_that_learn_are_averaged_as_those_of_the_policy(make_learner, trainer):
    signals = {"extrinsic": {}, "curiosity": {}, "rnd": {}}
    learner = make_learner(
        Corridor.spec,
        trainer_type=trainer,
        hyperparameters={"batch_size": 32, "buffer_size": 128},
        reward_signals=signals,
    )
    pair = Pair()
    LearnerSync(learner, pair, seed=1)
    by_name = learner.algorithm.signals.by_name
    learning = [learner.algorithm, by_name["curiosity"], by_name["rnd"]]
    assert [part.optimizer.average for part in learning] == [pair.average_gradients_] * 3
    assert learner.algorithm.processes is pair


def test_steps_statistics_and_rows_of_all_become_those_of_each_once(make_learner):
    learner = make_learner(Corridor.spec, max_steps=10_000)
    learner.step = 50
    sync = LearnerSync(learner, Pair(), seed=1)
    sync.steps = 7
    learner.pending_stats.add_episodes([3.0], [4])
    theirs = Statistics()
    theirs.add_episodes([5.0, 10.0], [4, 4])
    size = learner.settings.hyperparameters.buffer_size
    learner.trajectories = SimpleNamespace(n_closed=size // 2, n_held=size // 2 + 9)
    other = {**sync.local_state(), "steps": 20, "rows": size // 2 + 1, "statistics": theirs.new()}
    sync.apply([sync.local_state(), other])
    assert (learner.step, sync.steps, sync.held) == (77, 0, size // 2 + 9)
    assert (learner.statistics.take_ended(), learner.statistics.n_episodes) == ([3.0, 5.0, 10.0], 3)
    assert [sync.should_update(), sync.held] == [True, 0]
    learner.trajectories.n_closed = 2 * size
    # The next meeting adds nothing of what all know already, and a process without rows waits.
    sync.apply([sync.local_state(), {**sync.local_state(), "rows": 0}])
    assert (learner.step, learner.statistics.n_episodes) == (77, 3)
    assert learner.statistics.period()[names.REWARD] == 6.0
    assert not sync.should_update()


def test_a_meeting_gives_each_behavior_the_notes_of_its_own_name_in_one_order():
    calls = []

    def member(name):
        return SimpleNamespace(
            is_due=lambda next_summary: next_summary == {"B": 200, "A": 100}[name],
            held=len(name),
            local_state=lambda: f"{name} here",
            apply=lambda notes: calls.append((name, notes)),
        )

    def of_the_other(note):
        calls.append(note["stop"])
        behaviors = {name: f"{name} there" for name in ("A", "B", "only there")}
        return {"stop": 15, "behaviors": behaviors, "resume point": "theirs"}

    points = SimpleNamespace(note=lambda: "ours", meet=lambda notes, _: calls.append(notes))
    meeting = Synchronizer(Pair(of_the_other), points)
    agreed = meeting.listen(StopRequest())
    meeting._members = {name: member(name) for name in ("B", "A", "only here")}
    meeting._members["only here"].is_due = lambda _: False
    learners = {name: SimpleNamespace(seconds={}) for name in ("B", "A")}
    meeting.sync_if_due(learners, {"B": 0, "A": 0, "only here": 0}.get)
    assert (calls, agreed()) == ([], False), "nobody waits yet"
    meeting.sync_if_due(learners, {"B": 0, "A": 100, "only here": 0}.get)
    assert calls == [
        0,
        ("A", ["A here", "A there"]),
        ("B", ["B here", "B there"]),
        ["ours", "theirs"],
    ]
    assert (agreed.signal_number, agreed.exit_code) == (15, 143)
    assert ["meeting" in learner.seconds for learner in learners.values()] == [True, False]
