"""Self-play in the loop: who learns, who is counted, when teams change, what is rated and kept."""

from __future__ import annotations

import itertools
import json
import logging
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from duels import PICK, Duel, Recall, Uneven
from in_turn import InTurn
from steps import decision_steps, terminal_steps
from stops_after import StopsAfter

from pipeline.envs.workers import WorkerSet
from pipeline.settings import to_mapping
from pipeline.settings.schema.trainer import SelfPlaySettings
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.curriculum import Curriculum
from pipeline.trainer.loop import TrainingLoop
from pipeline.trainer.opponents import SnapshotPool, expected_score
from pipeline.trainer.self_play import SelfPlay, team_of
from pipeline.trainer.stopping import StopRequest
from pipeline.trainer.updates import Overlap

CPU = torch.device("cpu")
SELF_PLAY = {"save_steps": 100, "team_change": 160, "swap_steps": 50, "window": 3}
MEMORY = {"hidden_units": 8, "num_layers": 1, "memory": {"sequence_length": 3, "memory_size": 8}}


class Watched(SelfPlay):
    """Writes down every turn, with the steps of all learners at its beginning."""

    turns: ClassVar[list] = []

    def advance(self):
        changed = super().advance()
        if changed:
            steps = {player.name: player.step for player in self._learners()}
            type(self).turns.append((self.learning, steps))
        return changed


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.setattr("pipeline.trainer.loop.SelfPlay", Watched)
    Watched.turns = []
    return Watched.turns


@pytest.fixture
def play(quick, make_loop, in_process, recorder):
    """Train on toys; gives the result and the learners."""

    def run(toys, *names, settings=None, **changes):
        settings = settings or quick(*(names or ("Duel",)), **{"self_play": SELF_PLAY} | changes)
        with WorkerSet([in_process(toy) for toy in toys]) as workers:
            loop = make_loop(workers, settings, sinks=[recorder])
            return loop.run(StopRequest()), loop.learners

    return run


@pytest.mark.parametrize("n_workers", [1, 2])
def test_only_the_team_that_learns_is_learned_from_and_counted(n_workers, play, turns):
    toys = [Duel(seed=seed, n_areas=2) for seed in range(n_workers)]
    result, learners = play(toys)
    past, duel = learners["Duel"].past, result.behaviors["Duel"]
    assert duel.n_updates > 2
    assert duel.steps == 4 * duel.n_episodes  # and not 8: two agents play every game
    assert len(turns) >= 2
    # the opponent decides as often as the learner, but what a reset cuts short is not learned from
    assert duel.steps <= past.ghost_steps <= duel.steps + 8 * n_workers * (len(turns) + 1)


def test_teams_of_one_behavior_take_turns_after_more_than_team_change_steps(play, turns):
    toy = Duel(n_areas=2)
    play([toy], max_steps=600)
    assert [team for team, _ in turns] == [1, 0, 1]
    steps = [0, *(steps["Duel"] for _, steps in turns)]
    # two agents end at a time: eight steps at once
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


def test_a_behavior_that_has_finished_leaves_the_turn_to_the_other(quick, play, turns, tmp_path):
    settings = quick(limits={"Pick": 200, "Aim": 900}, self_play=SELF_PLAY)
    result, _ = play([Uneven(n_areas=2)], settings=settings)
    assert 200 <= result.behaviors["Pick"].steps < 200 + 16
    assert 900 <= result.behaviors["Aim"].steps < 900 + 16
    assert [team for team, _ in turns] == [1, 0, 1]
    assert (tmp_path / "Pick" / "checkpoint.pt").is_file()


@pytest.mark.parametrize("n_workers", [1, 2])
def test_an_update_beside_the_game_goes_on_once_a_step_of_all_teams_and_workers(
    n_workers, quick, make_loop, monkeypatch
):
    """Its steps are counted: with each team's or group's turn it would have half the time."""
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
    assert len(advanced_after) > 10 / n_workers  # several share the steps of a run
    assert len(advanced_after) == len(set(advanced_after))


def test_opponents_act_with_weights_of_the_past(play, monkeypatch):
    seen = []
    act = SnapshotPool.swap

    def noted(self, teams):
        act(self, teams)
        for opponent in self.opponents.values():
            expected = [*self.snapshots, self._policy().state_dict()][opponent.drawn]
            weights = opponent.policy.state_dict()
            seen.append(
                (opponent.drawn, all(torch.equal(expected[k], weights[k]) for k in weights))
            )

    monkeypatch.setattr(SnapshotPool, "swap", noted)
    play([Duel(n_areas=2)], max_steps=1500)
    assert len(seen) > 10
    assert all(equal for _, equal in seen)
    assert {drawn for drawn, _ in seen} == {-1, 0, 1, 2}


def test_opponents_remember_for_themselves(play):
    result, learners = play([Recall(n_areas=2)], network_settings=MEMORY)
    learner = learners["Duel"]
    assert result.behaviors["Duel"].n_updates > 2
    slots = [
        learner.slots.deciding((f"Duel?team={team}", 0), np.array([team, 2 + team], np.int32))
        for team in (0, 1)
    ]
    remembered = [learner.memories[team_slots] for team_slots in slots]
    assert all(np.abs(memory).max() > 0 for memory in remembered)
    ghost = next(iter(learner.past.opponents))
    n = learner.past.opponents[ghost].policy.memory_size
    assert learner.memories.shape[1] > n  # the critic's part stays empty for an opponent
    assert np.abs(learner.memories[slots[int(ghost[-1])], n:]).max() == 0


def test_rating_stands_in_summaries_result_and_list_of_checkpoints(
    quick, tmp_path, recorder, train_in
):
    result = train_in(
        Duel(n_areas=2),
        quick("Duel", self_play=SELF_PLAY),
        sinks=[recorder],
        exporter=lambda path, _, label: path.with_suffix(".onnx").write_bytes(label.encode()),
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


def test_a_lesson_ends_at_its_rating_and_a_resumed_run_goes_on_in_its_lessons(
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
        # told again at each turn of another team
        return list(dict.fromkeys(value for _, value in calls))

    assert trained(500, 1203.0, 1e9) == [0.0, 1.0]
    above = [rating > 1203.0 for rating, _ in seen]
    assert [bool(parameters) for _, parameters in seen].index(True) == above.index(True) > 4
    rating = seen[-1][0]
    assert rating > 1204.0
    assert trained(900, 1203.0, 1204.0) == [1.0, 2.0]
    assert seen == [(rating, ("pay",))]  # at its first step, since its rating goes on


def lessons(*thresholds):
    """Values 0, 1, ... until the rating exceeds each threshold in turn."""
    criteria = [
        {"measure": "elo", "behavior": "Duel", "threshold": threshold} for threshold in thresholds
    ]
    return [
        {
            "name": str(number),
            "value": number,
            **({"completion_criteria": criterion} if criterion else {}),
        }
        for number, criterion in enumerate([*criteria, None])
    ]


def test_new_run_with_old_weights_meets_them_first_and_is_rated_anew(quick, tmp_path, train_in):
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


def test_without_learning_all_teams_play_the_newest_policy(quick, in_process, make_loop, train_in):
    settings = quick("Duel", self_play=SELF_PLAY)
    trained = train_in(Duel(n_areas=2), settings)
    learned = trained.behaviors["Duel"].steps
    toy = Duel(n_areas=2)
    with WorkerSet([in_process(toy)]) as workers:
        loop = make_loop(workers, settings, resume=True, inference=True)
        result = loop.run(StopsAfter(61))  # it is asked twice a step
    assert loop.learners["Duel"].past is None
    assert toy.n_resets == 1
    # thirty steps, in which four agents end seven episodes of four decisions
    assert result.behaviors["Duel"].steps == learned + 4 * 4 * 7
    assert result.behaviors["Duel"].elo is None


def test_teams_without_self_play_are_warned_of(play, quick, caplog):
    with caplog.at_level(logging.WARNING):
        play([Duel(n_areas=2)], settings=quick("Duel"))
    assert "Duel?team=1 plays for another team, but behaviors.Duel has no self_play" in caplog.text


def test_turns_that_never_come_are_warned_of(play, caplog):
    with caplog.at_level(logging.WARNING):
        play([Duel(n_areas=2)], self_play=SELF_PLAY | {"team_change": 501})
    assert "Duel: self_play.team_change 501 is above max_steps 500: the learning " in caplog.text


def test_a_game_without_opponents_is_warned_of(play, caplog):
    from toys import Chase

    with caplog.at_level(logging.WARNING):
        result, _ = play([Chase(n_agents=4)], "Toy")
    assert "has shown one team only" in caplog.text
    assert "Toy?team=0" in caplog.text
    assert result.behaviors["Toy"].n_updates > 1
    assert result.behaviors["Toy"].elo == 1200.0


@pytest.mark.parametrize(
    ("qualified", "team"),
    [
        ("A?team=0", 0),
        ("A?team=12", 12),
        ("A", 0),
        ("A?x=1&team=3", 3),
        ("A?team=-1", -1),
        ("A?team=b", 0),
    ],
)
def test_team_is_read_from_the_qualified_name(qualified, team):
    assert team_of(qualified) == team


def learner(name, **settings):
    settings = SelfPlaySettings(**settings)
    policy = torch.nn.Linear(1, 1)
    return SimpleNamespace(
        name=name,
        past=SnapshotPool(lambda: policy, settings, seed=1, device=CPU),
        step=0,
        learns=True,
        finished=False,
        settings=SimpleNamespace(self_play=settings, max_steps=10**6),
    )


def joined(*, teams=(0, 1), **settings):
    """Self-play of these teams of the behavior `A`, and its learner."""
    self_play, player = SelfPlay(), learner("A", **settings)
    for team in teams:
        self_play.join(f"A?team={team}", player)
    return self_play, player


def end_games(self_play, qualified, player, *rewards, interrupted=False):
    """Tell of games that have ended, each with its reward."""
    ended = terminal_steps([], range(len(rewards)), reward=rewards, interrupted=interrupted)
    self_play.on_step(qualified, player, [(decision_steps([], []), ended)])


def test_every_agent_of_the_learning_team_that_ends_moves_both_ratings():
    self_play, player = joined(play_against_latest_model_ratio=0.0, window=2)
    assert self_play.learning == 0
    past = player.past
    assert past.opponents["A?team=1"].drawn == 0
    past.ratings[:] = [1300.0, 1100.0, 1200.0]
    end_games(self_play, "A?team=0", player, 2.0, -1.0, 0.0)
    rating, other = 1200.0, 1300.0
    for result in (1.0, 0.0, 0.5):
        change = result - expected_score(rating, other)
        rating, other = rating + change, other - change
    assert past.ratings == pytest.approx([other, 1100.0, rating])


def test_games_that_are_cut_short_or_of_the_opponent_are_not_rated():
    self_play, player = joined(play_against_latest_model_ratio=0.0)
    before = list(player.past.ratings)
    end_games(self_play, "A?team=0", player, 1.0, interrupted=True)
    end_games(self_play, "A?team=1", player, 1.0)
    assert player.past.ratings == before
    end_games(self_play, "A?team=0", player, 1.0)
    assert player.past.ratings != before


def test_a_group_that_plays_again_in_the_message_of_its_end_is_rated():
    """Unity's next agents have other ids, and often the same group."""
    self_play, player = joined(play_against_latest_model_ratio=0.0)
    asking = decision_steps([], [1, 2], group_id=[7, 7])
    self_play.on_step("A?team=0", player, [(asking, terminal_steps([], []))])
    ended = terminal_steps([], [1, 2], group_id=[7, 7], group_reward=1.0)
    again = decision_steps([], [3, 4], group_id=[7, 7])
    self_play.on_step("A?team=0", player, [(again, ended)])
    assert player.past.rating > 1200.0


def test_a_game_against_the_latest_policy_of_the_same_behavior_leaves_its_rating():
    self_play, player = joined(play_against_latest_model_ratio=1.0)
    end_games(self_play, "A?team=0", player, 1.0)
    assert player.past.ratings == pytest.approx([1200.0] * 11)


def test_ratings_of_two_behaviors_move_against_each_other():
    self_play = SelfPlay()
    player = learner("A", play_against_latest_model_ratio=1.0)
    other_player = learner("B", play_against_latest_model_ratio=0.0, initial_elo=1000.0)
    self_play.join("A?team=0", player)
    self_play.join("B?team=1", other_player)
    end_games(self_play, "A?team=0", player, -1.0)
    change = 0.0 - expected_score(1200.0, 1000.0)
    assert player.past.rating == pytest.approx(1200.0 + change)
    assert other_player.past.ratings[0] == pytest.approx(1000.0 - change)
    assert other_player.past.rating == 1000.0


def test_three_teams_take_turns_and_share_what_the_learner_gains():
    self_play, player = joined(teams=(2, 0, 1), play_against_latest_model_ratio=0.0, team_change=10)
    assert self_play.learning == 2
    assert set(player.past.opponents) == {"A?team=0", "A?team=1"}
    end_games(self_play, "A?team=2", player, 1.0)
    assert player.past.rating == pytest.approx(1200.5)
    assert player.past.ratings[0] == pytest.approx(1199.5)
    learning = []
    for step in (10, 11, 21, 22, 33):
        player.step = step
        changed = self_play.advance()
        learning.append((changed, self_play.learning))
        assert f"A?team={self_play.learning}" not in player.past.opponents
        assert len(player.past.opponents) == 2
    assert learning == [(False, 2), (True, 0), (False, 0), (True, 1), (True, 2)]


@pytest.mark.parametrize("learning", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_teams_that_join_a_resumed_run_leave_its_opponents_as_they_were(learning, order):
    changing = {"team_change": 10, "window": 4, "save_steps": 5}
    self_play, player = joined(teams=(0, 1, 2), **changing)
    while self_play.learning != learning or player.step < 40:
        player.step += 7
        self_play.advance()
    for opponent in player.past.opponents.values():
        opponent.policy.weight.data.fill_(0.25)  # of a snapshot that has left the ring
    saved = player.past.state_dict()

    resumed, resumed_player = SelfPlay(), learner("A", **changing)
    resumed_player.step = player.step
    resumed_player.past.load_state_dict(saved)
    resumed.restore({"self_play": self_play.state_dict()})
    for team in order:
        resumed.join(f"A?team={team}", resumed_player)
    resumed.advance()
    self_play.advance()
    assert resumed.state_dict() == self_play.state_dict()
    assert plain(resumed_player.past.state_dict()) == plain(player.past.state_dict())


def test_an_opponent_whose_team_learns_by_now_is_drawn_anew():
    """Of two resume files the older one may say that the other team learned."""
    _, player = joined()
    resumed_player = learner("A")
    resumed_player.past.load_state_dict(player.past.state_dict())
    resumed = SelfPlay()
    resumed.restore({"self_play": {"learning": 1, "order": [0, 1]}})
    resumed.join("A?team=0", resumed_player)
    resumed.join("A?team=1", resumed_player)
    assert list(resumed_player.past.opponents) == ["A?team=0"]


def plain(value):
    """A state with lists in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_all_behaviors_of_a_team_learn_together():
    self_play = SelfPlay()
    striker, keeper = learner("S", team_change=10), learner("K", team_change=10)
    for team in (0, 1):
        self_play.join(f"S?team={team}", striker)
        self_play.join(f"K?team={team}", keeper)
    assert list(striker.past.opponents) == ["S?team=1"]
    assert list(keeper.past.opponents) == ["K?team=1"]
    striker.step = keeper.step = 11
    assert self_play.advance()
    assert list(striker.past.opponents) == ["S?team=0"]
    assert list(keeper.past.opponents) == ["K?team=0"]
    assert not self_play.advance()


def test_a_team_keeps_its_turn_until_all_its_behaviors_have_finished():
    self_play = SelfPlay()
    striker, keeper = learner("S"), learner("K")
    for player in (striker, keeper):
        self_play.join(f"{player.name}?team=0", player)
    self_play.join("K?team=1", keeper)
    striker.finished = True
    assert not self_play.advance()
    assert self_play.learning == 0
    keeper.finished = True  # and so has the other team
    assert not self_play.advance()
    assert self_play.learning == 0


def test_opponents_are_drawn_when_teams_change_and_when_ghosts_have_made_swap_steps():
    self_play, player = joined(team_change=100, swap_steps=14)
    asking = decision_steps([], range(7)), terminal_steps([], [])
    swaps = []
    for _ in range(6):
        self_play.on_step("A?team=1", player, [asking])
        self_play.advance()
        swaps.append(player.past.last_swap)
    assert player.past.ghost_steps == 42
    assert swaps == [0, 0, 21, 21, 21, 42]
    player.step = 101
    self_play.on_step("A?team=1", player, [asking])
    assert self_play.advance()
    assert player.past.last_swap == 49


def test_learner_without_self_play_saves_what_it_saved_before(make_learner):
    assert "self_play" not in make_learner(PICK).state_dict()
