"""Encoders, reward signals and trainers in a file of the user, without a package, in real runs."""

import pickle
import re
import sys
from pathlib import Path

import pytest
from killed_runs import whole_and_killed
from refusals import refusal

import pipeline
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import SettingsError, TrainingError
from pipeline.plugins import digests
from pipeline.settings import load_run_settings, to_mapping
from pipeline.simulators import registry
from pipeline.trainer.checkpoints.file import load_checkpoint
from pipeline.trainer.checkpoints.restore import load_policy

SUPPORT = Path(__file__).parents[1] / "support"
PAGE = Path(__file__).parents[2] / "docs/how-to/plugins.md"
SMALL = {
    "ppo": {"buffer_size": 192, "batch_size": 64},
    "poca": {"buffer_size": 192, "batch_size": 64},
    "sac": {"buffer_init_steps": 64, "steps_per_update": 16, "save_replay_buffer": True},
    "xqc": {"buffer_init_steps": 64, "steps_per_update": 16, "batch_size": 64},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("late", "my_parts", "my_trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of another test's folder
    return tmp_path


def settings(trainer="ppo", *, signals=True, hyperparameters=None, **network):
    mine = {"class": "own_parts:Visits", "strength": 0.05, "gamma": 0.95}
    gamma = {"gamma": 0.95} if signals else {}
    behavior = {
        "trainer_type": trainer,
        "hyperparameters": SMALL[trainer] if hyperparameters is None else hyperparameters,
        "network_settings": {"hidden_units": 16, "encoder": "own_parts:Residual", **network},
        "reward_signals": {"extrinsic": gamma, **({"mine": mine} if signals else {})},
        "max_steps": 600,
        "summary_freq": 200,
    }
    return {"behaviors": {"3DBall": behavior}}


def train(run_dir, run, **options):
    env = InProcessEnvironment(registry.make("balance_ball", seed=3, n_agents=8))
    return pipeline.train([env], run, seed=5, run_dir=run_dir, **options).behaviors["3DBall"]


@pytest.mark.parametrize(
    "trainer",
    ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sac", "xqc"))],
)
def test_encoder_and_reward_signal_of_the_user_are_used_in_a_run_of_each_trainer(tmp_path, trainer):
    result = train(tmp_path / "run", settings(trainer))
    state = load_checkpoint(result.checkpoint)
    assert int(state["learner"]["algorithm"]["signals"]["mine"]["counts"].sum()) >= 400
    assert state["settings"]["reward_signals"]["mine"]["class"] == "own_parts:Visits"
    saved = load_policy(result.checkpoint)
    assert type(saved.policy.actor.body.encoders["0"].network).__name__ == "Residual"
    assert publish(result.checkpoint, tmp_path / "onnx")["rows"] > 0


@pytest.mark.parametrize("trainer", ["ppo", "sac", "poca"])
def test_policies_with_chosen_activation_layer_widths_and_layer_norm_are_trained_and_exported(
    tmp_path, trainer
):
    network = {"activation": "elu", "hidden_units": [16, 32], "layer_norm": True, "encoder": None}
    run = settings(trainer, signals=False, **network)
    result = train(tmp_path / "run", run)
    assert publish(result.checkpoint, tmp_path / "onnx")["rows"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"network_settings": {"encoder": "my_nets:Encoder"}}, "there is no my_nets.py in the"),
        ({"network_settings": {"encoder": "broken:Encoder"}}, "ZeroDivisionError: .*py:1"),
        ({"network_settings": {"encoder": "own_parts:Narrow"}}, "must give"),
        ({"network_settings": {"encoder": "Encoder"}}, "'Encoder' is not allowed"),
        ({"network_settings": {"hidden_units": []}}, "hidden_units: needs at least one width"),
        ({"network_settings": {"activation": "sine"}}, "'sine' is not allowed"),
        ({"reward_signals": {"mine": {"class": "own_parts:Visit"}}}, "did you mean 'own_parts:Vis"),
        ({"reward_signals": {"mine": {"class": "own_parts:Narrow"}}}, "a RewardSignalSettings"),
        ({"reward_signals": {"mine": {"class": "own_parts:TwoColumns"}}}, r"\[\d+, 1\], but must"),
        ({"reward_signals": {"mine": {"class": "own_parts:BrokenSignal"}}}, "KeyError: .*py:"),
        ({"reward_signals": {"mine": {"class": "own_parts:Visits", "bits": 3}}}, "key 'bits'"),
        ({"trainer_type": "own_parts:Visits"}, "or its `settings_class` is not a HyperparameterS"),
    ],
)  # fmt: skip
def test_mistake_in_a_class_of_the_user_is_reported_in_one_line(tmp_path, change, said):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    run = settings()
    run["behaviors"]["3DBall"] |= change
    assert re.search(said, refusal(SettingsError, train, tmp_path / "run", run))


@pytest.mark.parametrize("network", [{"activation": "relu"}, {"layer_norm": True}])
def test_xqc_refuses_a_chosen_activation_and_layer_norm(tmp_path, network):
    with pytest.raises(SettingsError, match=r"network_settings\.\w+: trainer_type xqc has"):
        train(tmp_path / "run", settings("xqc", signals=False, encoder=None, **network))


def test_settings_with_classes_of_the_user_are_equal_after_writing_reading_and_pickling():
    run = load_run_settings(None, overrides=settings())
    again = load_run_settings(None, overrides=to_mapping(run))
    assert again == run
    assert pickle.loads(pickle.dumps(run)) == run  # noqa: S301  # ours


def test_digests_of_a_class_cover_its_imported_files_and_change_if_one_of_these_files_changes(
    tmp_path,
):
    (tmp_path / "my_nets.py").write_text("import helper\nfrom pieces import part\n")
    (tmp_path / "helper.py").write_text("import os\n")
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces/__init__.py").write_text("from . import part\n")
    (tmp_path / "pieces/part.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    before = digests("my_nets:Encoder")
    assert sorted(before) == ["helper.py", "my_nets.py", "pieces/__init__.py", "pieces/part.py"]
    (tmp_path / "helper.py").write_text("import sys\n")
    changed = {
        name for name, digest in digests("my_nets:Encoder").items() if digest != before[name]
    }
    assert changed == {"helper.py"}


def test_policy_is_loaded_with_a_warning_if_the_file_of_the_encoder_has_changed(
    tmp_path, caplog, monkeypatch
):
    source = (SUPPORT / "own_parts.py").read_text()
    (tmp_path / "my_parts.py").write_text(source)
    run = settings(signals=False, encoder="my_parts:Residual")
    result = train(tmp_path / "run", run)
    assert list(load_checkpoint(result.checkpoint)["files"]) == ["my_parts.py"]
    caplog.clear()
    load_policy(result.checkpoint)
    assert not caplog.text
    (tmp_path / "my_parts.py").write_text(source + "# changed\n")
    load_policy(result.checkpoint)
    assert re.search(r"policy was trained with another version of my_parts.py; it", caplog.text)


LATE = """
import torch
from pipeline.algos.reward_signals import RewardSignal

class Encoder(torch.nn.Linear):
    n = 0

    def __init__(self, shape, output):
        super().__init__(*shape, output)

    def forward(self, x):
        self.n += 1
        if self.n > 40:
            raise IndexError("late")
        return super().forward(x)

class Signal(RewardSignal):
    def __init__(self, spec, settings, *, seed, device):
        self.n = 0

    def rewards(self, rows):
        self.n += 1
        return torch.zeros(len(rows.reward)) / (1 if self.n < 3 else {}["late"])

"""
LATE_ENV = """
import gymnasium, numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)
    n = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(4, np.float32), {}

    def step(self, action):
        self.n += 1
        assert self.n < 25, "late"
        return self.np_random.random(4, np.float32), 1.0, self.n % 7 == 0, False, {}
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"network_settings": {"encoder": "late:Encoder"}}, r"IndexError: late \(late.py:14\)"),
        ({"reward_signals": {"x": {"class": "late:Signal"}}}, r"KeyError: 'late' \(late.py:23\)"),
        ({}, r"AssertionError: late \(late.py:15\)"),
    ],
)  # fmt: skip
def test_exception_in_code_of_the_user_during_training_is_one_line_and_the_state_is_saved(
    tmp_path, change, said
):
    (tmp_path / "late.py").write_text(LATE if change else LATE_ENV)
    behavior = {"hyperparameters": SMALL["ppo"], "max_steps": 2000, "trainer_type": "ppo"} | change
    run, folder = {"default_settings": behavior}, tmp_path / "run"
    env = "balance_ball" if change else "late:Env"
    options = {"seed": 3, "n_agents": 8, "run_dir": folder}
    with pytest.raises(
        TrainingError, match=f"{said}; it came at step .*; resume continues"
    ) as told:
        pipeline.train(env, run, **options)
    assert told.value.__cause__ is not None
    assert "\n" not in str(told.value)
    (state,) = (load_checkpoint(path) for path in folder.glob("*/checkpoint.pt"))
    assert state["learner"]["step"] > 0


@pytest.mark.slow
def test_command_reports_the_last_error_of_an_environment_in_its_own_process(tmp_path, capsys):
    from pipeline.cli.main import main

    # The build of the executable plays a few steps, too.
    (tmp_path / "late.py").write_text(LATE_ENV.replace("25", "600"))
    (tmp_path / "run.yaml").write_text("default_settings: {trainer_type: ppo, max_steps: 20000}\n")
    assert main(["learn", "run.yaml", "--env", "late:Env", "--run-id", "x"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert "| ERROR late:Env: AssertionError: late (late.py:15) |" in line
    assert "Traceback" in (tmp_path / "results/x/run_logs/Player-0.log").read_text()


@pytest.mark.slow
def test_killed_and_continued_run_with_classes_and_callback_of_the_user_gives_the_same_bytes(
    tmp_path,
):
    run = settings()
    checkpoints, counts = whole_and_killed(tmp_path, run, "balance_ball", kill_at=2, first=SUPPORT)
    exports = [publish(path, path.parent / "onnx")["sha256"] for path in checkpoints]
    assert exports[0] == exports[1]
    assert counts[0] == counts[1]
    assert float(counts[0].split()[1]) == 2
    assert checkpoints[0].read_bytes() == checkpoints[1].read_bytes()


def test_on_policy_trainer_of_the_guide_trains_and_exports_a_policy(tmp_path):
    section = PAGE.read_text().partition("\n### On-policy, in one file\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 30
    (tmp_path / "my_trainer.py").write_text(code)
    hyperparameters = {"buffer_size": 64, "learning_rate": 0.002}
    run = settings("ppo", signals=False, hyperparameters=hyperparameters, encoder=None)
    run["behaviors"]["3DBall"]["trainer_type"] = "my_trainer:A2C"
    result = train(tmp_path / "run", run)
    assert result.n_updates >= 5
    assert load_checkpoint(result.checkpoint)["settings"]["trainer_type"] == "my_trainer:A2C"
    assert publish(result.checkpoint, tmp_path / "onnx")["rows"] > 0
