"""Parts of a run from installed packages, and messages about parts that cannot be used."""

import os
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from example_plugin_site import distribution, install
from interpreter import python
from only_our_parts import hide_plugins
from own_parts import Convolutional
from refusals import refusal

from pipeline.dag import provenance
from pipeline.errors import SettingsError
from pipeline.nets.onnx_graph import OnnxGraph
from pipeline.nets.vision import observation_encoder
from pipeline.plugins import Group, load
from pipeline.settings import load_run_settings
from pipeline.settings.project.experiments import SINKS
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import OUR_SIMULATORS, plan
from pipeline.settings.trainer.schema import ENCODERS, HYPERPARAMETERS, REWARD_SIGNALS
from pipeline.simulators import registry
from pipeline.trainer.distributed.sync import refuse_unshareable
from pipeline.trainer.supported import algorithm_of, refuse_untrainable

DQN = """\
behaviors:
  B:
    trainer_type: dqn
    hyperparameters:
      batch_size: 32
"""
PPO = "behaviors:\n  B:\n    trainer_type: ppo\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def written(folder: Path, text: str) -> Path:
    path = folder / "trainer.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "line", "group"),
    [
        (DQN, 3, "pipeline.algorithms"),
        (PPO + "    reward_signals: {novelty: {}}\n", 4, "pipeline.reward_signals"),
        (PPO + "    network_settings: {vis_encode_type: patches}\n", 4, "pipeline.encoders"),
    ],
)
def test_error_about_an_unknown_plug_in_gives_the_line_and_names_the_plug_in_page(
    tmp_path, text, line, group
):
    path = written(tmp_path, text)
    message = refusal(SettingsError, load_run_settings, path)
    assert message.startswith(f"{path}:{line}: behaviors.B")
    names = {"pipeline.algorithms": HYPERPARAMETERS, "pipeline.encoders": ENCODERS}
    for name in names.get(group, REWARD_SIGNALS).ours:
        assert name in message
    assert repr(group) in message
    assert "docs/how-to/plugins.md" in message


def test_error_about_a_trainer_plug_in_of_ml_agents_names_the_migration_page(tmp_path, site):
    points = {"another": "theirs.another:get_type_and_setting", "other": "theirs.other:get"}
    distribution(site, "theirs", "0.1", groups={"mlagents.trainer_type": points})
    mlagents_points = {"default": "mlagents.plugins.trainer_type:get_default_trainer_types"}
    distribution(site, "mlagents", "1.1.0", groups={"mlagents.trainer_type": mlagents_points})
    path = written(tmp_path, DQN.replace("dqn", "another"))
    message = refusal(SettingsError, load_run_settings, path)
    assert message.startswith(f"{path}:3: behaviors.B.trainer_type: 'another' is not allowed")
    assert message.endswith("migrating.md): 'another' of theirs 0.1, 'other' of theirs 0.1")


@pytest.mark.parametrize(
    ("more", "line", "said"),
    [
        ("      exploration_step: 9\n", 6, "did you mean 'exploration_steps'"),
        ("      tau: 2\n", 6, r"hyperparameters\.tau: must be at most 1, got 2"),
        ("      exploration_initial_eps: 0.01\n", 4, r"exploration_final_eps: must be at most"),
        ("      num_epoch: 3\n", 6, "num_epoch: is a setting of ppo and poca, not of dqn"),
    ],
)
def test_settings_of_a_plug_in_are_checked_like_built_in_settings(tmp_path, site, more, line, said):
    install(site)
    path = written(tmp_path, DQN + more)
    message = refusal(SettingsError, load_run_settings, path)
    assert re.match(rf"{path}:{line}: .*{said}", message)


def test_reading_settings_of_a_plug_in_imports_no_torch(tmp_path, site):
    install(site)
    code = (
        "import sys; from pipeline.settings import load_run_settings as load\n"
        f"run = load({str(written(tmp_path, DQN))!r})\n"
        "assert run.behaviors['B'].hyperparameters.batch_size == 32\n"
        "sys.exit('torch' in sys.modules)"
    )
    python("-c", code, first=[site])


def test_tests_do_not_see_installed_plug_ins(tmp_path, site, monkeypatch):
    """tests/conftest.py hides installed packages; packages that a test installs are visible."""
    install(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    own = ["dqn" in HYPERPARAMETERS]
    monkeypatch.setattr(sys, "path", [*sys.path])
    hide_plugins(tmp_path / "hiding")
    own.append("dqn" in HYPERPARAMETERS)
    code = "from pipeline.plugins import all_of; print(len(all_of('pipeline.algorithms')))"
    assert (own, python("-c", code, PYTHONPATH=os.environ["PYTHONPATH"]).stdout) == (
        [True, False],
        "0\n",
    )


def test_built_in_parts_are_used_without_reading_installed_packages(tmp_path, monkeypatch):
    def never(**_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(metadata, "entry_points", never)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # a folder that no cache knows
    text = PPO + "    reward_signals: {rnd: {}}\n    network_settings: {vis_encode_type: resnet}\n"
    assert load_run_settings(written(tmp_path, text)).plugins() == {}
    assert registry.entry("pong").summary


def test_every_built_in_part_can_be_loaded():
    for settings in (*HYPERPARAMETERS.values(), *REWARD_SIGNALS.values()):
        assert settings.made_by.startswith(".")
        assert callable(load(settings.made_by, package="pipeline.algos."))
    for name in ENCODERS.ours:
        assert ENCODERS.load(name, package="pipeline.nets.").minimum_side >= 1
    for name in registry.NAMES:
        assert callable(registry.SIMULATORS[name])
    for name in SINKS.ours:
        assert callable(SINKS.load(name, package="pipeline.tracking.sinks."))
    assert set(registry.NAMES) == OUR_SIMULATORS
    with pytest.raises(SettingsError, match=r"'corridor'; .*pipeline\.simulators"):
        registry.make("corridor")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:Settings", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("os:path", "os:path is not a subclass of HyperparameterSettings"),
        ("pathlib:Path", "pathlib:Path is not a subclass of HyperparameterSettings"),
        ("pathlib:Nothing", "AttributeError"),
    ],
)
def test_an_unusable_plug_in_is_named_with_its_version(tmp_path, site, value, said):
    distribution(site, "broken", "2.5", groups={"pipeline.algorithms": {"dqn": value}})
    path = written(tmp_path, DQN)
    message = refusal(SettingsError, load_run_settings, path)
    assert message.startswith(f"{path}:3: behaviors.B.trainer_type: ")
    assert "'dqn' of broken 2.5 cannot be used" in message
    assert said in message


def test_a_class_that_is_no_algorithm_is_refused_before_training_starts(tmp_path, site):
    (site / "odd_settings.py").write_text(
        "from dataclasses import dataclass\n"
        "from pipeline.settings.trainer.schema import HyperparameterSettings\n"
        "@dataclass(frozen=True, kw_only=True, slots=True)\n"
        "class Odd(HyperparameterSettings):\n"
        "    made_by = 'pathlib:Path'\n"
        "@dataclass(frozen=True, kw_only=True, slots=True)\n"
        "class Lost(HyperparameterSettings):\n"
        "    made_by = 'nowhere.at_all:Thing'\n"
    )
    points = {"odd": "odd_settings:Odd", "lost": "odd_settings:Lost"}
    distribution(site, "odd", "1", groups={"pipeline.algorithms": points})
    for kind, message in (("odd", "not a subclass of Algorithm"), ("lost", "cannot be imported")):
        run = load_run_settings(written(tmp_path, f"behaviors:\n  B:\n    trainer_type: {kind}\n"))
        with pytest.raises(SettingsError, match=rf"behaviors\.B\.trainer_type: .*{message}"):
            refuse_untrainable(run)
        with pytest.raises(SettingsError):
            algorithm_of(run.behaviors["B"])


def test_a_plug_in_does_not_replace_a_built_in_part_of_the_same_name(site):
    distribution(site, "rival", "1", groups={"a.group": {"ours": "os:sep", "theirs": "os:sep"}})
    group: Group[str] = Group("a.group", {"ours": "os:linesep"})
    assert list(group) == ["ours", "theirs"]
    assert len(group) == 2
    assert group["ours"] == os.linesep
    assert group["theirs"] == os.sep
    assert group.versions("ours", "theirs") == {"rival": "1"}
    assert "neither" not in group
    with pytest.raises(KeyError):
        group["neither"]
    for name in ("one", "other"):
        distribution(site, name, "1", groups={"pipeline.algorithms": {"dqn": "a:B"}})
    with pytest.raises(SettingsError, match="one and other both have a plug-in 'dqn'"):
        HYPERPARAMETERS["dqn"]


def test_reward_signal_that_keeps_its_own_counts_is_refused_if_there_are_several_learners(
    tmp_path, site
):
    install(site)
    text = PPO + "    reward_signals: {novelty: {}}\n"
    settings = load_run_settings(written(tmp_path, text)).behaviors["B"]
    refuse_unshareable("B", settings, 1)
    with pytest.raises(SettingsError, match=r"novelty: its counts are .*, or use one learner$"):
        refuse_unshareable("B", settings, 2)


def test_encoder_plug_in_without_the_method_to_onnx_is_exported_from_its_operations(monkeypatch):
    monkeypatch.setattr(Group, "load", lambda *_, **__: Convolutional)
    encoder = observation_encoder("mute", (3, 16, 16), 8)
    assert encoder.to_onnx(OnnxGraph(), "obs_0")


PARAMS = """\
environments:
  balance_ball: {source: builtin}
  corridor: {source: builtin}
experiments:
  plain:
    environment: balance_ball
    trainer: plain.yaml
    seeds: [1]
    stages: [train]
    overrides: {}
  plugged:
    environment: corridor
    trainer: plugged.yaml
    seeds: [1, 2]
    stages: [train]
    overrides: {}
"""


def test_a_new_plug_in_version_changes_only_the_plan_entries_that_use_the_plug_in(
    tmp_path, site, monkeypatch
):
    (tmp_path / "params.yaml").write_text(PARAMS)
    (tmp_path / "plain.yaml").write_text(PPO)
    (tmp_path / "plugged.yaml").write_text(DQN)
    plans = []
    for version in ("0.1.0", "0.2.0"):
        folder = tmp_path / version
        install(folder, version=version)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(folder))
            params = load_params(tmp_path / "params.yaml")
            plans.append(plan(params)["runs"])
            run = load_run_settings(tmp_path / "plugged.yaml")
            assert run.plugins() == {"example-plugin": version}
            record = provenance.of_learn(run, 1, {})
            assert record["versions"]["example-plugin"] == version
    before, after = plans
    changed = {
        f"{table}.{key}"
        for table, entries in after.items()
        for key, entry in entries.items()
        if before[table][key] != entry
    }
    assert changed == {
        "environments.corridor",
        "train_from_scratch.plugged-1",
        "train_from_scratch.plugged-2",
    }
    assert "plugins" not in after["train_from_scratch"]["plain-1"]


def test_plug_in_with_the_name_of_a_built_in_simulator_is_not_in_the_plan(tmp_path, site):
    distribution(site, "theirs", "0.1", groups={"pipeline.simulators": {"balance_ball": "a:Ball"}})
    params = tmp_path / "params.yaml"
    params.write_text("environments:\n  balance_ball: {source: builtin}\nexperiments: {}\n")
    assert plan(load_params(params))["runs"]["environments"] == {
        "balance_ball": {"source": "builtin"}
    }
