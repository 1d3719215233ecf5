"""`params.yaml`, and the table of runs that is made from it."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from refusals import refusal

from pipeline.errors import SettingsError, StageError
from pipeline.settings import read_yaml
from pipeline.settings.nodes import to_plain
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import check_plan, plan, write_plan

ROOT = Path(__file__).parents[3]

FILE = """\
runtime:
  torch_threads: 2
  device: cpu
environments:
  ball:
    source: builtin
    name: balance_ball
  game:
    source: path
    path: builds/game.x86_64
    args: [--fast, 3]
demonstrations:
  expert:
    environment: ball
    episodes: 5
    seed: 1
experiments:
  scratch:
    environment: game
    trainer: config/t.yaml
    overrides: {}
    seeds: [3, 1]
    stages: [train]
  cloned:
    environment: ball
    trainer: config/t.yaml
    overrides:
      behaviors:
        Ball:
          max_steps: 1e3
    demonstrations: expert
    pretrain:
      epochs: 1
      batch_size: 2
      learning_rate: 1e-3
    seeds: [1]
    stages: [pretrain, train, export, evaluate]
    evaluation:
      episodes: 2
      seed: 9
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/t.yaml").write_text("behaviors: {Ball: {max_steps: 5}}")
    (tmp_path / "params.yaml").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize(
    "written",
    ["env_settings: {env_path: mine, num_envs: 3}", "env_settings.env_path: mine"],
)
def test_executable_that_the_dag_builds_replaces_every_env_path_in_the_settings(folder, written):
    file, trainer = folder / "params.yaml", folder / "config/t.yaml"
    trainer.write_text(f"{trainer.read_text()}\nenv_settings: {{env_path: of the trainer}}\n")
    file.write_text(FILE.replace("overrides:\n", f"overrides:\n      {written}\n", 1))
    params = load_params(file)
    assert params.run_settings("cloned").env_settings.env_path == "mine"
    env = params.run_settings("cloned", env_path="build/env").env_settings
    assert (env.env_path, env.num_envs) == ("build/env", 3 if "num_envs" in written else 1)


def test_section_track_of_params_yaml_selects_the_metric_sinks_of_all_experiments(folder):
    file = folder / "params.yaml"
    assert load_params(file).track is None
    file.write_text(FILE + "track:\n  - jsonl\n  - stats_writers\n")
    assert load_params(file).track == ("jsonl", "stats_writers")


def test_unknown_experiment_is_refused_and_a_similar_name_is_proposed(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"no experiment is called 'clone'; did you mean 'clon"):
        load_params(folder / "params.yaml").experiment("clone")


def test_mistakes_of_several_experiments_are_reported_together(folder: Path) -> None:
    file = folder / "params.yaml"
    text = FILE.replace("trainer: config/t.yaml", "trainer: config/nothing.yaml")
    file.write_text(f"{text}subsets: {{}}\n")
    with pytest.raises(SettingsError) as caught:
        load_params(file)
    lines = text.splitlines()
    expected = [number for number, line in enumerate(lines, 1) if "nothing.yaml" in line]
    assert len(expected) > 1
    assert [part.line for part in caught.value.parts] == expected


def test_plan_is_current_until_the_runs_change(folder: Path) -> None:
    params = load_params(folder / "params.yaml")
    file = folder / "workflow/runs.yaml"
    with pytest.raises(StageError, match=r"runs\.yaml is missing: run `pipeline plan`"):
        check_plan(params, file)
    write_plan(params, file)
    check_plan(params, file)
    assert to_plain(read_yaml(file)) == plan(params)
    for other in ({"seeds": (3, 1, 2)}, {"learners": 2}):
        experiment = replace(params.experiments["scratch"], **other)
        changed = replace(params, experiments=params.experiments | {"scratch": experiment})
        with pytest.raises(StageError, match=r"runs\.yaml is out of date: run `pipeline plan`"):
            check_plan(changed, file)


def test_plan_does_not_depend_on_training_length_or_episodes(folder: Path) -> None:
    file = folder / "params.yaml"
    before = repr(plan(load_params(file)))
    shorter = FILE.replace("max_steps: 1e3", "max_steps: 7")
    file.write_text(shorter.replace("episodes: 2", "episodes: 3"))
    assert repr(plan(load_params(file))) == before


def test_writing_the_plan_checks_the_trainer_configurations(folder: Path) -> None:
    (folder / "config/t.yaml").write_text("behaviors: {Ball: {max_step: 5}}")
    with pytest.raises(SettingsError, match=r"t\.yaml:1: behaviors\.Ball: unknown key 'max_step'"):
        write_plan(load_params(folder / "params.yaml"), folder / "runs.yaml")
    assert not (folder / "runs.yaml").exists()


AUTO = "trainer_type: sac, hyperparameters: {steps_per_update: auto}"


BALL = f"{{behaviors: {{Ball: {{{AUTO}}}}}}}"


@pytest.mark.parametrize(
    ("trainer", "override", "where"),
    [
        (f"behaviors:\n  Ball: {{{AUTO}}}", "{}", "config/t.yaml:2: behaviors.Ball"),
        (f"default_settings:\n  {{{AUTO}}}", "{}", "config/t.yaml:2: default_settings"),
        ("behaviors: {Ball: {}}", BALL, "params.yaml:21: "),
    ],
)
def test_steps_per_update_auto_is_refused_in_an_experiment(trainer, override, where, folder):
    (folder / "config/t.yaml").write_text(trainer)
    (folder / "params.yaml").write_text(FILE.replace("overrides: {}", f"overrides: {override}"))
    with pytest.raises(SettingsError) as caught:
        write_plan(load_params(folder / "params.yaml"), folder / "runs.yaml")
    first = str(caught.value).splitlines()[0]
    for words in (where, ".hyperparameters.steps_per_update: needs a number in an experiment"):
        assert words in first
    for words in ("got 'auto'", "`pipeline timers RUN` proposes one"):
        assert words in first


@pytest.mark.parametrize("key", ["reward_signals: {gail: {", "behavioral_cloning: {"])
def test_experiment_that_trains_on_recorded_demonstrations_must_name_them_in_params_yaml(
    key: str, folder: Path
) -> None:
    reads = f"{key}demo_path: data/demos/expert.demo}}" + "}" * (key.count("{") - 1)
    (folder / "config/t.yaml").write_text(f"behaviors: {{Ball: {{{reads}}}}}")
    params = load_params(folder / "params.yaml")
    expected = r"experiments\.scratch: .*set 'demonstrations: expert'"
    with pytest.raises(SettingsError, match=expected):
        write_plan(params, folder / "runs.yaml")
    experiments = {"cloned": params.experiments["cloned"]}
    write_plan(replace(params, experiments=experiments), folder / "runs.yaml")


def test_plan_of_more_than_100_stages_logs_a_warning_about_dvc(folder, caplog):
    file = folder / "params.yaml"
    file.write_text(FILE.replace("[3, 1]", str(list(range(90)))))
    write_plan(load_params(file), folder / "runs.yaml")
    assert caplog.records == []
    file.write_text(FILE.replace("[3, 1]", str(list(range(94)))))
    with caplog.at_level(logging.WARNING):
        write_plan(load_params(file), folder / "runs.yaml")
    assert "describes 101 stages" in caplog.text


def test_repository_params_yaml_loads_and_its_plan_is_current() -> None:
    params = load_params(ROOT / "params.yaml")
    check_plan(params, ROOT / "workflow/runs.yaml")
    assert set(params.experiments) >= {"collector_ppo", "collector_bc_ppo", "grid_world_ppo"}
    for name in params.experiments:
        assert params.run_settings(name).behaviors


def test_repository_params_yaml_is_in_block_style() -> None:
    lines = (ROOT / "params.yaml").read_text().splitlines()
    values = [line.split("#")[0].rstrip() for line in lines]
    assert [v for v in values if v.endswith(("]", "}")) and not v.endswith((" []", " {}"))] == []


def test_example_in_the_configuration_page_agrees_with_params_yaml():
    page = (ROOT / "docs/reference/configuration.md").read_text()
    example = yaml.safe_load(page.partition("## `params.yaml`\n\n```yaml\n")[2].partition("```")[0])
    real = yaml.safe_load((ROOT / "params.yaml").read_text())
    small = yaml.safe_load((ROOT / "docs/tools/small.yaml").read_text())
    assert example.pop("runtime") == real["runtime"]
    for section, entries in example.items():
        for name, entry in entries.items():
            assert entry.items() <= real[section][name].items()
    for name in ("collector_ppo", "collector_bc_ppo"):
        ours, theirs = (params["experiments"][name] for params in (small, real))
        assert ours["overrides"] == theirs["overrides"]
        assert ours.get("pretrain") == theirs.get("pretrain")


def test_mistake_in_an_override_of_params_yaml_is_reported_with_its_line(folder: Path) -> None:
    file = folder / "params.yaml"
    text = FILE.replace("max_steps: 1e3", "max_stesp: 1e3")
    file.write_text(text)
    line = text[: text.index("max_stesp")].count("\n") + 1
    assert refusal(SettingsError, load_params(file).run_settings, "cloned").startswith(
        f"{file}:{line}: behaviors.Ball: unknown key 'max_stesp'"
    )
