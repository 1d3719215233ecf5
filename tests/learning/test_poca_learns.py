"""POCA brings teams to a stated group return within a stated number of steps."""

from __future__ import annotations

from functools import partial

import pytest
from crowds import LargestName
from exported import played
from kinds import but_in_full
from remembering import Cue
from teams import Door, Teamed
from toys import Chase, Corridor, Quadrant

import pipeline
from pipeline.envs.in_process import InProcessEnvironment

pytestmark = pytest.mark.learning

MEMORY = {"memory": {"sequence_length": 8, "memory_size": 32}, "num_layers": 1}
# For each toy: agent steps, the mean group return of the last episodes that must be reached, and
# what it changes. Every agent of a `Teamed` toy gains the mean of what all three earn, so the toy's
# own words on its best and its random return hold here as well.
CASES = {
    "continuous": (partial(Teamed, Chase), 40_000, -1.3, {}),
    "discrete, ending one by one": (partial(Teamed, Corridor), 20_000, 0.85, {}),
    "visual": (partial(Teamed, Quadrant), 12_000, 3.4, {}),
    "entities": (partial(Teamed, LargestName), 24_000, 3.2, {"batch_size": 128}),
}


def settings(max_steps: int, changes: dict, network: dict, trainer: str) -> dict:
    toy = {
        "trainer_type": trainer,
        "hyperparameters": {
            "batch_size": 64,
            "buffer_size": 1024,
            "learning_rate": 2e-3,
            "learning_rate_schedule": "linear",
            **changes,
        },
        "network_settings": {"hidden_units": 32, "num_layers": 2, **network},
        "reward_signals": {"extrinsic": {"gamma": 0.95}},
        "max_steps": max_steps,
        "time_horizon": 32,
    }
    return {"behaviors": {"Toy": toy}}


def trained(toy, max_steps, folder, *, seed, changes=None, network=None, trainer="poca"):
    configuration = settings(max_steps, changes or {}, network or {}, trainer)
    environment = InProcessEnvironment(toy(seed=seed))
    return pipeline.train(environment, configuration, seed=seed, run_dir=folder).behaviors["Toy"]


@pytest.mark.parametrize("name", but_in_full(CASES, "visual", "entities"))
def test_poca_reaches_the_stated_return(name, seed, tmp_path, note):
    toy, max_steps, wanted, changes = CASES[name]
    result = trained(toy, max_steps, tmp_path, seed=seed, changes=changes)
    note(f"poca, {name}", result.mean_reward, wanted=wanted, steps=max_steps)
    assert max_steps <= result.steps < max_steps + 1024
    assert result.mean_reward >= wanted


@pytest.mark.in_full  # says what the toy is like
@pytest.mark.parametrize("name", CASES)
def test_a_policy_that_learned_nothing_is_far_from_the_stated_return(name, tmp_path):
    toy, _, wanted, _ = CASES[name]
    result = trained(toy, 1000, tmp_path, seed=1)
    assert result.n_updates == 0
    assert result.mean_reward < wanted - 0.4


# Steps, and group returns: the key used at once and every sign answered is 7.
DOOR = 24_000
OPENED, NEVER_OPENED = 6.0, 0.8


def group_return(result, folder, seed):
    """Mean sum of group rewards over those who stay to the end, of the exported policy."""
    episodes = played(result, Door, folder, seed=seed, episodes=240)
    stayed = [one.episode_return for one in episodes if one.length == Door.length]
    return sum(stayed) / len(stayed)


def test_poca_learns_that_one_must_leave_for_the_others(seed, tmp_path, note):
    result = trained(Door, DOOR, tmp_path, seed=seed)
    found = group_return(result, tmp_path, seed)
    note("poca, one leaves for the others, exported", found, wanted=OPENED, steps=DOOR)
    assert found >= OPENED


@pytest.mark.in_full  # says what the toy is like
def test_ppo_never_opens_the_door_because_who_opens_it_gains_nothing(seed, tmp_path):
    result = trained(Door, DOOR, tmp_path, seed=seed, trainer="ppo")
    assert group_return(result, tmp_path, seed) <= NEVER_OPENED + 0.4


@pytest.mark.in_full  # as test_every_kind, with more agents
def test_poca_with_memory_answers_what_it_saw_steps_ago(seed, tmp_path, note):
    changes = {"batch_size": 128, "learning_rate": 3e-3}
    toy = partial(Teamed, Cue)
    result = trained(toy, 36_000, tmp_path, seed=seed, changes=changes, network=MEMORY)
    note("poca with memory, discrete", result.mean_reward, wanted=0.65, steps=36_000)
    # without memory it is 0.25, as below; an agent alone comes to 0.9, but here two others' answers
    # are in what it gains
    assert result.mean_reward >= 0.65


@pytest.mark.in_full  # says what the toy is like
def test_without_memory_the_same_task_stays_at_chance(seed, tmp_path):
    changes = {"batch_size": 128, "learning_rate": 3e-3}
    toy = partial(Teamed, Cue)
    result = trained(toy, 36_000, tmp_path, seed=seed, changes=changes, network={"num_layers": 1})
    assert result.n_updates > 10
    assert result.mean_reward < 0.45
