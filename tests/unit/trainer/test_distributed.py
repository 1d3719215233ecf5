"""Two processes give the results of one process with the rows of both."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import ranked
import torch
from interpreter import variables
from toys import Corridor

from pipeline.data.rollout import Rollout
from pipeline.errors import SettingsError, TrainingError
from pipeline.nets.layers import RunningNormalizer
from pipeline.settings import load_run_settings
from pipeline.trainer.distributed.group import DistributedGroup, merged
from pipeline.trainer.distributed.sync import (
    LearnerSync,
    digest,
    refuse_other_weights,
    refuse_unshareable,
    settings_per_learner,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """Return the results of each of two processes."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    processes = [
        subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, ranked.__file__, str(rank), str(store)],
            stdout=subprocess.PIPE,
            env=variables(),
        )
        for rank in range(2)
    ]
    return [json.loads(process.communicate(timeout=120)[0]) for process in processes]


def both(round_: int = 0) -> np.ndarray:
    return np.concatenate([ranked.rows(rank, round_) for rank in range(2)])


def settings_of(**changes):
    overrides = {"behaviors": {"Toy": {"trainer_type": "ppo", **changes}}}
    return load_run_settings(None, overrides=overrides).behaviors["Toy"]


def test_averaged_gradients_are_the_mean_and_have_equal_bits_in_both_processes(found):
    first, second = (np.random.default_rng(rank).normal(size=1001) for rank in range(2))
    assert found[0]["average"] == found[1]["average"]
    np.testing.assert_allclose(found[0]["average"], (first + second) / 2, atol=1e-6)


def test_mean_and_deviation_are_taken_over_the_rows_of_both_processes(found):
    for result in found:
        np.testing.assert_allclose(result["moments"], [both().mean(), both().std()], rtol=1e-6)
        np.testing.assert_allclose(result["deviation"], both().std(axis=0), rtol=1e-6)


def test_merged_normalizer_equals_a_normalizer_that_has_seen_all_rows(found):
    normalizer = RunningNormalizer(2)
    for round_ in range(3):
        normalizer.update(torch.from_numpy(both(round_)))
    expected = [normalizer.count.item(), *normalizer.mean.tolist(), *normalizer.squared.tolist()]
    assert found[0]["normalizer"] == found[1]["normalizer"]
    np.testing.assert_allclose(found[0]["normalizer"], expected, rtol=1e-12)


def test_rows_of_each_process_are_divided_evenly_among_the_minibatches(found):
    # the processes have 5 and 9 rows
    assert [result["minibatches"] for result in found] == [[1, 1, 2], [2, 3, 3]]


def test_average_over_a_minibatch_is_weighted_by_the_number_of_rows_of_each_process(found):
    values = [np.arange(float(n)) for n in ranked.ROWS.values()]
    for result in found:  # a mean over one minibatch with all rows, and one outside minibatches
        np.testing.assert_allclose(result["means"], [np.concatenate(values).mean(), 0.5], rtol=1e-6)


def test_ppo_update_of_two_processes_equals_the_update_of_one_process_with_all_rows(found):
    halves = [ranked.half(rank) for rank in range(2)]
    lengths = np.concatenate([half.lengths for half in halves])
    rollout = Rollout(
        obs=[np.concatenate([half.obs[0] for half in halves])],
        fields={
            name: np.concatenate([half.fields[name] for half in halves])
            for name in halves[0].fields
        },
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        terminated=np.concatenate([half.terminated for half in halves]),
        next_obs=[np.concatenate([half.next_obs[0] for half in halves])],
    )
    single = ranked.ppo()
    before = single.optimizer.flat.tolist()
    stats = single.update(rollout, step=100)
    assert found[0]["weights"] == found[1]["weights"]
    assert np.abs(np.subtract(found[0]["weights"], before)).max() > 1e-4
    np.testing.assert_allclose(found[0]["weights"], single.optimizer.flat.tolist(), atol=2e-6)
    losses = [stats["Losses/Policy Loss"], stats["Losses/Value Loss"]]
    for result in found:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-4, atol=1e-6)


def test_processes_exchange_objects_and_the_smallest_and_largest_of_their_numbers(found):
    for result in found:
        assert result["least, most"] == [7, 8]
        assert result["notes"] == [
            {"rank": rank, "text": "x" * (100 * rank), "number": 0.1} for rank in range(2)
        ]


def test_error_names_the_lost_process_and_its_failure(found):
    assert found[0]["lost"] == "the learner of rank 1 (of 2) has failed: no luck"


@pytest.mark.parametrize("sizes", [(3, 0, 1, 50), (0, 1), (0, 0, 1, 1)])
def test_statistics_merged_from_several_processes_equal_the_statistics_of_all_rows(sizes):
    rng = np.random.default_rng(0)
    samples = [rng.normal(k, 1 + k, size=(n, 4)) for k, n in enumerate(sizes)]
    parts = []
    for sample in samples:
        mean = sample.mean(0) if len(sample) else np.zeros(4)
        values = (np.full(4, float(len(sample))), mean, ((sample - mean) ** 2).sum(0))
        parts.append([torch.from_numpy(value) for value in values])
    n, mean, squared = merged(parts)
    rows = np.concatenate(samples)
    assert n.tolist() == [len(rows)] * 4
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(squared / n, rows.var(0), rtol=1e-12)


def test_error_about_different_weights_names_the_step_and_the_rank_of_the_process():
    tensor = torch.arange(5.0)
    changed = tensor.clone()
    changed[3] = torch.nextafter(tensor[3], tensor[4])
    notes = [
        {"step": 700, "updates": 3, "weights": digest([weights])}
        for weights in (tensor, tensor, changed)
    ]
    refuse_other_weights("Toy", notes[:2])
    with pytest.raises(TrainingError, match=r"behavior Toy, step 700: .* rank 2 has other weights"):
        refuse_other_weights("Toy", notes)


GAIL = {"gail": {"demo_path": "a.demo", "use_vail": True}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"trainer_type": "sac", "hyperparameters": {"batch_size": 33}},
            r"batch_size: 33 cannot be split evenly",
        ),
        ({"self_play": {}}, r"self_play: self-play runs in one process"),
        (
            {"reward_signals": GAIL},
            r"reward_signals\.gail: the bottleneck of use_vail .* to false, or use one learner$",
        ),
    ],
)
def test_settings_that_only_a_single_learner_supports_are_refused_for_two_learners(changes, told):
    settings = settings_of(**changes)
    refuse_unshareable("Toy", settings, 1)
    with pytest.raises(SettingsError, match=rf"behaviors\.Toy\..*{told}"):
        refuse_unshareable("Toy", settings, 2)


def test_batch_size_and_buffer_size_of_a_replay_are_divided_among_the_learners():
    rows = {"batch_size": 64, "buffer_size": 1000}
    settings = settings_of(trainer_type="sac", hyperparameters=rows)
    hyperparameters = settings_per_learner(settings, 2).hyperparameters
    assert (hyperparameters.batch_size, hyperparameters.buffer_size) == (32, 500)
    assert settings_per_learner(settings, 1) == settings


def test_gradient_weight_of_a_process_is_1_again_after_the_last_minibatch():
    group = object.__new__(DistributedGroup)
    group.rank, group.size, group._weight = 0, 2, 1.0
    group._numbers = lambda _: np.array([[1, 3], [1, 1]])
    assert [group._weight for _ in group.weighted([1, 3])] == [1.0, 1.5]
    assert group._weight == 1.0


def test_processes_have_different_random_streams_for_actions_and_minibatches(make_learner):
    def draws(rank, **more):
        learner = make_learner(Corridor.spec, trainer_type="ppo")
        learner.n_updates = more.pop("n_updates", 0)
        group = SimpleNamespace(rank=rank, size=2, average_gradients_=None)
        LearnerSync(learner, group, seed=1, **more)
        algorithm = learner.algorithm
        stream = algorithm.minibatch_stream.integers(2**60)
        return stream, *(generator.initial_seed() for generator in algorithm.generators.values())

    first = draws(0)
    assert draws(0, n_updates=3) == draws(1, held=0) == first, "both keep their streams"
    other_draws = [draws(1), draws(2), draws(1, n_updates=3)]
    assert draws(1) == other_draws[0]
    for numbers in zip(first, *other_draws, strict=True):
        assert len(set(numbers)) == 4
