"""A learner in a group of one process does what a learner without a group does."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore
from toys import Corridor

from pipeline.algos.process_group import SINGLE_PROCESS
from pipeline.envs.workers import WorkerSet
from pipeline.errors import Interrupted
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.distributed.sync import _COMPARE_EVERY, _LATE, LearnerSync
from pipeline.trainer.stopping import StopRequest

CPU = torch.device("cpu")
SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
ON_POLICY = {"batch_size": 32, "buffer_size": 128, "num_epoch": 2}
OFF_POLICY = {"batch_size": 32, "buffer_size": 1000, "buffer_init_steps": 100}


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = DistributedGroup(FileStore(str(tmp_path / "store"), 1), rank=0, size=1, device=CPU)
    yield group
    group.close()


@pytest.fixture
def loop(quick, make_loop, in_process, recorder, ranks):
    def make(trainer="ppo", *, max_steps=300, **options):
        settings = quick(
            trainer_type=trainer,
            hyperparameters=OFF_POLICY if trainer == "sac" else ON_POLICY,
            network_settings={"hidden_units": 8, "num_layers": 1, "normalize": True},
            max_steps=max_steps,
        )
        workers = WorkerSet([in_process(Corridor())])
        return make_loop(
            workers, settings, sinks=[recorder], **{"group": ranks, "seed": 3} | options
        )

    return make


def tensors(algorithm):
    networks = {"policy": algorithm.policy, **algorithm.own_networks, **algorithm.signals.modules}
    return {
        f"{name}.{key}": value
        for name, network in networks.items()
        for key, value in network.state_dict().items()
    }


@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_a_lone_learner_learns_what_one_without_others_learns(
    trainer, tmp_path, loop, recorder, ranks
):
    results, learned, steps = [], [], []
    for name, group in (("alone", SINGLE_PROCESS), ("group", ranks)):
        training = loop(trainer, run_dir=tmp_path / name, group=group)
        with training.workers:
            result = training.run(StopRequest()).behaviors["Toy"]
        results.append((result.steps, result.n_updates, result.n_episodes))
        learned.append(tensors(training.learners["Toy"].algorithm))
        steps.append(recorder.steps("Toy"))
        assert (training.learners["Toy"].seconds.get("meeting", 0.0) > 0.0) == (group is ranks)
        recorder.rows.clear()
    assert results[0] == results[1]
    assert results[0][1] > 1
    assert steps[0] == steps[1]
    for name, value in learned[0].items():  # running means are added up in another order
        torch.testing.assert_close(learned[1][name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_statistics_of_an_update_are_means_over_the_learners(loop, recorder, ranks, monkeypatch):
    mean, means = LearnerSync.mean, []

    def asked(self, stats):
        other = {tag: value + 2.0 for tag, value in stats.items()} | {"of one": 5.0}
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "all_gather_object", lambda note: [note, other])
            means.append((stats, mean(self, stats)))
        return {"Losses/Policy Loss": 7.0}

    monkeypatch.setattr(LearnerSync, "mean", asked)
    training = loop(max_steps=200)
    with training.workers:
        training.run(StopRequest())
    stats, averaged = means[0]
    assert averaged == pytest.approx(
        {tag: number + 1.0 for tag, number in stats.items()} | {"of one": 5.0}
    )
    assert 7.0 in [values.get("Losses/Policy Loss") for _, _, values in recorder.rows]


class Others:
    """The processes that a first one has started."""

    def __init__(self):
        self.asked = []

    def pass_on(self, signal_number):
        self.asked.append(signal_number)

    def ended(self):
        return {}


@pytest.mark.parametrize("asked_by", ["its own signal", "the first process"])
def test_a_learner_that_is_asked_to_stop_agrees_with_the_others_and_passes_it_on(
    asked_by, loop, ranks
):
    ranks.others = Others()
    training = loop(max_steps=100_000)
    request = StopRequest(15 if asked_by == "its own signal" else None)
    if not request():
        ranks.stop.signal_number = 15
    with training.workers, pytest.raises(Interrupted) as stopped:
        training.run(request)
    assert stopped.value.exit_code == 143
    assert set(ranks.others.asked) == {15}
    assert training.learners["Toy"].step < 100


def test_a_lone_learner_that_is_resumed_goes_on_from_the_saved_weights_and_steps(loop):
    first = loop(max_steps=300)
    with first.workers:
        before = first.run(StopRequest()).behaviors["Toy"]
    learned = tensors(first.learners["Toy"].algorithm)
    resumed = loop(max_steps=300, resume=True)
    with resumed.workers:
        after = resumed.run(StopRequest()).behaviors["Toy"]
    assert (after.steps, after.n_updates) == (before.steps, before.n_updates)
    for name, value in tensors(resumed.learners["Toy"].algorithm).items():
        assert torch.equal(learned[name], value), name
    longer = loop(max_steps=600, resume=True)
    with longer.workers:
        result = longer.run(StopRequest()).behaviors["Toy"]
    assert result.steps >= 600
    assert result.n_updates > before.n_updates


def test_a_run_that_is_resumed_exactly_counts_on_from_the_rows_of_the_last_meeting(loop):
    request = StopRequest()

    def stop_at_150():
        if first.learners["Toy"].step >= 150:
            request.signal_number = 15
        return False

    first = loop(max_steps=5000, resume_interval_s=0.0, end_early=stop_at_150)
    with first.workers, pytest.raises(Interrupted):
        first.run(request)
    saved = first.keeper.saved()
    counted = []
    resumed = loop(
        max_steps=5000,
        resume=True,
        on_start=lambda: counted.append(resumed.learners["Toy"].sync.held),
        end_early=lambda: True,
    )
    with resumed.workers:
        resumed.run(StopRequest())
    n_held = saved["Toy"]["held"]
    assert n_held > 0
    assert counted == [n_held]


def test_a_behavior_that_another_process_has_not_met_is_named_once(
    loop, ranks, monkeypatch, caplog
):
    gather, steps = ranks.all_gather_object, iter(range(40))

    def without_it_in_the_other(note, look=None):
        if "behaviors" not in note:
            return gather(note, look)
        return [note, note | {"behaviors": {}}]

    monkeypatch.setattr(ranks, "all_gather_object", without_it_in_the_other)
    training = loop(end_early=lambda: next(steps, None) is None)
    with training.workers:
        training.run(StopRequest())
    (line,) = [text for text in caplog.messages if "has shown up here" in text]
    assert line.startswith("Toy has shown up here, but not yet in the environments of rank 1;")


@pytest.mark.parametrize(("trainer", "every"), [("ppo", 1), ("sac", _COMPARE_EVERY)])
def test_weights_are_compared_as_they_were_after_the_last_update_that_is_compared(
    make_learner, ranks, trainer, every
):
    kind = OFF_POLICY if trainer == "sac" else ON_POLICY
    learner = make_learner(SPEC, trainer_type=trainer, hyperparameters=kind)
    sync = LearnerSync(learner, ranks, seed=1)
    first = sync.local_state()["weights"]
    learner.algorithm.optimizer.flat.data[0] += 1.0
    for n_updates in range(every):
        learner.n_updates = n_updates
        assert sync.local_state()["weights"] == first
    learner.n_updates = every
    later = sync.local_state()["weights"]
    assert later != first
    assert sync.local_state()["weights"] == later


@pytest.fixture
def member(make_learner, ranks):
    """A learner of a group; a test sets how many rows it holds."""
    learner = make_learner(SPEC, max_steps=10_000)
    LearnerSync(learner, ranks, seed=1)
    learner.trajectories = SimpleNamespace(n_held=0, n_closed=0)
    return learner


def test_a_meeting_is_due_with_the_rows_of_an_update_and_again_after_some_more(member):
    sync, trajectories = member.sync, member.trajectories
    size = member.settings.hyperparameters.buffer_size
    trajectories.n_held = size
    assert not sync.is_due(5000)  # an update needs more
    trajectories.n_held = size + 1
    assert sync.is_due(5000)
    sync.apply([sync.local_state()])
    assert not sync.is_due(5000)  # those rows are known by all
    trajectories.n_held += math.ceil(_LATE * size) - 1
    assert not sync.is_due(5000)
    trajectories.n_held += 1
    assert sync.is_due(5000)


def test_several_learners_count_the_rows_of_all_between_meetings(member):
    pair = SimpleNamespace(rank=0, size=2, average_gradients_=None)
    sync, trajectories = LearnerSync(member, pair, seed=1), member.trajectories
    size = member.settings.hyperparameters.buffer_size
    trajectories.n_held = size // 2 + 1
    assert sync.is_due(5000)
    sync.apply([sync.local_state()] * 2)
    trajectories.n_held += math.ceil(_LATE * size / 2) - 1
    assert not sync.is_due(5000)
    trajectories.n_held += 1
    assert sync.is_due(5000)


def test_a_meeting_is_due_with_the_steps_to_a_summary_or_to_the_end_and_not_after_that(member):
    sync = member.sync
    sync.steps = 99
    assert not sync.is_due(100)
    sync.steps = 100
    assert sync.is_due(100)
    assert not sync.is_due(5000)
    member.step = 9_900
    assert sync.is_due(20_000)
    member.step = 10_000
    assert not sync.is_due(20_000)


def test_a_turn_is_taken_once_and_only_with_closed_rows_of_an_update(member):
    sync, trajectories = member.sync, member.trajectories
    size = member.settings.hyperparameters.buffer_size
    for n_rows, turns in ((size, [False, False]), (size + 1, [True, False])):
        trajectories.n_held = trajectories.n_closed = n_rows
        sync.apply([sync.local_state()])
        assert [sync.should_update() for _ in range(2)] == turns
    assert sync.is_due(5000)  # what was held has been learned from
