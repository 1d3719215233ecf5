"""Self-play: ratings rise, and the last policy beats an early policy of the same training."""

import pytest
from duels import Duel, Recall, Uneven

import pipeline
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.evaluation.episodes import evaluate
from pipeline.export.policy import OnnxPolicy

EARLY = 1000
"""Agent steps of the early policies, which have learned nearly nothing."""


def settings(max_steps, *, hyperparameters=None, network=None):
    usual = {"batch_size": 64, "buffer_size": 512, "learning_rate": 3e-3}
    return {
        "trainer_type": "ppo",
        "hyperparameters": usual | (hyperparameters or {}),
        "network_settings": {"hidden_units": 32, "num_layers": 1, **(network or {})},
        "reward_signals": {"extrinsic": {"gamma": 0.95}},
        "max_steps": max_steps,
        "time_horizon": 32,
        "self_play": {"save_steps": 1000, "team_change": 2000, "swap_steps": 500, "window": 5},
    }


def trained(toy, behaviors, seed, folder, steps=None):
    """Train for `steps`, or to the end; return the results and the exported policies."""
    if steps is not None:
        behaviors = {name: behavior | {"max_steps": steps} for name, behavior in behaviors.items()}
    result = pipeline.train(
        InProcessEnvironment(toy(seed=seed)), {"behaviors": behaviors}, seed=seed, run_dir=folder
    )
    for outcome in result.behaviors.values():
        publish(outcome.checkpoint, folder)
    return result.behaviors, {name: OnnxPolicy(folder / f"{name}.onnx") for name in behaviors}


def mean_returns(toy, players, seed):
    """Return the mean return of each team in 400 games, by qualified name."""
    with InProcessEnvironment(toy(seed=seed + 100)) as environment:
        episodes = evaluate(environment, players, episodes=400, seed=seed, deterministic=False)
    means = {}
    for name in players:
        returns = [episode.episode_return for episode in episodes if episode.behavior == name]
        means[name] = sum(returns) / len(returns)
    return means


CASES = {
    "without memory": (Duel, 8000, {}),
    "with memory": (Recall, 12_000, {"memory": {"sequence_length": 3, "memory_size": 16}}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_policy_beats_an_early_policy_and_the_rating_rises(name, seed, tmp_path, note):
    toy, max_steps, network = CASES[name]
    behaviors = {"Duel": settings(max_steps, network=network)}
    _, early = trained(toy, behaviors, seed, tmp_path / "early", EARLY)
    result, last = trained(toy, behaviors, seed, tmp_path / "last")
    note(f"self-play {name}, rating", result["Duel"].elo, threshold=1280, steps=max_steps)
    # Ratings begin at 1200, and stay there if a policy wins as often as it loses.
    assert result["Duel"].elo > 1200 + 80
    left = {"Duel?team=0": last["Duel"], "Duel?team=1": early["Duel"]}
    right = {"Duel?team=0": early["Duel"], "Duel?team=1": last["Duel"]}
    assert mean_returns(toy, left, seed)["Duel?team=0"] > 0.6
    assert mean_returns(toy, right, seed)["Duel?team=1"] > 0.6
    equals = dict.fromkeys(left, early["Duel"])
    assert abs(mean_returns(toy, equals, seed)["Duel?team=0"]) < 0.2


def test_both_behaviors_of_an_asymmetric_game_improve_by_self_play(seed, tmp_path, note):
    behaviors = {
        "Pick": settings(6000),
        "Aim": settings(12_000, hyperparameters={"learning_rate": 5e-3, "num_epoch": 5}),
    }
    _, early = trained(Uneven, behaviors, seed, tmp_path / "early", EARLY)
    _, last = trained(Uneven, behaviors, seed, tmp_path / "last")

    def pick_against_aim(pick, aim):
        players = {"Pick?team=0": pick["Pick"], "Aim?team=1": aim["Aim"]}
        return mean_returns(Uneven, players, seed)["Pick?team=0"]

    before = pick_against_aim(early, early)
    gained = pick_against_aim(last, early) - before
    lost = before - pick_against_aim(early, last)
    note("self-play, uneven, first side's gain", gained, threshold=0.3, steps=6000)
    note("self-play, uneven, second side's gain", lost, threshold=0.3, steps=12_000)
    assert gained > 0.3
    assert lost > 0.3
