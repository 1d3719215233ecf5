"""Which of two policies, statistics and workers each action of a learner is about."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from steps import decision_steps, take_turn, terminal_steps
from toys import Corridor

from pipeline.tracking import names
from pipeline.trainer.statistics import Statistics


def message(n, ended=()):
    obs = [np.zeros((n, 6))]
    return decision_steps(obs), terminal_steps([np.zeros((len(ended), 6))], ended, reward=2.0)


def test_while_an_update_goes_on_its_copy_is_what_plays_is_kept_and_observes(make_learner):
    learner = make_learner(Corridor.spec, threaded=True, self_play={"window": 1})
    acting = SimpleNamespace(policy=torch.nn.Linear(1, 1))
    observed = []
    learner.updates = SimpleNamespace(
        acting=acting,
        weights=lambda: "weights that act",
        state_dict=lambda: "both weights",
        observe=observed.append,
    )
    assert learner.weights_dict()["algorithm"] == "weights that act"
    assert learner.state_dict()["algorithm"] == "both weights"
    learner.past.save_due(0)
    assert learner.past.snapshots[0].keys() == acting.policy.state_dict().keys()
    closed = SimpleNamespace(obs=["seen"], n_rows=3)
    learner._count(closed)
    learner.sync = SimpleNamespace(steps=5)
    learner._count(closed)  # which the next meeting adds to the steps of all
    learner.sync, learner.step = None, learner.settings.max_steps
    learner._count(closed)
    assert observed == [["seen"]] * 2
    assert (learner.step, learner.settings.max_steps) == (503, 500)


def test_what_is_new_here_is_pending_and_a_lost_worker_takes_nothing_of_another(make_learner):
    network = {"hidden_units": 8, "num_layers": 1}
    network["memory"] = {"sequence_length": 4, "memory_size": 8}
    learner = make_learner(Corridor.spec, network_settings=network, self_play={"window": 1})
    learner.pending_stats = Statistics()
    take_turn(learner, [message(2), message(3)])
    take_turn(learner, [message(2, [1]), message(3)])
    assert learner.statistics.period() == {}
    pending = learner.pending_stats.period()
    assert (pending[names.REWARD], names.ENTROPY in pending) == (2.0, True)
    games, dropped = learner.past.games, []
    for worker in (0, 1):
        games.plays(("Toy", worker), decision_steps([], [worker], group_id=1))
    learner.grouping.drop = lambda slots: dropped.extend(slots.tolist())
    learner.memories[:] = 1.0
    n_held = learner.trajectories.n_held
    learner.drop_unfinished(1)
    assert dropped == [2, 3, 4]
    assert learner.memories[:5, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [entry["source"] for entry in games.state_dict()] == [("Toy", 0)]
    assert learner.trajectories.n_held < n_held
    learner.drop_unfinished()
    assert (learner.memories[:5].any(), games.state_dict()) == (False, [])
