"""Optimizers: flat Adam, pairs, averages over processes, and states."""

import copy

import pytest
import torch

from pipeline.nets.fast.adam import FlatAdam, FusedAdam
from pipeline.nets.fast.pairs import paired_linear


@pytest.mark.parametrize("max_norm", [None, 0.1, 1e3])
def test_flat_adam_equals_adam_over_separate_parameters_with_clipped_gradients(max_norm):
    torch.manual_seed(0)
    plain_net, flat_net = (
        torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)) for _ in range(2)
    )
    flat_net.load_state_dict(plain_net.state_dict())
    plain = torch.optim.Adam(plain_net.parameters(), lr=0.01)
    flat = FlatAdam(flat_net.parameters(), learning_rate=0.01)
    for scale in (1.0, 30.0, 0.02):  # Adam's steps do not depend on a constant scale
        x = torch.randn(4, 3)
        plain.zero_grad()
        (plain_net(x).square().sum() * scale).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain_net.parameters(), max_norm)
        plain.step()
        flat_net(x).sum().backward()  # another optimizer's gradients must not count
        flat.zero_gradients()
        (flat_net(x).square().sum() * scale).backward()
        flat.step(max_norm=max_norm)
    for a, b in zip(plain_net.parameters(), flat_net.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_fused_adam_loads_and_saves_the_state_of_adam_in_torch():
    torch.manual_seed(0)

    def network():
        return torch.nn.ParameterList([torch.nn.Parameter(torch.ones(n)) for n in (3, 2, 4)])

    def learn(weights, optimizer, n_steps):
        for number in range(n_steps):
            for k in (0, 2):  # the second has no gradient
                weights[k].grad = (weights[k].detach() + number) * (k + 1)
            optimizer.step()

    torchs, ours = network(), network()
    plain = torch.optim.Adam(torchs.parameters(), lr=0.01)
    learn(torchs, plain, 3)
    ours.load_state_dict(torchs.state_dict())
    adam = FusedAdam(ours.parameters(), learning_rate=0.5)
    adam.load_state_dict(plain.state_dict())
    assert adam.learning_rate == 0.01
    learn(torchs, plain, 3)
    learn(ours, adam, 3)
    for a, b in zip(torchs, ours, strict=True):
        torch.testing.assert_close(a, b)

    restored = torch.optim.Adam(ours.parameters(), lr=0.5)
    defaults = restored.state_dict()["param_groups"][0]
    state = adam.state_dict()
    state["param_groups"] = [defaults | state["param_groups"][0]]
    restored.load_state_dict(state)
    learn(torchs, plain, 2)
    learn(ours, restored, 2)
    for a, b in zip(torchs, ours, strict=True):
        torch.testing.assert_close(a, b)


def test_adam_has_no_state_for_parameters_without_gradients_and_refuses_another_networks_state():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    adam = FusedAdam(weights, learning_rate=0.1)
    assert adam.state_dict()["state"] == {}
    weights[1].grad = torch.ones(2)
    adam.step()
    assert list(adam.state_dict()["state"]) == [1]
    with pytest.raises(ValueError, match="has 3 parameters, but the network has 1"):
        FusedAdam(weights[:1], learning_rate=0.1).load_state_dict(adam.state_dict())


def _steps(optimizer, layers, n):
    for _ in range(n):
        optimizer.zero_gradients()
        sum(
            layer(torch.linspace(-1, 1, 12).view(4, 3)).square().sum() for layer in layers
        ).backward()
        optimizer.step()


def test_paired_parameters_learn_like_separate_parameters_and_are_saved_in_the_same_order():
    torch.manual_seed(0)
    plain = torch.nn.ModuleList(torch.nn.Linear(3, 5) for _ in range(3))
    paired = copy.deepcopy(plain)
    pairs = list(zip(paired[0].parameters(), paired[2].parameters(), strict=True))
    plain_adam = FlatAdam(plain.parameters(), learning_rate=0.01)
    paired_adam = FlatAdam(paired.parameters(), learning_rate=0.01, pairs=pairs)
    _steps(plain_adam, plain, 3)
    before = paired_adam.state_dict()
    paired_adam.load_state_dict(plain_adam.state_dict())  # as files of runs without pairs
    paired.load_state_dict(plain.state_dict())
    assert before["state"] == {}
    for name, values in plain_adam.state_dict()["state"][0].items():
        assert torch.equal(paired_adam.state_dict()["state"][0][name], values)
    _steps(plain_adam, plain, 2)
    x = torch.linspace(-1, 1, 12).view(4, 3)
    weight, bias = paired_adam.paired
    for _ in range(2):
        paired_adam.zero_gradients()
        outputs = paired_linear(x.expand(2, 4, 3), weight, bias)
        (outputs.square().sum() + paired[1](x).square().sum()).backward()
        paired_adam.step()
    for a, b in zip(plain.parameters(), paired.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    plain_adam.load_state_dict(paired_adam.state_dict())  # and the other way round
    for name, values in paired_adam.state_dict()["state"][0].items():
        assert torch.equal(plain_adam.state_dict()["state"][0][name], values)


def test_a_gradient_is_averaged_over_processes_before_it_is_clipped():
    """The norms are 6 here and 0 in the other process: the mean of 3 exceeds the limit of 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = FlatAdam([weight], learning_rate=1e-3)
    optimizer.average = lambda gradient: gradient.div_(2)
    for slope, norm in ((6.0, 1.0), (1.0, 0.5)):
        optimizer.zero_gradients()
        (slope * weight).sum().backward()
        optimizer.step(max_norm=1.0)
        torch.testing.assert_close(optimizer.gradient.norm(), torch.tensor(norm))


def test_gradients_of_another_optimizer_do_not_count_and_a_loaded_state_replaces_the_old_state():
    """Adam's first step has the size of the learning rate, for any size of the gradient."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    fresh = FlatAdam([torch.nn.Parameter(torch.zeros(2)) for _ in range(2)], learning_rate=0.25)
    optimizer, other = (FlatAdam(weights, learning_rate=1e-3) for _ in range(2))
    for user in (optimizer, other, optimizer):
        user.zero_gradients()
        (3.0 * weights[0] - 2.0 * weights[1]).sum().backward()
    assert optimizer.gradient[:2].tolist() == [3.0, 3.0]
    assert other.gradient[:2].tolist() == [3.0, 3.0], "its own, once"
    for _ in range(3):
        optimizer.step()
    optimizer.load_state_dict(fresh.state_dict())
    before = optimizer.flat.detach().clone()
    optimizer.zero_gradients()
    assert not optimizer.gradient.any()
    optimizer.flat.grad.fill_(-7.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.flat.detach() - before, torch.full_like(before, 0.25))
