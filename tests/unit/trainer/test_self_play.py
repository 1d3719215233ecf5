"""Self-play in the loop: learning teams, step counts, team changes, ratings and snapshots."""

import itertools
import json
import logging
from functools import partial

import numpy as np
import pytest
import torch
from duels import PICK, Duel, Recall, Uneven
from in_turn import InTurn
from stops_after import StopsAfter
from toys import Chase

from pipeline.envs.workers import WorkerSet
from pipeline.settings import to_mapping
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.curriculum import Curriculum
from pipeline.trainer.loop import TrainingLoop
from pipeline.trainer.self_play import SelfPlay
from pipeline.trainer.stopping import StopRequest
from pipeline.trainer.updates import Overlap

SELF_PLAY = {"save_steps": 100, "team_change": 160, "swap_steps": 50, "window": 3}
MEMORY = {"hidden_units": 8, "num_layers": 1, "memory": {"sequence_length": 3, "memory_size": 8}}


@pytest.fixture
def turns(monkeypatch):
    """Record each team change, with the steps of all learners at that time."""
    changes, advance = [], SelfPlay.advance

    def watched(self_play):
        if changed := advance(self_play):
            steps = {learner.name: learner.step for learner in self_play._learners()}
            changes.append((self_play.learning, steps))
        return changed

    monkeypatch.setattr(SelfPlay, "advance", watched)
    return changes


@pytest.fixture
def play(quick, make_loop, in_process, recorder):
    """Train on toys; return the result and the learners."""

    def run(toys, *names, settings=None, **changes):
        settings = settings or quick(*(names or ("Duel",)), **{"self_play": SELF_PLAY} | changes)
        with WorkerSet([in_process(toy) for toy in toys]) as workers:
            loop = make_loop(workers, settings, sinks=[recorder])
            return loop.run(StopRequest()), loop.learners

    return run


@pytest.mark.parametrize("n_workers", [1, 2])
def test_only_steps_of_the_learning_team_are_counted_and_learned_from(n_workers, play, turns):
    toys = [Duel(seed=seed, n_areas=2) for seed in range(n_workers)]
    result, learners = play(toys)
    past, duel = learners["Duel"].snapshot_pool, result.behaviors["Duel"]
    assert duel.n_updates > 2
    assert duel.steps == 4 * duel.n_episodes  # and not 8, though two agents play every game
    assert len(turns) >= 2
    # Opponents decide as often as the learner, but games that a reset cuts short do not count.
    assert duel.steps <= past.ghost_steps <= duel.steps + 8 * n_workers * (len(turns) + 1)


def test_teams_of_one_behavior_take_turns_after_more_than_team_change_steps(play, turns):
    toy = Duel(n_areas=2)
    play([toy], max_steps=600)
    assert [team for team, _ in turns] == [1, 0, 1]
    steps = [0, *(steps["Duel"] for _, steps in turns)]
    # Two agents end at a time, so steps come eight at a time.
    assert all(160 < gap <= 160 + 8 for gap in np.diff(steps))
    assert toy.n_resets == 1 + len(turns)


def test_two_behaviors_learn_in_turn_and_each_counts_its_own_steps(play, turns):
    result, _ = play([Uneven(n_areas=2)], "Pick", "Aim")
    assert [team for team, _ in turns[:3]] == [1, 0, 1]
    for (team, before), (_, after) in itertools.pairwise(turns):
        learns, waits = ("Pick", "Aim") if team == 0 else ("Aim", "Pick")
        assert after[waits] == before[waits]
        assert after[learns] > before[learns]
    assert all(behavior.steps >= 500 for behavior in result.behaviors.values())


def test_unfinished_behavior_continues_to_learn_after_the_other_behavior_has_finished(
    quick, play, turns, tmp_path
):
    settings = quick(limits={"Pick": 200, "Aim": 900}, self_play=SELF_PLAY)
    result, _ = play([Uneven(n_areas=2)], settings=settings)
    assert 200 <= result.behaviors["Pick"].steps < 200 + 16
    assert 900 <= result.behaviors["Aim"].steps < 900 + 16
    assert [team for team, _ in turns] == [1, 0, 1]
    assert (tmp_path / "Pick" / "checkpoint.pt").is_file()


@pytest.mark.parametrize("n_workers", [1, 2])
def test_threaded_update_advances_once_per_step_of_the_loop(
    n_workers, quick, make_loop, monkeypatch
):
    """If each team or group of workers advanced the update, the update would end too early."""
    begun, advanced_after = [], []
    step, take = TrainingLoop._step, Overlap.take

    def counted(self):
        begun.append(self)
        step(self)

    def noted(self, **options):
        stats = take(self, **options)
        if self.is_under_way:
            advanced_after.append(len(begun))
        return stats

    monkeypatch.setattr(TrainingLoop, "_step", counted)
    monkeypatch.setattr(Overlap, "take", noted)
    settings = quick("Duel", self_play=SELF_PLAY, threaded=True)
    with WorkerSet([InTurn(Duel(seed=seed)) for seed in range(n_workers)]) as workers:
        assert len(workers.groups) == n_workers
        make_loop(workers, settings).run(StopRequest())
    assert len(advanced_after) > 10 / n_workers  # several workers share the steps of a run
    assert len(advanced_after) == len(set(advanced_after))


def test_opponents_have_their_own_memories(play):
    result, learners = play([Recall(n_areas=2)], network_settings=MEMORY)
    learner = learners["Duel"]
    assert result.behaviors["Duel"].n_updates > 2
    slots = [
        learner.slots.deciding((f"Duel?team={team}", 0), np.array([team, 2 + team], np.int32))
        for team in (0, 1)
    ]
    remembered = [learner.memories[team_slots] for team_slots in slots]
    assert all(np.abs(memory).max() > 0 for memory in remembered)
    ghost = next(iter(learner.snapshot_pool.opponents))
    n = learner.snapshot_pool.opponents[ghost].policy.memory_size
    assert learner.memories.shape[1] > n  # the critic's part stays empty for an opponent
    assert np.abs(learner.memories[slots[int(ghost[-1])], n:]).max() == 0


def test_rating_is_in_the_summaries_in_the_result_and_in_the_checkpoint_list(
    quick, tmp_path, recorder, train_in
):
    result = train_in(
        Duel(n_areas=2),
        quick("Duel", self_play=SELF_PLAY),
        sinks=[recorder],
        export=True,
    )
    rating = result.behaviors["Duel"].elo
    assert rating != 1200.0
    assert abs(rating - 1200.0) < 40
    assert result.behaviors["Duel"].numbers()["elo"] == rating
    ratings = recorder.values("Self-play/ELO")
    assert len(ratings) == 5
    assert len(set(ratings)) > 2
    status = json.loads((tmp_path / "run_logs" / "training_status.json").read_text())
    assert status["Duel"]["elo"] == rating


def test_lesson_that_measures_elo_ends_at_the_threshold_before_and_after_a_resume(
    quick, monkeypatch, train_in
):
    seen, advance = [], Curriculum.advance

    def noted(self):
        change = advance(self)
        seen.append((self._ratings["Duel"], change.parameters))
        return change

    monkeypatch.setattr(Curriculum, "advance", noted)

    def trained(max_steps, *thresholds):
        seen.clear()
        calls = []
        duel = Duel(n_areas=2)
        duel.set_parameter = lambda *parameter: calls.append(parameter)
        settings = to_mapping(quick("Duel", self_play=SELF_PLAY, max_steps=max_steps))
        settings["environment_parameters"] = {"pay": {"curriculum": lessons(*thresholds)}}
        train_in(duel, settings, resume=max_steps > 500)
        # Parameters are sent again at each team change.
        return list(dict.fromkeys(value for _, value in calls))

    assert trained(500, 1203.0, 1e9) == [0.0, 1.0]
    above = [rating > 1203.0 for rating, _ in seen]
    assert [bool(parameters) for _, parameters in seen].index(True) == above.index(True) > 4
    rating = seen[-1][0]
    assert rating > 1204.0
    assert trained(900, 1203.0, 1204.0) == [1.0, 2.0]
    assert seen == [(rating, ("pay",))]  # at the first step, because the rating is restored


def lessons(*thresholds):
    """Return lessons with the values 0, 1, ..., each of which ends above its rating threshold."""
    result = [{"name": str(n), "value": n} for n in range(len(thresholds) + 1)]
    for lesson, threshold in zip(result, thresholds, strict=False):
        criteria = {"measure": "elo", "behavior": "Duel", "threshold": threshold}
        lesson["completion_criteria"] = criteria
    return result


def test_first_opponent_of_a_new_run_has_the_initial_weights_of_the_run(quick, tmp_path, train_in):
    settings = quick("Duel", self_play=SELF_PLAY)
    old = train_in(Duel(n_areas=2), settings, run_dir=tmp_path / "old")
    short_run = quick("Duel", self_play=SELF_PLAY | {"save_steps": 9999, "window": 2}, max_steps=8)
    new = train_in(
        Duel(n_areas=2),
        short_run,
        seed=2,
        run_dir=tmp_path / "new",
        init_from={"Duel": old.behaviors["Duel"].checkpoint},
    )
    begun, expected = (
        load_checkpoint(result.behaviors["Duel"].checkpoint)["learner"] for result in (new, old)
    )
    (snapshot,) = begun["self_play"]["snapshots"]
    weights = expected["algorithm"]["policy"]
    assert all(torch.equal(snapshot[key], weights[key]) for key in weights)
    assert abs(begun["self_play"]["ratings"][-1] - 1200.0) < 2


def test_inference_uses_the_newest_policy_for_all_teams(quick, in_process, make_loop, train_in):
    settings = quick("Duel", self_play=SELF_PLAY)
    trained = train_in(Duel(n_areas=2), settings)
    learned = trained.behaviors["Duel"].steps
    toy = Duel(n_areas=2)
    with WorkerSet([in_process(toy)]) as workers:
        loop = make_loop(workers, settings, resume=True, inference=True)
        result = loop.run(StopsAfter(61))  # `StopsAfter` is called twice in each step
    assert loop.learners["Duel"].snapshot_pool is None
    assert toy.n_resets == 1
    # In thirty steps each of four agents ends seven episodes of four decisions.
    assert result.behaviors["Duel"].steps == learned + 4 * 4 * 7
    assert result.behaviors["Duel"].elo is None


DUEL, CHASE = partial(Duel, n_areas=2), partial(Chase, n_agents=4)


@pytest.mark.parametrize(
    ("toy", "self_play", "told"),
    [
        (DUEL, None, "Duel?team=1 plays for a team other than team 0, but behaviors.Duel has no "),
        (
            DUEL,
            SELF_PLAY | {"team_change": 501},
            "Duel: self_play.team_change 501 is above max_steps 500: the learning team",
        ),
        (CHASE, SELF_PLAY, "has shown only one team in 20 steps (Toy?team=0)"),
    ],
)
def test_settings_or_games_that_do_not_fit_self_play_cause_a_warning(
    toy, self_play, told, play, caplog
):
    name = "Duel" if toy is DUEL else "Toy"
    with caplog.at_level(logging.WARNING):
        result, _ = play([toy()], name, self_play=self_play)
    assert told in caplog.text
    if toy is CHASE:
        assert result.behaviors["Toy"].n_updates > 1
        assert result.behaviors["Toy"].elo == 1200.0


def test_learner_without_self_play_saves_no_self_play_state(make_learner):
    assert "self_play" not in make_learner(PICK).state_dict()
