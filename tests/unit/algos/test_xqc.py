"""XQC and CrossQ: losses equal slow versions; effects of an update on every network."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_cases import CASES, behavior, demonstration
from test_sac import CPU, SPECS, assert_n_step_returns, experience, squashed
from torch.nn.functional import silu

from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.policy import Policy
from pipeline.algos.xqc import XQC, shifted_distribution
from pipeline.core.specs import BehaviorSpec, ObservationSpec
from pipeline.demos.demonstrations import ExpertRows
from pipeline.errors import SettingsError
from pipeline.export.policy import create_session
from pipeline.export.publish import build_model
from pipeline.nets.batch_norm import EPSILON, RENORMALIZED_AFTER
from pipeline.settings import load_run_settings

KINDS = {
    **{kind: SPECS[kind] for kind in ("continuous", "discrete", "hybrid", "visual")},
    "entities": BehaviorSpec(
        [ObservationSpec.vector(3), ObservationSpec.entities(4, 2)], SPECS["continuous"].action_spec
    ),
    "goal": SPECS["image as goal"],
    "demonstrated": behavior(CASES["xqc, hybrid"]),
}
kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "demonstrated"])
modes = pytest.mark.parametrize("mode", ["xqc", "crossq"])
GAMMA = 0.9
NOTHING: dict = {}


def settings_of(network=NOTHING, signals=NOTHING, behavior=NOTHING, **hyperparameters):
    usual = {"batch_size": 16, "buffer_size": 500, "buffer_init_steps": 0, "learning_rate": 3e-3}
    base = {
        "trainer_type": "xqc",
        "hyperparameters": usual | hyperparameters,
        "network_settings": {"hidden_units": 16, "goal_conditioning_type": "none"} | network,
        "reward_signals": {"extrinsic": {"gamma": GAMMA, "strength": 0.7}, **signals},
        **behavior,
    }
    return load_run_settings(None, overrides={"behaviors": {"B": base}}).behaviors["B"]


def made(kind: str, mode: str = "xqc", seed: int = 1, **options) -> XQC:
    settings = settings_of(critic=mode, **options)
    return XQC(KINDS[kind], settings, seed=seed, device=CPU)


def rows_of(kind: str, n_rows: int = 128, *, masked: bool = False):
    SPECS.setdefault(kind, KINDS[kind])  # where `experience` finds the specification
    rollout = experience(kind, n_rows, masked=masked)
    ends = {}
    if "allowed" in rollout.fields:  # next masks are the masks of other rows
        ends["next_allowed"] = rollout.fields["allowed"][: len(rollout.lengths)]
    return replace(rollout, slots=np.arange(len(rollout.lengths)), at_end=ends)


def trained(kind: str, mode: str, n_updates: int = 7, *, masked: bool = True, **options) -> XQC:
    """Return an algorithm after some updates, so that no statistic has its initial value."""
    algorithm = made(kind, mode, **options)
    has_branches = bool(KINDS[kind].action_spec.discrete_branches)
    algorithm.update(rows_of(kind, masked=masked and has_branches), step=n_updates + 1)
    assert algorithm.n_updates == n_updates + 1
    return algorithm


# --- Slow versions of the losses ---------------------------------------------------------------


def normalized(x, scale, shift):
    mean = x.sum(0) / len(x)
    variance = ((x - mean) ** 2).sum(0) / len(x)
    return (x - mean) / (variance + EPSILON).sqrt() * scale + shift


def slow_hidden(layers, x, activation):
    x = normalized(x, layers.scales[0], layers.shifts[0])
    for number, weight in enumerate(layers.weights):
        scale, shift = layers.scales[number + 1], layers.shifts[number + 1]
        y = x @ weight.T
        if layers.is_before:
            x = activation(normalized(y, scale, shift))
        else:
            x = normalized(activation(y + layers.biases[number]), scale, shift)
    return x


def slow_outputs(critics, obs, actions):
    """Return outputs [critics][B, K, atoms] of a minibatch, by its statistics."""
    outputs = []
    for critic in critics.critics:
        x = torch.cat((critic.body(obs), actions), dim=1)
        hidden = slow_hidden(critic.layers, x, torch.relu)
        outputs.append((hidden @ critic.head.weight.T + critic.head.bias).view(-1, *critic.shape))
    return outputs


def slow_projection(probability, atoms, reward, discount, cost):
    """Return C51's target of one row, computed atom by atom."""
    n = len(atoms)
    result = torch.zeros(n)
    for j in range(n):
        value = float(reward + discount * (atoms[j] - cost))
        lowest, highest = float(atoms[0]), float(atoms[-1])
        place = (min(max(value, lowest), highest) - lowest) / (highest - lowest) * (n - 1)
        low, high = math.floor(place), math.ceil(place)
        if low == high:
            result[min(low, n - 1)] += probability[j]
        else:
            result[low] += probability[j] * (high - place)
            result[high] += probability[j] * (place - low)
    return result


def slow_critic_loss(algorithm, batch, noise):
    actions, alpha = algorithm.spec.action_spec, algorithm.log_alpha.detach().exp()
    branches = actions.discrete_branches
    starts = [sum(branches[:i]) for i in range(len(branches))]
    with torch.no_grad():
        heads, cost = algorithm.policy.actor.heads, torch.zeros(len(batch))
        hidden = algorithm.policy.actor(batch.next_obs)
        drawn = batch.continuous
        if actions.continuous_size:
            drawn, log_p = squashed(heads, hidden, noise)
            cost = alpha[0] * log_p
        log_probs = heads.branch_log_probs(hidden, batch.fields.get("next_allowed"))
        chances = [branch.exp() for branch in log_probs]
    obs = [torch.cat(pair) for pair in zip(batch.obs, batch.next_obs, strict=True)]
    joint = torch.cat((batch.continuous, drawn))
    online = slow_outputs(algorithm.critics, obs, joint)
    with torch.no_grad():
        target = algorithm.target
        following = online if target is None else slow_outputs(target, obs, joint)
    n, loss, is_distribution = len(batch), 0.0, algorithm.recipe.n_atoms > 1
    for row in range(n):
        reward = batch.rewards[row, 0]
        discount = batch.fields["discount"][row, 0] * ~batch.done[row]
        means, mixtures = [], []
        for outputs in following:
            values = outputs[n + row].detach()
            parts = values.softmax(-1) if is_distribution else values
            mixture = parts[0]
            if branches:
                mixture = sum(
                    (chance[row].unsqueeze(1) * parts[start : start + len(chance[row])]).sum(0)
                    for start, chance in zip(starts, chances, strict=True)
                ) / len(branches)
            mixtures.append(mixture)
            means.append(float(mixture @ algorithm.atoms if is_distribution else mixture))
        least = mixtures[means.index(min(means))]
        taken = [start + int(batch.discrete[row, i]) for i, start in enumerate(starts)] or [0]
        for outputs in online:
            for place in taken:
                if is_distribution:
                    target = slow_projection(least, algorithm.atoms, reward, discount, cost[row])
                    term = -(target * outputs[row, place].log_softmax(-1)).sum()
                else:
                    target = reward + discount * (least - cost[row])
                    term = 0.5 * (target - outputs[row, place]).square().sum()
                loss = loss + term / (n * len(taken))
    return loss


def slow_actor_loss(algorithm, batch, noise):
    actions, alpha = algorithm.spec.action_spec, algorithm.log_alpha.detach().exp()
    actor = algorithm.actor
    hidden = slow_hidden(actor.layers, actor.body(batch.obs), silu)
    drawn, costs, entropies, n = batch.continuous, [], [], len(batch)
    if actions.continuous_size:
        drawn, log_p = squashed(actor.heads, hidden, noise)
        costs.append(alpha[0] * log_p)
        goal = 0.5 * actions.continuous_size * math.log(2 * math.pi * math.e * 0.15**2)
        entropies.append((-log_p.mean() - goal, 1.0))
    n_branches = len(actions.discrete_branches)
    branches = actor.heads.branch_log_probs(hidden, batch.allowed)
    for number, branch in enumerate(branches):
        negative = (branch.exp() * branch).sum(1)
        costs.append(alpha[len(alpha) - n_branches + number] * negative / n_branches)
        allowed = batch.allowed.split(list(actions.discrete_branches), 1)[number].sum(1)
        goal = (0.2 * allowed.clamp_min(1).log()).mean()
        entropies.append((-negative.mean() - goal, 1 / n_branches))
    values = []
    for critic in algorithm.critics.critics:
        x = critic.layers(torch.cat((critic.body(batch.obs), drawn), dim=1))
        output = (x @ critic.head.weight.T + critic.head.bias).view(n, *critic.shape)
        value = output.squeeze(-1)
        if algorithm.recipe.n_atoms > 1:
            value = output.softmax(-1) @ algorithm.atoms
        if branches:
            value = (value * torch.cat(branches, 1).exp()).sum(1) / n_branches
        values.append(value.view(n))
    loss = (sum(costs) - torch.minimum(*values)).mean()
    own_alpha = algorithm.log_alpha.exp()
    for number, (gap, weight) in enumerate(entropies):
        loss = loss + weight * own_alpha[number] * gap.detach()
    return loss


@modes
@kinds
def test_losses_and_gradients_of_xqc_and_crossq_equal_the_results_of_a_slow_implementation(
    kind, mode
):
    algorithm = trained(kind, mode)
    (batch,) = algorithm.sampler.minibatches(1)
    inputs = algorithm._with_noise(batch)
    noise = inputs.get("noise")
    for fast, slow, optimizer in (
        (algorithm.critic_losses, slow_critic_loss, algorithm.optimizer),
        (algorithm.actor_losses, slow_actor_loss, algorithm.actor_optimizer),
    ):
        loss, expected = fast(inputs)[0], slow(algorithm, batch, noise)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        gradients = (
            torch.autograd.grad(value, optimizer.parameters, allow_unused=True)
            for value in (loss, expected)
        )
        for own, other in zip(*gradients, strict=True):
            assert (own is None) == (other is None)
            if own is not None:
                torch.testing.assert_close(own, other, rtol=1e-3, atol=2e-5)


def test_a_return_at_an_atom_keeps_all_probability_mass_at_that_atom():
    atoms = torch.linspace(-5, 5, 11)
    probability = torch.eye(11)
    nothing = torch.zeros(11)

    def shifted(reward, discount, cost):
        by = {"reward": nothing + reward, "discount": nothing + discount, "cost": nothing + cost}
        return shifted_distribution(probability, **by, atoms=atoms)

    same, clipped = shifted(0, 1, 0)
    assert torch.equal(same, probability)
    assert clipped == 0
    up, clipped = shifted(1, 1, 0)
    assert torch.equal(up[:-1], probability[1:])
    assert torch.equal(up[-1], probability[-1])  # mass outside the range is counted
    torch.testing.assert_close(clipped, torch.tensor(1 / 11))
    ended, _ = shifted(0.25, 0, 9)
    expected = torch.zeros(11)
    expected[5], expected[6] = 0.75, 0.25
    torch.testing.assert_close(ended, expected.expand(11, 11))


# --- An update ---------------------------------------------------------------------------------


def test_the_actor_learns_at_every_third_update_and_the_target_network_moves_at_each_update():
    algorithm = made("continuous", tau=0.1)
    algorithm.replay.add(rows_of("continuous"))
    for number, batch in enumerate(algorithm.sampler.minibatches(5)):
        before = copy.deepcopy(algorithm.weights())
        temperature = algorithm.log_alpha.detach().clone()
        target = [values.clone() for values in algorithm.target.parameters()]
        algorithm.learn_minibatch(batch)
        algorithm.n_updates += 1
        moved = {
            name
            for name, tensors in algorithm.weights().items()
            if any(not torch.equal(tensors[key], before[name][key]) for key in tensors)
        }
        learned = {"actor", "policy"} if number % 3 == 0 else set()
        assert moved == {"critics", "target"} | learned
        assert torch.equal(temperature, algorithm.log_alpha) == (not learned)
        networks = algorithm.target.parameters(), algorithm.critics.parameters()
        for was, now, source in zip(target, *networks, strict=True):
            torch.testing.assert_close(now, 0.9 * was + 0.1 * source)


@modes
def test_weights_of_units_have_norm_one_only_in_xqc(mode):
    algorithm = trained("hybrid", mode)
    parameters = [*algorithm.actor.parameters(), *algorithm.critics.parameters()]
    weights = [weight for weight in parameters if weight.ndim == 2]
    assert len(weights) == 2 + 4 + 2 * 3
    norms = torch.cat([torch.linalg.vector_norm(weight, dim=1) for weight in weights])
    assert bool(((norms - 1).abs() < 1e-5).all()) == (mode == "xqc")


@modes
def test_running_statistics_follow_each_minibatch_of_states_and_next_states(mode):
    algorithm = trained("continuous", mode)
    (batch,) = algorithm.sampler.minibatches(1)
    critic = algorithm.critics.critics[0]
    before = critic.layers.running.clone()
    algorithm.n_updates = 3  # no step of the actor
    algorithm.learn_minibatch(batch)
    moved = (critic.layers.running - 0.99 * before) / 0.01
    observed = torch.cat((batch.obs[0], batch.next_obs[0]))
    torch.testing.assert_close(moved[0, :4], observed.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(moved[1, :4], observed.var(0, correction=0), rtol=1e-3, atol=1e-3)


def test_batch_renormalisation_begins_after_100000_minibatches():
    algorithm = trained("continuous", "crossq")
    layers = algorithm.critics.critics[0].layers
    x = torch.randn(64, 6) * 3 + 1
    plain, statistics = layers.in_training(x)
    layers.n_batches.fill_(RENORMALIZED_AFTER)
    corrected, same = layers.in_training(x)
    assert torch.equal(statistics[:, :6], same[:, :6])  # features of the input
    assert not torch.allclose(plain, corrected)
    # Within the limits the result equals normalisation by the running statistics.
    layers.observe(statistics, 1.0)
    close, _ = layers.in_training(x)
    torch.testing.assert_close(close, layers(x), rtol=1e-3, atol=1e-3)


@modes
@kinds
def test_the_acting_policy_equals_the_trained_policy_with_running_statistics(kind, mode):
    algorithm = trained(kind, mode)
    rollout = rows_of(kind)
    obs = [torch.from_numpy(values) for values in rollout.obs]
    heads, trained_heads = algorithm.policy.actor.heads, algorithm.actor.heads
    with torch.no_grad():
        hidden, trained_hidden = algorithm.policy.actor(obs), algorithm.actor(obs)
        own, other = (
            [*(each.gaussian(x) if each.mu is not None else ()), *each.branch_log_probs(x, None)]
            for each, x in ((heads, hidden), (trained_heads, trained_hidden))
        )
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@modes
@pytest.mark.parametrize("kind", ["continuous", "hybrid", "visual", "entities"])
def test_exported_model_has_the_operators_of_a_sac_model_and_acts_as_the_trained_policy(kind, mode):
    algorithm = trained(kind, mode)
    settings = settings_of().network_settings
    model = build_model(algorithm.policy)
    sac = build_model(Policy(KINDS[kind], settings, squash=True))
    assert [node.op_type for node in model.graph.node] == [node.op_type for node in sac.graph.node]
    obs = rows_of(kind).obs
    feeds = {f"obs_{index}": values for index, values in enumerate(obs)}
    branches = KINDS[kind].action_spec.discrete_branches
    if branches:
        feeds["action_masks"] = np.ones((len(obs[0]), sum(branches)), np.float32)
    (mean,) = create_session(model, 1).run(["deterministic_continuous_actions"], feeds)
    with torch.no_grad():
        hidden = algorithm.actor([torch.from_numpy(values) for values in obs])
        expected = torch.tanh(algorithm.actor.heads.mu(hidden)).numpy()
    np.testing.assert_allclose(mean, expected, atol=1e-5)


def test_actions_are_random_before_the_first_update():
    algorithm = made("hybrid")
    obs = np.random.default_rng(0).normal(size=(4000, 4)).astype(np.float32)
    decision = algorithm.act([obs], None)
    assert abs(decision.action.continuous.mean()) < 0.02
    assert 0.6 < decision.action.continuous.std() < 0.66  # of tanh of a standard normal number
    for branch, size in enumerate((3, 2)):
        counts = np.bincount(decision.action.discrete[:, branch], minlength=size) / 4000
        assert np.abs(counts - 1 / size).max() < 0.04


@modes
@kinds
def test_update_from_a_saved_state_equals_the_uninterrupted_update(kind, mode):
    original, restored = (made(kind, mode, seed=seed, n_steps=2) for seed in (1, 2))
    for algorithm in (original, restored):
        algorithm.replay.add(rows_of(kind))
    original.update(rows_of(kind, 32), step=5)  # the next update has no step of the actor
    restored.replay.load_state_dict(original.replay.state_dict())
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    stats = [algorithm.update(rows_of(kind, 32), step=12) for algorithm in (original, restored)]
    assert stats[0] == stats[1]
    for name, tensors in original.weights().items():
        for key, values in tensors.items():
            assert torch.equal(values, restored.weights()[name][key]), f"{name}.{key}"
    assert original.reward_scale.state_dict() == restored.reward_scale.state_dict()


_SMALL = {"gamma": GAMMA, "strength": 0.3, "network_settings": {"hidden_units": 8}}
# Settings combined with XQC, by name, and their losses in the statistics.
PARTS = {
    "cloning": ({}, ["Pretraining"]),
    "gail": ({"signals": {"gail": {**_SMALL, "use_actions": True}}}, ["GAIL"]),
    "curiosity": ({"signals": {"curiosity": _SMALL}}, ["Curiosity Forward", "Curiosity Inverse"]),
    "rnd": ({"signals": {"rnd": _SMALL}}, ["RND"]),
    "more steps than a trajectory has": ({"n_steps": 40}, []),
    "as many updates of the actor": ({"policy_delay": 1}, []),
}


@pytest.mark.parametrize("name", PARTS)
def test_xqc_with_signals_cloning_or_other_options_has_finite_losses_and_resumes_identically(
    name, tmp_path
):
    options, losses = copy.deepcopy(PARTS[name])
    demo = str(demonstration("xqc, hybrid", tmp_path))
    if name == "gail":
        options["signals"]["gail"]["demo_path"] = demo
    if name == "cloning":
        options["behavior"] = {"behavioral_cloning": {"demo_path": demo, "batch_size": 8}}
    options["steps_per_update"] = 2
    original, restored = (made("demonstrated", seed=seed, **options) for seed in (1, 2))
    for step in (6, 12):
        original.update(rows_of("demonstrated", 64), step=step)
    restored.replay.load_state_dict(original.replay.state_dict())
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    new = rows_of("demonstrated", 32)
    stats, again = (algorithm.update(new, step=24) for algorithm in (original, restored))
    assert {f"Losses/{loss} Loss" for loss in ("Q1", "Q2", "Policy", *losses)} <= stats.keys()
    assert all(math.isfinite(value) for value in stats.values())
    assert stats == again


def test_noise_is_held_for_several_decisions_and_continues_after_a_restart():
    algorithm = made("continuous", held_noise=4)
    assert algorithm.memory_size == 3
    assert "memory" not in algorithm.fields
    memory = np.zeros((2000, 3), np.float32)
    obs = [np.ones((2000, 4), np.float32)]
    decision = algorithm.act(obs, None, memory)
    first, left = decision.memory[:, :2], decision.memory[:, 2]
    shares = np.bincount(left.astype(int), minlength=4) / 2000
    expected = np.array([1, 1 / 4, 1 / 9, 1 / 16])
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.04)
    # Actions of one policy at one observation differ only by their noise.
    np.testing.assert_allclose(np.arctanh(decision.action.continuous), first, rtol=1e-3, atol=1e-4)
    state = copy.deepcopy(algorithm.state_dict())
    following = algorithm.act(obs, None, decision.memory)
    is_held = left > 0
    assert np.array_equal(following.memory[is_held, :2], first[is_held])
    assert not (following.memory[~is_held, :2] == first[~is_held]).any()
    restored = made("continuous", seed=2, held_noise=4)
    restored.load_state_dict(state)
    again = restored.act(obs, None, decision.memory)
    assert np.array_equal(again.memory, following.memory)
    assert np.array_equal(again.action.continuous, following.action.continuous)


@modes
def test_after_cloning_the_acting_policy_has_the_same_lower_loss_as_the_trained_policy(mode):
    algorithm = made("hybrid", mode)
    policy, rows = algorithm.trained_policy, rows_of("hybrid")
    expert = ExpertRows(
        obs=rows.obs,
        continuous=np.tanh(rows.obs[0][:, :2]),
        discrete=(rows.obs[0][:, 2:] > 0).astype(np.int64),
    )
    options = {"batch_size": 32, "num_epoch": 20, "learning_rate": 1e-2, "seed": 1}
    cloning = BehavioralCloning(policy, expert, **options)
    before = cloning.measure()
    policy.train()
    cloning.update()
    policy.eval()
    assert cloning.measure() < 0.5 * before
    acting = BehavioralCloning(algorithm.policy, expert, **options)
    assert acting.measure() == pytest.approx(cloning.measure(), rel=1e-4)


# --- Minibatches -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_steps", [1, 3])
def test_n_step_returns_end_at_the_end_of_the_trajectory(n_steps):
    algorithm = made("discrete", n_steps=n_steps, reward_normalization=False, batch_size=128)
    rollout = rows_of("discrete", masked=True)
    algorithm.replay.add(rollout)
    rewards = 0.7 * rollout.fields["reward"][:, None]
    assert_n_step_returns(algorithm, rollout, rewards, np.array([GAMMA]), n_steps, rtol=1e-4)


def test_rewards_of_signals_are_divided_by_the_spread_of_returns_and_summed():
    signals = {"rnd": {"gamma": GAMMA, "strength": 0.3}}
    algorithm = made("continuous", signals=signals)
    algorithm.update(rows_of("continuous"), step=1)
    rewards = torch.tensor([[0.7, 0.0], [0.0, 0.3], [1.4, -0.6]])
    extrinsic, rnd = algorithm.reward_scale.divisor
    expected = [0.7 * 0.7 / extrinsic, 0.3 * 0.3 / rnd]
    expected.append(2 * expected[0] - 2 * expected[1])
    expected = torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(algorithm._scaled(rewards)[:, 0], expected)


# --- Refused settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": {"memory": {"sequence_length": 4, "memory_size": 8}}}, "has no memory"),
        ({"signals": {"rnd": {"gamma": 0.5}}}, "one gamma"),
        ({"network": {"goal_conditioning_type": "hyper"}}, "goal_conditioning_type"),
    ],
)
def test_settings_that_xqc_does_not_support_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        made("goal", **options)
