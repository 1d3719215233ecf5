"""The recurrent layer equals slow versions, and padding has no effect."""

import math

import numpy as np
import pytest
import reference
import torch

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.nets.actor_critic import Actor, Critic
from pipeline.nets.memory import Memory, SequenceState
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

SPEC = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(2, ()))


def made(n_in=5, size=8, seed=0):
    torch.manual_seed(seed)
    return Memory(n_in, size)


def test_weights_of_each_gate_are_xavier_uniform_and_only_biases_of_forget_gates_are_1():
    H, n_in = 100, 60
    lstm = made(n_in, 2 * H).lstm
    for weight, fan_in in ((lstm.weight_ih_l0, n_in), (lstm.weight_hh_l0, H)):
        bound = math.sqrt(6 / (fan_in + H))
        for gate in weight.detach().split(H):
            assert 0.98 * bound < float(gate.abs().max()) <= bound
            assert float(gate.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    for bias in (lstm.bias_ih_l0, lstm.bias_hh_l0):
        means = [gate.detach().unique().tolist() for gate in bias.split(H)]
        assert means == [[0.0], [1.0], [0.0], [0.0]]


def test_a_step_of_the_memory_equals_a_slow_implementation_for_each_agent():
    memory, rng = made(), np.random.default_rng(0)
    x, state = rng.normal(size=(6, 5)), rng.uniform(-1, 1, (6, 8))
    with torch.no_grad():
        hidden, new = memory.step(torch.from_numpy(x).float(), torch.from_numpy(state).float())
    for agent in range(6):
        slow_hidden, slow_new = reference.lstm(memory.lstm, x[agent], state[agent])
        np.testing.assert_allclose(hidden[agent], slow_hidden, atol=1e-6)
        np.testing.assert_allclose(new[agent], slow_new, atol=1e-6)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 1, 4, 2], [1, 1], [5]])
def test_outputs_of_sequences_equal_outputs_of_single_steps_from_the_given_memories(lengths):
    memory, rng = made(), np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(sum(lengths), 5)).astype(np.float32))
    start = torch.from_numpy(rng.uniform(-1, 1, (len(lengths), 8)).astype(np.float32))
    expected = []
    for number, rows in enumerate(x.split(lengths)):
        state = start[number : number + 1]
        for row in rows:
            hidden, state = memory.step(row[None], state)
            expected.append(hidden)
    outputs = memory(x, SequenceState(memory=start, lengths=torch.tensor(lengths)))
    torch.testing.assert_close(outputs, torch.cat(expected), atol=1e-6, rtol=0)


def test_padding_changes_neither_outputs_nor_gradients(monkeypatch):
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    sequences = SequenceState(memory=torch.zeros(3, 8), lengths=torch.tensor([4, 1, 2]))
    zeros = torch.Tensor.new_zeros
    results, fills = [], []
    for fill in (0.0, 1e4, -3.0):

        def filled(self, *shape, fill=fill):
            fills.append(fill)
            return zeros(self, *shape) + fill

        memory, inputs = made(), x.clone().requires_grad_()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_zeros", filled)
            outputs = memory(inputs, sequences)
        outputs.square().sum().backward()
        results.append([outputs, inputs.grad, *[p.grad for p in memory.parameters()]])
    assert fills == [0.0, 1e4, -3.0]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_recurrent_networks_refuse_observations_that_are_not_divided_into_sequences():
    settings = NetworkSettings(hidden_units=4, memory=MemorySettings(memory_size=6))
    actor, critic = Actor(SPEC, settings), Critic(SPEC, settings, ["extrinsic"])
    obs = [torch.zeros(2, 3)]
    for call in (lambda: actor(obs), lambda: critic(obs, obs[0])):
        with pytest.raises(ValueError, match="needs its sequences"):
            call()
    with pytest.raises(ValueError, match="no recurrent layer"):
        Actor(SPEC, NetworkSettings(hidden_units=4)).step(obs, torch.zeros(2, 6))


def test_critic_that_shares_the_body_of_the_actor_has_no_memory():
    settings = NetworkSettings(hidden_units=4, memory=MemorySettings(memory_size=6))
    actor = Actor(SPEC, settings)
    shared = Critic(SPEC, settings, ["extrinsic"], shared=actor)
    assert shared.memory is None
    assert actor.output_size == 3
    assert shared(None, torch.zeros(5, 3)).shape == (5, 1)
    with pytest.raises(ValueError, match="no memory of its own"):
        shared.step([torch.zeros(2, 3)], torch.zeros(2, 6))
