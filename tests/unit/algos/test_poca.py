"""POCA's values on rollouts from messages of a small group; see also test_compositions."""

import numpy as np
import pytest
import torch
from steps import take_turn
from test_ppo import trainer_settings

from pipeline.algos import poca
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.settings.trainer.schema import (
    MemorySettings,
    NetworkSettings,
    POCASettings,
    TrainerSettings,
)
from pipeline.trainer.learner import Learner

SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec.create_discrete([3]))


def learner(**changes):
    options = {"network_settings": NetworkSettings(hidden_units=8, num_layers=1)} | changes
    hyperparameters = POCASettings(buffer_size=4, batch_size=4)
    settings = TrainerSettings(trainer_type="poca", hyperparameters=hyperparameters, **options)
    return Learner("Team", SPEC, settings, seed=1, device=torch.device("cpu"))


def message(deciding, ended=None, *, interrupted=False, group_reward=0.0):
    """Return a message of one group: by agent id, the first observation and the agent's reward."""

    def columns(agents):
        n = len(agents)
        obs = np.zeros((n, 2), np.float32)
        obs[:, 0] = [saw for saw, _ in agents.values()]
        reward = np.array([reward for _, reward in agents.values()], np.float32)
        ids = np.array(list(agents), np.int32)
        return obs, reward, ids, np.ones(n, np.int32), np.full(n, group_reward, np.float32)

    obs, reward, ids, group, gained = columns(deciding)
    masks = [np.zeros((len(ids), 3), np.bool_)]
    decisions = DecisionSteps([obs], reward, ids, masks, group, gained)
    obs, reward, ids, group, gained = columns(ended or {})
    stopped = np.full(len(ids), interrupted)
    return decisions, TerminalSteps([obs], reward, stopped, ids, group, gained)


def play(team_learner, *messages):
    for steps in messages:
        take_turn(team_learner, [steps])
    return team_learner.trajectories.rollout(team_learner.grouping.moments)


TWO, FOUR = (dict.fromkeys(range(n), (0.1, 0)) for n in (2, 4))


@pytest.mark.parametrize(
    ("largest", "messages"),
    [
        (4.0, [(FOUR,), (TWO, {2: (0.1, 0), 3: (0.2, 0)}), ({}, TWO)]),
        (2.0, [(TWO,), ({}, TWO)]),
        (1.0, [({0: (0.1, 0)},), ({}, {0: (0.1, 0)})]),
    ],
)
def test_largest_group_counts_only_members_with_an_unfinished_task(largest, messages):
    team_learner = learner()
    rollout = play(team_learner, *(message(*agents) for agents in messages))
    team_learner.algorithm._rows(rollout)
    assert float(team_learner.algorithm.critic.largest) == largest


@pytest.mark.parametrize("limits", [{"_CHUNK": 2}, {"_PLACES": 30}])
def test_values_of_groups_computed_in_chunks_equal_values_computed_at_once(limits, monkeypatch):
    team_learner = learner(time_horizon=2)
    agents = [{i: (t / 5 + i, t) for i in range(3 if t % 3 else 2)} for t in range(9)]
    rollout = play(team_learner, *map(message, agents))
    all_rows = team_learner.algorithm._rows(rollout)
    for name, value in limits.items():
        monkeypatch.setattr(poca, name, value)
    in_parts = team_learner.algorithm._rows(rollout)
    for name in ("value", "baseline", "returns", "advantage"):
        expected = getattr(all_rows, name)
        torch.testing.assert_close(getattr(in_parts, name), expected, rtol=1e-4, atol=1e-5)
        assert len(expected.unique()) > 5


def test_fields_of_group_members_include_actions_and_with_memory_also_memories():
    base_fields = ["continuous", "discrete"]
    assert list(learner().algorithm.member_fields) == [*base_fields, "over"]
    memory = MemorySettings(sequence_length=2, memory_size=4)
    network = NetworkSettings(hidden_units=8, num_layers=1, memory=memory)
    fields = learner(network_settings=network).algorithm.member_fields
    assert list(fields) == [*base_fields, "memory", "over"]
    assert fields["memory"].shape == (4,)


def test_poca_warns_of_reward_signals_that_reward_single_agents(caplog):
    signals = trainer_settings(reward_signals={"extrinsic": {}, "rnd": {"gamma": 0.9}})
    learner(reward_signals=signals.reward_signals)
    warnings = [record.message for record in caplog.records if "Reward signal" in record.message]
    assert [line.split()[2] for line in warnings] == ["Rnd"]
