"""Synchronisation of learners: when it is due, what it merges; and a group of one process."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from stops_after import EndsWhen
from torch.distributed import FileStore
from toys import Corridor

from pipeline.algos.process_group import SINGLE_PROCESS
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.envs.workers import WorkerSet
from pipeline.errors import Interrupted
from pipeline.nets.encoder import Normalizers
from pipeline.tracking import names
from pipeline.trainer.distributed.group import DistributedGroup
from pipeline.trainer.distributed.sync import (
    _COMPARE_EVERY,
    _MAX_DELAY_SHARE,
    LearnerSync,
    Synchronizer,
)
from pipeline.trainer.statistics import Statistics
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
    def make(trainer="ppo", *, max_steps=300, callbacks=(), **options):
        settings = quick(
            trainer_type=trainer,
            hyperparameters=OFF_POLICY if trainer == "sac" else ON_POLICY,
            network_settings={"hidden_units": 8, "num_layers": 1, "normalize": True},
            max_steps=max_steps,
        )
        workers = WorkerSet([in_process(Corridor())])
        return make_loop(
            workers, settings, sinks=[recorder, *callbacks], **{"group": ranks, "seed": 3} | options
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
def test_distributed_group_of_one_process_trains_like_a_process_without_a_group(
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
    for name, value in learned[0].items():  # running means are summed in another order
        torch.testing.assert_close(learned[1][name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_update_statistics_are_means_over_the_processes(loop, recorder, ranks, monkeypatch):
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


@pytest.mark.parametrize("asked_by", ["its own signal", "the first process"])
def test_all_processes_stop_with_the_same_signal_if_one_process_is_asked_to_stop(
    asked_by, loop, ranks
):
    ranks.others = Mock(**{"ended.return_value": {}})
    training = loop(max_steps=100_000)
    request = StopRequest(15 if asked_by == "its own signal" else None)
    if not request():
        ranks.stop.signal_number = 15
    with training.workers, pytest.raises(Interrupted) as stopped:
        training.run(request)
    assert stopped.value.exit_code == 143
    assert {tuple(call.args) for call in ranks.others.forward_stop.call_args_list} == {(15,)}
    assert training.learners["Toy"].step < 100


def test_a_single_learner_resumes_from_the_saved_weights_and_steps(loop):
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


def test_exact_resume_restores_the_number_of_rows_at_the_last_synchronisation(loop):
    request = StopRequest()

    def stop_at_150():
        if first.learners["Toy"].step >= 150:
            request.signal_number = 15
        return False

    first = loop(max_steps=5000, resume_interval_s=0.0, callbacks=[EndsWhen(stop_at_150)])
    with first.workers, pytest.raises(Interrupted):
        first.run(request)
    saved = first.checkpoints.saved()
    counted = []

    class Counts(EndsWhen):
        def on_settings(self, _settings):
            counted.append(resumed.learners["Toy"].sync.held)

    resumed = loop(max_steps=5000, resume=True, callbacks=[Counts(lambda: True)])
    with resumed.workers:
        resumed.run(StopRequest())
    n_held = saved["Toy"]["held"]
    assert n_held > 0
    assert counted == [n_held]


def test_behavior_that_is_missing_in_another_process_causes_one_warning(
    loop, ranks, monkeypatch, caplog
):
    gather, steps = ranks.all_gather_object, iter(range(40))

    def without_it_in_the_other(note, look=None):
        if "behaviors" not in note:
            return gather(note, look)
        return [note, note | {"behaviors": {}}]

    monkeypatch.setattr(ranks, "all_gather_object", without_it_in_the_other)
    training = loop(callbacks=[EndsWhen(lambda: next(steps, None) is None)])
    with training.workers:
        training.run(StopRequest())
    (line,) = [text for text in caplog.messages if "has not appeared in" in text]
    assert line.startswith("Toy has not appeared in the environments of rank 1 yet;")


@pytest.mark.parametrize(("trainer", "every"), [("ppo", 1), ("sac", _COMPARE_EVERY)])
def test_digest_of_weights_is_computed_only_at_updates_after_which_processes_compare_weights(
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
    """A learner of a group; a test sets the numbers of its rows."""
    learner = make_learner(SPEC, max_steps=10_000)
    LearnerSync(learner, ranks, seed=1)
    learner.trajectories = SimpleNamespace(n_held=0, n_closed=0)
    return learner


def test_synchronisation_is_due_if_rows_suffice_for_an_update_and_again_after_more_rows(member):
    size = member.settings.hyperparameters.buffer_size
    for n_ranks in (1, 2):
        if n_ranks == 2:  # rows of both processes count
            LearnerSync(member, SimpleNamespace(rank=0, size=2, average_gradients_=None), seed=1)
        sync, trajectories = member.sync, member.trajectories
        trajectories.n_held = size // n_ranks
        assert not sync.is_due(5000)  # an update needs one row more
        trajectories.n_held += 1
        assert sync.is_due(5000)
        sync.apply([sync.local_state()] * n_ranks)
        assert not sync.is_due(5000)  # all processes know of these rows
        trajectories.n_held += math.ceil(_MAX_DELAY_SHARE * size / n_ranks) - 1
        assert not sync.is_due(5000)
        trajectories.n_held += 1
        assert sync.is_due(5000)


def test_synchronisation_is_due_at_a_summary_and_at_max_steps(member):
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


def test_method_should_update_returns_true_once_and_only_with_more_rows_than_buffer_size(member):
    sync, trajectories = member.sync, member.trajectories
    size = member.settings.hyperparameters.buffer_size
    for n_rows, turns in ((size, [False, False]), (size + 1, [True, False])):
        trajectories.n_held = trajectories.n_closed = n_rows
        sync.apply([sync.local_state()])
        assert [sync.should_update() for _ in range(2)] == turns
    assert sync.is_due(5000)  # the held rows have been learned from


class Pair(DistributedGroup):
    """The first of two processes; `answer` returns the note of the second, which is not started."""

    def __init__(self, answer=lambda note: note) -> None:
        self.rank, self.size, self.others = 0, 2, None
        self.stop = StopRequest()
        self._answer = answer

    def all_gather_object(self, value, look=None):  # noqa: ARG002  # nobody is waited for
        return [value, self._answer(value)]

    def average_gradients_(self, values):
        values /= 2


@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_gradients_of_curiosity_and_rnd_are_averaged_over_processes(make_learner, trainer):
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


def test_synchronisation_adds_steps_and_statistics_of_all_processes_once(make_learner):
    learner = make_learner(Corridor.spec, max_steps=10_000)
    learner.step = 50
    sync = LearnerSync(learner, Pair(), seed=1)
    sync.steps = 7
    learner.pending_stats.add_episodes([3.0], [4])
    theirs = Statistics()
    theirs.add_episodes([5.0, 10.0], [4, 4])
    size = learner.settings.hyperparameters.buffer_size
    learner.trajectories = SimpleNamespace(n_closed=size // 2, n_held=size // 2 + 9)
    other = {**sync.local_state(), "steps": 20, "rows": size // 2 + 1, "statistics": theirs}
    sync.apply([sync.local_state(), other])
    assert (learner.step, sync.steps, sync.held) == (77, 0, size // 2 + 9)
    assert (learner.statistics.take_ended(), learner.statistics.n_episodes) == ([3.0, 5.0, 10.0], 3)
    assert [sync.should_update(), sync.held] == [True, 0]
    learner.trajectories.n_closed = 2 * size
    # The next synchronisation adds nothing twice, and no update is due if a process has no rows.
    sync.apply([sync.local_state(), {**sync.local_state(), "rows": 0}])
    assert (learner.step, learner.statistics.n_episodes) == (77, 3)
    assert learner.statistics.period()[names.REWARD] == 6.0
    assert not sync.should_update()


def test_synchronisation_matches_behaviors_by_name_in_a_fixed_order():
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

    points = SimpleNamespace(local_state=lambda: "ours", merge=lambda notes, _: calls.append(notes))
    meeting = Synchronizer(Pair(of_the_other), points)
    agreed = meeting.listen(StopRequest())
    meeting._members = {name: member(name) for name in ("B", "A", "only here")}
    meeting._members["only here"].is_due = lambda _: False
    learners = {name: SimpleNamespace(seconds={}) for name in ("B", "A")}
    meeting.sync_if_due(learners, {"B": 0, "A": 0, "only here": 0})
    assert (calls, agreed()) == ([], False), "no synchronisation is due yet"
    meeting.sync_if_due(learners, {"B": 0, "A": 100, "only here": 0})
    assert calls == [
        0,
        ("A", ["A here", "A there"]),
        ("B", ["B here", "B there"]),
        ["ours", "theirs"],
    ]
    assert (agreed.signal_number, agreed.exit_code) == (15, 143)
    assert ["meeting" in learner.seconds for learner in learners.values()] == [True, False]


class TwoAlike(Pair):
    """Two processes with equal observations."""

    def gathered(self, values):
        return [values, values.clone()]


def test_all_normalizers_of_a_behavior_are_updated_with_the_rows_of_all_processes(make_learner):
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    own = {"network_settings": network}
    learner = make_learner(
        SPEC,
        network_settings=network,
        reward_signals={"extrinsic": {}, "curiosity": own, "rnd": own},
    )
    sync = LearnerSync(learner, TwoAlike(), seed=1)
    networks = [learner.algorithm.policy, *learner.algorithm.signals.modules.values()]
    found = [m for network in networks for m in network.modules() if isinstance(m, Normalizers)]
    assert len(found) == 3
    rng, expected = np.random.default_rng(1), Normalizers(SPEC.observation_specs, enabled=True)
    for shift in (2.0, -7.0, 4.0):
        obs = [rng.normal(shift, 1.0, (9, 2)).astype(np.float32)]
        learner.algorithm.observe(obs)
        rows = torch.from_numpy(obs[0])
        for normalizers in found:
            normalizers([rows])  # caches the scale, which `apply` must forget
        sync.steps = 9
        sync.apply([sync.local_state()] * 2)
        expected.update([torch.cat((rows, rows))])
        for normalizers in found:
            torch.testing.assert_close(normalizers([rows]), expected([rows]))
            torch.testing.assert_close(normalizers.state_dict(), expected.state_dict())
