"""POCA's targets and minibatches, on rollouts made by hand from messages of a small team."""

import itertools

import numpy as np
import pytest
import torch
from steps import take_turn
from test_signals import demo

from pipeline.algos import poca
from pipeline.algos.process_group import SINGLE_PROCESS
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.protocol.steps import DecisionSteps, TerminalSteps
from pipeline.settings import load_run_settings
from pipeline.settings.schema import (
    BehavioralCloningSettings,
    DemoPath,
    DemoSource,
    MemorySettings,
    NetworkSettings,
    POCASettings,
    TrainerSettings,
)
from pipeline.trainer.learner import Learner

SIGNALS = {"extrinsic": {"gamma": 0.9}, "rnd": {"gamma": 0.9}}
SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec.create_discrete([3]))


def learner(trainer="poca", **changes):
    options = {"network_settings": NetworkSettings(hidden_units=8, num_layers=1)} | changes
    settings = TrainerSettings(
        trainer_type=trainer,
        hyperparameters=POCASettings(buffer_size=4, batch_size=4),
        **options,
    )
    return Learner("Team", SPEC, settings, seed=1, device=torch.device("cpu"))


def message(deciding, ended=None, *, interrupted=False, group_reward=0.0):
    """Agents by id, each with its observation's first number and its own reward; one group."""

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


def following(team_learner, rollout):
    """Return the value of what follows each trajectory [K], and the group batch."""
    algorithm = team_learner.algorithm
    from pipeline.algos.group_batch import GroupBatch

    branches = algorithm.spec.action_spec.discrete_branches
    teams = GroupBatch.of(rollout, algorithm.policy.normalizers, branches, torch.device("cpu"))
    algorithm.critic.notice(teams.largest)
    with torch.no_grad():
        return algorithm._values(teams)[2][:, 0], teams


def value_of(team_learner, *seen):
    """The critic's value of members that see these numbers."""
    from pipeline.nets.group_critic import GroupLayout

    obs = torch.tensor([[number, 0.0] for number in seen])
    with torch.no_grad():
        values = team_learner.algorithm.critic([obs], None, None, GroupLayout(size=len(seen)))
    return float(values[0, 0])


def test_an_agent_that_ends_early_is_bootstrapped_with_the_mates_that_go_on():
    team_learner = learner()
    rollout = play(
        team_learner,
        message({0: (0.1, 0), 1: (0.2, 0), 2: (0.3, 0)}),
        message({1: (0.5, 0), 2: (0.6, 0)}, {0: (0.9, 0)}),
    )
    values, _ = following(team_learner, rollout)
    assert values == pytest.approx([value_of(team_learner, 0.5, 0.6)], abs=1e-6)
    assert values[0] != pytest.approx(value_of(team_learner, 0.5, 0.6, 0.9), abs=1e-5)


def test_nothing_follows_when_the_whole_group_has_ended():
    team_learner = learner()
    rollout = play(
        team_learner,
        message({0: (0.1, 0), 1: (0.2, 0)}),
        message({0: (0.7, 0), 1: (0.8, 0)}, {0: (0.3, 0), 1: (0.4, 0)}),
    )
    values, _ = following(team_learner, rollout)
    assert values.tolist() == [0.0, 0.0]


def test_a_group_that_is_cut_short_is_bootstrapped_with_what_all_saw_last():
    team_learner = learner()
    rollout = play(
        team_learner,
        message({0: (0.1, 0), 1: (0.2, 0)}),
        message({}, {0: (0.3, 0), 1: (0.4, 0)}, interrupted=True),
    )
    values, _ = following(team_learner, rollout)
    assert values == pytest.approx([value_of(team_learner, 0.3, 0.4)] * 2, abs=1e-6)


def test_a_full_trajectory_is_bootstrapped_with_the_next_decision_of_all():
    team_learner = learner(time_horizon=1)
    rollout = play(
        team_learner, message({0: (0.1, 0), 1: (0.2, 0)}), message({0: (0.5, 1), 1: (0.6, 2)})
    )
    values, _ = following(team_learner, rollout)
    assert values == pytest.approx([value_of(team_learner, 0.5, 0.6)] * 2, abs=1e-6)
    assert rollout.fields["reward"] == pytest.approx([3.0, 3.0])


def test_minibatches_have_all_rows_of_their_moments_and_no_row_twice():
    team_learner = learner(time_horizon=3)
    team = {0: (0.1, 0), 1: (0.2, 0), 2: (0.3, 0)}
    rollout = play(team_learner, *[message(team) for _ in range(10)])
    rows, groups = team_learner.algorithm._rows(rollout), team_learner.algorithm.groups
    stream = np.random.default_rng(1)
    minibatches = list(groups.minibatches(rows, stream, 4, SINGLE_PROCESS))
    pieces = [batch.index.numpy() for batch in minibatches]
    assert {len(piece) for piece in pieces} <= {3, 6}  # 4, but whole moments of 3
    indices = np.concatenate(pieces)
    assert len(np.unique(indices)) == len(indices) >= 24
    for piece in pieces:
        for moment in np.unique(groups.moment[piece]):
            assert set(np.flatnonzero(groups.moment == moment)) <= set(piece)


def test_advantages_are_returns_less_baselines_normalised_over_the_buffer():
    team_learner = learner(time_horizon=2)
    team = {0: (0.1, 0.5), 1: (0.2, -0.5), 2: (0.3, 2.0)}
    rollout = play(team_learner, *[message(team, group_reward=t) for t in range(5)])
    rows = team_learner.algorithm._rows(rollout)
    raw = (rows.returns - rows.baseline)[:, 0]
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(rows.advantage[:, 0], expected, rtol=1e-4, atol=1e-5)
    last = rollout.starts + rollout.lengths - 1
    values, _ = following(team_learner, rollout)
    gained = rollout.fields["reward"][last] + 0.99 * values
    assert rows.returns[last, 0].numpy() == pytest.approx(gained, abs=1e-5)


def test_largest_group_is_the_largest_of_members_whose_task_goes_on():
    team_learner = learner()
    two = {0: (0.1, 0), 1: (0.2, 0)}
    four = dict.fromkeys(range(4), (0.1, 0))
    rollout = play(
        team_learner, message(four), message(two, {2: (0.1, 0), 3: (0.2, 0)}), message({}, two)
    )
    team_learner.algorithm._rows(rollout)
    assert float(team_learner.algorithm.critic.largest) == 4.0
    pair_learner = learner()
    rollout = play(pair_learner, message(two), message({}, two))
    pair_learner.algorithm._rows(rollout)
    assert float(pair_learner.algorithm.critic.largest) == 2.0
    single = learner()
    rollout = play(single, message({0: (0.1, 0)}), message({}, {0: (0.1, 0)}))
    single.algorithm._rows(rollout)
    assert float(single.algorithm.critic.largest) == 1.0


@pytest.mark.parametrize("limits", [{"_CHUNK": 2}, {"_PLACES": 30}])
def test_values_of_a_few_moments_at_a_time_are_those_of_all_at_once(limits, monkeypatch):
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


def test_own_and_group_returns_are_charted_apart():
    team_learner = learner()
    play(
        team_learner,
        message({0: (0.1, 0), 1: (0.2, 0)}),
        message({0: (0.1, 1), 1: (0.2, 3)}, group_reward=5.0),
        message({}, {0: (0.3, 1), 1: (0.4, 3)}, group_reward=2.0),
    )
    means = team_learner.statistics.period()
    assert means["Environment/Cumulative Reward"] == pytest.approx(4.0)
    assert means["Environment/Group Cumulative Reward"] == pytest.approx(7.0)
    assert means["Policy/Extrinsic Reward"] == pytest.approx(15.0)
    assert list(team_learner.statistics.recent) == pytest.approx([9.0, 13.0])


def test_cloning_is_learned_beside_it_and_reported(tmp_path):
    source = DemoSource(path=str(demo(SPEC, tmp_path)))
    cloning = BehavioralCloningSettings(demo_path=DemoPath((source,)))
    team_learner = learner(behavioral_cloning=cloning)
    play(team_learner, *[message({0: (0.1 * t, 0), 1: (0.2, 1)}) for t in range(4)])
    play(team_learner, message({}, {0: (0.3, 1), 1: (0.4, 3)}))
    assert team_learner.learn()
    assert team_learner.statistics.period()["Losses/Pretraining Loss"] > 0


def test_other_trainers_learn_from_own_and_group_reward_and_say_so_once(caplog):
    from pipeline.settings.schema import PPOSettings

    settings = TrainerSettings(trainer_type="ppo", hyperparameters=PPOSettings(), time_horizon=1)
    team_learner = Learner("Team", SPEC, settings, seed=1, device=torch.device("cpu"))
    first = message({0: (0.1, 0), 1: (0.2, 0)})
    rollout = play(
        team_learner, first, *[message({0: (0.1, 1), 1: (0.2, 3)}, group_reward=5.0)] * 2
    )
    assert rollout.fields["reward"].tolist() == [6.0, 8.0, 6.0, 8.0]
    messages = [record.message for record in caplog.records if "Group Reward" in record.message]
    assert len(messages) == 1
    assert "Please use the POCA trainer" in messages[0]


def test_a_member_is_known_by_what_it_sees_does_and_remembers():
    base_fields = ["continuous", "discrete"]
    assert list(learner().algorithm.member_fields) == [*base_fields, "over"]
    memory = MemorySettings(sequence_length=2, memory_size=4)
    network = NetworkSettings(hidden_units=8, num_layers=1, memory=memory)
    fields = learner(network_settings=network).algorithm.member_fields
    assert list(fields) == [*base_fields, "memory", "over"]
    assert fields["memory"].shape == (4,)


def test_rows_that_are_enough_are_more_than_the_buffers_size():
    assert [learner().algorithm.ready(n) for n in (3, 4, 5)] == [False, False, True]


def test_signals_that_reward_agents_for_themselves_are_warned_of(caplog):
    signals = load_run_settings(
        None,
        overrides={
            "behaviors": {"Team": {"trainer_type": "poca", "reward_signals": SIGNALS}},
        },
    ).behaviors["Team"]
    learner(reward_signals=signals.reward_signals)
    warnings = [record.message for record in caplog.records if "Reward signal" in record.message]
    assert [line.split()[2] for line in warnings] == ["Rnd"]


def test_policy_loss_is_the_mean_of_those_of_minibatches_without_their_signs(monkeypatch):
    team_learner = learner()
    rollout = play(
        team_learner,
        *(message({0: (0.1 * t, 1), 1: (0.2, 0)}) for t in range(4)),
        message({}, {0: (0.3, 0), 1: (0.4, 0)}),
    )
    signs = itertools.cycle([1.0, -3.0])
    losses = lambda *_, **__: [torch.tensor([next(signs), 4.0, 5.0])]  # noqa: E731  # one line
    monkeypatch.setattr(team_learner.algorithm, "_learn", losses)
    stats = team_learner.algorithm.update(rollout, step=0)
    assert [stats[f"Losses/{name} Loss"] for name in ("Policy", "Value", "Baseline")] == [2, 4, 5]
