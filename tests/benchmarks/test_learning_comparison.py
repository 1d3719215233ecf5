"""The comparison with the reference: its cases, measurements and conclusions."""

import json
from dataclasses import replace

import cases
import evaluate_policies
import learning
import published
import pytest
import runs
import yaml
from peer import Curve
from scores import Random, Scripted, action_specs

from pipeline.evaluation.statistics import summarize
from pipeline.settings import load_run_settings


@pytest.mark.parametrize("case", cases.CASES.values(), ids=lambda case: case.name)
def test_settings_of_each_comparison_case_name_the_behaviors_of_its_environment(case, tmp_path):
    environment = case.environment
    content = case.settings(demo=tmp_path / "expert.demo")
    names = {
        behavior_id.partition("?")[0]
        for behavior_id in action_specs(environment.name, **environment.options)
    }
    assert set(content["behaviors"]) == names
    file = tmp_path / "trainer.yaml"
    file.write_text(yaml.safe_dump(content))
    (behavior,) = load_run_settings(file).behaviors.values()
    assert behavior.max_steps >= 10 * behavior.summary_freq // 2


def test_comparison_case_uses_the_given_number_of_steps_and_the_given_demonstration_file(tmp_path):
    content = cases.CASES["gail_bc"].settings(1234, tmp_path / "one.demo")
    behavior = content["behaviors"]["Pyramids"]
    assert behavior["max_steps"] == 1234
    assert behavior["reward_signals"]["gail"]["demo_path"] == str(tmp_path / "one.demo")
    assert behavior["behavioral_cloning"]["demo_path"] == str(tmp_path / "one.demo")


def test_return_in_the_recall_environment_is_0_25_for_guessing_and_1_for_remembering():
    import gymnasium
    import recall_env

    env = gymnasium.make("recall_env:Recall-v0")
    guessed, remembered, lengths = 0.0, 0.0, set()
    for episode in range(400):
        obs, _ = env.reset(seed=episode)
        cue, length, ended = int(obs[:4].argmax()), 0, False
        while not ended:
            is_question = bool(obs[4])
            obs, reward, ended, truncated, _ = env.step(cue if episode % 2 else 0)
            length += 1
            assert not truncated
            assert ended == is_question
            assert not obs[:4].any()
        lengths.add(length - 1)
        remembered += reward * (episode % 2)
        guessed += reward * (1 - episode % 2)
    assert remembered == 200
    assert 30 < guessed < 70
    assert lengths == set(range(recall_env.DELAYS[0], recall_env.DELAYS[1] + 1))


def test_self_play_policy_is_evaluated_against_the_scripted_opponent_on_both_sides(
    monkeypatch, tmp_path
):
    case = replace(cases.CASES["self_play"], n_episodes=60)
    specs = action_specs("pong")
    behaviors = []

    def scripted(models, behavior):
        behaviors.append(behavior)
        return Scripted("pong", behavior)

    monkeypatch.setattr(evaluate_policies, "policy", scripted)
    assert abs(evaluate_policies.returns(case, tmp_path, seed=1, deterministic=True)) < 0.3
    assert set(behaviors) == set(specs)
    monkeypatch.setattr(evaluate_policies, "policy", lambda _, behavior: Random(specs[behavior]))
    assert evaluate_policies.returns(case, tmp_path, seed=1, deterministic=True) < -0.9


def test_match_is_played_from_both_sides_and_won_by_the_better_policy(monkeypatch, tmp_path):
    case = replace(cases.CASES["self_play"], n_episodes=60)
    specs = action_specs("pong")

    def player(models, behavior):
        return Scripted("pong", behavior) if models.name == "able" else Random(specs[behavior])

    monkeypatch.setattr(evaluate_policies, "policy", player)
    able, other = tmp_path / "able", tmp_path / "other"
    assert evaluate_policies.match(case, able, other, seed=1) > 0.9
    assert evaluate_policies.match(case, other, able, seed=1) < -0.9


def test_evaluation_of_a_case_uses_the_number_of_agents_of_the_case_and_the_given_seed(
    monkeypatch, tmp_path
):
    case = replace(cases.CASES["sac"], n_episodes=7, at_once=5)
    (behavior,) = specs = action_specs("balance_ball")
    player, seen = Random(specs[behavior]), []
    act = player.act
    player.act = lambda steps, **options: seen.append(steps) or act(steps, **options)
    monkeypatch.setattr(evaluate_policies, "policy", lambda *_: player)
    firsts = []
    for seed in (1, 2, 1):
        seen.clear()
        assert 1 < evaluate_policies.returns(case, tmp_path, seed=seed, deterministic=True) < 3
        assert {len(steps) for steps in seen} == {5}
        firsts.append(seen[0].obs[0][0, 2])
    assert firsts[0] == firsts[2] != firsts[1]


def outcome(value):
    curve = Curve(steps=[1, 2], seconds=[0.1, 0.2], rewards=[None, value], wall_s=1.0)
    return runs.Outcome(settings="x", curve=curve, sampled=value, deterministic=value)


@pytest.mark.parametrize(
    ("ours", "expected"), [(0.5, "**below**"), (1.0, "within"), (3.0, "above"), (-0.5, "**below**")]
)
def test_verdict_says_whether_our_mean_is_below_within_or_above_the_interval_of_the_reference(
    ours, expected
):
    peer = summarize([0.9, 1.0, 1.1])
    assert learning.verdict(summarize([ours - 0.1, ours, ours + 0.1]), peer) == expected
    assert learning.verdict(peer, summarize([1.0])) == "", "nothing follows from one seed"
    assert learning.verdict(None, peer) == learning.verdict(peer, None) == ""


def test_difference_of_mean_returns_has_the_confidence_interval_of_welchs_t_test():
    # Standard error sqrt(1 / 3 + 4 / 3), and t = 3.2187 at 97.5 % with 2.94 degrees of freedom.
    assert learning.difference([3.0, 4.0, 5.0], [0.0, 2.0, 4.0]) == "+2.000 [-2.155, +6.155]"
    assert learning.difference([1.0, 1.0], [1.0, 1.0]) == learning.difference([1.0], [2.0, 3]) == ""


def test_row_of_the_comparison_shows_both_programs_or_says_that_a_program_was_not_run():
    case = cases.CASES["sac"]
    cells = learning.row(case, 1000, {"peer": [outcome(1.0), outcome(2.0), outcome(3.0)]})
    assert "2.000 [-0.484, 4.484]" in cells
    assert "not run" in cells
    assert len(cells) == len(learning._HEADER)
    lines = learning.curves({"ours": [outcome(1.0), outcome(2.0)]})
    assert len(lines) == 2, "a summary without an ended episode is left out"
    assert lines[1].split()[:2] == ["2", "1.500"]


def test_run_of_the_comparison_is_trained_again_only_if_its_settings_changed(monkeypatch, tmp_path):
    trained = []

    def train(program, config, env, *, seed, folder, sources):
        trained.append((program, seed))
        return outcome(seed).curve

    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs, "returns", lambda *_, **__: 5.0)
    monkeypatch.setattr(type(cases.CASES["ppo"].environment), "build", lambda _, folder: folder)
    case_runs = runs.Runs(cases.CASES["ppo"], tmp_path, steps=None, sources=tmp_path)
    first = case_runs.outcome("peer", 1)
    assert case_runs.outcome("peer", 1) == first
    assert trained == [("peer", 1)]
    case_runs.outcome("ours", 1)
    assert len(trained) == 2
    file = tmp_path / "ppo/peer-1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "settings": "others"}))
    case_runs.outcome("peer", 1)
    assert len(trained) == 3


def test_task_counts_as_solved_if_the_mean_return_over_seeds_is_high_enough():
    task = published.TASKS["ppo_lunar"]
    assert published.row(task, 10, [outcome(190.0), outcome(230.0)])[-1] == "yes"
    assert published.row(task, 10, [outcome(190.0), outcome(200.0)])[-1] == "**no**"
