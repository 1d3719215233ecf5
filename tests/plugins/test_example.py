"""Every part of `examples/plugin` works in a run."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from example_plugin_site import EXAMPLE, install
from killed_runs import whole_and_killed

import pipeline
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.export.policy import OnnxPolicy
from pipeline.settings.trainer.schema import NetworkSettings
from pipeline.simulators import pack, registry
from pipeline.tracking.sinks import TrackedRun, standard_sinks
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.checkpoints.restore import load_policy

N_STEPS = 1500


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = install(tmp_path / "site")
    for name in [module for module in sys.modules if module.partition(".")[0] == "example_plugin"]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    monkeypatch.syspath_prepend(str(folder))
    return folder


def settings(**changes: object) -> dict:
    run = yaml.safe_load((EXAMPLE / "Corridor.yaml").read_text())
    behavior = run["behaviors"]["Corridor"]
    behavior |= {"max_steps": N_STEPS, "summary_freq": 500} | changes
    behavior["hyperparameters"] |= {"save_replay_buffer": True, "exploration_steps": 800}
    return run


def train(folder: Path, run: dict, **options: object):
    env = InProcessEnvironment(registry.make("corridor", seed=3, n_agents=8))
    return pipeline.train([env], run, seed=5, run_dir=folder, **options).behaviors["Corridor"]


def test_reward_signal_and_all_other_parts_of_the_example_work_in_one_run(tmp_path: Path):
    run = TrackedRun(folder=tmp_path / "run", max_steps={"Corridor": N_STEPS})
    result = train(tmp_path / "run", settings(), sinks=standard_sinks(run))
    assert result.steps >= N_STEPS
    lines = [
        json.loads(line) for line in (tmp_path / "run/summaries.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [500, 1000, 1500]
    for tag in ("Losses/Q Loss", "Policy/Epsilon", "Policy/Novelty Cells"):
        assert np.isfinite(lines[-1][tag]), tag
    assert lines[-1]["Policy/Epsilon"] == pytest.approx(0.05)
    saved = load_policy(result.checkpoint)
    kinds = {type(module).__name__ for module in saved.policy.modules()}
    assert {"PatchEncoder", "GreedyHeads"} <= kinds
    learner = load_checkpoint(result.checkpoint)["learner"]["algorithm"]
    assert int(learner["signals"]["novelty"]["counts"].sum()) >= N_STEPS

    report = publish(result.checkpoint, tmp_path / "onnx")
    assert report["rows"] > 0
    policy = OnnxPolicy(tmp_path / "onnx/Corridor.onnx")
    env = registry.make("corridor", seed=9, n_agents=8)
    ((decision, _),) = env.reset().values()
    with torch.no_grad():
        hidden = saved.policy.actor([torch.from_numpy(decision.obs[0])])
    expected = saved.policy.actor.heads.values(hidden)[0].argmax(1).numpy()
    for deterministic in (True, False):
        actions = policy.act(decision, deterministic=deterministic).discrete[:, 0]
        assert actions.tolist() == expected.tolist()


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
def test_trainer_of_the_example_explores_among_allowed_choices_with_probability_epsilon(
    epsilon: float,
):
    from example_plugin.dqn import DQN

    spec = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(0, (4, 3)))
    policy = DQN.policy_for(spec, NetworkSettings(hidden_units=8))
    policy.actor.heads.epsilon.fill_(epsilon)
    n = 4000
    obs = [np.tile(np.float32([0.3, -1.0, 2.0]), (n, 1))]
    forbidden = [np.tile([False, True, False, False], (n, 1)), np.zeros((n, 3), np.bool_)]
    agents = {"memory": None, "action_mask": forbidden}
    actions = policy.act(obs, generator=torch.Generator().manual_seed(1), **agents).action.discrete
    policy.actor.heads.epsilon.fill_(0.0)
    best = policy.act(obs, generator=torch.Generator().manual_seed(2), **agents).action.discrete
    assert (best == best[0]).all()
    for branch, possible in enumerate(([0, 2, 3], [0, 1, 2])):
        for choice in possible:
            is_best = choice == best[0, branch]
            expected = epsilon / len(possible) + (1.0 - epsilon) * is_best
            share = (actions[:, branch] == choice).mean()
            assert share == pytest.approx(expected, abs=0.04), (branch, choice)
    assert not (actions[:, 0] == 1).any()


def test_sink_of_the_example_deletes_the_steps_that_a_resumed_run_repeats(tmp_path: Path):
    from example_plugin.sink import JsonLinesSink

    path = tmp_path / "run/summaries.jsonl"
    for steps, cut in (((1, 2, 3), '{"behavior": "A", "st'), ((2, 3, 4), "")):
        sink = JsonLinesSink(path)
        for step in steps:
            for behavior in "AB":
                sink.on_summary(behavior, {"Loss": 0.5}, step)
        with path.open("a") as file:
            file.write(cut)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for behavior in "AB":
        assert [line["step"] for line in lines if line["behavior"] == behavior] == [1, 2, 3, 4]


def test_sink_of_the_plug_in_guide_keeps_the_best_return(tmp_path: Path):
    page = (EXAMPLE.parents[1] / "docs/how-to/plugins.md").read_text()
    section = page.partition("\n## Sink\n")[2].partition("```python\n")[2]
    names: dict = {}
    exec(section.partition("```")[0], names)  # noqa: S102  # ours
    sink = names["for_run"](TrackedRun(folder=tmp_path, max_steps={}))
    for step, reward in enumerate((1.0, 3.0, 2.0)):
        sink.on_summary("B", {"Environment/Cumulative Reward": reward}, step)
    assert (tmp_path / "best.txt").read_text() == "{'B': 3.0}\n"


@pytest.mark.slow
def test_a_killed_and_resumed_run_exports_the_bytes_of_an_uninterrupted_run(
    tmp_path: Path, site: Path
):
    options = {"kill_at": 20, "first": site}
    checkpoints, _ = whole_and_killed(tmp_path, settings(), "corridor", **options)
    exports = [publish(path, path.parent / "onnx")["sha256"] for path in checkpoints]
    assert exports[0] == exports[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"network_settings": {"memory": {"sequence_length": 4}}}, "dqn has no memory"),
        ({"network_settings": {"vis_encode_type": "simple"}}, "min dimension is 20.*patches"),
    ],
)
def test_settings_that_the_example_does_not_support_are_refused(tmp_path: Path, changes, said):
    with pytest.raises(pipeline.errors.SettingsError, match=said):
        train(tmp_path / "run", settings(**changes))


@pytest.mark.slow
def test_packed_simulator_of_the_example_is_a_standalone_and_reproducible_executable(
    tmp_path: Path, monkeypatch
):
    programs = [pack.pack("corridor", tmp_path / name, n_agents=4) for name in ("one", "again")]
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    completed = subprocess.run(  # noqa: S603  # built just now
        [programs[0], "--describe"],
        env=os.environ | {"PIPELINE_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert "Corridor" in completed.stdout
    assert programs[0].read_bytes() == programs[1].read_bytes()


def test_simulator_of_the_example_is_registered_and_its_expert_always_succeeds():
    assert registry.entry("corridor").summary.startswith("Find the lit end")
    env, act = registry.make("corridor", seed=1, n_agents=8), registry.expert("corridor")
    ((decision, _),) = env.reset().values()
    rewards = []
    for _ in range(60):
        ((decision, terminal),) = env.step({"Corridor?team=0": act(decision)}).values()
        rewards += terminal.reward.tolist()
    assert len(rewards) > 20
    assert set(rewards) == {1.0}


def test_a_broken_sink_is_skipped_with_a_warning_but_refused_if_it_was_chosen(
    tmp_path, site, caplog
):
    run = TrackedRun(folder=tmp_path, max_steps={})
    (site / "example_plugin/sink.py").write_text("def for_run(run):\n    raise OSError('full')\n")
    assert len(standard_sinks(run)) == 3
    assert "json_lines" in caplog.text
    assert "full" in caplog.text
    assert len(standard_sinks(run, ["tensorboard"])) == 3
    sys.modules.pop("example_plugin.sink")
    (site / "example_plugin/sink.py").write_text("import missing\n")
    importlib.invalidate_caches()
    with pytest.raises(pipeline.errors.SettingsError, match=r"'json_lines' of .* cannot be used"):
        standard_sinks(run, ["json_lines"])
    assert len(standard_sinks(run)) == 3
