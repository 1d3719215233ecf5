"""Pretraining of a policy by behavioral cloning."""

import numpy as np
import pytest
import torch
from crowds import LargestName
from remembering import Cue
from toys import Both, Chase, Corridor

from pipeline import seeding
from pipeline.algos.bc import BehavioralCloning, hold_out
from pipeline.core.specs import ActionTuple
from pipeline.demos.demo_file import writing_demo
from pipeline.demos.demonstrations import load_expert_rows
from pipeline.errors import DemonstrationError
from pipeline.export.publish import CONTINUOUS, DISCRETE, record
from pipeline.settings import load_run_settings
from pipeline.trainer import pretraining
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.checkpoints.restore import load_policy
from pipeline.trainer.pretraining import pretrain


@pytest.fixture
def demo(tmp_path):
    """Write a demonstration of `Both` in which the expert is always right."""

    def write(name="d.demo", *, n_rows=200, done_every=10, spec=Both.spec, behavior="Toy?team=0"):
        x = np.random.default_rng(0).uniform(-1, 1, (n_rows, spec.observation_specs[0].shape[0]))
        done = np.arange(1, n_rows + 1) % done_every == 0
        first = x[:, :1]
        actions = ActionTuple(
            np.where(done[:, None], 9.0, x)[:, : spec.action_spec.continuous_size],
            (first > 0).astype(int)[:, : spec.action_spec.discrete_size],
        )
        masks = [np.zeros((n_rows, size), bool) for size in spec.action_spec.discrete_branches]
        with writing_demo(tmp_path / name, behavior, spec) as writer:
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


def test_pretraining_lowers_the_loss_on_learned_and_on_held_out_steps(demo, quick, tmp_path):
    result = run([demo()], quick(), tmp_path)
    losses = [loss for loss, _ in result.losses]
    assert len(losses) == result.epochs == 20
    assert result.n_rows == 162  # 200 without the 20 that close an episode, less a tenth
    assert losses[-1] == result.loss < 0.6 * losses[0]
    assert result.losses[-1][1] == result.held_out_loss < 0.6 * losses[0]


def test_held_out_loss_is_the_loss_of_the_saved_policy_on_unseen_rows(
    demo, quick, tmp_path, monkeypatch
):
    parts = []

    def made(policy, rows, **options):
        parts.append(rows.obs[0].tolist())
        return BehavioralCloning(policy, rows, **options)

    monkeypatch.setattr(pretraining, "BehavioralCloning", made)
    result = run([demo()], quick(network_settings={"normalize": True}), tmp_path, epochs=2)
    rows = load_expert_rows([tmp_path / "d.demo"], Both.spec)
    seen, unseen = hold_out(rows, 0.1, seeding.stream(1, "held-out"))
    assert parts == [seen.obs[0].tolist(), unseen.obs[0].tolist()]
    saved = load_policy(result.checkpoint)
    options = {"batch_size": 32, "num_epoch": 1, "learning_rate": 1e-3, "seed": 1}
    losses = [BehavioralCloning(saved.policy, x, **options).measure() for x in (unseen, seen)]
    assert result.held_out_loss == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3
    assert len(saved.recorded_obs[0]) == 32
    assert {*saved.recorded_obs[0][:, 0].tolist()} <= {*seen.obs[0][:, 0].tolist()}


def test_cloned_policy_reproduces_the_actions_of_the_expert(demo, quick, tmp_path):
    network = {"hidden_units": 32, "num_layers": 2}
    settings = quick(network_settings=network)
    result = run([demo(n_rows=500)], settings, tmp_path, epochs=40)
    x = np.linspace(-0.9, 0.9, 50, dtype=np.float32)[:, None]
    done = record(load_policy(result.checkpoint).policy, [x])
    assert np.abs(done.expected[CONTINUOUS] - x).mean() < 0.1  # 0.3 if actions were divided by 3
    assert (done.expected[DISCRETE][:, 0] == (x[:, 0] > 0)).mean() > 0.9


def test_demonstrations_that_cannot_be_cloned_are_refused(demo, quick, tmp_path, train_in):
    pair = [demo("a.demo"), demo("b.demo", spec=Chase.spec)]
    with pytest.raises(DemonstrationError, match=r"^[^\n]*b\.demo: its actions are[^\n]*$"):
        run(pair, quick(), tmp_path)
    with pytest.raises(DemonstrationError, match="demos is empty"):
        run([], quick(), tmp_path)
    overrides = {"default_settings": {"trainer_type": "ppo"}}
    settings = load_run_settings(None, overrides=overrides)
    with pytest.raises(DemonstrationError, match=r"d\.demo: .*'\.\./evil'.*separate folders"):
        run([demo(behavior="../evil")], settings, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.demo", "b.demo", "d.demo"]
    beside = quick(behavioral_cloning={"demo_path": str(demo())})
    with pytest.raises(DemonstrationError, match="its actions are"):
        train_in(Corridor(), beside, run_dir=tmp_path / "t")


def test_training_starts_from_the_cloned_policy_and_its_normalizer(demo, quick, tmp_path, train_in):
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    cloned = run([demo()], quick(network_settings=network), tmp_path)
    begun = train_in(
        Both(n_agents=4),
        quick(network_settings=network, max_steps=1),
        seed=9,
        run_dir=tmp_path / "train",
        init_from={"Toy": cloned.checkpoint},
    ).behaviors["Toy"]
    before, after = (
        load_checkpoint(path)["learner"]["algorithm"]["policy"]
        for path in (cloned.checkpoint, begun.checkpoint)
    )
    assert float(before["normalizers.by_observation.0.count"]) == 1 + cloned.n_rows
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed <= {
        f"normalizers.by_observation.0.{name}" for name in ("count", "mean", "squared")
    }
    assert load_policy(cloned.checkpoint).step == 0


EPISODE = 5


@pytest.fixture
def late(tmp_path):
    """A demonstration in which an episode's last action is the cue in its first observation."""

    def write(n_episodes=60):
        rng = np.random.default_rng(0)
        n_rows = n_episodes * (EPISODE + 1)
        age = np.arange(n_rows) % (EPISODE + 1)
        which = np.repeat(rng.integers(0, 4, n_episodes), EPISODE + 1)
        obs = np.zeros((n_rows, 5), np.float32)
        obs[np.arange(n_rows), which] = age == 0
        obs[:, 4] = age == EPISODE - 1
        chosen = np.where(age == EPISODE - 1, which, 0)[:, None]
        with writing_demo(tmp_path / "late.demo", "Toy?team=0", Cue.spec) as writer:
            writer.append(
                obs=[obs],
                actions=ActionTuple(np.zeros((n_rows, 0)), chosen),
                reward=np.zeros(n_rows, np.float32),
                done=age == EPISODE,
                action_mask=[np.zeros((n_rows, 4), bool)],
            )
        return tmp_path / "late.demo"

    return write


def answers(policy, row=EPISODE - 1):
    """Return the policy's action at the end of an episode after each of the four cues."""
    choices = []
    for which in range(4):
        obs = np.zeros((EPISODE, 5), np.float32)
        obs[0, which] = obs[row, 4] = 1.0
        choices.append(int(record(policy, [obs]).expected[DISCRETE][row, 0]))
    return choices


def test_policy_with_memory_clones_an_expert_that_acts_on_earlier_observations(
    late, quick, tmp_path
):
    network = {"hidden_units": 16, "num_layers": 1}
    options = {"epochs": 80, "batch_size": 40, "learning_rate": 1e-2}
    memory = {"memory": {"sequence_length": 8, "memory_size": 32}}
    with_memory = run([late()], quick(network_settings=network | memory), tmp_path, **options)
    assert answers(load_policy(with_memory.checkpoint).policy) == [0, 1, 2, 3]
    assert with_memory.held_out_loss < 0.05
    without = run([late()], quick(network_settings=network), tmp_path, **options)
    assert len(set(answers(load_policy(without.checkpoint).policy))) == 1
    assert without.held_out_loss > 0.15


@pytest.fixture
def entities(tmp_path):
    """A demonstration with lists of entities as observations."""

    def write():
        spec = LargestName.spec
        ((decision, _),) = LargestName(n_agents=60).reset().values()
        with writing_demo(tmp_path / "d.demo", "Toy?team=0", spec) as writer:
            writer.append(
                obs=decision.obs,
                actions=spec.action_spec.empty_action(60),
                reward=np.ones(60, np.float32),
                done=np.zeros(60, np.bool_),
            )
        return tmp_path / "d.demo"

    return write


MEMORY = {"hidden_units": 16, "memory": {"sequence_length": 8, "memory_size": 16}}


@pytest.mark.parametrize(
    ("source", "toy", "changes", "share"),
    [
        ("demo", Both, {}, 1.0),
        ("late", Cue, {"network_settings": MEMORY, "max_steps": 1500}, 0.5),
        ("entities", LargestName, {}, 0.9),
    ],
)
def test_cloning_during_reinforcement_learning_reduces_and_reports_the_cloning_loss(
    source, toy, changes, share, quick, recorder, train_in, tmp_path, request
):
    path = str(request.getfixturevalue(source)())
    strength = {} if source == "demo" else {"strength": 10.0}
    settings = quick(behavioral_cloning={"demo_path": path, **strength}, **changes)
    train_in(toy(n_agents=4), settings, run_dir=tmp_path / "t", sinks=[recorder])
    losses = recorder.values("Losses/Pretraining Loss")
    assert len(losses) > 1
    assert losses[-1] < share * losses[0]
