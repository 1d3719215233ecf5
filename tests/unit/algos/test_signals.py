"""Reward signals: their rewards, and their gradient steps."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_ppo import trainer_settings

from pipeline.algos.reward_signals import RewardSignals, make, supported_signals
from pipeline.algos.rows import Rows
from pipeline.core.specs import (
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    ObservationSpec,
    ObservationType,
)
from pipeline.demos.demo_file import writing_demo
from pipeline.errors import DemonstrationError, SettingsError
from pipeline.nets.encoder import Normalizers

CPU = torch.device("cpu")
PLAIN = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec.create_discrete([4]))
CONTINUOUS = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec.create_continuous(2))
EVERYTHING = BehaviorSpec(
    [
        ObservationSpec.vector(3),
        ObservationSpec.visual(3, 20, 20),
        ObservationSpec.entities(5, 3, "e"),
        ObservationSpec.vector(2, "goal", ObservationType.GOAL_SIGNAL),
    ],
    ActionSpec.create_hybrid(2, [3, 2]),
)
SMALL = {"hidden_units": 16, "num_layers": 1}


def settings(name, spec=None, folder=None, **changes):
    options = {"network_settings": SMALL, "learning_rate": 3e-3, **changes}
    if name == "gail" and "demo_path" not in options:
        options["demo_path"] = str(demo(spec, folder))
    return trainer_settings(reward_signals={"extrinsic": {}, name: options})


def signal(name, spec=PLAIN, folder=None, seed=1, **changes):
    return make(name, spec, settings(name, spec, folder, **changes), seed=seed, device=CPU)


def steps(spec=PLAIN, n=64, *, seed=0, shift=0.0, obs=None, next_obs=None, **fields) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    actions = spec.action_spec

    def drawn():
        shapes = [obs_spec.shape for obs_spec in spec.observation_specs]
        return [torch.randn(n, *shape, generator=draw) + shift for shape in shapes]

    seen, later = drawn(), drawn()
    continuous = torch.rand(n, actions.continuous_size, generator=draw) * 2 - 1
    choices = [torch.randint(size, (n,), generator=draw) for size in actions.discrete_branches]
    none = torch.zeros(n, 0, dtype=torch.int64)
    parts = {
        "continuous": continuous,
        "discrete": torch.stack(choices, dim=1) if choices else none,
        "reward": torch.zeros(n),
        "done": torch.zeros(n, dtype=torch.bool),
    }
    return Rows(obs=obs or seen, next_obs=next_obs or later, fields={**parts, **fields})


def demo(spec, folder, name="expert.demo", n=80, *, ends=(False,), **columns):
    """Write a demonstration of random steps, in episodes of 20 pairs with the given `ends`."""
    expert = steps(spec, n, seed=5, shift=2.0, **columns)
    with writing_demo(folder / name, "B?team=0", spec) as writer:
        last = np.arange(n) % 20 == 19
        writer.append(
            obs=[values.numpy() for values in expert.obs],
            actions=ActionTuple(
                expert.continuous.numpy(), expert.discrete.numpy().astype(np.int32)
            ),
            reward=np.zeros(n, dtype=np.float32),
            done=last,
            interrupted=last & np.resize(np.repeat(ends, 20), n),
        )
    return folder / name


NAMES = ("curiosity", "gail", "rnd")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (PLAIN, {}),
        (CONTINUOUS, {"network_settings": {**SMALL, "normalize": True}}),
        (EVERYTHING, {}),
    ],
    ids=["discrete", "continuous", "every observation"],
)
def test_gradient_steps_of_a_reward_signal_change_every_weight_of_its_networks(
    name, spec, changes, tmp_path
):
    reward_signal = signal(name, spec, tmp_path, **changes)
    trained = [p for network in reward_signal.modules.values() for p in network.parameters()]
    trained = [p for p in trained if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    for number in range(5):
        losses = reward_signal.update(steps(spec, seed=number))
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert [i for i, p in enumerate(trained) if torch.equal(p, before[i])] == []
    rewards = reward_signal.rewards(steps(spec))
    assert rewards.shape == (64,)
    assert not rewards.requires_grad
    assert (rewards >= 0).all()
    assert rewards.std() > 0


@pytest.mark.parametrize("name", NAMES)
def test_recurrent_layer_in_the_network_of_a_reward_signal_is_left_out_with_a_warning(
    name, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING):
        reward_signal = signal(name, PLAIN, tmp_path, network_settings={**SMALL, "memory": {}})
    assert f"reward_signals.{name}.network_settings.memory" in caplog.text
    assert reward_signal.rewards(steps()).shape == (64,)


@pytest.mark.parametrize("name", ["curiosity", "rnd"])
def test_normaliser_counts_each_row_of_new_experience_once(name):
    reward_signal = signal(name, network_settings={**SMALL, "normalize": True})
    networks = reward_signal.modules.values()
    modules = [module for network in networks for module in network.modules()]
    (normalizer,) = [m for m in modules if isinstance(m, Normalizers) and m]
    experience = steps(n=50, shift=3.0)
    reward_signal.observe(experience.obs)
    reward_signal.rewards(experience)
    reward_signal.update(experience)
    running = normalizer.by_observation["0"]
    assert float(running.count) == 51
    assert torch.allclose(running.mean.float(), experience.obs[0].sum(0) / 51, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_has_the_learning_rate_of_its_settings(name, tmp_path):
    assert signal(name, folder=tmp_path, learning_rate=0.0625).optimizer.learning_rate == 0.0625


# --- curiosity


def test_curiosity_reward_times_strength_is_0_before_the_first_gradient_step_then_at_most_1():
    curiosity, rows = signal("curiosity", strength=50.0), steps()
    assert (curiosity.rewards(rows) == 0).all()
    curiosity.update(rows)
    assert (curiosity.rewards(rows) > 0).all()
    assert float((curiosity.rewards(steps(shift=30.0)) * 50.0).max()) == pytest.approx(1.0)


# --- imitation


def test_weight_of_the_bottleneck_loss_grows_while_the_divergence_is_above_the_target(tmp_path):
    gail = signal("gail", PLAIN, tmp_path, use_vail=True)
    assert float(gail.beta) == 0.0
    losses = [gail.update(steps(seed=number)) for number in range(200)]
    kl = torch.stack([step_losses["Losses/GAIL KL Loss"] for step_losses in losses])
    beta = torch.stack([step_losses["Policy/GAIL Beta"] for step_losses in losses])
    assert kl.max() > 0.5
    by_hand = 0.0
    for divergence, weight in zip(kl.tolist(), beta.tolist(), strict=True):
        by_hand = max(by_hand + 0.0005 * (divergence - 0.5), 0.0)
        assert weight == pytest.approx(by_hand, abs=1e-6)
    assert gail.network.log_deviation.abs().max() > 0


def test_gail_reads_all_files_of_a_folder_and_normalises_by_the_expert_only(tmp_path):
    demo(PLAIN, tmp_path, "a.demo", 40)
    demo(PLAIN, tmp_path, "b.demo", 60)
    changes = {"demo_path": str(tmp_path), "network_settings": {**SMALL, "normalize": True}}
    gail = signal("gail", **changes)
    assert len(gail.expert.done) == 38 + 57
    running = gail.network.normalizers.by_observation["0"]
    gail.observe(steps(shift=-5.0).obs)
    gail.update(steps(shift=-5.0))
    assert float(running.count) == 1 + 38 + 57
    assert torch.allclose(running.mean.float(), gail.expert.obs[0].sum(0) / 96, atol=1e-5)


def test_gail_draws_demonstration_sources_in_proportion_to_their_weights(tmp_path):
    """Sources: 60 steps of weight 1, and a folder of weight 3 with two files of 60 steps each."""
    (tmp_path / "more").mkdir()
    demo(PLAIN, tmp_path, "a.demo", 60 + 3)
    for name in ("b.demo", "c.demo"):
        demo(PLAIN, tmp_path / "more", name, 60 + 3)
    weighed = {"path": str(tmp_path / "more"), "weight": 3}
    gail = signal("gail", demo_path=[str(tmp_path / "a.demo"), weighed])
    assert len(gail.expert.done) == 180
    gail.expert.obs[0][:60], gail.expert.obs[0][60:] = 0.0, 1.0
    drawn = gail._draw(7000)[0][:, 0]
    assert drawn.mean() == pytest.approx(6 / 7, abs=0.02)


def test_last_expert_step_of_an_episode_is_done_if_the_task_ended_but_not_at_a_truncation(tmp_path):
    path = demo(PLAIN, tmp_path, n=80, ends=(True, False))
    gail = signal("gail", demo_path=str(path))
    assert gail.expert.done.nonzero().flatten().tolist() == [37, 75]


# --- refused settings and files


def test_error_about_an_unsupported_reward_signal_names_the_signal():
    known = settings("rnd")
    unknown = replace(known, reward_signals={"boredom": known.reward_signals["rnd"]})
    with pytest.raises(SettingsError, match=r"signals\.boredom: .* use one of: extrinsic, c"):
        supported_signals(unknown)


def test_error_before_training_names_missing_demonstrations(tmp_path):
    missing = str(tmp_path / "nothing.demo")
    with pytest.raises(SettingsError, match=r"reward_signals\.gail\.demo_path: .*nothing\.demo"):
        supported_signals(settings("gail", demo_path=missing))


def test_demonstrations_of_another_behavior_are_refused_and_the_error_names_the_file(tmp_path):
    path = demo(CONTINUOUS, tmp_path)
    with pytest.raises(DemonstrationError, match=r"expert\.demo: its actions are"):
        signal("gail", PLAIN, demo_path=str(path))


def test_error_about_images_too_small_for_the_network_of_a_signal_names_the_signal():
    tiny = BehaviorSpec([ObservationSpec.visual(3, 8, 8)], ActionSpec.create_discrete([2]))
    with pytest.raises(SettingsError, match=r"reward_signals\.rnd: .*too small"):
        signal("rnd", tiny)


# --- several signals


def test_rewards_are_multiplied_by_strength_and_returned_in_the_order_of_the_settings(tmp_path):
    rnd = {"strength": 0.5, "gamma": 0.9, "network_settings": SMALL}
    chosen = trainer_settings(reward_signals={"rnd": rnd, "extrinsic": {"strength": 2.0}})
    signals = RewardSignals(PLAIN, chosen, seed=1, device=CPU)
    rows = steps(reward=torch.arange(64.0))
    rewards = signals.rewards(rows)
    assert signals.names == ["rnd", "extrinsic"]
    assert signals.gamma.tolist() == pytest.approx([0.9, 0.99])
    assert signals.ignores_done.tolist() == [True, False]
    assert torch.equal(rewards[:, 1], torch.arange(64.0) * 2)
    assert torch.allclose(rewards[:, 0], signals.by_name["rnd"].rewards(rows) * 0.5)
