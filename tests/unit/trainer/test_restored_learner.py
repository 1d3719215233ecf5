"""A learner that takes up what another has saved goes on as that one does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from steps import decision_steps, take_turn, terminal_steps

from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.trainer.checkpoints.file import load_checkpoint, of_each_rank, save_checkpoint
from pipeline.trainer.checkpoints.manager import CheckpointManager, NullCheckpointManager
from pipeline.trainer.checkpoints.restore import restore
from pipeline.trainer.opponents import LATEST

SPEC = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(1, (2, 3)))
PLAIN = {"hidden_units": 8, "num_layers": 1, "normalize": True}
MEMORY = PLAIN | {"memory": {"sequence_length": 3, "memory_size": 4}}
NUMBERS = {
    "ppo": {"batch_size": 8, "buffer_size": 32, "num_epoch": 1},
    "poca": {"batch_size": 8, "buffer_size": 32, "num_epoch": 1},
    "sac": {
        "batch_size": 8,
        "buffer_size": 200,
        "buffer_init_steps": 20,
        "save_replay_buffer": True,
    },
}
N_AGENTS = 4
TEAMS = ("Toy?team=0", "Toy?team=1")


def messages(n, *, seed, grouped):
    """What two workers send in turn: agents of two groups whose episodes end now and then."""
    rng = np.random.default_rng(seed)
    groups = np.array([1, 1, 2, 2] if grouped else [0] * N_AGENTS, np.int32)

    def part(kind, ids, **extra):
        obs = [rng.normal(size=(len(ids), 3)).astype(np.float32)]
        reward, shared = rng.normal(size=(2, len(ids))).astype(np.float32)
        shared = np.where(groups[ids] > 0, np.float32(0.5), np.float32(0.0)) * (shared > 0)
        values = {"reward": reward, "group_id": groups[ids], "group_reward": shared}
        if kind is decision_steps:
            extra["masks"] = [rng.random((len(ids), size)) < 0.3 for size in (2, 3)]
            for mask in extra["masks"]:
                mask[:, 0] = False
        return kind(obs, ids, **values, **extra)

    def worker(begins):
        ended = np.flatnonzero(rng.random(N_AGENTS) < (0.0 if begins else 0.2)).astype(np.int32)
        deciding = rng.permutation(N_AGENTS).astype(np.int32)
        stopped = rng.random(len(ended)) < 0.5
        return part(decision_steps, deciding), part(terminal_steps, ended, interrupted=stopped)

    return [[worker(time == 0) for _ in range(2)] for time in range(n)]


def learner_of(make_learner, trainer, network=PLAIN, **changes):
    return make_learner(
        SPEC,
        trainer_type=trainer,
        network_settings=network,
        hyperparameters=NUMBERS[trainer],
        time_horizon=5,
        max_steps=100_000,
        **changes,
    )


def play(learner, heard, teams=("",)):
    """Everything that the learner does on messages, as plain values."""
    done = []
    for steps in heard:
        for team in teams:
            decided = take_turn(learner, steps, team=team)
            done += [(one.continuous.tolist(), one.discrete.tolist()) for one in decided.actions]
        while learner.learn():
            pass
        done.append((learner.step, learner.n_updates))
    return done


def taken_up(make_learner, one, trainer, network, *, with_open=True, **changes):
    state, experience = one.state_dict(), one.experience(with_open=with_open)
    two = learner_of(make_learner, trainer, network, **changes)
    two.load_state_dict(copy.deepcopy(state))
    two.load_experience(copy.deepcopy(experience), with_open=with_open)
    if one.algorithm.replay is not None:  # which is saved apart
        two.algorithm.replay.load_state_dict(copy.deepcopy(one.algorithm.replay.state_dict()))
    return two


def equal(one, two):
    torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def tensors(value):
    """Plain values of a state, arrays and tensors as lists."""
    if isinstance(value, dict):
        return {str(key): tensors(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [tensors(one) for one in value]
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value


@pytest.mark.parametrize("network", [PLAIN, MEMORY], ids=["plain", "memory"])
@pytest.mark.parametrize("trainer", NUMBERS)
def test_a_learner_that_takes_up_another_goes_on_as_that_one(make_learner, trainer, network):
    heard = messages(40, seed=3, grouped=True)
    one = learner_of(make_learner, trainer, network)
    play(one, heard[:23])
    assert one.n_updates > 0
    two = taken_up(make_learner, one, trainer, network)
    assert play(one, heard[23:]) == play(two, heard[23:])
    assert tensors(one.state_dict()) == tensors(two.state_dict())
    assert tensors(one.experience(with_open=True)) == tensors(two.experience(with_open=True))


@pytest.mark.parametrize("trainer", NUMBERS)
def test_one_of_several_processes_goes_on_from_its_own_part_and_the_networks_of_the_first(
    make_learner, quick, tmp_path, trainer
):
    heard = messages(40, seed=3, grouped=True)
    one, two = (learner_of(make_learner, trainer, MEMORY) for _ in range(2))
    play(one, heard[:23])
    first, other = CheckpointManager(tmp_path, quick()), NullCheckpointManager(tmp_path, quick())
    whole = first.snapshot([one], {}, with_open=True)["Toy"]
    part = other.snapshot([one], {}, with_open=True)["Toy"]
    shared = {*one.algorithm.own_networks, "optimizer"}
    assert not part["learner"]["algorithm"].keys() & shared
    # the state of the first process itself shall not count
    algorithm = whole["learner"]["algorithm"]
    whole["learner"]["algorithm"] = {name: algorithm[name] for name in shared & algorithm.keys()}
    whole["experience"] = {}
    path = tmp_path / "Toy" / "resume.pt"
    save_checkpoint(path, {**whole, "ranks": [part]})
    saved = of_each_rank({"Toy": load_checkpoint(path)}, 2)[1]["Toy"]
    restore(two, saved, path, exact=True)
    assert play(one, heard[23:]) == play(two, heard[23:])
    assert tensors(one.state_dict()) == tensors(two.state_dict())
    assert tensors(one.experience(with_open=True)) == tensors(two.experience(with_open=True))


@pytest.mark.parametrize("is_last", [False, True], ids=["new rows", "all rows"])
def test_a_replay_is_restored_from_its_files(make_learner, quick, tmp_path, is_last):
    heard = messages(40, seed=3, grouped=True)
    one, two = (learner_of(make_learner, "sac", PLAIN) for _ in range(2))
    keeper = CheckpointManager(tmp_path, quick())
    for part in (heard[:15], heard[15:23]):
        play(one, part)
        saved = keeper.snapshot([one], {}, with_open=True)["Toy"]
        keeper.is_last = is_last
    restore(two, saved, tmp_path / "Toy" / "checkpoint.pt", exact=True)
    assert len(two.algorithm.replay) == len(one.algorithm.replay) > 0
    assert play(one, heard[23:]) == play(two, heard[23:])


def test_a_further_process_reads_and_writes_no_files(make_learner, quick, tmp_path):
    one = learner_of(make_learner, "ppo")
    play(one, messages(23, seed=3, grouped=True))
    CheckpointManager(tmp_path, quick()).finish([one], {})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before
    other = NullCheckpointManager(tmp_path, quick())
    assert other.saved() == {}
    one.step += 1
    other.consider(one)
    other.refresh([one], {})
    other.milestone(one, {})
    other.finish([one], {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_states_of_another_number_of_processes_give_each_the_networks_alone():
    of_one = {"learner": 1, "experience": 2, "environments": 3, "replay": 4, "ranks": [{}]}
    assert of_each_rank({"Toy": of_one}, 3) == [{"Toy": {"learner": 1}}] * 3


@pytest.mark.parametrize("trainer", NUMBERS)
def test_without_its_agents_a_learner_keeps_what_has_ended_alone(make_learner, trainer):
    heard = messages(23, seed=3, grouped=True)
    one = learner_of(make_learner, trainer, MEMORY)
    play(one, heard)
    two = taken_up(make_learner, one, trainer, MEMORY, with_open=False)
    assert two.trajectories.n_closed == one.trajectories.n_closed
    assert two.slots.n_slots == 0
    assert not two.memories.any()
    assert one.experience(with_open=False)["memories"] is None
    begun = messages(8, seed=4, grouped=True)
    play(two, begun)
    two.drop_unfinished()
    assert not two.memories.any()
    play(two, begun)
    assert two.step > one.step


def test_self_play_is_taken_up_with_its_opponents_and_their_games(make_learner):
    games = {"window": 2, "save_steps": 10, "play_against_latest_model_ratio": 0.5}
    heard = messages(30, seed=5, grouped=True)
    one = learner_of(make_learner, "ppo", MEMORY, self_play=games)
    for number in range(3):
        play(one, heard[4 * number : 4 * number + 4], TEAMS[:1])
        one.past.save_due(one.step)
    one.past.swap([TEAMS[1]])
    one.past.ghost_steps, one.past.last_change = 17, 5
    one.past.games.plays((TEAMS[0], 1), heard[0][1][0])
    play(one, heard[12:15], TEAMS)
    two = taken_up(make_learner, one, "ppo", MEMORY, self_play=games)
    for learner in (one, two):
        learner.past.swap([TEAMS[1]])
    assert play(one, heard[15:], TEAMS) == play(two, heard[15:], TEAMS)
    assert tensors(one.state_dict()) == tensors(two.state_dict())
    assert tensors(one.experience(with_open=True)) == tensors(two.experience(with_open=True))


def test_a_reward_that_a_group_shares_is_warned_of_once(make_learner, caplog):
    heard = messages(8, seed=3, grouped=True)
    for trainer, n_warnings in (("poca", 0), ("ppo", 1)):
        play(learner_of(make_learner, trainer), heard)
        assert len([one for one in caplog.records if "Group Reward" in one.message]) == n_warnings


@pytest.mark.parametrize("is_reset", [False, True])
def test_games_of_a_worker_that_is_begun_anew_are_forgotten(make_learner, is_reset):
    learner = learner_of(make_learner, "ppo", self_play={"save_steps": 10})
    (steps,) = messages(1, seed=1, grouped=True)
    ended = terminal_steps([np.zeros((1, 3))], group_id=1)
    for worker in (0, 1):
        learner.past.games.plays((TEAMS[0], worker), steps[worker][0])
    learner.drop_unfinished(None if is_reset else 1)
    over = [learner.past.games.whole((TEAMS[0], worker), ended).item() for worker in (0, 1)]
    assert over == [is_reset, True]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_an_opponent_plays_weights_of_its_own(make_learner, ratio):
    games = {"save_steps": 10, "play_against_latest_model_ratio": ratio}
    learner = learner_of(make_learner, "ppo", MEMORY, self_play=games)
    learner.past.save_due(0)
    learner.past.swap([TEAMS[1]])
    (opponent,) = learner.past.opponents.values()
    assert opponent.drawn == (LATEST if ratio else 0)
    first = copy.deepcopy(opponent.policy.state_dict())
    assert not any(one.requires_grad for one in opponent.policy.parameters())
    assert all(one.requires_grad for one in learner.algorithm.policy.parameters())
    play(learner, messages(20, seed=2, grouped=False), TEAMS)
    assert learner.n_updates > 0
    equal(opponent.policy.state_dict(), first)
    changed = [
        not torch.equal(value, first[name])
        for name, value in learner.algorithm.policy.state_dict().items()
    ]
    assert any(changed)
