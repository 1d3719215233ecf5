"""Every algorithm learns every kind of action from every kind of observation, also if exported."""

from functools import partial
from itertools import product

import pytest
from answers import ACTIONS, BLIND, OBSERVATIONS, Answer
from exported import exported_return, trained

EPISODES = 400
# Mean return to reach by the exported policy's most likely actions; the best is 1, and `BLIND` is
# the best without observing.
WANTED = {"discrete": 0.9, "continuous": 0.8, "hybrid": 0.8}

ON_POLICY = {
    "batch_size": 128,
    "buffer_size": 1024,
    "learning_rate": 3e-3,
    "learning_rate_schedule": "linear",
}
OFF_POLICY = {
    "batch_size": 128,
    "buffer_size": 8192,
    "buffer_init_steps": 500,
    "steps_per_update": 8,
    "learning_rate": 3e-3,
    "init_entcoef": 0.1,
}
NORMALIZED = OFF_POLICY | {"init_entcoef": 0.3, "steps_per_update": 4, "tau": 0.05}
# Agent steps and hyperparameters of each algorithm.
ALGORITHMS = {
    "ppo": (16_000, ON_POLICY),
    "sac": (8_000, OFF_POLICY),
    "poca": (24_000, ON_POLICY),
    "xqc": (4_000, NORMALIZED),
}
MEMORY = {"sequence_length": 8, "memory_size": 32}


def settings(algorithm: str, observation: str, max_steps: int) -> dict:
    network = {"hidden_units": 32, "num_layers": 2}
    if observation == "memory":
        network |= {"num_layers": 1, "memory": MEMORY}
    if algorithm == "xqc":  # xqc supports neither memory nor weights made from goals
        network |= {"goal_conditioning_type": "none"}
    return {
        "trainer_type": algorithm,
        "hyperparameters": dict(ALGORITHMS[algorithm][1]),
        "network_settings": network,
        "reward_signals": {"extrinsic": {"gamma": 0.9}},
        "max_steps": max_steps,
        "time_horizon": 32,
    }


def learned(algorithm, action, observation, max_steps, *, seed, folder, **hyperparameters):
    """Train; return the result, and the exported policy's mean return in a toy of another seed."""
    toy = partial(Answer, action, observation, team_size=2 if algorithm == "poca" else 1)
    behavior = settings(algorithm, observation, max_steps)
    behavior["hyperparameters"] |= hyperparameters
    result = trained(toy, behavior, folder, seed=seed)
    return result, exported_return(result, toy, folder, seed=seed, episodes=EPISODES)


def every_kind() -> list:
    """Return all triples of an algorithm, an observation and an action.

    The triples without the mark `in_full` contain every pair of two kinds.
    """
    kinds = []
    for (i, algorithm), (j, observation), (k, action) in product(
        enumerate(ALGORITHMS), enumerate(OBSERVATIONS), enumerate(ACTIONS)
    ):
        if (algorithm, observation) == ("xqc", "memory"):
            continue
        marks = [] if (i + j + k) % 3 == 0 else [pytest.mark.in_full]
        kinds.append(pytest.param(algorithm, observation, action, marks=marks))
    return kinds


@pytest.mark.parametrize(("algorithm", "observation", "action"), every_kind())
def test_each_algorithm_learns_and_exports_every_kind_of_action_and_observation(
    algorithm, observation, action, seed, tmp_path, note
):
    max_steps, hyperparameters = ALGORITHMS[algorithm]
    kind = algorithm, action, observation
    result, mean_return = learned(*kind, max_steps, seed=seed, folder=tmp_path)
    name, threshold = f"{algorithm}, {observation}, {action}", WANTED[action]
    note(name, mean_return, threshold=threshold, steps=max_steps)
    late = 1024 if algorithm in ("sac", "xqc") else hyperparameters.get("buffer_size", 0)
    assert max_steps <= result.steps < max_steps + late
    assert mean_return >= WANTED[action]


@pytest.mark.in_full  # a check of the toy
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_an_untrained_policy_scores_no_better_than_answers_that_ignore_the_observation(
    observation, action, tmp_path
):
    never = {"buffer_size": 16_384}  # so large that no update is made, also with padded sequences
    result, _ = learned("ppo", action, observation, 1000, seed=1, folder=tmp_path, **never)
    assert result.n_updates == 0
    assert result.mean_reward < BLIND[action] + 0.1 < WANTED[action]
