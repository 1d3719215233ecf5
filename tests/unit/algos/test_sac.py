"""SAC's losses computed by hand and by automatic derivatives, and whole updates."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_ppo import rollout

from pipeline.algos.rows import Rows
from pipeline.algos.sac import SAC
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.errors import TrainingError
from pipeline.nets.squashed import squashed_action
from pipeline.settings import load_run_settings

CPU = torch.device("cpu")
VECTOR = [ObservationSpec.vector(4)]
IMAGE_GOAL = ObservationSpec.visual(3, 20, 20)._replace(observation_type=1)
SPECS = {
    "continuous": BehaviorSpec(VECTOR, ActionSpec(2, ())),
    "discrete": BehaviorSpec(VECTOR, ActionSpec(0, (3, 2))),
    "hybrid": BehaviorSpec(VECTOR, ActionSpec(2, (3, 2))),
    "visual": BehaviorSpec([ObservationSpec.visual(3, 20, 20), *VECTOR], ActionSpec(1, ())),
    "image as goal": BehaviorSpec([*VECTOR, IMAGE_GOAL], ActionSpec(1, (3,))),
}
kinds = pytest.mark.parametrize("kind", SPECS)
SMALL = {"hidden_units": 8, "num_layers": 1, "normalize": True}
MOVED = {
    "one signal": {"extrinsic": {}},
    "two signals": {
        "extrinsic": {"gamma": 0.9, "strength": 0.7},
        "rnd": {"gamma": 0.5, "strength": 3.0, "network_settings": SMALL},
    },
}


def trainer_settings(network: dict | None = None, **hyperparameters):
    base = {
        "trainer_type": "sac",
        "hyperparameters": {"batch_size": 16, "buffer_size": 500, **hyperparameters},
        "network_settings": {"hidden_units": 16, **(network or {})},
    }
    return load_run_settings(None, overrides={"behaviors": {"B": base}}).behaviors["B"]


def signals(written: dict) -> dict:
    behavior = {"trainer_type": "sac", "reward_signals": written}
    read = load_run_settings(None, overrides={"behaviors": {"B": behavior}})
    return read.behaviors["B"].reward_signals


def made(kind: str, seed: int = 1, **hyperparameters) -> SAC:
    return SAC(SPECS[kind], trainer_settings(**hyperparameters), seed=seed, device=CPU)


def experience(kind: str, n_rows: int = 128, *, masked: bool = False):
    """Return random steps; with `masked`, half of the choices that were not taken are forbidden."""
    result = rollout(SPECS[kind], n_rows)
    result.fields["continuous"] = np.tanh(result.fields["continuous"])
    if masked:
        rng = np.random.default_rng(5)
        allowed = result.fields["allowed"]
        allowed &= rng.random(allowed.shape) < 0.5
        branches = SPECS[kind].action_spec.discrete_branches
        taken = result.fields["discrete"] + np.cumsum((0, *branches[:-1]))
        np.put_along_axis(allowed, taken, values=True, axis=1)
    return result


def test_only_targets_of_signals_that_ignore_done_include_values_after_the_end_of_a_task():
    settings = replace(trainer_settings(), reward_signals=signals(MOVED["two signals"]))
    sac = SAC(SPECS["continuous"], settings, seed=1, device=CPU)
    fields = {"rewards": torch.tensor([[1.0, 2.0]] * 2), "done": torch.tensor([False, True])}
    target = sac.targets(Rows(obs=[], fields=fields), torch.tensor([[10.0, 100.0]] * 2))
    assert target.tolist() == [[10.0, 52.0], [1.0, 52.0]]


def test_squashed_log_density_equals_the_transformed_distribution_of_torch():
    rows = torch.Generator().manual_seed(0)
    mu, log_sigma, noise = torch.randn(3, 200, 2, generator=rows, dtype=torch.float64)
    action, log_prob = squashed_action(mu=mu, log_sigma=log_sigma * 0.3, noise=noise)
    normal = torch.distributions.Normal(mu, (log_sigma * 0.3).exp())
    bent = torch.distributions.TransformedDistribution(
        normal, torch.distributions.transforms.TanhTransform(cache_size=1)
    )
    u = mu + (log_sigma * 0.3).exp() * noise
    torch.testing.assert_close(action, u.tanh())
    expected = normal.log_prob(u) - torch.log1p(-u.tanh().square())
    inside = u.abs() < 8  # where the plain form is exact enough
    torch.testing.assert_close(log_prob[inside], expected[inside])
    torch.testing.assert_close(bent.log_prob(action)[u.abs() < 3], log_prob[u.abs() < 3])


def test_squashed_log_density_and_its_derivative_are_finite_at_an_action_of_1():
    mu = torch.tensor([[40.0]], requires_grad=True)
    action, log_prob = squashed_action(mu=mu, log_sigma=torch.zeros(1, 1), noise=torch.ones(1, 1))
    assert float(action.detach()) == 1.0
    expected = -0.5 - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 41)
    assert float(log_prob.detach()) == pytest.approx(expected)
    log_prob.sum().backward()
    assert float(mu.grad) == pytest.approx(2.0)  # -dlog(1 - tanh(u)^2)/du = 2 tanh(u)


def squashed(heads, hidden, noise) -> tuple[torch.Tensor, torch.Tensor]:
    """Return squashed actions, and their log densities [B], by the formula."""
    mu, log_sigma = heads.mu(hidden), heads.spread(hidden).clamp(-20, 2)
    action = torch.tanh(mu + log_sigma.exp() * noise)
    density = torch.distributions.Normal(0.0, 1.0).log_prob(noise) - log_sigma
    return action, (density - torch.log(1 - action.square() + 1e-9)).sum(1)


def slow_losses(algorithm: SAC, batch) -> dict[str, torch.Tensor]:
    """Return the five losses, written branch by branch from the papers."""
    actions, actor = algorithm.spec.action_spec, algorithm.policy.actor
    n, n_signals = len(batch.done), len(algorithm.signals.names)
    hidden = actor(batch.obs)
    alpha = algorithm.log_alpha.exp()
    fixed_alpha = alpha.detach()
    h = algorithm.settings.hyperparameters
    action, soft_cost, alpha_loss = batch.continuous, torch.zeros(n), torch.zeros(())
    choices_cost = torch.zeros(n)
    offset = 0
    if actions.continuous_size:
        stream = torch.Generator()
        stream.set_state(algorithm.noise_stream.get_state())
        noise = torch.empty_like(batch.continuous).normal_(generator=stream)
        action, density = squashed(actor.heads, hidden, noise)
        soft_cost = soft_cost + fixed_alpha[0] * density
        per_component = -1.0
        if h.target_sigma is not None:
            per_component = 0.5 * math.log(2 * math.pi * math.e * h.target_sigma**2)
        target_entropy = per_component * actions.continuous_size
        gap = density.detach() + target_entropy
        alpha_loss = alpha_loss - (algorithm.log_alpha[0] * gap).mean()
        offset = 1
    twins = {"first": algorithm.q_networks.first, "second": algorithm.q_networks.second}
    fresh = [twin(twin.body.features(batch.obs), action, None) for twin in twins.values()]
    discrete = bool(actions.discrete_size)
    expected = [torch.zeros(n, n_signals) if discrete else q.squeeze(-1) for q in fresh]
    logs = actor.heads.branch_log_probs(hidden, batch.allowed)
    start = 0
    for b, log_p in enumerate(logs):
        size, share = log_p.shape[1], 1 / len(logs)
        p = log_p.exp()
        for t, q in enumerate(fresh):
            part = (p[:, None, :] * q[:, :, start : start + size]).sum(-1)
            expected[t] = expected[t] + share * part
        inner = (p * log_p).sum(1)
        soft_cost = soft_cost + share * fixed_alpha[offset + b] * inner
        choices_cost = choices_cost + share * fixed_alpha[offset + b] * inner
        n_allowed = batch.allowed[:, start : start + size].sum(1)
        target_entropy = torch.tensor([0.2 * math.log(count) for count in n_allowed.tolist()])
        gap = inner.detach() + target_entropy
        alpha_loss = alpha_loss - share * (algorithm.log_alpha[offset + b] * gap).mean()
        start += size
    policy_loss = (soft_cost - expected[0].mean(-1)).mean()
    learned_cost = soft_cost - choices_cost if h.decoupled_entropy else soft_cost
    v_target = (torch.minimum(*expected) - learned_cost[:, None]).detach()
    value = algorithm.value(batch.obs, batch.obs[0])
    with torch.no_grad():
        following = algorithm.target(batch.next_obs, batch.next_obs[0])
    discount = batch.fields.get("discount", algorithm.signals.gamma)
    y = batch.rewards + discount * following * (~batch.done)[:, None]
    losses = {"policy": policy_loss, "value": 0.5 * (value - v_target).square().mean()}
    for name, twin in twins.items():
        q = twin(twin.body.features(batch.obs), batch.continuous, None)
        first = np.cumsum([0, *actions.discrete_branches])[:-1]  # of each branch, among all choices
        taken = [q[range(n), :, batch.discrete[:, b] + int(at)] for b, at in enumerate(first)]
        q = torch.stack(taken).mean(0) if discrete else q.squeeze(-1)
        losses[name] = 0.5 * (y - q).square().mean()
    losses["alpha"] = alpha_loss
    return losses


OPTIONS = {"n_steps": 3, "decoupled_entropy": True, "target_sigma": 0.15}
OPTIONS |= {"held_noise": 4, "reward_normalization": True}


@pytest.mark.parametrize(
    ("kind", "masked", "moved", "options"),
    [
        *((kind, False, None, {}) for kind in SPECS),
        *(("discrete", True, None, {}), ("hybrid", True, None, {})),
        *((kind, False, moved, {}) for kind in ("continuous", "hybrid") for moved in MOVED),
        ("continuous", False, "one signal", {"target_sigma": 0.15}),
        ("discrete", True, None, {"decoupled_entropy": True}),
        ("hybrid", True, "one signal", OPTIONS),
    ],
)
def test_gradients_of_the_summed_loss_equal_gradients_of_the_five_separate_losses(
    kind, masked, moved, options
):
    """New networks, and networks with different weights; one signal, and two signals."""
    changes = {} if moved is None else {"tau": 0.01, "learning_rate": 0.01}
    settings = trainer_settings(init_entcoef=0.3, **changes, **options)
    if moved is not None:
        settings = replace(settings, reward_signals=signals(MOVED[moved]))
    algorithm = SAC(SPECS[kind], settings, seed=1, device=CPU)
    new = experience(kind, masked=masked)
    new = replace(new, slots=np.arange(len(new.lengths)))
    if moved is not None:
        new.terminated[::2] = moved == "one signal"
        new.fields["reward"] *= 5
        algorithm.update(new, step=20)
    algorithm.replay.add(new)
    (batch,) = algorithm.sampler.minibatches(1)
    losses = slow_losses(algorithm, batch)
    twins = algorithm.q_networks
    networks = {"policy": algorithm.policy, "value": algorithm.value}
    networks |= {"first": twins.first, "second": twins.second}
    owners = {name: list(network.parameters()) for name, network in networks.items()}
    owners["alpha"] = [algorithm.log_alpha]
    expected = {
        name: torch.autograd.grad(losses[name], owners[name], retain_graph=True) for name in losses
    }
    reported = algorithm.learn_minibatch(batch)
    for name, parameters in owners.items():
        for parameter, gradient in zip(parameters, expected[name], strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=2e-4, atol=2e-6)
    named = torch.stack([losses[name] for name in ("policy", "value", "first", "second")])
    torch.testing.assert_close(reported[:4], named.detach(), rtol=1e-4, atol=1e-5)


def assert_n_step_returns(algorithm, new, rewards, gammas, n_steps, *, rtol) -> None:
    """Compare a minibatch with sums of the rewards [R, S] of a rollout."""
    (batch,) = algorithm.sampler.minibatches(1)
    ends = new.starts + new.lengths
    for row in range(len(batch)):
        first = int(np.flatnonzero((new.obs[0] == batch.obs[0][row].numpy()).all(1))[0])
        trajectory = int(np.searchsorted(ends, first, side="right"))
        last = min(first + n_steps, ends[trajectory])
        powers = gammas ** np.arange(last - first + 1)[:, None]
        expected = (powers[:-1] * rewards[first:last]).sum(0)
        np.testing.assert_allclose(batch.rewards[row], expected, rtol=rtol, atol=rtol / 100)
        is_last = last == ends[trajectory]
        assert bool(batch.done[row]) == (is_last and new.terminated[trajectory])
        after = new.next_obs[0][trajectory] if is_last else new.obs[0][last]
        np.testing.assert_array_equal(batch.next_obs[0][row].numpy(), after)
        discount = batch.fields.get("discount", algorithm.signals.gamma.expand(len(batch), -1))
        np.testing.assert_allclose(discount[row], powers[-1], rtol=1e-5)
        for name, masks in new.at_end.items():
            allowed = masks[trajectory] if is_last else new.fields["allowed"][last]
            np.testing.assert_array_equal(batch.fields[name][row].numpy(), allowed)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_n_step_rewards_are_sums_with_the_discount_of_each_signal(n_steps):
    """Also divided by the spread of each signal's returns, times its share of strength."""
    settings = trainer_settings(n_steps=n_steps, reward_normalization=True, batch_size=128)
    two = {"extrinsic": {"gamma": 0.9, "strength": 0.6}, "rnd": {"gamma": 0.5, "strength": 0.3}}
    settings = replace(settings, reward_signals=signals(two))
    algorithm = SAC(SPECS["continuous"], settings, seed=1, device=CPU)
    new = replace(experience("continuous"), slots=np.arange(4))
    new.terminated[::2] = True
    algorithm.update(new, step=0)
    curious = algorithm.signals.by_name["rnd"]
    with torch.no_grad():
        seen = [torch.from_numpy(values) for values in new.obs]
        surprise = (curious.predictor(seen) - curious.target(seen)).square().sum(1).numpy()
    rewards = np.stack((0.6 * new.fields["reward"], 0.3 * surprise), axis=1)
    sums = np.zeros_like(rewards)
    for start, length in zip(new.starts, new.lengths, strict=True):
        total = np.zeros(2)
        for row in range(start, start + length):
            total = sums[row] = np.array([0.9, 0.5]) * total + rewards[row]
    spread = np.maximum(sums.std(0), np.abs(sums).max(0) / 5)
    np.testing.assert_allclose(algorithm.reward_scale.divisor, spread, rtol=1e-4)
    scaled = rewards * 2 * np.array([2 / 3, 1 / 3]) / spread
    assert_n_step_returns(algorithm, new, scaled, np.array([0.9, 0.5]), n_steps, rtol=1e-3)


@pytest.mark.parametrize("kind", ["continuous", "discrete", "hybrid"])
def test_target_entropies_equal_the_formula_exactly_if_no_choice_is_forbidden(kind):
    algorithm = made(kind)
    algorithm.replay.add(experience(kind))
    (batch,) = algorithm.sampler.minibatches(1)
    actions = SPECS[kind].action_spec
    expected = [-2.0] * (actions.continuous_size > 0)
    expected += [0.2 * math.log(size) for size in actions.discrete_branches]
    assert torch.equal(algorithm._targets(batch.allowed), torch.tensor(expected))


def test_a_row_that_forbids_all_choices_has_a_target_entropy_of_0():
    algorithm = made("discrete")
    allowed = torch.tensor([[False, False, False, True, True], [True, True, False, False, True]])
    expected = [0.2 * math.log(2) / 2, 0.2 * math.log(2) / 2]
    torch.testing.assert_close(algorithm._targets(allowed), torch.tensor(expected))


def test_target_network_moves_by_tau_towards_the_value_network():
    algorithm = made("continuous", tau=0.1)
    algorithm.replay.add(experience("continuous"))
    before = copy.deepcopy(algorithm.target.state_dict())
    (batch,) = algorithm.sampler.minibatches(1)
    algorithm.learn_minibatch(batch)
    now = algorithm.value.state_dict()
    for name, values in algorithm.target.state_dict().items():
        torch.testing.assert_close(values, 0.9 * before[name] + 0.1 * now[name])


@pytest.mark.parametrize(
    ("every", "steps"), [(1.0, [40, 80]), (10.0, [40, 100, 333]), (0.25, [40])]
)
def test_number_of_due_gradient_steps_is_computed_from_steps_per_update(every, steps):
    algorithm = made("continuous", buffer_init_steps=20, steps_per_update=every)
    algorithm.replay.add(experience("continuous"))
    n = 1
    for step in steps:
        n_due = algorithm._due(step, n, every)
        slow = n
        while (step - 20) / slow > every:
            slow += 1
        assert n_due == slow - n
        n += n_due


def test_no_gradient_step_is_made_before_there_are_enough_rows_and_steps():
    algorithm = made("continuous", buffer_init_steps=100)
    assert algorithm.update(experience("continuous", 64), step=64) == {}
    assert len(algorithm.replay) == 64
    stats = algorithm.update(experience("continuous", 64), step=128)
    assert algorithm.n_updates == 28
    assert {"Losses/Q1 Loss", "Policy/Continuous Entropy Coeff", "Policy/Extrinsic Value"} <= set(
        stats
    )
    large_batch_sac = made("continuous", batch_size=100)
    assert large_batch_sac.update(experience("continuous", 96), step=96) == {}


@kinds
def test_stored_actions_are_in_range_and_equal_the_actions_for_the_environment(kind):
    algorithm = made(kind)
    rng = np.random.default_rng(0)
    obs = [
        rng.normal(size=(50, *o.shape)).astype(np.float32) for o in SPECS[kind].observation_specs
    ]
    decision = algorithm.act(obs, None)
    assert np.abs(decision.action.continuous).max(initial=0.0) <= 1.0
    np.testing.assert_array_equal(decision.action.continuous, decision.rows["continuous"])
    assert set(decision.rows) == {*algorithm.fields, "log_prob"}
    assert "log_prob" not in algorithm.fields


def test_loss_that_is_not_finite_stops_the_run():
    algorithm = made("continuous")
    bad = experience("continuous")
    bad.fields["reward"][:] = np.inf
    with pytest.raises(TrainingError, match="step 128: the SAC loss is not finite"):
        algorithm.update(bad, step=128)


def test_values_of_next_observations_use_the_memory_after_the_first_row_of_each_sequence():
    settings = trainer_settings({"memory": {"sequence_length": 4, "memory_size": 8}})
    algorithm = SAC(SPECS["continuous"], settings, seed=1, device=CPU)
    new = experience("continuous", 32)
    memory = np.random.default_rng(3).normal(size=(1, 8, 16)).astype(np.float32)
    algorithm.replay.add(replace(new, memory=memory))
    (batch,) = algorithm.sampler.minibatches(1)
    actor, critics, following = algorithm._sequence_states(batch)
    assert actor.memory.shape == critics.memory.shape == (4, 8)
    for s, first in enumerate((0, 4, 8, 12)):
        seen = [batch.obs[0][first : first + 1]]
        expected = algorithm.value.step(seen, critics.memory[s : s + 1])
        torch.testing.assert_close(following.memory[s : s + 1], expected.detach())
    assert np.isfinite(algorithm.learn_minibatch(batch).numpy()).all()


def parameters_of(algorithm: SAC, module: str) -> torch.Tensor:
    parameters = algorithm.signals.modules[module].parameters()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@pytest.mark.parametrize("kind", ["continuous", "hybrid"])
def test_each_reward_signal_has_its_own_values_and_gradient_steps(kind):
    settings = replace(
        trainer_settings(steps_per_update=4, reward_signal_steps_per_update=8),
        reward_signals=signals({"extrinsic": {}, "curiosity": {"strength": 0.1}, "rnd": {}}),
    )
    algorithm = SAC(SPECS[kind], settings, seed=1, device=CPU)
    learning = ("Module:Curiosity", "Module:RND-pred")
    before = {name: parameters_of(algorithm, name) for name in learning}
    stats = algorithm.update(experience(kind), step=80)
    assert algorithm.n_updates == 20
    assert algorithm.n_signal_updates == 10
    assert {"Policy/Extrinsic Value", "Policy/Curiosity Value", "Policy/Rnd Value"} <= set(stats)
    assert {"Losses/Curiosity Forward Loss", "Losses/RND Loss"} <= set(stats)
    for name in learning:
        assert not torch.equal(before[name], parameters_of(algorithm, name)), name
