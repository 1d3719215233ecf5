"""Memories of agents while they act, and updates of recurrent networks."""

import numpy as np
import pytest
import torch
from remembering import Cue, Level
from steps import decision_steps, take_turn, terminal_steps

from pipeline.algos.rows import stored_sequences, values_in_sequence
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.nets.memory import SequenceState

CPU = torch.device("cpu")
SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, (3,)))
MEMORY = {"hidden_units": 8, "num_layers": 1, "memory": {"sequence_length": 3, "memory_size": 6}}


@pytest.fixture
def learner_of(make_learner):
    def make(spec=SPEC, *, shared=False, network=MEMORY, **changes):
        numbers = {"batch_size": 32, "buffer_size": 4096, "num_epoch": 1}
        if shared:  # POCA has no such setting
            numbers["shared_critic"] = True
        return make_learner(spec, network_settings=network, hyperparameters=numbers, **changes)

    return make


def steps_of(ids, ended=(), *, time=0, interrupted=False):
    """One worker's steps; an agent's observation depends on its id and the time only."""

    def seen(agents):
        return [np.array([[a, np.sin(time + a)] for a in agents], np.float32).reshape(-1, 2)]

    ends = terminal_steps(seen(ended), ended, interrupted=interrupted)
    return decision_steps(seen(ids), ids), ends


def slot_of(learner, agent, *, worker=0, team=""):
    (slot,) = learner.slots.ended((team, worker), np.array([agent]))
    return slot


def memory_of(learner, agent, *, worker=0, team=""):
    return learner.memories[slot_of(learner, agent, worker=worker, team=team)].copy()


def alone(learner_of, agent, times):
    """Return the memory of an agent that acts at `times` without other agents."""
    learner = learner_of()
    for time in times:
        take_turn(learner, [steps_of([agent], time=time)])
    return memory_of(learner, agent)


def test_memory_of_an_agent_does_not_depend_on_other_agents(learner_of):
    learner = learner_of()
    take_turn(learner, [steps_of([1, 2], time=0)])
    take_turn(learner, [steps_of([2], time=1)])
    take_turn(learner, [steps_of([3, 1, 2], time=2)])
    times = {1: (0, 2), 2: (0, 1, 2), 3: (2,)}
    memories = {agent: memory_of(learner, agent) for agent in times}
    for agent, moments in times.items():
        np.testing.assert_allclose(memories[agent], alone(learner_of, agent, moments), atol=1e-6)
    assert np.abs(memories[1] - memories[2]).max() > 1e-3


def test_agents_with_the_same_id_in_different_workers_or_teams_have_separate_memories(learner_of):
    learner = learner_of()
    take_turn(learner, [steps_of([1], time=0), steps_of([1], time=5)], team="a")
    take_turn(learner, [steps_of([1], time=7), steps_of([], time=0)], team="b")
    take_turn(learner, [steps_of([1], time=1), steps_of([1], time=6)], team="a")
    places = {("a", 0): (0, 1), ("a", 1): (5, 6), ("b", 0): (7,)}
    for (team, worker), times in places.items():
        memory = memory_of(learner, 1, worker=worker, team=team)
        np.testing.assert_allclose(memory, alone(learner_of, 1, times), atol=1e-6)


@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize("pause", [0, 2])
def test_memory_is_cleared_when_the_episode_ends(learner_of, interrupted, pause):
    learner = learner_of()
    take_turn(learner, [steps_of([1, 2], time=0)])
    take_turn(learner, [steps_of([1, 2], time=1)])
    goes_on = [1] if pause == 0 else []
    take_turn(learner, [steps_of([*goes_on, 2], ended=[1], time=2, interrupted=interrupted)])
    for time in range(3, 3 + pause):
        take_turn(learner, [steps_of([2], time=time)])
    if pause:
        take_turn(learner, [steps_of([1, 2], time=2 + pause)])
    begun = alone(learner_of, 1, [2 + pause])
    np.testing.assert_allclose(memory_of(learner, 1), begun, atol=1e-6)
    continued = alone(
        learner_of, 2, [0, 1, 2, *range(3, 3 + pause), *([2 + pause] if pause else [])]
    )
    np.testing.assert_allclose(memory_of(learner, 2), continued, atol=1e-6)


def test_ended_group_member_keeps_its_memory_for_the_critic(learner_of):
    learner = learner_of(trainer_type="poca")
    messages = [[steps_of([1, 2], time=0)], [steps_of([2], ended=[1], time=1, interrupted=True)]]
    for ((decision, terminal),) in messages:
        decision.group_id[:] = terminal.group_id[:] = 1
    take_turn(learner, messages[0])
    remembered, slot = memory_of(learner, 1), slot_of(learner, 1)
    take_turn(learner, messages[1])
    groups = learner.grouping
    after = groups.moments.members(groups.by_slot["end_moment"][[slot]])
    (index,) = np.flatnonzero(after.entities.obs[0][:, 0] == 1)
    assert remembered.any()
    np.testing.assert_array_equal(after.entities.fields["memory"][index], remembered)


def test_policies_without_memory_store_no_memories(learner_of):
    learner = learner_of(network={"hidden_units": 8, "num_layers": 1})
    take_turn(learner, [steps_of([1], time=0)])
    assert learner.memories is None
    assert learner.algorithm.memory_size == 0
    assert "memory" not in learner.algorithm.fields
    assert learner.experience(with_open=True)["memories"] is None


def collected(learner_of, *, toy=Cue, shared=False, n_steps=40, horizon=8, agents=5):
    """Return a learner that has acted, and the critic's values of each closed trajectory."""
    learner = learner_of(toy.spec, shared=shared, time_horizon=horizon)
    game, open_values = toy(n_agents=agents, seed=2), {agent: [] for agent in range(agents)}
    steps, closed = list(game.reset().values()), []
    for _ in range(n_steps):
        ((decision, terminal),) = steps
        decided = take_turn(learner, steps)
        for agent in terminal.agent_id:
            closed.append([*open_values[agent], np.nan])
            open_values[agent] = []
        values = critic_values(learner.algorithm, decision.obs, decided.decision.rows["memory"])
        for agent in decision.agent_id:
            if len(open_values[agent]) == horizon:
                closed.append([*open_values[agent], values[agent]])
                open_values[agent] = []
            open_values[agent].append(values[agent])
        steps = list(game.step({"Toy?team=0": decided.actions[0]}).values())
    return learner, closed


@torch.no_grad()
def critic_values(algorithm, obs, memory):
    """Return the critic's values [N] of single steps, from stored memories."""
    inputs = [torch.from_numpy(values) for values in obs]
    ones = torch.ones(len(memory), dtype=torch.int64)
    return algorithm._value(inputs, SequenceState(memory=torch.from_numpy(memory), lengths=ones))[
        :, 0
    ]


CASES = [(Cue, False), (Level, False), (Cue, True)]


@pytest.mark.parametrize(("toy", "shared"), CASES)
def test_update_computes_the_same_log_probs_and_values_as_acting(learner_of, toy, shared):
    learner, closed = collected(learner_of, toy=toy, shared=shared, horizon=4)
    algorithm, rollout = learner.algorithm, learner.trajectories.rollout()
    lengths = rollout.lengths.tolist()
    assert len(lengths) == len(closed) > 20
    assert max(lengths) == 4 > algorithm.sequence_length
    assert min(lengths) < 3
    with torch.no_grad():
        batch = algorithm._rows(rollout)
        states, _ = algorithm._sequence_states(batch.sequences)
        hidden = algorithm.policy.actor(batch.obs, states)
        log_prob, _ = algorithm.policy.actor.heads.evaluate(
            hidden, batch.continuous, batch.discrete, batch.allowed
        )
        torch.testing.assert_close(log_prob, batch.log_prob, atol=2e-6, rtol=0)
        obs = [torch.from_numpy(rollout.obs[0])]
        sequences = stored_sequences(rollout, algorithm.sequence_length, CPU)
        following = values_in_sequence(
            algorithm._value,
            obs,
            [torch.from_numpy(rollout.next_obs[0])],
            rollout,
            sequences=sequences,
        )[1]
    # The order of trajectories that close in the same step may differ.
    actual = []
    for start, length, after in zip(rollout.starts, lengths, following[:, 0], strict=True):
        values = batch.value[start : start + length, 0].tolist()
        actual.append((*values, float(after)))
    expected = [tuple(map(float, values)) for values in closed]
    for values in expected:
        nearest = min(actual, key=lambda other: distance(other, values))
        assert distance(nearest, values) < 2e-6
        actual.remove(nearest)
    assert any(not np.isnan(values[-1]) for values in expected)


def distance(values, other):
    """Largest difference of the values of two trajectories; NaN (no bootstrap) is ignored."""
    if len(values) != len(other):
        return np.inf
    return np.nanmax(np.abs(np.subtract(values, other)))


@pytest.mark.parametrize("shared", [False, True])
def test_update_changes_every_weight_of_policy_and_critic_with_recurrent_layers(learner_of, shared):
    learner, _ = collected(learner_of, shared=shared, n_steps=60)
    algorithm = learner.algorithm
    assert algorithm.memory_size == (6 if shared else 12)
    before = {name: p.detach().clone() for name, p in named(algorithm)}
    stats = algorithm.update(learner.trajectories.rollout(), step=0)
    assert all(np.isfinite(value) for value in stats.values())
    assert [name for name, p in named(algorithm) if torch.equal(before[name], p)] == []
    assert any(name.startswith("critic.memory") for name in before) is not shared


def named(algorithm):
    for label, network in (("policy", algorithm.policy), ("critic", algorithm.critic)):
        for name, parameter in network.named_parameters():
            yield f"{label}.{name}", parameter


def test_sequences_longer_than_the_time_horizon_and_batches_of_one_sequence_can_be_trained(
    quick, train_in
):
    network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
    settings = quick(
        network_settings={**network, "memory": {"sequence_length": 32, "memory_size": 4}},
        time_horizon=5,
    )
    result = train_in(Level(n_agents=3), settings)
    assert result.behaviors["Toy"].n_updates > 1
