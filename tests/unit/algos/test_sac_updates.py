"""SAC's schedule of updates and its statistics; the random streams of algorithms."""

import numpy as np
import pytest
import torch
from golden_cases import N_MESSAGES
from golden_training import Training
from test_sac import CPU, SPECS, experience, made

from pipeline import seeding
from pipeline.algos.poca import POCA
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.nets.squashed import SquashedHeads
from pipeline.settings.trainer.schema import TrainerSettings


@pytest.mark.parametrize(("n_rows", "learns"), [(31, False), (32, True)])
def test_sac_learns_only_with_rows_for_a_minibatch_and_after_buffer_init_steps(n_rows, learns):
    algorithm = made("continuous", batch_size=32, buffer_init_steps=20)
    new_rows = experience("continuous", 32)
    algorithm.replay.add(new_rows)
    algorithm.replay.n_added = n_rows
    assert (algorithm._due(30, 1, 1.0) > 0) == learns
    assert algorithm._due(19, 1, 1.0) == algorithm._due(20, 1, 1.0) == 0


@pytest.mark.parametrize("batch_size", [200, 400, 2000])
def test_sampler_draws_the_requested_number_of_minibatches_of_batch_size_rows(batch_size):
    algorithm = made("continuous", batch_size=batch_size)
    algorithm.replay.add(experience("continuous", 64))
    drawn = list(algorithm.sampler.minibatches(7))
    assert [len(batch.done) for batch in drawn] == [batch_size] * 7
    assert list(algorithm.sampler.minibatches(0)) == []
    assert [len(rows) for rows in algorithm.sampler.transitions(3)] == [batch_size] * 3


def test_reported_cloning_loss_is_the_mean_over_updates(tmp_path):
    training = Training("sac, cloning", tmp_path, n_blocks=1)
    algorithm = training.learner.algorithm
    losses, update = [], algorithm.bc.update
    algorithm.bc.update = lambda **options: (losses.append(update(**options)), losses[-1])[1]
    training.run()
    assert len(losses) == algorithm.n_updates - 1 == 2
    reported = training.learner.statistics.period()["Losses/Pretraining Loss"]
    assert reported == pytest.approx(np.mean(losses))
    plain = Training("sac, discrete", tmp_path, n_blocks=1)
    plain.run()
    assert "Losses/Pretraining Loss" not in plain.learner.statistics.period()


def test_statistics_are_mean_losses_and_the_entropy_coefficients_after_the_update():
    algorithm = made("hybrid", init_entcoef=0.3, batch_size=16)
    means = torch.tensor([-0.5, 0.25, 1.0, 2.0, 3.0])
    with torch.no_grad():
        algorithm.log_alpha.copy_(torch.tensor([0.2, 0.4, 0.8]).log())
    stats = algorithm.statistics(means, 7)
    assert stats == pytest.approx(
        {
            "Losses/Policy Loss": -0.5,
            "Losses/Value Loss": 0.25,
            "Losses/Q1 Loss": 1.0,
            "Losses/Q2 Loss": 2.0,
            "Policy/Extrinsic Value": 3.0,
            "Policy/Continuous Entropy Coeff": 0.2,
            "Policy/Discrete Entropy Coeff": 0.6,
        }
    )
    continuous_sac = made("continuous")
    assert "Policy/Discrete Entropy Coeff" not in continuous_sac.statistics(means, 7)
    assert "Policy/Continuous Entropy Coeff" not in made("discrete").statistics(means, 7)


@pytest.mark.parametrize("algorithm", [PPO, POCA, SAC])
def test_random_streams_derive_from_the_seed_and_attribute_squashed_agrees_with_the_heads(
    algorithm,
):
    settings = TrainerSettings(
        trainer_type=algorithm.__name__.lower(), hyperparameters=algorithm.settings_class()
    )
    made_with = algorithm(SPECS["continuous"], settings, seed=5, device=CPU)
    assert algorithm.squashed == isinstance(made_with.policy.actor.heads, SquashedHeads)
    assert made_with.action_stream.initial_seed() == seeding.derive(5, "actions")
    expected = seeding.stream(5, "minibatches").integers(1 << 60, size=3)
    assert made_with.minibatch_stream.integers(1 << 60, size=3).tolist() == expected.tolist()
    if algorithm is SAC:
        assert made_with.noise_stream.initial_seed() == seeding.derive(5, "noise")


def test_a_linear_schedule_lowers_the_learning_rate(tmp_path):
    training = Training("sac, discrete", tmp_path, n_blocks=1, learning_rate_schedule="linear")
    training.run()
    n_rows = N_MESSAGES * training.case.n_agents
    assert training.settings["max_steps"] == 2 * n_rows
    reported = training.learner.statistics.period()["Policy/Learning Rate"]
    assert reported == pytest.approx(1.5e-3, rel=1e-5)
    assert training.learner.algorithm.optimizer.learning_rate == pytest.approx(reported)


def test_with_memory_each_minibatch_has_the_same_number_of_sequences(tmp_path):
    training = Training("sac, memory", tmp_path, n_blocks=1)
    training.run()
    sampler = training.learner.algorithm.sampler
    n_sequences = sampler.batch_size // sampler.replay.sequence_length
    for batch in sampler.minibatches(3):
        assert len(batch.sequences.lengths) == n_sequences
        assert int(batch.sequences.lengths.sum()) == len(batch.done)
