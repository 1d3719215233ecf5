"""Whole losses of reward signals and of cloning equal losses composed step by step."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_signals import CONTINUOUS, PLAIN, SMALL, signal, steps

from pipeline.algos.bc import BehavioralCloning
from pipeline.algos.gail import Discriminator
from pipeline.algos.policy import Policy, seeded_weights
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.demos.demonstrations import ExpertRows
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

NORMALIZED = {**SMALL, "normalize": True}
HYBRID = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec.create_hybrid(2, [3, 2]))
specs = pytest.mark.parametrize(
    "spec", [CONTINUOUS, PLAIN, HYBRID], ids=["continuous", "discrete", "hybrid"]
)


def mean(terms):
    terms = list(terms)
    return sum(terms) / len(terms)


def step(rows, i: int):
    """Return observation, next observation and action of a step, each as a single row."""
    return (
        [obs[i : i + 1] for obs in rows.obs],
        [obs[i : i + 1] for obs in rows.next_obs],
        rows.continuous[i],
        rows.discrete[i].tolist(),
    )


def as_numbers(spec, continuous, discrete) -> torch.Tensor:
    """Return an action as one row of numbers, choices as one-hot vectors."""
    parts = [continuous]
    for choice, size in zip(discrete, spec.action_spec.discrete_branches, strict=True):
        parts.append(torch.tensor([float(i == choice) for i in range(size)]))
    return torch.cat(parts).unsqueeze(0)


def cross_entropy(logits, choice: int) -> torch.Tensor:
    return logits.exp().sum().log() - logits[choice]


def assert_gradients_are_of(loss, parameters, apply) -> None:
    """Check that `apply` sets the parameters' gradients to the derivatives of `loss`."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    expected = torch.autograd.grad(loss, parameters)
    apply()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=2e-6)
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-3


def curiosity_errors(net, rows):
    features = net.features(rows)
    return net.forward_error(rows, *features), net.inverse_error(rows, *features)


@specs
def test_curiosity_loss_is_a_fifth_forward_loss_and_four_fifths_inverse_loss(spec):
    curiosity, rows = signal("curiosity", spec, strength=0.01), steps(spec, 12)
    net = curiosity.network
    forwards, inverses = [], []
    for i in range(12):
        obs, next_obs, continuous, discrete = step(rows, i)
        now, later = net.body(obs), net.body(next_obs)
        action = as_numbers(spec, continuous, discrete)
        foreseen = net.next_features(net.forward_model(torch.cat((now, action), dim=1)))
        forwards.append(0.5 * sum((a - b) ** 2 for a, b in zip(later[0], foreseen[0], strict=True)))
        guess = net.action(net.inverse(torch.cat((now, later), dim=1)))[0]
        n_continuous = spec.action_spec.continuous_size
        error = sum((guess[j] - continuous[j]) ** 2 for j in range(n_continuous))
        first = n_continuous
        for choice, size in zip(discrete, spec.action_spec.discrete_branches, strict=True):
            error = error + cross_entropy(guess[first : first + size], choice)
            first += size
        inverses.append(error)
    forward, inverse = mean(forwards), mean(inverses)
    loss = 10 * (0.2 * forward + 0.8 * inverse)
    reported = {}
    assert_gradients_are_of(loss, net.parameters(), lambda: reported.update(curiosity.update(rows)))
    assert [error.shape for error in curiosity_errors(net, rows)] == [(12,)] * 2
    for name, expected in (("Forward", forward), ("Inverse", inverse)):
        reported_loss = float(reported[f"Losses/Curiosity {name} Loss"])
        assert reported_loss == pytest.approx(expected.item(), rel=1e-4)
    with torch.no_grad():
        wanted, (errors, _) = curiosity.rewards(rows), curiosity_errors(net, rows)
    assert wanted.tolist() == pytest.approx(errors.tolist(), rel=1e-4)


def test_curiosity_predicts_features_of_normalised_observations():
    curiosity, plain = signal("curiosity", network_settings=NORMALIZED), signal("curiosity")
    curiosity.observe([torch.randn(50, 3) * 3 + 2])
    rows = steps(n=12)
    obs, next_obs = (curiosity.network.normalizers(obs) for obs in (rows.obs, rows.next_obs))
    same = replace(rows, obs=obs, next_obs=next_obs)
    pairs = curiosity_errors(plain.network, same), curiosity_errors(curiosity.network, rows)
    for expected, actual in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, expected)
        assert len(actual.unique()) == 12


def test_rnd_loss_is_the_mean_over_steps_of_summed_squared_errors():
    rnd, rows = signal("rnd"), steps(n=12)
    errors = []
    for i in range(12):
        obs = step(rows, i)[0]
        pairs = zip(rnd.predictor(obs)[0], rnd.target(obs)[0].detach(), strict=True)
        errors.append(sum((a - b) ** 2 for a, b in pairs))
    assert rnd.rewards(rows).tolist() == pytest.approx([error.item() for error in errors], rel=1e-4)
    loss, reported = mean(errors), {}
    fixed = [parameter.clone() for parameter in rnd.target.parameters()]
    assert_gradients_are_of(
        loss, rnd.predictor.parameters(), lambda: reported.update(rnd.update(rows))
    )
    assert reported["Losses/RND Loss"].item() == pytest.approx(loss.item(), rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(fixed, rnd.target.parameters(), strict=True))


@pytest.mark.parametrize("sees_actions", [False, True])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_gail_loss_is_cross_entropy_plus_gradient_penalty_plus_bottleneck_loss(
    sees_actions, bottleneck, tmp_path
):
    n = 12
    options = {"use_actions": sees_actions, "use_vail": bottleneck}
    gail, rows = signal("gail", HYBRID, tmp_path, **options), steps(HYBRID, n)
    rows.done[::3] = True
    if bottleneck:
        gail.beta = torch.tensor(0.3)
        with torch.no_grad():
            gail.network.log_deviation -= 0.5
    # random draws: the expert's steps, noise in the code, and places between two steps
    stream = torch.Generator()
    stream.set_state(gail.generator.get_state())
    drawn = torch.randint(len(gail.expert), (n,), generator=stream)
    policy_inputs = [sees(gail, rows.obs[0][i], rows.continuous[i], rows.discrete[i], rows.done[i])
                     for i in range(n)]  # fmt: skip
    theirs = gail.expert
    expert = [sees(gail, theirs.obs[0][i], theirs.continuous[i], theirs.discrete[i], theirs.done[i])
              for i in drawn]  # fmt: skip
    noise = torch.zeros(2 * n, 128)
    if bottleneck:
        noise = torch.empty(2 * n, 128).normal_(generator=stream)
    shares = [torch.rand(n, part.shape[1], generator=stream) for part in policy_inputs[0]]

    rewards = [-math.log(1 - probability(gail, inputs).item()) for inputs in policy_inputs]
    assert gail.rewards(rows).tolist() == pytest.approx(rewards, rel=1e-4)
    own, theirs = (
        [probability(gail, *pair) for pair in zip(inputs, noises, strict=True)]
        for inputs, noises in ((policy_inputs, noise[:n]), (expert, noise[n:]))
    )
    crossed = mean(
        -torch.log(yes + 1e-7) - torch.log(1 - no + 1e-7)
        for yes, no in zip(theirs, own, strict=True)
    )
    penalties = []
    for i in range(n):
        point = [
            (share[i] * a + (1 - share[i]) * b).detach().requires_grad_()
            for share, a, b in zip(shares, policy_inputs[i], expert[i], strict=True)
        ]
        slopes = torch.autograd.grad(probability(gail, point), point, create_graph=True)
        length = (sum((slope**2).sum() for slope in slopes) + 1e-7).sqrt()
        penalties.append((length - 1) ** 2)
    loss = crossed + 10 * mean(penalties)
    if bottleneck:
        sigma = gail.network.log_deviation.exp()
        codes = [gail.network.code(gail.network.body(x))[0] for x in (*policy_inputs, *expert)]
        kl = 2 * mean((0.5 * (code**2 + sigma**2 - 1 - (sigma**2).log())).sum() for code in codes)
        loss = loss + 0.3 * (kl - 0.5)
    reported = {}
    assert_gradients_are_of(
        loss, gail.network.parameters(), lambda: reported.update(gail.update(rows))
    )
    terms = {"Losses/GAIL Loss": crossed, "Policy/GAIL Grad Mag Loss": mean(penalties)}
    estimates = {"Policy/GAIL Expert Estimate": theirs, "Policy/GAIL Policy Estimate": own}
    terms |= {tag: mean(values) for tag, values in estimates.items()}
    terms |= {"Losses/GAIL KL Loss": kl} if bottleneck else {}
    for tag, expected in terms.items():
        assert reported[tag].item() == pytest.approx(expected.item(), rel=1e-4), tag
    if bottleneck:
        assert float(gail.beta) == pytest.approx(0.3 + 0.0005 * (kl.item() - 0.5), rel=1e-5)


def sees(gail, obs, continuous, discrete, done) -> list[torch.Tensor]:
    """Return a discriminator's input: an observation, and with actions an action and `done`."""
    inputs = [obs.unsqueeze(0)]
    if gail.network.use_actions:
        ended = torch.tensor([[float(done)]])
        inputs.append(torch.cat((as_numbers(HYBRID, continuous, discrete.tolist()), ended), dim=1))
    return inputs


def probability(gail, inputs, noise=None) -> torch.Tensor:
    """Return the probability that a step is the expert's."""
    net = gail.network
    hidden = net.body(inputs)
    if net.code is not None:
        hidden = net.code(hidden)
        if noise is not None:
            hidden = hidden + net.log_deviation.exp() * noise
    return 1 / (1 + torch.exp(-net.estimate(hidden)[0, 0]))


@specs
@pytest.mark.parametrize("remembers", [False, True])
def test_cloning_loss_is_squared_error_of_means_plus_cross_entropy_of_choices(spec, remembers):
    n, actions, rng = 12, spec.action_spec, np.random.default_rng(0)
    memory = MemorySettings(sequence_length=4, memory_size=8) if remembers else None
    with seeded_weights(1, "a policy"):
        policy = Policy(spec, NetworkSettings(hidden_units=8, num_layers=1, memory=memory))
    rows = ExpertRows(
        obs=[rng.normal(size=(n, 3)).astype(np.float32)],
        continuous=rng.uniform(-1, 1, (n, actions.continuous_size)).astype(np.float32),
        discrete=np.stack(
            [rng.integers(size, size=n) for size in actions.discrete_branches], axis=1
        ).astype(np.int32)
        if actions.discrete_size
        else np.zeros((n, 0), np.int32),
        lengths=np.array([7, 5]),
    )
    squared, crossed = [], []
    for i in range(n):
        obs = [torch.from_numpy(rows.obs[0][i : i + 1])]
        if remembers:
            if i in (0, 4, 7, 11):  # sequences of 4 and 3 rows, then of 4 and 1
                memory = torch.zeros(1, 8)
            hidden, memory = policy.actor.step(obs, memory)
        else:
            hidden = policy.actor(obs)
        heads = policy.actor.heads
        if actions.continuous_size:
            mu = heads.gaussian(hidden)[0][0]
            squared += [
                (mu[j] / 3 - float(rows.continuous[i, j])) ** 2
                for j in range(actions.continuous_size)
            ]
        crossed += [
            cross_entropy(heads.branches[j](hidden)[0], int(rows.discrete[i, j]))
            for j in range(actions.discrete_size)
        ]
    loss = sum(mean(terms) for terms in (squared, crossed) if terms)
    cloning = BehavioralCloning(
        policy, rows, batch_size=4 * n, num_epoch=1, learning_rate=1e-3, seed=1
    )
    if remembers:
        cloning.batch_size = 4  # all sequences
    losses = []
    used = [
        parameter for name, parameter in policy.named_parameters() if not name.endswith("log_sigma")
    ]
    assert_gradients_are_of(loss, used, lambda: losses.append(cloning.update()))
    assert losses[0] == pytest.approx(loss.item(), rel=1e-5)


def test_curiosity_reward_with_a_strength_of_0_is_not_limited():
    curiosity = signal("curiosity", strength=0.0)
    curiosity.update(steps())
    assert float(curiosity.rewards(steps(shift=30.0)).max()) > 10.0


def test_the_largest_reward_of_gail_is_16(tmp_path):
    gail = signal("gail", PLAIN, tmp_path)
    with torch.no_grad():
        gail.network.estimate.bias.fill_(100.0)
    assert gail.rewards(steps()).tolist() == pytest.approx([-math.log(2.0**-23)] * 64, rel=0.05)


@pytest.mark.parametrize("use_actions", [False, True])
def test_goals_are_ordinary_inputs_of_gail(use_actions):
    goal = ObservationSpec.vector(2)._replace(observation_type=ObservationType.GOAL_SIGNAL)
    spec = BehaviorSpec([ObservationSpec.vector(3), goal], CONTINUOUS.action_spec)
    weights = []
    for kind in ("none", "hyper"):
        settings = NetworkSettings(hidden_units=8, num_layers=2, goal_conditioning_type=kind)
        network = Discriminator(spec, settings, use_actions=use_actions, use_vail=False)
        weights.append({name: tensor.shape for name, tensor in network.state_dict().items()})
    assert weights[0] == weights[1]
