"""Behavioral cloning as a training of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toys import Both, Chase, Corridor

import pipeline
from pipeline.data.demonstrations import load_expert_rows
from pipeline.errors import DemonstrationError
from pipeline.export.torch_policy import record
from pipeline.protocol.demo import DemoWriter
from pipeline.protocol.specs import ActionTuple
from pipeline.trainer.checkpoints import load_checkpoint
from pipeline.trainer.pretraining import TRAIN_LOSS, pretrain
from pipeline.trainer.saved import load_policy


@pytest.fixture
def demo(tmp_path):
    """Write a demonstration of `Both` in which the expert is always right."""

    def write(name="d.demo", *, n_rows=200, done_every=10, spec=Both.spec):
        x = np.random.default_rng(0).uniform(-1, 1, (n_rows, spec.observation_specs[0].shape[0]))
        done = np.arange(1, n_rows + 1) % done_every == 0
        first = x[:, :1]
        actions = ActionTuple(
            np.where(done[:, None], 9.0, x)[:, : spec.action_spec.continuous_size],
            (first > 0).astype(int)[:, : spec.action_spec.discrete_size],
        )
        masks = [np.zeros((n_rows, size), bool) for size in spec.action_spec.discrete_branches]
        with DemoWriter(tmp_path / name, "Toy?team=0", spec) as writer:
            writer.append(
                obs=[x.astype(np.float32)],
                actions=actions,
                reward=np.ones(n_rows, np.float32),
                done=done,
                action_mask=masks or None,
            )
        return tmp_path / name

    return write


def run(demos, settings, tmp_path, **changes):
    options = {"seed": 1, "epochs": 20, "batch_size": 32, "learning_rate": 3e-3} | changes
    return pretrain(demos, settings, run_dir=tmp_path / "run", **options)


def test_loss_falls_on_steps_that_were_not_learned_from(demo, quick, tmp_path, recorder):
    result = run([demo()], quick(), tmp_path, sinks=[recorder])
    losses = [values[TRAIN_LOSS] for _, _, values in recorder.rows]
    assert len(losses) == result.epochs == 20
    assert recorder.steps("Toy") == list(range(1, 21))
    assert losses[-1] == result.loss < 0.6 * losses[0]
    assert result.held_out_loss < 0.6 * losses[0]
    assert recorder.n_closed == 1


def test_cloned_policy_acts_at_the_expert_s_scale(demo, quick, tmp_path):
    network = {"hidden_units": 32, "num_layers": 2}
    settings = quick(network_settings=network)
    result = run([demo(n_rows=500)], settings, tmp_path, epochs=40)
    x = np.linspace(-0.9, 0.9, 50, dtype=np.float32)[:, None]
    done = record(load_policy(result.checkpoint).policy, [x])
    assert np.abs(done.continuous - x).mean() < 0.1  # a third of it would be 0.3 off
    assert (done.discrete[:, 0] == (x[:, 0] > 0)).mean() > 0.9


def test_steps_that_close_an_episode_are_not_imitated(demo, quick, tmp_path):
    rows = load_expert_rows([demo()], Both.spec)
    assert len(rows) == 180
    assert np.abs(rows.continuous).max() <= 1.0
    assert run([demo()], quick(), tmp_path).n_rows == 162


def test_demonstration_of_other_actions_is_refused(demo, quick, tmp_path):
    pair = [demo("a.demo"), demo("b.demo", spec=Chase.spec)]
    with pytest.raises(DemonstrationError, match=r"^[^\n]*b\.demo: its actions are[^\n]*$"):
        run(pair, quick(), tmp_path)


def test_demonstration_of_other_observations_is_refused(demo, quick, tmp_path):
    wide = Both.spec._replace(
        observation_specs=[Chase.spec.observation_specs[0]],
    )
    with pytest.raises(DemonstrationError, match=r"b\.demo: observation 0 has shape \(4,\)"):
        run([demo("a.demo"), demo("b.demo", spec=wide)], quick(), tmp_path)


def test_demonstration_without_a_step_to_imitate_is_refused(demo, quick, tmp_path):
    with pytest.raises(DemonstrationError, match="no step holds an action"):
        run([demo(n_rows=3, done_every=1)], quick(), tmp_path)


def test_folder_without_demonstrations_is_refused(quick, tmp_path):
    with pytest.raises(DemonstrationError, match=r"no '\.demo' files"):
        run([tmp_path], quick(), tmp_path)


def test_no_demonstration_at_all_is_refused(quick, tmp_path):
    with pytest.raises(DemonstrationError, match="no demonstration"):
        run([], quick(), tmp_path)


def test_folder_is_read_in_the_order_of_names(demo, tmp_path):
    folder = tmp_path / "demos"
    folder.mkdir()
    files = [demo("demos/b.demo", n_rows=20), demo("demos/a.demo", n_rows=50)]
    both = load_expert_rows([folder], Both.spec)
    apart = [load_expert_rows([file], Both.spec).obs[0] for file in reversed(files)]
    np.testing.assert_array_equal(both.obs[0], np.concatenate(apart))


def test_training_begins_with_the_cloned_policy_and_its_normaliser(
    demo, quick, tmp_path, in_process
):
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    cloned = run([demo()], quick(network_settings=network), tmp_path)
    begun = pipeline.train(
        in_process(Both(n_agents=4)),
        quick(network_settings=network, max_steps=1),
        seed=9,
        run_dir=tmp_path / "train",
        init_from={"Toy": cloned.checkpoint},
    ).behaviors["Toy"]
    one, two = (
        load_checkpoint(path)["learner"]["algorithm"]["policy"]
        for path in (cloned.checkpoint, begun.checkpoint)
    )
    assert float(one["normalizers.by_observation.0.count"]) == 1 + cloned.n_rows
    changed = {key for key in one if not torch.equal(one[key], two[key])}
    assert changed <= {
        f"normalizers.by_observation.0.{name}" for name in ("count", "mean", "squared")
    }
    assert load_policy(cloned.checkpoint).step == 0


def test_cloning_beside_reinforcement_learning_is_reported(
    demo, quick, tmp_path, in_process, recorder
):
    settings = quick(behavioral_cloning={"demo_path": str(demo())})
    pipeline.train(
        in_process(Both(n_agents=4)), settings, seed=1, run_dir=tmp_path / "t", sinks=[recorder]
    )
    losses = [
        values["Losses/Pretraining Loss"]
        for _, _, values in recorder.rows
        if "Losses/Pretraining Loss" in values
    ]
    assert len(losses) > 1
    assert losses[-1] < losses[0]


def test_cloning_with_demonstrations_of_another_behavior_is_refused(
    demo, quick, tmp_path, in_process
):
    settings = quick(behavioral_cloning={"demo_path": str(demo())})
    with pytest.raises(DemonstrationError, match="its actions are"):
        pipeline.train(in_process(Corridor()), settings, seed=1, run_dir=tmp_path / "t")
