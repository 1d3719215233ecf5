"""Compiled updates equal other updates; nets/test_compiled_steps.py tests single steps."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_poca import learner, message, play
from test_ppo import rollout
from test_sac import experience, made

from pipeline.algos.poca import POCA
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.data.columns import Columns
from pipeline.data.groups import GroupSnapshots
from pipeline.errors import TrainingError
from pipeline.nets import layers
from pipeline.nets.fast import compiled
from pipeline.settings import load_run_settings

SEEN = {
    "vectors": ObservationSpec.vector(4),
    "image": ObservationSpec.visual(3, 20, 20),
    "entities": ObservationSpec.entities(5, 4),
    "goals": ObservationSpec.vector(3)._replace(observation_type=ObservationType.GOAL_SIGNAL),
}


@pytest.fixture
def traced(caplog, monkeypatch):
    """Replace the compiler by the traced function: compiling takes half a minute."""
    caplog.set_level(logging.INFO, logger="pipeline")
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    monkeypatch.setattr(compiled, "_inner_program", lambda traced, *_: traced.forward)
    return caplog


def assert_same_weights(algorithm, other):
    for network, values in algorithm.weights().items():
        for name, value in values.items():
            if not name.endswith("attention.key.bias"):  # its gradients are only rounding errors
                same = other.weights()[network][name]
                torch.testing.assert_close(value, same, rtol=1e-4, atol=1e-5, msg=name)


def test_gradient_steps_are_compiled_if_no_group_has_absent_members(traced):
    algorithms = []
    for fast in (False, True):
        team_learner = learner()
        algorithm = team_learner.algorithm
        if fast:
            algorithm.compile()
        steps = ({1: (k, 0.0), 2: (-k, 0.5)} for k in range(4))
        ends = message({}, {1: (4.0, 1.0), 2: (5.0, 0.0)}, group_reward=3.0)
        played = play(team_learner, *(message(agents, group_reward=1.0) for agents in steps), ends)
        algorithm.update(played, step=0)
        algorithm.critic.update_largest_group(5)  # a group of two is now below the largest
        algorithm.update(played, step=10)
        algorithms.append(algorithm)
    assert "Compiled" in traced.text
    assert_same_weights(*algorithms)


def algorithm_that_sees(kind, trainer, **hyperparameters):
    spec = BehaviorSpec([ObservationSpec.vector(2), SEEN[kind]], ActionSpec(1, (2,)))
    behavior = {
        "trainer_type": trainer.__name__.lower(),
        "hyperparameters": {"batch_size": 16, "buffer_size": 64, **hyperparameters},
        "network_settings": {"hidden_units": 16, "goal_conditioning_type": "hyper"},
    }
    settings = load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]
    return trainer(spec, settings, seed=1, device=torch.device("cpu"))


def partly_there(algorithm, n_moments):
    """Return a rollout of one group of up to three agents, a row for each agent at each moment."""
    rng = np.random.default_rng(n_moments)
    counts = rng.integers(1, 4, n_moments)
    n_rows = int(counts.sum())
    plain = random_rollout(algorithm.spec, n_moments, n_kinds=3, n_rows=n_rows)
    moments = GroupSnapshots(Columns(algorithm.member_fields, algorithm.columns.obs))
    did = {name: plain.fields[name] for name in ("continuous", "discrete")}
    entity = moments.add_entities(n_rows, plain.obs, did)
    moment = moments.add_moments(entity, counts).repeat(counts)
    return replace(
        plain,
        fields={**plain.fields, "entity": entity, "moment": moment},
        at_end={"next_moment": moment[:2]},
        moments=moments,
    )


@pytest.mark.parametrize(
    ("kind", "is_large"), [("vectors", True), ("image", False), ("entities", False)]
)
def test_one_compiled_program_computes_all_minibatches_of_groups_with_absent_members(
    kind, is_large, traced, monkeypatch
):
    """Also minibatches in which no group is as large as the largest group so far."""
    monkeypatch.setattr(layers, "is_for_onednn", lambda *_: is_large)
    plain, fast = (algorithm_that_sees(kind, POCA, num_epoch=1) for _ in range(2))
    fast.compile()
    for step, n_moments in enumerate((41, 52, 60)):
        partial = partly_there(plain, n_moments)
        for algorithm in (plain, fast):
            algorithm.update(partial, step=step)
    assert len([line for line in traced.messages if "minibatches of about" in line]) == 1
    assert_same_weights(plain, fast)


def test_program_compiled_for_all_lengths_does_not_depend_on_the_first_minibatch(monkeypatch):
    """Otherwise a resumed run would continue with another program."""
    texts, examples = [], []

    def noted(traced, **_):
        texts.append(traced.__self__.code)

        def program(*args):
            examples.append(args)
            return traced(*args)

        return program

    monkeypatch.setattr(torch, "compile", noted)
    monkeypatch.setattr(compiled, "_inner_program", lambda traced, *_: traced.forward)
    for n_moments in (41, 60):
        algorithm = algorithm_that_sees("vectors", POCA, num_epoch=1)
        algorithm.compile()
        algorithm.update(partly_there(algorithm, n_moments), step=0)
    assert len(texts) == 2
    # The first call has the lengths that it is compiled with: torch takes equal lengths for one,
    # and layers have 16 units as minibatches have about 16 rows.
    values = examples[0][0]
    parameters = (*algorithm.optimizer.parameters, algorithm.optimizer.flat)
    fixed = {n for parameter in parameters for n in parameter.shape}
    assert 16 in fixed
    assert not fixed & {len(value) for value in values if value.dim()}
    assert texts[0] == texts[1]


def test_gradient_steps_are_not_compiled_if_a_group_member_has_no_row_yet(caplog):
    """Their minibatches have different numbers of rows, so each would be compiled again."""
    caplog.set_level(logging.INFO, logger="pipeline")
    team_learner = learner()
    team_learner.algorithm.compile()
    steps = ({1: (k, 0.0), 2: (-k, 0.5)} for k in range(6))
    first_ends = message({2: (9.0, 0.0)}, {1: (4.0, 1.0)})
    played = play(team_learner, *(message(agents) for agents in steps), first_ends)
    assert played.n_rows == 6  # rows of agent 1; agent 2 is its mate
    before = team_learner.algorithm.weights()["policy"]
    team_learner.algorithm.update(played, step=0)
    assert "Compiled" not in caplog.text
    changed = team_learner.algorithm.weights()["policy"]
    assert any(not torch.equal(changed[name], values) for name, values in before.items())


@pytest.mark.parametrize(("kind", "trainer"), [*((kind, PPO) for kind in SEEN), ("goals", SAC)])
@pytest.mark.usefixtures("traced")
def test_compiled_updates_equal_uncompiled_updates_for_minibatches_unlike_the_first(kind, trainer):
    """Numbers of goals and of entities change between updates."""
    plain, fast = (algorithm_that_sees(kind, trainer) for _ in range(2))
    fast.compile()
    assert (fast.optimizer.compiled is None) == (kind == "goals")
    for number in range(1, 4):
        experience = random_rollout(plain.spec, number, n_kinds=number)
        for algorithm in (plain, fast):
            algorithm.update(experience, step=64 * number)
    assert_same_weights(plain, fast)
    assert plain.optimizer.state_dict()["state"][0]["step"] > 3  # it has learned


@pytest.mark.usefixtures("traced")
def test_a_compiled_program_uses_the_action_masks_of_each_minibatch():
    plain, fast = (made("hybrid", batch_size=32) for _ in range(2))
    fast.compile()
    for step, masked in enumerate((False, True, True), 1):
        for algorithm in (plain, fast):
            algorithm.update(experience("hybrid", masked=masked), step=8 * step)
    assert plain.n_updates > 3
    torch.testing.assert_close(plain.log_alpha, fast.log_alpha, rtol=1e-4, atol=1e-6)
    assert fast.optimizer.compiled is not None


def random_rollout(spec, seed, *, n_kinds, n_rows=64):
    """Return two trajectories with `n_kinds` kinds of goals, or `n_kinds` entities."""
    result = rollout(spec, n_rows, seed=seed, length=-(-n_rows // 2))
    result.fields["continuous"] = np.tanh(result.fields["continuous"])
    other, seen = spec.observation_specs[1], result.obs[1]
    if other.observation_type == ObservationType.GOAL_SIGNAL:
        seen[:] = np.eye(3)[np.random.default_rng(seed).integers(0, n_kinds, n_rows)]
    if len(other.shape) == 2:
        seen[:, n_kinds:] = 0.0
    return result


def test_error_names_a_gradient_that_is_not_finite_after_compiled_steps():
    algorithm = algorithm_that_sees("vectors", PPO)
    algorithm.compile()
    algorithm.optimizer.gradient.fill_(math.nan)
    with pytest.raises(TrainingError, match=r"gradient of policy\.\S+ is not finite"):
        algorithm.refuse_divergence({"policy": 0.0}, step=1)


def test_without_a_compiler_training_warns_and_continues(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled.compiler() is None
    algorithm = learner().algorithm
    algorithm.compile()
    assert algorithm.optimizer.compiled is None
    assert "no C++ compiler is installed here" in caplog.text
