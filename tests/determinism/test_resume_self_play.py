"""Self-play depends on the seed only, and a killed and resumed run is unchanged."""

import signal
from pathlib import Path

import numpy as np
import pytest
from duels import Duel, Recall, Uneven
from test_resume import assert_equal_files, assert_equal_states, leaves, python

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.simulators import registry
from pipeline.trainer.checkpoints.file import load_checkpoint

HERE = Path(__file__).parent
SELF_PLAY = {"save_steps": 60, "team_change": 130, "swap_steps": 40, "window": 3}
ABOVE = {"measure": "elo", "behavior": "Duel", "require_reset": True}
RATED = [
    {"name": str(rating), "value": rating, "completion_criteria": ABOVE | {"threshold": rating}}
    for rating in (1201.0, 1203.0, 9999.0)
]
RATED.append({"name": "last", "value": 0.0})
NAMES = {
    "Duel": ["Duel"],
    "Recall": ["Duel"],
    "Uneven": ["Pick", "Aim"],
    "tag": ["Hunter", "Runner"],
}


def settings(toy, max_steps):
    memory = {"memory": {"sequence_length": 2, "memory_size": 8}} if toy == "Recall" else {}
    behavior = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 32, "buffer_size": 80, "num_epoch": 2},
        "network_settings": {"hidden_units": 16, "num_layers": 1, "normalize": True} | memory,
        "max_steps": max_steps,
        "time_horizon": 7,
        "summary_freq": 90,
        "checkpoint_interval": 300,
        "self_play": SELF_PLAY,
    }
    lessons = {"environment_parameters": {"length": {"curriculum": RATED}}} if toy == "Duel" else {}
    return {"behaviors": dict.fromkeys(NAMES[toy], behavior)} | lessons


def environments(toy):
    if toy == "tag":
        return [InProcessEnvironment(registry.make("tag", seed=3, n_agents=6))]
    toy_class = {"Duel": Duel, "Recall": Recall, "Uneven": Uneven}[toy]
    return [InProcessEnvironment(toy_class(seed=seed, n_areas=2)) for seed in (3, 4)]


def train(toy, folder, *, seed=5, max_steps=700, **options):
    result = pipeline.train(
        environments(toy), settings(toy, max_steps), seed=seed, run_dir=folder, **options
    )
    numbers = {name: outcome.numbers() for name, outcome in result.behaviors.items()}
    return numbers, {p.name: p.read_bytes() for p in sorted(folder.glob("*/*.pt"))}


@pytest.mark.parametrize("toy", ["Duel", "Uneven"])
def test_same_seed_gives_the_same_opponents_ratings_and_weights(toy, tmp_path):
    first, second, other = (
        train(toy, tmp_path / label, seed=seed)
        for label, seed in (("one", 5), ("two", 5), ("other", 6))
    )
    assert first == second
    assert first[0] != other[0]
    assert len(first[1]) >= 2 * len(NAMES[toy])


def run(folder, toy, *, at, number=signal.SIGTERM, resume=False):
    """Train until the last behavior has learned at step `at`; then end the process by a signal."""
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from killed_training import ending
from test_resume_self_play import NAMES, train

def due(learner):
    return {int(number)} if learner.step >= {at} and learner.name == NAMES[{toy!r}][-1] else 0

with ending(due):
    options = {{"max_steps": 10**6, "resume": {resume}, "resume_interval_s": 0.0}}
    train({toy!r}, Path({str(folder)!r}), **options)
"""
    return python(folder, "-c", program)


def states(folder):
    by_behavior = {
        p.parent.name: dict(leaves(load_checkpoint(p))) for p in folder.glob("*/checkpoint.pt")
    }
    return {
        f"{name}{key}": value for name, state in by_behavior.items() for key, value in state.items()
    }


@pytest.mark.parametrize("toy", ["Duel", "Recall", "Uneven", "tag"])
def test_self_play_killed_halfway_and_resumed_equals_the_uninterrupted_run(toy, tmp_path):
    uninterrupted = tmp_path / "whole"
    assert run(uninterrupted, toy, at=1000) == 0
    complete = states(uninterrupted)
    last = NAMES[toy][-1]
    assert complete[f"{last}/learner/step"] >= 1000
    assert complete[f"{last}/run/self_play/order/1"] in (0, 1)
    snapshots = [key for key in complete if "/self_play/snapshots/" in key]
    ratings = [value for key, value in complete.items() if "/self_play/ratings/" in key]
    assert len({key.split("/")[4] for key in snapshots}) == SELF_PLAY["window"]
    assert all(rating != 1200.0 for rating in ratings)
    assert complete.get("Duel/run/lessons/curriculum/lessons/length", 1) == 1
    for at, learning in ((380, 0), (500, 1)):
        killed = tmp_path / f"killed while {learning} learned"
        assert run(killed, toy, at=at, number=signal.SIGKILL) == -signal.SIGKILL
        halfway = states(killed)
        assert halfway[f"{last}/learner/step"] < 900
        assert halfway[f"{last}/run/self_play/learning"] == learning
        assert run(killed, toy, at=1000, resume=True) == 0
        assert any(not np.array_equal(complete[key], halfway[key]) for key in snapshots)
        assert_equal_states(complete, states(killed))
        assert_equal_files(uninterrupted, killed)
