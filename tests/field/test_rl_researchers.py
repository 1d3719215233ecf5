"""Reports of researchers: masked actions, and observations far from zero."""

from pathlib import Path

import field_environments
import numpy as np
import pytest
import torch

import pipeline
from pipeline.algos.policy import Policy
from pipeline.algos.ppo import PPO
from pipeline.algos.rows import Rows
from pipeline.algos.sac import SAC
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps
from pipeline.data.rollout import Rollout
from pipeline.export.policy import OnnxPolicy
from pipeline.export.publish import publish, record
from pipeline.nets.layers import RunningNormalizer
from pipeline.settings import load_run_settings
from pipeline.settings.trainer.schema import NetworkSettings

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")
FAR = 1e4
OFFSETS = np.array([FAR, 0.0, -FAR], np.float32)


def few_allowed(n_rows: int) -> Rollout:
    """Rows of `FewAllowed`: of twenty choices one is allowed, in every fifth row two."""
    rng = np.random.default_rng(0)
    allowed = np.zeros((n_rows, 20), np.bool_)
    allowed[:, 0] = True
    allowed[::5, 1] = True
    fields = {
        "continuous": np.zeros((n_rows, 0), np.float32),
        "discrete": np.zeros((n_rows, 1), np.int64),
        "allowed": allowed,
        "reward": np.zeros(n_rows, np.float32),
    }
    return Rollout(
        obs=[rng.normal(size=(n_rows, 2)).astype(np.float32)],
        fields=fields,
        starts=np.array([0]),
        lengths=np.array([n_rows]),
        terminated=np.array([True]),
        next_obs=[np.zeros((1, 2), np.float32)],
    )


def test_sac_temperature_falls_if_the_entropy_of_a_masked_policy_is_above_the_target():
    """rlkit#75, rlkit#50, sac-discrete.pytorch#15: it grew without end."""
    hyperparameters = {"batch_size": 50, "learning_rate": 1e-2, "init_entcoef": 0.1}
    network = {"hidden_units": 8, "num_layers": 1}
    behavior = {
        "trainer_type": "sac",
        "hyperparameters": hyperparameters,
        "network_settings": network,
    }
    settings = load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]
    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(0, (20,)))
    algorithm = SAC(spec, settings, seed=1, device=CPU)
    # A new policy takes either of two choices: five times the target entropy of such rows.
    algorithm.update(few_allowed(50), step=20)
    alpha = float(algorithm.log_alpha.detach().exp())
    assert algorithm.n_updates > 10
    # Adam's steps of a gradient with one sign are of the learning rate.
    assert alpha == pytest.approx(0.1 * np.exp(-1e-2 * (algorithm.n_updates - 1)), rel=0.02)


def far_rows(rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows at 10,000, at 0 and at -10,000 with deviations of 1, 2 and 30."""
    return rng.normal(OFFSETS, [1.0, 2.0, 30.0], (n, 3)).astype(np.float32)


@pytest.mark.parametrize("first", [1, 10, 1000])
def test_observations_far_from_zero_are_normalized_to_mean_0_and_deviation_1(first):
    """ml-agents#4299, baselines#870."""
    rng = np.random.default_rng(0)
    normalizer = RunningNormalizer(3)
    rows = np.concatenate([far_rows(rng, first), far_rows(rng, 400)])
    normalizer.update(torch.from_numpy(rows[:first]))
    normalizer.update(torch.from_numpy(rows[first:]))
    normalized = normalizer(torch.from_numpy(rows)).numpy()
    # 0.05: results are clipped at 5 deviations, and the normalizer's imagined row counts.
    np.testing.assert_allclose(normalized.mean(0), 0.0, atol=0.05)
    np.testing.assert_allclose(normalized.std(0), 1.0, atol=0.05)


@pytest.mark.parametrize("size", [20, 50])
def test_normalizer_of_observations_of_moderate_size_equals_a_slow_reference_bit_for_bit(size):
    rng = np.random.default_rng(0)
    normalizer = RunningNormalizer(3)
    count, mean, squared = 1.0, torch.zeros(3, dtype=torch.float64), torch.ones(3).double()
    for _ in range(4):
        rows = torch.from_numpy(rng.normal([0.9, -3, 20], [0.1, 3, 10], (size, 3))).float()
        normalizer.update(rows)
        count += size
        before = rows.double() - mean
        mean = mean + before.sum(0) / count
        squared = squared + ((rows.double() - mean) * before).sum(0)
    assert torch.equal(normalizer.mean, mean)
    assert torch.equal(normalizer.squared, squared)


def test_normalizer_that_has_seen_no_rows_takes_its_mean_from_the_first_rows():
    normalizer = RunningNormalizer(1)
    normalizer.update(torch.zeros(0, 1))
    # The same keys as in earlier versions, so that old and new checkpoints load.
    assert set(normalizer.state_dict()) == {"count", "mean", "squared"}
    restored = RunningNormalizer(1)
    restored.load_state_dict(normalizer.state_dict())
    restored.update(torch.full((9, 1), FAR))
    assert restored.mean.tolist() == [FAR]
    assert restored.squared.tolist() == [1.0]


def policies(rows: np.ndarray) -> tuple[Policy, Policy]:
    """Two policies of the same weights: one has seen the rows, the other the rows around 0."""
    spec = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(2, ()))
    settings = NetworkSettings(normalize=True, hidden_units=8, num_layers=1)
    torch.manual_seed(0)
    far, near = Policy(spec, settings), Policy(spec, settings)
    near.load_state_dict(far.state_dict())
    far.normalizers.update([torch.from_numpy(rows)])
    near.normalizers.update([torch.from_numpy(rows - OFFSETS)])
    return far, near


def test_shift_of_all_observations_far_from_zero_does_not_change_the_actions_of_a_policy(tmp_path):
    """In NumPy, in torch and as an exported file."""
    rows = far_rows(np.random.default_rng(0), 200)
    far, near = policies(rows)
    expected = record(near, [rows - OFFSETS]).expected["deterministic_continuous_actions"]
    recording, path = record(far, [rows]), tmp_path / "far.onnx"
    in_torch = recording.expected["deterministic_continuous_actions"]
    publish(far, path, recording=recording)
    zeros = np.zeros(200)
    steps = DecisionSteps([rows], zeros, np.arange(200), None, zeros, zeros)
    in_onnx = OnnxPolicy(path).act(steps, deterministic=True).continuous
    assert far.numpy_actor is not None
    in_numpy = far.numpy_actor([rows], None, None).in_range
    assert expected.std() > 0.02
    # float32 keeps three digits after the point of a number near 10,000.
    for actions in (in_torch, in_onnx, in_numpy):
        np.testing.assert_allclose(actions, expected, atol=1e-4)


def test_shift_of_all_observations_far_from_zero_does_not_change_the_rnd_reward():
    """Regression: a signal's own normalizer made all rows far from zero look the same."""
    network = {"normalize": True, "hidden_units": 8}
    signals = {"rnd": {"network_settings": network}}
    values = {"behaviors": {"B": {"trainer_type": "ppo", "reward_signals": signals}}}
    settings = load_run_settings(None, overrides=values).behaviors["B"]
    spec = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(1, ()))
    rows = far_rows(np.random.default_rng(0), 200)
    rewards = []
    for obs in (rows, rows - OFFSETS):
        novelty = PPO(spec, settings, seed=1, device=CPU).signals.by_name["rnd"]
        novelty.observe([torch.from_numpy(obs)])
        rewards.append(novelty.rewards(Rows(obs=[torch.from_numpy(obs)])))
    assert float(rewards[1].std()) > 0.01
    torch.testing.assert_close(rewards[0], rewards[1], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_ppo_learns_from_observations_far_from_zero(tmp_path):
    """The best return is 10; a random policy has 5."""
    env = field_environments.FarFromZero()
    result = pipeline.train(env, FOLDER / "ppo.yaml", seed=1, run_dir=tmp_path)
    (curves,) = result.curves.values()
    step, reward = curves["Environment/Cumulative Reward"][-1]
    assert step == 8000
    assert reward >= 9.0
