"""Paired networks, and many agents at once, equal single networks and agents."""

import copy

import pytest
import torch
from onnx.numpy_helper import to_array

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.nets.actor_critic import Actor, Critic
from pipeline.nets.encoder import Normalizers
from pipeline.nets.fast.adam import FlatAdam
from pipeline.nets.fast.pairs import ActorAndCritic
from pipeline.nets.layers import RunningNormalizer
from pipeline.nets.memory import SequenceState
from pipeline.nets.onnx_graph import OnnxGraph
from pipeline.nets.q_networks import TwinQNetworks, taken_value
from pipeline.settings.trainer.schema import MemorySettings, NetworkSettings

VECTORS = [ObservationSpec.vector(3), ObservationSpec.vector(3), ObservationSpec.vector(2)]
SEEN = {"vectors": VECTORS, "an image": [*VECTORS, ObservationSpec.visual(1, 20, 20)]}
LENGTHS = torch.tensor([3, 1, 2])
kinds = pytest.mark.parametrize("remembers", [False, True])


def network(*, remembers: bool) -> NetworkSettings:
    memory = MemorySettings(sequence_length=3, memory_size=4) if remembers else None
    return NetworkSettings(hidden_units=8, num_layers=2, memory=memory)


def drawn(specs, n=6):
    return [torch.randn(n, *spec.shape) for spec in specs]


@kinds
@pytest.mark.parametrize("seen", SEEN)
def test_paired_actor_and_critic_equal_separate_networks_with_separate_memories(seen, remembers):
    torch.manual_seed(0)
    spec, settings = BehaviorSpec(SEEN[seen], ActionSpec(2, ())), network(remembers=remembers)
    actor, critic = Actor(spec, settings), Critic(spec, settings, ["a", "b"])
    both, obs = ActorAndCritic(actor, critic), drawn(SEEN[seen])
    states = [SequenceState(memory=torch.randn(3, 4), lengths=LENGTHS) for _ in range(2)]
    states = states if remembers else [None, None]
    expected = actor(obs, states[0]), critic(obs, obs[0], states[1])
    parameters = [*actor.parameters(), *critic.parameters()]
    both.share_weights(FlatAdam(parameters, learning_rate=1e-3, pairs=both.pairs).paired)
    for actual, alone in zip(both(obs, *states), expected, strict=True):
        torch.testing.assert_close(actual, alone)
    if remembers:
        memories = torch.randn(6, 4)
        hidden, later = actor.step(obs, memories)
        critic_later = critic.step(obs, memories)
        for i in range(6):
            row, memory = [values[i : i + 1] for values in obs], memories[i : i + 1]
            torch.testing.assert_close(
                (hidden[i : i + 1], later[i : i + 1]), actor.step(row, memory)
            )
            torch.testing.assert_close(critic_later[i : i + 1], critic.step(row, memory))


@kinds
@pytest.mark.parametrize("seen", SEEN)
def test_paired_q_networks_compute_the_same_action_values_as_two_separate_networks(seen, remembers):
    torch.manual_seed(0)
    spec, settings = BehaviorSpec(SEEN[seen], ActionSpec(2, (3,))), network(remembers=remembers)
    twins = TwinQNetworks(spec, settings, 2)
    alone = copy.deepcopy(twins)
    twins.share_weights(FlatAdam(twins.parameters(), learning_rate=1e-3, pairs=twins.pairs).paired)
    obs, taken, fresh = drawn(SEEN[seen]), torch.randn(6, 2), torch.randn(6, 2, requires_grad=True)
    sequences = SequenceState(memory=torch.randn(3, 9), lengths=LENGTHS) if remembers else None
    values, fresh_values = twins(obs, taken=taken, fresh=fresh, sequences=sequences)
    for i, twin in enumerate((alone.first, alone.second)):
        encoded = twin.body.features(obs)
        torch.testing.assert_close(values[i], twin(encoded, taken, sequences))
        torch.testing.assert_close(fresh_values[i], twin(encoded, fresh, sequences))
    # the policy learns from the first twin, which does not learn from it
    first = alone.first(alone.first.body.features(obs), fresh, sequences)
    expected = torch.autograd.grad(first.sum(), fresh)
    fresh_values[0].sum().backward()
    torch.testing.assert_close(fresh.grad, expected[0])
    assert all(parameter.grad is None for parameter in twins.parameters())
    assert not fresh_values[1].requires_grad


@kinds
@pytest.mark.parametrize("seen", SEEN)
def test_values_of_newly_sampled_actions_use_the_weights_of_both_q_networks_after_each_step(
    seen, remembers
):
    torch.manual_seed(0)
    spec, settings = BehaviorSpec(SEEN[seen], ActionSpec(2, ())), network(remembers=remembers)
    twins = TwinQNetworks(spec, settings, 1)
    optimizer = FlatAdam(twins.parameters(), learning_rate=0.05, pairs=twins.pairs)
    twins.share_weights(optimizer.paired)
    obs, fresh = drawn(SEEN[seen]), torch.randn(6, 2)
    sequences = SequenceState(memory=torch.zeros(3, 4), lengths=LENGTHS) if remembers else None
    before = None
    for _ in range(2):
        values, fresh_values = twins(obs, taken=fresh, fresh=fresh, sequences=sequences)
        pairs = zip(values, (twins.first, twins.second), fresh_values, strict=True)
        for value, twin, fresh_value in pairs:
            alone = twin(twin.body.features(obs), fresh, sequences)
            torch.testing.assert_close(value, alone)
            torch.testing.assert_close(fresh_value, alone)
        assert before is None or (values - before).abs().amax((1, 2, 3)).min() > 0.01
        before = values.detach()
        optimizer.zero_gradients()
        values.square().sum().backward()
        optimizer.step()


def test_the_two_q_networks_start_with_different_weights():
    spec = BehaviorSpec(SEEN["vectors"], ActionSpec(2, (3,)))
    twins = TwinQNetworks(spec, network(remembers=False), 2)
    pairs = zip(twins.first.named_parameters(), twins.second.parameters(), strict=True)
    for (name, first), second in pairs:
        assert torch.equal(first, second) == ("bias" in name)


def test_the_value_of_each_choice_is_read_from_the_branch_of_the_choice():
    values, choices = torch.randn(4, 2, 5), torch.tensor([[0, 1], [2, 0], [1, 1], [2, 1]])
    taken = taken_value(values, choices, (3, 2))
    for row, (first, second) in enumerate(choices.tolist()):
        expected = (values[row, :, first] + values[row, :, 3 + second]) / 2
        torch.testing.assert_close(taken[row], expected)


def test_each_vector_is_normalised_by_its_own_statistics_in_torch_and_in_onnx():
    specs = [ObservationSpec.visual(1, 20, 20), *VECTORS, ObservationSpec.entities(4, 3)]
    normalizers, graph = Normalizers(specs, enabled=True), OnnxGraph()
    rows = [values * (i + 1) + 10 * i for i, values in enumerate(drawn(specs, 50))]
    normalizers.update(rows)
    names = list(normalizers.to_onnx(graph, [f"obs_{i}" for i in range(5)]))
    weights = {w.name: to_array(w) for w in graph.model("m").graph.initializer}
    for i, (given, made) in enumerate(zip(rows, normalizers(rows), strict=True)):
        if len(specs[i].shape) > 1:
            assert made is given
            assert names[i] == f"obs_{i}"
            continue
        alone = RunningNormalizer(given.shape[1])
        alone.update(given)
        assert torch.equal(made, alone(given))
        for part, values in zip(("mean", "std"), alone.statistics(), strict=True):
            assert weights[f"obs_{i}.{part}"].tolist() == values.tolist()
