"""`pipeline learn`: the trainer's arguments, and when files of the run are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from pipeline import trainer
from pipeline.cli import learn_run
from pipeline.cli.learn_settings import Plan
from pipeline.files import RunFolder
from pipeline.settings import load_run_settings
from pipeline.tracking.result import BehaviorResult, TrainResult

ENV = {"env_path": "game", "num_envs": 3, "env_args": ["--level", "7"], "seed": 4}


def settings(**checkpoint):
    sections = {"env_settings": ENV, "checkpoint_settings": {"run_id": "x"} | checkpoint}
    behaviors = {"A": {"max_steps": 70}}
    torch = {"device": "cuda:1", "threads": 8}
    return load_run_settings(
        None, overrides={"behaviors": behaviors, "torch_settings": torch, **sections}
    )


@pytest.fixture
def asked(monkeypatch):
    """Arguments of the calls of the trainer and of the provenance record; nothing is trained."""
    seen = SimpleNamespace(timers=mock.Mock())

    def train(job, **options):
        seen.job, seen.options = job, options
        seen.told, *seen.sinks = options.pop("callbacks")
        seen.told.on_settings(job.settings)
        return "result"

    def record(given, seed, *, weights, program):
        seen.record = (given, seed, weights, program)
        return "record"

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr(learn_run, "executable_of", lambda name: Path(f"{name}.x86_64"))
    monkeypatch.setattr("pipeline.trainer.supported.usable_device", lambda _: None)
    monkeypatch.setattr(learn_run.provenance, "of_learn", record)
    monkeypatch.setattr(learn_run, "_sinks", lambda *arguments: [arguments])
    return seen


def test_learn_passes_all_settings_and_the_new_paths_of_moved_weights_to_the_trainer(
    asked, tmp_path
):
    run = settings(force=True)
    plan = Plan(settings=run, flags={}, base_port=6000, starting_lesson=2, learners=2)
    moved = tmp_path / "x.1"
    folder = RunFolder(tmp_path / "x", replaced=moved)
    folder.path.mkdir()
    weights = {"A": tmp_path / "x/A/checkpoint.pt", "B": tmp_path / "y/B/checkpoint.pt"}
    assert learn_run._train(plan, run, folder, weights, asked.timers) == "result"
    present = {"A": moved / "A/checkpoint.pt", "B": tmp_path / "y/B/checkpoint.pt"}
    program = Path("game.x86_64")
    exporter = asked.options.pop("exporter")
    assert (exporter.func, exporter.keywords) == (learn_run.publish, {"history": ["record"]})
    assert asked.record == (run, 4, present, program)
    assert asked.job == trainer.JobSpec(
        program,
        run,
        seed=4,
        run_dir=tmp_path / "x",
        num_envs=3,
        env_args=("--level", "7"),
        init_from=present,
        torch_threads=8,
        base_port=6000,
        log_folder=tmp_path / "x/run_logs",
        starting_lesson=2,
    )
    assert asked.options == {"device": "cuda:1", "inference": False, "learners": 2}
    assert asked.sinks == [(plan, run, program, tmp_path / "x", asked.timers)]
    assert folder.started
    asked.timers.start.assert_called_once()
    assert load_run_settings(tmp_path / "x/configuration.yaml").env_settings.num_envs == 3


def test_files_with_settings_for_the_behavior_are_named_if_no_file_is_given(
    asked, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    for folder, name in (("ppo", "A"), ("sac", "A"), ("xqc", "AB")):
        (tmp_path / "config" / folder).mkdir(parents=True)
        (tmp_path / f"config/{folder}/x.yaml").write_text(
            f"behaviors:\n  {name}:\n    trainer_type: ppo\n"
        )
    run = settings()
    for config in ("built-in", "own.yaml"):
        learn_run._train(
            Plan(settings=run, flags={}, config=config), run, RunFolder(tmp_path), {}, asked.timers
        )
        asked.told.on_start("A", {})
        asked.told.on_start("Other", {})
    said = [record.getMessage() for record in caplog.records if "config/" in record.getMessage()]
    assert said == ["A: settings for it are in config/ppo/x.yaml, config/sac/x.yaml."]


@pytest.mark.parametrize(("resume", "is_written"), [(True, False), (False, True)])
def test_inference_writes_a_configuration_unless_it_resumes(resume, is_written, asked, tmp_path):
    run = settings(resume=resume, inference=True)
    plan = Plan(settings=run, flags={})
    learn_run._train(plan, run, RunFolder(tmp_path), {}, asked.timers)
    assert (asked.job.resume, asked.options["inference"]) == (resume, True)
    assert asked.job.log_folder == (tmp_path / "run_logs" if is_written else None)
    assert (tmp_path / "configuration.yaml").exists() == is_written
    assert (asked.job.starting_lesson, asked.options["learners"]) == (0, 1)


def test_steps_per_update_chosen_by_auto_is_written_to_the_runs_configuration(asked, tmp_path):
    trainer = {"trainer_type": "sac", "hyperparameters": {"steps_per_update": "auto"}}
    run = load_run_settings(None, overrides={"behaviors": {"A": trainer}})
    folder = RunFolder(tmp_path)
    learn_run._train(Plan(settings=run, flags={}), run, folder, {}, asked.timers)
    asked.told.on_settings(run.with_pace("A", 3.5))
    written = load_run_settings(tmp_path / "configuration.yaml").behaviors["A"].hyperparameters
    assert written.steps_per_update == 3.5
    assert asked.record[0].undecided() == {}


def test_each_of_several_runs_has_its_own_folder_seed_and_timers(monkeypatch, tmp_path):
    """Both runs are resumed with the seeds in their configurations."""
    run = settings(results_dir=str(tmp_path), resume=True)
    drawn = replace(run, env_settings=replace(run.env_settings, seed=-1))
    for number, seed in ((0, 31), (1, 32)):
        (tmp_path / f"x-{number}").mkdir()
        written = tmp_path / f"x-{number}/configuration.yaml"
        written.write_text(f"behaviors: {{A: {{}}}}\nenv_settings: {{seed: {seed}}}\n")
    begun = []

    def train(_plan, given, folder, _weights, timers):
        begun.append((given.env_settings.seed, folder.path.name))
        folder.start()
        timers.start()
        numbers = {"steps": 70, "n_episodes": 1, "mean_reward": None}
        results = {
            name: BehaviorResult(n_updates=count, checkpoint=folder.path / name, **numbers)
            for name, count in (("A", 2), ("B", len(begun)))
        }
        seconds = {"total": 10.0 * len(begun), "update": 1.0}
        result = TrainResult(behaviors=results, seconds=seconds, n_exchanges=50 + len(begun))
        timers.on_end(result)
        timers.close()
        return result

    monkeypatch.setattr(learn_run, "_train", train)
    text = learn_run.learn(Plan(settings=drawn, flags={}, n_runs=2))
    assert begun == [(31, "x-0"), (32, "x-1")]
    assert [f"seed {seed}" in text for seed in (31, 32)] == [True, True]
    for number in (0, 1):
        logs = tmp_path / f"x-{number}/run_logs"
        assert json.loads((logs / "seconds.json").read_text())["total"] == 10.0 * (1 + number)
        tree = json.loads((logs / "timers.json").read_text())["children"]
        learning = tree["TrainerController.start_learning"]
        assert learning["total"] == 10.0 * (1 + number)
        parts = learning["children"]
        assert parts["_update_policy"]["count"] == 3 + number
        assert parts["env_step"]["count"] == 51 + number


@pytest.mark.parametrize("names", [["Echo"], ["Echo", "Other"]])
def test_summary_prints_evaluate_command_for_one_or_several_policies(names, tmp_path):
    """Regression: the command named one of two policies, and so evaluated one behavior only."""
    settings = load_run_settings(None)
    env = replace(settings.env_settings, env_path="./my game")
    numbers = {"steps": 1, "n_updates": 1, "n_episodes": 0, "mean_reward": None}
    played = BehaviorResult(checkpoint=tmp_path / "c.pt", **numbers)
    result = TrainResult(behaviors=dict.fromkeys(names, played), seconds={})
    folder = SimpleNamespace(path=tmp_path, started=False)
    said = learn_run._summary(replace(settings, env_settings=env), folder, result)
    played = tmp_path if len(names) > 1 else tmp_path / "Echo.onnx"
    assert f"Play it: pipeline evaluate {played} --env './my game'" in said


@pytest.mark.parametrize(
    ("changes", "compiles"),
    [
        ({}, False),  # 100,000 steps of 3 epochs of minibatches of 64 are 4,688 gradient steps
        ({"max_steps": 1_100_000}, True),
        ({"max_steps": 1_100_000, "compile": False}, False),
        ({"max_steps": 1_100_000, "inference": True}, False),
        ({"compile": True}, True),
    ],
)
def test_long_runs_are_compiled_and_a_resumed_run_keeps_the_choice(changes, compiles, tmp_path):
    def decided(max_steps=100_000, compile=None, **checkpoint):  # the setting's name
        hyperparameters = {"batch_size": 64}
        behavior = {"trainer_type": "ppo", "hyperparameters": hyperparameters}
        behavior["max_steps"] = max_steps
        sections = {"behaviors": {"A": behavior}, "torch_settings": {"compile": compile}}
        run = load_run_settings(None, overrides={**sections, "checkpoint_settings": checkpoint})
        return learn_run._with_compile(run, tmp_path)

    run = decided(**changes)
    assert run.torch_settings.compile is compiles
    written = learn_run._Record(run, RunFolder(tmp_path), mock.Mock(), {}, None)
    written.on_settings(run)
    for max_steps in (100_000, 5_000_000):
        assert decided(max_steps, resume=True).torch_settings.compile is compiles


def test_portable_runs_are_not_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(learn_run.machine, "is_portable", lambda: True)
    run = load_run_settings(None, overrides={"behaviors": {"A": {"max_steps": 10**8}}})
    assert learn_run._with_compile(run, tmp_path).torch_settings.compile is False


@pytest.mark.parametrize(
    ("env", "behavior", "learners", "options"),
    [
        ({"env_path": "balance_ball"}, {}, 1, {"n_agents": 12}),
        ({"env_path": "balance_ball", "num_areas": 2}, {}, 1, {"n_agents": 24}),
        ({"env_path": "gymnasium:CartPole-v1"}, {}, 1, {"id": "CartPole-v1", "n_agents": 16}),
        ({"env_path": "balance_ball", "env_args": ["--num-agents", "3"]}, {}, 1, {"n_agents": 3}),
        ({"env_path": "balance_ball", "env_args": ["--compress"]}, {}, 1, None),
        ({"env_path": "balance_ball", "env_args": ["--unknown"]}, {}, 1, None),
        ({"env_path": "balance_ball", "num_envs": 2}, {}, 1, None),
        ({"env_path": "balance_ball"}, {"threaded": True}, 1, None),
        ({"env_path": "balance_ball"}, {}, 2, None),
        ({"env_path": "my_env:make"}, {}, 1, None),
        ({}, {}, 1, None),
    ],
)
def test_a_simulator_steps_in_this_process_unless_a_process_would_work_at_the_same_time(
    env, behavior, learners, options
):
    sections = {"behaviors": {"A": behavior}, "env_settings": env}
    run = load_run_settings(None, overrides=sections)
    source = learn_run._in_process(Plan(settings=run, flags={}, learners=learners), run)
    assert (None if source is None else source.options) == options


@pytest.mark.parametrize(("parameters", "is_spread"), [(None, True), ({"wind": 2.0}, False)])
def test_copies_are_not_spread_if_the_environment_has_parameters(parameters, is_spread):
    sections = {"env_settings": {"env_path": "gymnasium:CartPole-v1"}}
    sections |= {"behaviors": {"A": {}}, "environment_parameters": parameters}
    run = load_run_settings(None, overrides=sections)
    assert learn_run._in_process(Plan(settings=run, flags={}), run).is_spread is is_spread
