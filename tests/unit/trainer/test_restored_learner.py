"""A learner that is restored from another one's state goes on as the other does."""

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


def play(learner, history, teams=("",)):
    """Everything that the learner does on messages, as plain values."""
    done = []
    for steps in history:
        for team in teams:
            decided = take_turn(learner, steps, team=team)
            done += [
                (action.continuous.tolist(), action.discrete.tolist()) for action in decided.actions
            ]
        while learner.learn():
            pass
        done.append((learner.step, learner.n_updates))
    return done


def taken_up(make_learner, original, trainer, network, *, with_open=True, **changes):
    state, experience = original.state_dict(), original.experience(with_open=with_open)
    restored = learner_of(make_learner, trainer, network, **changes)
    restored.load_state_dict(copy.deepcopy(state))
    restored.load_experience(copy.deepcopy(experience), with_open=with_open)
    if original.algorithm.replay is not None:  # which is saved apart
        restored.algorithm.replay.load_state_dict(
            copy.deepcopy(original.algorithm.replay.state_dict())
        )
    return restored


def equal(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def tensors(value):
    """Plain values of a state, arrays and tensors as lists."""
    if isinstance(value, dict):
        return {str(key): tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tensors(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value


@pytest.mark.parametrize("network", [PLAIN, MEMORY], ids=["plain", "memory"])
@pytest.mark.parametrize("trainer", NUMBERS)
def test_a_learner_that_takes_up_another_goes_on_as_that_one(make_learner, trainer, network):
    history = messages(40, seed=3, grouped=True)
    original = learner_of(make_learner, trainer, network)
    play(original, history[:23])
    assert original.n_updates > 0
    restored = taken_up(make_learner, original, trainer, network)
    assert play(original, history[23:]) == play(restored, history[23:])
    assert tensors(original.state_dict()) == tensors(restored.state_dict())
    assert tensors(original.experience(with_open=True)) == tensors(
        restored.experience(with_open=True)
    )


@pytest.mark.parametrize("trainer", NUMBERS)
def test_a_run_of_a_gpu_goes_on_here_with_random_numbers_that_its_state_decides(
    make_learner, trainer
):
    """Its generators' states are 16 bytes long, which no CPU's generator takes."""
    original = learner_of(make_learner, trainer)
    play(original, messages(23, seed=3, grouped=True))

    def elsewhere(first_byte):
        state = copy.deepcopy(original.state_dict())
        streams = [name for name in ("action_stream", "noise_stream") if name in state["algorithm"]]
        for name in streams:
            state["algorithm"][name] = torch.arange(first_byte, first_byte + 16, dtype=torch.uint8)
        restored = learner_of(make_learner, trainer)
        restored.load_state_dict(state)
        return [getattr(restored.algorithm, name).get_state().tolist() for name in streams]

    assert elsewhere(0) == elsewhere(0)
    assert all(first != other for first, other in zip(elsewhere(0), elsewhere(1), strict=True))
    with pytest.raises(RuntimeError):
        original.algorithm.load_state_dict(
            original.algorithm.state_dict() | {"action_stream": torch.zeros(17, dtype=torch.uint8)}
        )


@pytest.mark.parametrize("trainer", NUMBERS)
def test_one_of_several_processes_goes_on_from_its_own_part_and_the_networks_of_the_first(
    make_learner, quick, tmp_path, trainer
):
    history = messages(40, seed=3, grouped=True)
    original, restored = (learner_of(make_learner, trainer, MEMORY) for _ in range(2))
    play(original, history[:23])
    first, other = CheckpointManager(tmp_path, quick()), NullCheckpointManager(tmp_path, quick())
    full_state = first.snapshot([original], {}, with_open=True)["Toy"]
    part = other.snapshot([original], {}, with_open=True)["Toy"]
    shared = {*original.algorithm.own_networks, "optimizer"}
    assert not part["learner"]["algorithm"].keys() & shared
    # the state of the first process itself shall not count
    algorithm = full_state["learner"]["algorithm"]
    full_state["learner"]["algorithm"] = {
        name: algorithm[name] for name in shared & algorithm.keys()
    }
    full_state["experience"] = {}
    path = tmp_path / "Toy" / "resume.pt"
    save_checkpoint(path, {**full_state, "ranks": [part]})
    saved = of_each_rank({"Toy": load_checkpoint(path)}, 2)[1]["Toy"]
    restore(restored, saved, path, exact=True)
    assert play(original, history[23:]) == play(restored, history[23:])
    assert tensors(original.state_dict()) == tensors(restored.state_dict())
    assert tensors(original.experience(with_open=True)) == tensors(
        restored.experience(with_open=True)
    )


@pytest.mark.parametrize("is_last", [False, True], ids=["new rows", "all rows"])
def test_a_replay_is_restored_from_its_files(make_learner, quick, tmp_path, is_last):
    history = messages(40, seed=3, grouped=True)
    original, restored = (learner_of(make_learner, "sac", PLAIN) for _ in range(2))
    keeper = CheckpointManager(tmp_path, quick())
    for part in (history[:15], history[15:23]):
        play(original, part)
        saved = keeper.snapshot([original], {}, with_open=True)["Toy"]
        keeper.is_last = is_last
    restore(restored, saved, tmp_path / "Toy" / "checkpoint.pt", exact=True)
    assert len(restored.algorithm.replay) == len(original.algorithm.replay) > 0
    assert play(original, history[23:]) == play(restored, history[23:])


def test_a_further_process_reads_and_writes_no_files(make_learner, quick, tmp_path):
    learner = learner_of(make_learner, "ppo")
    play(learner, messages(23, seed=3, grouped=True))
    CheckpointManager(tmp_path, quick()).finish([learner], {})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before
    other = NullCheckpointManager(tmp_path, quick())
    assert other.saved() == {}
    learner.step += 1
    other.consider(learner)
    other.refresh([learner], {})
    other.milestone(learner, {})
    other.finish([learner], {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_states_of_another_number_of_processes_give_each_the_networks_alone():
    of_one = {"learner": 1, "experience": 2, "environments": 3, "replay": 4, "ranks": [{}]}
    assert of_each_rank({"Toy": of_one}, 3) == [{"Toy": {"learner": 1}}] * 3


@pytest.mark.parametrize("trainer", NUMBERS)
def test_without_its_agents_a_learner_keeps_what_has_ended_alone(make_learner, trainer):
    history = messages(23, seed=3, grouped=True)
    original = learner_of(make_learner, trainer, MEMORY)
    play(original, history)
    restored = taken_up(make_learner, original, trainer, MEMORY, with_open=False)
    assert restored.trajectories.n_closed == original.trajectories.n_closed
    assert restored.slots.n_slots == 0
    assert not restored.memories.any()
    assert original.experience(with_open=False)["memories"] is None
    begun = messages(8, seed=4, grouped=True)
    play(restored, begun)
    restored.drop_unfinished()
    assert not restored.memories.any()
    play(restored, begun)
    assert restored.step > original.step


def test_self_play_is_taken_up_with_its_opponents_and_their_games(make_learner):
    games = {"window": 2, "save_steps": 10, "play_against_latest_model_ratio": 0.5}
    history = messages(30, seed=5, grouped=True)
    original = learner_of(make_learner, "ppo", MEMORY, self_play=games)
    for number in range(3):
        play(original, history[4 * number : 4 * number + 4], TEAMS[:1])
        original.past.save_due(original.step)
    original.past.swap([TEAMS[1]])
    original.past.ghost_steps, original.past.last_change = 17, 5
    original.past.games.plays((TEAMS[0], 1), history[0][1][0])
    play(original, history[12:15], TEAMS)
    restored = taken_up(make_learner, original, "ppo", MEMORY, self_play=games)
    for learner in (original, restored):
        learner.past.swap([TEAMS[1]])
    assert play(original, history[15:], TEAMS) == play(restored, history[15:], TEAMS)
    assert tensors(original.state_dict()) == tensors(restored.state_dict())
    assert tensors(original.experience(with_open=True)) == tensors(
        restored.experience(with_open=True)
    )


def test_a_reward_that_a_group_shares_is_warned_of_once(make_learner, caplog):
    history = messages(8, seed=3, grouped=True)
    for trainer, n_warnings in (("poca", 0), ("ppo", 1)):
        play(learner_of(make_learner, trainer), history)
        assert (
            len([record for record in caplog.records if "Group Reward" in record.message])
            == n_warnings
        )


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
    assert not any(parameter.requires_grad for parameter in opponent.policy.parameters())
    assert all(parameter.requires_grad for parameter in learner.algorithm.policy.parameters())
    play(learner, messages(20, seed=2, grouped=False), TEAMS)
    assert learner.n_updates > 0
    equal(opponent.policy.state_dict(), first)
    changed = [
        not torch.equal(value, first[name])
        for name, value in learner.algorithm.policy.state_dict().items()
    ]
    assert any(changed)
