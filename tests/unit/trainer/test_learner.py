"""A learner's transitions, episodes and slots when agents leave, come late or change ids."""

import copy
from types import SimpleNamespace

import histories
import numpy as np
import pytest
import torch
from failing_workers import FailsAt, Long
from steps import decision_steps, take_turn, terminal_steps
from toys import BEHAVIOR, Chase, Corridor, Forbidden

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.core.steps import TerminalSteps
from pipeline.data.slots import STALE_AFTER_MESSAGES
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import UnityObservationException
from pipeline.tracking import names
from pipeline.trainer import JobSpec, train
from pipeline.trainer.batching import sample_rows
from pipeline.trainer.checkpoints.file import digest
from pipeline.trainer.learner import Learner
from pipeline.trainer.statistics import EXTRINSIC, Statistics

SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))
LONG = {"max_steps": 100_000}
NETWORK = {"hidden_units": 8, "num_layers": 1}
MEMORY = NETWORK | {"memory": {"sequence_length": 4, "memory_size": 8}}
networks = pytest.mark.parametrize("network", [NETWORK, MEMORY], ids=["plain", "memory"])


def steps_of(agents, ended=(), reward=1.0):
    """One message of a worker: agents that ask for an action, and agents that have ended."""
    asking = decision_steps([np.full((len(agents), 2), 0.5)], agents, reward=1.0)
    return asking, terminal_steps([np.full((len(ended), 2), 0.5)], ended, reward=reward)


def play(learner, *workers):
    take_turn(learner, workers)
    learner.trajectories.clear_closed()


def test_slots_of_vanished_agents_are_used_again_with_one_warning(make_learner, caplog):
    learner = make_learner(SPEC, **LONG, time_horizon=64)
    vanishing = []
    for message in range(5000):
        play(learner, steps_of([0, *range(10 + 4 * message, 14 + 4 * message)]))
        vanishing.append(learner.slots.n_slots)
    assert learner.slots.n_slots <= 8 * (STALE_AFTER_MESSAGES + 10)
    assert vanishing[2500] == vanishing[-1]
    assert [r.message.partition(" agents")[2] for r in caplog.records] == [
        " of Toy have vanished without the end of an episode: they were in none of the last 1000 "
        "messages. Their unfinished trajectories are not learned from; the environment should end "
        "the episode of an agent before it removes the agent."
    ]
    assert learner.step == 5000 // 64 * 64  # all rows of the agent that stays


@networks
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
def test_clock_of_the_slots_advances_by_one_for_each_message(make_learner, trainer, network):
    learner = make_learner(SPEC, **LONG, trainer_type=trainer, network_settings=network)
    for _ in range(6):
        play(learner, steps_of([1, 2]), steps_of([1]))
    assert learner.slots.state_dict()["clock"] == 5  # the clock counts from 0, so 6 messages give 5


@networks
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
def test_new_agent_gets_the_slot_of_an_ended_agent_with_empty_memory(
    make_learner, trainer, network
):
    options = LONG | {"trainer_type": trainer, "network_settings": network}
    learner, fresh = (make_learner(SPEC, **options) for _ in range(2))
    for _ in range(3):
        play(learner, steps_of([1]))
    play(learner, steps_of([2], ended=[1], reward=5.0))
    play(fresh, steps_of([2]))
    assert learner.slots.n_slots == 1
    assert list(learner.statistics.returns) == [5.0 + 2.0]  # agent 1: two rewards, then its end
    if "memory" in network:
        np.testing.assert_allclose(learner.memories, fresh.memories, rtol=1e-5)


def test_agent_that_returns_after_many_messages_starts_a_new_trajectory(make_learner):
    learner, fresh = (make_learner(SPEC, **LONG, network_settings=MEMORY) for _ in range(2))
    play(learner, steps_of([0]))
    play(learner, steps_of([0]))
    assert learner.memories[0].any()
    for message in range(2 * STALE_AFTER_MESSAGES + 200):
        play(learner, steps_of(range(10 + message, 14 + message)))
    before = learner.step
    play(learner, steps_of([0], ended=[0]))
    assert learner.step == before
    (slot,) = learner.slots.ended(("", 0), np.array([0], np.int32))
    play(fresh, steps_of([0]))
    np.testing.assert_allclose(learner.memories[slot], fresh.memories[0], rtol=1e-5)


def test_agent_keeps_a_slot_after_an_episode_only_if_the_agent_asks_for_a_decision_again(
    make_learner,
):
    learner = make_learner(SPEC, **LONG)
    play(learner, steps_of([3, 1, 2]))
    play(learner, steps_of([1, 3], ended=[2, 3, 1]))
    assert learner.slots.n_taken == 2
    slots = learner.slots.deciding(("", 0), np.array([3, 1], np.int32))
    assert slots.tolist() == [0, 1]


@pytest.mark.parametrize("n_workers", [1, 2])
def test_messages_without_agents_do_not_change_the_learner(make_learner, n_workers):
    with_pauses, without = make_learner(SPEC, **LONG), make_learner(SPEC, **LONG)
    nobody = [steps_of([])] * n_workers
    for _ in range(40):
        for learner in (with_pauses, without):
            play(learner, steps_of([1, 2]), *nobody[1:])
        play(with_pauses, *nobody)
    assert with_pauses.step == without.step == 2 * 39 // 16 * 16
    opened = [learner.trajectories.open_state(2)["rows"] for learner in (with_pauses, without)]
    for left, right in zip(*(rows.values() for rows in opened), strict=True):
        np.testing.assert_array_equal(left, right)
    slots = with_pauses.receive(nobody).slots
    assert np.arange(9)[slots].tolist() == [], "no slots, but a valid index"


def test_a_second_terminal_step_of_an_agent_in_one_message_is_ignored(make_learner):
    learner = make_learner(SPEC, **LONG)
    play(learner, steps_of([1, 2]))
    learner.complete_transitions(learner.receive([steps_of([1], ended=[1, 1], reward=3.0)]))
    assert learner.step == 1
    assert learner.statistics.n_episodes == 1
    assert learner.trajectories.rollout().fields["reward"].tolist() == [3.0]


def test_teams_of_a_behavior_with_different_observations_are_refused(quick, tmp_path):
    names = [f"Toy?team={team}" for team in (0, 1)]
    specs = {name: BehaviorSpec([ObservationSpec.vector(size)], ActionSpec(1, ()))
             for name, size in zip(names, (2, 3), strict=True)}  # fmt: skip

    def steps(*_):
        return {name: (decision_steps([np.zeros((1, size))], [size]), TerminalSteps.empty(spec))
                for size, (name, spec) in enumerate(specs.items(), 2)}  # fmt: skip

    teams = SimpleNamespace(behavior_specs=specs, reset=steps, step=steps, close=lambda: None)
    message = r"^behavior Toy: the team of Toy\?team=1 sends obs.* \(3,\)"
    with pytest.raises(UnityObservationException, match=message):
        train(JobSpec(InProcessEnvironment(teams), quick(), seed=1, run_dir=tmp_path))


def test_group_rewards_count_in_returns_but_not_in_the_cumulative_reward(make_learner):
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
    assert means[EXTRINSIC] == 1.0 + 2.0 + 0.5 + 10.0 + 20.0 + 4.0, "the sum to learn from"


def test_ppo_adds_group_rewards_to_own_rewards_with_one_warning(make_learner, caplog):
    learner = make_learner(SPEC, **LONG, time_horizon=1)
    seen, nobody = [np.zeros((2, 2))], [np.zeros((0, 2))]
    gains = {"reward": [1.0, 2.0], "group_reward": [0.0, 0.5]}
    take_turn(learner, [(decision_steps(seen, group_id=7), terminal_steps(nobody))])
    assert not caplog.records
    for _ in range(2):
        take_turn(learner, [(decision_steps(seen, group_id=7, **gains), terminal_steps(nobody))])
    (message,) = caplog.messages
    assert "you are not using a multi-agent trainer" in message
    assert "Please use the POCA trainer" in message
    assert learner.trajectories.rollout().fields["reward"].tolist() == [1.0, 2.5] * 2
    take_turn(learner, [(decision_steps(nobody), terminal_steps(seen, group_id=7, **gains))])
    assert list(learner.statistics.recent) == [3.0, 7.5]


@pytest.mark.parametrize(
    ("n", "expected"), [(0, []), (1, [0]), (3, [0, 1, 2]), (94, range(0, 94, 3))]
)
def test_sampled_rows_are_spread_evenly_over_all_rows(n, expected):
    obs = np.arange(n, dtype=np.float32)[:, None]
    sample = sample_rows([obs, -obs], obs > 1)
    assert [values[:, 0].tolist() for values in sample["obs"]] == [
        list(expected),
        [-value for value in expected],
    ]
    assert sample["allowed"][:, 0].tolist() == [value > 1 for value in expected]


@pytest.mark.parametrize("trainer", ["ppo", "poca"])
def test_episode_without_a_decision_counts_but_is_not_learned_from(make_learner, trainer):
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


def test_ended_episodes_of_opponents_are_not_counted(make_learner):
    learner = make_learner(SPEC, **LONG, self_play={"save_steps": 100})
    learner.snapshot_pool.save_if_due(0)
    learner.snapshot_pool.swap(["Toy?team=1"])
    for _ in range(3):
        for team in ("Toy?team=0", "Toy?team=1"):
            take_turn(learner, [steps_of([0], ended=[0])], team=team)
    # No agent has decided before its end; the 3 ends of the learning team count.
    assert len(learner.statistics.returns) == 3


def test_learner_saves_acting_weights_and_update_state_and_observes_rows_until_max_steps(
    make_learner,
):
    learner = make_learner(SPEC, threaded=True)
    observed = []
    learner.updates = SimpleNamespace(
        weights=lambda: "weights that act",
        state_dict=lambda: "both weights",
        observe=observed.append,
    )
    assert learner.weights_dict()["algorithm"] == "weights that act"
    assert learner.state_dict()["algorithm"] == "both weights"
    closed = SimpleNamespace(obs=["seen"], n_rows=3)
    learner._count(closed)
    learner.sync = SimpleNamespace(steps=5)
    learner._count(closed)  # counted by `sync` until the next synchronisation
    learner.sync, learner.step = None, learner.settings.max_steps
    learner._count(closed)
    assert observed == [["seen"]] * 2
    assert (learner.step, learner.settings.max_steps) == (503, 500)


def test_method_drop_unfinished_drops_agents_games_and_memories_of_one_worker(make_learner):
    learner = make_learner(SPEC, network_settings=MEMORY, self_play={"window": 1})
    take_turn(learner, [steps_of(range(2)), steps_of(range(3))])
    take_turn(learner, [steps_of(range(2), [1]), steps_of(range(3))])
    games, dropped = learner.snapshot_pool.games, []
    for worker in (0, 1):
        games.record(("Toy", worker), decision_steps([], [worker], group_id=1))
    learner.grouping.drop = lambda slots: dropped.extend(slots.tolist())
    learner.memories[:] = 1.0
    n_held = learner.trajectories.n_held
    learner.drop_unfinished(1)
    assert dropped == [2, 3, 4]
    assert learner.memories[:5, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [entry["source"] for entry in games.state_dict()] == [("Toy", 0)]
    assert learner.trajectories.n_held < n_held
    learner.drop_unfinished()
    assert (learner.memories[:5].any(), games.state_dict()) == (False, [])


@networks
def test_restart_of_a_worker_drops_only_the_open_trajectories_of_this_worker(make_learner, network):
    envs = [
        InProcessEnvironment(Long(seed=1, n_agents=2)),
        FailsAt(Long(seed=2, n_agents=3), at=6),
        InProcessEnvironment(Long(seed=3, n_agents=2)),
    ]
    relaunched = Long(seed=9, n_agents=3)
    with WorkerSet(envs, relaunch=lambda *_: InProcessEnvironment(relaunched)) as workers:
        workers.reset()
        learner = make_learner(
            Chase.spec, time_horizon=8, max_steps=100_000, network_settings=network
        )
        for _ in range(14):
            steps = workers.get_steps(BEHAVIOR)
            decided = take_turn(learner, steps, team=BEHAVIOR)
            workers.set_actions(BEHAVIOR, decided.actions)
            workers.step()
            for worker in workers.take_restarted():
                assert worker == 1
                learner.drop_unfinished(worker)
                begun = relaunched.observe()[0].astype(np.float32)
                if learner.memories is not None:
                    taken_slots = learner.slots.state_dict()["taken"]
                    live = {slot for entry in taken_slots for slot in entry["slots"].tolist()}
                    free = sorted(set(range(learner.slots.n_slots)) - live)
                    assert len(free) == 3
                    assert not learner.memories[free].any()
                    assert learner.memories[sorted(live)].any()
    assert learner.slots.n_slots == 7
    # Six decisions of worker 1 are lost with its process; the next eight are a trajectory.
    closed = learner.trajectories.rollout()
    assert closed.lengths.tolist() == [8] * 4
    rows = closed.obs[0].reshape(-1, 8, 4)
    firsts = {tuple(first) for first in rows[:, 0].tolist()}
    # The trajectories of the new process are still open: they have 7 of 8 rows.
    assert {tuple(first) for first in begun.tolist()}.isdisjoint(firsts)
    steps = learner.step
    learner.complete_transitions(learner.receive(workers.get_steps(BEHAVIOR), team=BEHAVIOR))
    assert learner.step == steps + 3 * 8
    rows = learner.trajectories.rollout().obs[0].reshape(-1, 8, 4)
    assert {tuple(f) for f in begun.tolist()} <= {tuple(first) for first in rows[:, 0].tolist()}


def test_statistics_since_the_last_synchronisation_are_kept_separately_as_pending(make_learner):
    learner = make_learner(SPEC)
    learner.pending_stats = Statistics()
    learner.sync = SimpleNamespace(
        steps=0,
        should_update=lambda: learner.n_updates == 0,
        mean=lambda stats: {tag: value + 1.0 for tag, value in stats.items()},
    )
    take_turn(learner, [steps_of([0, 1])])
    take_turn(learner, [steps_of([], [0, 1], reward=[1.0, 3.0])])
    assert (learner.step, learner.sync.steps) == (0, 2)
    learner.algorithm.update = lambda *_, **__: {"Losses/Mean": 4.0}
    assert learner.learn()
    assert learner.statistics.period() == {"Losses/Mean": 5.0}, "the mean over the processes"
    pending = learner.pending_stats.period()
    assert pending[names.REWARD] == 2.0
    assert names.ENTROPY in pending
    assert "Losses/Mean" not in pending


def test_learner_records_only_the_first_observations_until_an_update(make_learner):
    learner = make_learner(Corridor.spec)
    nobody = terminal_steps([np.zeros((0, 6))], [])
    for number in (1.0, 2.0, 3.0):
        take_turn(learner, [(decision_steps([np.full((2, 6), number)]), nobody)])
    assert learner.recorded["obs"][0].unique().tolist() == [1.0]


def test_acting_and_saved_policy_stay_the_same_during_a_threaded_update(make_learner):
    games = {"window": 50, "save_steps": 1, "play_against_latest_model_ratio": 0.0}
    learner = histories.learner_of(
        make_learner, "ppo", histories.PLAIN, threaded=True, self_play=games
    )
    normalizer = learner.algorithm.policy.normalizers.by_observation["0"]
    obs = [np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)]
    n_under_way, begun, kept = 0, {}, []
    for number, steps in enumerate(histories.messages(40, seed=2, grouped=False)):
        take_turn(learner, steps)
        while learner.learn():
            pass
        if not learner.updates.is_under_way:
            continue
        acting = learner.acting.policy
        weights = learner.weights_dict()["algorithm"]["policy"]
        fresh = copy.deepcopy(acting)
        fresh.load_state_dict(weights)
        decided = [
            policy.act(obs, None, torch.Generator().manual_seed(1)).rows["log_prob"].tolist()
            for policy in (acting, fresh)
        ]
        assert decided[0] == decided[1], "saved normalizers are the acting ones"
        learner.snapshot_pool.save_if_due(10 * (number + 1))
        flat = [values.tolist() for values in weights.values()]
        assert flat == [values.tolist() for values in learner.snapshot_pool.snapshots[-1].values()]
        assert flat == [values.tolist() for values in acting.state_dict().values()]
        now = flat, float(normalizer.count)
        assert begun.setdefault(learner.n_updates, now) == now, "nothing changes during an update"
        n_under_way += 1
        kept.append((weights, digest(weights)))
    assert all(digest(weights) == expected for weights, expected in kept), "copies do not change"
    assert n_under_way > len(begun) > 2


class ShowsWhatIsAllowed(Forbidden):
    """An agent sees its own mask, so that the next observation says what is allowed next."""

    spec = BehaviorSpec([ObservationSpec.vector(5)], Forbidden.spec.action_spec)
    length = 5

    def observe(self):
        return [~self.mask]


@pytest.mark.parametrize("time_horizon", [1, 3, 8])
def test_next_action_mask_is_stored_at_the_time_horizon_but_not_at_the_end_of_an_episode(
    make_learner, time_horizon
):
    off_policy = {"batch_size": 8, "buffer_size": 500, "buffer_init_steps": 400}
    learner = make_learner(
        ShowsWhatIsAllowed.spec,
        trainer_type="xqc",
        hyperparameters=off_policy,
        time_horizon=time_horizon,
    )
    games = [ShowsWhatIsAllowed(seed=seed, n_agents=3) for seed in (1, 2)]
    messages = [game.reset()[BEHAVIOR] for game in games]
    for _ in range(20):
        decided = take_turn(learner, messages)
        learner.learn()
        messages = [
            game.step({BEHAVIOR: action})[BEHAVIOR]
            for game, action in zip(games, decided.actions, strict=True)
        ]
    replay = learner.algorithm.replay
    rows = replay.read(np.arange(replay.n_added))
    shown, stored = rows.next_obs[0] > 0, rows.fields["next_allowed"]
    differ = (shown != stored).any(axis=1)
    assert not stored.all()
    assert stored[differ].all()  # no masks come with the end of an episode
    assert 0 < differ.sum() <= replay.n_added // 5


def test_all_choices_of_the_next_step_are_allowed_if_there_are_no_action_masks(make_learner):
    options = {"hyperparameters": {"batch_size": 8, "buffer_size": 500}, "time_horizon": 1}
    learner = make_learner(Forbidden.spec, trainer_type="xqc", **options)
    for _ in range(4):
        take_turn(
            learner, [(decision_steps([np.ones((3, 1))]), TerminalSteps.empty(Forbidden.spec))]
        )
        learner.learn()
    assert learner.algorithm.replay.read(np.arange(9)).fields["next_allowed"].all()


@pytest.mark.parametrize("of", ["teams", "workers"])
def test_groups_with_equal_ids_in_different_teams_or_workers_have_separate_members(
    make_learner, of
):
    learner = histories.learner_of(make_learner, "poca")
    nobody = terminal_steps([np.zeros((0, 3))], [])
    first, second = (
        (decision_steps([np.zeros((len(ids), 3))], ids, group_id=1), nobody)
        for ids in ([0, 1], [2, 3, 4])
    )
    if of == "teams":
        take_turn(learner, [first], team="Toy?team=0")
        take_turn(learner, [second], team="Toy?team=1")
    else:
        take_turn(learner, [first, second], team="Toy?team=0")
    groups = learner.grouping
    members = groups.moments.members(np.unique(groups.by_slot["moment"][:5]))
    assert members.present.sum(1).tolist() == [2, 3]


def test_normalizers_do_not_change_without_learning_or_after_max_steps(make_learner, quick):
    settings = quick(network_settings=histories.PLAIN).behaviors["Toy"]
    device = torch.device("cpu")
    learners = [
        Learner("Toy", histories.SPEC, settings, seed=1, device=device, learns=x) for x in (1, 0)
    ]
    learners.append(Learner("Toy", histories.SPEC, settings, seed=1, device=device))
    learners[2].step = settings.max_steps
    counts = []
    for learner in learners:
        for steps in histories.messages(12, seed=1, grouped=False):
            take_turn(learner, steps)
        counts.append(float(learner.algorithm.policy.normalizers.by_observation["0"].count))
    assert counts[0] > 1.0
    assert counts[1:] == [1.0, 1.0]
    assert learners[1].step > 0


def test_behavior_that_has_reached_max_steps_drops_complete_trajectories_without_an_update(
    make_learner,
):
    learner = make_learner(Corridor.spec, max_steps=100)
    env = InProcessEnvironment(Corridor(n_agents=8))
    env.reset()
    for _ in range(40):
        (name,) = env.behavior_specs
        env.set_actions(name, take_turn(learner, [env.get_steps(name)]).actions[0])
        env.step()
    assert learner.trajectories.n_closed >= 128
    assert not learner.learn()
    assert (learner.trajectories.n_closed, learner.n_updates) == (0, 0)
