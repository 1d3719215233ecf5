"""A learner with the restored state of another learner continues exactly as that learner."""

import copy

import pytest
import torch
from histories import MEMORY, NUMBERS, PLAIN, learner_of, messages, plain, play

from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint, states_by_rank
from pipeline.trainer.checkpoints.manager import CheckpointManager, NullCheckpointManager
from pipeline.trainer.checkpoints.restore import restore
from pipeline.trainer.opponents import LATEST

TEAMS = ("Toy?team=0", "Toy?team=1")
HISTORY = messages(40, seed=3, grouped=True)


def taken_up(make_learner, original, trainer, network, *, with_open=True, **changes):
    state, experience = original.state_dict(), original.experience(with_open=with_open)
    restored = learner_of(make_learner, trainer, network, **changes)
    restored.load_state_dict(copy.deepcopy(state))
    restored.load_experience(copy.deepcopy(experience), with_open=with_open)
    if original.algorithm.replay is not None:  # the replay is saved in files of its own
        restored.algorithm.replay.load_state_dict(
            copy.deepcopy(original.algorithm.replay.state_dict())
        )
    return restored


def assert_goes_on_as(original, restored, history, teams=("",)):
    """Assert that both learners act alike on these messages and then have equal states."""
    assert play(original, history, teams) == play(restored, history, teams)
    states = [[x.state_dict(), x.experience(with_open=True)] for x in (original, restored)]
    assert plain(states[0]) == plain(states[1])


networks = pytest.mark.parametrize("network", [PLAIN, MEMORY], ids=["plain", "memory"])


@networks
@pytest.mark.parametrize("trainer", NUMBERS)
def test_learner_restored_from_another_learner_continues_identically(
    make_learner, trainer, network
):
    original = learner_of(make_learner, trainer, network)
    play(original, HISTORY[:23])
    assert original.n_updates > 0
    restored = taken_up(make_learner, original, trainer, network)
    assert_goes_on_as(original, restored, HISTORY[23:])


@pytest.mark.parametrize("trainer", NUMBERS)
def test_gpu_run_continues_on_a_cpu_with_random_numbers_that_depend_on_the_saved_state(
    make_learner, trainer
):
    """States of CUDA generators have 16 bytes, and a CPU generator cannot load them."""
    original = learner_of(make_learner, trainer)
    play(original, HISTORY[:23])

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
def test_process_of_rank_1_resumes_from_its_own_saved_state_and_the_networks_of_rank_0(
    make_learner, quick, tmp_path, trainer
):
    original, restored = (learner_of(make_learner, trainer, MEMORY) for _ in range(2))
    play(original, HISTORY[:23])
    first, other = CheckpointManager(tmp_path, quick()), NullCheckpointManager(tmp_path, quick())
    full_state = first.snapshot([original], {}, with_open=True)["Toy"]
    part = other.snapshot([original], {}, with_open=True)["Toy"]
    shared = {*original.algorithm.own_networks, "optimizer"}
    assert not part["learner"]["algorithm"].keys() & shared
    # Only the networks of the first process are kept; the rest must come from the part of rank 1.
    algorithm = full_state["learner"]["algorithm"]
    kept = {name: algorithm[name] for name in shared & algorithm.keys()}
    full_state["learner"]["algorithm"], full_state["experience"] = kept, {}
    path = tmp_path / "Toy" / "resume.pt"
    save_checkpoint(path, {**full_state, "ranks": [part]})
    saved = states_by_rank({"Toy": load_checkpoint(path)}, 2)[1]["Toy"]
    restore(restored, saved, path, exact=True)
    assert_goes_on_as(original, restored, HISTORY[23:])


@pytest.mark.parametrize("is_last", [False, True], ids=["new rows", "all rows"])
def test_a_replay_is_restored_from_its_files(make_learner, quick, tmp_path, is_last):
    original, restored = (learner_of(make_learner, "sac") for _ in range(2))
    keeper = CheckpointManager(tmp_path, quick())
    for part in (HISTORY[:15], HISTORY[15:23]):
        play(original, part)
        saved = keeper.snapshot([original], {}, with_open=True)["Toy"]
        keeper.is_last = is_last
    restore(restored, saved, tmp_path / "Toy" / "checkpoint.pt", exact=True)
    assert len(restored.algorithm.replay) == len(original.algorithm.replay) > 0
    assert_goes_on_as(original, restored, HISTORY[23:])


def test_process_of_rank_1_reads_and_writes_no_files(make_learner, quick, tmp_path):
    learner = learner_of(make_learner, "ppo")
    play(learner, HISTORY[:23])
    CheckpointManager(tmp_path, quick()).finish([learner], {})

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before, other = files(), NullCheckpointManager(tmp_path, quick())
    assert before
    assert other.saved() == {}
    learner.step += 1
    other.consider(learner)
    other.refresh([learner], {})
    other.milestone(learner, {})
    other.finish([learner], {})
    assert files() == before


def test_resumed_process_gets_its_own_state_only_if_the_number_of_processes_is_the_same():
    def part(number, **shared):
        return {"learner": {"algorithm": {"stream": number, **shared}}, "experience": number}

    state = {**part(0, policy="shared"), "ranks": [part(1), part(2)]}
    saved = [rank["A"] for rank in states_by_rank({"A": state}, 3)]
    assert [rank["experience"] for rank in saved] == [0, 1, 2]
    assert [rank["learner"]["algorithm"] for rank in saved] == [
        {"stream": number, "policy": "shared"} for number in range(3)
    ]
    of_two = {"learner": 1, "experience": 2, "environments": 3, "replay": 4, "ranks": [{}]}
    assert states_by_rank({"Toy": of_two}, 3) == [{"Toy": {"learner": 1}}] * 3


@pytest.mark.parametrize("trainer", NUMBERS)
def test_learner_restored_without_open_trajectories_keeps_only_complete_trajectories(
    make_learner, trainer
):
    original = learner_of(make_learner, trainer, MEMORY)
    play(original, HISTORY[:23])
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


def test_restored_self_play_continues_with_its_opponents_and_games(make_learner):
    games = {"window": 2, "save_steps": 10, "play_against_latest_model_ratio": 0.5}
    history = messages(30, seed=5, grouped=True)
    original = learner_of(make_learner, "ppo", MEMORY, self_play=games)
    for number in range(3):
        play(original, history[4 * number : 4 * number + 4], TEAMS[:1])
        original.snapshot_pool.save_if_due(original.step)
    original.snapshot_pool.swap([TEAMS[1]])
    original.snapshot_pool.ghost_steps, original.snapshot_pool.last_change = 17, 5
    original.snapshot_pool.games.record((TEAMS[0], 1), history[0][1][0])
    play(original, history[12:15], TEAMS)
    restored = taken_up(make_learner, original, "ppo", MEMORY, self_play=games)
    for learner in (original, restored):
        learner.snapshot_pool.swap([TEAMS[1]])
    assert_goes_on_as(original, restored, history[15:], TEAMS)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_training_does_not_change_the_weights_of_an_opponent(make_learner, ratio):
    games = {"save_steps": 10, "play_against_latest_model_ratio": ratio}
    learner = learner_of(make_learner, "ppo", MEMORY, self_play=games)
    learner.snapshot_pool.save_if_due(0)
    learner.snapshot_pool.swap([TEAMS[1]])
    (opponent,) = learner.snapshot_pool.opponents.values()
    assert opponent.rating_index == (LATEST if ratio else 0)
    first = copy.deepcopy(opponent.policy.state_dict())
    assert not any(parameter.requires_grad for parameter in opponent.policy.parameters())
    assert all(parameter.requires_grad for parameter in learner.algorithm.policy.parameters())
    play(learner, messages(20, seed=2, grouped=False), TEAMS)
    assert learner.n_updates > 0
    torch.testing.assert_close(opponent.policy.state_dict(), first, rtol=0, atol=0)
    changed = [
        not torch.equal(value, first[name])
        for name, value in learner.algorithm.policy.state_dict().items()
    ]
    assert any(changed)
