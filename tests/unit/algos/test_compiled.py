"""Compiled gradients: those of `backward`, whatever parameters and buffers have become since."""

import logging

import numpy as np
import pytest
import torch
from test_poca import learner, message, play
from torch import nn

from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.data.rollout import Rollout
from pipeline.nets import compiled
from pipeline.nets.optimizer import FlatAdam
from pipeline.protocol.specs import (
    ActionSpec,
    BehaviorSpec,
    ObservationSpec,
    ObservationType,
)
from pipeline.settings import load_run_settings


class Toy(nn.Module):
    """Two layers, a scale that is no parameter, and a parameter that nothing depends on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.idle = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(()))
        self.optimizer = FlatAdam(self.parameters(), learning_rate=0.1)

    def losses(self, columns):
        error = self.layers(columns["x"]) * self.scale - columns["y"]
        return error.square().mean(), (error,)


def trained(toy, sizes, *, change=1.0):
    """Errors of a step per minibatch; in between the buffer changes."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for n in sizes:
        columns = {
            "x": torch.randn(n, 3, generator=generator),
            "y": torch.randn(n, 2, generator=generator),
        }
        found += toy.optimizer.descend(toy.losses, columns, max_norm=0.5)
        toy.scale.mul_(change)
    return found


def test_compiled_steps_are_those_of_backward(caplog):
    caplog.set_level(logging.INFO, logger="pipeline")
    plain, fast = Toy(), Toy()
    fast.optimizer.compile()
    sizes = (4, 4, 6, 4)
    for one, two in zip(
        trained(plain, sizes, change=1.5), trained(fast, sizes, change=1.5), strict=True
    ):
        assert not two.requires_grad
        torch.testing.assert_close(one, two)
    assert len([line for line in caplog.messages if "Compiled" in line]) == 2  # of 4 rows and of 6
    assert torch.equal(fast.idle, torch.ones(4))
    for one, two in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_shapes_that_do_not_come_again_are_not_compiled(monkeypatch):
    toy = Toy()
    toy.optimizer.compile()
    monkeypatch.setattr(toy.optimizer.compiled, "_compiled", None)
    columns = {"x": torch.ones(2, 3), "y": torch.ones(2, 2)}
    toy.optimizer.descend(toy.losses, columns, steady=False)


def test_groups_whose_members_are_all_there_are_compiled(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="pipeline")
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    weights = []
    for fast in (False, True):
        one = learner()
        if fast:
            one.algorithm.compile()
        both = ({1: (k, 0.0), 2: (-k, 0.5)} for k in range(4))
        ends = message({}, {1: (4.0, 1.0), 2: (5.0, 0.0)}, group_reward=3.0)
        rollout = play(one, *(message(here, group_reward=1.0) for here in both), ends)
        one.algorithm.update(rollout, step=0)
        one.algorithm.critic.notice(5)  # from here on a group of two is a small one
        one.algorithm.update(rollout, step=10)
        weights.append(one.algorithm.weights())
    assert "Compiled" in caplog.text
    for network, values in weights[0].items():
        for name, value in values.items():
            torch.testing.assert_close(value, weights[1][network][name])


def partly_there(one, n_moments):
    """Experience of a group of three, of which now one ends before the rest and now another."""
    rng = np.random.default_rng(n_moments)
    members, told = [1, 2, 3], []
    for _ in range(n_moments):
        gone = set() if len(members) < 3 else {int(rng.integers(1, 4))}
        members = [id_ for id_ in (1, 2, 3) if id_ not in gone]
        saw = dict(zip((1, 2, 3), rng.normal(size=(3, 2)).tolist(), strict=True))
        told.append(message({id_: saw[id_] for id_ in members}, {id_: saw[id_] for id_ in gone}))
    last = message({}, dict.fromkeys(members, (0.0, 1.0)))
    return play(one, *told, last)


def test_one_program_takes_all_minibatches_of_groups_with_absent_members(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="pipeline")
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    weights, sizes = [], set()
    for fast in (False, True):
        one = learner(batch_size=12)
        if fast:
            one.algorithm.compile()
        for step, n_moments in enumerate((11, 13, 18)):
            rollout = partly_there(one, n_moments)
            sizes.add(rollout.n_rows)
            one.algorithm.update(rollout, step=step)
        weights.append(one.algorithm.weights())
    assert len(sizes) == 3
    assert len([line for line in caplog.messages if "minibatches of about 12 rows" in line]) == 1
    for network, values in weights[0].items():
        for name, value in values.items():
            torch.testing.assert_close(value, weights[1][network][name])


def test_a_program_for_all_lengths_is_the_same_whichever_minibatch_came_first(monkeypatch):
    """Else a run that is resumed would go on with another program."""
    texts = []

    def noted(traced, *, dynamic, **_):
        if dynamic:
            texts.append(traced.code)
        return traced

    monkeypatch.setattr(torch, "compile", noted)
    for n_moments in (11, 18):
        one = learner(batch_size=12)
        one.algorithm.compile()
        one.algorithm.update(partly_there(one, n_moments), step=0)
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_groups_of_which_some_rows_are_still_to_come_are_not_compiled(caplog):
    """Their minibatches have ever other numbers of rows, and each would be compiled anew."""
    caplog.set_level(logging.INFO, logger="pipeline")
    one = learner()
    one.algorithm.compile()
    both = ({1: (k, 0.0), 2: (-k, 0.5)} for k in range(6))
    first_ends = message({2: (9.0, 0.0)}, {1: (4.0, 1.0)})
    rollout = play(one, *(message(here) for here in both), first_ends)
    assert rollout.n_rows == 6  # of agent 1 alone, beside agent 2
    before = one.algorithm.weights()["policy"]
    one.algorithm.update(rollout, step=0)
    assert "Compiled" not in caplog.text
    changed = one.algorithm.weights()["policy"]
    assert any(not torch.equal(changed[name], values) for name, values in before.items())


SEEN = {
    "vectors": ObservationSpec.vector(4),
    "image": ObservationSpec.visual(3, 20, 20),
    "entities": ObservationSpec.entities(5, 4),
    "goals": ObservationSpec.vector(3)._replace(observation_type=ObservationType.GOAL_SIGNAL),
}


@pytest.mark.parametrize(("kind", "trainer"), [*((kind, PPO) for kind in SEEN), ("goals", SAC)])
def test_what_a_network_does_depends_on_no_minibatch_that_was_traced(kind, trainer, monkeypatch):
    """Numbers of goals and of entities change from update to update."""
    # what is traced decides; making it a program takes half a minute
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    spec = BehaviorSpec([ObservationSpec.vector(2), SEEN[kind]], ActionSpec(1, (2,)))
    name = trainer.__name__.lower()
    behavior = {
        "trainer_type": name,
        "hyperparameters": {"batch_size": 16, "buffer_size": 64},
        "network_settings": {"hidden_units": 16, "goal_conditioning_type": "hyper"},
    }
    settings = load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]
    plain, fast = (trainer(spec, settings, seed=1, device=torch.device("cpu")) for _ in range(2))
    fast.compile()
    assert (fast.optimizer.compiled is None) == (kind == "goals")
    rng = np.random.default_rng(0)
    for number in range(1, 4):
        rollout = random_rollout(spec, rng, n_kinds=number)
        for one in (plain, fast):
            one.update(rollout, step=64 * number)
    for one, two in zip(plain.policy.parameters(), fast.policy.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert plain.optimizer.state_dict()["state"][0]["step"] > 3  # it has learned


def random_rollout(spec, rng, *, n_kinds):
    """Two trajectories of 32 steps; goals are of so many kinds, and as many entities are there."""
    fields = {"obs_0": rng.normal(size=(64, 2)).astype(np.float32)}
    other = spec.observation_specs[1]
    seen = rng.normal(size=(64, *other.shape)).astype(np.float32)
    if other.observation_type == ObservationType.GOAL_SIGNAL:
        seen = np.eye(3, dtype=np.float32)[rng.integers(0, n_kinds, 64)]
    if len(other.shape) == 2:
        seen[:, n_kinds:] = 0.0
    fields["obs_1"] = seen
    fields |= {
        "continuous": np.tanh(rng.normal(size=(64, 1))).astype(np.float32),
        "discrete": rng.integers(0, 2, (64, 1)),
        "allowed": np.ones((64, 2), np.bool_),
        "log_prob": rng.normal(-1.0, 0.1, size=(64, 2)).astype(np.float32),
        "reward": rng.normal(size=64).astype(np.float32),
    }
    return Rollout(
        fields=fields,
        starts=np.array([0, 32]),
        lengths=np.array([32, 32]),
        terminated=np.zeros(2, np.bool_),
        next_obs=[fields["obs_0"][:2], fields["obs_1"][:2]],
    )


def test_without_a_compiler_training_says_so_and_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled.compiler() is None
    algorithm = learner().algorithm
    algorithm.compile()
    assert algorithm.optimizer.compiled is None
    assert "no C++ compiler is installed here" in caplog.text
