"""A learner keeps up with agents that leave their group early, come late, and change their ids."""

from __future__ import annotations

import numpy as np
import pytest
from steps import decision_steps, take_turn, terminal_steps

from pipeline.data.slots import STALE_AFTER_MESSAGES
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import UnityObservationException
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.protocol.steps import TerminalSteps
from pipeline.simulators import registry
from pipeline.tracking import names
from pipeline.trainer.api import train
from pipeline.trainer.batching import sample_rows

SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
LONG = {"max_steps": 100_000}


@pytest.mark.parametrize(
    ("name", "behavior", "n_agents"),
    [("couriers", "Couriers", 5), ("push_together", "PushTogether", 6)],
)
def test_every_decision_becomes_one_row_and_no_slot_is_lost(name, behavior, n_agents, make_learner):
    qualified = f"{behavior}?team=0"
    with WorkerSet(
        [InProcessEnvironment(registry.make(name, seed=2, n_agents=n_agents))]
    ) as workers:
        workers.reset()
        spec = workers.behavior_specs[qualified]
        learner = make_learner(spec, max_steps=100_000, time_horizon=16)
        n_decisions, ids = 0, set()
        for _ in range(600):
            steps = workers.get_steps(qualified)
            decided = take_turn(learner, steps, team=qualified)
            workers.set_actions(qualified, decided.actions)
            ids |= set(steps[0][0].agent_id.tolist())
            n_decisions += len(steps[0][0])
            workers.step()
    trajectories = learner.trajectories
    n_open = int(trajectories._cursor.sum() + trajectories._waiting.sum())
    assert trajectories.n_closed + n_open == n_decisions
    assert learner.slots.n_slots <= n_agents
    assert len(ids) >= 2 * n_agents
    rollout = trajectories.rollout()
    assert rollout.terminated.sum() >= n_agents
    assert np.isfinite(rollout.fields["reward"]).all()


def steps_of(agents, ended=(), reward=1.0):
    """One message of a worker: the agents that ask for an action, and those that have ended."""

    decision, terminal = (
        kind([np.full((len(ids), 2), 0.5)], ids, reward=reward)
        for kind, ids in ((decision_steps, agents), (terminal_steps, ended))
    )
    return decision, terminal


def play(learner, *workers):
    take_turn(learner, workers)
    learner.trajectories.clear_closed()


def test_agents_that_vanish_without_an_end_leave_room_for_others(make_learner, caplog):
    learner = make_learner(SPEC, **LONG, time_horizon=64)
    vanishing = []
    for message in range(5000):
        play(learner, steps_of([0, *range(10 + 4 * message, 14 + 4 * message)]))
        vanishing.append(learner.slots.n_slots)
    assert learner.slots.n_slots <= 8 * (STALE_AFTER_MESSAGES + 10)
    assert vanishing[2500] == vanishing[-1]
    assert [r.message.partition(" agents")[2] for r in caplog.records] == [
        " of Toy have vanished without the end of an episode: nothing was heard of them for 1000 "
        "messages. What they had not finished is not learned from; let the environment end the "
        "episode of an agent that it removes."
    ]
    assert learner.step == 5000 // 64 * 64  # of the agent that stays; it lost nothing


@pytest.mark.parametrize("memory", [None, {"sequence_length": 4, "memory_size": 8}])
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
def test_a_message_counts_once_also_with_groups_and_memory(make_learner, trainer, memory):
    network = {"hidden_units": 8, "num_layers": 1, "memory": memory}
    learner = make_learner(SPEC, **LONG, trainer_type=trainer, network_settings=network)
    for _ in range(6):
        play(learner, steps_of([1, 2]), steps_of([1]))
    assert learner.slots.state_dict()["clock"] == 5  # messages after the first


@pytest.mark.parametrize("memory", [None, {"sequence_length": 4, "memory_size": 8}])
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
def test_a_new_agent_gets_the_slot_that_an_end_has_freed_and_no_memory(
    make_learner, trainer, memory
):
    network = {"hidden_units": 8, "num_layers": 1, "memory": memory}
    learner = make_learner(SPEC, **LONG, trainer_type=trainer, network_settings=network)
    fresh = make_learner(SPEC, **LONG, trainer_type=trainer, network_settings=network)
    for _ in range(3):
        play(learner, steps_of([1]))
    play(learner, steps_of([2], ended=[1], reward=5.0))
    play(fresh, steps_of([2]))
    assert learner.slots.n_slots == 1
    assert list(learner.statistics.returns) == [5.0 + 2.0]  # of agent 1: 2 decisions, then its end
    if memory:
        np.testing.assert_allclose(learner.memories, fresh.memories, rtol=1e-5)


def test_an_agent_that_comes_back_after_long_begins_a_new_trajectory(make_learner):
    memory = {"memory": {"sequence_length": 4, "memory_size": 8}}
    learner = make_learner(
        SPEC, **LONG, network_settings=memory | {"hidden_units": 8, "num_layers": 1}
    )
    play(learner, steps_of([0]))
    play(learner, steps_of([0]))
    remembered = learner.memories[0].copy()
    assert remembered.any()
    for message in range(2 * STALE_AFTER_MESSAGES + 200):
        play(learner, steps_of(range(10 + message, 14 + message)))
    before = learner.step
    play(learner, steps_of([0], ended=[0]))
    assert learner.step == before
    (slot,) = learner.slots.ended(("", 0), np.array([0], np.int32))
    fresh = make_learner(
        SPEC, **LONG, network_settings=memory | {"hidden_units": 8, "num_layers": 1}
    )
    play(fresh, steps_of([0]))
    np.testing.assert_allclose(learner.memories[slot], fresh.memories[0], rtol=1e-5)


def test_an_agent_that_ends_and_asks_on_keeps_its_slot_and_one_that_left_gives_it_back(
    make_learner,
):
    learner = make_learner(SPEC, **LONG)
    play(learner, steps_of([3, 1, 2]))
    play(learner, steps_of([1, 3], ended=[2, 3, 1]))
    assert learner.slots.n_taken == 2
    slots = learner.slots.deciding(("", 0), np.array([3, 1], np.int32))
    assert slots.tolist() == [0, 1]


def test_messages_without_any_agent_change_nothing(make_learner):
    with_pauses, without = make_learner(SPEC, **LONG), make_learner(SPEC, **LONG)
    nobody = steps_of([])
    for _ in range(40):
        for learner in (with_pauses, without):
            play(learner, steps_of([1, 2]), nobody)
        play(with_pauses, nobody, nobody)
    assert with_pauses.step == without.step == 2 * 39 // 16 * 16
    for left, right in zip(
        with_pauses.trajectories.open_state(2)["rows"].values(),
        without.trajectories.open_state(2)["rows"].values(),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


def test_the_second_end_of_an_agent_in_one_message_counts_for_nothing(make_learner):
    learner = make_learner(SPEC, **LONG)
    play(learner, steps_of([1, 2]))
    learner.absorb(learner.receive([steps_of([1], ended=[1, 1], reward=3.0)]))
    assert learner.step == 1
    assert learner.statistics.n_episodes == 1
    assert learner.trajectories.rollout().fields["reward"].tolist() == [3.0]


class Teams:
    """One agent in each of two teams, which do not observe the same."""

    def __init__(self):
        first_spec, second_spec = (
            BehaviorSpec([ObservationSpec.vector(size)], ActionSpec(1, ())) for size in (2, 3)
        )
        self.behavior_specs = {"Toy?team=0": first_spec, "Toy?team=1": second_spec}

    def reset(self):
        steps = {}
        for agent, (name, spec) in enumerate(self.behavior_specs.items()):
            obs = [np.zeros((1, *spec.observation_specs[0].shape))]
            steps[name] = decision_steps(obs, [agent]), TerminalSteps.empty(spec)
        return steps

    def step(self, _actions):
        return self.reset()

    def set_parameter(self, name, value):
        pass

    def close(self):
        pass


def test_teams_of_one_behavior_that_observe_differently_are_refused_by_name(quick, tmp_path):
    with pytest.raises(
        UnityObservationException,
        match=r"^behavior Toy: the team of Toy\?team=1 sends obs.* \(3,\)",
    ):
        train(InProcessEnvironment(Teams()), quick(), seed=1, run_dir=tmp_path)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_where_no_agent_asks_there_are_no_slots_and_they_are_indices(make_learner, n_workers):
    learner = make_learner(SPEC, **LONG)
    take_turn(learner, [steps_of([1, 2])] * n_workers)
    slots = learner.receive([steps_of([])] * n_workers).slots
    assert np.arange(9)[slots].tolist() == []


def test_an_episode_in_a_group_counts_what_the_group_gained_and_is_charted_without(make_learner):
    sizes = {"batch_size": 16, "buffer_size": 64}
    learner = make_learner(SPEC, trainer_type="poca", hyperparameters=sizes, **LONG)
    seen, nobody = [np.zeros((2, 2))], [np.zeros((0, 2))]
    gains = {"reward": [1.0, 2.0], "group_reward": 0.5}
    last = {"reward": [10.0, 20.0], "group_reward": 4.0}
    take_turn(learner, [(decision_steps(seen, group_id=7), terminal_steps(nobody))])
    take_turn(learner, [(decision_steps(seen, group_id=7, **gains), terminal_steps(nobody))])
    take_turn(learner, [(decision_steps(nobody), terminal_steps(seen, group_id=7, **last))])
    numbers = learner.statistics
    assert numbers.n_episodes == 2
    assert list(numbers.recent) == [11.0 + 4.5, 22.0 + 4.5]
    means = numbers.period()
    assert means[names.REWARD] == (11.0 + 22.0) / 2
    assert means[names.GROUP_REWARD] == 4.5
    assert means[names.EPISODE_LENGTH] == 1.0


def test_gains_of_a_group_are_learned_from_as_own_ones_and_that_is_said_once(make_learner, caplog):
    learner = make_learner(SPEC, **LONG)
    seen, nobody = [np.zeros((2, 2))], [np.zeros((0, 2))]
    gains = {"reward": [1.0, 2.0], "group_reward": [0.0, 0.5]}
    take_turn(learner, [(decision_steps(seen, group_id=7), terminal_steps(nobody))])
    assert not caplog.records
    for _ in range(2):
        take_turn(learner, [(decision_steps(seen, group_id=7, **gains), terminal_steps(nobody))])
    (message,) = caplog.messages
    assert "you are not using a multi-agent trainer" in message
    take_turn(learner, [(decision_steps(nobody), terminal_steps(seen, group_id=7, **gains))])
    assert list(learner.statistics.recent) == [3.0, 7.5]


@pytest.mark.parametrize(
    ("n", "expected"), [(0, []), (1, [0]), (3, [0, 1, 2]), (94, range(0, 94, 3))]
)
def test_rows_to_show_a_policy_are_spread_over_all(n, expected):
    obs = np.arange(n, dtype=np.float32)[:, None]
    sample = sample_rows([obs, -obs], obs > 1)
    assert [values[:, 0].tolist() for values in sample["obs"]] == [
        list(expected),
        [-value for value in expected],
    ]
    assert sample["allowed"][:, 0].tolist() == [value > 1 for value in expected]


@pytest.mark.parametrize("trainer", ["ppo", "poca"])
def test_an_end_before_the_first_decision_counts_and_is_not_learned_from(make_learner, trainer):
    learner = make_learner(SPEC, **LONG, trainer_type=trainer)
    take_turn(learner, [steps_of([0], reward=0.0)])
    take_turn(learner, [steps_of([0], ended=[0, 1, 2], reward=3.0)])  # 1 and 2 never decided
    take_turn(learner, [steps_of([0], ended=[1], reward=-1.0)])
    assert sorted(learner.statistics.returns) == [-1.0, 3.0, 3.0, 3.0]
    assert learner.step == 1
    assert learner.trajectories.n_closed == 1
    assert learner.slots.n_taken == 1
    period = learner.statistics.period()
    assert period[names.REWARD] == 2.0
    assert period[names.EPISODE_LENGTH] == 0.0


def test_ends_of_opponents_do_not_count(make_learner):
    learner = make_learner(SPEC, **LONG, self_play={"save_steps": 100})
    learner.past.save_due(0)
    learner.past.swap(["Toy?team=1"])
    for _ in range(3):
        for team in ("Toy?team=0", "Toy?team=1"):
            take_turn(learner, [steps_of([0], ended=[0])], team=team)
    # at first nobody has decided; the learning team's 3 ends count, the other's do not
    assert len(learner.statistics.returns) == 3
