"""The slowed environments of `benchmarks/profiles.py`."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import profiles
from pipeline.simulators import registry


@pytest.fixture
def slept(monkeypatch):
    """Record the seconds of each sleep, without the wait."""
    seconds: list[float] = []
    monkeypatch.setattr(profiles.time, "sleep", seconds.append)
    return seconds


def steps(n, **options):
    slowed = profiles.Slowed(registry.make("balance_ball", seed=3, n_agents=2), seed=1, **options)
    slowed.reset()
    ((name, spec),) = slowed.behavior_specs.items()
    return [slowed.step({name: spec.action_spec.empty_action(2)})[name] for _ in range(n)]


def test_slowed_environment_sends_the_same_steps_with_the_requested_delay(slept):
    slow = steps(5, ms=6.0, sigma=0.0)
    assert slept == [0.006] * 5
    quick = steps(5, ms=0.0, sigma=0.0)
    assert len(slept) == 5
    for (slow_step, _), (quick_step, _) in zip(slow, quick, strict=True):
        assert np.array_equal(slow_step.obs[0], quick_step.obs[0])
    slept.clear()
    steps(400, ms=6.0, sigma=0.3)
    assert np.median(slept) == pytest.approx(0.006, rel=0.05)
    assert np.std(np.log(slept)) == pytest.approx(0.3, rel=0.15)


def test_profile_configuration_rounds_max_steps_up_to_whole_rollouts(tmp_path):
    workload = profiles.WORKLOADS["ppo"]
    config_file = profiles.configuration(workload, tmp_path, steps=61_000, threaded=True, n_envs=4)
    content = yaml.safe_load(config_file.read_text())
    (behavior,) = content["behaviors"].values()
    assert behavior["threaded"]
    # whole rollouts, each with a summary
    assert (behavior["max_steps"], behavior["summary_freq"]) == (72_000, 12_000)
    assert content["env_settings"] == {"num_envs": 4}


def test_steps_per_second_are_measured_without_the_start_and_the_end_of_a_run():
    # two environments in turn with 5 agents each: 10 steps/s, except at the start and the end
    seconds = np.concatenate([[0.0, 7.0, 8.0, 9.0], 9.0 + np.arange(1, 9) * 0.5, [99.0, 200.0]])
    exchanges = np.stack([seconds, np.full(14, 5.0)], axis=1)
    assert profiles.steady_rate([exchanges[1::2], exchanges[::2]], 10) == 10.0


def test_rate_of_computation_excludes_the_time_of_the_environment_and_of_compilation(tmp_path):
    place = tmp_path / "ours-3/run_logs/seconds.json"
    place.parent.mkdir(parents=True)
    curve = SimpleNamespace(steps=[500, 1000])
    # with and without compilation
    for seconds, rate in (({"compile": 20.0}, 100.0), ({}, 1000 / 30)):
        place.write_text(json.dumps({"total": 40.0, "environment": 10.0, **seconds}))
        assert profiles.compute_only(curve, tmp_path, 3) == pytest.approx(rate)


def test_slowed_environment_logs_the_time_and_the_number_of_agents_of_each_exchange(
    slept, tmp_path
):
    simulator = registry.make("balance_ball", seed=3, n_agents=2)
    slowed = profiles.Slowed(simulator, ms=0.0, sigma=0.0, seed=1, log=tmp_path)
    slowed.reset()
    ((name, spec),) = slowed.behavior_specs.items()
    for _ in range(3):
        slowed.step({name: spec.action_spec.empty_action(2)})
    slowed.close()
    (exchanges,) = profiles.taken(tmp_path)
    assert exchanges[:, 1].tolist() == [2.0, 2.0, 2.0]
    assert np.all(np.diff(exchanges[:, 0]) >= 0.0)
    assert profiles.taken(tmp_path) == []


def test_agents_of_the_pitch_workload_are_in_groups_of_two_whose_episodes_end_together():
    game = profiles.Pitches(seed=1, n_agents=12)
    game.reset()
    n_ended = 0
    for _ in range(500):
        actions = {
            name: spec.action_spec.empty_action(6) for name, spec in game.behavior_specs.items()
        }
        (first_team, ended), (second_team, lost) = game.step(actions).values()
        assert [obs.shape for obs in first_team.obs] == [(6, 264), (6, 72)]
        assert sorted(first_team.agent_id.tolist() + second_team.agent_id.tolist()) == list(
            range(12)
        )
        assert len(ended.agent_id) == len(lost.agent_id)
        assert set(np.bincount(ended.group_id).tolist()) <= {0, 2}
        assert np.array_equal(ended.group_reward, -lost.group_reward)
        n_ended += len(ended.agent_id)
    assert n_ended > 0


def test_profile_table_compares_rates_within_each_round_and_predictions_with_measured_rates():
    rates = {
        "environment": [100.0, 200.0, 400.0],
        "compute": [300.0, 300.0, 300.0],
        "predicted for threaded": [99.0, 110.0, 120.0],
        "ours": [90.0, 100.0, 380.0],
    }
    assert profiles.line("ppo", 6.0, 1, rates) == "| ppo | 6 | 1 | 200 | 300 | 100 (90%) |"
    threaded, four = "predicted for threaded", "predicted for 4 environments"
    first = {threaded: [110.0], four: [300.0], "ours, threaded": [100.0]}
    cells = {("ppo", 6.0, 1): first, ("ppo", 6.0, 4): {"ours": [400.0]}}
    assert profiles.predictions(cells) == [
        "ppo, 6 ms: predicted for threaded 110, measured 100: +10%",
        "ppo, 6 ms: predicted for 4 environments 300, measured 400: -25%",
    ]
