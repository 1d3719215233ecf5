"""The slowed environments of `benchmarks/profiles.py`."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

import profiles
from pipeline.simulators import registry


@pytest.fixture
def slept(monkeypatch):
    """The seconds that were asked for, without the wait."""
    seconds: list[float] = []
    monkeypatch.setattr(profiles.time, "sleep", seconds.append)
    return seconds


def steps(n, **options):
    slowed = profiles.Slowed(registry.make("balance_ball", seed=3, n_agents=2), seed=1, **options)
    slowed.reset()
    ((name, spec),) = slowed.behavior_specs.items()
    return [slowed.step({name: spec.action_spec.empty_action(2)})[name] for _ in range(n)]


def test_every_exchange_takes_so_much_longer_and_is_the_same_otherwise(slept):
    slow = steps(5, ms=6.0, sigma=0.0)
    assert slept == [0.006] * 5
    quick = steps(5, ms=0.0, sigma=0.0)
    assert len(slept) == 5
    for (one, _), (other, _) in zip(slow, quick, strict=True):
        assert np.array_equal(one.obs[0], other.obs[0])


def test_times_that_vary_have_the_median_that_was_asked_for(slept):
    steps(400, ms=6.0, sigma=0.3)
    assert np.median(slept) == pytest.approx(0.006, rel=0.05)
    assert np.std(np.log(slept)) == pytest.approx(0.3, rel=0.15)


def test_configuration_differs_in_what_is_compared_only(tmp_path):
    workload = profiles.WORKLOADS["ppo"]
    made = profiles.configuration(workload, tmp_path, steps=500, threaded=True, n_envs=4)
    content = yaml.safe_load(made.read_text())
    (behavior,) = content["behaviors"].values()
    assert (behavior["threaded"], behavior["max_steps"], behavior["summary_freq"]) == (
        True,
        500,
        50,
    )
    assert content["env_settings"] == {"num_envs": 4}


def test_shares_are_taken_within_each_round():
    rates = {"environment": [100.0, 200.0, 400.0], "ours": [90.0, 100.0, 380.0]}
    assert profiles.line("ppo", 6.0, 1, rates) == "| ppo | 6 | 1 | 200 | 100 (90%) |"
